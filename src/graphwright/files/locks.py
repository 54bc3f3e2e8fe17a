"""A lock file that one process holds, with the number of that process as its text.

The system releases the lock when the process ends, however it ends; the file itself stays.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from weakref import finalize

from graphwright.files.atomic import NOFOLLOW, writing

try:
    import fcntl
except ImportError:
    fcntl = None


class HeldLock:
    """A lock on a file, held until `release`.

    On file systems without locks it always succeeds.

    Attributes:
        holder: process number of another holder; None if this object has the lock.

    Raises: UnwritableTarget if the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.holder = path, None
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o666)
            self._close = finalize(self, os.close, self._fd)
            try:
                if fcntl is not None:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.holder = _number(os.read(self._fd, 32))
                self.release()
                return
            except OSError:
                pass
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Release the lock; idempotent."""
        with suppress(OSError):
            self._close()


def _number(text: bytes) -> int:
    """Return the process number in a lock file; 0 if its holder has not written it yet."""
    return int(text) if text.strip().isdigit() else 0
