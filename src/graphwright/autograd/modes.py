"""Modes of the running thread: whether a tape is kept, and which dtype autocast asks for; context variables all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from functools import partial, wraps
from inspect import isgeneratorfunction
from typing import Any

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

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        if not isgeneratorfunction(func):
            return super().__call__(func)

        @wraps(func)
        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return _stepwise(func(*args, **kwargs), self.enabled)

        return generate


def _stepwise(inner: Generator[Any, Any, Any], enabled: bool) -> Generator[Any, Any, Any]:
    """Run a generator under a mode that holds inside it and not while it waits."""
    resume: Callable[[], Any] = partial(inner.send, None)
    while True:
        try:
            with _GradMode(enabled):
                given = resume()
        except StopIteration as end:
            return end.value
        try:
            resume = partial(inner.send, (yield given))
        except GeneratorExit:
            with _GradMode(enabled):
                inner.close()
            raise
        except BaseException as error:
            resume = partial(inner.throw, error)


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
