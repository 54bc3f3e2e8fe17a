"""Driver: what a device with memory of its own must offer; the pool, and the arrays on it, are written against this."""

from __future__ import annotations

from typing import Protocol, Unpack

import numpy as np

from graphwright.array.device import Device
from graphwright.errors import ComputeError, Facts

Place = int | np.ndarray
"""An address on the device, or bytes of the host (uint8)."""


class DriverError(ComputeError):
    """A call to a driver failed, or broke a rule of the device."""


class DeviceFull(DriverError):
    """The device has no room of the size asked for."""


class OutOfDeviceMemory(ComputeError):
    """A pool found no room, not even after it gave back what it kept.

    Attributes:
        asked: bytes asked for.
        live, reserved: bytes in use, and taken from the driver.
        largest_free: the largest free piece.
        owners: (bytes, name) of the largest live blocks.
    """

    def __init__(
        self,
        what: str,
        *,
        asked: int = 0,
        live: int = 0,
        reserved: int = 0,
        largest_free: int = 0,
        owners: tuple[tuple[int, str], ...] = (),
        **facts: Unpack[Facts],
    ) -> None:
        super().__init__(what, **facts)
        self.asked, self.live, self.reserved = asked, live, reserved
        self.largest_free, self.owners = largest_free, owners


class Driver(Protocol):
    """Memory, streams and events of one device. Work on a stream runs in order, and after the call that asked for it.

    All calls raise DriverError; a failed call has changed nothing.
    """

    device: Device

    def alloc(self, nbytes: int) -> int:
        """The address of new memory. Raises: DeviceFull."""
        ...

    def free(self, address: int) -> None:
        """Give memory back; nothing queued may use it."""
        ...

    def copy(self, target: Place, source: Place, nbytes: int, stream: int = 0) -> None:
        """Queue a copy; host bytes must stay alive and unchanged until it ran."""
        ...

    def fill(self, address: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Queue writing one byte value everywhere."""
        ...

    def stream(self) -> int:
        """A new stream; stream 0 is always there."""
        ...

    def record(self, stream: int) -> int:
        """An event that is done when what the stream holds now has run."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from here on runs after the event."""
        ...

    def done(self, event: int) -> bool:
        """Whether an event has happened."""
        ...

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all."""
        ...

    def begin_capture(self, stream: int) -> None:
        """Keep what is queued on the stream instead of running it."""
        ...

    def end_capture(self, stream: int) -> int:
        """The graph of what was kept. Whatever it raises, the stream captures no more."""
        ...

    def instantiate(self, graph: int) -> int:
        """A captured graph made ready to be replayed."""
        ...

    def replay(self, ready: int, stream: int) -> None:
        """Queue an instantiated graph, as a whole or not at all."""
        ...

    @property
    def capturing(self) -> bool:
        """Whether a stream captures."""
        ...

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...
