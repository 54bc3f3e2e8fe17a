"""Large blocks ask the system for large pages."""

from __future__ import annotations

import sys
from pathlib import Path

from graphwright.array import CPU, backend, empty, float32


def asked(address: int) -> bool:
    """Whether the mapping around an address is marked for large pages, as Linux tells it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(n, 16) for n in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("no mapping holds the address")


def test_large_blocks_and_arrays_request_large_pages() -> None:
    size = 64 << 20
    block, array = backend(CPU).allocate(size), empty((size // 4,), float32)
    middles = block.memory.data_ptr() + size // 2, backend(CPU).address(array) + size // 2
    known = sys.platform.startswith("linux") and Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    assert not known or [asked(a) for a in middles] == [True, True]
