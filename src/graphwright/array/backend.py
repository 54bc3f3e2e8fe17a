"""Backend: what a device must offer. Everything above `array/` speaks to these calls and to no library."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from graphwright.array.device import Device, DeviceUnavailable
from graphwright.errors import ComputeError

if TYPE_CHECKING:
    import numpy as np

    from graphwright.array.dtype import DType
    from graphwright.array.memory_pool import Driver
    from graphwright.array.ndarray import NDArray
    from graphwright.array.spec import Spec
    from graphwright.array.storage import Storage

Attrs = Mapping[str, Any]
Call = Callable[[], object]
Fresh = Callable[..., Any]
"""Handles of the operands, attributes by name -> the handle of a new row-major result."""

torch_functions: dict[str, str] = {}
"""Op -> the torch function that is its kernel on the CPU; `ops/` fills it from the `aten` cells, without torch."""

queued_failure: ContextVar[Callable[[Exception], Exception] | None] = ContextVar("queued_failure", default=None)
"""What a kernel that is bound now raises for a failure in a device's queue, of which the host learns when it waits."""


class MissingKernel(ComputeError):
    """A backend has no kernel of this name."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a use of a kernel asks of the host; where nothing, a graph of the device may hold it.

    Attributes:
        reads: places of operands whose values the host must know when the kernel is launched.
        answers: the host looks at a result before it goes on.
        allocates: memory is taken while it runs.
        fallback: why the kernel runs on the host instead of the device, or nothing.
    """

    reads: tuple[int, ...] = ()
    answers: bool = False
    allocates: bool = False
    fallback: str = ""

    @property
    def why(self) -> str:
        """What keeps it out of a graph, whatever its operands, or nothing."""
        if self.fallback:
            return self.fallback
        return "the host looks at its result" if self.answers else "takes memory as it runs" if self.allocates else ""


class Backend(Protocol):
    """A device's memory and kernels.

    A kernel is found by the op's name and bound to its operands once; the bound call takes no argument, allocates
    nothing and may be run any number of times. Eager code binds and runs at once, a plan keeps the bound calls.
    """

    device: Device

    @property
    def driver(self) -> Driver | None:
        """What the device's memory and queue are driven by; None where calls run at once."""
        ...

    @property
    def stream(self) -> int:
        """The stream of the driver that calls are queued on."""
        ...

    def allocate(self, nbytes: int) -> Storage:
        """A block of bytes, aligned to 64."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        """An uninitialised array with memory of its own."""
        ...

    def wrap(self, array: NDArray) -> Any:
        """The backend's handle on the memory of an array; no stride is negative."""
        ...

    def copy(self, target: NDArray, source: NDArray) -> None:
        """Write `source` into `target`: same shape, any dtype or layout."""
        ...

    def to_host(self, array: NDArray) -> np.ndarray:
        """The elements as numpy (floats that it lacks as bits), shared where possible; waits for what writes them."""
        ...

    def adopt(self, other: Any) -> NDArray:
        """An array over the memory of an object that speaks DLPack."""
        ...

    def address(self, array: NDArray) -> int:
        """Where its first element lies in host memory."""
        ...

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """Scratch that a kernel wants beside its outputs."""
        ...

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        """What a use of a kernel asks of the host."""
        ...

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray]
    ) -> list[Call]:
        """The calls that compute `outs` from `ins`. Raises: MissingKernel."""
        ...

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> Fresh | None:
        """A call that makes the result of operands laid out as these, in memory of its own, with the bits of `bind`.

        None where asking for memory and writing to it is as good, or there are several results.
        """
        ...

    def kernels(self) -> frozenset[str]:
        """Names of the kernels there are."""
        ...


SPINS = "1000"
"""How often a thread of a kernel looks for the others before it sleeps: some 15 us. With the 300 000 of the OpenMP
runtime it burns the core that another process waits for, or, after a kernel of ATen, a thread of the VM."""

_HOME = {"cpu": "cpu", "meta": "meta", "sim": "sim"}
"""Kind of device -> module of `array/` that has its `make(device)`; loaded at its first use."""
_backends: dict[Device, Backend] = {}


def backend(device: Device) -> Backend:
    """The backend of a device; loaded at its first use, so that looking at a model imports no torch.

    Raises: DeviceUnavailable with the reason.
    """
    found = _backends.get(device)
    return found if found is not None else use(device)


def use(device: Device, made: Backend | None = None) -> Backend:
    """Make `made` the backend of a device, or the one of this package by default.

    Raises: DeviceUnavailable with the reason.
    """
    if made is None:
        home = _HOME.get(device.kind)
        if home is None or (device.kind != "sim" and device.index):
            reason = "this build has no CUDA backend" if device.kind == "cuda" else "there is one of its kind"
            raise DeviceUnavailable(f"no such device here: {reason}", got=str(device), fix='device="cpu"')
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read once, when torch loads
        made = import_module(f"graphwright.array.{home}").make(device)
        assert made is not None
    _backends[device] = made
    return made
