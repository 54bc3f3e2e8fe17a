"""The threads that large rows are shared among: those of the OpenMP pool in which ATen's kernels run.

A second pool in the process would fight the first: idle threads of both keep spinning.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

get_num_threads = torch.get_num_threads
"""How many threads a kernel may take."""


@cache
def parallel() -> int:
    """Address of the pool's GOMP_parallel; 0 where ATen was built otherwise, and one thread does it all."""
    maps = Path("/proc/self/maps")
    if "OpenMP" not in torch.__config__.parallel_info() or not maps.exists():
        return 0
    home = str(Path(torch.__file__).parent)
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    for path in sorted(paths, key=lambda p: not p.startswith(home)):
        start = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if start is not None:
            return ctypes.cast(start, ctypes.c_void_p).value or 0
    return 0
