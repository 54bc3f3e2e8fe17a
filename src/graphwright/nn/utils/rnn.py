"""Sequences of different lengths as one tensor and back, under torch's names; gradients pass.

There is no `PackedSequence`: recurrent modules take the padded tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphwright.autograd import Tensor, stack
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.functional import pad

__all__ = ["pad_sequence", "unpad_sequence"]


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
    sizes = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    rows = padded_sequences if batch_first else padded_sequences.transpose(0, 1)
    if len(sizes) != rows.shape[0] or not all(0 <= n <= rows.shape[1] for n in sizes):
        expected = f"{rows.shape[0]} lengths from 0 to {rows.shape[1]}"
        raise ShapeError("the lengths do not fit the sequences", expected=expected, got=sizes)
    return [rows[i, :n] for i, n in enumerate(sizes)]
