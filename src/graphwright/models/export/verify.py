"""Check an export: in a clean process, a loader must compute from the files what the program computes.

`compare` checks an export while it is written; `verify` checks files, headers and probe against the receipt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graphwright.array import random
from graphwright.errors import GraphwrightError, UsageError
from graphwright.files import sha256_file
from graphwright.models.errors import VerificationFailed
from graphwright.models.export.levels import LEVELS
from graphwright.models.export.receipt import GREEDY_TOKENS, Receipt, file_rows, tensor_digests
from graphwright.models.tokenizer import Tokenizer
from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.models.model import Model

TIMEOUT_S = 600
_ROUNDING = 1e-6  # rounding of a float32 forward pass, relative to the largest logit; measured on the test models
_TEXTS = (
    "The following", "def __init__(self, *args, **kwargs):\n", "In a list of numbers, ", "Once upon a time",
    "If the two values are not equal, the result", "import os\n\n", "A class",
    "The quick brown fox jumps over the lazy dog.",
)  # fmt: skip
"""Default prompts of the check; short, so that every vocabulary can encode them."""


@dataclass(frozen=True, slots=True)
class LoaderOutput:
    """Results of a loaded model: logits float32 [T, V] and greedy ids for each prompt; facts about the process."""

    logits: list[np.ndarray]
    greedy: list[np.ndarray]
    facts: dict[str, Any]


def check_prompts(
    tokenizer: Tokenizer | None, vocab: int, prompts: Sequence[Any] | None = None, longest: int | None = None
) -> list[np.ndarray]:
    """Return the prompts of the check as arrays of ids.

    By default the prompts are built-in texts, or without a tokenizer 8 random lists of 64 ids; they leave room for the
    tokens after them in a text of `longest` tokens.

    Raises: UsageError for a text if there is no tokenizer, for an empty prompt, and for an empty list.
    """
    if prompts is not None:
        if tokenizer is None and any(isinstance(p, str) for p in prompts):
            what = "a prompt is a text, but the model has no tokenizer"
            raise UsageError(what, where="prompts", fix="give prompts as lists of ids")
        made = [np.asarray(tokenizer.encode(p) if tokenizer and isinstance(p, str) else p, np.int64) for p in prompts]
        if not made:
            raise UsageError("the list of prompts of the check is empty", where="prompts")
        if wrong := [ids.shape for ids in made if ids.ndim != 1 or not ids.size]:
            what = "a prompt of the check is empty or not a list of ids"
            raise UsageError(what, where="prompts", expected="lists of at least one id", got=wrong)
        return made
    texts = _TEXTS if tokenizer is not None else ()
    made = [np.asarray(tokenizer.encode(t, add_special_tokens=False), np.int64) for t in texts if tokenizer]
    fitting = [ids for ids in made if len(ids) and ids.max() < vocab]
    made = fitting or [random.integers(0, vocab, 64, seed=0, stream=9, step=i) for i in range(8)]
    return [ids[: max(longest - GREEDY_TOKENS, 1)] for ids in made] if longest is not None else made


def compute_here(model: Model, prompts: Sequence[np.ndarray], tokens: int = GREEDY_TOKENS) -> LoaderOutput:
    """Run the program on the prompts in this process, and generate up to `tokens` greedy tokens after each."""
    logits = [model.logits(ids) for ids in prompts]
    greedy = [np.asarray(model.generate(ids, tokens).ids, np.int64) for ids in prompts]
    return LoaderOutput(logits, greedy, {})


def compute_there(
    directory: Path, prompts: Sequence[np.ndarray], *, loader: Literal["transformers", "graphwright"] = "transformers",
    trust: bool = False, tokens: int = GREEDY_TOKENS, snippet: tuple[str, str] | None = None,
) -> LoaderOutput:  # fmt: skip
    """Load an exported directory and run it in a clean process.

    Args:
        directory, prompts, tokens: the export, ids, and how many tokens to generate per prompt.
        loader: `transformers`, in a process that cannot import this package, or `graphwright`.
        trust: let transformers run the directory's own code.
        snippet: (name, source): source text to run in a folder in which the export has this name.
    Raises: VerificationFailed with the last lines of its standard error if the process fails or exceeds 600 s.
    """
    script, package = Path(__file__).with_name("clean_check.py"), Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as out:
        if snippet is not None:
            name, source = snippet
            (Path(out) / "beside").mkdir()
            (Path(out) / "beside" / name).symlink_to(directory.resolve(), target_is_directory=True)
            (Path(out) / "snippet.py").write_text(source, encoding="utf-8")
        arrays: dict[str, Any] = {f"{i:04}": ids for i, ids in enumerate(prompts)}
        np.savez(Path(out) / "prompts.npz", **arrays)
        first = str(package) if loader == "graphwright" else "trusted" if trust else "transformers"
        arguments = [script, first, directory.resolve(), Path(out) / "prompts.npz", out, tokens]
        try:
            code, errors = _start(["-I", *map(str, arguments)], out)
        except subprocess.TimeoutExpired as error:
            what, expected = "the process that loads the export did not finish in time", f"<= {TIMEOUT_S} s"
            raise VerificationFailed(what, where=str(directory), expected=expected) from error
        if code:
            lines = errors.strip().splitlines()
            raise VerificationFailed(f"{loader} could not load the exported files", where=directory.name,
                                     got="\n".join(lines[-6:]) or f"exit {code}")  # fmt: skip
        facts = json.loads((Path(out) / "facts.json").read_text(encoding="utf-8"))
        logits, greedy = ([a for _, a in sorted(np.load(f"{out}/{n}.npz").items())] for n in ("logits", "greedy"))
        return LoaderOutput(logits, greedy, facts)


def _start(command: Sequence[str], directory: str) -> tuple[int, str]:
    """Run a new Python process; return its exit code and standard error."""
    whole = [sys.executable, *command]
    done = subprocess.run(whole, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


def transformers_installed() -> bool:
    """Return True if transformers is installed, without importing it."""
    return find_spec("transformers") is not None


def compare(
    here: LoaderOutput, there: LoaderOutput, tolerance: float, margin: Callable[[int, int], float] | None = None
) -> dict[str, Any]:
    """Compare logits and greedy tokens; return a dict with the largest differences and the number of equal tokens.

    Logits pass if max abs difference <= tolerance · max abs. Greedy tokens pass if they are equal, or if at the first
    difference the two best logits are closer than twice the largest difference of logits: `margin` gives their
    distance at a (prompt, position). Raises: VerificationFailed if logits or tokens differ by more than rounding.
    """
    for a, b in zip(here.logits, there.logits, strict=True):
        if a.shape != b.shape:
            what = "the shapes of the loader's logits and of the program's differ"
            raise VerificationFailed(what, expected=a.shape, got=b.shape)
    pairs = zip(here.logits, there.logits, strict=True)
    worst = float(np.max([np.abs(a - b).max() for a, b in pairs], initial=0))  # keeps NaN, as max() would not
    scale = max((float(np.abs(a).max()) for a in here.logits), default=0.0)
    if not worst <= tolerance * scale:
        what, expected = "logits of the files differ from the program's", f"difference <= {tolerance * scale:.3g}"
        raise VerificationFailed(what, expected=expected, got=worst)
    close = 2 * max(worst, _ROUNDING * scale)
    equal, ties = [], []
    for i, (a, b) in enumerate(zip(here.greedy, there.greedy, strict=True)):
        same = min(len(a), len(b))
        first = int(next(iter(np.flatnonzero(a[:same] != b[:same])), same))
        equal.append(first)
        if first == max(len(a), len(b)):
            continue
        apart = margin(i, first) if margin is not None else np.inf
        if not apart < close:
            chosen = [x[first : first + 4].tolist() for x in (a, b)]
            raise VerificationFailed("a greedy token of the files differs from the program's",
                                     where=f"prompt {i}, token {first}", expected=chosen[0], got=chosen[1])  # fmt: skip
        ties.append({"prompt": i, "token": first, "margin": apart})
    facts = {"max_abs": worst, "max_rel": worst / scale if scale else 0.0, "tol": tolerance, "greedy_equal": equal}
    return facts | ({"near_ties": ties} if ties else {})


_TOLERANCE = 1e-3
"""Tolerated relative difference of the probe's logits; another machine rounds differently."""


