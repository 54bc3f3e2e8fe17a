"""Export: choose a rung, write into a temporary directory, have it proved in a clean process, then put it in place."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import dtype as named
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import atomic_directory, check_free, target_path
from graphwright.models.codegen.source import generate
from graphwright.models.errors import ExportError, VerificationFailed
from graphwright.models.export.card import snippet, write_card
from graphwright.models.export.clean_process import (
    Computed,
    check_prompts,
    compare,
    compute_here,
    compute_there,
    reopen,
    transformers_installed,
)
from graphwright.models.export.hosts import Hosted, write_hosted
from graphwright.models.export.measure import (
    cost,
    drift,
    edit_rows,
    file_rows,
    live_edits,
    tensor_digests,
    weight_counts,
    with_program,
)
from graphwright.models.export.receipt import SCHEMA, Receipt
from graphwright.models.export.rungs import RUNGS, ExportPlan, Ladder, choose_rung, export_plan
from graphwright.models.export.write import rounded, write_model
from graphwright.models.generation.sampling import NonFinite
from graphwright.models.health import non_finite
from graphwright.models.onnx.file import compare_onnx, need_onnx, save_onnx
from graphwright.program.gates import refuse_soft
from graphwright.program.weights import SOURCE
from graphwright.progress import Progress, Report

if TYPE_CHECKING:
    from graphwright.models.model import Model

EXACT, ROUNDED, LOW = 1e-5, 2e-2, 3e-2
"""Relative tolerance of logits: of float32 activations, of computed weights that were rounded to 16 bits, and of 16-bit
activations, which loaders round at other places."""
_CACHE_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""By these transformers would make a cache of windows; in generated code the windows stand beside each attention."""


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
    onnx: bool = False,
    overwrite: bool = False,
    keep_failed: bool = False,
    report: Report | None = None,
) -> Receipt:
    """Write a checkpoint directory with its receipt; it appears whole and proved, or not at all.

    Args:
        model: what to export, edited or not.
        directory: must not exist, unless `overwrite`; never the source.
        rung: `auto` takes the lowest that is exact; a number asks for that one.
        prefer: `stock`, or `size`, which leaves rung 3 out.
        dtype: `keep` stores each weight as its file did; a dtype name rounds to nearest even.
        check: `auto` proves with transformers if it is installed and says so if not; `required` insists; `none` skips.
        prompts: texts or ids to compare on; built-in ones by default.
        max_shard_size: bytes of weights per file, or "5GB".
        onnx: write `model.onnx` beside it, of the program as it is, and compare it with onnxruntime unless `check` is
            `none`.
        overwrite: replace what stands at the directory.
        keep_failed: leave what failed the check at `<directory>.failed`.
        report: told of each step.
    Raises: RungImpossible with the deviations, DestinationExists, ExportError, VerificationFailed, MissingExtra.
    """
    target = target_path(directory)
    if onnx:
        need_onnx()
    if check not in ("auto", "required", "none") or prefer not in ("stock", "size"):
        raise UsageError(
            "unknown option", expected="check auto, required or none; prefer stock or size", got=(check, prefer)
        )
    if check == "required" and not transformers_installed():
        raise MissingExtra("hf", "proving an export")
    _refuse_source(model, target)
    refuse_soft(model.program, "an export")
    check_free(target, overwrite)
    ladder = Ladder(model)
    plan = ladder.plan(prefer)
    chosen = choose_rung(plan, rung)
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
        _write(ladder, place, chosen, dtype, max_shard_size)
        tell("checking in a clean process" if check != "none" else "not checking")
        code = snippet(target.name, chosen == 5)
        try:
            exact = plan.rungs[chosen - 1].exact
            facts = _check(stored, place, here, texts, chosen, check, (target.name, code), exact)
            if onnx:
                save_onnx(stored.program, place / "model.onnx")
                if here is not None and check != "none":
                    facts = {**facts, "onnx": compare_onnx(place / "model.onnx", here.logits, texts)}
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


def _refuse_non_finite(model: Model) -> None:
    """Pass on what the source had; refuse NaN and infinities that an edit or training made. Raises: ExportError."""
    p = model.program
    for key, count, first in non_finite(p):
        if p.weights.reference_of(p.weights.array(key)) == SOURCE:
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


def _write(ladder: Ladder, place: Path, rung: int, dtype: str, max_shard_size: int | str) -> None:
    """Files of a rung."""
    model = ladder.model
    if rung in (2, 3):
        model = ladder.conformed(rung)
    if rung <= 3:
        write_model(model, place, dtype=dtype, max_shard_size=max_shard_size)
    elif rung == 4:
        assert isinstance(ladder.host, Hosted)
        write_hosted(model, ladder.host, place, dtype=dtype, max_shard_size=max_shard_size)
    else:
        _write_code(model, place, dtype, max_shard_size)


def _write_code(model: Model, place: Path, dtype: str, max_shard_size: int | str) -> None:
    """Rung 5: the weights that are read, a config that names the code, and the code."""
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
    exact: bool,
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

    tolerance = LOW if model.compute != "float32" else EXACT if exact else ROUNDED
    compared = compare(here, there, tolerance, margin)
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
        before = {**cost(original), "nonzero_parameters": weight_counts(model.directory)["nonzero_parameters"]}
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
    unproved = [] if confirmed else ["not confirmed: transformers has not computed the same from these files"]
    return Receipt(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        graphwright=__version__,
        rung=rung,
        prefer=prefer,
        exact=stored is model and plan.rungs[rung - 1].exact,
        confirmed=confirmed,
        not_better=list(plan.why_not(rung)),
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
