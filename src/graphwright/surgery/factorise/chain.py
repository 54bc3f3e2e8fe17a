"""Replacement of a matrix by a chain of multiplications by its factors, and the inverse.

The factors of a linear map `q` are the params `q.outer.weight` and `q.inner.weight`, or `q.core1.weight`, ... A saved
chain is recognised by these names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count, takewhile
from math import prod
from typing import TYPE_CHECKING

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.editing.replace import remove_unread, take_over
from graphwright.program.errors import EmptySelection
from graphwright.program.kinds import PARAM
from graphwright.surgery.factorise.factors import Factors, LowRank, TensorRing, contraction_order, reconstruct
from graphwright.surgery.findings.finding import remove_unread_cone
from graphwright.surgery.matrices import Matrix, named, selection_of, stored, values
from graphwright.surgery.walks import flood

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


class _ChainBuilder:
    """Builder of the nodes of one chain of factors; their paths begin with `name`.

    Attributes:
        lead: number of batch axes of the intermediate result; they precede the axes that cores contract.
    """

    def __init__(self, e: Transaction, name: str, factors: Factors, cores: list[NodeId]) -> None:
        self.e, self.name, self.factors, self.cores, self.lead = e, name, factors, cores, 0

    def add(self, op: str, *inputs: NodeId | Value, step: str, **attrs: object) -> NodeId:
        return self.e.add(op, *inputs, name=self.e.program.free_name(f"{self.name}.{step}"), **attrs)

    def permute(self, x: NodeId, lead: int, before: Sequence[str], after: Sequence[str], step: str) -> NodeId:
        """Permute the axes after the first `lead` ones from label order `before` to `after`; return `x` if equal."""
        axes = (*range(lead), *(lead + list(before).index(name) for name in after))
        return x if list(axes) == sorted(axes) else self.add("permute", x, axes=axes, step=step)

    def join(self, x: NodeId, start: int, count: int, step: str) -> NodeId:
        """Flatten `count` axes, starting at axis `start`, into one; insert an axis of size 1 if `count` is 0."""
        if count == 0:
            return self.add("unsqueeze", x, axes=(start,), step=step)
        return x if count == 1 else self.add("flatten", x, start=start, end=start + count - 1, step=step)

    def split(self, x: NodeId, axis: int, sizes: Sequence[int], step: str) -> NodeId:
        if not sizes:
            return self.add("squeeze", x, axes=(axis,), step=step)
        return x if len(sizes) == 1 else self.add("unflatten", x, axis=axis, sizes=tuple(sizes), step=step)

    def linear(self, x: Value, bias: Value | None) -> NodeId:
        """Add the nodes that compute x · Wᵀ + bias from the cores of W."""
        inner, spec, node = self.factors.modes[1], self.e.spec(x), x.node
        self.lead = len(spec.shape) - 1
        if prod(inner) != spec.shape[-1]:
            node = self.add("pad_slice", x, axis=self.lead, start=0, size=prod(inner), step="padded")
        elif x.port:
            node = self.add("slice", x, axis=self.lead, start=0, size=prod(inner), step="input")
        if len(inner) > 1:
            node = self.split(node, self.lead, inner, "input_modes")
        return self._contract(node, _labels("i", inner), range(len(self.cores)), bias, 0)

    def rows(self, ids: Value) -> NodeId:
        """Add nodes that look up rows `ids` of W: rows of the core with axis `o1`, multiplied by all other cores."""
        cores = self.factors.cores
        first = next(k for k, core in enumerate(cores) if "o1" in core.labels)
        node = self.add("embedding", self.cores[first], ids, step=cores[first].name)
        self.lead = len(self.e.spec(node).shape) - 1
        labels = [name for name in cores[first].labels if name != "o1"]
        return self._contract(node, labels, [k for k in range(len(cores)) if k != first], None, 1)

    def _contract(self, x: NodeId, labels: list[str], which: Sequence[int], bias: Value | None, side: int) -> NodeId:
        """Add the nodes that multiply `x`, with axes `labels`, by the cores of indices `which`, and add the bias.

        The result has modes of W's output if `side` is 0, of its input if 1; they are flattened into one axis.
        """
        modes, size = self.factors.modes[side], self.factors.shape[side]
        used = [self.factors.cores[k] for k in which]
        sizes = _sizes(self.factors)
        steps, _ = contraction_order(labels, [core.labels for core in used], sizes)
        plain = len(modes) == 1 and size == modes[0]  # the last product returns y and adds the bias
        for step in steps:
            core, kept = used[step.core], self.lead + len(step.remaining)
            name = core.name
            x = self.permute(x, self.lead, labels, (*step.remaining, *step.summed), f"{name}.order")
            x = self.join(x, kept, len(step.summed), f"{name}.rows")
            order = (*step.free, *step.summed)
            matrix = self.permute(self.cores[which[step.core]], 0, core.labels, order, f"{name}.permuted")
            matrix = self.join(matrix, 0, len(step.free), f"{name}.free")
            matrix = self.join(matrix, 1, len(step.summed), f"{name}.matrix")
            added = [bias] if bias is not None and plain and step is steps[-1] else []
            x = self.add("linear", x, matrix, *added, step=name)
            x = self.split(x, kept, [sizes[label] for label in step.free], f"{name}.modes")
            labels = [*step.remaining, *step.free]
        x = self.permute(x, self.lead, labels, _labels("oi"[side], modes), "order")
        x = self.join(x, self.lead, len(modes), "joined")
        if prod(modes) != size:
            x = self.add("slice", x, axis=self.lead, start=0, size=size, step="cut")
        return x if bias is None or plain else self.add("add", x, bias, step="sum")


def _labels(side: str, modes: Sequence[int]) -> list[str]:
    return [f"{side}{k}" for k in range(1, len(modes) + 1)]


def _sizes(factors: Factors) -> dict[str, int]:
    """Map each axis label of the cores to its size."""
    return {name: n for core in factors.cores for name, n in zip(core.labels, core.array.shape, strict=True)}


def flops(factors: Factors) -> int:
    """Return the number of floating point operations by which the chain computes y = x · Wᵀ for one vector x."""
    start = _labels("i", factors.modes[1])
    return contraction_order(start, [core.labels for core in factors.cores], _sizes(factors))[1]


def attach(e: Transaction, matrix: Matrix, factors: Factors) -> list[NodeId]:
    """Replace a matrix by its factors in all of its readers. Returns: the param nodes of the cores."""
    p, base, key = e.program, matrix.name, matrix.key.removesuffix(".weight")
    trainable = bool(p.attrs(matrix.param).get("trainable", True))
    cores = [e.param(f"{base}.{core.name}.weight", stored(core.array, matrix.dtype), key=f"{key}.{core.name}.weight",
                     trainable=trainable) for core in factors.cores]  # fmt: skip
    widened = {matrix.dtype.name: cores}
    for reader in matrix.readers:
        operands, dtype = p.operands(reader.node), p.spec(reader.node).dtype
        if dtype.name not in widened:
            widened[dtype.name] = [e.add("cast", c, dtype=dtype, name=p.free_name(f"{p.path(c)}.cast")) for c in cores]
        chain = _ChainBuilder(e, p.path(reader.node), factors, widened[dtype.name])
        if traits(reader.op).contracts == "out_in":
            x, wide, *bias = operands
            made = chain.linear(x, bias[0] if bias else None)
        else:
            wide, ids = operands
            made = chain.rows(ids)
        take_over(e, reader.node, made)
        remove_unread(e, wide)
    return cores


def cores_of(p: Program, base: str) -> dict[str, NodeId]:
    """Map core names to param nodes for the factored map `base`, in order; empty if the map is not factored."""

    def stored_here(name: str) -> bool:
        path = f"{base}.{name}.weight"
        return p.free_name(path) != path and p.op(p.node(path)) == PARAM

    ring = takewhile(stored_here, (f"core{k}" for k in count(1)))
    names = ("outer", "inner") if stored_here("outer") else ring
    return {name: p.node(f"{base}.{name}.weight") for name in names}


_STEP = re.compile(r"(.+?)\.(?:outer|inner|core\d+|order|joined|padded|input|input_modes|cut|sum)(?:\..*)?$")


def densify(program: Program, where: str | Selection = "**") -> list[str]:
    """Replace chains of factors by dense matrices, in one edit.

    Args:
        program: edited in place.
        where: pattern of the factored maps, or a selection.
    Returns: paths of the new params.
    Raises: EmptySelection if no selected map is factored; UsageError if a chain was edited.
    """
    chosen = selection_of(program, where)
    bases = [b for b in factored(program) if any(n in chosen for n in cores_of(program, b).values())]
    if not bases:
        raise EmptySelection("the selection has no factored matrix", where=str(where), got=f"{chosen.count} nodes",
                             fix="factor a matrix first: compress(program, where)")  # fmt: skip
    with program.edit(f"densify {len(bases)} matrices", author="pass", tool="graphwright.surgery.densify") as e:
        made = [_densify(e, base) for base in bases]
        remove_unread_cone(e, *(node for _, dead in made for node in dead))
    return [path for path, _ in made]


def factored(p: Program) -> list[str]:
    """Return the names of the linear maps and embeddings whose matrix is factored, in order of creation."""
    bases = named(p, ".outer.weight", ".core1.weight")
    return [b for b in bases if len(cores_of(p, b)) > 1 and not b.endswith(".lora")]  # a LoRA branch replaces no matrix


def factors_of(p: Program, base: str, shape: tuple[int, int] | None = None) -> Factors:
    """Read the factors of the map with path `base`; `shape` is the shape of its matrix, by default with padding."""
    arrays = {name: values(p, p.key(node)) for name, node in cores_of(p, base).items()}
    if "outer" in arrays:
        return LowRank(arrays["outer"], arrays["inner"])
    ring = TensorRing(tuple(arrays.values()), (0, 0))
    return TensorRing(ring.arrays, shape or (prod(ring.modes[0]), prod(ring.modes[1])))


def _densify(e: Transaction, base: str) -> tuple[str, list[NodeId]]:
    """Replace all chains of the map `base` by one matrix. Returns: its path; the operands of each chain's last node."""
    p, dead = e.program, list[NodeId]()
    cores = cores_of(p, base)
    known = flood(cores.values(), lambda n: [r for r in p.consumers(n) if traits(p.op(r)).casts])
    readers = [r for n in known for r in p.consumers(n) if r not in known]
    named = {r: _STEP.match(p.path(r)) for r in readers}
    regions = [(end, *_region(p, base, end, known)) for end in dict.fromkeys(p.node(m[1]) if m else r
                                                                             for r, m in named.items())]  # fmt: skip
    maps = [(end, x) for end, x, _ in regions if p.spec(x).dtype.is_float]
    shape = (int(p.spec(maps[0][0]).shape[-1]), int(p.spec(maps[0][1]).shape[-1])) if maps else None
    matrix = stored(reconstruct(factors_of(p, base, shape)), p.spec(known[0]).dtype)
    trainable = any(bool(p.attrs(n).get("trainable", True)) for n in cores.values())
    w = e.param(f"{base}.weight", matrix, key=f"{p.key(known[0]).rsplit('.', 2)[0]}.weight", trainable=trainable)
    widened: dict[str, NodeId] = {p.spec(w).dtype.name: w}
    for end, x, bias in regions:
        kind, name = p.spec(end).dtype, p.free_name(f"{p.path(end)}.dense")
        if kind.name not in widened:
            widened[kind.name] = e.add("cast", w, dtype=kind, name=p.free_name(f"{base}.weight.cast"))
        if p.spec(x).dtype.is_float:
            made = e.add("linear", x, widened[kind.name], *([] if bias is None else [bias]), name=name)
        else:
            made = e.add("embedding", widened[kind.name], x, name=name)
        dead += [v.node for v in p.operands(end)]
        take_over(e, end, made)
    return f"{base}.weight", dead


