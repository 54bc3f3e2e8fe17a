"""Signatures that are stated once: options of a dataclass as keyword arguments, and methods from a layer above."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def keywords(source: Callable[..., Any]) -> Callable[[F], F]:
    """Make a decorator for functions with `**options: Unpack[...]` that lists these options in the signature.

    Args:
        source: a dataclass of options or a function. Its keyword-only parameters are added, with types and defaults,
            except those that the decorated function has itself.
    """
    options = [p for p in signature(source).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]

    def enter(function: F) -> F:
        given = signature(function)
        own = [p for p in given.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        known = {p.name for p in own}
        cast(Any, function).__signature__ = given.replace(
            parameters=[*own, *(p for p in options if p.name not in known)]
        )
        return function

    return enter


def late(load: Callable[[Any], F]) -> F:
    """Make a method of the function that `load` imports from a layer above when it is accessed: a decorator."""
    return cast(F, _Late(load))


class _Late:
    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load, self.__doc__ = load, load.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        return self._load(None).__get__(instance, owner)
