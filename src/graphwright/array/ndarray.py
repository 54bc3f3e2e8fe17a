"""NDArray: a typed, strided view of a Storage, whose shape, strides and offset never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphwright.array import layout as views
from graphwright.array.backend import backend
from graphwright.array.device import CPU, Device, DeviceUnavailable
from graphwright.array.dtype import DType, decode, dtype
from graphwright.array.layout import Layout, Shape, is_row_major, row_major
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage, poisoned, poisoning
from graphwright.errors import AliasError, ComputeError, OutOfMemory, ShapeError, UsageError


class ReadOnlyArray(ComputeError):
    """A write was attempted to an array over a mapped file or over borrowed read-only memory."""


_new = object.__new__
_DLPACK = {"cpu": 1, "cuda": 2}
"""Device kind -> its number in DLPack."""


class OneElement:
    """Formats and rounds the only element of an array or tensor; several elements raise ShapeError."""

    __slots__ = ()

    def item(self) -> Any:
        """Return the only element as a Python number. Raises: ShapeError unless there is one element."""
        raise NotImplementedError

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)


def _operator(name: str):
    """Return the operator method of `NDArray.tensors`; for numpy arrays numpy has the operators."""

    def operate(self: NDArray, *other: Any) -> Any:
        if self.tensors is None or (other and isinstance(other[0], np.ndarray | np.generic)):
            return NotImplemented
        return getattr(self.tensors(self), name)(*other)

    return operate


def _updating(name: str):
    """Return the operator method that overwrites the array with the result of that of `NDArray.tensors`."""

    def update(self: NDArray, other: Any) -> Any:
        if self.tensors is None:
            return NotImplemented
        getattr(self.tensors(self), name)(other)
        return self

    return update


class NDArray(OneElement):
    """An n-dimensional array with strides of any sign.

    Other methods and the operators are those of the tensors over arrays, and return tensors that are not on a tape.

    Attributes:
        storage: the memory; for a new CPU result it is created on first access.
        device: where the memory is.
        dtype, shape, strides, offset: the layout; strides and offset in elements.
        impl: the backend's handle on the same memory, created on first use.
        tensors: the class of tensors over arrays, set by the layer that has it.
    """

    tensors: ClassVar[Any] = None

    __slots__ = ("__weakref__", "_impl", "_spec", "_storage", "device", "dtype", "offset", "shape", "strides")

    def __init__(
        self, storage: Storage, dtype: DType, shape: Shape, strides: Shape | None = None, offset: int = 0
    ) -> None:
        self._storage: Storage | None = storage
        self.device, self.dtype, self.shape, self.offset = storage.device, dtype, shape, offset
        self.strides = row_major(shape) if strides is None else strides
        self._impl: Any = None
        self._spec: Spec | None = None

    @staticmethod
    def owning(impl: Any, spec: Spec, strides: tuple[int, ...]) -> NDArray:
        """Wrap a tensor that the CPU backend allocated; the array is its only owner."""
        array = _new(NDArray)
        array._impl, array._spec, array._storage = impl, spec, None
        array.device, array.dtype, array.shape, array.strides, array.offset = CPU, spec.dtype, spec.shape, strides, 0
        return array

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not callable(getattr(self.tensors, name, None)):
            raise AttributeError(f"an array has no attribute {name!r}")
        return getattr(self.tensors(self), name)

    __add__, __radd__, __iadd__ = _operator("__add__"), _operator("__radd__"), _updating("add_")
    __sub__, __rsub__, __isub__ = _operator("__sub__"), _operator("__rsub__"), _updating("sub_")
    __mul__, __rmul__, __imul__ = _operator("__mul__"), _operator("__rmul__"), _updating("mul_")
    __truediv__, __rtruediv__, __itruediv__ = _operator("__truediv__"), _operator("__rtruediv__"), _updating("div_")
    __matmul__, __pow__, __neg__, __abs__ = map(_operator, ("__matmul__", "__pow__", "__neg__", "__abs__"))
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("__lt__", "__le__", "__gt__", "__ge__"))

    @property
    def storage(self) -> Storage:
        """The memory; for a new CPU result it is created on first access."""
        if self._storage is None:
            self._storage = Storage(self._impl, self.nbytes, CPU, kind="owned")
        return self._storage

    @property
    def closed(self) -> bool:
        """True once the memory was freed."""
        return self._storage is not None and self._storage.closed

    @property
    def version(self) -> int:
        """Number of writes to the memory."""
        return 0 if self._storage is None else self._storage.version

    @property
    def impl(self) -> Any:
        """The backend's handle (a torch tensor on the CPU); needs strides >= 0. Raises: StorageClosed."""
        storage = self._storage
        if self._impl is None or (storage is not None and storage.closed):
            self._impl = backend(self.device).wrap(self)
        return self._impl

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        if self._spec is None:
            self._spec = Spec(self.shape, self.dtype)
        return self._spec

    @property
    def layout(self) -> Layout:
        """Shape, strides and offset."""
        return Layout(self.shape, self.strides, self.offset)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without the gaps that strides leave."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps."""
        return is_row_major(self.shape, self.strides)

    # -- views: the same memory ------------------------------------------------------------------------------------
    def view(self, layout: Layout) -> NDArray:
        """Return an array of the given layout over the same memory."""
        return NDArray(self.storage, self.dtype, layout.shape, layout.strides, layout.offset)

    def permute(self, *axes: int) -> NDArray:
        """Return a view with its axes permuted."""
        return self.view(views.permute(self.layout, axes))

    def expand(self, *shape: int) -> NDArray:
        """Broadcast to a shape; the result must not be written."""
        return self.view(views.expand(self.layout, shape))

    def squeeze(self, axis: int | None = None) -> NDArray:
        """Remove one axis of size 1, or by default every one. Raises: ShapeError if `axis` has another size."""
        if axis is not None and self.shape[axis] != 1:
            size = self.shape[axis]
            raise ShapeError("cannot squeeze an axis whose size is not 1", where=f"axis {axis}", expected=1, got=size)
        return self.view(views.squeeze(self.layout, None if axis is None else axis % len(self.shape)))

    def unsqueeze(self, axis: int) -> NDArray:
        """Insert an axis of size 1; `axis`, which may be negative, is its index in the result."""
        return self.view(views.unsqueeze(self.layout, axis % (len(self.shape) + 1)))

    def diagonal(self, first: int = 0, second: int = 1, shift: int = 0) -> NDArray:
        """Replace two axes by one last axis, which runs along the diagonal (i, i + shift)."""
        return self.view(views.diagonal(self.layout, first, second, shift))

    def split(self, sizes: Sequence[int], axis: int = 0) -> list[NDArray]:
        """Split an axis into pieces of these sizes. Raises: ShapeError if their sum is not the size of the axis."""
        if sum(sizes) != self.shape[axis] or min(sizes, default=0) < 0:
            limits = f"sizes >= 0 with sum {self.shape[axis]}"
            raise ShapeError("cannot split the axis into these sizes", expected=limits, got=tuple(sizes))
        return [self.view(piece) for piece in views.split(self.layout, axis, sizes)]

    def reshape(self, *shape: int, copy: bool | None = None) -> NDArray:
        """Return the same elements in a new shape: a view if the strides allow it, else a copy.

        `copy`: False forbids a copy, True forces one.
        Raises: ShapeError if the number of elements differs, or if copy=False and a copy is needed.
        """
        if prod(shape) != self.size:
            have, asked = f"{self.size} elements, as in {self.shape}", f"{prod(shape)} in {shape}"
            raise ShapeError("cannot reshape to a different number of elements", expected=have, got=asked)
        found = None if copy else views.reshape(self.layout, shape)
        if found is None and copy is False:
            allowed = f"a shape that strides {self.strides} of {self.shape} allow"
            raise ShapeError("reshape needs a copy, but copy=False", expected=allowed, got=shape, fix="pass copy=None")
        return self.view(found) if found is not None else NDArray(self.copy().storage, self.dtype, shape)

    # -- writing -----------------------------------------------------------------------------------------------------
    def writable(self) -> None:
        """Check that a write is allowed, and record it. Raises: ReadOnlyArray; AliasError if elements overlap."""
        storage = self.storage
        if storage.readonly:
            block = f"{self.spec} of a mapped or borrowed block"
            raise ReadOnlyArray("cannot write to a read-only array", got=block, fix="write to a copy()")
        if 0 in self.strides and any(s == 0 and n > 1 for s, n in zip(self.strides, self.shape, strict=True)):
            what = "cannot write to an expanded array, whose elements share memory"
            raise AliasError(what, got=self.layout, fix="write to a copy()")
        storage.written()

    def __getitem__(self, index: Any) -> NDArray:
        """Return a view, or a new array if the index contains arrays or masks; see `array.indexing`."""
        from graphwright.array.indexing import read

        return read(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign a value, which is broadcast, at an index. Raises: ReadOnlyArray, ShapeError, IndexOutOfRange."""
        from graphwright.array.indexing import write

        if self.storage.shared:
            what = "cannot write to the array of a weight, because a fork or an undo entry reads the same memory"
            fix = "write to the weight itself, which copies it first: under gw.no_grad(), w[0] = value"
            raise ReadOnlyArray(what, got=self.spec, fix=fix)
        write(self, index, value)

    def copy(self) -> NDArray:
        """Return a contiguous copy."""
        target = empty(self.shape, self.dtype, self.device)
        backend(self.device).copy(target, self)
        return target

    def __deepcopy__(self, memo: dict[int, Any]) -> NDArray:
        return self.copy()  # copied by attributes, the memory and the backend's tensor of it would be two blocks

    def __reduce__(self) -> tuple[Callable[..., NDArray], tuple[np.ndarray, DType]]:
        # pickled by its bits: of a tensor, torch would send the memory itself, which one process can open
        return _received, (np.ascontiguousarray(self.to_numpy(bits=True)).reshape(self.shape), self.dtype)

    def copy_from(self, source: NDArray) -> NDArray:
        """Copy `source` (same shape, any dtype) into this array; return self."""
        self.writable()
        backend(self.device).copy(self, source if source.device in (self.device, CPU) else source.to(CPU))
        return self

    def to(self, device: Device) -> NDArray:
        """Return the array itself if it is on the device, else a copy there. Raises: DeviceUnavailable."""
        if device == self.device:
            return self
        target = empty(self.shape, self.dtype, device)
        return target.copy_from(self if self.device == CPU else from_numpy(self.to_numpy(bits=True), bits=self.dtype))

    # -- for others to read ----------------------------------------------------------------------------------------
    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """Export the array by DLPack, sharing its memory unless `copy`. Raises: BufferError if this is impossible."""
        if copy:
            return self.copy().__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)
        off = self.device.kind not in _DLPACK
        if self.storage.readonly or min(self.strides, default=0) < 0 or off:
            read, apart = "it is read-only", "other libraries do not know the device"
            why = apart if off else read if self.storage.readonly else "it has a negative stride"
            raise BufferError(f"cannot export {self.spec} on {self.device} by DLPack: {why}")
        return self.impl.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (kind, index) as in DLPack: (1, 0) is the CPU, (2, i) is GPU i."""
        return _DLPACK.get(self.device.kind, 1), self.device.index

    def to_numpy(self, dtype: npt.DTypeLike | None = None, *, bits: bool = False) -> np.ndarray:
        """Return the elements as a numpy array, sharing memory if neither dtype nor layout needs a copy.

        Args:
            dtype: numpy dtype to convert to; by default that of the array, and float32 for bfloat16 and 8-bit floats,
                which numpy does not have.
            bits: return these dtypes as their bit patterns.
        """
        host = self._host()
        if self.dtype.as_bits and not bits:
            host = decode(host, self.dtype)
        return host if dtype is None else host.astype(dtype, copy=False)

    def _host(self) -> np.ndarray:
        """Return the elements as numpy; if the memory is a host buffer, this loads no backend."""
        memory = self.storage.memory
        if self.device != CPU or not isinstance(memory, np.ndarray | memoryview | bytearray | bytes):
            return backend(self.device).to_host(self)
        size, kind = self.dtype.itemsize, self.dtype.numpy
        if self.contiguous and 0 not in self.shape:
            host = np.ndarray(self.shape, kind, memory, size * self.offset)
            host.flags.writeable &= not self.storage.readonly
            return host
        flat = np.frombuffer(memory, np.uint8) if not isinstance(memory, np.ndarray) else memory.view(np.uint8)
        flat = flat[: len(flat) // size * size].view(kind)
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, tuple(size * s for s in self.strides), writeable=not self.storage.readonly
        )

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Implement numpy's array protocol: shares host memory; other devices and dtypes that numpy lacks are copied.

        Raises: StorageClosed; UsageError for copy=False if a copy is needed.
        """
        host = self.to_numpy(dtype)
        fresh = self.device != CPU or not np.may_share_memory(host, self.to_numpy(bits=True))
        if copy is False and fresh and host.size:
            facts: Any = {"where": "numpy", "expected": self.spec, "got": host.dtype, "fix": "pass copy=None"}
            raise UsageError("numpy needs a copy of this array, which copy=False forbids", **facts)
        return host.copy() if copy and not fresh else host

    def tobytes(self) -> bytes:
        """Return the elements as row-major bytes."""
        return self.to_numpy(bits=True).tobytes()

    def item(self) -> Any:
        """Return the only element as a Python number. Raises: ShapeError unless there is one element."""
        if self.size != 1:
            raise ShapeError("cannot convert this array to a number", expected="exactly one element", got=self.spec)
        return self.to_numpy().item()

    def text(self, prefix: str = "") -> str | None:
        """Return the first and last elements as numpy prints them; None for a mapped file that was not read yet.

        `prefix`: text that will precede it on the first line; the other lines are indented by its length.
        """
        if not self.storage.touched:
            return None
        one = {"int_kind": lambda bits: f"{decode(np.asarray(bits), self.dtype).item():.4g}"}
        form: Any = one if self.dtype.as_bits else None
        host = self.to_numpy(bits=True)
        return np.array2string(host, separator=", ", threshold=50, precision=4, prefix=prefix, formatter=form)

    def __repr__(self) -> str:
        body = self.text("NDArray(") if self.device.kind != "meta" else "no values"
        facts = f"{self.spec}, {self.device}"
        return f"NDArray({facts}, not read from its file)" if body is None else f"NDArray({body}, {facts})"


def empty(shape: tuple[int, ...], dtype: DType, device: Device = CPU) -> NDArray:
    """Return an uninitialised array; inside `storage.poison()` it is filled with NaN. Raises: OutOfMemory."""
    memory = backend(device)
    try:
        made = memory.empty(shape, dtype)
    except OutOfMemory:  # of a device, which knows more
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        raise OutOfMemory("cannot allocate this array", expected="sizes >= 0, and an array that fits in memory",
                          got=f"{dtype.name} of shape {shape}") from error  # fmt: skip
    if poisoning.get():
        made.copy_from(from_numpy(poisoned(shape, np.dtype(dtype.numpy)), bits=dtype))
    return made


def _received(bits: np.ndarray, kind: DType) -> NDArray:
    """Return the array with these bits, of a pickled array."""
    return from_numpy(bits, bits=kind, copy=True)


def from_numpy(host: np.ndarray | np.generic, *, bits: DType | None = None, copy: bool | None = None) -> NDArray:
    """Return an array that shares memory with `host` if its layout allows; `storage.kind` is then `borrowed`.

    Args:
        host: any numeric or bool array.
        bits: the dtype whose bit patterns `host` holds, for dtypes that numpy lacks, such as bfloat16.
        copy: False forbids a copy, True forces one.
    Raises: DTypeError; ShapeError for copy=False if the strides or the byte order need a copy.
    """
    host = np.asarray(host)
    if host.flags.c_contiguous and host.dtype.isnative and not copy:  # the usual case: every feed of a step
        return _row_by_row(host, dtype(host.dtype) if bits is None else bits, "borrowed")
    kind = dtype(host.dtype.newbyteorder("=")) if bits is None else bits
    odd = any(s % host.itemsize for s in host.strides) or not host.dtype.isnative
    if odd and copy is False:
        if not host.dtype.isnative:
            raise ShapeError("cannot share an array in foreign byte order", got=host.dtype, fix="pass copy=True")
        what = "cannot share an array whose strides are not multiples of the element size"
        raise ShapeError(what, expected=f"multiples of {host.itemsize}", got=host.strides, fix="pass copy=True")
    if odd or copy:
        host = np.array(host, dtype=host.dtype.newbyteorder("="), order="C")
    origin = "owned" if odd or copy else "borrowed"
    strides = tuple(s // host.itemsize for s in host.strides)
    if is_row_major(host.shape, strides):
        return _row_by_row(host, kind, origin)
    low, high = np.lib.array_utils.byte_bounds(host)
    first = host[tuple(slice(None, None, -1 if s < 0 else 1) for s in host.strides)]  # begins at the lowest address
    flat = np.lib.stride_tricks.as_strided(first, ((high - low) // host.itemsize,), (host.itemsize,))
    storage = Storage(flat, high - low, CPU, readonly=not host.flags.writeable, kind=origin)
    return NDArray(storage, kind, host.shape, strides, (host.ctypes.data - low) // host.itemsize)


def _row_by_row(host: np.ndarray, kind: DType, origin: str) -> NDArray:
    storage = Storage(host.reshape(-1), host.nbytes, CPU, readonly=not host.flags.writeable, kind=origin)
    return NDArray(storage, kind, host.shape)


def from_dlpack(other: Any, *, copy: bool | None = None) -> NDArray:
    """Return an array that shares the memory of an array of torch, numpy or jax, by DLPack, and keeps it alive.

    Args:
        copy: True copies the elements instead.
    Raises: DeviceUnavailable for memory of a device that is not available; errors of the exporting library (read-only
        memory).
    """
    number, index = other.__dlpack_device__()
    kind = {code: kind for kind, code in _DLPACK.items()}.get(number)
    if kind is None:
        raise DeviceUnavailable("this memory is not on the CPU or a GPU", got=f"DLPack device {(number, index)}",
                                fix="copy it to the CPU")  # fmt: skip
    array = backend(Device(kind, index if kind != "cpu" else 0)).adopt(other)
    return array.copy() if copy else array
