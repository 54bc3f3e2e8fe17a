"""Export: choose a rung, write into a temporary directory, have it proved in a clean process, then put it in place."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import dtype as named
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import atomic_directory
from graphwright.models.card import snippet, write_card
from graphwright.models.clean_process import (
    Computed,
    check_prompts,
    compare,
    compute_here,
    compute_there,
    reopen,
    transformers_installed,
)
from graphwright.models.codegen import check_emittable, generate
from graphwright.models.deviation import Deviation, deviations
from graphwright.models.errors import ExportError, RungImpossible, VerificationFailed
from graphwright.models.health import non_finite
from graphwright.models.measure import (
    cost,
    drift,
    edit_rows,
    file_rows,
    live_edits,
    tensor_digests,
    weight_counts,
    with_program,
)
from graphwright.models.receipt import SCHEMA, Receipt
from graphwright.models.sampling import NonFinite
from graphwright.models.write import rounded, write_model
from graphwright.progress import Progress, Report

if TYPE_CHECKING:
    from graphwright.models.model import Model

RUNGS = {
    1: "same class, same shapes",
    2: "same class, other sizes",
    3: "same class, what was cut as zeros",
    4: "a class with sizes per layer",
    5: "generated modeling code",
}
EXACT, LOW = 1e-5, 3e-2
"""Relative tolerance of logits: of float32 activations, and of 16-bit ones, which loaders round at other places."""
_CACHE_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""By these transformers would make a cache of windows; in generated code the windows stand beside each attention."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Which rungs can carry a model.

    Attributes:
        rung: the lowest possible one, or None.
        deviations: what is not as the family's template has it.
        not_better: why no lower rung: {rung, reason, path}.
        bytes: of the weights to be written.
        possible: all rungs that can be asked for.
    """

    rung: int | None
    deviations: tuple[Deviation, ...]
    not_better: tuple[dict[str, Any], ...]
    bytes: int
    possible: tuple[int, ...] = ()

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
    why: list[dict[str, Any]] = []
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        first = f"{found[0].path} {found[0].kind}: {found[0].detail}{more}"
        why.append({"rung": 1, "reason": first, "path": found[0].path})
        why += [{"rung": n, "reason": "not built in this version", "path": found[0].path} for n in (2, 3, 4)]
    try:
        check_emittable(p)
    except RungImpossible as error:
        why.append({"rung": 5, "reason": f"{error.what}: {error.got}", "path": str(error.where)})
    refused = {n["rung"] for n in why}
    possible = tuple(n for n in (1, 5) if n not in refused)
    read = p.reachable(p.outputs()) if found else set(p.params())
    size = sum(p.spec(n).nbytes for n in p.params() if n in read)
    rung = possible[0] if possible else None
    return ExportPlan(rung, found, tuple(n for n in why if rung is None or n["rung"] < rung), size, possible)


def export(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    rung: int | str = "auto",
    prefer: str = "stock",
    dtype: str = "keep",
    check: str = "auto",
    prompts: Sequence[Any] | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    keep_failed: bool = False,
    report: Report | None = None,
) -> Receipt:
    """Write a checkpoint directory with its receipt; it appears whole and proved, or not at all.

    Args:
        model: what to export, edited or not.
        directory: must not exist, unless `overwrite`; never the source.
        rung: `auto` takes the lowest that is exact; a number asks for that one.
        prefer: `stock` or `size`; they differ where rung 3 is possible.
        dtype: `keep` stores each weight as its file did; a dtype name rounds to nearest even.
        check: `auto` proves with transformers if it is installed and says so if not; `required` insists; `none` skips.
        prompts: texts or ids to compare on; built-in ones by default.
        max_shard_size: bytes of weights per file, or "5GB".
        overwrite: replace what stands at the directory.
        keep_failed: leave what failed the check at `<directory>.failed`.
        report: told of each step.
    Raises: RungImpossible with the deviations, DestinationExists, ExportError, VerificationFailed, MissingExtra.
    """
    target = Path(directory)
    if check not in ("auto", "required", "none") or prefer not in ("stock", "size"):
        raise UsageError(
            "unknown option", expected="check auto, required or none; prefer stock or size", got=(check, prefer)
        )
    if check == "required" and not transformers_installed():
        raise MissingExtra("hf", "proving an export")
    _refuse_source(model, target)
    plan = export_plan(model)
    chosen = _choose(plan, rung)
    _refuse_non_finite(model)
    steps = iter(range(1, 5))

    def tell(what: str) -> None:
        if report is not None:
            report(Progress(what, next(steps), 4))

    stored = model if dtype == "keep" else _rounded(model, dtype)
    texts = check_prompts(model.tokenizer, model.vocab, prompts)
    tell("running the program")
    here, warnings = _run(stored, texts)
    with atomic_directory(target, overwrite=overwrite) as place:
        tell("writing")
        _write(model, place, chosen, dtype, max_shard_size)
        tell("checking in a clean process" if check != "none" else "not checking")
        code = snippet(target.name, chosen == 5)
        try:
            facts = _check(stored, place, here, texts, chosen, check, (target.name, code))
        except VerificationFailed:
            if keep_failed:
                shutil.copytree(place, target.with_name(f"{target.name}.failed"), dirs_exist_ok=True)
            raise
        tell("measuring")
        result = {"files": file_rows(place), "program_hash": model.program.hash(), "tensors": tensor_digests(place)}
        written = weight_counts(place)
        receipt = _receipt(model, stored, result, written, chosen, prefer, plan, facts, here, texts, warnings)
        write_card(place, receipt, target.name, code)
        receipt.write(place)
    return receipt


