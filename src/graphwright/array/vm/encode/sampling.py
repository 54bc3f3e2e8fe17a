"""VM forms of random draws: Philox words from a key in memory and the index of each element; token sampling."""

from __future__ import annotations

from math import ceil

from graphwright.array.vm.code import BERNOULLI as BERNOULLI_NOISE
from graphwright.array.vm.code import DROPOUT as DROPOUT_NOISE
from graphwright.array.vm.code import UNIFORM as UNIFORM_NOISE
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import operands as vm


def _noise(out: vm.View, key: vm.View, attrs: vm.Attrs, kind: int, x: int = 0, *numbers: float) -> list[vm.Row]:
    tail = (key.address, attrs["stream"], kind, *map(vm.bits, numbers))
    return [vm.row_of(Code.NOISE, 1, out.size, out.address, 0, 1, x, *tail)]


@vm.form()
def UNIFORM(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    fits = vm.all_f32(outs[0]) and outs[0].packed and ins[0].packed
    return _noise(outs[0], ins[0], attrs, UNIFORM_NOISE) if fits else None


@vm.form()
def BERNOULLI(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    p, key = ins
    fits = vm.all_f32(outs[0], p) and outs[0].packed and p.packed and key.packed
    return _noise(outs[0], key, attrs, BERNOULLI_NOISE, p.address) if fits else None


@vm.form()
def DROPOUT(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Keep entries whose random number is at least p; divide by 1 - p, as the other kernel does."""
    (x, key), (out, kept), p = ins, outs, attrs["p"]
    if not vm.all_f32(out, x) or not all(view.packed for view in (x, key, out, kept)):
        return None
    rows = _noise(out, key, attrs, DROPOUT_NOISE, x.address, ceil(p * 2**24) * 2.0**-24, 1.0 if p == 1 else 1.0 - p)
    return rows + vm.copied(kept, key)


@vm.form()
def SAMPLE_TOKEN(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    (ids, kept), (logits, rules, keys, seen) = outs, ins
    if not all(view.packed for view in (*outs, *ins)):
        return None
    addresses = (logits.address, rules.address, keys.address, seen.address, seen.shape[1], ids.address, kept.address)
    return [vm.row_of(Code.SAMPLE_TOKEN, *logits.shape, *addresses)]
