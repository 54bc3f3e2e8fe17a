"""Plant twelve defects in an intact model, find each with evidence, repair them, and draw the model before and after.

`python examples/defect_detection.py` takes the bundled model, or a checkpoint directory:
`python examples/defect_detection.py path/to/checkpoint`. Pictures are Graphviz DOT files in --out.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright.surgery import diagnose
from graphwright.testing.defects import KINDS_OF_DEFECT, Planted, plant

LATE = ("unreachable", "interface", "cycle", "orphan_source")  # a program with these defects cannot run


def one_by_one(p: gw.Program, trials: int) -> tuple[int, int]:
    """Plant each defect alone, several times; count the correct findings and all others."""
    found, others = 0, 0
    for kind in KINDS_OF_DEFECT:
        for seed in range(trials):
            planted = plant(p, kind, seed)
            report = diagnose(p)
            hits = [f for f in report if f.kind == kind and planted.element in "\n".join((*f.paths, f.where))]
            found += len(hits) == 1
            others += len(report) - len(hits)
            p.undo()
    return found, others


def all_at_once(model: gw.Model) -> list[Planted]:
    """Plant one defect of each kind so that none hides another."""
    p, planted = model.program, list[Planted]()
    for kind in [*(k for k in KINDS_OF_DEFECT if k not in LATE), *LATE]:
        for seed in range(10):
            try:
                planted.append(plant(p, kind, seed))
            except gw.GraphwrightError:
                break  # no site is left
            if sorted(f.kind for f in diagnose(model)) == sorted(d.kind for d in planted):
                break
            p.undo()
            planted.pop()
    return planted


def draw(p: gw.Program, path: Path, overlay: dict) -> None:
    """Draw a DOT file, coloured by severity, with the modules open that have findings."""
    above = {p.path(node).rsplit(".", k)[0] for node in overlay for k in range(1, 6) if "." in p.path(node)}
    p.to_dot(path, color=overlay or None, expanded=above)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="bundled", help="a directory; the bundled model by default")
    parser.add_argument("--out", type=Path, help="directory for before.dot and after.dot; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="plant each defect once")
    args = parser.parse_args()
    model = gw.open(args.checkpoint)
    p = model.program

    sound = diagnose(model)
    print(sound, "\n")
    if sound:
        print("the model already has defects; none are planted")
        return
    trials = 1 if args.quick else 5
    found, others = one_by_one(p, trials)
    total = trials * len(KINDS_OF_DEFECT)
    print(f"one at a time: {found} of {total} found correctly, {others} other findings\n")
    assert (found, others) == (total, 0)

    before = p.hash()
    p.mark("sound")
    ids = np.arange(24)[None] % model.vocab
    logits = model.logits(ids)
    planted = all_at_once(model)
    report = diagnose(model)
    print(f"{len(planted)} at once: {report}\n")
    for defect in planted:
        witness = next(f for f in report if f.kind == defect.kind)
        assert defect.element in "\n".join((*witness.paths, witness.where)), (defect, witness)
    assert len(report) == len(planted)

    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        draw(p, out / "before.dot", report.overlay())
        repaired = report.fix_all(only=None)
        left = diagnose(model)
        draw(p, out / "after.dot", left.overlay())
        assert (out / "before.dot").read_text() != (out / "after.dot").read_text()
        if args.out:
            print(f"wrote {out}/before.dot and {out}/after.dot")
    print(f"repaired {len(repaired)} in one edit: {left}")
    drift = np.abs(model.logits(ids) - logits).max() / np.abs(logits).max()
    print(f"the model runs again; the bottleneck lost information, so logits differ by {drift:.2g} until it is trained")
    assert not left
    assert p.valid

    p.rollback("sound")
    assert p.hash() == before, "undo brings back every byte"
    print("undone to the start, bit for bit")


if __name__ == "__main__":
    main()
