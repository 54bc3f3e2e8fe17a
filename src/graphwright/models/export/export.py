"""Export: choose a rung, write into a temporary directory, have it proved in a clean process, then put it in place."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import dtype as named
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import atomic_directory, check_free, target_path
from graphwright.models.codegen.source import generate
from graphwright.models.errors import ExportError, VerificationFailed
from graphwright.models.export.clean_process import (
    check_prompts,
    compare,
    compute_here,
    compute_there,
    reopen,
    transformers_installed,
)
from graphwright.models.export.hosts import Hosted, write_hosted
from graphwright.models.export.receipt import SCHEMA, Receipt, snippet, write_card
from graphwright.models.export.rungs import PREFER, RUNGS, ExportPlan, Ladder, choose_rung, export_plan
from graphwright.models.export.write import (
    cost,
    drift,
    edit_rows,
    file_rows,
    live_edits,
    rounded,
    tensor_digests,
    weight_counts,
    write_model,
)
from graphwright.models.generation.sampling import NonFinite
from graphwright.models.health import non_finite
from graphwright.models.model import need_tokenizer
from graphwright.models.onnx import compare_onnx, need_onnx, save_onnx
from graphwright.ops import traits
from graphwright.ops.onnx import OPSET
from graphwright.program.errors import NotUndoable
from graphwright.program.gates import refuse_soft
from graphwright.program.weights import SOURCE
from graphwright.progress import Progress

if TYPE_CHECKING:
    from graphwright.models.export.clean_process import (
        Computed,
    )
    from graphwright.models.model import Model
    from graphwright.progress import Report

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
    max_shard_size: int | str | None = None,
    onnx: bool = False,
    onnx_cache: bool = False,
    opset: int = OPSET,
    text: str | None = None,
    predicted: Mapping[str, float] | None = None,
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
        max_shard_size: bytes of weights per file, or "5GB"; by default the files of the source, new ones up to "5GB".
        onnx: write `model.onnx` beside it, of the program as it is, and compare it with onnxruntime unless `check` is
            `none`.
        onnx_cache, opset: `model.onnx` with `past_key_values`, and of this opset; see `models.onnx.graph.to_model`.
        text: measure bits per byte of it before and after, for the receipt.
        predicted: what a pass foretold of the drift, by name; the receipt has it beside what was measured.
        overwrite: replace what stands at the directory.
        keep_failed: leave what failed the check at `<directory>.failed`.
        report: told of each step.
    Raises: RungImpossible with the deviations, DestinationExists, ExportError, VerificationFailed, MissingExtra.
    """
    target = target_path(directory)
    if onnx or onnx_cache:
        need_onnx()
    if text is not None:
        need_tokenizer(model)
    check_export(model, target, check=check, prefer=prefer, overwrite=overwrite)
    refuse_soft(model.program, "an export")
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
    run = _run(stored, texts)
    with atomic_directory(target, overwrite=overwrite) as place:
        tell("writing")
        _write(ladder, place, chosen, dtype, max_shard_size)
        tell("checking in a clean process" if check != "none" else "not checking")
        code = snippet(target.name, chosen == 5)
        try:
            exact = plan.rungs[chosen - 1].exact
            facts = {} if check == "none" else _check(run, place, chosen, exact, (target.name, code))
            if onnx or onnx_cache:
                save_onnx(stored.program, place / "model.onnx", opset=opset, cache=onnx_cache)
                if run.here is not None and check != "none":
                    found = compare_onnx(
                        place / "model.onnx", texts, run.here.logits, run.here.greedy if onnx_cache else None
                    )
                    facts["onnx"] = {"opset": opset, "cache": onnx_cache, **found}
        except VerificationFailed:
            if keep_failed:
                shutil.copytree(place, target.with_name(f"{target.name}.failed"), dirs_exist_ok=True)
            raise
        tell("measuring")
        source = _source(model)
        moved, told = _drift(source, run, text)
        moved |= {"predicted": dict(predicted)} if predicted else {}
        receipt = _receipt(
            model, source, replace(run, warnings=(*run.warnings, *told)), place, chosen, plan, facts, moved
        )
        write_card(place, receipt, target.name, code)
        receipt.write(place)
    return receipt


def check_export(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    check: str = "auto",
    prefer: str = "stock",
    overwrite: bool = False,
) -> None:
    """What an export refuses whatever becomes of the model, for asking before long work.

    Args: as of `export`.
    Raises: UsageError, MissingExtra, ExportError, DestinationExists.
    """
    target = target_path(directory)
    if check not in ("auto", "required", "none") or prefer not in PREFER:
        raise UsageError(
            "unknown option", expected="check auto, required or none; prefer stock or size", got=(check, prefer)
        )
    if check == "required" and not transformers_installed():
        raise MissingExtra("hf", "proving an export")
    _refuse_source(model, target)
    check_free(target, overwrite)


def _refuse_source(model: Model, target: Path) -> None:
    """Neither the source nor a folder above it may be replaced. Raises: ExportError."""
    source, place = model.directory.resolve(), target.resolve()
    if model.opened and (source == place or place in source.parents):
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
    return model.with_program(p)


@dataclass(frozen=True, slots=True)
class _Run:
    """What the program computes from prompts.

    Attributes:
        model: with the weights as they are stored.
        prompts: ids.
        here: logits and greedy tokens; None where NaN of the source get into the logits, which `warnings` says.
    """

    model: Model
    prompts: Sequence[np.ndarray]
    here: Computed | None
    warnings: tuple[str, ...] = ()

    def margin(self, prompt: int, at: int) -> float:
        """Distance of the two best logits behind a prompt and `at` greedy tokens."""
        assert self.here is not None
        ids = np.concatenate([self.prompts[prompt], self.here.greedy[prompt][:at]])
        best = np.sort(self.model.logits(ids)[-1])
        return float(best[-1] - best[-2])


