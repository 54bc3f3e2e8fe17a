"""Export: choose a level, write into a temporary directory, check it in a clean process, then move it to its target."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np

from graphwright.arguments import checked
from graphwright.array import dtype as named
from graphwright.errors import MissingExtra, NonFinite, UsageError
from graphwright.files import StrPath, atomic_directory, check_free, target_path
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.errors import ExportError, VerificationFailed
from graphwright.models.export.examples import IDS, Example, examples, greedy_tokens, random_example, random_facts
from graphwright.models.export.ladder import ExportPlan, Ladder, Prefer
from graphwright.models.export.levels import ExportLevel
from graphwright.models.export.receipt import (
    SCHEMA,
    Receipt,
    cost,
    edit_rows,
    file_rows,
    latency,
    tensor_digests,
    weight_counts,
    write_card,
)
from graphwright.models.export.rounding import rounding_tolerance
from graphwright.models.export.snippet import EAGER, UNALIGNED, loading_options, snippet
from graphwright.models.export.verify import (
    LoaderOutput,
    compare,
    compute_here,
    compute_there,
    make_probe,
    transformers_installed,
)
from graphwright.models.export.write import lacks_rows, rounded
from graphwright.models.metrics import drift, non_finite
from graphwright.models.tokenizer import need_tokenizer
from graphwright.ops.onnx import OPSET, OPSETS
from graphwright.program.axes.divide import is_divided
from graphwright.program.errors import NotUndoable
from graphwright.program.gates import refuse_soft
from graphwright.program.weights import SOURCE
from graphwright.progress import Progress, ProgressCallback
from graphwright.settings import Settings
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.models.model import Model

EXACT, ROUNDED, LOW = 1e-5, 2e-2, 3e-2
"""Relative tolerances of logits: for float32 activations; for computed weights rounded to 16 bits; and for 16-bit
activations, which loaders round at different operations."""
Check = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Settings):
    """Options of an export.

    Attributes:
        level: `auto` takes the lowest export level that is exact; a number or name requests one.
        prefer: `class` (the original class), or `size`, which skips levels that store zeros for removed units.
        dtype: `keep` stores each weight in the dtype of its file; a dtype name rounds to nearest even.
        check: `auto` checks with transformers if it is installed, and warns if not; `required` raises if it is not;
            `none` skips the check.
        prompts: texts or ids to compare on, or dicts of inputs for other tasks; by default built-in ones.
        max_shard_size: bytes of weights per file, or "5GB"; by default the files of the source, or "5GB".
        onnx: also write `model.onnx`, and compare it with onnxruntime unless `check` is `none`.
        onnx_cache: also write `model.onnx`, with `past_key_values` as inputs and outputs, for decoding.
        opset: opset of `model.onnx`, 20 or 23.
        timed: measure the times per prompt and per token of the source and of the files, about two seconds.
        text: measure bits per byte of this text before and after, for the receipt.
        predicted: drift that a pass such as pruning predicted, by name; the receipt shows it beside the measured drift.
        overwrite: replace an existing directory.
        keep_failed: keep an export that failed its check at `<directory>.failed`.
    """

    level: int | str = "auto"
    prefer: Prefer = "class"
    dtype: str = "keep"
    check: Check = "auto"
    prompts: Sequence[Any] | None = None
    max_shard_size: int | str | None = None
    onnx: bool = False
    onnx_cache: bool = False
    opset: int = OPSET
    timed: bool = True
    text: str | None = None
    predicted: Mapping[str, float] | None = None
    overwrite: bool = False
    keep_failed: bool = False


class ExportKeywords(TypedDict, total=False):
    """The fields of `ExportOptions` as keyword arguments."""

    level: int | str
    prefer: Prefer
    dtype: str
    check: Check
    prompts: Sequence[Any] | None
    max_shard_size: int | str | None
    onnx: bool
    onnx_cache: bool
    opset: int
    timed: bool
    text: str | None
    predicted: Mapping[str, float] | None
    overwrite: bool
    keep_failed: bool


@checked
@keywords(ExportOptions)
def export(
    model: Model, directory: StrPath, *, progress: ProgressCallback | None = None, **options: Unpack[ExportKeywords]
) -> Receipt:
    """Write a checkpoint that transformers loads, with its receipt; it appears complete and checked, or not at all.

    Args:
        model: the model to export, edited or not.
        directory: must not exist, unless `overwrite`; never the source.
        progress: called at each step.
        options: see `ExportOptions`.
    Raises: ExportLevelImpossible with the deviations, DestinationExists, ExportError, VerificationFailed, MissingExtra.
    """
    o = ExportOptions(**options)
    target = target_path(directory)
    if o.onnx or o.onnx_cache:
        from graphwright.models.onnx import need_onnx  # late: the extra is optional

        need_onnx()
    if o.text is not None:
        need_tokenizer(model)
    if is_divided(model.program):
        raise UsageError("other ranks have parts of this model", where="export", fix="export on one rank inside `with "
                         "graphwright.distributed.gathered(model.program):`, which all ranks enter")  # fmt: skip
    check_export(model, target, o)
    refuse_soft(model.program, "an export")
    ladder = Ladder(model)
    plan = ladder.plan(o.prefer)
    level = ladder.choose(plan, o.level)
    _refuse_non_finite(model)
    steps = iter(range(1, 5))

    def step(what: str) -> None:
        if progress is not None:
            progress(Progress(what, next(steps), 4))

    stored = model if o.dtype == "keep" else _rounded(model, o.dtype)
    rows = examples(model, o.prompts)
    step("running the program")
    run = _run(stored, rows)
    with atomic_directory(target, overwrite=o.overwrite) as folder:
        step("writing")
        level.write(folder, o.dtype, o.max_shard_size)
        step("checking in a clean process" if o.check != "none" else "not checking")
        code = snippet(target.name, loading_options(level.written, folder, level.runs_code), level.made_by)
        try:
            exact = plan.at(level.number).exact
            facts = {} if o.check == "none" else _check(run, folder, level, exact, (target.name, code))
            if o.onnx or o.onnx_cache:
                facts |= _export_onnx(run, folder, o)
        except VerificationFailed:
            if o.keep_failed:
                shutil.copytree(folder, target.with_name(f"{target.name}.failed"), dirs_exist_ok=True)
            raise
        step("measuring")
        receipt = _receipt(model, run, folder, level, plan, facts, o)
        write_card(folder, receipt, target.name, code, level.runs_code)
        receipt.write(folder)
    return receipt


def check_export(model: Model, directory: StrPath, options: ExportOptions) -> None:
    """Raise the errors of an export that do not depend on the model's state; call this before long computations.

    Raises: UsageError for an unknown opset, or an option that the task does not have; MissingExtra; ExportError if the
        source would be replaced; DestinationExists.
    """
    target = target_path(directory)
    if model.task != LANGUAGE_MODEL:
        given = {"onnx_cache": options.onnx_cache, "text": options.text is not None}
        for name in (name for name, asked in given.items() if asked):
            raise UsageError("this option is for language models", where=name, expected=f"a {LANGUAGE_MODEL}",
                             got=model.task)  # fmt: skip
    if options.opset not in OPSETS:
        raise UsageError("unknown opset", where="opset", expected=" or ".join(map(str, OPSETS)), got=options.opset)
    if options.check == "required" and not transformers_installed():
        raise MissingExtra("hf", "checking an export")
    source, folder = model.directory.resolve(), target.resolve()
    if model.opened and (source == folder or folder in source.parents):
        what = f"the target {'is' if source == folder else 'contains'} the directory of the model"
        raise ExportError(what, where=str(target), fix="choose another directory: source files are never written")
    check_free(target, options.overwrite)


def _refuse_non_finite(model: Model) -> None:
    """Raise ExportError if edits or training made a weight non-finite; the source itself may have such values."""
    p = model.program
    for key, count, first in non_finite(p):
        if p.weights.reference_of(p.weights.array(key)) == SOURCE:
            continue
        name, before = p.weights[key].name, 0
        if model.checkpoint is not None and name in model.checkpoint:
            before = next((n for other, n, _ in non_finite(model.original) if other == name), 0)
        if count > before:
            got = f"{count} values, the first at {first}" + (f"; the file has {before}" if before else "")
            fix = "undo the edit or training that produced these values"
            raise ExportError("an edited or trained weight has values that are not finite", where=key, got=got, fix=fix)


def _rounded(model: Model, dtype: str) -> Model:
    """Return the model with weights rounded to `dtype` and cast back: the reference for the exported files."""
    p, target = model.program.fork(), named(dtype)
    if not target.is_float:
        what = "weights cannot be stored in this dtype"
        raise UsageError(what, where="dtype", expected="a floating dtype", got=dtype)
    with p.edit(f"round to {dtype}") as e:
        for key in {p.key(n) for n in p.params()}:
            array = p.weights.array(key)
            if array.dtype.is_float and array.dtype is not target:
                e.set_weight(key, rounded(key, array, target))
    return model.with_program(p)


@dataclass(frozen=True, slots=True)
class _ProgramOutput:
    """Output of the program for the examples of the check, computed with the weights as they will be stored.

    `here` has the outputs and greedy tokens. If they are not finite, it is None and `warnings` states the reason.
    """

    model: Model
    rows: Sequence[Example]
    here: LoaderOutput | None
    warnings: tuple[str, ...] = ()

    def margin(self, prompt: int, at: int) -> float:
        """Return the gap between the two best logits after prompt number `prompt` and its first `at` greedy tokens."""
        assert self.here is not None
        ids = np.concatenate([self.rows[prompt][IDS], self.here.greedy[prompt][:at]])
        best = np.sort(self.model.logits(ids)[-1])
        return float(best[-1] - best[-2])


def _run(model: Model, rows: Sequence[Example]) -> _ProgramOutput:
    try:
        return _ProgramOutput(model, rows, compute_here(model, rows))
    except NonFinite as error:
        why = f"nothing was compared: {error.what} ({error.where}: {error.got})"
        return _ProgramOutput(model, rows, None, (why,))


def _check(run: _ProgramOutput, folder: Path, level: ExportLevel, exact: bool, code: tuple[str, str]) -> dict[str, Any]:
    """Load the files in a clean process, compare its results with the program's, and return the receipt's `check`.

    The loader is transformers, or this package if transformers is not installed; exports with code are then not
    checked. `code` is (final name of the directory, source that loads it). Raises: VerificationFailed.
    """
    loader = "transformers" if transformers_installed() else "graphwright"
    if loader == "graphwright" and level.runs_code:
        return {}
    rows = list(run.rows) if run.here is not None else []
    snippet = code if loader == "transformers" else None
    made_by = level.made_by
    tokens = greedy_tokens(run.model.program, rows)
    there = compute_there(folder, rows, loader=loader, made_by=made_by, trust=level.runs_code, tokens=tokens,
                          snippet=snippet)  # fmt: skip
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            what = f"{loader} reports {name.replace('_', ' ')} when it loads the exported files"
            raise VerificationFailed(what, got=", ".join(there.facts[name][:6]))
    facts = {"loader": loader, "made_by": made_by, **there.facts, "trust_remote_code": level.runs_code}
    if run.here is None:
        return facts
    tolerance = LOW if run.model.compute != "float32" else EXACT if exact else ROUNDED
    try:
        compared = compare(run.here, there, tolerance, run.margin)
    except VerificationFailed:
        tolerance = max(tolerance, rounding_tolerance(run.model, rows, run.here.outputs))
        compared = compare(run.here, there, tolerance, run.margin)
    error = {k: compared.pop(k) for k in ("max_abs", "max_rel", "tol")}
    tokens = [len(g) for g in run.here.greedy]
    return {**facts, "prompts": len(rows), "tokens": tokens, "export_error": error, **compared}


def _export_onnx(run: _ProgramOutput, folder: Path, o: ExportOptions) -> dict[str, Any]:
    """Write `model.onnx`, and compare its results with the program's. Raises: VerificationFailed."""
    from graphwright.models.onnx import check_onnx, compare_onnx, save_onnx

    path = folder / "model.onnx"
    save_onnx(run.model.program, path, opset=o.opset, cache=o.onnx_cache)
    if run.here is None or o.check == "none":
        return {}
    if run.model.task != LANGUAGE_MODEL:
        found = check_onnx(run.model.program, path)
        return {"onnx": {"opset": o.opset, "cache": False, **found}}
    prompts = [row[IDS] for row in run.rows]
    found = compare_onnx(path, prompts, run.here.logits, run.here.greedy if o.onnx_cache else None)
    return {"onnx": {"opset": o.opset, "cache": o.onnx_cache, **found}}


