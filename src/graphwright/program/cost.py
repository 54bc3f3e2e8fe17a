"""What a run of a program costs, by the cost rule of each op."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from graphwright.ops import get
from graphwright.program.kinds import KINDS

if TYPE_CHECKING:
    from graphwright.program.program import Program


def flops(p: Program, dims: Mapping[str, int]) -> int:
    """Floating-point operations of one run with these sizes; what no output and no write needs is not run."""
    total = 0
    for node in p.reachable([*p.outputs(), *p.writes()]):
        if p.op(node) in KINDS:
            continue
        ins = [p.spec(v).bind(dict(dims)) for v in p.operands(node)]
        total += get(p.op(node)).cost(ins, [s.bind(dict(dims)) for s in p.specs(node)], p.attrs(node)).flops
    return total


def parameters(p: Program) -> int:
    """Numbers in its weights."""
    return sum(prod(int(d) for d in p.spec(n).shape) for n in p.params())
