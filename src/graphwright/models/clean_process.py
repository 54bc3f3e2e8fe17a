"""Proof by somebody else: an exported directory, loaded in a clean process, must compute what the program computes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.models.errors import VerificationFailed
from graphwright.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from graphwright.models.model import Model

TIMEOUT_S = 600
GREEDY_TOKENS = 32
_TEXTS = (
    "The following", "def __init__(self, *args, **kwargs):\n", "In a list of numbers, ", "Once upon a time",
    "If the two values are not equal, the result", "import os\n\n", "A class", "The quick brown fox jumps over the lazy dog.",
)  # fmt: skip
"""Prompts of the check when the caller gives none; short, so that every vocabulary can spell them."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a loader computed: logits float32 [T, V] and greedy ids per prompt, and facts about the process."""

    logits: list[np.ndarray]
    greedy: list[np.ndarray]
    facts: dict[str, Any]


def check_prompts(tokenizer: Tokenizer | None, vocab: int, prompts: Sequence[Any] | None = None) -> list[np.ndarray]:
    """Ids of the prompts to check with: those given, else built-in texts, else Philox ids of 64 tokens."""
    from graphwright.array import random

    if prompts is not None and tokenizer is not None:
        return [np.asarray(tokenizer.encode(p) if isinstance(p, str) else p, np.int64) for p in prompts]
    if tokenizer is not None:
        made = [np.asarray(tokenizer.encode(t, add_special_tokens=False), np.int64) for t in _TEXTS]
        return [ids for ids in made if len(ids) and ids.max() < vocab]
    return [random.integers(0, vocab, 64, seed=0, stream=9, step=i) for i in range(8)]


def compute_here(model: Model, prompts: Sequence[np.ndarray], tokens: int = GREEDY_TOKENS) -> Computed:
    """What the program computes, in this process."""
    logits = [model.logits(ids) for ids in prompts]
    greedy = [np.asarray(model.generate(ids, tokens).ids, np.int64) for ids in prompts]  # type: ignore[union-attr]  # n = 1
    return Computed(logits, greedy, {})


def compute_there(directory: Path, prompts: Sequence[np.ndarray], *, trust: bool = False, tokens: int = GREEDY_TOKENS) -> Computed:
    """What transformers computes from the files, in a clean process that cannot import this package.

    Raises: VerificationFailed with the process's last words if it fails or takes longer than 600 s.
    """
    script = Path(__file__).with_name("clean_check.py")
    with tempfile.TemporaryDirectory() as place:
        np.savez(Path(place) / "prompts.npz", **{f"{i:04}": ids for i, ids in enumerate(prompts)})
        command = [sys.executable, "-I", str(script), str(directory.resolve()), f"{place}/prompts.npz", place, str(tokens),
                   "1" if trust else "0"]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise VerificationFailed("the clean process did not finish", where=str(directory), expected=f"< {TIMEOUT_S} s") from error
        if done.returncode:
            words = done.stderr.strip().splitlines()
            raise VerificationFailed("transformers could not load what was written", where=directory.name,
                                     got="\n".join(words[-6:]) or f"exit {done.returncode}")  # fmt: skip
        facts = json.loads((Path(place) / "facts.json").read_text(encoding="utf-8"))
        logits = [a for _, a in sorted(np.load(f"{place}/logits.npz").items())]
        greedy = [a for _, a in sorted(np.load(f"{place}/greedy.npz").items())]
    return Computed(logits, greedy, facts)


def transformers_installed() -> bool:
    """True if the clean check can run; imports nothing."""
    return find_spec("transformers") is not None


def compare(here: Computed, there: Computed, tolerance: float) -> dict[str, Any]:
    """Largest differences and greedy agreement. Raises: VerificationFailed if logits or tokens differ by more than rounding.

    Logits pass if max abs diff <= tolerance · max abs; greedy tokens if they are equal, or the two best logits at the
    first difference lie closer than twice the largest difference.
    """
    worst, scale = 0.0, 0.0
    for a, b in zip(here.logits, there.logits, strict=True):
        if a.shape != b.shape:
            raise VerificationFailed("logits of another shape", expected=a.shape, got=b.shape)
        worst, scale = max(worst, float(np.abs(a - b).max())), max(scale, float(np.abs(a).max()))
    if not worst <= tolerance * scale:
        raise VerificationFailed("the files compute other logits than the program", expected=f"<= {tolerance * scale:.3g}", got=worst)
    equal = []
    for i, (a, b) in enumerate(zip(here.greedy, there.greedy, strict=True)):
        same = min(len(a), len(b))
        equal.append(int(next((k for k in range(same) if a[k] != b[k]), same)))
        if equal[-1] < max(len(a), len(b)) and equal[-1] == same and len(a) != len(b):
            raise VerificationFailed("one loader stopped earlier", where=f"prompt {i}", expected=len(a), got=len(b))
    return {"max_abs": worst, "max_rel": worst / scale if scale else 0.0, "tol": tolerance, "greedy_equal": equal}
