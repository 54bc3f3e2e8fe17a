"""Factors back into one matrix, under its old name and key: the same function, for what knows dense weights only."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import EmptySelection, Program, Selection, Transaction, Value
from graphwright.program.editing.replace import take_over
from graphwright.program.kinds import PARAM
from graphwright.surgery.factorise.chain import cores_of
from graphwright.surgery.factorise.factors import Factors, LowRank, TensorRing, reconstruct
from graphwright.surgery.matrices import stored, values

_STEP = re.compile(r"(.+?)\.(?:outer|inner|core\d+|order|joined|padded|input|input_modes|cut|sum)(?:\..*)?$")
_OPS = {"linear", "embedding", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "pad_slice", "slice", "add"}


def densify(program: Program, where: str | Selection = "**") -> list[str]:
    """Replace chains of factors by their matrices, in one edit.

    Args:
        program: edited in place.
        where: pattern of the maps that were factored, or a selection.
    Returns: paths of the params made.
    Raises: EmptySelection if none of them is factored; UsageError where a chain was changed by hand.
    """
    chosen = program.select(where) if isinstance(where, str) else where
    bases = [b for b in factored(program) if any(n in chosen for n in cores_of(program, b).values())]
    if not bases:
        raise EmptySelection("nothing here is factored", where=str(where), got=f"{chosen.count} nodes",
                             fix="compress(...) and orthogonalize(..., fold='insert') make factors")  # fmt: skip
    with program.edit(f"densify {len(bases)} matrices", author="pass", tool="graphwright.surgery.densify") as e:
        return [_densify(e, base) for base in bases]


def factored(p: Program) -> list[str]:
    """Names under which factors are stored, in order of creation."""
    paths = [p.path(n) for n in p.of_kind(PARAM)]
    ends = (".outer.weight", ".core1.weight")
    bases = [path.removesuffix(end) for path in paths for end in ends if path.endswith(end)]
    return [b for b in bases if len(cores_of(p, b)) > 1 and not b.endswith(".lora")]  # a branch is no matrix's stand-in


def factors_of(p: Program, base: str, shape: tuple[int, int] | None = None) -> Factors:
    """The factors stored under a name. `shape` of the matrix, where padding is to be cut off."""
    arrays = {name: values(p, p.key(node)) for name, node in cores_of(p, base).items()}
    if "outer" in arrays:
        return LowRank(arrays["outer"], arrays["inner"])
    ring = TensorRing(tuple(arrays.values()), (0, 0))
    return TensorRing(ring.arrays, shape or (prod(ring.modes[0]), prod(ring.modes[1])))


class _Region(NamedTuple):
    """One chain: its last node, the nodes before it, what it reads and adds."""

    end: NodeId
    inner: list[NodeId]
    x: Value
    bias: Value | None


def _densify(e: Transaction, base: str) -> str:
    p = e.program
    cores = cores_of(p, base)
    first = next(iter(cores.values()))
    regions = [_region(p, base, end, cores) for end in _ends(p, cores)]
    maps = [r for r in regions if p.spec(r.x).dtype.is_float]
    shape = (int(p.spec(maps[0].end).shape[-1]), int(p.spec(maps[0].x).shape[-1])) if maps else None
    matrix = stored(reconstruct(factors_of(p, base, shape)), p.spec(first).dtype)
    trainable = any(bool(p.attrs(n).get("trainable", True)) for n in cores.values())
    w = e.param(f"{base}.weight", matrix, key=f"{p.key(first).rsplit('.', 2)[0]}.weight", trainable=trainable)
    widened: dict[str, NodeId] = {p.spec(w).dtype.name: w}
    for region in regions:
        kind, path = p.spec(region.end).dtype, p.path(region.end)
        if kind.name not in widened:
            widened[kind.name] = e.add("cast", w, dtype=kind, name=p.free_name(f"{base}.weight.cast"))
        if region in maps:
            operands = [region.x, widened[kind.name], *([] if region.bias is None else [region.bias])]
            made = e.add("linear", *operands, name=p.free_name(f"{path}.dense"))
        else:
            made = e.add("embedding", widened[kind.name], region.x, name=p.free_name(f"{path}.dense"))
        take_over(e, region.end, made)
        for node in reversed(region.inner):
            _drop(e, node)
    for core in cores.values():
        for node in [*p.consumers(core), core]:
            _drop(e, node)
    return f"{base}.weight"


def _drop(e: Transaction, node: NodeId) -> None:
    """Remove a node that nothing reads any more."""
    p = e.program
    if node in p.graph and not p.out_edges(node) and Value(node) not in p.outputs():
        e.remove(node)


def _ends(p: Program, cores: dict[str, NodeId]) -> list[NodeId]:
    """The last node of each chain that reads the cores, from the names that a chain gives its nodes."""
    ends: dict[NodeId, None] = {}
    for core in cores.values():
        for reader in _readers(p, core):
            named = _STEP.match(p.path(reader))
            ends[p.node(named[1]) if named else reader] = None
    return list(ends)


def _readers(p: Program, node: NodeId) -> list[NodeId]:
    """What reads a core, behind casts of it."""
    found = []
    for reader in p.consumers(node):
        found += _readers(p, reader) if p.op(reader) == "cast" else [reader]
    return found


def _region(p: Program, base: str, end: NodeId, cores: dict[str, NodeId]) -> _Region:
    """Walk back from the end to what enters the chain. Raises: UsageError if that is not one value."""
    known = {*cores.values(), *(n for core in cores.values() for n in p.consumers(core) if p.op(n) == "cast")}
    prefix, inner, entering, bias = f"{p.path(end)}.", [], [], None
    stack = [end]
    while stack:
        node = stack.pop()
        if p.op(node) not in _OPS:
            raise UsageError("this is no chain of factors any more", where=p.path(node), got=p.op(node))
        for port, value in enumerate(p.operands(node)):
            if value.node in known or value.node in inner:
                continue
            if p.path(value).startswith(prefix) and p.op(value.node) != PARAM:
                inner.append(value.node)
                stack.append(value.node)
            elif node == end and (p.op(node), port) in (("linear", 2), ("add", 1)):
                bias = value
            else:
                entering.append(value)
    if len(set(entering)) != 1:
        raise UsageError("a chain of factors reads one value", where=base, got=[p.path(v) for v in entering])
    return _Region(end, sorted(inner, key=p.order_labels.key), entering[0], bias)
