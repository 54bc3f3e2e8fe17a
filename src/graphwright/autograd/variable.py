"""Variables and parameters: leaves that keep their identity while their values change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from graphwright.array import DType, NDArray, changes, float32
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.recorder import active_recorder
from graphwright.autograd.tensor import Tensor
from graphwright.errors import AliasError, ShapeError
from graphwright.ops import compute, get


class Remap(NamedTuple):
    """How arrays of the shape `before` become arrays of the shape `after`."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    move: Callable[[np.ndarray], np.ndarray]


Join = Callable[[np.ndarray], np.ndarray]
"""Returns the whole array, of the parts that processes have."""

_VERSIONED = frozenset({"data", "shared", "requires_grad"})
"""Attributes whose change invalidates what plans cached of a variable."""


class Variable(Tensor):
    """A leaf that keeps its identity while its value changes: state of a model or an optimizer.

    A trace turns it into a `param` or `state` node; an assignment becomes a write at the end of the step. Its array is
    copied before the first write if it is memory-mapped from a file or `shared`.

    Args:
        data: an NDArray, which is used without a copy, or a tensor, numpy array or number, which is copied.

    Attributes:
        shared: True if another object uses the array too; its storage has the same flag, for writes to views of it.
        lineage: the last change of its shape by an edit, or None.
    """

    __slots__ = ("lineage", "shared")
    data: NDArray  # never a symbol
    is_variable: ClassVar[bool] = True

    def __init__(self, data: Any, requires_grad: bool = False, name: str = "") -> None:
        array = data if isinstance(data, NDArray) else as_tensor(data).concrete("a variable").copy()
        super().__init__(array, requires_grad, name)
        object.__setattr__(self, "shared", False)  # the storage may be that of a shared variable
        self.lineage: ShapeChange | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data" and isinstance(value, TensorBase):  # torch's `p.data = tensor`
            value = value.concrete("the data of a variable")
        object.__setattr__(self, name, value)
        if name == "shared" and (array := getattr(self, "data", None)) is not None:  # a copy sets `shared` first
            array.storage.shared = value
        if name in _VERSIONED:
            changes.rise()

    def own(self) -> NDArray:
        """Return the array for writing, copied first if it is shared, read-only or not contiguous."""
        if self.shared or self.data.storage.readonly or not self.data.contiguous:
            self.data, self.shared = self.data.copy(), False
        return self.data

    def reshape_to(
        self, data: NDArray, index_maps: Mapping[int, np.ndarray], *, back: bool = False, join: Join | None = None
    ) -> None:
        """Replace the array by one of a different shape, and set `grad` to None.

        Args:
            data: the new values.
            index_maps: axis -> for each entry of `data` its old index, -1 for an added entry.
            back: True if this undoes the last change of shape.
            join: of a change that leaves entries to other processes, returns an array of the old shape with the
                entries of all of them. All processes must call it.
        """
        here = self.lineage
        if back and here is not None and here.sizes == data.shape:
            self.lineage = here.before
        else:
            self.lineage = ShapeChange(here, self.data.shape, dict(index_maps), join)
        self.data, self.shared, self.grad = data, True, None

    def assign(self, value: Tensor) -> None:
        """Set the value from a tensor of the same spec; in a trace, at the end of the step. Raises: ShapeError."""
        if value.spec != self.spec:
            what, where = "the assigned value has the wrong spec", self.name or None
            raise ShapeError(what, where=where, expected=self.spec, got=value.spec)
        recorder = active_recorder.get()
        if recorder is not None:
            recorder.assign(self, value)
        else:
            assert isinstance(value.data, NDArray)
            self.own().copy_from(value.data)


class HostVariable(Variable):
    """A variable that is stored on the host, where eager code reads it, such as the key of a generator.

    A plan on another device copies the value to that device in each step.
    """

    __slots__ = ()


