"""What tests ask of what has it: array or gradient of a tensor, parameter of a program, gradient rule, source line."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Protocol, TypeVar

from graphwright.array import NDArray
from graphwright.autograd import Parameter, Tensor
from graphwright.ops import OPS
from graphwright.program import Program

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


def parameter_of(p: Program, key: str) -> Parameter:
    found = p.weights[key]
    assert isinstance(found, Parameter), f"{key} is not trained"
    return found


def vjp_of(name: str) -> Callable[..., tuple]:
    vjp = OPS[name].vjp
    assert vjp is not None, f"{name} has no gradient"
    return vjp


def source_at(line: str) -> str:
    """The statement at a `file:line`."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip()
