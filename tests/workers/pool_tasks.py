"""Functions that workers import; each leaves a file named after its process and item, so that attempts are counted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def scaled(common: dict[str, int], x: int) -> int:
    return common["factor"] * x


def process(common: Any, x: int) -> int:
    time.sleep(0.01)
    return os.getpid()


def threads(common: Any, x: int) -> str:
    return os.environ["OMP_NUM_THREADS"]


def entries(common: dict[str, list[Any]], x: Any) -> tuple[list[Any], Any]:
    """Return the entries of tensors, of arrays, and of one more array."""
    found = [tensor.numpy().tolist() for tensor in common["tensors"]]
    return found + [array.to_numpy().tolist() for array in common["arrays"]], x.to_numpy().tolist()


def sent_back(common: Any, x: Any) -> Any:
    return x


def counted(folder: str, x: int) -> int:
    """Return how often this item was begun."""
    Path(folder, f"{x}-{time.monotonic_ns()}").touch()
    return len(list(Path(folder).glob(f"{x}-*")))


def killed_once(folder: str, x: int) -> int:
    """Every fourth item ends its worker by SIGKILL at its first attempt."""
    attempt = counted(folder, x)
    if x % 4 == 0 and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def killed(folder: str, x: int) -> int:
    counted(folder, x)
    if x == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if x == 5:
        os._exit(7)
    return x


def stuck(folder: str, x: int) -> int:
    counted(folder, x)
    if x == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    return x


def refused(common: Any, x: int) -> int:
    if x in (3, 6):
        time.sleep(0.2 if x == 3 else 0.0)  # the later task raises first
        raise KeyError(f"no {x}")
    return x


def not_sent_back(common: Any, x: int) -> Any:
    return lambda: x


def waits(folder: str, x: int) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(1000)


class Unloadable:
    """Can be sent, but not loaded."""

    def __reduce__(self) -> Any:
        return fails, ()


def fails() -> None:
    raise ImportError("this machine has no such module")
