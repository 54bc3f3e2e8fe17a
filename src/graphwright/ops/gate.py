"""Gates: factors computed from trained logits, which multiply edges and units. A program has one `gate` node.

The table, int64 [N, 7], has the kind, group, state, slot, generation, element number and cost of each element; `run`,
int64 [3], has seed, step and mode. Both are operands, so that closing a gate or changing the mode needs no new plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.formulas.gates import COLUMNS, GATE_KINDS
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attributes import Attr, StaticSize
from graphwright.ops.axes import Atom, AxesUse, chain
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, floating

_RUN = Spec((3,), int64)


def _checked(logits: Spec, table: Spec, temperature: Spec, run: Spec, sizes: tuple[int, ...]) -> None:
    floating(logits)
    if len(logits.shape) != 1 or sum(sizes) != logits.shape[0]:
        raise ShapeError("the logits do not have one entry per element", expected=f"[{sum(sizes)}]", got=logits)
    if table != Spec((logits.shape[0], len(COLUMNS)), int64):
        expected = Spec((logits.shape[0], len(COLUMNS)), int64)
        raise ShapeError("the table of elements has the wrong shape or dtype", expected=expected, got=table)
    if len(floating(temperature).shape) != 1:
        raise ShapeError("the temperatures are not a vector", expected="[G]", got=temperature)
    if run != _RUN:
        expected = "int64 [3]: seed, step and mode"
        raise DTypeError("the operand `run` has the wrong shape or dtype", expected=expected, got=run)


def _cost(ins, outs, attrs):
    return Cost(40 * ins[0].size, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))


_TRAITS = Traits(contiguous=(0, 1, 2, 3), fixed=(0, 1, 2, 3))


@op("gate")
class GateOp(Row):
    """gate(z, T): gate values of logits [N], table [N, 7], temperatures [G], run [3]; one result per size in `sizes`.

    The kind of a gate is its function of logit z and temperature T, which in training also reads noise u(seed, step,
    slot, generation, element); `docs/structure.md` has the table of kinds. `groups`: names of the temperatures. A gate
    that is rounded to 0 or 1 has the gradient of its value before the rounding (straight through).
    Maddison et al. 2017 (concrete); Louizos et al. 2018 (hard concrete); Bengio et al. 2013 (straight through).
    """

    arity, attrs, cost = 4, {"sizes": Attr(tuple[StaticSize, ...]), "groups": Attr(tuple[str, ...], ())}, _cost
    saves, traits = Saves(inputs=(0, 1, 2, 3)), replace(_TRAITS, gates=True)
    why = {
        "onnx": "an export needs hardened or folded gates: dg.discretize(..., to='one') or to='fold'",
        "emit": "an export needs hardened or folded gates: dg.discretize(..., to='one') or to='fold'",
    }

    def infer(logits, table, temperature, run, sizes, groups):
        _checked(logits, table, temperature, run, sizes)
        return tuple(Spec((n,), logits.dtype) for n in sizes)

    def vjp(g, ins, outs, attrs, needs):
        given = g if isinstance(g, tuple) else (g,)
        there = tuple(part is not None for part in given)
        parts = [part for part in given if part is not None]
        logits, temperature = call("gate_grad", *ins, *parts, sizes=attrs["sizes"], given=there)
        return logits, None, temperature, None

    def sample(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
        operands, sizes = _drawn(rng)
        return operands, {"sizes": sizes}

    def axes(u: AxesUse):
        parts = tuple(Atom(n) for n in u.attrs["sizes"])
        u.same(u.ins[0][0], chain(*parts))
        u.same(u.ins[1][0], u.ins[0][0])
        u.sizes["sizes"] = parts
        for term in (u.ins[1][1], u.ins[2][0], u.ins[3][0]):
            u.frozen(term, "reads it by index")
        return [(part,) for part in parts]


@op("gate_grad")
class GateGrad(Backward):
    """Gradients of `gate` w.r.t. logits and temperatures, from its operands and g of each result true in `given`."""

    arity, vjp, cost, results = (4, None), None, _cost, ("logits", "temperature")
    attrs, traits = (
        {"sizes": Attr(tuple[StaticSize, ...]), "given": Attr(tuple[bool, ...])},
        replace(_TRAITS, backward_of="gate"),
    )
    why = {"vjp": "a straight-through gradient has no derivative of its own"}

    def infer(logits, table, temperature, run, *grads, sizes, given):
        _checked(logits, table, temperature, run, sizes)
        wanted = [Spec((n,), logits.dtype) for n, there in zip(sizes, given, strict=True) if there]
        if list(grads) != wanted:
            what = "the gradients do not match the results marked in `given`"
            raise ShapeError(what, expected=wanted, got=list(grads))
        return logits, temperature

    def sample(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
        operands, sizes = _drawn(rng)
        given = tuple(bool(rng.integers(2)) for _ in sizes)
        grads = [rng.normal(size=n) for n, there in zip(sizes, given, strict=True) if there]
        return [*operands, *grads], {"sizes": sizes, "given": given}


def _drawn(rng: np.random.Generator) -> tuple[list[Any], tuple[int, ...]]:
    """Draw operands and `sizes` of a test sample, only with gate kinds whose gradients finite differences can check."""
    sizes = tuple(int(n) for n in rng.integers(1, 4, rng.integers(1, 4)))
    smooth = [code for code, kind in enumerate(GATE_KINDS.values()) if not (kind.rounded or kind.one_of)]
    rows = []
    for slot, n in enumerate(sizes):
        kind = smooth[rng.integers(len(smooth))]
        state = int(rng.choice([0, 0, 0, 1, 2]))
        rows += [[kind, int(rng.integers(2)), state, slot, 3, i, 1] for i in range(n)]
    run = np.array([rng.integers(-(2**63), 2**63), rng.integers(0, 2**32), rng.integers(3)])
    return [rng.normal(size=sum(sizes)), np.array(rows), np.array([0.5, 1.5]), run], sizes
