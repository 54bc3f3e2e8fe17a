"""Steps of optimizers by their codes."""

from __future__ import annotations

from typing import Any

from graphwright.array.vm import update
from graphwright.array.vm.code import Code
from graphwright.array.vm.math import native
from graphwright.array.vm.muon import muon


@native
def step(row: Any, op: Any, scratch: Any) -> None:
    """One step of all parameters of a row; see the functions."""
    if op == Code.ADAM or op == Code.ADAMW:
        update.adam(row, op == Code.ADAMW)
    elif op == Code.SGD:
        update.sgd(row)
    elif op == Code.RMSPROP:
        update.rmsprop(row)
    elif op == Code.LION:
        update.lion(row)
    elif op == Code.MUON:
        muon(row, scratch)
    else:
        update.average(row)