@dataclass(slots=True, repr=False)
class Verification(Report):
    """The failed checks (`problems`), the passed ones, and those that could not be run, as lists of sentences."""

    problems: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if all checks passed, 1 if a check failed, 3 if a check could not be run."""
        return 1 if self.problems else 3 if self.unchecked else 0

    def _text(self) -> str:
        rows = {"passed": self.checked, "unchecked": self.unchecked, "failed": self.problems}
        return "\n".join(f"{label:<11}{line}" for label, lines in rows.items() for line in lines)


def verify(directory: str | Path, against: str | Path | None = None, *, trust_code: bool = False) -> Verification:
    """Check an exported directory; problems are returned, never raised.

    Args:
        directory: the export.
        against: the source directory of the export; its files are compared with the receipt's list.
        trust_code: run generated modeling code, after its sha256 was checked, in a process of its own without a
            sandbox. Without it such an export is not loaded, which counts as unchecked.
    """
    folder, found = Path(directory), Verification()
    try:
        receipt = Receipt.read(folder)
        found.checked.append("receipt.json: sha256 of its own text")
        _compare_files(folder, receipt.result, found)
        if against is not None:
            _compare_source(Path(against), receipt.source, found)
        if not found.problems:
            _probe(folder, receipt, trust_code, found)
    except (GraphwrightError, OSError) as error:
        found.problems.append(str(error))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # a forged receipt
        found.problems.append(f"receipt.json: a field has an unexpected form ({type(error).__name__}: {error})")
    return found


def _compare_files(folder: Path, result: dict[str, Any], found: Verification) -> None:
    before = len(found.problems)
    listed = {row["name"]: row["sha256"] for row in result["files"]}
    for name, wanted in listed.items():
        path = folder / name
        if path.name != name:
            found.problems.append(f"{name!r}: not a plain file name")
        elif not path.is_file():
            found.problems.append(f"{name}: missing")
        elif sha256_file(path) != wanted:
            found.problems.append(f"{name}: changed since the receipt was written")
        else:
            found.checked.append(f"{name}: sha256")
    own = ("receipt.json", "README.md")  # written last, so the receipt does not list them
    present = (f.name for f in sorted(folder.iterdir()) if not f.name.startswith("."))
    found.problems += [f"{name}: not in the receipt" for name in present if name not in listed and name not in own]
    now, then = tensor_digests(folder), result.get("tensors", {})
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


def _probe(folder: Path, receipt: Receipt, trust_code: bool, found: Verification) -> None:
    if not receipt.probe:
        found.unchecked.append("the probe: the receipt has none")
        return
    ids, wanted = (np.asarray(receipt.probe[name], np.int64) for name in ("ids", "greedy"))
    top = [(int(token), float(logit)) for token, logit in receipt.probe["top5"]]
    if not transformers_installed():
        found.unchecked.append("loading with transformers: not installed (pip install 'graphwright[hf]')")
        return
    runs_code = LEVELS[receipt.level].runs_code
    if runs_code and not trust_code:
        code = f"runs {' and '.join(f.name for f in sorted(folder.glob('*.py')))}; read the code"
        found.unchecked.append(f"the probe: loading this directory {code}, then use --trust-code (trust_code=True)")
        return
    try:
        there = compute_there(folder, [ids], trust=runs_code, tokens=max(len(wanted), 1))
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
