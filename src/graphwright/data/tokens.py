"""Windows over files of token ids, which are mapped: a corpus larger than memory is read page by page."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.data.dataset import Dataset
from graphwright.errors import IndexOutOfRange, UsageError
from graphwright.files import StrPath, UnreadableFile


class TokenWindows(Dataset):
    """Item i is a pair of int64 [window]: ids, and the ids one place later, which are to be predicted.

    Windows are packed one after another through each file (every `stride` ids) and never reach from one into the next.

    Args:
        paths: files of nothing but ids, one after another, little-endian.
        window: ids per window.
        stride: places between starts of windows; `window` by default, so that each id is predicted once.
        dtype: `uint16`, `uint32`, `int32` or `int64`.
    Raises: UnreadableFile; UsageError for a file that is no whole number of ids, or shorter than one window.
    """

    def __init__(
        self, paths: StrPath | Sequence[StrPath], window: int, *, stride: int | None = None, dtype: str = "uint16"
    ) -> None:
        self.window, self.stride = window, window if stride is None else stride
        if window < 1 or self.stride < 1 or dtype not in ("uint16", "uint32", "int32", "int64"):
            expected = "window and stride from 1 up, dtype uint16, uint32, int32 or int64"
            raise UsageError("windows cannot be like this", expected=expected, got=(window, stride, dtype))
        kind = np.dtype(dtype).newbyteorder("<")
        self.files: list[np.ndarray] = []
        for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
            try:
                raw = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:  # an empty file cannot be mapped
                cause = error if isinstance(error, OSError) else None
                raise UnreadableFile("cannot map this file of tokens", where=path, cause=cause) from error
            if raw.size % kind.itemsize or raw.size // kind.itemsize <= window:
                raise UsageError(
                    "this file does not hold a window of whole ids",
                    where=path,
                    expected=f"more than {window} ids of {kind.itemsize} bytes",
                    got=f"{raw.size} bytes",
                )
            self.files.append(raw.view(kind))
        counts = [(len(ids) - window - 1) // self.stride + 1 for ids in self.files]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        """Windows in all files."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and targets of one window."""
        if not 0 <= index < len(self):
            raise IndexOutOfRange("no such window", expected=f"0..{len(self) - 1}", got=index)
        file = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - int(self._ends[file - 1] if file else 0)) * self.stride
        ids = self.files[file][start : start + self.window + 1].astype(np.int64)
        return ids[:-1], ids[1:]

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets int64 [len(indices), window]."""
        pairs = [self[int(i)] for i in indices]
        ids, targets = (np.stack(column) for column in zip(*pairs, strict=True))
        return Tensor(from_numpy(ids)), Tensor(from_numpy(targets))
