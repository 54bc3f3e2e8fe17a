"""Backend: the interface of a device. Everything above `array/` uses these calls and no array library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from graphwright.array.device import Device, DeviceUnavailable
from graphwright.array.waiting import wait_briefly
from graphwright.errors import ComputeError

if TYPE_CHECKING:
    import numpy as np

    from graphwright.array.dtype import DType
    from graphwright.array.memory_pool import Driver
    from graphwright.array.ndarray import NDArray
    from graphwright.array.spec import Spec
    from graphwright.array.storage import Storage
    from graphwright.array.triton.fused import Kernel

Attrs = Mapping[str, Any]
Call = Callable[[], object]
Fresh = Callable[..., Any]
"""Operand handles, attributes by name -> the handle of a new row-major result."""

torch_functions: dict[str, str] = {}
"""Op -> the torch function that is its CPU kernel; `ops/` fills it from the field `aten` without importing torch."""

queued_failure: ContextVar[Callable[[Exception], Exception] | None] = ContextVar("queued_failure", default=None)
"""The error for a failure in a device queue, created when the kernel is bound and raised when the host waits."""


class MissingKernel(ComputeError):
    """A backend has no kernel with this name."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Host requirements of one kernel launch. A kernel without any can be captured in a device graph (CUDA graph).

    Attributes:
        reads: indices of the operands whose values the host must know when the kernel is launched.
        answers: True if the host reads a result before it continues.
        allocates: True if the kernel allocates memory while it runs.
        fallback: the reason why the kernel runs on the host instead of the device, or an empty string.
    """

    reads: tuple[int, ...] = ()
    answers: bool = False
    allocates: bool = False
    fallback: str = ""

    @property
    def why(self) -> str:
        """The reason, other than `reads`, why the kernel cannot be captured; else an empty string."""
        other = "the host reads its result" if self.answers else "it allocates memory" if self.allocates else ""
        return self.fallback or other


class Backend(Protocol):
    """Memory and kernels of a device.

    A kernel is looked up by the op's name and bound to its operands once; the bound call takes no arguments, allocates
    nothing and can run any number of times. Eager code binds and runs at once; a plan stores the bound calls.
    """

    device: Device
    fuses: bool
    """Whether plans give it fusion groups, see `bind_fused`."""

    @property
    def driver(self) -> Driver | None:
        """The driver of the device's memory and queues; None if calls run synchronously."""

    @property
    def stream(self) -> int:
        """The driver stream on which calls are queued."""
        ...

    def allocate(self, nbytes: int) -> Storage:
        """Allocate a block whose address is a multiple of 64 bytes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        """Return an uninitialised array with its own memory."""
        ...

    def wrap(self, array: NDArray) -> Any:
        """Return the backend's handle of an array (a torch tensor on the CPU); the strides must not be negative."""

    def copy(self, target: NDArray, source: NDArray) -> None:
        """Copy `source` into `target`, an array of the same shape; dtypes and layouts may differ."""

    def to_host(self, array: NDArray) -> np.ndarray:
        """Wait for queued writes; return the elements as numpy (as bits if it lacks the dtype), shared if possible."""
        ...

    def adopt(self, other: Any) -> NDArray:
        """Return an array that shares the memory of an object that supports DLPack."""
        ...

    def address(self, array: NDArray) -> int:
        """Return the host address of the first element."""
        ...

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """Return the specs of the scratch buffers that kernel `name` needs."""
        ...

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        """Return the host requirements of one launch of kernel `name`."""
        ...

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray]
    ) -> list[Call]:
        """Return the calls that compute `outs` from `ins` with scratch buffers `work`. Raises: MissingKernel."""
        ...

    def bind_fused(self, kernel: Kernel, memory: Sequence[NDArray], written: Sequence[bool]) -> list[Call]:
        """Return the calls that run the generated kernel of a fusion group.

        Args:
            kernel: its source.
            memory: the arrays of `kernel.memory`.
            written: per array, whether the kernel writes it.
        """
        ...

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> Fresh | None:
        """Return a function from operand handles, and attributes by name, to the handle of a new result, or None.

        It computes the same bits as the calls of `bind`, for operands with the specs and strides of `ins`. None if the
        op has several results, or if this is not faster.
        """

    def has_kernel(self, name: str) -> bool:
        """Return True if the backend has a kernel of this name."""
        ...

    def kernels(self) -> frozenset[str]:
        """Return the names of all kernels."""
        ...


_HOME = {"cpu": "cpu", "meta": "meta", "cuda": "cuda"}
"""Device kind -> module of `array/` with its `make(device)`; imported at first use."""
_MAKERS: dict[str, Callable[[Device], Backend]] = {}
"""Device kind -> a function that makes its backend, for backends outside `array/`."""
_UNAVAILABLE = {"sim": "`import graphwright.testing.simulated_device` makes it available"}
_SINGLE = ("cpu", "meta")
_backends: dict[Device, Backend] = {}


def backend(device: Device) -> Backend:
    """Return a device's backend, imported at first use (reading a model needs no torch). Raises: DeviceUnavailable."""
    found = _backends.get(device)
    return found if found is not None else use(device)


def use(device: Device, made: Backend | None = None) -> Backend:
    """Install and return `made` as the backend of a device, by default a new one. Raises: DeviceUnavailable."""
    if made is None:
        make, home = _MAKERS.get(device.kind), _HOME.get(device.kind)
        if make is None and (home is None or (device.index and device.kind in _SINGLE)):
            reason = _UNAVAILABLE.get(device.kind, f"the only {device.kind} device has index 0")
            raise DeviceUnavailable(f"the device is not available: {reason}", got=str(device), fix='use device="cpu"')
        wait_briefly()
        made = make(device) if make is not None else import_module(f"graphwright.array.{home}").make(device)
        assert made is not None
    _backends[device] = made
    return made


def register_backend(kind: str, make: Callable[[Device], Backend]) -> None:
    """Register `make` as the function that creates the backends of a device kind."""
    _MAKERS[kind] = make
