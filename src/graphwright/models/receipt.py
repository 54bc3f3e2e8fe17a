"""The receipt of an export: what was changed, how far the files are from the program, and who confirmed it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from graphwright.files import JsonError, atomic_write, read_json
from graphwright.graph import canonical_json
from graphwright.models.errors import ExportError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """Every number in it was measured in the call that made it; what was not measured is absent.

    Attributes:
        schema, created, graphwright: version of this format, UTC time, version of the package.
        rung, prefer, exact: how it was exported, and whether the files hold exactly the program's function.
        confirmed: True if transformers loaded the files in a clean process and agreed.
        not_better: why no lower rung: [{rung, reason, path}].
        source, result: {name, files: [{name, bytes, sha256}], program_hash} before, {files, program_hash} after.
        journal: {entries, hash, by_author, edits: [{why, author, summary}]}.
        check: loader, class, versions, prompts, tokens, export_error {max_abs, max_rel, tol}, greedy_equal.
        drift: program against source: max_abs_dlogits, mean_kl_nats, top1_agreement.
        cost: parameters, bytes, flops_per_token, kv_bytes_per_token, latency_ms; each {before, after} where both exist.
        probe: {ids, top5, greedy} to verify the files by later.
        warnings: what a reader should know.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values, with `sha256` over the canonical JSON of the rest."""
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        body = json.loads(json.dumps(body))
        return {**body, "sha256": digest(body)}

    def write(self, directory: Path) -> None:
        """Write `receipt.json`."""
        atomic_write(directory / "receipt.json", (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @staticmethod
    def read(directory: Path) -> Receipt:
        """Raises: ExportError if there is none, it is of another schema, or it was changed."""
        path = directory / "receipt.json"
        if not path.is_file():
            raise ExportError("no receipt here", where=str(directory), fix="only exports of this package have one")
        try:
            data = read_json(path, 8 << 20, nesting=16)
        except JsonError as error:
            raise ExportError("the receipt cannot be read", where=str(path), got=str(error)) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ExportError("a receipt of another schema", where=str(path), expected=SCHEMA, got=data.get("schema") if isinstance(data, dict) else None)
        claimed = data.pop("sha256", None)
        if digest(data) != claimed:
            raise ExportError("the receipt was changed after it was written", where=str(path), expected=claimed, got=digest(data))
        return Receipt(**{f.name: data[f.name] for f in fields(Receipt)})

    def summary(self) -> list[tuple[str, str]]:
        """The rows that people read: (label, value)."""
        rows = [("rung", f"{self.rung} ({'exact' if self.exact else 'inexact'})"),
                ("confirmed", "yes, by transformers in a clean process" if self.confirmed else "no")]  # fmt: skip
        if "export_error" in self.check:
            error = self.check["export_error"]
            rows.append(("files against program", f"max |d logits| {error['max_abs']:.2e} (relative {error['max_rel']:.1e})"))
        if self.check.get("greedy_equal"):
            equal, tokens = self.check["greedy_equal"], self.check["tokens"]
            rows.append(("greedy tokens equal", f"{sum(equal)} of {sum(tokens)} over {len(equal)} prompts"))
        if self.drift:
            rows.append(("program against source", f"max |d logits| {self.drift['max_abs_dlogits']:.3g}, "
                         f"KL {self.drift['mean_kl_nats']:.3g} nats, top-1 equal {100 * self.drift['top1_agreement']:.1f} %"))  # fmt: skip
        for name, unit in (("parameters", ""), ("bytes", ""), ("flops_per_token", ""), ("kv_bytes_per_token", "")):
            value = self.cost.get(name, {})
            if "after" in value:
                before = f"{value['before']:,} -> " if "before" in value and value["before"] != value["after"] else ""
                rows.append((name.replace("_", " "), f"{before}{value['after']:,}{unit}"))
        rows.append(("edits", f"{len(self.journal['edits'])}, journal {self.journal['hash'][:12]}"))
        return rows


def digest(body: dict[str, Any]) -> str:
    """sha256 of the canonical JSON."""
    return sha256(canonical_json(body).encode()).hexdigest()
