"""The inputs on which an export is compared with its program: texts, or random values of the inputs of other tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Spec, random
from graphwright.array import dtype as named
from graphwright.errors import UsageError
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.generation.text import IDS, MASK, UNBOUNDED, indexed_rows, longest_text
from graphwright.models.tokenizer import Tokenizer
from graphwright.program.fitting_sizes import fitting_sizes
from graphwright.program.kinds import INPUT
from graphwright.program.run import check_feeds

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

Example = Mapping[str, np.ndarray]
"""Input name of transformers -> its array."""

GREEDY_TOKENS = 32
_TEXTS = (
    "The following", "def __init__(self, *args, **kwargs):\n", "In a list of numbers, ", "Once upon a time",
    "If the two values are not equal, the result", "import os\n\n", "A class",
    "The quick brown fox jumps over the lazy dog.",
)  # fmt: skip
"""Default prompts of the check; short, so that every vocabulary can encode them."""
_SIZES = {"B": (2, 1), "N": (2, 3), "T": (11, 6), "S": (5, 8), "L": (16_000, 12_345), "H": (64, 96), "W": (96, 64)}
"""Named size -> its value in each of the random examples; audio and images need room for their strides."""
_OTHER = (6, 9)


def examples(model: Model, given: Sequence[Any] | None = None) -> list[Example]:
    """Return the inputs of the check of an export.

    Args:
        given: texts or ids of a language model, dicts of arrays of another task; by default built-in texts, or random
            values of two sizes.
    Raises: UsageError for other data, and for an empty list; FeedError for inputs that the program does not have.
    """
    if model.task == LANGUAGE_MODEL:
        longest = longest_text(model.program)
        if model.arch.imported is not None:  # its table of positions may have rows that no position reads
            longest = min(longest, model.config_dims.positions or longest)
        prompts = check_prompts(model.tokenizer, model.vocab, given, longest)
        return [{IDS: ids} for ids in prompts]
    if given is None:
        facts = random_facts(model.program)
        return [random_example(row, i) for i, row in enumerate(facts)]
    if not given or not all(isinstance(row, Mapping) for row in given):
        names = ", ".join(model.program.input_names())
        got = type(next(iter(given), None)).__name__
        raise UsageError("the examples of the check are not inputs of this model", where="prompts",
                         expected=f"a list of dicts with {names}", got=got)  # fmt: skip
    for row in given:
        check_feeds(model.program, row)
    return [{name: np.asarray(value) for name, value in row.items()} for row in given]


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
    return [ids[: max(longest - GREEDY_TOKENS, longest // 2, 1)] for ids in made] if longest is not None else made


def greedy_tokens(p: Program, rows: Sequence[Example]) -> int:
    """Return how many greedy tokens the check generates after each prompt: those that the longest text has room for."""
    longest = max((len(row[IDS]) for row in rows if IDS in row), default=0)
    return max(min(GREEDY_TOKENS, longest_text(p) - longest + 1), 1)


# -- random values -----------------------------------------------------------------------------------------------------
def random_facts(p: Program) -> list[dict[str, dict[str, Any]]]:
    """Return for each of two examples a dict from input to its dtype, shape and, for integers, the number of values."""
    found, most = [], _positions(p)
    for i in range(2):
        row: dict[str, dict[str, Any]] = {}
        names = sorted({d for node in p.of_kind(INPUT) for d in _names(p.spec(node))})
        sizes = {d: _SIZES.get(d, _OTHER)[i] for d in names}
        sizes = {d: min(n, most) if d in ("T", "S") else n for d, n in sizes.items()}
        sizes = fitting_sizes(p, sizes)
        for node in p.of_kind(INPUT):
            name, spec = p.path(node), p.spec(node)
            row[name] = {"dtype": spec.dtype.name, "shape": list(spec.bind(sizes).sizes), "below": _below(p, name)}
        found.append(row)
    return found


def random_example(facts: Mapping[str, Mapping[str, Any]], number: int) -> Example:
    """Return the example with these facts: masks are ones but for two padding tokens in the first row of example 1."""
    made = {}
    for name, row in facts.items():
        shape, kind = tuple(row["shape"]), named(row["dtype"])
        stream, count = random.stream_of(name), int(np.prod(shape))
        if name.endswith(MASK):
            values = np.ones(shape)
            if number and values.ndim == 2 and shape[1] > 2:
                values[0, -2:] = 0
        elif kind.is_float:
            values = random.normal(count, seed=0, stream=stream, step=number).reshape(shape)
        elif name == "positions":
            values = np.broadcast_to(np.arange(shape[-1]), shape)
        else:
            values = random.integers(0, row["below"], count, seed=0, stream=stream, step=number).reshape(shape)
        made[name] = values.astype(kind.name if kind.name != "bfloat16" else "float32")
    return made


def _names(spec: Spec) -> set[str]:
    return {d for d in spec.shape if isinstance(d, str)}


def _below(p: Program, name: str) -> int:
    """Return the number of values of an integer input: rows of the smallest table that it indexes, else 2."""
    rows = indexed_rows(p, name)
    return 2 if rows == UNBOUNDED else rows


def _positions(p: Program) -> int:
    """Return the number of positions that any table of a program has; a table of positions limits the length."""
    tables = [p.spec(p.operands(n)[0]).shape[0] for n in p.of_traits(lookup=True)]
    return min((r for r in tables if isinstance(r, int) and r > 4), default=UNBOUNDED)
