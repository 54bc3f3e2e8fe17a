"""Nested tuples, lists and dicts, with tensors or anything else inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from graphwright.autograd.apply import TensorBase

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def parts(group: Any) -> dict[Any, Any]:
    """Return the members of a tuple, list or dict by index or key; empty for any other value."""
    if isinstance(group, Mapping):
        return dict(group)
    return dict(enumerate(group)) if isinstance(group, tuple | list) else {}


def rebuilt(group: Any, members: Mapping[Any, Any]) -> Any:
    """Return a tuple, list or dict like `group` with other members."""
    if isinstance(group, Mapping):
        return dict(members)
    return type(group)(*members.values()) if hasattr(group, "_fields") else type(group)(members.values())


def leaves_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    found: list[Any] = [tree] if isinstance(tree, TensorBase) else []
    for value in parts(tree).values():
        found += leaves_of(value)
    return found


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return the tree with other leaves in place of its tensors."""
    rest = iter(leaves)

    def made(part: Any) -> Any:
        if isinstance(part, tuple | list | Mapping):
            return rebuilt(part, {key: made(value) for key, value in parts(part).items()})
        return next(rest) if isinstance(part, TensorBase) else part

    return made(tree)
