"""Export: choose a rung, write into a temporary directory, have it proved in a clean process, then put it in place."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import MissingExtra, UsageError
from graphwright.files import atomic_directory, sha256_file
from graphwright.models.clean_process import (
    GREEDY_TOKENS,
    Computed,
    check_prompts,
    compare,
    compute_here,
    compute_there,
    transformers_installed,
)  # fmt: skip
from graphwright.models.codegen import check_emittable, generate
from graphwright.models.deviation import Deviation, deviations
from graphwright.models.errors import ExportError, RungImpossible, VerificationFailed
from graphwright.models.health import non_finite
from graphwright.models.inspect import flops
from graphwright.models.receipt import SCHEMA, Receipt
from graphwright.models.write import write_model
from graphwright.progress import Progress, Report

if TYPE_CHECKING:
    from graphwright.models.model import Model

RUNGS = {1: "same class, same shapes", 2: "same class, other sizes", 3: "same class, what was cut as zeros",
         4: "a class with sizes per layer", 5: "generated modeling code"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Which rungs can carry a model.

    Attributes:
        rung: the lowest possible one, or None.
        deviations: what is not as the family's template has it.
        not_better: why no lower rung: {rung, reason, path}.
        bytes: of the weights to be written.
    """

    rung: int | None
    deviations: tuple[Deviation, ...]
    not_better: tuple[dict[str, Any], ...]
    bytes: int

    def __str__(self) -> str:
        lines = [f"rung {self.rung}: {RUNGS[self.rung]}" if self.rung else "no rung can carry this structure"]
        lines += [f"  not rung {n['rung']}: {n['reason']}" for n in self.not_better]
        lines += [f"  {d.path}: {d.kind}, {d.detail}" for d in self.deviations[:20]]
        lines += [f"  ... {len(self.deviations) - 20} more"] if len(self.deviations) > 20 else []
        return "\n".join([*lines, f"{self.bytes / 2**20:.2f} MiB of weights"])


def export_plan(model: Model) -> ExportPlan:
    """What an export would do; reads no payload, writes nothing."""
    found = tuple(deviations(model))
    p = model.program
    size = sum(p.spec(n).nbytes for n in p.params())
    if not found:
        return ExportPlan(1, (), (), size)
    first = f"{found[0].path} {found[0].kind}: {found[0].detail}" + (f", and {len(found) - 1} more" if len(found) > 1 else "")
    why = [{"rung": 1, "reason": first, "path": found[0].path}]
    why += [{"rung": n, "reason": "not built in this version", "path": found[0].path} for n in (2, 3, 4)]
    try:
        check_emittable(p)
    except RungImpossible as error:
        return ExportPlan(None, found, (*why, {"rung": 5, "reason": f"{error.what}: {error.got}", "path": str(error.where)}), size)
    return ExportPlan(5, found, tuple(why), size)


def export(model: Model, directory: str | os.PathLike[str], *, rung: int | str = "auto", prefer: str = "stock",
           dtype: str = "keep", check: str = "auto", prompts: Sequence[Any] | None = None, max_shard_size: int | str = "5GB",
           overwrite: bool = False, report: Report | None = None) -> Receipt:  # fmt: skip
    """Write a checkpoint directory with its receipt; it appears whole and proved, or not at all.

    Args:
        directory: must not exist, unless `overwrite`; never the source.
        rung: `auto` takes the lowest that is exact; a number asks for that one.
        dtype: `keep` stores each weight as its file did; a dtype name rounds to nearest even.
        check: `auto` proves with transformers if it is installed and says so if not; `required` insists; `none` skips.
        prompts: texts or ids to compare on; built-in ones by default.
    Raises: RungImpossible with the deviations, DestinationExists, ExportError, VerificationFailed, MissingExtra.
    """
    target = Path(directory)
    if check not in ("auto", "required", "none") or prefer not in ("stock", "size"):
        raise UsageError("unknown option", expected="check auto, required or none; prefer stock or size", got=(check, prefer))
    if check == "required" and not transformers_installed():
        raise MissingExtra("hf", "proving an export")
    if model.checkpoint is not None and target.resolve() == model.directory.resolve():
        raise ExportError("the target is the source", where=str(target), fix="another directory: source files are never written")
    plan = export_plan(model)
    chosen = _choose(plan, rung)
    _refuse_non_finite(model)
    steps = iter(range(1, 5))

    def tell(what: str) -> None:
        if report is not None:
            report(Progress(what, next(steps), 4))

    confirmed = check != "none" and transformers_installed()
    texts = check_prompts(model.tokenizer, model.vocab, prompts)
    tell("running the program")
    here = compute_here(model, texts)
    with atomic_directory(target, overwrite=overwrite) as place:
        tell("writing")
        _write(model, place, chosen, dtype, max_shard_size)
        facts: dict[str, Any] = {}
        if confirmed:
            tell("loading with transformers in a clean process")
            facts = _prove(place, here, texts, 1e-5 if dtype == "keep" else 2e-2, trust=chosen == 5)
        tell("measuring")
        receipt = _receipt(model, place, chosen, prefer, plan, confirmed, facts, here, texts, dtype)
        (place / "README.md").write_text(_card(model, receipt, target.name), encoding="utf-8")
        receipt.write(place)
    return receipt


