"""A checkpoint through all features: load, run, save, damage and repair, orthogonalise, compress, prune, export.

Each step is checked by an independent computation, prints its cost, and is undone byte for byte before the next.
`python examples/pipeline.py` takes the bundled model, or a checkpoint directory.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

import graphwright as gw
from graphwright import surgery as sg
from graphwright.testing.defects import KINDS_OF_DEFECT, plant


class Workshop:
    """One model and the data that its operations learn from; each step yields what it found."""

    def __init__(self, checkpoint: str, folder: Path, quick: bool) -> None:
        self.model, self.folder, self.quick = gw.open(checkpoint), folder, quick
        self.p = self.model.program
        self.start = self.p.hash()
        self.ids = np.arange(48)[None] * 7 % self.model.vocab
        tokens = 1024 if quick else 8192
        self.data = sg.Calibration.of(self.model, max_tokens=tokens, context=128)

    def undo(self) -> None:
        self.p.undo()
        assert self.p.hash() == self.start, "undo brings back every byte"

    def load(self) -> Iterator[str]:
        found = self.model.inspect()
        assert not (report := self.model.diagnose()), report
        yield f"{found.parameters:,} parameters in {len(self.p.weights)} weights, {found.nodes} nodes, no defects"

    def run(self) -> Iterator[str]:
        whole = self.model.logits(self.ids)
        cache = self.model.new_cache(64)
        sequence = cache.sequence()
        pieces = [self.model.prefill(sequence, self.ids[:, :40])]
        pieces += [self.model.prefill(sequence, self.ids[:, i : i + 1]) for i in range(40, 48)]
        off = np.abs(pieces[-1].reshape(-1) - whole[0, -1]).max() / np.abs(whole).max()
        assert off <= 1e-5
        yield f"logits {whole.shape}, with a cache the same within {off:.0e}"

    def save(self) -> Iterator[str]:
        receipt = self.model.export(self.folder / "untouched", check="none")
        for before in self.model.directory.glob("*.safetensors"):
            after = self.folder / "untouched" / before.name
            assert before.read_bytes() == after.read_bytes()
        yield f"untouched: export level {receipt.level}, the same bytes"

    def repair(self) -> Iterator[str]:
        repaired, kinds = 0, KINDS_OF_DEFECT[::4] if self.quick else KINDS_OF_DEFECT
        for kind in kinds:
            plant(self.p, kind, 0)
            report = self.model.diagnose()
            (found,) = report
            assert found.kind == kind, (found.kind, kind)
            if found.fixes:
                report.fix(found)
                assert not self.model.diagnose()
                repaired += 1
                self.p.undo()
            self.undo()
        yield f"{len(kinds)} defects planted one by one, each found as what it is, {repaired} repaired"

    def orthogonalise(self) -> Iterator[str]:
        where = "layers.0.attn.{q,k,v,o}" if self.quick else "layers.*.attn.{q,k,v,o}"
        for fold in ("insert", "none"):
            report = self.model.orthogonalize(where, fold=fold, calibration=self.data)
            drift = report.drift.relative
            assert drift <= 1e-2 if fold == "insert" else drift > 1e-2  # W = Q P, but for the rounding to bfloat16
            yield f"{fold:<7} {len(report.rows)} matrices, error {report.max_error:.1e}, logits differ by {drift:.1e}"
            self.undo()

    def compress(self) -> Iterator[str]:
        where = "layers.1.mlp.up"
        for budget in (0.2,) if self.quick else (0.05, 0.2):
            report = self.model.compress(where, "best", sg.Error(budget), calibration=self.data, dry_run=True)
            rows = ", ".join(f"{r.method} {r.ratio:.2f}" for r in report.rows)
            yield f"output error {budget:.0%}: parameters before by after: {rows}"
        report = self.model.compress("layers.*.mlp.{gate,up}", "asvd", sg.Error(0.2), calibration=self.data)
        assert report.after < report.before
        logits = self.model.logits(self.ids)
        sg.densify(self.p)
        off = np.abs(self.model.logits(self.ids) - logits).max() / np.abs(logits).max()
        assert off <= 1e-2
        yield f"asvd on gate and up: {report.ratio:.2f} times fewer parameters; as products again within {off:.0e}"
        self.p.undo()
        self.undo()

    def prune(self) -> Iterator[str]:
        for method in ("random", "greedy") if self.quick else ("random", "magnitude", "greedy"):
            report = self.model.prune(sg.Ratio(0.3), self.data, method=method, recipe="units", timed=False)
            nats = report.before["nats"], report.after["nats"]
            yield f"30 % of the blocks, {method:<9}: {nats[0]:.4f} -> {nats[1]:.4f} nats a token"
            if method != "greedy":
                self.undo()

    def export(self) -> Iterator[str]:
        for name, prefer in (("original class", "class"), ("true size", "size")):
            receipt = self.model.export(self.folder / prefer, prefer=prefer)
            size = sum(f.stat().st_size for f in (self.folder / prefer).glob("*.safetensors"))
            error = receipt.check["export_error"]["max_rel"]
            assert receipt.confirmed
            yield f"{name}: export level {receipt.level}, {size:,} bytes, transformers' logits within {error:.0e}"
            if self.quick:
                break
        self.undo()
        yield "undone: every byte as at the start"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="bundled", help="a directory; the bundled model by default")
    parser.add_argument("--quick", action="store_true", help="an eighth of the data, few defects, one layer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(args.checkpoint, Path(folder), args.quick)
        for step in ("load", "run", "save", "repair", "orthogonalise", "compress", "prune", "export"):
            started = perf_counter()
            for i, line in enumerate(getattr(workshop, step)()):
                print(f"{step if not i else '':<14} {line}", flush=True)
            print(f"{'':<14} {perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