def _source(model: Model) -> Model | None:
    """Return the model before all edits; None if it was made from a config, or its undo history was not saved."""
    if model.checkpoint is not None:
        return model.with_program(model.original)
    try:
        return model.with_program(model.program.at(-1)) if model.opened else None
    except NotUndoable:
        return None


def _drift(source: Model | None, run: _ProgramOutput, text: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the drift of the exported model's outputs from the source's, and warnings if it could not be measured."""
    moved: dict[str, Any] = {}
    if run.here is None:
        return moved, []
    warnings = []
    if run.model.task != LANGUAGE_MODEL:
        before = _run(source, run.rows).here if source is not None else None
        return ({"max_abs_doutputs": _moved(before, run.here)} if before is not None else {}), []
    if source is not None and source.vocab != run.model.vocab:
        warnings.append(f"drift was not measured: logits of {run.model.vocab} ids against {source.vocab} of the source")
    elif source is not None:
        try:
            moved = drift([source.logits(row[IDS]) for row in run.rows], run.here.logits)
        except NonFinite as error:
            warnings.append(f"drift was not measured: {error.where} of the source has {error.got}")
            source = None
    if text is not None:
        sides = {"before": source, "after": run.model}
        scores = {name: m.perplexity(text) for name, m in sides.items() if m is not None}
        facts = {"bytes": scores["after"].bytes, "text_sha256": sha256(text.encode()).hexdigest()}
        moved["bits_per_byte"] = {**{name: s.bits_per_byte for name, s in scores.items()}, **facts}
    return moved, warnings


def _moved(before: LoaderOutput, after: LoaderOutput) -> dict[str, float]:
    """Return the largest difference of each output that kept its shape."""
    found: dict[str, float] = {}
    for a, b in zip(before.outputs, after.outputs, strict=True):
        for name in a.keys() & b.keys():
            if a[name].shape == b[name].shape and a[name].size:
                moved = float(np.abs(a[name].astype(np.float64) - b[name]).max())
                found[name] = max(found.get(name, 0.0), moved)
    return dict(sorted(found.items()))


def _receipt(
    model: Model, run: _ProgramOutput, folder: Path, level: ExportLevel, plan: ExportPlan, facts: dict[str, Any],
    o: ExportOptions,
) -> Receipt:  # fmt: skip
    """Measure drift and cost, and return the receipt of the files in `folder`; `facts` are results of the check."""
    from graphwright import __version__

    p, here, original = model.program, run.here, _source(model)
    moved, warnings = _drift(original, run, o.text)
    moved |= {"predicted": dict(o.predicted)} if o.predicted else {}
    confirmed = facts.get("loader") == "transformers" and "export_error" in facts
    if not confirmed:
        warnings.insert(0, "not confirmed: transformers has not computed equal results from these files")
    if loading_options(level.written, folder, level.runs_code) == EAGER:
        warnings.append(UNALIGNED)
    if lacks_rows(model):
        warnings.append("the tokenizer was left out: it has ids for which the embedding has no row")
    source: dict[str, Any] = {"name": model.directory.name}
    if model.opened:
        source["files"] = file_rows(model.directory)
    if original is not None:
        source["program_hash"] = original.program.hash()
    before = cost(original) if original is not None else {}
    if model.checkpoint is not None:
        before["nonzero_parameters"] = weight_counts(model.directory)["nonzero_parameters"]
    after = {
        **cost(level.written),
        **weight_counts(folder, level.tables),
    }  # of the files, which may hold zeros for removed units
    costs: dict[str, Any] = {k: ({"before": before[k]} if k in before else {}) | {"after": v} for k, v in after.items()}
    for name, value in cost(model).items():
        costs[name] |= {} if level.written is model or value == costs[name]["after"] else {"program": value}
    if o.timed:
        costs |= latency(original, level.written, model, run.rows[0])
    probe: dict[str, Any] = {}
    if here is not None and model.task == LANGUAGE_MODEL:
        probe = make_probe(run.rows[0], here.outputs[0], here.greedy)
    elif here is not None:
        inputs = random_facts(model.program)[0]
        probe = {"inputs": inputs, **make_probe({}, run.model.outputs(**random_example(inputs, 0)), ())}
    given = {f.name: getattr(o, f.name) for f in fields(o) if f.name not in ("prompts", "text", "predicted")}
    edits, journal = p.history.undoable, {"entries": len(p.journal), "hash": p.journal.hash}
    return Receipt(
        schema=SCHEMA, created=datetime.now(UTC).isoformat(timespec="seconds"), graphwright=__version__,
        level=level.number, level_name=level.name, options=given,
        exact=run.model is model and plan.at(level.number).exact, confirmed=confirmed,
        not_better=list(plan.why_not(level.number)), source=source,
        result={"files": file_rows(folder), "program_hash": p.hash(), "tensors": tensor_digests(folder)},
        journal={**journal, "by_author": dict(Counter(e.author for e in edits)), "edits": edit_rows(model)},
        check=facts, drift=moved,
        cost=costs,
        probe=probe, warnings=[*warnings, *level.warnings, *run.warnings, *(w for e in edits for w in e.warnings)],
    )  # fmt: skip
