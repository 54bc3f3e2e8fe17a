"""The array and the gradient of a tensor, and the gradient rule of an op, for tests that know that there is one."""

from __future__ import annotations

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
