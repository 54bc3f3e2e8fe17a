"""`graphwright demo`: the main features on the bundled model, each chapter with its line of Python."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from graphwright.cli.common import (
    FAILED,
    Debug,
    Json,
    Overwrite,
    Quiet,
    Seed,
    Threads,
    bar,
    colours,
    command,
    emit_json,
    say,
    set_threads,
)
from graphwright.cli.demo_report import write_report

PROMPT = "The following"
BRANCH, SKIP = ("layers.1.mlp.down", "layers.1.out"), ("layers.0.out", "layers.2.out")


@dataclass(slots=True)
class Chapter:
    """One step of the demo: title, Python code, results and checks."""

    title: str
    code: str
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    seconds: float = 0.0


@command("graphwright demo --out graphwright-demo --quick")
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.")] = Path("graphwright-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Use a tenth of the text and 4 training steps.")] = False,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Show the main features in twelve chapters.

    On the bundled model: open, draw, measure, diagnose, cut, undo, prune, export, add a skip, train, export, undo.
    Writes report.html, model.html, model.svg, receipt.json, and the pruned, exported and saved models.
    """
    from graphwright.files import atomic_directory

    set_threads(threads)
    started = perf_counter()
    show = not (as_json or quiet)
    with atomic_directory(out, overwrite=overwrite) as folder:
        demo_run = _Demo(folder, quick, seed, quiet or as_json, show)
        chapters = demo_run.run()
        facts = {
            "seconds": round(perf_counter() - started, 2),
            "ok": all(all(c.checks.values()) for c in chapters),
            "chapters": [
                {"title": c.title, "code": c.code, "seconds": round(c.seconds, 3), "facts": c.facts, "checks": c.checks}
                for c in chapters
            ],
        }
        (folder / "demo.json").write_text(json.dumps({"schema": 1, **facts}, indent=1) + "\n", encoding="utf-8")
        write_report(folder / "report.html", chapters, demo_run, facts["seconds"])
    if as_json:
        emit_json({**facts, "out": str(out)})
    elif show:
        say(f"\n{facts['seconds']:.0f} s in total. Open {out}/report.html, then try:")
        say(
            f"  graphwright inspect {out}/edited\n  graphwright verify {out}/exported --trust-code\n"
            f"  graphwright diff bundled {out}/edited"
        )
    return 0 if facts["ok"] else FAILED