def _refuse_source(model: Model, target: Path) -> None:
    """Neither the source nor a folder above it may be replaced. Raises: ExportError."""
    source, place = model.directory.resolve(), target.resolve()
    opened = model.checkpoint is not None or (source / "program.json").is_file()
    if opened and (source == place or place in source.parents):
        raise ExportError(
            "the target is the source" if source == place else "the source lies inside the target",
            where=str(target),
            fix="another directory: source files are never written",
        )


def _choose(plan: ExportPlan, rung: int | str) -> int:
    if rung not in ("auto", 1, 2, 3, 4, 5, "1", "2", "3", "4", "5"):
        raise UsageError("unknown rung", expected="auto or 1 to 5", got=rung)
    wanted = plan.rung if rung == "auto" else int(rung)
    if wanted in plan.possible:
        return wanted  # type: ignore[return-value]  # a possible one is a number
    why = next((n["reason"] for n in plan.not_better if n["rung"] == (wanted or 5)), "not built in this version")
    raise RungImpossible(
        "no rung can carry this structure" if plan.rung is None else f"rung {rung} cannot carry this",
        where=plan.not_better[-1]["path"] if plan.not_better else None,
        got=why,
        expected=f"rung {' or '.join(map(str, plan.possible))}" if plan.possible else None,
        fix="program.save(DIR) keeps any structure; program.undo() takes edits back",
    )


def _refuse_non_finite(model: Model) -> None:
    """Pass on what the source had; refuse NaN and infinities that an edit or training made. Raises: ExportError."""
    p = model.program
    for key, count, first in non_finite(p):
        if p.weights.array(key).storage.readonly:
            continue
        had = _source_non_finite(model, p.weights[key].name)
        if count > had:
            raise ExportError(
                "an edited weight is not finite",
                where=key,
                got=f"{count} values, the first at {first}" + (f"; the file has {had}" if had else ""),
                fix="undo the edit or training that made them",
            )


def _source_non_finite(model: Model, key: str) -> int:
    if model.checkpoint is None or key not in model.checkpoint:
        return 0
    return next((count for name, count, _ in non_finite(model.original) if name == key), 0)


def _rounded(model: Model, dtype: str) -> Model:
    """The model with weights as they will be stored: what the files are compared with, and the drift is measured of.

    Values are rounded to the dtype and held in the dtype they had, which holds them exactly.
    """
    p, target = model.program.fork(), named(dtype)
    if not target.is_float:
        raise UsageError("weights are stored in a floating dtype", got=dtype)
    with p.edit(f"round to {dtype}") as e:
        for key in {p.key(n) for n in p.params()}:
            array = p.weights.array(key)
            if array.dtype.is_float and array.dtype is not target:
                e.set_weight(key, rounded(key, array, target))
    return with_program(model, p)


def _run(model: Model, prompts: Sequence[np.ndarray]) -> tuple[Computed | None, list[str]]:
    """What the program computes; None with a warning if NaN of the source get into the logits."""
    try:
        return compute_here(model, prompts), []
    except NonFinite as error:
        return None, [f"nothing was compared: {error.what} ({error.where}: {error.got})"]


