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


def differentiate(p: Program, outputs: Ref | Sequence[Ref], wrt: Sequence[Ref], sizes: Mapping[str, int]) -> Program:
    """The program that computes d Σ outputs / d wrt from the inputs of `p`, over the same params.

    Args:
        outputs: floating values, or names of nodes or outputs; a seed of ones each.
        wrt: params, inputs or inner values; the results are named `grad.<path>`.
        sizes: numbers for the named sizes of the inputs.
    Raises: UnboundDim for a size without a number; NoTape for a value that the outputs do not depend on; UsageError.
    """
    roots = [_value(p, r) for r in ([outputs] if isinstance(outputs, Value | NodeId | str) else outputs)]
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

    def backward(*feeds: Tensor) -> dict[str, Tensor]:
        given = {p.path(n): feed for n, feed in zip(p.inputs(), feeds, strict=True)}
        for value in wanted:
            if p.op(value.node) == INPUT:
                given[p.path(value)].requires_grad = True
        with enable_grad():
            values = tensors(p, given, dict(sizes), [*roots, *wanted])
            seeds = [values[r] if values[r].size == 1 else values[r].sum() for r in roots]
            found = grad(seeds, [values[v] for v in wanted])
        return {f"grad.{p.path(v)}": _given(g) for v, g in zip(wanted, found, strict=True)}

    return record(backward, tuple(specs), tuple(p.path(n) for n in p.inputs()))[0]


def _value(p: Program, ref: Ref) -> Value:
    """A value by handle, name of a node, or name of an output."""
    return p.output(ref) if isinstance(ref, str) and ref in p.output_names() else p.value(ref)


def _given(found: Any) -> Tensor:
    assert isinstance(found, Tensor), "grad raises for what the outputs do not depend on"
    return found
