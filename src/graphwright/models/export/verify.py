"""Verify an export against its receipt: files, headers, a load in a clean process, and the stored probe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.files import sha256_file
from graphwright.models.errors import VerificationFailed
from graphwright.models.export.clean_process import compute_there, transformers_installed
from graphwright.models.export.levels import LEVELS
from graphwright.models.export.receipt import Receipt, file_rows, tensor_digests
from graphwright.report import ReportBase

_TOLERANCE = 1e-3
"""Tolerated relative difference of the probe's logits; another machine rounds differently."""


@dataclass(slots=True)
class Verification(ReportBase):
    """Result of `verify`.

    Attributes:
        problems: failed checks, each with the file, key or figure.
        checked: successful checks.
        unchecked: checks that were not possible, and why.
    """

    problems: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: all checks succeeded, 1: one failed, 3: one was not possible."""
        return 1 if self.problems else 3 if self.unchecked else 0


def verify(directory: str | Path, against: str | Path | None = None, *, trust_code: bool = False) -> Verification:
    """Check an exported directory; problems are returned, never raised.

    Args:
        directory: the export.
        against: the directory that was exported; its files are compared with the receipt's list.
        trust_code: run generated modeling code, after its sha256 was checked, in a process of its own without a
            sandbox. Without it such an export is not loaded, which counts as unchecked.
    """
    place, found = Path(directory), Verification()
    try:
        receipt = Receipt.read(place)
        found.checked.append("receipt.json: sha256 of its own text")
        _compare_files(place, receipt.result, found)
        if against is not None:
            _compare_source(Path(against), receipt.source, found)
        if not found.problems:
            _probe(place, receipt, trust_code, found)
    except (GraphwrightError, OSError) as error:
        found.problems.append(str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # a forged receipt
        found.problems.append(f"receipt.json: a field has an unexpected form ({type(error).__name__}: {error})")
    return found


def _compare_files(place: Path, result: dict[str, Any], found: Verification) -> None:
    """Compare files by sha256, and tensors by digest."""
    before = len(found.problems)
    listed = {row["name"]: row["sha256"] for row in result["files"]}
    for name, wanted in listed.items():
        path = place / name
        if path.name != name:
            found.problems.append(f"{name!r}: not a plain file name")
        elif not path.is_file():
            found.problems.append(f"{name}: missing")
        elif sha256_file(path) != wanted:
            found.problems.append(f"{name}: changed since the receipt was written")
        else:
            found.checked.append(f"{name}: sha256")
    own = ("receipt.json", "README.md")  # written last, so the receipt does not list them
    present = (f.name for f in sorted(place.iterdir()) if not f.name.startswith("."))
    found.problems += [f"{name}: not in the receipt" for name in present if name not in listed and name not in own]
    now, then = tensor_digests(place), result.get("tensors", {})
    if len(found.problems) == before:
        found.checked.append(f"{len(now)} tensor headers")
    for key in dict.fromkeys([*then, *now]):
        if then.get(key) != now.get(key) and then:
            what = "missing" if key not in now else "not in the receipt" if key not in then else "other bytes"
            found.problems.append(f"tensor {key}: {what}")


def _compare_source(source: Path, facts: dict[str, Any], found: Verification) -> None:
    now = {row["name"]: row["sha256"] for row in file_rows(source)}
    for row in facts.get("files", []):
        if now.get(row["name"]) == row["sha256"]:
            found.checked.append(f"source {row['name']}: sha256")
        else:
            found.problems.append(f"source {row['name']}: differs from the exported file")
    if "files" not in facts:
        found.unchecked.append("the source: the receipt lists no source files")


def _probe(place: Path, receipt: Receipt, trust_code: bool, found: Verification) -> None:
    if not receipt.probe:
        found.unchecked.append("the probe: the receipt has none")
        return
    ids, wanted = (np.asarray(receipt.probe[name], np.int64) for name in ("ids", "greedy"))
    top = [(int(token), float(logit)) for token, logit in receipt.probe["top5"]]
    if not transformers_installed():
        found.unchecked.append("loading with transformers: not installed (pip install 'graphwright[hf]')")
        return
    runs_code = any(level.runs_code for level in LEVELS if level.number == receipt.level)
    if runs_code and not trust_code:
        code = f"runs {' and '.join(f.name for f in sorted(place.glob('*.py')))}; read the code"
        found.unchecked.append(f"the probe: loading this directory {code}, then use --trust-code (trust_code=True)")
        return
    try:
        there = compute_there(place, [ids], trust=runs_code, tokens=max(len(wanted), 1))
    except VerificationFailed as error:
        found.problems.append(str(error))
        return
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            found.problems.append(f"transformers reports {name.replace('_', ' ')}: {there.facts[name][:4]}")
    last, greedy, scale = there.logits[0][-1], there.greedy[0], max(1.0, *(abs(logit) for _, logit in top))
    off = [(t, logit) for t, logit in top if not abs(float(last[t]) - logit) <= _TOLERANCE * scale]
    if off:
        token, logit = off[0]
        found.problems.append(f"probe: logit of token {token} is {last[token]:.5f}, the receipt says {logit:.5f}")
    elif not np.array_equal(greedy[: len(wanted)], wanted[: len(greedy)]):
        found.problems.append(f"probe: greedy tokens {greedy[:8].tolist()}..., not {wanted[:8].tolist()}...")
    else:
        by = f"by transformers {there.facts['transformers']}"
        found.checked.append(f"probe: top-5 logits and {len(wanted)} greedy tokens, {by}")
