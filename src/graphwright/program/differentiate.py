"""Program -> Program: the gradient as a graph, made by running the program on symbols and recording its backward.

The forward nodes keep their names, those of the backward are named `grad.<path of the forward node>.<op>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array import UnboundDim
from graphwright.autograd import Tensor, enable_grad, grad
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program.interpret import tensors
from graphwright.program.kinds import INPUT
from graphwright.program.program import Program, Value
from graphwright.program.trace import record

Ref = NodeId | Value | str


def differentiate(
    p: Program, outputs: Ref | Sequence[Ref], wrt: Sequence[Ref], sizes: Mapping[str, int], seeded: bool = False
) -> Program:
    """The program that computes d Σ outputs / d wrt from the inputs of `p`, over the same params.

    Args:
        outputs: floating values, or names of nodes or outputs.
        wrt: params, inputs or inner values; the results are named `grad.<path>`.
        sizes: numbers for the named sizes of the inputs.
        seeded: the program has an input `seed.<output>` more per output, to weigh its elements by; else ones.
    Raises: UnboundDim for a size without a number; NoTape for a value that the outputs do not depend on; UsageError.
    """
    roots = [endpoint(p, r) for r in ([outputs] if isinstance(outputs, Value | NodeId | str) else outputs)]
    wanted = [p.value(r) for r in wrt]
    if not roots or not wanted:
        raise UsageError("a gradient needs an output and something to differentiate by", got=f"{outputs!r}, {wrt!r}")
    specs = [p.spec(n).bind(sizes) for n in p.inputs()]
    for node, spec in zip(p.inputs(), specs, strict=True):
        if spec.symbolic:
            raise UnboundDim(
                "an input has a size without a number",
                where=p.path(node),
                got=spec,
                fix='program.grad(outputs, wrt, {"B": 4, ...})',
            )

    names = [p.path(n) for n in p.inputs()]
    if seeded:
        specs += [p.specs(r.node)[r.port].bind(sizes) for r in roots]
        names += [f"seed.{p.path(r)}" for r in roots]

    def backward(*feeds: Tensor) -> dict[str, Tensor]:
        given = dict(zip(p.input_names(), feeds, strict=False))
        for value in wanted:
            if p.op(value.node) == INPUT:
                given[p.path(value)].requires_grad = True
        with enable_grad():
            values = tensors(p, given, dict(sizes), [*roots, *wanted])
            weights = list(feeds[len(given) :]) or [None] * len(roots)
            ends = [_total(values[r], weight) for r, weight in zip(roots, weights, strict=True)]
            found = grad(ends, [values[v] for v in wanted])
        return {f"grad.{p.path(v)}": _given(g) for v, g in zip(wanted, found, strict=True)}

    return record(backward, tuple(specs), tuple(names))[0]


def _total(value: Tensor, weight: Tensor | None) -> Tensor:
    """Σ weight · value, which is differentiated."""
    if weight is not None:
        value = value * weight
    return value if value.size == 1 else value.sum()


def endpoint(p: Program, ref: Ref) -> Value:
    """A value by handle, name of a node, or name of an output."""
    return p.output(ref) if isinstance(ref, str) and ref in p.output_names() else p.value(ref)


def _given(found: Any) -> Tensor:
    assert isinstance(found, Tensor), "grad raises for what the outputs do not depend on"
    return found
