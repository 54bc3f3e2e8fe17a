"""What of a program is not as its family's template has it: the reason why a rung can or cannot carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.array import NDArray, Storage, dtype
from graphwright.array.device import CPU
from graphwright.autograd import Parameter
from graphwright.program import Builder, Program
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True)
class Deviation:
    """One difference from the template.

    Attributes:
        path: of the node.
        kind: `added`, `removed`, `rewired`, `op`, `attrs` or `size`.
        detail: in words.
    """

    path: str
    kind: str
    detail: str


def template(model: Model) -> Program:
    """The program that the family's template gives for the model's config; its weights have specs and no bytes."""
    b = Builder("template")
    params = {}
    program = model.program
    stored = {program.key(n): program.spec(n).dtype for n in program.params()}
    for path, key in model.keys.items():
        shape = next(s for p, _, s, _ in model.arch.weights(model.dims) if p == path)
        kind = stored.get(key, dtype("float32"))
        array = NDArray(Storage.mapped(_no_bytes, 0, CPU), kind, shape)
        params[path] = b.param(path, Parameter(array, True, key), key=key)
    model.arch.build(b, model.dims, params, dtype(model.compute))
    return b.build()


def _no_bytes() -> memoryview:
    raise AssertionError("a template has no weights")


def deviations(model: Model) -> list[Deviation]:
    """Every node that differs from the template, by path; renaming a node shows as removed and added."""
    ours, theirs = model.program, template(model)
    mine = {ours.path(n): n for n in ours.nodes()}
    wanted = {theirs.path(n): n for n in theirs.nodes()}
    found = [Deviation(path, "removed", f"{theirs.op(wanted[path])} is gone") for path in wanted if path not in mine]
    for path, node in mine.items():
        if path not in wanted:
            if ours.graph.out_degree(node) or any(v.node == node for v in ours.outputs()):
                found.append(Deviation(path, "added", f"{ours.op(node)} is not in the family's block"))
            continue
        other = wanted[path]
        if ours.op(node) != theirs.op(other):
            found.append(Deviation(path, "op", f"{ours.op(node)} instead of {theirs.op(other)}"))
        elif ours.op(node) in STORED and ours.specs(node) != theirs.specs(other):
            found.append(Deviation(path, "size", f"{ours.spec(node)} instead of {theirs.spec(other)}"))
        elif ours.op(node) not in STORED and dict(ours.attrs(node)) != dict(theirs.attrs(other)):
            found.append(Deviation(path, "attrs", f"{dict(ours.attrs(node))} instead of {dict(theirs.attrs(other))}"))
        reads = [(ours.path(v), v.port) for v in ours.operands(node)]
        should = [(theirs.path(v), v.port) for v in theirs.operands(other)]
        if reads != should:
            found.append(Deviation(path, "rewired", f"reads {', '.join(p for p, _ in reads) or 'nothing'} instead of "
                                   f"{', '.join(p for p, _ in should)}"))  # fmt: skip
    if [(n, ours.path(v)) for n, v in zip(ours.output_names(), ours.outputs(), strict=True)] != \
            [(n, theirs.path(v)) for n, v in zip(theirs.output_names(), theirs.outputs(), strict=True)]:  # fmt: skip
        found.append(Deviation("outputs", "rewired", "another node is the output"))
    return sorted(found, key=lambda d: (d.path, d.kind))
