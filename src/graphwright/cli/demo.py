"""`graphwright demo`: the main features on the bundled model, each chapter with its line of Python."""

from __future__ import annotations

import filecmp
import json
import shutil
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from textwrap import wrap
from time import perf_counter
from typing import Annotated, Any, NamedTuple

from graphwright.cli.common import FAILED, Command, Output, Overwrite, Seed, bar, colours, flag, option, say, silent
from graphwright.cli.demo_report import write_report

PROMPT = "The following"
BRANCH, SKIP = "layers.1.mlp.down -> layers.1.out", ("layers.0.out", "layers.2.out")
Result = tuple[dict[str, Any], list[str], dict[str, bool]]
"""The facts of a chapter, its lines of text and its checks."""


class Chapter(NamedTuple):
    """One step of the demo: title, Python code, time, results and checks."""

    title: str
    code: str
    seconds: float
    facts: dict[str, Any]
    lines: list[str]
    checks: dict[str, bool]


@Command("graphwright demo --out graphwright-demo --quick")
def demo(
    out: Annotated[Path, option("DIR", "Directory to write.")] = Path("graphwright-demo"),
    quick: Annotated[bool, flag("--quick", "Use a tenth of the text and 4 training steps.")] = False,
    overwrite: Overwrite = False,
    seed: Seed = 0,
) -> Output:
    """Show the main features in twelve chapters.

    On the bundled model: open, draw, measure, diagnose, cut, undo, prune, export, add a skip, train, export, undo.
    Writes report.html, model.html, model.svg, receipt.json, and the pruned, exported and saved models.
    """
    from graphwright.files import atomic_directory

    started = perf_counter()
    with atomic_directory(out, overwrite=overwrite) as folder:
        run = _Demo(folder, quick, seed)
        chapters = run.run()
        seconds = round(perf_counter() - started, 2)
        rows = [
            {"title": c.title, "code": c.code, "seconds": round(c.seconds, 3), "facts": c.facts, "checks": c.checks}
            for c in chapters
        ]
        facts = {"seconds": seconds, "ok": all(all(c.checks.values()) for c in chapters), "chapters": rows}
        (folder / "demo.json").write_text(json.dumps({"schema": 1, **facts}, indent=1) + "\n", encoding="utf-8")
        write_report(folder / "report.html", chapters, run, seconds)
    text = (
        f"\n{seconds:.0f} s in total. Open {out}/report.html, then try:\n"
        f"  graphwright inspect {out}/edited\n  graphwright verify {out}/exported --trust-code\n"
        f"  graphwright diff bundled {out}/edited"
    )
    return Output({**facts, "out": str(out)}, "" if silent() else text, 0 if facts["ok"] else FAILED)


_STEPS: list[tuple[str, str, Callable[[_Demo], Result]]] = []


def _chapter(title: str, code: str) -> Callable[[Callable[[_Demo], Result]], Callable[[_Demo], Result]]:
    """Return a decorator that adds a method as the next chapter, with this title and line of Python."""

    def add(step: Callable[[_Demo], Result]) -> Callable[[_Demo], Result]:
        _STEPS.append((title, code, step))
        return step

    return add


