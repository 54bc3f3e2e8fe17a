"""VM forms of random draws: Philox words from a key in memory and the index of each element; token sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from graphwright.array.vm.code import BERNOULLI as BERNOULLI_NOISE
from graphwright.array.vm.code import DROPOUT as DROPOUT_NOISE
from graphwright.array.vm.code import UNIFORM as UNIFORM_NOISE
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.operands import Row, View, all_f32, bits, copied, row_of, vm_form


def _noise(out: View, key: View, attrs: Mapping[str, Any], kind: int, x: int = 0, *numbers: float) -> list[Row]:
    tail = (key.address, attrs["stream"], kind, *map(bits, numbers))
    return [row_of(Code.NOISE, 1, out.size, out.address, 0, 1, x, *tail)]


@vm_form()
def UNIFORM(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    fits = all_f32(outs[0]) and outs[0].packed and ins[0].packed
    return _noise(outs[0], ins[0], attrs, UNIFORM_NOISE) if fits else None


@vm_form()
def BERNOULLI(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    p, key = ins
    fits = all_f32(outs[0], p) and outs[0].packed and p.packed and key.packed
    return _noise(outs[0], key, attrs, BERNOULLI_NOISE, p.address) if fits else None


@vm_form()
def DROPOUT(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    """Keep entries whose random number is at least p; divide by 1 - p, as the other kernel does."""
    (x, key), (out, kept), p = ins, outs, attrs["p"]
    if not all_f32(out, x) or not all(view.packed for view in (x, key, out, kept)):
        return None
    rows = _noise(out, key, attrs, DROPOUT_NOISE, x.address, ceil(p * 2**24) * 2.0**-24, 1.0 if p == 1 else 1.0 - p)
    return rows + copied(kept, key)


@vm_form()
def SAMPLE_TOKEN(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    (ids, kept), (logits, rules, keys, seen) = outs, ins
    if not all(view.packed for view in (*outs, *ins)):
        return None
    addresses = (logits.address, rules.address, keys.address, seen.address, seen.shape[1], ids.address, kept.address)
    return [row_of(Code.SAMPLE_TOKEN, *logits.shape, *addresses)]
