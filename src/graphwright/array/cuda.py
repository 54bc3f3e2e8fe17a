"""Whether there are GPUs, under torch's names (`gw.cuda`)."""

from __future__ import annotations

from graphwright.array.backend import backend
from graphwright.array.device import Device, DeviceUnavailable


def device_count() -> int:
    """Return the number of GPUs that this build can use."""
    count = 0
    while True:
        try:
            backend(Device("cuda", count))
        except DeviceUnavailable:
            return count
        count += 1


def is_available() -> bool:
    """Return True if there is a GPU that this build can use."""
    return device_count() > 0
