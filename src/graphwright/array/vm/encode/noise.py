"""Code for random numbers: words of Philox by a key that lies in memory, and by the place of each element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from graphwright.array.vm.code import BERNOULLI, DROPOUT, UNIFORM, Code
from graphwright.array.vm.encode.operands import Row, View, all_f32, bits, copied, encoder, row_of


def _noise(out: View, key: View, attrs: Mapping[str, Any], kind: int, x: int = 0, *numbers: float) -> list[Row]:
    tail = (key.address, attrs["stream"], kind, *map(bits, numbers))
    return [row_of(Code.NOISE, 1, out.size, out.address, 0, 1, x, *tail)]


@encoder("uniform")
def _uniform(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    fits = all_f32(outs[0]) and outs[0].packed and ins[0].packed
    return _noise(outs[0], ins[0], attrs, UNIFORM) if fits else None


@encoder("bernoulli")
def _bernoulli(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    p, key = ins
    fits = all_f32(outs[0], p) and outs[0].packed and p.packed and key.packed
    return _noise(outs[0], key, attrs, BERNOULLI, p.address) if fits else None


@encoder("dropout")
def _dropout(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Kept is what has a word of at least p; a quotient of 1 - p, as the other kernel takes."""
    (x, key), (out, kept), p = ins, outs, attrs["p"]
    if not all_f32(out, x) or not all(view.packed for view in (x, key, out, kept)):
        return None
    rows = _noise(out, key, attrs, DROPOUT, x.address, ceil(p * 2**24) * 2.0**-24, 1.0 if p == 1 else 1.0 - p)
    return rows + copied(kept, key)
