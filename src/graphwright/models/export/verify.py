"""Check an export: in a clean process, a loader must compute from the files what the program computes.

`compare` checks an export while it is written; `verify` checks files, headers and probe against the receipt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.files import sha256_file
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.errors import VerificationFailed
from graphwright.models.export.examples import GREEDY_TOKENS, IDS, Example, greedy_tokens, random_example
from graphwright.models.export.ladder import LEVELS
from graphwright.models.export.receipt import Receipt, file_rows, tensor_digests
from graphwright.models.generation.recomputed import RecomputedGeneration
from graphwright.models.metrics import check_finite
from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.models.model import Model

TIMEOUT_S = 600
_ROUNDING = 1e-6  # rounding of a float32 forward pass, relative to the largest logit; measured on the test models
LANGUAGE_MODEL_LOADER = "AutoModelForCausalLM"


@dataclass(frozen=True, slots=True)
class LoaderOutput:
    """Results of a loaded model for each example: outputs by name, and of a language model the greedy ids.

    The logits of a language model are float32 [T, V]. `facts` are about the process.
    """

    outputs: list[dict[str, np.ndarray]]
    greedy: list[np.ndarray]
    facts: dict[str, Any]

    @property
    def logits(self) -> list[np.ndarray]:
        """The logits of each example."""
        return [row["logits"] for row in self.outputs]


def compute_here(model: Model, rows: Sequence[Example]) -> LoaderOutput:
    """Run the program on examples in this process; a language model generates `greedy_tokens` after each.

    Raises: NonFinite.
    """
    if model.task == LANGUAGE_MODEL:
        tokens = greedy_tokens(model.program, rows)
        logits = [{"logits": model.logits(row[IDS])} for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecomputedGeneration)
            greedy = [np.asarray(model.generate(row[IDS], tokens).ids, np.int64) for row in rows]
        return LoaderOutput(logits, greedy, {})
    outputs = [model.outputs(**row) for row in rows]
    for found in outputs:
        for value in found.values():
            check_finite(model.program, value)
    return LoaderOutput(outputs, [], {})


def compute_there(
    directory: Path, rows: Sequence[Example], *, loader: Literal["transformers", "graphwright"] = "transformers",
    made_by: str = LANGUAGE_MODEL_LOADER, trust: bool = False, tokens: int = GREEDY_TOKENS,
    snippet: tuple[str, str] | None = None,
) -> LoaderOutput:  # fmt: skip
    """Load an exported directory and run it in a clean process.

    Args:
        directory, rows, tokens: the export, examples, and how many tokens a language model generates after each.
        loader: `transformers`, in a process that cannot import this package, or `graphwright`.
        made_by: the class of transformers that loads the directory; an `AutoModelForCausalLM` generates.
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
        arrays: dict[str, Any] = {f"{i:04}/{name}": a for i, row in enumerate(rows) for name, a in row.items()}
        np.savez(Path(out) / "examples.npz", **arrays)
        first = str(package) if loader == "graphwright" else "trusted" if trust else "transformers"
        arguments = [script, first, directory.resolve(), Path(out) / "examples.npz", out, tokens, made_by]
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
        outputs: list[dict[str, np.ndarray]] = [{} for _ in rows]
        for at, array in np.load(f"{out}/outputs.npz").items():
            number, _, name = at.partition("/")
            outputs[int(number)][name] = array
        greedy = [a for _, a in sorted(np.load(f"{out}/greedy.npz").items())]
        return LoaderOutput(outputs, greedy, facts)


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
    """Compare outputs and greedy tokens; return a dict with the largest differences and the number of equal tokens.

    An output passes if its max abs difference <= tolerance · max abs. Greedy tokens pass if they are equal, or if at
    the first difference the two best logits are closer than twice the largest difference of logits: `margin` gives
    their distance at a (prompt, position). Raises: VerificationFailed if more than rounding differs.
    """
    names = list(dict.fromkeys(name for row in here.outputs for name in row))
    worst = scale = share = 0.0
    for name in names:
        moved, size = _largest_difference(name, here, there)
        if not moved <= tolerance * size:
            what, expected = f"{name} of the files differ from the program's", f"difference <= {tolerance * size:.3g}"
            raise VerificationFailed(what, expected=expected, got=moved)
        worst, scale, share = max(worst, moved), max(scale, size), max(share, moved / size if size else 0.0)
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
    facts = {"max_abs": worst, "max_rel": share, "tol": tolerance, "greedy_equal": equal}
    return facts | ({"near_ties": ties} if ties else {})