class Parameter(Variable):
    """A trained variable; the gradient of a 16-bit parameter is summed and stored in float32."""

    __slots__ = ()

    def __init__(self, data: Any, requires_grad: bool = True, name: str = "") -> None:
        super().__init__(data, requires_grad, name)

    @property
    def grad_dtype(self) -> DType:
        """Dtype of the summed gradient: float32 for 16-bit parameters, as the sum of 300 ones in bfloat16 is 256."""
        return float32 if self.data.dtype.is_low else self.data.dtype


def share(variables: Iterable[Variable], shared: bool) -> None:
    """Set the flag `shared` of many variables; increment the change count, which plans compare, only once."""
    for variable in variables:
        object.__setattr__(variable, "shared", shared)
        variable.data.storage.shared = shared
    changes.rise()


def update(targets: Sequence[Variable], name: str, *operands: Tensor, **attrs: Any) -> None:
    """Run an op whose results replace the values of variables, in place where possible; nothing is taped.

    Args:
        targets: one variable per result of the op, in order.
        name: name of the op. If its `inplace` trait pairs a result with an operand, the result overwrites the operand.
    """
    row = get(name)
    full = row.complete(attrs)
    recorder = active_recorder.get()
    if recorder is not None:
        recorder.update(targets, row, operands, full)
        return
    outs = [target.own() for target in targets]
    arrays = [o.concrete(f"an update by {name}") for o in operands]
    try:
        compute(row, arrays, full, outs)
    except AliasError:  # the op reads an operand after it wrote the result: compute separately, then copy
        for out, result in zip(outs, compute(row, arrays, full), strict=True):
            out.copy_from(result)


# -- changes of shape by edits -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class ShapeChange:
    """A change of a variable's shape by an edit; optimizers apply a chain of these to their moments."""

    before: ShapeChange | None  # the change before this one
    sizes: tuple[int, ...]  # the shape before it
    index_maps: dict[int, np.ndarray]  # axis -> old index of each new entry, -1 for a new one; other axes are unchanged

    join: Join | None = None  # undoes it for an array of which other processes have the removed entries

    @property
    def after(self) -> tuple[int, ...]:
        """The shape after the change."""
        return tuple(len(self.index_maps[i]) if i in self.index_maps else n for i, n in enumerate(self.sizes))

    def forward(self) -> Remap:
        """Return how arrays of the old shape follow the change."""
        return Remap(self.sizes, self.after, partial(remapped, index_maps=self.index_maps))

    def backward(self) -> Remap:
        """Return how arrays of the new shape follow when it is undone; entries that it removed are 0 or joined."""
        back = {axis: inverse(old, self.sizes[axis]) for axis, old in self.index_maps.items()}
        return Remap(self.after, self.sizes, self.join or partial(remapped, index_maps=back))


def inverse(index_map: np.ndarray, size: int) -> np.ndarray:
    """Invert an index map: return for each of `size` old entries its first new index, or -1 if it was removed."""
    found = np.full(size, -1, np.int64)
    present = np.flatnonzero(index_map >= 0)[::-1]
    found[index_map[present]] = present
    return found


def remap_path(old: ShapeChange | None, new: ShapeChange | None) -> Iterator[Remap]:
    """Yield the remaps between the shapes after changes `old` and `new`: back to a common change, then forward."""
    chain: list[ShapeChange | None] = [new]
    while (last := chain[-1]) is not None:
        chain.append(last.before)
    step = old
    while step is not None and step not in chain:
        yield step.backward()
        step = step.before
    for change in reversed(chain[: chain.index(step)]):
        assert change is not None
        yield change.forward()


def remapped(host: np.ndarray, index_maps: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return an array with entries moved by `index_maps`: axis -> old index of each entry, -1 for an added 0."""
    for axis, old in index_maps.items():
        if host.shape[axis]:
            host = np.take(host, np.maximum(old, 0), axis)
        else:
            host = np.zeros_like(host, shape=(*host.shape[:axis], len(old), *host.shape[axis + 1 :]))
        host[(slice(None),) * axis + (old < 0,)] = 0
    return host
