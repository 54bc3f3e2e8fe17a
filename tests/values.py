"""What tests ask of a tensor that has it: its array, its gradient, the gradient rule of an op, a line of source."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Protocol, TypeVar

from graphwright.array import NDArray
from graphwright.autograd import Tensor
from graphwright.ops import OPS

T_co = TypeVar("T_co", covariant=True)


class Leaf(Protocol[T_co]):
    """A tensor of ours or of torch's."""

    @property
    def grad(self) -> T_co | None: ...


def grad_of(leaf: Leaf[T_co]) -> T_co:
    assert leaf.grad is not None, "no gradient has arrived"
    return leaf.grad


def array_of(t: Tensor) -> NDArray:
    assert isinstance(t.data, NDArray), "a traced tensor"
    return t.data


def vjp_of(name: str) -> Callable[..., tuple]:
    vjp = OPS[name].vjp
    assert vjp is not None, f"{name} has no gradient"
    return vjp


def source_at(line: str) -> str:
    """The statement at a `file:line`."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip()
