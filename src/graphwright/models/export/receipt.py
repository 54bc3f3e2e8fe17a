"""The receipt of an export: what was edited, how the files compare with the program, and which loader confirmed it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field, fields
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import BY_TAG
from graphwright.errors import NonFinite
from graphwright.files import JsonError, atomic_write, blake2b_128, read_json, sha256_file
from graphwright.graph import canonical_json
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.errors import ExportError
from graphwright.models.export.examples import GREEDY_TOKENS, IDS, Example
from graphwright.models.generation.recomputed import is_cacheable
from graphwright.models.generation.text import feeds_of, padded_ids
from graphwright.models.generation.timed import decode_calls, lengths, prefill_calls, run_call
from graphwright.report import Report
from graphwright.safetensors import Checkpoint
from graphwright.timing import TimeComparison, compare_times, measure_time

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

SCHEMA = 4
_KINDS = {"int": int, "str": str, "bool": bool, "list": list, "dict": dict}


@dataclass(frozen=True, slots=True, repr=False)
class Receipt(Report):
    """Figures of one export, all measured in the call that wrote it; figures that were not measured are absent.

    Attributes:
        schema, created, graphwright: version of this format, UTC time, version of the package.
        level, level_name: number and name of the export level.
        options: the `ExportOptions`, without prompts, text and predictions; `check` and `drift` describe these.
        exact: whether the files compute exactly the program's function.
        confirmed: True if transformers loaded the files in a clean process and agreed.
        not_better: why lower levels were not taken: [{level, name, reason, path}].
        source: {name, files: [{name, bytes, sha256}], program_hash}.
        result: {files, program_hash, tensors: {key: BLAKE2b-128}}.
        journal: {entries, hash, by_author, edits: [{why, author, summary}]}.
        check: loader, made_by, class, versions, prompts, tokens, export_error {max_abs, max_rel, tol}, greedy_equal,
            onnx.
        drift: program against source: of language models max_abs_dlogits, mean_kl_nats, top1_agreement, of others
            max_abs_doutputs {name: figure}; for a text, bits_per_byte {before, after, bytes, text_sha256}; figures that
            a pass predicted, predicted {name: figure}.
        cost: parameters, bytes, flops_per_token, kv_bytes_per_token, each {before, after, program}: of the source, of
            the files, and of the edited program where the files hold zeros for removed units; latency_ms with prefill
            and decode, or run for other tasks, each a `TimeComparison`, or {after} without a source or an edit.
        probe: {ids, top5, greedy}, or of another task {inputs, outputs, largest}, for a later verification.
        warnings: sentences for the reader.
        unknown: fields of a later version, preserved when the receipt is written again.
    """

    schema: int
    created: str
    graphwright: str
    level: int
    level_name: str
    options: dict[str, Any]
    exact: bool
    confirmed: bool
    not_better: list[dict[str, Any]]
    source: dict[str, Any]
    result: dict[str, Any]
    journal: dict[str, Any]
    check: dict[str, Any]
    drift: dict[str, Any]
    cost: dict[str, Any]
    probe: dict[str, Any]
    warnings: list[str]
    unknown: dict[str, Any] = field(default_factory=dict)
    HIDDEN: ClassVar = ("unknown",)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the fields, with the `sha256` of their canonical JSON."""
        body = {**self.unknown, **Report.to_json(self)}
        return {**body, "sha256": digest(body)}

    def write(self, directory: Path) -> None:
        """Write `receipt.json`."""
        atomic_write(directory / "receipt.json", (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @staticmethod
    def read(directory: Path) -> Receipt:
        """Read `receipt.json`. Raises: ExportError if it is missing, damaged or changed, or has an unknown schema."""
        path = directory / "receipt.json"
        if not path.is_file():
            raise ExportError("the directory has no receipt: receipt.json is missing", where=str(directory),
                              fix="give a directory that graphwright export wrote")  # fmt: skip
        try:
            data = read_json(path, 64 << 20, nesting=16)
        except JsonError as error:
            raise ExportError("the receipt cannot be read", where=str(path), got=str(error)) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ExportError("the receipt has an unknown schema", where=str(path), expected=SCHEMA, got=got)
        claimed, found = data.pop("sha256", None), digest(data)
        if found != claimed:
            what = "the receipt was changed after it was written"
            raise ExportError(what, where=str(path), expected=f"sha256 {claimed}", got=found)
        kinds = {f.name: _KINDS[str(f.type).partition("[")[0]] for f in fields(Receipt) if f.name != "unknown"}
        if wrong := [name for name, kind in kinds.items() if not isinstance(data.get(name), kind)]:
            what = "fields of the receipt are missing or have the wrong type"
            raise ExportError(what, where=str(path), got=", ".join(wrong))
        receipt = Receipt(**{name: data.pop(name) for name in kinds}, unknown=data)
        try:
            str(receipt)  # reads the fields that are shown
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            got = f"{type(error).__name__}: {error}"[:120]
            raise ExportError("a field of the receipt has an unexpected form", where=str(path), got=got) from error
        return receipt

    def summary(self) -> list[tuple[str, str]]:
        """Return the receipt as rows (label, value) to be shown to the user."""
        rows = [
            ("export level", f"{self.level} {self.level_name} ({'exact' if self.exact else 'inexact'})"),
            ("confirmed", "yes, by transformers in a clean process" if self.confirmed else "no"),
        ]
        if "export_error" in self.check:
            worst, share = self.check["export_error"]["max_abs"], self.check["export_error"]["max_rel"]
            what = "logits" if self.check.get("greedy_equal") else "outputs"
            rows.append(("files against program", f"{what} within {worst:.2e} (relative {share:.1e})"))
        if self.check.get("greedy_equal"):
            equal, tokens = self.check["greedy_equal"], self.check["tokens"]
            rows.append(("greedy tokens equal", f"{sum(equal)} of {sum(tokens)} over {len(equal)} prompts"))
        if "onnx" in self.check:
            onnx = self.check["onnx"]
            kind = f"opset {onnx['opset']}{' with cache' if onnx['cache'] else ''}"
            rows.append(("model.onnx", f"{kind}, onnxruntime within {onnx['max_abs']:.2e} ({onnx['max_rel']:.1e})"))
        if "max_abs_dlogits" in self.drift:
            moved, nats = self.drift["max_abs_dlogits"], self.drift["mean_kl_nats"]
            same = f"top-1 equal {100 * self.drift['top1_agreement']:.1f} %"
            rows.append(("program against source", f"logits within {moved:.3g}, KL {nats:.3g} nats, {same}"))
        for name, moved in self.drift.get("max_abs_doutputs", {}).items():
            rows.append(("program against source", f"{name} within {moved:.3g}"))
        if bits := self.drift.get("bits_per_byte"):
            before = f"{bits['before']:.4f} -> " if "before" in bits else ""
            rows.append(("bits per byte", f"{before}{bits['after']:.4f}, of {bits['bytes']:,} bytes"))
        rows += [(f"predicted {name}", f"{value:.3g}") for name, value in self.drift.get("predicted", {}).items()]
        for name in ("parameters", "bytes", "flops_per_token", "kv_bytes_per_token"):
            value = self.cost.get(name, {})
            if "after" in value:
                before = f"{value['before']:,} -> " if value.get("before", value["after"]) != value["after"] else ""
                program = f" in the files, {value['program']:,} in the program" if "program" in value else ""
                rows.append((name.replace("_", " "), f"{before}{value['after']:,}{program}"))
        times = self.cost.get("latency_ms", {})
        prefill = f"ms for {times.get('context')} tokens"
        for name, label in (("prefill", prefill), ("decode", "ms per token"), ("run", "ms per run")):
            value = dict(times.get(name, {}))
            if "before" in value:
                of_program = value.pop("program", None)
                rows.append((label, str(_comparison(value))))
                rows += [(f"{label}, program", str(_comparison(of_program)))] if of_program else []
            elif value:
                rows.append((label, f"{value['after']:.4g}"))
        made = len(self.journal["edits"])
        rows.append(("edits", f"{made}, journal {self.journal['hash'][:12]}" if self.journal["entries"] else "none"))
        return rows

    def _text(self) -> str:
        rows = [*self.summary(), *(("warning", warning) for warning in self.warnings)]
        return "\n".join(f"{label:<22} {value}" for label, value in rows)


def digest(body: dict[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of a receipt."""
    return sha256(canonical_json(body).encode()).hexdigest()


def _comparison(value: dict[str, Any]) -> TimeComparison:
    return TimeComparison(**{f.name: value[f.name] for f in fields(TimeComparison)})


# -- figures -----------------------------------------------------------------------------------------------------------
def file_rows(directory: Path) -> list[dict[str, Any]]:
    """Return dicts with name, bytes and sha256 of every file except receipt.json and README.md."""
    files = [f for f in sorted(directory.iterdir()) if f.is_file() and f.name not in ("receipt.json", "README.md")]
    return [{"name": f.name, "bytes": f.stat().st_size, "sha256": sha256_file(f)} for f in files]


def tensor_digests(directory: Path) -> dict[str, str]:
    """Map each tensor's key to the BLAKE2b-128 of its bytes, so that damage can be located."""
    with Checkpoint(directory) as checkpoint:
        return {key: blake2b_128(checkpoint.bytes(key)) for key in checkpoint}


def weight_counts(directory: Path, without: Container[str] = ()) -> dict[str, int]:
    """Count parameters, nonzero parameters and bytes of the weights in a directory; `without` are keys to leave out."""
    with Checkpoint(directory) as checkpoint:
        counted = [key for key in checkpoint if key not in without]
        infos = [checkpoint.info(key) for key in counted]
        return {
            "parameters": sum(prod(i.shape) for i in infos),
            "nonzero_parameters": sum(_nonzero(checkpoint, key) for key in counted),
            "bytes": sum(i.end - i.begin for i in infos),
        }


def _nonzero(checkpoint: Checkpoint, key: str) -> int:
    """Count the entries that are neither 0 nor -0; for a dtype that is not floating, count all entries."""
    info = checkpoint.info(key)
    kind = BY_TAG.get(info.tag)
    if kind is None or not kind.is_float or kind.itemsize not in (2, 4, 8):
        return prod(info.shape)
    bits = np.frombuffer(checkpoint.bytes(key), f"<u{kind.itemsize}")
    return int(np.count_nonzero(bits & ((1 << (8 * kind.itemsize - 1)) - 1)))


def edit_rows(model: Model) -> list[dict[str, str]]:
    """Return dicts with why, author and summary of each edit that is not undone; summary counts changes by kind."""
    rows = []
    for entry in model.program.history.undoable:
        kinds = Counter(e["edit"] for e in entry.edits)
        summary = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        rows.append({"why": entry.why, "author": entry.author, "summary": summary})
    return rows


def cost(model: Model) -> dict[str, Any]:
    """Return parameters, bytes, and FLOPs and cache bytes per token of a model's program."""
    facts = model.inspect()
    found: dict[str, Any] = {"parameters": facts.parameters, "bytes": facts.nbytes}
    return found | {name: getattr(facts, name) for name in ("flops_per_token", "kv_bytes_per_token")}


def latency(source: Model | None, written: Model, model: Model, example: Example) -> dict[str, Any]:
    """Measure the ms to prefill a prompt and to decode a token, or without a cache to run an example, in turns.

    Args:
        source: the model before all edits, if it is known; not compared with an equal model.
        written: the model that the files contain, which is compared with the source.
        model: the edited model, compared with the source as `program` if it is another one than `written`.
    Returns: {latency_ms: {runtime, context, threads, prefill, decode}}; empty if outputs are not finite.
    """
    from graphwright.array.vm.running.call import get_num_threads  # loads numba

    if source is not None and written is model and source.program.hash() == model.program.hash():
        source = None  # equal programs differ by noise alone
    sides = {"after": written} | ({} if written is model or source is None else {"program": model})
    kinds: dict[str, Any] = {"prefill": prefill_calls, "decode": decode_calls}
    programs = [m.program for m in (source, written, model) if m is not None and m.arch.imported is not None]
    context: dict[str, Any] = {}
    if model.task != LANGUAGE_MODEL or not all(map(is_cacheable, programs)):
        kinds = {"run": lambda *programs: [run_call(p, _feeds(p, example)) for p in programs]}
    else:
        context["context"] = lengths(*(m.program for m in (source, written, model) if m is not None))[0]
    found: dict[str, Any] = {name: {} for name in kinds}
    try:
        for name, made in kinds.items():
            if source is None:
                found[name] = {"after": measure_time(made(written.program)[0])}
                continue
            pairs = {side: made(source.program, m.program) for side, m in sides.items()}
            compared = {side: compare_times(old, new) for side, (old, new) in pairs.items()}
            found[name] = compared["after"].to_json() | {side: c.to_json() for side, c in compared.items()
                                                         if side != "after"}  # fmt: skip
    except NonFinite:  # weights of the source or of the model are NaN, so there is nothing to time
        return {}
    return {"latency_ms": {"runtime": "graphwright", **context, "threads": get_num_threads(), **found}}


def _feeds(p: Program, example: Example) -> Example:
    """Return the inputs of a program for an example, which of a language model has the ids of one text alone."""
    return feeds_of(p, padded_ids(p, example[IDS][None])) if "ids" in p.input_names() else example


# -- the card ----------------------------------------------------------------------------------------------------------
def write_card(directory: Path, receipt: Receipt, name: str, code: str, runs_code: bool) -> None:
    """Write `README.md`: figures of the receipt, and `code`, the source that loads the directory as `name`."""
    base = _plain(receipt.source["name"])
    rows = "\n".join(f"| {label} | {value} |" for label, value in receipt.summary())
    made = receipt.journal["edits"]
    trust = " --trust-code" if runs_code else ""
    edits = "\n".join(f"{k}. {_plain(e['why'])} ({_plain(e['author'])}; {e['summary']})" for k, e in enumerate(made, 1))
    greedy = f" Greedy tokens\nper prompt: {GREEDY_TOKENS}." if receipt.check.get("greedy_equal") else ""
    text = f"""---
library_name: transformers
base_model: {json.dumps(base, ensure_ascii=False)}
---
# {_plain(name)}

Exported by Graphwright {receipt.graphwright} from `{base}`.

```python
{code.rstrip()}
```

## Edits

{edits or "None."}

## Receipt

| | |
| --- | --- |
{rows}

`receipt.json` holds all figures; `graphwright verify {_plain(name)}{trust}` checks the files against it.{greedy}
"""
    (directory / "README.md").write_text(text, encoding="utf-8")


def _plain(text: str) -> str:
    """Remove line breaks and markup from a text."""
    return re.sub(r"[<>`|\[\]]", " ", " ".join(text.split()))
