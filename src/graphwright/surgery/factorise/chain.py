"""Replacement of a matrix by a chain of products with its factors, and back.

The factors are params below the name of the map: `q.outer.weight` and `q.inner.weight`, or `q.core1.weight`, ... So a
saved chain can be recognised by its names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from graphwright.errors import UsageError
from graphwright.ops import traits
from graphwright.program import EmptySelection, Value
from graphwright.program.editing.replace import remove_unread, take_over
from graphwright.program.kinds import PARAM
from graphwright.surgery.factorise.factors import LowRank, TensorRing, contraction_order, reconstruct
from graphwright.surgery.matrices import stored, values

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program, Selection, Transaction
    from graphwright.surgery.factorise.factors import ContractionStep, Core, Factors
    from graphwright.surgery.matrices import Matrix, Reader


class _ChainBuilder:
    """Adds the nodes of one chain below a name."""

    def __init__(self, e: Transaction, name: str) -> None:
        self.e, self.name, self.lead = e, name, 0

    def add(self, op: str, *inputs: NodeId | Value, step: str, **attrs: object) -> NodeId:
        return self.e.add(op, *inputs, name=self.e.program.free_name(f"{self.name}.{step}"), **attrs)

    def permute(self, x: NodeId, lead: int, before: Sequence[str], after: Sequence[str], step: str) -> NodeId:
        """Permute the axes after the first `lead`; return `x` if the order is the same."""
        axes = (*range(lead), *(lead + list(before).index(name) for name in after))
        return x if list(axes) == sorted(axes) else self.add("permute", x, axes=axes, step=step)

    def join(self, x: NodeId, start: int, count: int, step: str) -> NodeId:
        """Flatten `count` axes from `start` into one."""
        if count == 0:
            return self.add("unsqueeze", x, axes=(start,), step=step)
        return x if count == 1 else self.add("flatten", x, start=start, end=start + count - 1, step=step)

    def split(self, x: NodeId, axis: int, sizes: Sequence[int], step: str) -> NodeId:
        if not sizes:
            return self.add("squeeze", x, axes=(axis,), step=step)
        return x if len(sizes) == 1 else self.add("unflatten", x, axis=axis, sizes=tuple(sizes), step=step)

    def product(self, x: NodeId, core: NodeId, labels: Sequence[str], step: ContractionStep, sizes: Mapping[str, int],
                label: str, bias: NodeId | Value | None) -> NodeId:  # fmt: skip
        """Multiply X [lead.., kept.., summed..] by a core, giving [lead.., kept.., free..]."""
        lead, kept = self.lead, len(step.kept)
        x = self.join(x, lead + kept, len(step.summed), f"{label}.rows")
        matrix = self.permute(core, 0, labels, (*step.free, *step.summed), f"{label}.permuted")
        matrix = self.join(matrix, 0, len(step.free), f"{label}.free")
        matrix = self.join(matrix, 1, len(step.summed), f"{label}.matrix")
        operands = [x, matrix] if bias is None else [x, matrix, bias]
        y = self.add("linear", *operands, step=label)
        return self.split(y, lead + kept, [sizes[name] for name in step.free], f"{label}.modes")


def attach(e: Transaction, matrix: Matrix, factors: Factors) -> list[NodeId]:
    """Replace a matrix by factors for all its readers, and remove the matrix. Returns the params of the cores."""
    p = e.program
    base, key = matrix.name, matrix.key.removesuffix(".weight")
    trainable = bool(p.attrs(matrix.param).get("trainable", True))
    cores = [
        e.param(f"{base}.{core.name}.weight", stored(core.array, matrix.dtype),
                key=f"{key}.{core.name}.weight", trainable=trainable)
        for core in factors.cores
    ]  # fmt: skip
    widened: dict[str, list[NodeId]] = {}
    for reader in matrix.readers:
        _replace(e, reader, matrix, factors, cores, widened)
    return cores


def _replace(e: Transaction, reader: Reader, matrix: Matrix, factors: Factors, cores: list[NodeId],
             widened: dict[str, list[NodeId]]) -> None:  # fmt: skip
    """Replace one reader by a chain of the same name."""
    p = e.program
    path, operands = p.path(reader.node), p.operands(reader.node)
    dtype = p.spec(reader.node).dtype
    if dtype.name not in widened:
        widened[dtype.name] = [c if p.spec(c).dtype is dtype else
                               e.add("cast", c, dtype=dtype, name=p.free_name(f"{p.path(c)}.cast"))
                               for c in cores]  # fmt: skip
    chain = _ChainBuilder(e, path)
    if traits(reader.op).contracts == "out_in":
        x, wide, *bias = operands
        made = _linear(chain, x, factors, widened[dtype.name], bias[0] if bias else None)
    else:
        wide, ids = operands
        made = _rows(chain, ids, factors, widened[dtype.name])
    take_over(e, reader.node, made)
    remove_unread(e, wide)


def _linear(chain: _ChainBuilder, x: Value, factors: Factors, cores: list[NodeId], bias: Value | None) -> NodeId:
    """X · Wᵀ + bias through the cores."""
    out, inner = factors.modes
    node = x.node
    spec = chain.e.spec(x)
    chain.lead = len(spec.shape) - 1
    if prod(inner) != spec.shape[-1]:
        node = chain.add("pad_slice", x, axis=chain.lead, start=0, size=prod(inner), step="padded")
    elif x.port:
        node = chain.add("slice", x, axis=chain.lead, start=0, size=prod(inner), step="input")
    if len(inner) > 1:
        node = chain.split(node, chain.lead, inner, "input_modes")
    labels = [f"i{k}" for k in range(1, len(inner) + 1)]
    return _contract(chain, node, labels, factors, list(range(len(cores))), cores, bias, out, "o", factors.shape[0])


def _rows(chain: _ChainBuilder, ids: Value, factors: Factors, cores: list[NodeId]) -> NodeId:
    """Rows of W by id: rows of the core with the output mode, times the other cores."""
    first = next(k for k, core in enumerate(factors.cores) if "o1" in core.labels)
    node = chain.add("embedding", cores[first], ids, step=factors.cores[first].name)
    chain.lead = len(chain.e.spec(node).shape) - 1
    labels = [name for name in factors.cores[first].labels if name != "o1"]
    others = [k for k in range(len(cores)) if k != first]
    return _contract(chain, node, labels, factors, others, cores, None, factors.modes[1], "i", factors.shape[1])


def _contract(chain: _ChainBuilder, x: NodeId, start: list[str], factors: Factors,
              which: list[int], cores: list[NodeId],
              bias: Value | None, modes: tuple[int, ...], side: str, size: int) -> NodeId:  # fmt: skip
    sizes = {name: n for core in factors.cores for name, n in zip(core.labels, core.array.shape, strict=True)}
    used: list[Core] = [factors.cores[k] for k in which]
    steps, _ = contraction_order(start, [core.labels for core in used], sizes)
    wanted = [f"{side}{k}" for k in range(1, len(modes) + 1)]
    plain = len(modes) == 1 and size == modes[0]  # the last product returns y and adds the bias
    labels = start
    for step in steps:
        core = used[step.core]
        x = chain.permute(x, chain.lead, labels, (*step.kept, *step.summed), f"{core.name}.order")
        last = plain and step is steps[-1]
        x = chain.product(x, cores[which[step.core]], core.labels, step, sizes, core.name, bias if last else None)
        labels = [*step.kept, *step.free]
    x = chain.permute(x, chain.lead, labels, wanted, "order")
    x = chain.join(x, chain.lead, len(wanted), "joined")
    if prod(modes) != size:
        x = chain.add("slice", x, axis=chain.lead, start=0, size=size, step="cut")
    return x if bias is None or plain else chain.add("add", x, bias, step="sum")


def cores_of(p: Program, base: str) -> dict[str, NodeId]:
    """Core name -> param of the factors below a name, in order; empty if there are none."""
    names = ["outer", "inner"] if _stored(p, f"{base}.outer.weight") else []
    while not names or names[0] != "outer":
        name = f"core{len(names) + 1}"
        if not _stored(p, f"{base}.{name}.weight"):
            break
        names.append(name)
    return {name: p.node(f"{base}.{name}.weight") for name in names}


def _stored(p: Program, path: str) -> bool:
    return p.free_name(path) != path and p.op(p.node(path)) == PARAM


def flops(factors: Factors) -> int:
    """Floating point operations of y = x · Wᵀ per vector, in the contraction order of the chain."""
    sizes = {name: n for core in factors.cores for name, n in zip(core.labels, core.array.shape, strict=True)}
    start = [f"i{k}" for k in range(1, len(factors.modes[1]) + 1)]
    return contraction_order(start, [core.labels for core in factors.cores], sizes)[1]


_STEP = re.compile(r"(.+?)\.(?:outer|inner|core\d+|order|joined|padded|input|input_modes|cut|sum)(?:\..*)?$")
_OPS = {"linear", "embedding", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "pad_slice", "slice", "add"}


def densify(program: Program, where: str | Selection = "**") -> list[str]:
    """Replace chains of factors by their matrices, in one edit.

    Args:
        program: edited in place.
        where: pattern of the factored maps, or a selection.
    Returns: paths of the new params.
    Raises: EmptySelection if no selected map is factored; UsageError if a chain was edited.
    """
    chosen = program.select(where) if isinstance(where, str) else where
    bases = [b for b in factored(program) if any(n in chosen for n in cores_of(program, b).values())]
    if not bases:
        raise EmptySelection("the selection has no factored matrix", where=str(where), got=f"{chosen.count} nodes",
                             fix="compress(...) and orthogonalize(..., fold='insert') make factors")  # fmt: skip
    with program.edit(f"densify {len(bases)} matrices", author="pass", tool="graphwright.surgery.densify") as e:
        return [_densify(e, base) for base in bases]


def factored(p: Program) -> list[str]:
    """Names of factored maps, in order of creation."""
    paths = [p.path(n) for n in p.of_kind(PARAM)]
    ends = (".outer.weight", ".core1.weight")
    bases = [path.removesuffix(end) for path in paths for end in ends if path.endswith(end)]
    return [b for b in bases if len(cores_of(p, b)) > 1 and not b.endswith(".lora")]  # a LoRA branch replaces no matrix


def factors_of(p: Program, base: str, shape: tuple[int, int] | None = None) -> Factors:
    """The factors below a name; `shape` of the matrix cuts off padding."""
    arrays = {name: values(p, p.key(node)) for name, node in cores_of(p, base).items()}
    if "outer" in arrays:
        return LowRank(arrays["outer"], arrays["inner"])
    ring = TensorRing(tuple(arrays.values()), (0, 0))
    return TensorRing(ring.arrays, shape or (prod(ring.modes[0]), prod(ring.modes[1])))


class _Region(NamedTuple):
    """One chain: its last node, the inner nodes, its input and its bias."""

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
    """Remove a node if nothing reads it."""
    p = e.program
    if node in p.graph and not p.out_edges(node) and Value(node) not in p.outputs():
        e.remove(node)


def _ends(p: Program, cores: dict[str, NodeId]) -> list[NodeId]:
    """The last node of each chain that reads the cores, found by the names of chain nodes."""
    ends: dict[NodeId, None] = {}
    for core in cores.values():
        for reader in _readers(p, core):
            named = _STEP.match(p.path(reader))
            ends[p.node(named[1]) if named else reader] = None
    return list(ends)


def _readers(p: Program, node: NodeId) -> list[NodeId]:
    """Readers of a core, looking through casts."""
    found = []
    for reader in p.consumers(node):
        found += _readers(p, reader) if traits(p.op(reader)).casts else [reader]
    return found


def _region(p: Program, base: str, end: NodeId, cores: dict[str, NodeId]) -> _Region:
    """Walk back from the end of a chain to its input. Raises: UsageError if the input is not a single value."""
    known = {*cores.values(), *(n for core in cores.values() for n in p.consumers(core) if traits(p.op(n)).casts)}
    prefix, inner, entering, bias = f"{p.path(end)}.", [], [], None
    stack = [end]
    while stack:
        node = stack.pop()
        if p.op(node) not in _OPS:
            raise UsageError("the chain of factors was edited", where=p.path(node), got=f"op {p.op(node)}")
        for port, value in enumerate(p.operands(node)):
            if value.node in known or value.node in inner:
                continue
            if p.path(value).startswith(prefix) and p.op(value.node) != PARAM:
                inner.append(value.node)
                stack.append(value.node)
            elif node == end and (port == traits(p.op(node)).addend or (port == 1 and traits(p.op(node)).sums)):
                bias = value
            else:
                entering.append(value)
    if len(set(entering)) != 1:
        raise UsageError("the chain of factors has several inputs", where=base, got=[p.path(v) for v in entering])
    return _Region(end, sorted(inner, key=p.order_labels.key), entering[0], bias)