def _run(model: Model, prompts: Sequence[np.ndarray]) -> _Run:
    try:
        return _Run(model, prompts, compute_here(model, prompts))
    except NonFinite as error:
        return _Run(model, prompts, None, (f"nothing was compared: {error.what} ({error.where}: {error.got})",))


def _write(ladder: Ladder, place: Path, rung: int, dtype: str, max_shard_size: int | str | None) -> None:
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


def _write_code(model: Model, place: Path, dtype: str, max_shard_size: int | str | None) -> None:
    """Rung 5: the weights that are read, a config that names the code, and the code."""
    p = model.program
    ident = p.hash()[:10]  # with the constants, which are code: loaders know a class by its name
    edits = [f"{row['why']} ({row['author']}; {row['summary']})" for row in edit_rows(model)]
    needed = p.reachable(p.outputs())
    attentions = sum(traits(p.op(n)).attention for n in needed)
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


def _check(run: _Run, place: Path, rung: int, exact: bool, code: tuple[str, str]) -> dict[str, Any]:
    """Facts of the check: by transformers, or by this package where that is not installed and the class is its own.

    Args:
        run: to be computed again from the files.
        place: where they lie.
        rung, exact: what was written.
        code: name that the directory will have, and the lines that load it.
    Raises: VerificationFailed.
    """
    stock = transformers_installed()
    if not stock and rung == 5:
        return {}
    ids = list(run.prompts) if run.here is not None else []
    there = compute_there(place, ids, trust=rung == 5, snippet=code) if stock else reopen(place, ids)
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            loader = "transformers" if stock else "graphwright"
            raise VerificationFailed(f"{loader} reports {name.replace('_', ' ')}", got=", ".join(there.facts[name][:6]))
    facts = {"loader": "transformers" if stock else "graphwright", **there.facts, "trust_remote_code": rung == 5}
    if run.here is None:
        return facts
    tolerance = LOW if run.model.compute != "float32" else EXACT if exact else ROUNDED
    compared = compare(run.here, there, tolerance, run.margin)
    error = {k: compared.pop(k) for k in ("max_abs", "max_rel", "tol")}
    tokens = [len(g) for g in run.here.greedy]
    return {**facts, "prompts": len(ids), "tokens": tokens, "export_error": error, **compared}


def _source(model: Model) -> Model | None:
    """The model as it was before all edits; None where that was not kept."""
    if model.checkpoint is not None:
        return model.with_program(model.original)
    try:
        return model.with_program(model.program.at(-1)) if model.opened else None
    except NotUndoable:
        return None


def _drift(source: Model | None, run: _Run, text: str | None) -> tuple[dict[str, Any], list[str]]:
    """The program, as stored, against the source; and what kept it from being measured."""
    moved: dict[str, Any] = {}
    if run.here is None:
        return moved, []
    told = []
    if source is not None:
        try:
            moved = drift([source.logits(ids) for ids in run.prompts], run.here.logits)
        except NonFinite as error:
            told, source = [f"no drift: of the source {error.where} has {error.got}"], None
    if text is not None:
        sides = {"before": source, "after": run.model}
        scores = {name: m.perplexity(text) for name, m in sides.items() if m is not None}
        facts = {"bytes": scores["after"].bytes, "text_sha256": sha256(text.encode()).hexdigest()}
        moved["bits_per_byte"] = {**{name: s.bits_per_byte for name, s in scores.items()}, **facts}
    return moved, told


def _receipt(
    model: Model,
    original: Model | None,
    run: _Run,
    place: Path,
    rung: int,
    plan: ExportPlan,
    facts: dict[str, Any],
    moved: dict[str, Any],
) -> Receipt:
    """The receipt of the files that lie at `place`.

    Args:
        model, original: as edited, and before.
        run: of it as stored.
        place, rung, plan: what was written, and why so.
        facts: of the check.
        moved: the drift.
    """
    from graphwright import __version__

    p, here = model.program, run.here
    confirmed = facts.get("loader") == "transformers" and "export_error" in facts
    source: dict[str, Any] = {"name": model.directory.name}
    before: dict[str, Any] = {}
    if model.opened:
        source["files"] = file_rows(model.directory)
    if original is not None:
        source["program_hash"] = original.program.hash()
        before = cost(original)
    if model.checkpoint is not None:
        before["nonzero_parameters"] = weight_counts(model.directory)["nonzero_parameters"]
    after = {**cost(model), **weight_counts(place)}
    both = {name: ({"before": before[name]} if name in before else {}) | {"after": v} for name, v in after.items()}
    probe: dict[str, Any] = {}
    if here is not None:
        last = here.logits[0][-1]
        top = np.argsort(-last, kind="stable")[:5]
        probe = {
            "ids": run.prompts[0].tolist(),
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
        prefer=plan.prefer,
        exact=run.model is model and plan.rungs[rung - 1].exact,
        confirmed=confirmed,
        not_better=list(plan.why_not(rung)),
        source=source,
        result={"files": file_rows(place), "program_hash": p.hash(), "tensors": tensor_digests(place)},
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
        warnings=[*unproved, *run.warnings, *(w for e in edits for w in e.warnings)],
    )


__all__ = ["RUNGS", "ExportPlan", "drift", "export", "export_plan"]