def _write(model: Model, place: Path, rung: int, dtype: str, max_shard_size: int | str) -> None:
    """Files of a rung; only rung 5 changes the config and adds code."""
    if rung != 5:
        write_model(model, place, dtype=dtype, max_shard_size=max_shard_size)
        return
    p = model.program
    ident = p.hash()[:10]  # with the constants, which are code: loaders know a class by its name
    edits = [f"{row['why']} ({row['author']}; {row['summary']})" for row in edit_rows(model)]
    needed = p.reachable(p.outputs())
    attentions = sum(p.op(n) == "sdpa" for n in needed)
    fields = {k: v for k, v in model.config.fields.items() if k not in _CACHE_FIELDS}
    fields |= {
        "architectures": ["EditedForCausalLM"],
        "model_type": f"graphwright-{ident}",
        "tie_word_embeddings": False,
        "num_hidden_layers": max(attentions, 1),
        "auto_map": {
            "AutoConfig": f"configuration_{ident}.EditedConfig",
            "AutoModelForCausalLM": f"modeling_{ident}.EditedForCausalLM",
        },
    }
    write_model(
        model,
        place,
        dtype=dtype,
        max_shard_size=max_shard_size,
        config=(json.dumps(fields, indent=2) + "\n").encode(),
        only={p.key(n) for n in p.params() if n in needed},
    )
    for name, text in generate(p, ident, edits).items():
        (place / name).write_text(text, encoding="utf-8")


def _check(
    model: Model,
    place: Path,
    here: Computed | None,
    prompts: Sequence[np.ndarray],
    rung: int,
    check: str,
    code: tuple[str, str],
) -> dict[str, Any]:
    """Facts of the check: by transformers, or by this package where that is not installed and the class is its own."""
    if check == "none":
        return {}
    stock = transformers_installed()
    if not stock and rung == 5:
        return {}
    ids = list(prompts) if here is not None else []
    there = compute_there(place, ids, trust=rung == 5, snippet=code) if stock else reopen(place, ids)
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            loader = "transformers" if stock else "graphwright"
            raise VerificationFailed(f"{loader} reports {name.replace('_', ' ')}", got=", ".join(there.facts[name][:6]))
    facts = {"loader": "transformers" if stock else "graphwright", **there.facts, "trust_remote_code": rung == 5}
    if here is None:
        return facts

    def margin(prompt: int, at: int) -> float:
        best = np.sort(model.logits(np.concatenate([prompts[prompt], here.greedy[prompt][:at]]))[-1])
        return float(best[-1] - best[-2])

    compared = compare(here, there, EXACT if model.compute == "float32" else LOW, margin)
    error = {k: compared.pop(k) for k in ("max_abs", "max_rel", "tol")}
    return {
        **facts,
        "prompts": len(prompts),
        "tokens": [len(g) for g in here.greedy],
        "export_error": error,
        **compared,
    }


def _receipt(
    model: Model,
    stored: Model,
    result: dict[str, Any],
    written: dict[str, int],
    rung: int,
    prefer: str,
    plan: ExportPlan,
    facts: dict[str, Any],
    here: Computed | None,
    prompts: Sequence[np.ndarray],
    warnings: list[str],
) -> Receipt:
    from graphwright import __version__

    p = model.program
    confirmed = facts.get("loader") == "transformers" and "export_error" in facts
    source: dict[str, Any] = {"name": model.directory.name}
    moved: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if model.checkpoint is not None:
        original = with_program(model, model.original)
        source |= {"files": file_rows(model.directory), "program_hash": original.program.hash()}
        before = cost(original)
        if here is not None:
            moved = drift([original.logits(ids) for ids in prompts], here.logits)
    after = {**cost(model), **written}
    both = {name: ({"before": before[name]} if name in before else {}) | {"after": v} for name, v in after.items()}
    probe: dict[str, Any] = {}
    if here is not None:
        last = here.logits[0][-1]
        top = np.argsort(-last, kind="stable")[:5]
        probe = {
            "ids": prompts[0].tolist(),
            "top5": [[int(i), float(last[i])] for i in top],
            "greedy": here.greedy[0].tolist(),
        }
    edits = live_edits(model)
    asked = [{"rung": plan.rung, "reason": f"possible, but rung {rung} was asked for", "path": ""}]
    unproved = [] if confirmed else ["not confirmed: transformers has not computed the same from these files"]
    return Receipt(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        graphwright=__version__,
        rung=rung,
        prefer=prefer,
        exact=stored is model,
        confirmed=confirmed,
        not_better=list(plan.not_better) if rung == plan.rung else asked,
        source=source,
        result=result,
        journal={
            "entries": len(p.journal),
            "hash": p.journal.hash,
            "by_author": dict(Counter(e.author for e in edits)),
            "edits": edit_rows(model),
        },
        check=facts,
        drift=moved,
        cost=both,
        probe=probe,
        warnings=[*unproved, *warnings, *(w for e in edits for w in e.warnings)],
    )


__all__ = ["RUNGS", "ExportPlan", "drift", "export", "export_plan"]