class _Demo:
    """The chapters in order, with the state that later ones share."""

    def __init__(self, folder: Path, quick: bool, seed: int, silent: bool, show: bool) -> None:
        self.folder, self.quick, self.seed, self.silent, self.show = folder, quick, seed, silent, show
        self.chapters: list[Chapter] = []
        self.losses: list[float] = []
        self.receipt: Any = None

    def run(self) -> list[Chapter]:
        """Run all chapters."""
        steps: list[tuple[str, str, Callable[[Chapter], None]]] = [
            ("open", 'model = gw.open("bundled")', self.open),
            ("draw", 'p = model.program; p.to_svg("model.svg"); p.to_html("model.html")', self.draw),
            ("measure", "model.perplexity(held_out); model.generate(prompt, 160, temperature=0.7)", self.measure),
            ("diagnose", "model.diagnose(text)", self.diagnose),
            (
                "cut a branch while it runs",
                'with p.edit("cut") as e: e.cut("layers.1.mlp.down -> layers.1.out")',
                self.cut,
            ),
            ("undo", "p.undo()", self.undo),
            ("prune", "report = model.prune(surgery.Ratio(0.3))", self.prune),
            (
                "export the pruned model",
                'model.export("pruned"); model.export("pruned-true-size", prefer="size")',
                self.export_pruned,
            ),
            ("add a skip", 'with p.edit("skip") as e: e.link("layers.0.out", "layers.2.out", zeros)', self.skip),
            ("train the edited model", 'with p.edit("train"): Trainer(model, text, recipe).run()', self.train),
            ("export, checked by transformers", 'receipt = model.export("exported")', self.export),
            ("undo everything", "p.undo(2)", self.undo_all),
        ]
        for number, (title, code, step) in enumerate(steps, 1):
            chapter = Chapter(title, code)
            if self.show:
                bold, dim, off = ("\033[1m", "\033[2m", "\033[0m") if colours(sys.stdout) else ("", "", "")
                say(f"\n{bold}{number}. {title}{off}\n   {dim}>>> {code}{off}")
            started = perf_counter()
            step(chapter)
            chapter.seconds = perf_counter() - started
            self.chapters.append(chapter)
            if self.show:
                for line in chapter.lines:
                    say(f"   {line}")
                for what, passed in chapter.checks.items():
                    say(f"   {'ok    ' if passed else 'FAILED'} {what}")
        return self.chapters

    # -- chapters ----------------------------------------------------------------------------------------------------
    def open(self, c: Chapter) -> None:
        import graphwright as gw

        load = gw.open  # the time excludes the import of the package
        started = perf_counter()
        self.model = load("bundled")
        ms = (perf_counter() - started) * 1e3
        self.p = self.model.program
        facts = self.model.inspect()
        touched = sum(v.data.storage.touched for v in self.p.weights.values() if v.data.storage.readonly)
        c.facts = {
            "ms": round(ms, 1),
            "parameters": facts.parameters,
            "bytes": facts.nbytes,
            "nodes": facts.nodes,
            "weights_read": touched,
        }
        c.lines = [*facts.text(2).splitlines(), f"opened in {ms:.1f} ms from config and headers alone"]
        c.checks = {"no weight byte was read": touched == 0}

    def draw(self, c: Chapter) -> None:
        text = self.p.to_svg(self.folder / "model.svg")
        c.facts = {"bytes": len(text)}
        self.p.to_html(self.folder / "model.html")
        c.lines = [f"model.svg, {len(text):,} bytes; in model.html blocks open with a click"]

    def measure(self, c: Chapter) -> None:
        from graphwright.models.bundled import pydoc_split

        self.train_text, held_out = pydoc_split()
        self.held_out = held_out[:3200] if self.quick else held_out
        self.before = self._score()
        made = self.model.generate(PROMPT, 160, temperature=0.7, seed=self.seed)
        self.logits = self.model.logits(self._ids())
        self.hash = self.p.hash()
        c.facts = {
            "bits_per_byte": self.before,
            "text": made.text,
            "bytes_per_s": round(made.tokens_per_s),
            "hash": self.hash,
        }
        c.lines = [
            f"{self.before:.4f} bits per byte on {len(self.held_out.encode()):,} held-out bytes",
            *_quoted(PROMPT + made.text),
            f"{made.tokens_per_s:,.0f} bytes/s",
        ]
        c.checks = {"better than 2 bits per byte": self.before < 2}

    def cut(self, c: Chapter) -> None:
        from graphwright.models import StaleCache

        ids = self._ids()
        cache = self.model.new_cache(len(ids) + 2, kind="static")
        cache.step(ids[None])
        started = perf_counter()
        with self.p.edit("cut the MLP branch of block 1", tool="graphwright demo") as e:
            e.cut(" -> ".join(BRANCH))
        try:
            cache.check()
            refused = False
        except StaleCache:
            refused = True
        self.model.reprefill(cache)
        cache.step(ids[None, -1:])
        ms = (perf_counter() - started) * 1e3
        damaged = self._score()
        text = self.model.generate(PROMPT, 80, temperature=0.7, seed=self.seed).text
        c.facts = {"edge": " -> ".join(BRANCH), "ms_to_next_byte": round(ms, 1), "bits_per_byte": damaged, "text": text}
        c.lines = [
            f"cut {' -> '.join(BRANCH)}; the next byte came after {ms:.0f} ms, including a new prefill",
            f"{self.before:.4f} -> {damaged:.4f} bits per byte",
            *_quoted(PROMPT + text),
        ]
        c.checks = {"the stale cache was refused": refused, "the text gets worse": damaged > self.before}

    def undo(self, c: Chapter) -> None:
        import numpy as np

        started = perf_counter()
        self.p.undo()
        ms = (perf_counter() - started) * 1e3
        c.facts = {"ms": round(ms, 2)}
        c.lines = [f"undone in {ms:.1f} ms"]
        c.checks = {
            "logits are equal bit for bit": bool(np.array_equal(self.model.logits(self._ids()), self.logits)),
            "the hash is that of chapter 3": self.p.hash() == self.hash,
        }

    def diagnose(self, c: Chapter) -> None:
        found = self.model.diagnose(self.held_out[:600])
        with self.p.edit("a defect", tool="graphwright demo", check=False) as e:
            e.cut("layers.2.mid -> layers.2.out")
        planted = self.model.diagnose()
        fixed = planted.fix_all()
        left = self.model.diagnose()
        self.p.undo(1 + bool(fixed))
        c.facts = {
            "findings": len(found),
            "planted": [f.kind for f in planted],
            "fixes": len(fixed),
            "left": len(left),
        }
        c.lines = [str(found), "with the residual edge of block 2 cut:", *str(planted).splitlines(),
                   f"repaired by {len(fixed)} fix in one edit: {left}"]  # fmt: skip
        c.checks = {
            "an intact model has no findings": not found,
            "only the planted defect is found": [f.kind for f in planted] == ["missing_residual"],
            "its repair leaves no finding": not left,
        }

    def prune(self, c: Chapter) -> None:
        from graphwright.surgery import Calibration, Ratio

        data = Calibration.of(self.model, max_tokens=1024 if self.quick else 8192, context=256)
        with bar(self.silent) as report:
            found = self.model.prune(Ratio(0.3), data, report=report)
        after = self._score()
        facts = found.to_json()
        c.facts = {
            "bits_per_byte": after,
            "before": facts["before"],
            "after": facts["after"],
            "layers": facts["layers"],
        }
        c.lines = [*str(found).splitlines(), f"{self.before:.4f} -> {after:.4f} bits per byte on all held-out bytes"]
        c.checks = {"30 % of the blocks' parameters are gone": found.reached["after"] <= found.reached["asked"]}

    def export_pruned(self, c: Chapter) -> None:
        from math import isfinite

        levels, sizes = {}, {}
        for name, prefer in (("pruned", "original"), ("pruned-true-size", "size")):
            with bar(self.silent) as report:
                receipt = self.model.export(self.folder / name, prefer=prefer, report=report)
            error = receipt.check.get("export_error", {}).get("max_rel", 0.0)
            levels[name] = receipt.level
            sizes[name] = (self.folder / name / "model.safetensors").stat().st_size
            proof = f"largest relative error {error:.1e}" if receipt.confirmed else "not confirmed: needs the extra hf"
            c.lines.append(f"{name}: export level {receipt.level}, {sizes[name]:,} bytes, {proof}")
            c.checks[f"{name} computes the same"] = isfinite(error) and error <= 2e-2
        c.facts = {"levels": levels, "bytes": sizes}
        c.checks["the original class loads it, with zeros for removed weights"] = levels["pruned"] == 3
        c.checks["the export of true sizes is smaller"] = sizes["pruned-true-size"] < sizes["pruned"]
        self.p.undo()
        c.checks["after undo the hash is that of chapter 3"] = self.p.hash() == self.hash

    def skip(self, c: Chapter) -> None:
        import numpy as np

        width = self.model.dims.hidden
        with self.p.edit("skip from block 0 to block 2", tool="graphwright demo") as e:
            e.link(*SKIP, np.zeros((width, width), np.float32), name="layers.2.skip")
        same = np.array_equal(self.model.logits(self._ids()), self.logits)
        self.picture = self.p.to_svg(diff=self._original())
        c.facts = {"nodes": len(self.p), "parameters": self.model.inspect().parameters}
        c.lines = [
            f"a projection {width} x {width} from {SKIP[0]} into {SKIP[1]}, zero at first; "
            f"{c.facts['parameters']:,} parameters now"
        ]
        c.checks = {"the skip does not change the logits": bool(same)}

    def train(self, c: Chapter) -> None:
        from graphwright.models.train import Trainer, TrainOptions

        recipe = TrainOptions(
            steps=4 if self.quick else 60,
            batch=4 if self.quick else 12,
            window=128 if self.quick else 256,
            lr=6e-5,
            warmup=6,
            floor=0.1,
            seed=self.seed + 1,
        )
        trainer = Trainer(self.model, self.train_text, recipe)
        with bar(self.silent) as report, self.p.edit("train the edited model", tool="graphwright demo"):
            result = trainer.run(report=report)
        self.losses = result.losses
        after = self._score()
        weight = self.p.weights["layers.2.skip.weight"].numpy()
        c.facts = {
            "steps": len(result.losses),
            "loss": [round(x, 4) for x in result.losses],
            "tokens_per_s": round(result.tokens_per_s),
            "bits_per_byte": after,
            "skip_norm": float((weight.astype("f8") ** 2).sum() ** 0.5),
        }
        c.lines = [
            f"{len(result.losses)} steps, {result.tokens_per_s:,.0f} bytes/s; forward to AdamW is one plan",
            f"loss {spark(result.losses)} {result.losses[0]:.3f} -> {result.losses[-1]:.3f} nats per byte",
            f"{self.before:.4f} -> {after:.4f} bits per byte; the skip has grown to norm {c.facts['skip_norm']:.3f}",
        ]
        c.checks = {"the gradient reached the skip": c.facts["skip_norm"] > 0}
        if not self.quick:
            c.checks["the score is better than before the edit"] = after < self.before

    def export(self, c: Chapter) -> None:
        with bar(self.silent) as report:
            self.receipt = self.model.export(self.folder / "exported", report=report)
        self.model.save(self.folder / "edited")
        shutil.copyfile(self.folder / "exported" / "receipt.json", self.folder / "receipt.json")
        rows = self.receipt.summary()
        c.facts = {label: value for label, value in rows}
        c.lines = [f"{label:<22} {value}" for label, value in rows]
        if self.receipt.confirmed:
            c.checks = {"transformers computes equal logits in a separate process": True}
        else:
            c.lines.append("not checked: transformers is not installed (pip install 'graphwright[hf]')")

    def undo_all(self, c: Chapter) -> None:
        import filecmp

        import numpy as np

        self.p.undo(2)
        copy = self.folder / "copy"
        self.model.export(copy, check="none")
        same = filecmp.cmp(copy / "model.safetensors", self.model.directory / "model.safetensors", shallow=False)
        shutil.rmtree(copy)
        c.facts = {"journal": len(self.p.journal), "journal_hash": self.p.journal.hash}
        c.lines = [f"{len(self.p.journal)} journal entries, chained to {self.p.journal.hash[:16]}"]
        c.checks = {
            "the hash is that of chapter 3": self.p.hash() == self.hash,
            "logits are equal bit for bit": bool(np.array_equal(self.model.logits(self._ids()), self.logits)),
            "an export has the bytes of the original file": same,
        }
        self.p.journal.verify()

    # -- helpers -----------------------------------------------------------------------------------------------------
    def _ids(self) -> Any:
        from graphwright.models.generation.text import prompt_ids

        return prompt_ids(self.model, self.held_out[:200])

    def _score(self) -> float:
        with bar(self.silent) as report:
            return round(self.model.perplexity(self.held_out, report=report).bits_per_byte, 5)

    def _original(self) -> Any:
        import graphwright as gw

        return gw.open("bundled").program


def spark(values: list[float], width: int = 40) -> str:
    """Draw values as a line of block characters."""
    step = max(1, len(values) // width)
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int((m - low) / (high - low or 1) * 7.999)] for m in means)


def _quoted(text: str, width: int = 96) -> list[str]:
    import textwrap

    return ["| " + line for part in text.splitlines() for line in (textwrap.wrap(part, width) or [""])]