def _choose(plan: ExportPlan, rung: int | str) -> int:
    if rung not in ("auto", 1, 2, 3, 4, 5, "1", "2", "3", "4", "5"):
        raise UsageError("unknown rung", expected="auto or 1 to 5", got=rung)
    if plan.rung is None or (rung != "auto" and int(rung) != plan.rung):
        reason = next((n["reason"] for n in plan.not_better if rung == "auto" or n["rung"] == int(rung)), None)
        wanted = "no rung" if rung == "auto" else f"rung {rung}"
        raise RungImpossible(f"{wanted} can carry this structure" if rung == "auto" else f"{wanted} is not the one for this structure",
                             got=reason, expected=f"rung {plan.rung}" if plan.rung else None,
                             fix="program.save(DIR) keeps any structure; program.undo() takes edits back")  # fmt: skip
    return plan.rung


def _refuse_non_finite(model: Model) -> None:
    """Pass on what the source had; refuse NaN and infinities that an edit or training made."""
    p = model.program
    for key, count, first in non_finite(p):
        if not p.weights.array(key).storage.readonly:
            raise ExportError("an edited weight is not finite", where=key, got=f"{count} values, the first at {first}",
                              fix="undo the edit or training that made them")  # fmt: skip


def _write(model: Model, place: Path, rung: int, dtype: str, max_shard_size: int | str) -> None:
    """Files of a rung; only rung 5 changes the config and adds code."""
    if rung != 5:
        write_model(model, place, dtype=dtype, max_shard_size=max_shard_size)
        return
    ident = model.program.structure_hash()[:10]
    edits = [f"{e.why} ({e.author}; {_summary(e.edits)})" for e in model.program.history.undoable]
    fields = {**model.config.fields, "architectures": ["EditedForCausalLM"], "model_type": f"graphwright-{ident}",
              "tie_word_embeddings": False, "auto_map": {"AutoConfig": f"configuration_{ident}.EditedConfig",
                                                         "AutoModelForCausalLM": f"modeling_{ident}.EditedForCausalLM"}}  # fmt: skip
    p = model.program
    needed = p.reachable(p.outputs())
    write_model(model, place, dtype=dtype, max_shard_size=max_shard_size, config=(json.dumps(fields, indent=2) + "\n").encode(),
                only={p.key(n) for n in p.params() if n in needed})  # fmt: skip
    for name, text in generate(model.program, ident, edits).items():
        (place / name).write_text(text, encoding="utf-8")


def _prove(place: Path, here: Computed, prompts: Sequence[np.ndarray], tolerance: float, trust: bool) -> dict[str, Any]:
    there = compute_there(place, prompts, trust=trust)
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            raise VerificationFailed(f"transformers reports {name.replace('_', ' ')}", got=", ".join(there.facts[name][:6]))
    compared = compare(here, there, tolerance)
    error = {k: compared[k] for k in ("max_abs", "max_rel", "tol")}
    return {"loader": "transformers", **there.facts, "trust_remote_code": trust, "prompts": len(prompts),
            "tokens": [len(g) for g in here.greedy], "export_error": error, "greedy_equal": compared["greedy_equal"]}  # fmt: skip


def _files(directory: Path) -> list[dict[str, Any]]:
    return [{"name": f.name, "bytes": f.stat().st_size, "sha256": sha256_file(f)} for f in sorted(directory.iterdir())
            if f.is_file() and f.name not in ("receipt.json", "README.md")]  # fmt: skip


