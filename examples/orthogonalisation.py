"""Orthogonalise the attention of a model, as an exact split or without the remaining factor.

`python examples/orthogonalisation.py` takes the bundled model; `--model DIR` takes yours. For each method: the error of
orthogonality, the condition number before and after, the gain of a perturbation of the input, and the change of the
logits, with the remaining factor as a node and without it.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import surgery as sg
from graphwright.surgery.orthogonal.methods import condition, gain, gram_error

METHODS = ("polar", "qr", "newton_schulz")


def weight(p: gw.Program, path: str) -> np.ndarray:
    return p.weights.array(p.key(p.node(path))).to_numpy("float64")


def one_matrix(w: np.ndarray) -> None:
    print(f"a matrix {w.shape[0]}x{w.shape[1]}: condition {condition(w):.4g}, a perturbation grows by {span(gain(w))}")
    for name, q in (("polar", sg.polar(w)), ("qr", sg.qr(w)), ("newton_schulz", sg.newton_schulz(w))):
        after = condition(q) - 1
        assert after <= 1e-8
        print(
            f"  {name:<14} error {gram_error(q):.1e}  condition - 1 {after:.1e}  "
            f"growth {span(gain(q))}  moved {np.linalg.norm(w - q) / np.linalg.norm(w):.3f}"
        )


def span(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f} to {pair[1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a Hugging Face directory")
    parser.add_argument("--where", default="layers.*.attn.{q,k,v,o}", help="pattern of the matrices")
    parser.add_argument("--quick", action="store_true", help="the first layer, 128 tokens")
    args = parser.parse_args()
    compared(args.model, args.where.replace("*", "0", 1) if args.quick else args.where, 128 if args.quick else 1024)


def compared(directory: str, where: str, tokens: int) -> dict[str, float]:
    """Print the table; returns method and fold -> how far logits differ, relative to the largest."""
    model = gw.open(directory, dtype="float64", compute="float64")
    p, start, moved = model.program, model.program.hash(), dict[str, float]()
    data = sg.Calibration.of(model, max_tokens=tokens, context=64)
    one_matrix(weight(p, p.path(p.select(where, op="param").nodes[0])))

    heads = ("matrices", 8), ("error", 9), ("logits", 9), ("KL, nats", 9), ("same", 7)
    print(f"\n{'method':<14} {'per':<7} {'fold':<7} " + " ".join(f"{name:>{width}}" for name, width in heads))
    runs = [(method, "matrix", fold) for method in METHODS for fold in ("insert", "none")]
    runs += [("polar", "head", "insert"), ("polar", "head", "none"), ("polar", "matrix", "scale")]
    for method, per, fold in runs:
        report = sg.orthogonalize(p, where, method, per=per, fold=fold, calibration=data)
        drift = report.drift
        assert drift is not None
        if fold == "insert":
            assert drift.relative <= 1e-8, "W = Q P is the same function"
        print(
            f"{method:<14} {per:<7} {fold:<7} {len(report.rows):>8} {report.max_error:>9.1e} "
            f"{drift.relative:>9.1e} {drift.kl:>9.2e} {drift.same_top:>7.1%}"
        )
        moved[f"{method}, per {per}, {fold}"] = drift.relative
        p.undo()

    report = sg.orthogonalize(p, where.replace("{q,k,v,o}", "v"), per="head", fold="absorb", calibration=data)
    assert report.drift is not None
    assert report.drift.relative <= 1e-8, "o takes what v loses"
    facts = f"{len(report.rows):>8} {report.max_error:>9.1e} {report.drift.relative:>9.1e}"
    print(f"{'polar':<14} {'head':<7} {'absorb':<7} {facts}")
    moved["polar, per head, absorb"] = report.drift.relative
    p.undo()
    assert p.hash() == start, "undo brings back every byte"
    print("\nWithout the remaining factor the model changes; with it as a node, or in the next weight, it does not.")
    return moved


if __name__ == "__main__":
    main()
