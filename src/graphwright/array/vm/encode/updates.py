"""VM forms of optimizer steps: one row of code, and half a row for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphwright.array.vm.code import SPARE, Code
from graphwright.array.vm.encode.operands import (
    Row,
    View,
    VmForm,
    all_f32,
    bits,
    copied,
    row_of,
    table_of,
    vm_form,
)

Attrs = Mapping[str, Any]


def _adam_moments(attrs: Attrs) -> tuple[bool, ...]:
    return True, True, attrs["amsgrad"]


def _rmsprop_moments(attrs: Attrs) -> tuple[bool, ...]:
    return True, bool(attrs["momentum"]), attrs["centered"]


def _step(
    code: Code, numbers: Sequence[str], flags: Sequence[str], moments: Callable[[Attrs], tuple[bool, ...]]
) -> VmForm:
    """Form of an optimizer step.

    Args:
        numbers, flags: attributes in cells 4 and following, and attributes in the bits of cell 9.
        moments: attributes -> which moments of the instruction are present.
    """

    def encode(outs: Sequence[View], ins: Sequence[View], attrs: Attrs) -> list[Row] | None:
        lr, found, *members = ins
        if not all_f32(*outs, *members) or not all(view.packed for view in (*outs, *members)):
            return None
        there = moments(attrs)
        n = len(outs) // (2 + sum(there))
        cells = [bits(float(attrs[name])) for name in numbers]
        cells += [0] * (5 - len(cells)) + [sum(1 << i for i, name in enumerate(flags) if attrs[name])]
        rows = [r for out, before in zip(outs, members[n:], strict=True) for r in copied(out, before)]
        rows.append(row_of(code, n, lr.address, found.address, *cells))
        table: list[int] = []
        for k in range(n):
            param, *held, steps = outs[k::n]
            left = iter(held)
            addresses = [next(left).address if is_there else 0 for is_there in there]
            table += [param.size, param.address, members[k].address, steps.address, *addresses]
            table += [0] * (4 - len(addresses))
        return rows + table_of(table)

    return VmForm(encode)


_ADAM = ("beta1", "beta2", "eps", "weight_decay")
ADAM = _step(Code.ADAM, _ADAM, ("maximize", "amsgrad"), _adam_moments)
ADAMW = _step(Code.ADAMW, _ADAM, ("maximize", "amsgrad"), _adam_moments)
SGD = _step(
    Code.SGD,
    ("momentum", "dampening", "weight_decay"),
    ("maximize", "nesterov"),
    lambda attrs: (bool(attrs["momentum"]),),
)
RMSPROP = _step(Code.RMSPROP, ("alpha", "eps", "weight_decay", "momentum"), ("maximize", "centered"), _rmsprop_moments)
LION = _step(Code.LION, ("beta1", "beta2", "weight_decay"), ("maximize",), lambda attrs: (True,))
_muon = _step(
    Code.MUON, ("momentum", "eps", "weight_decay", "iterations"), ("maximize", "nesterov"), lambda attrs: (True,)
)


@vm_form()
def MUON(outs: Sequence[View], ins: Sequence[View], attrs: Attrs) -> list[Row] | None:
    """Step matrices that fit into the scratch together with two square matrices."""
    rows = _muon.encode(outs, ins, attrs)
    n = len(outs) // 3
    shapes = [view.shape for view in outs[:n]]
    if rows is None or any(8 * (r * c + min(r, c) ** 2) > SPARE or not r * c for r, c in shapes):
        return None
    table = rows[-((n + 1) // 2) :]
    for k, (r, c) in enumerate(shapes):
        most = max(r, c) if attrs["adjust"] != "original" else max(1.0, r / c)
        line, at = table[k // 2], 8 * (k % 2)
        line[at + 5 : at + 8] = [r, c, bits(most**0.5 * (0.2 if attrs["adjust"] != "original" else 1.0))]
    return rows


@vm_form()
def EMA(outs: Sequence[View], ins: Sequence[View], attrs: Attrs) -> list[Row] | None:
    tau, *members = ins
    if not all_f32(*outs, *members) or not all(view.packed for view in (*outs, *members)):
        return None
    rows = [r for out, before in zip(outs, members[len(outs) :], strict=True) for r in copied(out, before)]
    table = [
        cell
        for out, source in zip(outs, members, strict=False)
        for cell in (out.size, out.address, source.address, 0, 0, 0, 0, 0)
    ]
    return [*rows, row_of(Code.AVERAGE, len(outs), tau.address), *table_of(table)]
