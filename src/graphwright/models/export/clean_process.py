"""Proof by somebody else: an exported directory, loaded in a clean process, must compute what the program computes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.errors import VerificationFailed

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.models.tokenizer import Tokenizer

TIMEOUT_S = 600
GREEDY_TOKENS = 32
_ROUNDING = 1e-6  # of a forward pass in float32, relative to the largest logit; measured on the test models
_TEXTS = (
    "The following",
    "def __init__(self, *args, **kwargs):\n",
    "In a list of numbers, ",
    "Once upon a time",
    "If the two values are not equal, the result",
    "import os\n\n",
    "A class",
    "The quick brown fox jumps over the lazy dog.",
)
"""Prompts of the check when the caller gives none; short, so that every vocabulary can spell them."""


@dataclass(frozen=True, slots=True)
class LoaderOutput:
    """What a loader computed: logits float32 [T, V] and greedy ids per prompt, and facts about its process."""

    logits: list[np.ndarray]
    greedy: list[np.ndarray]
    facts: dict[str, Any]


def check_prompts(tokenizer: Tokenizer | None, vocab: int, prompts: Sequence[Any] | None = None) -> list[np.ndarray]:
    """Ids of the prompts to check with: those given, else built-in texts, else Philox ids of 64 tokens.

    Raises: UsageError for a text without a tokenizer, or for none.
    """
    from graphwright.array import random

    if prompts is not None:
        if tokenizer is None and any(isinstance(p, str) for p in prompts):
            raise UsageError("the model has no tokenizer", fix="give prompts as lists of ids")
        made = [np.asarray(tokenizer.encode(p) if tokenizer and isinstance(p, str) else p, np.int64) for p in prompts]
        if not made or not all(ids.ndim == 1 and ids.size for ids in made):
            raise UsageError("the check needs prompts of at least one token", got=[ids.shape for ids in made])
        return made
    if tokenizer is not None:
        made = [np.asarray(tokenizer.encode(t, add_special_tokens=False), np.int64) for t in _TEXTS]
        if made := [ids for ids in made if len(ids) and ids.max() < vocab]:
            return made
    return [random.integers(0, vocab, 64, seed=0, stream=9, step=i) for i in range(8)]


def compute_here(model: Model, prompts: Sequence[np.ndarray], tokens: int = GREEDY_TOKENS) -> LoaderOutput:
    """What the program computes, in this process."""
    logits = [model.logits(ids) for ids in prompts]
    greedy = [np.asarray(model.generate(ids, tokens).ids, np.int64) for ids in prompts]
    return LoaderOutput(logits, greedy, {})


def compute_there(
    directory: Path,
    prompts: Sequence[np.ndarray],
    *,
    trust: bool = False,
    tokens: int = GREEDY_TOKENS,
    snippet: tuple[str, str] | None = None,
) -> LoaderOutput:
    """What transformers computes from the files, in a clean process that cannot import this package.

    Args:
        directory: what to load.
        prompts: ids.
        trust: run the directory's own code.
        tokens: how many to generate per prompt.
        snippet: (name, source) to be run with the directory under this name beside it.
    Raises: VerificationFailed with the process's last words if it fails or takes longer than 600 s.
    """
    with tempfile.TemporaryDirectory() as place:
        if snippet is not None:
            name, source = snippet
            (Path(place) / "beside").mkdir()
            (Path(place) / "beside" / name).symlink_to(directory.resolve(), target_is_directory=True)
            (Path(place) / "snippet.py").write_text(source, encoding="utf-8")
        script = Path(__file__).with_name("clean_check.py")
        arguments = [directory.resolve(), Path(place) / "prompts.npz", place, tokens, 1 if trust else 0]
        return _run(["-I", str(script), *map(str, arguments)], place, prompts, "transformers", directory)


def reopen(directory: Path, prompts: Sequence[np.ndarray], tokens: int = GREEDY_TOKENS) -> LoaderOutput:
    """What this package computes from the files in a clean process. Raises: VerificationFailed."""
    script, package = Path(__file__).with_name("clean_open.py"), Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as place:
        arguments = [package, directory.resolve(), Path(place) / "prompts.npz", place, tokens]
        return _run(["-I", str(script), *map(str, arguments)], place, prompts, "graphwright", directory)


def _run(
    command: Sequence[str], place: str, prompts: Sequence[np.ndarray], loader: str, directory: Path
) -> LoaderOutput:
    named: dict[str, Any] = {f"{i:04}": ids for i, ids in enumerate(prompts)}
    np.savez(Path(place) / "prompts.npz", **named)
    try:
        code, said = _start(command, place)
    except subprocess.TimeoutExpired as error:
        raise VerificationFailed(
            "the clean process did not finish", where=str(directory), expected=f"< {TIMEOUT_S} s"
        ) from error
    if code:
        words = said.strip().splitlines()
        raise VerificationFailed(
            f"{loader} could not load what was written",
            where=directory.name,
            got="\n".join(words[-6:]) or f"exit {code}",
        )
    facts = json.loads((Path(place) / "facts.json").read_text(encoding="utf-8"))
    logits, greedy = ([a for _, a in sorted(np.load(f"{place}/{n}.npz").items())] for n in ("logits", "greedy"))
    return LoaderOutput(logits, greedy, facts)


def _start(command: Sequence[str], place: str) -> tuple[int, str]:
    """Exit code and standard error of a new Python."""
    whole = [sys.executable, *command]
    done = subprocess.run(whole, cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


def transformers_installed() -> bool:
    """True if the clean check can run; imports nothing."""
    return find_spec("transformers") is not None


def compare(
    here: LoaderOutput, there: LoaderOutput, tolerance: float, margin: Callable[[int, int], float] | None = None
) -> dict[str, Any]:
    """Largest differences and greedy agreement.

    Logits pass if max abs diff <= tolerance · max abs; greedy tokens if they are equal, or the two best logits at the
    first difference lie closer than twice the largest difference.

    Args:
        here, there: what the program and what the loader computed.
        tolerance: relative.
        margin: (prompt, place) -> distance of the two best logits there; without it a difference fails.
    Raises: VerificationFailed if logits or tokens differ by more than rounding.
    """
    worst, scale = 0.0, 0.0
    for a, b in zip(here.logits, there.logits, strict=True):
        if a.shape != b.shape:
            raise VerificationFailed("logits of another shape", expected=a.shape, got=b.shape)
        worst = float(np.maximum(worst, np.abs(a - b).max()))  # keeps NaN, as max() would not
        scale = max(scale, float(np.abs(a).max()))
    if not worst <= tolerance * scale:
        raise VerificationFailed(
            "the files compute other logits than the program", expected=f"<= {tolerance * scale:.3g}", got=worst
        )
    close = 2 * max(worst, _ROUNDING * scale)
    equal, ties = [], []
    for i, (a, b) in enumerate(zip(here.greedy, there.greedy, strict=True)):
        same = min(len(a), len(b))
        first = int(next((k for k in range(same) if a[k] != b[k]), same))
        equal.append(first)
        if first == max(len(a), len(b)):
            continue
        apart = margin(i, first) if margin is not None else np.inf
        if not apart < close:
            chosen = [x[first : first + 4].tolist() for x in (a, b)]
            raise VerificationFailed(
                "the files choose another token than the program",
                where=f"prompt {i}, token {first}",
                expected=chosen[0],
                got=chosen[1],
            )
        ties.append({"prompt": i, "token": first, "margin": apart})
    facts = {"max_abs": worst, "max_rel": worst / scale if scale else 0.0, "tol": tolerance, "greedy_equal": equal}
    return facts | ({"near_ties": ties} if ties else {})
