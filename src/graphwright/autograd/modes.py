"""Modes of the running thread, as contextvars: tape on or off, layers training or not, the autocast dtype."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from functools import partial, wraps
from inspect import isgeneratorfunction
from typing import Any, overload

from graphwright.array import DType
from graphwright.errors import UsageError

grad_mode: ContextVar[bool] = ContextVar("graphwright_grad", default=True)
_training: ContextVar[bool | None] = ContextVar("graphwright_training", default=None)
autocast: ContextVar[DType | None] = ContextVar("graphwright_autocast", default=None)


class _GradMode(ContextDecorator):
    """Context manager and decorator that switches the tape on or off; reentrant."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(grad_mode.set(self.enabled))

    def __exit__(self, *exc: object) -> None:
        grad_mode.reset(self._tokens.pop())

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
    """Run a generator with the tape mode set while it runs, but not while it is suspended."""
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


@overload
def no_grad(func: None = None) -> _GradMode: ...
@overload
def no_grad(func: Callable[..., Any]) -> Callable[..., Any]: ...
def no_grad(func: Callable[..., Any] | None = None) -> Any:
    """Switch the tape off; a context manager, and a decorator with or without parentheses."""
    return _GradMode(False) if func is None else _GradMode(False)(func)


@overload
def enable_grad(func: None = None) -> _GradMode: ...
@overload
def enable_grad(func: Callable[..., Any]) -> Callable[..., Any]: ...
def enable_grad(func: Callable[..., Any] | None = None) -> Any:
    """Switch the tape on again; used like `no_grad`."""
    return _GradMode(True) if func is None else _GradMode(True)(func)


def inference_mode(mode: bool = True) -> _GradMode:
    """Return `no_grad()` if `mode`, else `enable_grad()`; results are ordinary tensors."""
    return _GradMode(not mode)


class set_grad_enabled(_GradMode):  # lower case, as it is used like a function
    """Switch the tape on or off, at once; as a context manager until its end, as a decorator in the function alone."""

    def __init__(self, mode: bool) -> None:
        super().__init__(bool(mode))
        self._before = grad_mode.set(self.enabled)
        self._entered = False

    def __enter__(self) -> None:
        if self._entered:
            super().__enter__()
        else:
            self._entered = True
            self._tokens.append(self._before)

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs in this mode, and restore the mode from before."""
        if not self._entered:
            grad_mode.reset(self._before)
        return _GradMode(self.enabled)(func)


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Context manager: set train or evaluation mode, which overrides the `training` flags of all modules.

    Args:
        name: `train`: layers train, tape on; `eval`: layers in evaluation, tape off; `eval_grad`: layers in
            evaluation, tape on, as a saliency map needs it.
    Raises: UsageError for an unknown name.
    """
    if name not in ("train", "eval", "eval_grad"):
        raise UsageError("unknown mode", expected="train, eval or eval_grad", got=repr(name))
    token = _training.set(name == "train")
    try:
        with _GradMode(name != "eval"):
            yield
    finally:
        _training.reset(token)


def training(own: bool | None = None) -> bool | None:
    """Return whether a layer trains: as set by `mode`, else `own`, the layer's flag. Independent of the tape."""
    given = _training.get()
    return own if given is None else given


def modes() -> tuple[bool, DType | None, bool | None]:
    """Return the modes that a trace depends on: whether the tape is on, the autocast dtype, whether layers train."""
    return grad_mode.get(), autocast.get(), _training.get()


def is_grad_enabled() -> bool:
    """Return True while operations are taped."""
    return grad_mode.get()


def autocast_dtype() -> DType | None:
    """Return the 16-bit dtype of autocast, used by ops such as matmul; None outside autocast."""
    return autocast.get()


@contextmanager
def autocast_to(dtype: DType | None) -> Iterator[None]:
    """Context manager: set the autocast dtype."""
    token = autocast.set(dtype)
    try:
        yield
    finally:
        autocast.reset(token)
