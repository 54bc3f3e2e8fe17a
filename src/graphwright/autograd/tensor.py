"""Tensor: gradients, shapes and conversions.

What a tensor holds is in `base.py`, its arithmetic in `operators.py`, how entries move in `rearrange.py`, what its
index means in `indexing.py`.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from typing import Any

from graphwright.array import Device, NDArray, bfloat16, dtype, float16, float32, float64, int64, names_device
from graphwright.autograd.apply import scalar
from graphwright.autograd.indexing import assign, indexed
from graphwright.autograd.rearrange import Rearranging
from graphwright.autograd.recorder import Symbol
from graphwright.errors import ShapeError
from graphwright.ops import call


class Tensor(Rearranging):
    """An n-dimensional value that operations and gradients flow through.

    What it holds is `TensorBase`, what it computes `Operators`, where entries go `Rearranging`.
    """

    __slots__ = ()
    __hash__ = Rearranging.__hash__

    # -- gradient ----------------------------------------------------------------------------------------------------
    def backward(
        self, grad: Tensor | None = None, *, retain_graph: bool = False, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Add d self / d leaf to `grad` of every leaf that requires it.

        Args:
            grad: gradient of what follows, of this tensor's spec; needed unless it has one element.
            retain_graph: keep saved values for another backward.
            inputs: fill `grad` of these tensors only, leaves or inner ones.
        Raises: GradShapeRequired, GraphFreed, NoTape, ModifiedSinceForward.
        """
        from graphwright.autograd.engine import backward

        backward(self, grad, retain_graph=retain_graph, inputs=inputs)

    def detach(self) -> Tensor:
        """The same memory without the tape."""
        return Tensor(self.data.alias() if isinstance(self.data, Symbol) else self.data)

    # -- shape and dtype ---------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Tensor]:
        """Along the first axis; traced tensors too, since their sizes are known."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        """A part of it; see `autograd.indexing`."""
        return indexed(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a value, broadcast and cast, at an index; see `autograd.indexing`."""
        assign(self, index, value)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements under another shape; one size may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = 1
            for s in sizes:
                known *= s if s != -1 else 1
            if sizes.count(-1) > 1 or known == 0 or self.size % known:
                raise ShapeError("-1 cannot be worked out", expected=self.shape, got=tuple(sizes))
            sizes[sizes.index(-1)] = self.size // known
        return call("reshape", self, shape=tuple(sizes))

    def view(self, *shape: Any) -> Tensor:
        """As `reshape`, and never a copy: eagerly the result shares memory. Raises: ShapeError where it cannot."""
        result = self.reshape(*shape)
        if isinstance(self.data, NDArray) and isinstance(result.data, NDArray):
            self.data.reshape(*result.shape, copy=False)
        return result

    def permute(self, *axes: int) -> Tensor:
        """Axes in another order."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return call("permute", self, axes=tuple(a % self.ndim for a in order))

    def transpose(self, a: int, b: int) -> Tensor:
        """Two axes exchanged."""
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return call("permute", self, axes=tuple(order))

    @property
    def T(self) -> Tensor:
        """Axes in reverse order."""
        return call("permute", self, axes=tuple(reversed(range(self.ndim))))

    def expand(self, *shape: int) -> Tensor:
        """Broadcast to a shape, sharing memory."""
        return call("expand", self, shape=tuple(shape))

    def contiguous(self) -> Tensor:
        """Row-major memory: itself if it is so already."""
        if isinstance(self.data, NDArray) and self.data.contiguous:
            return self
        return call("copy", self)

    def clone(self) -> Tensor:
        """A copy; the gradient flows through."""
        return call("copy", self)

    def to(self, to: object) -> Tensor:
        """Cast to a dtype, or copied to a device (a Device or `"sim:1"`); itself if nothing is to be done.

        Raises: DTypeError, DeviceUnavailable.
        """
        if names_device(to):
            from graphwright.autograd.transfer import moved

            return moved(self, Device.parse(to))
        kind = dtype(to)
        return self if kind is self.dtype else call("cast", self, dtype=kind)

    def double(self) -> Tensor:
        """As float64."""
        return self.to(float64)

    def float(self) -> Tensor:
        """As float32."""
        return self.to(float32)

    def half(self) -> Tensor:
        """As float16."""
        return self.to(float16)

    def bfloat16(self) -> Tensor:
        """As bfloat16."""
        return self.to(bfloat16)

    def long(self) -> Tensor:
        """As int64."""
        return self.to(int64)

    # -- writing over it: see `autograd.inplace` ---------------------------------------------------------------------
    def add_(self, other: Any) -> Tensor:
        """Add to it, in its memory."""
        return call("add", self, other, out=self)

    def sub_(self, other: Any) -> Tensor:
        """Subtract from it, in its memory."""
        return call("sub", self, other, out=self)

    def mul_(self, other: Any) -> Tensor:
        """Multiply it, in its memory."""
        return call("mul", self, other, out=self)

    def div_(self, other: Any) -> Tensor:
        """Divide it, in its memory."""
        return call("div", self, other, out=self)

    def copy_(self, other: Tensor) -> Tensor:
        """Take the values of a tensor that broadcasts to its shape, cast to its dtype."""
        return call("copy", other.to(self.dtype).expand(*self.shape), out=self)

    def fill_(self, value: builtins.float) -> Tensor:
        """One value everywhere; the gradient of what it held ends here."""
        return self.copy_(scalar(repr(value), self.dtype))

    def zero_(self) -> Tensor:
        """Zeros everywhere."""
        return self.fill_(0)
