"""The receipt of an export: what was changed, how far the files are from the program, and who confirmed it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from graphwright.files import JsonError, atomic_write, read_json
from graphwright.graph import canonical_json
from graphwright.models.errors import ExportError
from graphwright.models.export.clean_process import GREEDY_TOKENS

SCHEMA = 1
_KINDS = {"int": int, "str": str, "bool": bool, "list": list, "dict": dict}


@dataclass(frozen=True, slots=True)
class Receipt:
    """Every number in it was measured in the call that made it; what was not measured is absent.

    Attributes:
        schema, created, graphwright: version of this format, UTC time, version of the package.
        rung, prefer, exact: how it was exported, and whether the files hold exactly the program's function.
        confirmed: True if transformers loaded the files in a clean process and agreed.
        not_better: why no lower rung: [{rung, reason, path}].
        source: {name, files: [{name, bytes, sha256}], program_hash}.
        result: {files, program_hash, tensors: {key: BLAKE2b-128}}.
        journal: {entries, hash, by_author, edits: [{why, author, summary}]}.
        check: loader, class, versions, prompts, tokens, export_error {max_abs, max_rel, tol}, greedy_equal, onnx.
        drift: program against source: max_abs_dlogits, mean_kl_nats, top1_agreement; of a text, bits_per_byte {before,
            after, bytes, text_sha256}; what a pass foretold, predicted {name: figure}.
        cost: parameters, bytes, flops_per_token, kv_bytes_per_token, latency_ms; each {before, after} where both exist.
        probe: {ids, top5, greedy} to verify the files by later.
        warnings: what a reader should know.
        unknown: fields of a later version, kept when the receipt is written again.
    """

    schema: int
    created: str
    graphwright: str
    rung: int
    prefer: str
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

    def to_json(self) -> dict[str, Any]:
        """Plain values, with `sha256` over the canonical JSON of the rest."""
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "unknown"}
        body = json.loads(json.dumps({**self.unknown, **body}))
        return {**body, "sha256": digest(body)}

    def write(self, directory: Path) -> None:
        """Write `receipt.json`."""
        atomic_write(directory / "receipt.json", (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @staticmethod
    def read(directory: Path) -> Receipt:
        """Raises: ExportError if there is none, it is of another schema, it was changed, or it lacks a field."""
        path = directory / "receipt.json"
        if not path.is_file():
            raise ExportError("no receipt here", where=str(directory), fix="only exports of this package have one")
        try:
            data = read_json(path, 64 << 20, nesting=16)
        except JsonError as error:
            raise ExportError("the receipt cannot be read", where=str(path), got=str(error)) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ExportError("a receipt of another schema", where=str(path), expected=SCHEMA, got=got)
        claimed, found = data.pop("sha256", None), digest(data)
        if found != claimed:
            raise ExportError(
                "the receipt was changed after it was written", where=str(path), expected=claimed, got=found
            )
        kinds = {f.name: _KINDS[str(f.type).partition("[")[0]] for f in fields(Receipt) if f.name != "unknown"}
        wrong = [name for name, kind in kinds.items() if not isinstance(data.get(name), kind)]
        if wrong:
            raise ExportError("the receipt lacks fields", where=str(path), got=", ".join(wrong))
        unknown = {name: value for name, value in data.items() if name not in kinds}
        return Receipt(**{name: data[name] for name in kinds}, unknown=unknown)

    def summary(self) -> list[tuple[str, str]]:
        """The rows that people read: (label, value)."""
        rows = [
            ("rung", f"{self.rung} ({'exact' if self.exact else 'inexact'})"),
            ("confirmed", "yes, by transformers in a clean process" if self.confirmed else "no"),
        ]
        if "export_error" in self.check:
            worst, share = self.check["export_error"]["max_abs"], self.check["export_error"]["max_rel"]
            rows.append(("files against program", f"logits within {worst:.2e} (relative {share:.1e})"))
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
        if bits := self.drift.get("bits_per_byte"):
            before = f"{bits['before']:.4f} -> " if "before" in bits else ""
            rows.append(("bits per byte", f"{before}{bits['after']:.4f}, of {bits['bytes']:,} bytes"))
        rows += [(f"predicted {name}", f"{value:.3g}") for name, value in self.drift.get("predicted", {}).items()]
        for name in ("parameters", "bytes", "flops_per_token", "kv_bytes_per_token"):
            value = self.cost.get(name, {})
            if "after" in value:
                before = f"{value['before']:,} -> " if value.get("before", value["after"]) != value["after"] else ""
                rows.append((name.replace("_", " "), f"{before}{value['after']:,}"))
        made = len(self.journal["edits"])
        rows.append(("edits", f"{made}, journal {self.journal['hash'][:12]}" if self.journal["entries"] else "none"))
        return rows


def digest(body: dict[str, Any]) -> str:
    """sha256 of the canonical JSON."""
    return sha256(canonical_json(body).encode()).hexdigest()


def snippet(name: str, trust: bool) -> str:
    """The lines that load an exported directory, run from the folder that it stands in."""
    extra = ", trust_remote_code=True" if trust else ""
    load = f"model = AutoModelForCausalLM.from_pretrained({json.dumps(f'./{name}')}{extra})"
    return f"from transformers import AutoModelForCausalLM\n\n{load}\n"


def write_card(place: Path, receipt: Receipt, name: str, code: str) -> None:
    """Write `README.md`."""
    base = _plain(receipt.source["name"])
    rows = "\n".join(f"| {label} | {value} |" for label, value in receipt.summary())
    made = receipt.journal["edits"]
    trust = " --trust-code" if receipt.rung == 5 else ""
    edits = "\n".join(f"1. {_plain(e['why'])} ({_plain(e['author'])}; {e['summary']})" for e in made)
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

`receipt.json` holds all figures; `graphwright verify {_plain(name)}{trust}` checks the files against it. Greedy tokens
per prompt: {GREEDY_TOKENS}.
"""
    (place / "README.md").write_text(text, encoding="utf-8")


def _plain(text: str) -> str:
    """A text on one line that is no markup."""
    return re.sub(r"[<>`|\[\]]", " ", " ".join(text.split()))
