"""The table of torch's operators: for each, the function of tensors that computes the same.

A row has the name of an ATen operator, without its overload (`add`) or with it (`max.dim`, which comes first), and a
function that takes the operator's arguments. While a captured module is lowered, the function is traced: what it
computes becomes nodes of the program. Operators without a row are decomposed by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

OPERATORS: dict[str, Callable[..., Any]] = {}


def operator(*names: str) -> Callable[[_Function], _Function]:
    """Enter a function under names of operators; by default under its own name, without a trailing underscore."""

    def enter(function: _Function) -> _Function:
        for name in names or (function.__name__.rstrip("_"),):
            assert name not in OPERATORS, f"two rows of {name}"
            OPERATORS[name] = function
        return function

    return enter


def equal(home: Any, names: str) -> None:
    """Enter the operators whose function in `home`, a module or class, has their name and takes their arguments."""
    for name in names.split():
        operator(name)(getattr(home, name))


def find(name: str, overload: str) -> Callable[..., Any] | None:
    """Return the function of an operator's overload, or None."""
    return OPERATORS.get(f"{name}.{overload}") or OPERATORS.get(name)


def operator_name(target: Any) -> tuple[str, str]:
    """Return an operator's name and overload."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target)), ""
    space, _, name = schema.name.partition("::")
    return (name if space == "aten" else f"{space}::{name}"), target._overloadname
