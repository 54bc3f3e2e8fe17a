"""Tracing: a function on tensors recorded as a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphwright.autograd import as_tensor
from graphwright.program.program import Program
from graphwright.program.recorder import TraceRecorder, record_into

if TYPE_CHECKING:
    from graphwright.array import Spec


def trace(fn: Callable[..., Any], *examples: Any, names: tuple[str, ...] | None = None) -> Program:
    """Run `fn` on symbols with the specs of the examples, and return the recorded program.

    Args:
        fn: takes tensors; returns a tensor, a tuple or a dict of tensors, or None (a step that only updates state).
        examples: tensors, arrays or numbers; only their shapes and dtypes matter.
        names: input names; by default the parameter names of the function, or of a module's `forward`.
    Returns: a Program with the examples as inputs and the outputs `out`, `out_1`, ... or the dict's keys.
    Raises: TraceError where the code asks a symbol for a number.
    """
    return record(fn, tuple(as_tensor(e).spec for e in examples), names)[0]


def record(
    fn: Callable[..., Any], specs: Sequence[Spec], names: Sequence[str] | None = None
) -> tuple[Program, TraceRecorder, Any]:
    """Trace `fn` for given specs; returns the program, the recorder and the result of `fn`."""
    program = Program(getattr(fn, "__name__", type(fn).__name__))
    return program, *record_into(program, fn, specs, names)
