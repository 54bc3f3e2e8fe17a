"""Sequences of different lengths as one tensor, padded or packed, and back, under torch's names; gradients pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphwright.autograd import Tensor, as_tensor, stack, where
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.functional import pad

__all__ = [
    "PackedSequence", "pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "pad_sequence", "unpack_sequence",
    "unpad_sequence",
]  # fmt: skip


class PackedSequence(NamedTuple):
    """Sequences without padding, which recurrent modules take: step 0 of all, then step 1 of all that have one, ...

    Attributes:
        data: [total of the lengths, ...], in each step the longest sequences first.
        batch_sizes: number of sequences that have step t, int64 [T].
        sorted_indices: numbers of the sequences from the longest to the shortest, or None if they were given so.
        unsorted_indices: positions of the sequences in that order, or None.
    """

    data: Tensor
    batch_sizes: Tensor
    sorted_indices: Tensor | None = None
    unsorted_indices: Tensor | None = None

    def lengths(self) -> np.ndarray:
        """Return the length of each sequence, from the longest to the shortest."""
        sizes = self.batch_sizes.numpy()
        return (np.arange(sizes[0]) < sizes[:, None]).sum(0)

    def with_data(self, data: Tensor) -> PackedSequence:
        """Return other values of the same sequences."""
        return self._replace(data=data)

    def to(self, *args: Any, **kwargs: Any) -> PackedSequence:
        """Convert or move the values, as `Tensor.to`."""
        return self.with_data(self.data.to(*args, **kwargs))


def pack_padded_sequence(
    input: Tensor, lengths: Tensor | Iterable[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """Pack the first entries of each sequence of a tensor [T, B, ...] ([B, T, ...] with `batch_first`).

    Args:
        lengths: B numbers from 1 to T, read on the host.
        enforce_sorted: whether the lengths must descend; else the sequences are sorted.
    Raises: ShapeError unless there are B lengths in range; UsageError for lengths that do not descend.
    """
    sizes = np.array(_sizes(lengths), np.int64)
    steps = input.transpose(0, 1) if batch_first else input
    if sizes.shape != (steps.shape[1],) or not ((sizes >= 1) & (sizes <= steps.shape[0])).all():
        expected = f"{steps.shape[1]} lengths from 1 to {steps.shape[0]}"
        raise ShapeError("the lengths do not fit the sequences", expected=expected, got=sizes.tolist())
    if enforce_sorted and (np.diff(sizes) > 0).any():
        raise UsageError("the lengths do not descend", got=sizes.tolist(), fix="pass enforce_sorted=False")
    order = None if enforce_sorted else np.argsort(-sizes, kind="stable")
    return packed_steps(steps, sizes, order)


def packed_steps(steps: Tensor, sizes: np.ndarray, order: np.ndarray | None) -> PackedSequence:
    """Pack [T, B, ...] whose sequences have `sizes` entries, in an order from the longest to the shortest."""
    if order is not None:
        sizes, steps = sizes[order], steps.index_select(1, as_tensor(order))
    present = np.arange(sizes.max(initial=0))[:, None] < sizes
    rows = as_tensor(np.flatnonzero(present))
    data = steps.narrow(0, 0, present.shape[0]).flatten(0, 1).index_select(0, rows)
    indices = (None, None) if order is None else (as_tensor(order), as_tensor(np.argsort(order)))
    return PackedSequence(data, as_tensor(present.sum(1)), *indices)


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sequences as a tensor [T, B, ...] ([B, T, ...] with `batch_first`), and their lengths, int64 [B].

    Args:
        total_length: T, by default the longest length.
    Raises: UsageError for a `total_length` below it.
    """
    sizes = sequence.lengths()
    longest = int(sizes[0])
    total = longest if total_length is None else total_length
    if total < longest:
        expected = f">= {longest}, the longest length"
        raise UsageError("total_length is too small", where="pad_packed_sequence", expected=expected, got=total)
    padded = padded_steps(sequence, total, padding_value)
    order = sequence.unsorted_indices
    if order is not None:
        padded, sizes = padded.index_select(1, order), sizes[order.numpy()]
    return padded.transpose(0, 1) if batch_first else padded, as_tensor(sizes)


def padded_steps(sequence: PackedSequence, total: int, value: float = 0.0) -> Tensor:
    """Return [total, B, ...], the sequences from the longest to the shortest, with a value after their ends."""
    present = np.arange(total)[:, None] < sequence.lengths()
    rows = np.maximum(np.cumsum(present).reshape(present.shape) - 1, 0)
    found = sequence.data.index_select(0, as_tensor(rows.ravel())).unflatten(0, present.shape)
    mask = as_tensor(present.reshape(*present.shape, *(1,) * (found.ndim - 2)))
    return where(mask, found, as_tensor(value).to(found.dtype))


def pack_sequence(sequences: Sequence[Tensor], enforce_sorted: bool = True) -> PackedSequence:
    """Pack B tensors [T_i, ...]. Raises: as `pad_sequence` and `pack_padded_sequence`."""
    lengths = [s.shape[0] for s in sequences]
    return pack_padded_sequence(pad_sequence(sequences), lengths, enforce_sorted=enforce_sorted)


def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Return the sequences, each [T_i, ...]."""
    return unpad_sequence(*pad_packed_sequence(packed_sequences))


def _sizes(lengths: Tensor | Iterable[int]) -> list[int]:
    return [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]


def pad_sequence(
    sequences: Iterable[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """Stack B tensors [T_i, ...] that differ in their first axis, each padded to the length T of the longest.

    Args:
        sequences: with equal further axes and one dtype.
        padding_side: `right`, after a sequence, or `left`, before it.
    Returns: [T, B, ...], or [B, T, ...] with `batch_first`.
    Raises: ShapeError for other shapes; UsageError for no sequence or another side.
    """
    given = list(sequences)
    if not given or padding_side not in ("left", "right"):
        got = padding_side if given else "no sequence"
        raise UsageError("cannot pad", expected="one sequence or more, padding_side left or right", got=got)
    if any(s.ndim == 0 or s.shape[1:] != given[0].shape[1:] for s in given):
        shapes = ", ".join(str(s.shape) for s in given)
        raise ShapeError("only the first axis can be padded", expected="[T, ...], equal after T", got=shapes)
    longest, rest = max(s.shape[0] for s in given), (0, 0) * (given[0].ndim - 1)
    gaps = ((longest - s.shape[0],) for s in given)
    widths = [(0, *gap) if padding_side == "right" else (*gap, 0) for gap in gaps]
    padded = [pad(s, (*rest, *width), value=padding_value) for s, width in zip(given, widths, strict=True)]
    return stack(padded, 0 if batch_first else 1)


def unpad_sequence(
    padded_sequences: Tensor, lengths: Tensor | Iterable[int], batch_first: bool = False
) -> list[Tensor]:
    """Return the first entries of each sequence of a tensor [T, B, ...] ([B, T, ...] with `batch_first`).

    Args:
        lengths: B numbers, read on the host; at most T.
    Raises: ShapeError if there are not B lengths, or one is out of range.
    """
    sizes = _sizes(lengths)
    rows = padded_sequences if batch_first else padded_sequences.transpose(0, 1)
    if len(sizes) != rows.shape[0] or not all(0 <= n <= rows.shape[1] for n in sizes):
        expected = f"{rows.shape[0]} lengths from 0 to {rows.shape[1]}"
        raise ShapeError("the lengths do not fit the sequences", expected=expected, got=sizes)
    return [rows[i, :n] for i, n in enumerate(sizes)]
