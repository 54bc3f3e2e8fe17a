"""A program as a message to another process: its structure and weights without its history, in memory.

`copyreg` has these functions, so a program is sent to workers like an array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.errors import UsageError
from graphwright.graph import Chain
from graphwright.program.exclusive import exclusive
from graphwright.program.files.load import rebuild
from graphwright.program.files.save import structure_body, tied_keys, weight_row
from graphwright.program.patterns import pattern_form, read_pattern

if TYPE_CHECKING:
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program


def message(p: Program) -> tuple[Callable[..., Program], tuple[dict[str, Any], dict[str, NDArray]]]:
    """Return `received` and its arguments, as `copyreg` expects. Raises: UsageError while an edit is open."""
    with exclusive(p):
        if p.history.open is not None:
            raise UsageError("cannot send a program while an edit is open", where=p.name, fix="leave the with-block")
        tied, held = tied_keys(p), p.patterns
        rows: dict[str, Any] = {key: {"tied": first} for key, first in tied.items()}
        rows |= {key: {"pattern": pattern_form(pattern)} for key, pattern in held.items()}
        own = [key for key in p.weights if key not in rows]
        rows |= {key: weight_row(p.weights[key]) for key in own}
        body = {**structure_body(p), "weights": {key: rows[key] for key in p.weights}, "stacks": None, "history": None,
                "constraints": p.constraints.to_json(), "base": p.journal.hash}  # fmt: skip
        return received, (body, {key: p.weights.array(key) for key in own})


def received(body: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> Program:
    """Return the program of a message; its journal is empty and continues the hash chain of the program sent."""
    return rebuild(body, lambda p: _Arrays(arrays), Chain(base=body["base"]), check=False)[0]


class _Arrays:
    """The weights of a message as a `TensorSource`."""

    def __init__(self, arrays: Mapping[str, NDArray]) -> None:
        self._arrays = arrays

    def keys(self) -> Collection[str]:
        return self._arrays.keys()

    def weight(self, key: str, row: dict[str, Any]) -> NDArray:
        return self._arrays[key].copy()  # a copy by `copy.copy` gets the arrays themselves

    def pattern(self, key: str, form: Mapping[str, Any]) -> Pattern:
        return read_pattern(form)

    def undo_array(self, digest: str, reference: str | None) -> NDArray:
        raise LookupError(digest)