def _receipt(model: Model, place: Path, rung: int, prefer: str, plan: ExportPlan, confirmed: bool, facts: dict[str, Any],
             here: Computed, prompts: Sequence[np.ndarray], dtype: str) -> Receipt:  # fmt: skip
    from graphwright import __version__

    p = model.program
    source: dict[str, Any] = {"name": model.directory.name}
    moved: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if model.checkpoint is not None:
        from graphwright.models.open import open

        original = open(model.directory, compute=model.compute, tokenizer=False, arch=model.arch)
        source |= {"files": _files(model.directory), "program_hash": original.program.hash()}
        before = _cost(original)
        if len(p.journal):
            moved = drift([original.logits(ids) for ids in prompts], here.logits)
    after = _cost(model)
    cost = {name: ({"before": before[name]} if name in before else {}) | {"after": value} for name, value in after.items()}
    top = np.argsort(-here.logits[0][-1], kind="stable")[:5]
    probe = {"ids": prompts[0].tolist(), "top5": [[int(i), float(here.logits[0][-1][i])] for i in top],
             "greedy": here.greedy[0].tolist()}  # fmt: skip
    alive = [e for e in p.history.undoable if e.undo is not None]
    return Receipt(
        schema=SCHEMA, created=datetime.now(UTC).isoformat(timespec="seconds"), graphwright=__version__, rung=rung,
        prefer=prefer, exact=dtype == "keep", confirmed=confirmed, not_better=list(plan.not_better), source=source,
        result={"files": _files(place), "program_hash": p.hash()},
        journal={"entries": len(p.journal), "hash": p.journal.hash, "by_author": dict(Counter(e.author for e in alive)),
                 "edits": [{"why": e.why, "author": e.author, "summary": _summary(e.edits)} for e in alive]},
        check=facts, drift=moved, cost=cost, probe=probe,
        warnings=([] if confirmed else ["not confirmed: transformers was not asked"]) + [w for e in alive for w in e.warnings],
    )  # fmt: skip


def _summary(edits: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(e["edit"] for e in edits).items()))


def _cost(model: Model) -> dict[str, Any]:
    p = model.program
    facts = model.inspect()
    ids = np.zeros((1, 1), np.int64)
    cache = model.new_cache(160)
    cache.step(np.zeros((1, 128), np.int64))
    times = []
    for _ in range(12):
        started = perf_counter()
        cache.step(ids)
        times.append((perf_counter() - started) * 1e3)
    times = sorted(times[2:])
    decode = {"median": round(median(times), 3), "low": round(times[0], 3), "high": round(times[-1], 3)}
    return {"parameters": facts.parameters, "bytes": facts.nbytes, "flops_per_token": flops(p, {"B": 1, "T": 1}),
            "kv_bytes_per_token": facts.kv_bytes_per_token,
            "latency_ms": {"runtime": "graphwright", "context": 128, "decode": decode, "rounds": len(times)}}  # fmt: skip


def drift(source: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> dict[str, Any]:
    """How far logits [T, V] per prompt moved: largest difference, mean KL in nats, share of equal top tokens."""
    a, b = np.concatenate(source).astype(np.float64), np.concatenate(now).astype(np.float64)
    if a.shape != b.shape:
        return {}
    la, lb = (x - x.max(-1, keepdims=True) for x in (a, b))
    la, lb = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (la, lb))
    return {"max_abs_dlogits": float(np.abs(a - b).max()), "mean_kl_nats": float((np.exp(la) * (la - lb)).sum(-1).mean()),
            "top1_agreement": float((a.argmax(-1) == b.argmax(-1)).mean())}  # fmt: skip


def _card(model: Model, receipt: Receipt, name: str) -> str:
    rows = "\n".join(f"| {label} | {value} |" for label, value in receipt.summary())
    edits = "\n".join(f"1. {e['why']} ({e['author']}; {e['summary']})" for e in receipt.journal["edits"]) or "None."
    return f"""---
library_name: transformers
base_model: {model.directory.name}
---
# {name}

Exported by Graphwright {receipt.graphwright} from `{model.directory.name}`.

```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{name}"{", trust_remote_code=True" if receipt.rung == 5 else ""})
```

## Edits

{edits}

## Receipt

| | |
| --- | --- |
{rows}

`receipt.json` holds all figures; `graphwright verify {name}` checks the files against it. Greedy tokens: {GREEDY_TOKENS} per prompt.
"""
