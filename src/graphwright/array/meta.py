"""The meta device: arrays with a spec and no bytes. Running an op on them checks specs and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Never

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.device import Device
from graphwright.array.dtype import DType
from graphwright.array.ndarray import NDArray
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage
from graphwright.errors import ComputeError


class NoBytes(ComputeError):
    """The elements of an array on the meta device were requested."""


class MetaBackend:
    """The backend of the meta device: every op has a kernel, which computes nothing."""

    driver = None
    stream = 0
    fuses = False

    def __init__(self, device: Device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Storage:
        return Storage(None, nbytes, self.device, kind="owned")

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        return NDArray(self.allocate(prod(shape) * dtype.itemsize), dtype, shape)

    def wrap(self, array: NDArray) -> Any:
        return array

    def copy(self, target: NDArray, source: NDArray) -> None:
        """Copy nothing. Raises: NoBytes if the target is not on the meta device."""
        if target.device != self.device:
            self.to_host(source)

    def to_host(self, array: NDArray) -> Never:
        raise NoBytes("an array on the meta device has no data", got=array.spec, fix="use an array on the CPU")

    def adopt(self, other: Any) -> Never:
        what, fix = "cannot import an array to the meta device, which has no memory", "use from_dlpack(), for the CPU"
        raise NoBytes(what, got=type(other).__name__, fix=fix)

    def address(self, array: NDArray) -> Never:
        self.to_host(array)

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        return []

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        return Needs()

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray]
    ) -> list[Call]:
        return []

    def bind_fused(self, kernel: Any, memory: Sequence[NDArray], written: Sequence[bool]) -> list[Call]:
        return []

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> None:
        return None

    def has_kernel(self, name: str) -> bool:
        return True

    def kernels(self) -> frozenset[str]:
        return frozenset()


make = MetaBackend
