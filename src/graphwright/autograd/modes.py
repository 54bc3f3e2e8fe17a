"""Modes of the running thread: whether a tape is kept, and which dtype autocast asks for. Context variables, no globals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar, Token

from graphwright.array import DType

_grad: ContextVar[bool] = ContextVar("graphwright_grad", default=True)
_autocast: ContextVar[DType | None] = ContextVar("graphwright_autocast", default=None)


class _GradMode(ContextDecorator):
    """Context manager and decorator that switches the tape; may be nested and re-entered."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_grad.set(self.enabled))

    def __exit__(self, *exc: object) -> None:
        _grad.reset(self._tokens.pop())

    def _recreate_cm(self) -> _GradMode:
        return _GradMode(self.enabled)


def no_grad() -> _GradMode:
    """Inside, operations keep no tape."""
    return _GradMode(False)


def enable_grad() -> _GradMode:
    """Inside, operations keep a tape again."""
    return _GradMode(True)


def grad_enabled() -> bool:
    """True while operations keep a tape."""
    return _grad.get()


def autocast_dtype() -> DType | None:
    """The dtype that ops of class `low` are cast to, or None outside autocast."""
    return _autocast.get()


@contextmanager
def autocast_to(dtype: DType | None) -> Iterator[None]:
    """Set the autocast dtype inside; restored also after an exception."""
    token = _autocast.set(dtype)
    try:
        yield
    finally:
        _autocast.reset(token)
