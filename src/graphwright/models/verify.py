"""Verifying an export against its receipt: files, headers, a clean load, and the stored probe computed again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.files import sha256_file
from graphwright.models.clean_process import compute_there, transformers_installed
from graphwright.models.errors import VerificationFailed
from graphwright.models.receipt import Receipt
from graphwright.safetensors import Checkpoint, CheckpointError

_TOLERANCE = 1e-3
"""Relative difference of the probe's logits that another machine's rounding may make."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Attributes:
        problems: what does not hold, each naming the file, key or figure.
        checked: what was checked and holds.
        unchecked: what could not be checked, and why.
    """

    problems: tuple[str, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 all holds, 1 something differs, 3 something could not be checked."""
        return 1 if self.problems else 3 if self.unchecked else 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"problems": list(self.problems), "checked": list(self.checked), "unchecked": list(self.unchecked)}


def verify(directory: str | Path) -> Verification:
    """Check an exported directory; never raises for what is wrong with it, only for a directory that is not there."""
    place = Path(directory)
    problems: list[str] = []
    checked: list[str] = []
    unchecked: list[str] = []
    try:
        receipt = Receipt.read(place)
    except GraphwrightError as error:
        return Verification((str(error),), (), ())
    checked.append("receipt.json: sha256 of its own text")
    _files(place, receipt, problems, checked)
    try:
        with Checkpoint(place) as checkpoint:
            checked.append(f"{len(checkpoint)} tensor headers")
    except CheckpointError as error:
        problems.append(str(error))
    if problems:
        return Verification(tuple(problems), tuple(checked), tuple(unchecked))
    if not transformers_installed():
        unchecked.append("loading with transformers: not installed (pip install 'graphwright[hf]')")
    else:
        try:
            _probe(place, receipt, problems, checked)
        except VerificationFailed as error:
            problems.append(str(error))
    return Verification(tuple(problems), tuple(checked), tuple(unchecked))


def _files(place: Path, receipt: Receipt, problems: list[str], checked: list[str]) -> None:
    for row in receipt.result["files"]:
        path = place / row["name"]
        if not path.is_file():
            problems.append(f"{row['name']}: missing")
        elif sha256_file(path) != row["sha256"]:
            problems.append(f"{row['name']}: changed since the receipt was written")
        else:
            checked.append(f"{row['name']}: sha256")


def _probe(place: Path, receipt: Receipt, problems: list[str], checked: list[str]) -> None:
    ids = np.asarray(receipt.probe["ids"], np.int64)
    wanted = np.asarray(receipt.probe["greedy"], np.int64)
    trust = receipt.rung == 5  # also where the export itself was not proved
    there = compute_there(place, [ids], trust=trust, tokens=max(len(wanted), 1))
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            problems.append(f"transformers reports {name.replace('_', ' ')}: {there.facts[name][:4]}")
    last = there.logits[0][-1]
    for token, logit in receipt.probe["top5"]:
        if abs(float(last[token]) - logit) > _TOLERANCE * max(1.0, abs(logit)):
            problems.append(f"probe: logit of token {token} is {float(last[token]):.5f}, the receipt says {logit:.5f}")
            return
    if not np.array_equal(there.greedy[0][: len(wanted)], wanted[: len(there.greedy[0])]):
        problems.append(f"probe: greedy tokens {there.greedy[0][:8].tolist()}..., the receipt says {wanted[:8].tolist()}...")
        return
    checked.append(f"probe: top-5 logits and {len(wanted)} greedy tokens, by transformers {there.facts['transformers']}")
