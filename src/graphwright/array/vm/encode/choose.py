"""Code for the choice of the next id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.operands import Row, View, encoder, row_of


@encoder("choose")
def _choose(outs: Sequence[View], ins: Sequence[View], attrs: Mapping[str, Any]) -> list[Row] | None:
    (ids, kept), (logits, rules, keys, seen) = outs, ins
    if not all(view.packed for view in (*outs, *ins)):
        return None
    places = (logits.address, rules.address, keys.address, seen.address, seen.shape[1], ids.address, kept.address)
    return [row_of(Code.CHOOSE, *logits.shape, *places)]