class _Demo:
    """The chapters in order, and the state that later chapters read."""

    def __init__(self, folder: Path, quick: bool, seed: int) -> None:
        self.folder, self.quick, self.seed = folder, quick, seed
        self.losses: list[float] = []
        self.receipt: Any = None

    def run(self) -> list[Chapter]:
        chapters: list[Chapter] = []
        bold, dim, off = ("\033[1m", "\033[2m", "\033[0m") if colours(sys.stdout) else ("", "", "")
        show: Callable[[str], None] = (lambda text: None) if silent() else say
        for number, (title, code, step) in enumerate(_STEPS, 1):
            show(f"\n{bold}{number}. {title}{off}\n   {dim}>>> {code}{off}")
            started = perf_counter()
            facts, lines, checks = step(self)
            chapters.append(Chapter(title, code, perf_counter() - started, facts, lines, checks))
            for line in (*lines, *(f"{'ok    ' if passed else 'FAILED'} {what}" for what, passed in checks.items())):
                show(f"   {line}")
        return chapters

    @_chapter("open", 'model = gw.open("bundled")')
    def open(self) -> Result:
        from graphwright.models import open  # the time excludes the import of the package

        started = perf_counter()
        self.model = open("bundled")
        ms = (perf_counter() - started) * 1e3
        self.p = self.model.program
        found = self.model.inspect()
        read = sum(v.data.storage.touched for v in self.p.weights.values() if v.data.storage.readonly)
        facts = {"ms": round(ms, 1), "parameters": found.parameters, "bytes": found.nbytes, "nodes": found.nodes}
        lines = [*found.text(2).splitlines(), f"opened in {ms:.1f} ms from config and headers alone"]
        return {**facts, "weights_read": read}, lines, {"no weight byte was read": read == 0}

    @_chapter("draw", 'p = model.program; p.to_svg("model.svg"); p.to_html("model.html")')
    def draw(self) -> Result:
        self.p.to_svg(self.folder / "model.svg")
        size = (self.folder / "model.svg").stat().st_size
        self.p.to_html(self.folder / "model.html")
        return {"bytes": size}, [f"model.svg, {size:,} bytes; in model.html blocks open with a click"], {}

    @_chapter("measure", "model.perplexity(held_out); model.generate(prompt, 160, temperature=0.7)")
    def measure(self) -> Result:
        from graphwright.models.bundled import pydoc_split

        self.train_text, held_out = pydoc_split()
        self.held_out = held_out[:3200] if self.quick else held_out
        self.before = self._score()
        made = self.model.generate(PROMPT, 160, temperature=0.7, seed=self.seed)
        self.logits, self.hash = self._bits(), self.p.hash()
        speed = round(made.tokens_per_s)
        facts = {"bits_per_byte": self.before, "text": made.text, "bytes_per_s": speed, "hash": self.hash}
        lines = [
            f"{self.before:.4f} bits per byte on {len(self.held_out.encode()):,} held-out bytes",
            *_quoted(PROMPT + made.text),
            f"{made.tokens_per_s:,.0f} bytes/s",
        ]
        return facts, lines, {"better than 2 bits per byte": self.before < 2}

    @_chapter("diagnose", "model.diagnose(text=text)")
    def diagnose(self) -> Result:
        found = self.model.diagnose(text=self.held_out[:600])
        with self.p.edit("a defect", tool="graphwright demo", check=False) as e:
            e.cut("layers.2.mid -> layers.2.out")
        planted = self.model.diagnose()
        fixed = planted.fix_all()
        left = self.model.diagnose()
        self.p.undo(1 + bool(fixed))
        kinds = [f.kind for f in planted]
        facts = {"findings": len(found), "planted": kinds, "fixes": len(fixed), "left": len(left)}
        lines = [str(found), "with the residual edge of block 2 cut:", *str(planted).splitlines(),
                 f"repaired by {len(fixed)} fix in one edit: {left}"]  # fmt: skip
        checks = {
            "an intact model has no findings": not found,
            "only the planted defect is found": kinds == ["missing_residual"],
            "its repair leaves no finding": not left,
        }
        return facts, lines, checks

    @_chapter("cut a branch while it runs", f'with p.edit("cut") as e: e.cut("{BRANCH}")')
    def cut(self) -> Result:
        from graphwright.models import StaleCache

        ids = self._ids()
        cache = self.model.new_cache(len(ids) + 2, kind="static")
        cache.step(ids[None])
        started = perf_counter()
        with self.p.edit("cut the MLP branch of block 1", tool="graphwright demo") as e:
            e.cut(BRANCH)
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
        facts = {"edge": BRANCH, "ms_to_next_byte": round(ms, 1), "bits_per_byte": damaged, "text": text}
        lines = [
            f"cut {BRANCH}; the next byte came after {ms:.0f} ms, including a new prefill",
            f"{self.before:.4f} -> {damaged:.4f} bits per byte",
            *_quoted(PROMPT + text),
        ]
        return facts, lines, {"the stale cache was refused": refused, "the text gets worse": damaged > self.before}

    @_chapter("undo", "p.undo()")
    def undo(self) -> Result:
        started = perf_counter()
        self.p.undo()
        ms = (perf_counter() - started) * 1e3
        checks = {"logits are equal bit for bit": self._same_logits()}
        return {"ms": round(ms, 2)}, [f"undone in {ms:.1f} ms"], {**checks, **self._same_hash()}

    @_chapter("prune", "report = model.prune(surgery.Ratio(0.3))")
    def prune(self) -> Result:
        from graphwright.surgery import Calibration, Ratio

        data = Calibration.of(self.model, max_tokens=1024 if self.quick else 8192, context=256)
        with bar() as progress:
            found = self.model.prune(Ratio(0.3), data, progress=progress)
        after, measured = self._score(), found.to_json()
        facts = {"bits_per_byte": after, **{name: measured[name] for name in ("before", "after", "layers")}}
        lines = [*str(found).splitlines(), f"{self.before:.4f} -> {after:.4f} bits per byte on all held-out bytes"]
        reached = found.reached["after"] <= found.reached["asked"]
        return facts, lines, {"30 % of the blocks' parameters are gone": reached}

    @_chapter("export the pruned model", 'model.export("pruned"); model.export("pruned-true-size", prefer="size")')
    def export_pruned(self) -> Result:
        from graphwright.models.export.ladder import LEVELS

        levels, sizes, lines, checks = {}, {}, [], {}
        preferences: dict[str, Any] = {"pruned": "class", "pruned-true-size": "size"}
        for name, prefer in preferences.items():
            with bar() as progress:
                receipt = self.model.export(self.folder / name, prefer=prefer, progress=progress)
            error = receipt.check.get("export_error", {}).get("max_rel", 0.0)
            levels[name] = receipt.level
            sizes[name] = (self.folder / name / "model.safetensors").stat().st_size
            proof = f"largest relative error {error:.1e}" if receipt.confirmed else "not confirmed: needs the extra hf"
            lines.append(f"{name}: export level {receipt.level}, {sizes[name]:,} bytes, {proof}")
            checks[f"{name} computes the same"] = isfinite(error) and error <= 2e-2
        checks["the original class loads it, with zeros for removed weights"] = not LEVELS[levels["pruned"]].true_size
        checks["the export of true sizes is smaller"] = sizes["pruned-true-size"] < sizes["pruned"]
        self.p.undo()
        return {"levels": levels, "bytes": sizes}, lines, {**checks, **self._same_hash("after undo ")}

    @_chapter("add a skip", 'with p.edit("skip") as e: e.link("layers.0.out", "layers.2.out", zeros)')
    def skip(self) -> Result:
        import numpy as np

        import graphwright as gw

        width = self.model.dims.hidden
        with self.p.edit("skip from block 0 to block 2", tool="graphwright demo") as e:
            e.link(*SKIP, np.zeros((width, width), np.float32), name="layers.2.skip")
        same, size = self._same_logits(), self.model.inspect().parameters
        self.picture = self.p.to_svg(diff=gw.open("bundled").program)
        line = f"a projection {width} x {width} from {SKIP[0]} into {SKIP[1]}, zero at first; {size:,} parameters now"
        return {"nodes": len(self.p), "parameters": size}, [line], {"the skip does not change the logits": same}

    @_chapter("train the edited model", 'with p.edit("train"): Trainer(model, text, recipe).run()')
    def train(self) -> Result:
        from graphwright.models.train import Trainer, TrainOptions

        steps, batch, window = (4, 4, 128) if self.quick else (60, 12, 256)
        seed = self.seed + 1
        recipe = TrainOptions(steps=steps, batch=batch, window=window, lr=6e-5, warmup=6, floor=0.1, seed=seed)
        trainer = Trainer(self.model, self.train_text, recipe)
        with bar() as progress, self.p.edit("train the edited model", tool="graphwright demo"):
            result = trainer.run(progress=progress)
        losses = self.losses = result.losses
        after, weight = self._score(), self.p.weights["layers.2.skip.weight"].numpy()
        norm = float((weight.astype("f8") ** 2).sum() ** 0.5)
        facts = {
            "steps": len(losses),
            "loss": [round(x, 4) for x in losses],
            "tokens_per_s": round(result.tokens_per_s),
            "bits_per_byte": after,
            "skip_norm": norm,
        }
        lines = [
            f"{len(losses)} steps, {result.tokens_per_s:,.0f} bytes/s; forward to AdamW is one plan",
            f"loss {spark(losses)} {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte",
            f"{self.before:.4f} -> {after:.4f} bits per byte; the skip has grown to norm {norm:.3f}",
        ]
        checks = {"the gradient reached the skip": norm > 0}
        if not self.quick:
            checks["the score is better than before the edit"] = after < self.before
        return facts, lines, checks

    @_chapter("export, checked by transformers", 'receipt = model.export("exported")')
    def export(self) -> Result:
        with bar() as progress:
            self.receipt = self.model.export(self.folder / "exported", progress=progress)
        self.model.save(self.folder / "edited")
        shutil.copyfile(self.folder / "exported" / "receipt.json", self.folder / "receipt.json")
        rows = self.receipt.summary()
        lines = str(self.receipt).splitlines()
        if self.receipt.confirmed:
            return dict(rows), lines, {"transformers computes equal logits in a separate process": True}
        lines.append("not checked: transformers is not installed (pip install 'graphwright[hf]')")
        return dict(rows), lines, {}

    @_chapter("undo everything", "p.undo(2)")
    def undo_all(self) -> Result:
        self.p.undo(2)
        copy, journal = self.folder / "copy", self.p.journal
        self.model.export(copy, check="none")
        same = filecmp.cmp(copy / "model.safetensors", self.model.directory / "model.safetensors", shallow=False)
        shutil.rmtree(copy)
        journal.verify()
        lines = [f"{len(journal)} journal entries, chained to {journal.hash[:16]}"]
        checks = {"logits are equal bit for bit": self._same_logits()}
        checks["an export has the bytes of the original file"] = same
        return {"journal": len(journal), "journal_hash": journal.hash}, lines, {**self._same_hash(), **checks}

    # -- shared by chapters ------------------------------------------------------------------------------------------
    def _ids(self) -> Any:
        from graphwright.models.generation.text import prompt_ids

        return prompt_ids(self.model, self.held_out[:200])

    def _score(self) -> float:
        with bar() as progress:
            return round(self.model.perplexity(self.held_out, progress=progress).bits_per_byte, 5)

    def _bits(self) -> Any:
        """Return logits whose bits do not depend on whether native code is built yet."""
        return self.model.logits(self._ids(), deterministic=True)

    def _same_logits(self) -> bool:
        return self._bits().tobytes() == self.logits.tobytes()

    def _same_hash(self, when: str = "") -> dict[str, bool]:
        return {f"{when}the hash is that of chapter 3": self.p.hash() == self.hash}


def spark(values: list[float], width: int = 40) -> str:
    """Draw values as a line of block characters."""
    step = max(1, len(values) // width)
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int((m - low) / (high - low or 1) * 7.999)] for m in means)


def _quoted(text: str, width: int = 96) -> list[str]:
    return ["| " + line for part in text.splitlines() for line in (wrap(part, width) or [""])]
