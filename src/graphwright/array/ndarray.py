"""NDArray: a typed, strided view of a Storage. The header is immutable and the only truth on layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from graphwright.array import layout as lay
from graphwright.array.backend import backend
from graphwright.array.device import CPU, Device, DeviceMismatch, DeviceUnavailable
from graphwright.array.dtype import DType, decode, dtype
from graphwright.array.layout import Layout, is_row_major, row_major
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage, poisoned, poisoning
from graphwright.errors import AliasError, ComputeError, DTypeError, ShapeError, UsageError


class ReadOnlyArray(ComputeError):
    """A write to an array that maps a file or borrows read-only memory."""


_new = object.__new__


class NDArray:
    """n-dimensional array of any stride sign.

    Attributes:
        storage: the memory it looks at; of a new result on the CPU made when it is first asked for.
        device: where the memory lies.
        dtype, shape, strides, offset: the layout; strides and offset in elements.
        impl: the backend's own handle on the same memory, made at first use (a cache of the header).
    """

    __slots__ = ("__weakref__", "_impl", "_spec", "_storage", "device", "dtype", "offset", "shape", "strides")

    def __init__(
        self,
        storage: Storage,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        self._storage: Storage | None = storage
        self.device, self.dtype, self.shape, self.offset = storage.device, dtype, shape, offset
        self.strides = row_major(shape) if strides is None else strides
        self._impl: Any = None
        self._spec: Spec | None = None

    @staticmethod
    def owning(impl: Any, spec: Spec, strides: tuple[int, ...]) -> NDArray:
        """A new array on the CPU, the only one to hold what its backend allocated."""
        array = _new(NDArray)
        array._impl, array._spec, array._storage = impl, spec, None
        array.device, array.dtype, array.shape, array.strides, array.offset = CPU, spec.dtype, spec.shape, strides, 0
        return array

    @property
    def storage(self) -> Storage:
        """See the class."""
        if self._storage is None:
            self._storage = Storage(self._impl, self.nbytes, CPU, kind="owned")
        return self._storage

    @property
    def closed(self) -> bool:
        """True once the memory was let go."""
        return self._storage is not None and self._storage.closed

    @property
    def version(self) -> int:
        """How often the memory was written."""
        return 0 if self._storage is None else self._storage.version

    @property
    def impl(self) -> Any:
        """The backend's handle (a torch tensor on the CPU); no stride may be negative. Raises: StorageClosed."""
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
        """Bytes of the elements, without gaps."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the elements lie in row-major order without gaps."""
        return is_row_major(self.shape, self.strides)

    # -- views: the same memory ------------------------------------------------------------------------------------
    def view(self, layout: Layout) -> NDArray:
        """Another layout over the same memory."""
        return NDArray(self.storage, self.dtype, layout.shape, layout.strides, layout.offset)

    def permute(self, *axes: int) -> NDArray:
        """Axes in another order."""
        return self.view(lay.permute(self.layout, axes))

    def expand(self, *shape: int) -> NDArray:
        """Broadcast to a shape; not to be written to."""
        return self.view(lay.expand(self.layout, shape))

    def squeeze(self, axis: int | None = None) -> NDArray:
        """Without an axis of size 1, or without all of them. Raises: ShapeError for a longer axis."""
        if axis is not None and self.shape[axis] != 1:
            raise ShapeError("only an axis of size 1 can go", where=f"axis {axis}", expected=1, got=self.shape[axis])
        return self.view(lay.squeeze(self.layout, None if axis is None else axis % len(self.shape)))

    def unsqueeze(self, axis: int) -> NDArray:
        """With a new axis of size 1 before `axis` (negative: counted in the result)."""
        return self.view(lay.unsqueeze(self.layout, axis % (len(self.shape) + 1)))

    def diagonal(self, first: int = 0, second: int = 1, shift: int = 0) -> NDArray:
        """Elements (i, i + shift) of two axes, as a last axis in their place."""
        return self.view(lay.diagonal(self.layout, first, second, shift))

    def split(self, sizes: Sequence[int], axis: int = 0) -> list[NDArray]:
        """Pieces of these sizes along an axis. Raises: ShapeError unless they add up to it."""
        if sum(sizes) != self.shape[axis] or min(sizes, default=0) < 0:
            raise ShapeError("the pieces must make up the axis", expected=self.shape[axis], got=tuple(sizes))
        return [self.view(piece) for piece in lay.split(self.layout, axis, sizes)]

    def reshape(self, *shape: int, copy: bool | None = None) -> NDArray:
        """The same elements under another shape: a view where strides can say it, else a copy.

        Args:
            copy: False to refuse a copy, True to make one in any case.
        Raises: ShapeError for another number of elements, or where copy=False and only a copy will do.
        """
        if prod(shape) != self.size:
            raise ShapeError("another number of elements", expected=self.shape, got=shape)
        found = None if copy else lay.reshape(self.layout, shape)
        if found is None and copy is False:
            raise ShapeError(
                "no strides show these elements under this shape",
                expected=f"{self.shape} of strides {self.strides}",
                got=shape,
                fix="reshape(...), which copies",
            )
        return self.view(found) if found is not None else NDArray(self.copy().storage, self.dtype, shape)

    # -- writing -----------------------------------------------------------------------------------------------------
    def writable(self) -> None:
        """Count a write. Raises: ReadOnlyArray if the memory must not change; AliasError where elements share it."""
        storage = self.storage
        if storage.readonly:
            raise ReadOnlyArray(
                "this array is read-only", got=f"{self.spec} of a mapped or borrowed block", fix="copy() it"
            )
        if 0 in self.strides and any(s == 0 and n > 1 for s, n in zip(self.strides, self.shape, strict=True)):
            raise AliasError("elements of an expanded array share memory", got=self.layout, fix="copy() it")
        storage.written()

    def __getitem__(self, index: Any) -> NDArray:
        """A view, or with index arrays and masks a new array; see `array.indexing`."""
        from graphwright.array.indexing import read

        return read(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a value, broadcast, at an index. Raises: ReadOnlyArray, ShapeError, IndexOutOfRange."""
        from graphwright.array.indexing import write

        write(self, index, value)

    def copy(self) -> NDArray:
        """A contiguous array of its own."""
        target = empty(self.shape, self.dtype, self.device)
        backend(self.device).copy(target, self)
        return target

    def copy_from(self, source: NDArray) -> NDArray:
        """Write `source` (same shape, any dtype) into this array; returns self."""
        self.writable()
        backend(self.device).copy(self, source if source.device in (self.device, CPU) else source.to(CPU))
        return self

    def to(self, device: Device) -> NDArray:
        """Itself if it lies there, else a copy that does. Raises: DeviceUnavailable."""
        if device == self.device:
            return self
        target = empty(self.shape, self.dtype, device)
        return target.copy_from(self if self.device == CPU else from_numpy(self.to_numpy(bits=True), bits=self.dtype))

    # -- for others to read ----------------------------------------------------------------------------------------
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The memory for another library, shared unless `copy`. Raises: BufferError where it cannot be."""
        if copy:
            return self.copy().__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)
        if self.storage.readonly or min(self.strides, default=0) < 0 or self.device != CPU:
            raise BufferError(
                f"{self.spec} on {self.device}: read-only, of a negative stride or on no device of DLPack's"
            )
        return self.impl.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(kind, index) as DLPack counts them: (1, 0) is the CPU."""
        return (1, 0)

    def to_numpy(self, dtype: npt.DTypeLike | None = None, *, bits: bool = False) -> np.ndarray:
        """The elements as a numpy array; shares memory when neither dtype nor layout forces a copy.

        Args:
            dtype: numpy dtype to convert to; needed for bfloat16 and floats of 8 bits, which numpy does not have.
            bits: give those as their bit patterns.
        Raises: DTypeError for one of those without either.
        """
        if self.dtype.as_bits and dtype is None and not bits:
            raise DTypeError(f"numpy has no {self.dtype.name}", fix="to_numpy(dtype='float32') or to_numpy(bits=True)")
        host = self._host()
        if self.dtype.as_bits and not bits:
            host = decode(host, self.dtype)
        return host if dtype is None else host.astype(dtype, copy=False)

    def _host(self) -> np.ndarray:
        """The elements as numpy: straight from a host buffer, so that looking loads no backend, else by the backend."""
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
        """For numpy: as `to_numpy`, of memory of the host.

        Raises: DTypeError; StorageClosed; DeviceMismatch on a device, where it would wait and copy unasked; UsageError
            for copy=False where only a copy will do.
        """
        if self.device != CPU:
            raise DeviceMismatch(
                "numpy looks at memory of the host",
                where="numpy",
                expected=CPU,
                got=self.device,
                fix="array.to_numpy()",
            )
        host = self.to_numpy(dtype)
        fresh = not np.may_share_memory(host, self.to_numpy(bits=True))
        if copy is False and fresh and host.size:
            raise UsageError(
                "only a copy gives numpy this", where="numpy", expected=self.spec, got=host.dtype, fix="copy=None"
            )
        return host.copy() if copy and not fresh else host

    def tobytes(self) -> bytes:
        """Row-major bytes of the elements."""
        return self.to_numpy(bits=True).tobytes()

    def item(self) -> Any:
        """The one element as a Python number."""
        return self.to_numpy("float32" if self.dtype.as_bits else None).item()

    def text(self, prefix: str = "") -> str | None:
        """The first and last elements as numpy prints them; None for a mapped array whose bytes nobody has asked for.

        Args:
            prefix: what stands before it on the first line, for the indent of the others.
        """
        if not self.storage.touched:
            return None
        return np.array2string(
            self.to_numpy(bits=True),
            separator=", ",
            threshold=50,
            precision=4,
            prefix=prefix,
            formatter={"int_kind": self._text_of_bits} if self.dtype.as_bits else None,
        )

    def _text_of_bits(self, bits: np.integer) -> str:
        """A float by its bit pattern, widened only where it is shown."""
        return f"{decode(np.asarray(bits), self.dtype).item():.4g}"

    def __repr__(self) -> str:
        body = self.text("NDArray(") if self.device.kind != "meta" else "no values"
        facts = f"{self.spec}, {self.device}"
        return f"NDArray({facts}, not read from its file)" if body is None else f"NDArray({body}, {facts})"


def empty(shape: tuple[int, ...], dtype: DType, device: Device = CPU) -> NDArray:
    """Uninitialised memory of a shape; NaN under `array.poison`."""
    made = backend(device).empty(shape, dtype)
    if poisoning.get():
        made.copy_from(from_numpy(poisoned(shape, np.dtype(dtype.numpy)), bits=dtype))
    return made


def from_numpy(host: np.ndarray | np.generic, *, bits: DType | None = None, copy: bool | None = None) -> NDArray:
    """An array that shares memory with `host` where its layout allows it; `storage.kind` says: borrowed, or owned.

    Args:
        host: any numeric or bool array; floats that numpy does not have come as bits with `bits=bfloat16`.
        copy: False to refuse a copy, True to make one in any case.
    Raises: DTypeError; ShapeError for copy=False where the strides are no multiples of the element.
    """
    host = np.asarray(host)
    if host.flags.c_contiguous and host.dtype.isnative and not copy:  # most are: every feed of a step comes by here
        return _row_by_row(host, dtype(host.dtype) if bits is None else bits, "borrowed")
    kind = dtype(host.dtype.newbyteorder("=")) if bits is None else bits
    odd = any(s % host.itemsize for s in host.strides) or not host.dtype.isnative
    if odd and copy is False:
        raise ShapeError("this memory cannot be shared: strides are no multiples of the element", got=host.strides)
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
    """An array that shares memory with another library's (torch, numpy, jax), by DLPack; it keeps that one alive.

    Args:
        copy: True for memory of its own.
    Raises: DeviceUnavailable for memory that is not on the CPU; what the other library raises, as for read-only memory.
    """
    where = other.__dlpack_device__()
    if where[0] != 1:
        raise DeviceUnavailable("only memory on the CPU can be shared", got=f"DLPack device {where[0]}:{where[1]}")
    array = backend(CPU).adopt(other)
    return array.copy() if copy else array