def _largest_difference(name: str, here: LoaderOutput, there: LoaderOutput) -> tuple[float, float]:
    """Return the largest difference of an output in all examples, and its largest entry. Raises: VerificationFailed."""
    moved, size = [0.0], [0.0]
    for a, b in zip(here.outputs, there.outputs, strict=True):
        if name not in b or a[name].shape != b[name].shape:
            what = f"the shapes of the loader's {name} and of the program's differ"
            raise VerificationFailed(what, expected=a[name].shape, got=b[name].shape if name in b else "no such output")
        if a[name].size:
            moved.append(np.abs(a[name].astype(np.float64) - b[name]).max())
            size.append(np.abs(a[name].astype(np.float64)).max())
    return float(np.max(moved)), float(np.max(size))  # which keep NaN


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
    row, compared, tokens = read_probe(receipt.probe)
    if not transformers_installed():
        found.unchecked.append("loading with transformers: not installed (pip install 'graphwright[hf]')")
        return
    runs_code = LEVELS[receipt.level].runs_code
    if runs_code and not trust_code:
        code = f"runs {' and '.join(f.name for f in sorted(folder.glob('*.py')))}; read the code"
        found.unchecked.append(f"the probe: loading this directory {code}, then use --trust-code (trust_code=True)")
        return
    made_by = str(receipt.check.get("made_by", LANGUAGE_MODEL_LOADER))
    if not made_by.isidentifier():
        raise ValueError(made_by)
    try:
        there = compute_there(folder, [row], made_by=made_by, trust=runs_code, tokens=max(tokens, 1))
    except VerificationFailed as error:
        found.problems.append(str(error))
        return
    for name in ("missing_keys", "unexpected_keys"):
        if there.facts[name]:
            found.problems.append(f"transformers reports {name.replace('_', ' ')}: {there.facts[name][:4]}")
    problem, checked = compared(there)
    if problem:
        found.problems.append(f"probe: {problem}")
    else:
        found.checked.append(f"probe: {checked}, by transformers {there.facts['transformers']}")


# -- the probe ---------------------------------------------------------------------------------------------------------
_FIRST = 8
"""Entries of each output that the probe of a model of another task than predicting tokens holds."""


def make_probe(row: Example, outputs: Mapping[str, np.ndarray], greedy: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the facts of one example for a later verification: ids, top-5 logits and greedy tokens of a text.

    Of other tasks, whose inputs may be images, the dtypes and shapes of the random inputs, and the first entries of
    each output.
    """
    if greedy:
        last = outputs["logits"][-1]
        top = [[int(i), float(last[i])] for i in np.argsort(-last, kind="stable")[:5]]
        return {"ids": row[IDS].tolist(), "top5": top, "greedy": greedy[0].tolist()}
    first = {name: [float(v) for v in value.reshape(-1)[:_FIRST]] for name, value in outputs.items()}
    return {"outputs": first, "largest": {n: float(np.abs(v).max(initial=0)) for n, v in outputs.items()}}


def read_probe(probe: Mapping[str, Any]) -> tuple[Example, Callable[[LoaderOutput], tuple[str, str]], int]:
    """Return (inputs, function that compares, number of greedy tokens) of a probe.

    The function returns what differs from the probe, "" if nothing does, and what was compared. Raises: LookupError,
    TypeError or ValueError for a probe of another form.
    """
    if "ids" not in probe:
        wanted = {str(name): [float(v) for v in values] for name, values in probe["outputs"].items()}
        scales = {name: max(float(probe["largest"][name]), 1e-6) for name in wanted}
        return random_example(probe["inputs"], 0), lambda there: _entries_differ(there, wanted, scales), 0
    ids, greedy = (np.asarray(probe[name], np.int64) for name in ("ids", "greedy"))
    top = [(int(token), float(logit)) for token, logit in probe["top5"]]
    return {IDS: ids}, lambda there: _tokens_differ(there, greedy, top), len(greedy)


def _entries_differ(
    there: LoaderOutput, outputs: Mapping[str, list[float]], scales: Mapping[str, float]
) -> tuple[str, str]:
    for name, wanted in outputs.items():
        now = there.outputs[0][name].reshape(-1)[:_FIRST].tolist()
        for i, (a, b) in enumerate(zip(now, wanted, strict=True)):
            if not abs(a - b) <= _TOLERANCE * scales[name]:
                return f"entry {i} of {name} is {a:.5f}, the receipt says {b:.5f}", ""
    return "", f"the first {_FIRST} entries of {', '.join(outputs)}"


def _tokens_differ(there: LoaderOutput, greedy: np.ndarray, top: list[tuple[int, float]]) -> tuple[str, str]:
    last, made, scale = there.logits[0][-1], there.greedy[0], max(1.0, *(abs(logit) for _, logit in top))
    for token, logit in top:
        if not abs(float(last[token]) - logit) <= _TOLERANCE * scale:
            return f"logit of token {token} is {last[token]:.5f}, the receipt says {logit:.5f}", ""
    if not np.array_equal(made[: len(greedy)], greedy[: len(made)]):
        return f"greedy tokens {made[:8].tolist()}..., not {greedy[:8].tolist()}...", ""
    return "", f"top-5 logits and {len(greedy)} greedy tokens"