def _region(p: Program, base: str, end: NodeId, cores: Sequence[NodeId]) -> tuple[Value, Value | None]:
    """Return the input and the bias of the chain that ends in `end`. Raises: UsageError if the chain was edited."""
    prefix, row = f"{p.path(end)}.", traits(p.op(end))

    def before(node: NodeId) -> list[NodeId]:
        return [v.node for v in p.operands(node)
                if v.node not in cores and p.path(v).startswith(prefix) and p.op(v.node) != PARAM]  # fmt: skip

    chain = flood([end], before)
    for node in chain:
        kind = traits(p.op(node))
        if not (kind.rearranges or kind.slices or kind.pads or kind.sums or kind.matrix is not None):
            raise UsageError("cannot multiply out a chain of factors that was edited", where=p.path(node),
                             expected="only the ops of a chain", got=f"op {p.op(node)}")  # fmt: skip
    read = [(n, port, v) for n in chain for port, v in enumerate(p.operands(n)) if v.node not in (*cores, *chain)]
    biases = [v for n, port, v in read if n == end and (port == row.addend or (port == 1 and row.sums))]
    entering = {v for _, _, v in read if v not in biases}
    if len(entering) != 1:
        raise UsageError("cannot multiply out a chain of factors that was edited", where=base,
                         expected="one input of the chain", got=[p.path(v) for v in entering])  # fmt: skip
    return entering.pop(), biases[0] if biases else None
