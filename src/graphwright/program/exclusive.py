"""One thread at a time: a run, an edit or a save holds a program, so that each sees one version of it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from graphwright.graph import EditBusy

if TYPE_CHECKING:
    from graphwright.program.program import Program

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def exclusive(p: Program) -> Iterator[None]:
    """Hold a program and all programs derived from it for this thread; the thread may enter again.

    Other threads wait. Raises: EditBusy if an edit of another thread stays open for `graph.timeout` seconds.
    """
    while p.source is not None:
        p = p.source[0]
    while True:
        held = p.graph.locked()
        try:
            held.__enter__()
            break
        except EditBusy:
            if p.history.open is not None:  # a long run is waited for
                raise
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def exclusively(method: Callable[Concatenate[Program, P], R]) -> Callable[Concatenate[Program, P], R]:
    """Return a function of a program that holds the program while it runs."""

    @wraps(method)
    def call(p: Program, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with exclusive(p):
            return method(p, *args, **kwargs)

    return call
