"""NDArray: a typed, strided view of a Storage. The header is immutable and the only truth on layout."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from graphwright.array.backend import backend
from graphwright.array.device import CPU, Device
from graphwright.array.dtype import DType, bfloat16, dtype
from graphwright.array.layout import Layout, is_row_major, row_major
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage
from graphwright.errors import ComputeError, DTypeError


class ReadOnlyArray(ComputeError):
    """A write to an array that maps a file or borrows read-only memory."""


class NDArray:
    """n-dimensional array of any stride sign.

    Attributes:
        storage: the memory it looks at.
        dtype, shape, strides, offset: the layout; strides and offset in elements.
        impl: the backend's own handle on the same memory, made at first use (a cache of the header).
    """

    __slots__ = ("__weakref__", "_impl", "dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        impl: Any = None,
    ) -> None:
        self.storage, self.dtype, self.shape, self.offset = storage, dtype, shape, offset
        self.strides = row_major(shape) if strides is None else strides
        self._impl = impl

    @property
    def impl(self) -> Any:
        """The backend's handle (a torch tensor on the CPU)."""
        if self._impl is None:
            self._impl = backend(self.storage.device).wrap(self)
        return self._impl

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        return Spec(self.shape, self.dtype)

    @property
    def layout(self) -> Layout:
        """Shape, strides and offset."""
        return Layout(self.shape, self.strides, self.offset)

    @property
    def device(self) -> Device:
        """Where the memory lies."""
        return self.storage.device

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

    def view(self, layout: Layout) -> NDArray:
        """Another layout over the same memory."""
        return NDArray(self.storage, self.dtype, layout.shape, layout.strides, layout.offset)

    def writable(self) -> None:
        """Count a write. Raises: ReadOnlyArray if the memory must not change."""
        if self.storage.readonly:
            raise ReadOnlyArray(
                "this array is read-only", got=f"{self.spec} of a mapped or borrowed block", fix="copy() it"
            )
        self.storage.version += 1

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
        backend(self.device).copy(self, source)
        return self

    def to_numpy(self, dtype: npt.DTypeLike | None = None, *, bits: bool = False) -> np.ndarray:
        """The elements as a numpy array; shares memory when neither dtype nor layout forces a copy.

        Args:
            dtype: numpy dtype to convert to; needed for bfloat16, which numpy does not have.
            bits: give bfloat16 as its uint16 bit patterns.
        Raises: DTypeError for bfloat16 without either.
        """
        if self.dtype is bfloat16 and dtype is None and not bits:
            raise DTypeError("numpy has no bfloat16", fix="to_numpy(dtype='float32') or to_numpy(bits=True)")
        if self.dtype is bfloat16 and not bits:
            # the upper half of a float32: exact
            wide = np.asarray(self.to_numpy(bits=True).astype(np.uint32) << 16)  # a shift of no axes gives a scalar
            host = wide.view(np.float32)
        else:
            host = self._host()
        return host if dtype is None else host.astype(dtype, copy=False)

    def _host(self) -> np.ndarray:
        """The elements as numpy: straight from a host buffer, so that looking loads no backend, else by the backend."""
        memory = self.storage.memory
        if not isinstance(memory, np.ndarray | memoryview | bytearray | bytes):
            return backend(self.device).to_host(self)
        flat = np.frombuffer(memory, np.uint8) if not isinstance(memory, np.ndarray) else memory.view(np.uint8)
        size = self.dtype.itemsize
        flat = flat[: len(flat) // size * size].view(self.dtype.numpy)
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, tuple(size * s for s in self.strides), writeable=not self.storage.readonly
        )

    def tobytes(self) -> bytes:
        """Row-major bytes of the elements."""
        return self.to_numpy(bits=True).tobytes()

    def item(self) -> Any:
        """The one element as a Python number."""
        return self.to_numpy("float32" if self.dtype is bfloat16 else None).item()

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
            formatter={"int_kind": _bfloat16_text} if self.dtype is bfloat16 else None,
        )

    def __repr__(self) -> str:
        body = self.text("NDArray(")
        facts = f"{self.spec}, {self.device}"
        return f"NDArray({facts}, not read from its file)" if body is None else f"NDArray({body}, {facts})"


def empty(shape: tuple[int, ...], dtype: DType, device: Device = CPU) -> NDArray:
    """Uninitialised memory of a shape."""
    return backend(device).empty(shape, dtype)


def from_numpy(host: np.ndarray | np.generic, *, bits: DType | None = None) -> NDArray:
    """An array that shares memory with `host` where numpy's layout allows it.

    Args:
        host: any numeric or bool array; bfloat16 comes as uint16 with `bits=bfloat16`.
    """
    host = np.asarray(host)
    kind = dtype(host.dtype) if bits is None else bits
    if any(s % host.itemsize for s in host.strides) or not host.dtype.isnative or any(s < 0 for s in host.strides):
        host = np.ascontiguousarray(host)
    strides = tuple(s // host.itemsize for s in host.strides)
    if is_row_major(host.shape, strides):
        storage = Storage(host.reshape(-1), host.nbytes, CPU, readonly=not host.flags.writeable)
        return NDArray(storage, kind, host.shape)
    low, high = np.lib.array_utils.byte_bounds(host)
    flat = np.lib.stride_tricks.as_strided(host, ((high - low) // host.itemsize,), (host.itemsize,))
    storage = Storage(flat, high - low, CPU, readonly=not host.flags.writeable)
    return NDArray(storage, kind, host.shape, strides)


def _bfloat16_text(bits: np.integer) -> str:
    """A bfloat16 by its bit pattern, widened only where it is shown."""
    return f"{(np.uint32(bits) << 16).view(np.float32):.4g}"
