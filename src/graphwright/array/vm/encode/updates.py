"""Encoding of optimizer steps for the VM: one instruction, then half a row of code for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphwright.array.formulas.optimizers import muon_scale
from graphwright.array.vm.code import SPARE, Code
from graphwright.array.vm.encode import operands as vm


def _step(
    code: Code, numbers: Sequence[str], flags: Sequence[str],
    moments: Callable[[vm.Attrs], tuple[bool, ...]] = lambda attrs: (True,),
) -> vm.VmForm:  # fmt: skip
    """Make the `VmForm` of an optimizer step.

    Args:
        numbers: names of the attributes in words 4 and following.
        flags: names of the attributes in the bits of word 9.
        moments: maps the attributes to bools: whether each moment of the instruction, such as m and v, is present.
    """

    def encode(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
        lr, found, *members = ins
        if not vm.all_f32(*outs, *members) or not all(view.packed for view in (*outs, *members)):
            return None
        there = moments(attrs)
        n = len(outs) // (2 + sum(there))
        cells = [vm.bits(float(attrs[name])) for name in numbers]
        cells += [0] * (5 - len(cells)) + [sum(1 << i for i, name in enumerate(flags) if attrs[name])]
        rows = [r for out, before in zip(outs, members[n:], strict=True) for r in vm.copied(out, before)]
        rows.append(vm.row_of(code, n, lr.address, found.address, *cells, 4 * len(found.shape)))
        table: list[int] = []
        for k in range(n):
            param, *held, steps = outs[k::n]
            left = iter(held)
            addresses = [next(left).address if is_there else 0 for is_there in there]
            table += [param.size, param.address, members[k].address, steps.address, *addresses]
            table += [0] * (4 - len(addresses))
        return rows + vm.table_of(table)

    return vm.VmForm(encode)


_ADAM = ("beta1", "beta2", "eps", "weight_decay")
ADAM = _step(Code.ADAM, _ADAM, ("maximize", "amsgrad"), lambda a: (True, True, a["amsgrad"]))
ADAMW = _step(Code.ADAMW, _ADAM, ("maximize", "amsgrad"), lambda a: (True, True, a["amsgrad"]))
SGD = _step(
    Code.SGD, ("momentum", "dampening", "weight_decay"), ("maximize", "nesterov"), lambda a: (bool(a["momentum"]),)
)
RMSPROP = _step(
    Code.RMSPROP, ("alpha", "eps", "weight_decay", "momentum"), ("maximize", "centered"),
    lambda a: (True, bool(a["momentum"]), a["centered"]),
)  # fmt: skip
LION = _step(Code.LION, ("beta1", "beta2", "weight_decay"), ("maximize",))
_muon = _step(Code.MUON, ("momentum", "eps", "weight_decay", "iterations"), ("maximize", "nesterov"))


@vm.form()
def MUON(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode a step of Muon, or return None if two copies of a matrix and two Gram matrices do not fit the scratch."""
    rows = _muon.encode(outs, ins, attrs)
    n = len(outs) // 3
    shapes = [view.shape for view in outs[:n]]
    if rows is None or any(8 * (r * c + min(r, c) ** 2) > SPARE or not r * c for r, c in shapes):
        return None
    table = rows[-((n + 1) // 2) :]
    for k, (r, c) in enumerate(shapes):
        line, at = table[k // 2], 8 * (k % 2)
        line[at + 5 : at + 8] = [r, c, vm.bits(muon_scale(r, c, attrs["adjust"]))]
    return rows


@vm.form()
def EMA(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    tau, *members = ins
    if not vm.all_f32(*outs, *members) or not all(view.packed for view in (*outs, *members)):
        return None
    rows = [r for out, before in zip(outs, members[len(outs) :], strict=True) for r in vm.copied(out, before)]
    table = [
        cell
        for out, source in zip(outs, members, strict=False)
        for cell in (out.size, out.address, source.address, 0, 0, 0, 0, 0)
    ]
    return [*rows, vm.row_of(Code.AVERAGE, len(outs), tau.address), *vm.table_of(table)]


@vm.form()
def ZERO_CHECK(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    found, *grads = ins
    if not vm.all_f32(*grads) or not all(g.packed for g in grads):
        return None
    table = [cell for g in grads for cell in (g.size, g.address, 0, 0, 0, 0, 0, 0)]
    return [vm.row_of(Code.ZERO_CHECK, len(grads), outs[0].address, found.address), *vm.table_of(table)]
