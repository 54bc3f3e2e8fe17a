"""The rule about unbalanced heads: weights of q, k, v or o of a head with norms far from those of other heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import OPS, traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import KINDS
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.wiring import template
from graphwright.surgery.walks import next_reader

if TYPE_CHECKING:
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True)
class HeadProjection:
    """One projection (q, k, v or o) of an attention, divided into heads.

    Attributes:
        weight: param node of the weight.
        bias: param node of the bias, or None.
        dim: dimension of the weight along which heads follow each other.
        start: first index of head 0.
        heads, width: number of heads, and number of indices per head.
    """

    weight: NodeId
    bias: NodeId | None
    dim: int
    start: int
    heads: int
    width: int

    def slice(self, head: int) -> slice:
        """Return the slice of one head along `dim`."""
        return slice(self.start + head * self.width, self.start + (head + 1) * self.width)

    def norms(self, p: Program) -> np.ndarray:
        """Return the Frobenius norm of the weights of each head."""
        values = np.moveaxis(p.weights.array(p.key(self.weight)).to_numpy("float64"), self.dim, 0)
        return np.array([np.linalg.norm(values[self.slice(h)]) for h in range(self.heads)])


def unbalanced_heads(d: Diagnosis) -> Iterator[Finding]:
    """Report a key head if one of its norms, or of its query heads' norms, is far from the median of the layer."""
    p = d.program
    found = {node: attention_parts(p, node) for node in p.of_traits(attention=True)} if p.valid else {}
    norms = {(node, name): part.norms(p) for node, parts in found.items() for name, part in parts.items()}
    for node, parts in found.items():
        if not {"q", "k", "v"} <= parts.keys() or parts["q"].heads % parts["k"].heads:
            continue
        queries, ratios = parts["q"].heads // parts["k"].heads, {}
        for name in parts:
            median = _median(p, node, name, parts["k"].heads, norms)
            if median > 0 and np.isfinite(norms[node, name]).all():
                ratios[name] = norms[node, name] / median
        for group in range(parts["k"].heads):
            own = {n: range(group * queries, (group + 1) * queries) if n in ("q", "o") else [group] for n in ratios}
            mine = {n: {h: float(ratios[n][h]) for h in heads} for n, heads in own.items()}
            off = [(n, h, r) for n, rows in mine.items() for h, r in rows.items() if not _within(d, r)]
            if off:
                yield _unbalanced(d, node, parts, group, mine, off)


def _median(p: Program, node: NodeId, name: str, groups: int, norms: dict[tuple[NodeId, str], np.ndarray]) -> float:
    """Return the median head norm of projection `name` in a layer, or in its siblings too if it has < 3 key heads."""
    own = template(p.path(node))[0]
    among = [r for (n, part), r in norms.items() if part == name and (n == node or template(p.path(n))[0] == own)]
    return float(np.median(np.concatenate(among) if groups < 3 else norms[node, name]))


def attention_parts(p: Program, node: NodeId) -> dict[str, HeadProjection]:
    """Map `q`, `k`, `v`, `o` to the projections of an attention; only linear maps of whole heads are included."""
    found = {}
    for name, port in (("q", 0), ("k", 1), ("v", 2)):
        heads = p.spec(p.operands(node)[port]).shape[1]
        made = _made_by(p, p.operands(node)[port])
        if made is not None and isinstance(heads, int):
            linear, start, size = made
            weight, *biases = (origin(p, v) for v in p.operands(linear)[1:])
            if weight is not None and size % heads == 0 and None not in biases:
                bias = biases[0] if biases else None
                found[name] = HeadProjection(weight, bias, 0, start, heads, size // heads)
    reader, heads = _read_by(p, node), p.spec(node).shape[1]
    if reader is not None and isinstance(heads, int):
        weight = origin(p, p.operands(reader)[1])
        if weight is not None and p.spec(weight).sizes[1] % heads == 0:
            found["o"] = HeadProjection(weight, None, 1, 0, heads, p.spec(weight).sizes[1] // heads)
    return found


def _made_by(p: Program, value: Value) -> tuple[NodeId, int, int] | None:
    """Return (linear map, first row, row count) that compute an attention operand, before views and RoPE, or None."""
    start, size = 0, None
    while True:
        op = p.op(value.node)
        if traits(op).contracts == "out_in":
            return value.node, start, size if size is not None else int(p.spec(value).shape[-1])
        if op in KINDS or op not in OPS:
            return None
        row, attrs = OPS[op], p.attrs(value.node)
        if row.traits.slices and size is None and attrs["step"] == 1:
            if attrs["axis"] % len(p.spec(value).shape) != len(p.spec(value).shape) - 1:
                return None
            start, size = attrs["start"], attrs["size"]
        elif not (row.traits.scales_rows or (row.view is not None and not row.traits.slices) or row.traits.convert):
            return None
        value = p.operands(value.node)[0]


def _read_by(p: Program, node: NodeId) -> NodeId | None:
    """Return the linear map that is the only reader of an attention, directly or through views; else None."""

    def passes(reader: NodeId, port: int) -> bool:
        row = OPS.get(p.op(reader))
        return row is not None and (row.view is not None or row.traits.convert) and not row.traits.slices

    end, _ = next_reader(p, node, passes)
    return end if traits(p.op(end)).contracts == "out_in" else None


def _within(d: Diagnosis, ratio: float) -> bool:
    return 1 / d.limits.head_ratio <= ratio <= d.limits.head_ratio


def _unbalanced(
    d: Diagnosis, node: NodeId, parts: dict[str, HeadProjection], group: int, mine: dict[str, dict[int, float]],
    off: list[tuple[str, int, float]],
) -> Finding:  # fmt: skip
    p, queries = d.program, parts["q"].heads // parts["k"].heads
    dead = sorted({h for n, h, r in off if r < d.limits.dead_head and n in ("q", "o")})
    if any(r < d.limits.dead_head and n in ("k", "v") for n, h, r in off):
        dead = list(range(group * queries, (group + 1) * queries))
    heads = sorted({h if n in ("q", "o") else h * queries for n, h, _ in off})
    names = ", ".join(f"{n} of head {h} by {r:.3g}" for n, h, r in off)
    return Finding.of(
        p, "unbalanced_heads", Severity.WARNING,
        f"{'a dead head' if dead else 'norms far from the median of the layer'}: {names}",
        node, *dict.fromkeys(parts[n].weight for n, _, _ in off), where=f"{p.path(node)}, key head {group}",
        expected=f"1/{d.limits.head_ratio:g} to {d.limits.head_ratio:g} times the median",
        got=", ".join(f"{r:.3g}" for _, _, r in off),
        witness={"heads": heads, "dead": dead, "parts": [[n, h, round(r, 6)] for n, h, r in off]},
        fixes=(*_rescale(d, parts, mine, off), *([_cut(p, parts, dead)] if dead else [])),
    )  # fmt: skip


def _rescale(
    d: Diagnosis, parts: dict[str, HeadProjection], mine: dict[str, dict[int, float]], off: list[tuple[str, int, float]]
) -> Iterator[Fix]:
    """Yield a fix that scales q by c and k by 1/c, or o by c and v by 1/c. c is a power of two: no rounding.

    `mine` maps projection and head to norm / median; `off` lists (projection, head, norm / median) out of range.
    """
    p, factors = d.program, {}
    for one, shared in (("q", "k"), ("o", "v")):
        if not any(n in (one, shared) for n, _, _ in off):
            continue
        if one not in mine or shared not in mine or not all(min(mine[n].values()) > 0 for n in (one, shared)):
            return
        logs = np.log2(list(mine[one].values())).mean(), np.log2(list(mine[shared].values())).mean()
        power = round((logs[1] - logs[0]) / 2)
        factors |= {one: 2.0**power, shared: 2.0**-power}
        after = [r * factors[n] for n in (one, shared) for r in mine[n].values()]
        if not all(_within(d, r) for r in after):
            return
    weights = [(node, part.slice(h), part.dim if node == part.weight else 0, factors[n])
               for n in factors for part in [parts[n]] for h in mine[n]
               for node in (part.weight, part.bias) if node is not None]  # fmt: skip
    if any(p.axes().readers(node) != 1 for node, *_ in weights):
        return

    def scaled(values: np.ndarray, node: NodeId) -> np.ndarray:
        for _, indices, dim, factor in (w for w in weights if w[0] == node):
            np.moveaxis(values, dim, 0)[indices] *= factor
        return values

    def apply(e: Transaction) -> None:
        for node in dict.fromkeys(node for node, *_ in weights):
            e.set_weight(node, lambda values, node=node: scaled(values, node))

    pairs = " and ".join(f"{a}, {b}" for a, b in (("q", "k"), ("v", "o")) if a in factors)
    yield Fix(f"rescale {pairs} of the head against each other", apply, edges=len(weights), keeps_function=True)


def _cut(p: Program, parts: dict[str, HeadProjection], dead: list[int]) -> Fix:
    """Return a fix that cuts dead heads; the fix keeps the function if all of these heads output exactly zero."""

    def zero(head: int) -> bool:
        exact = [("v", head * parts["v"].heads // parts["q"].heads)] + ([("o", head)] if "o" in parts else [])
        return any(parts[n].norms(p)[h] == 0 and parts[n].bias is None for n, h in exact)

    def apply(e: Transaction) -> None:
        axes = e.program.axes()
        here = {a for g in axes.of(e.program.path(parts["q"].weight), 0) for a in g.atoms}
        group = next((g for g in axes.values() if "heads" in g.kinds and set(g.atoms) <= here), None)
        if group is None:
            raise UsageError("the heads of this attention cannot be cut, because they do not form an axis",
                             where=p.path(parts["q"].weight))  # fmt: skip
        e.cut_units(group.units(dead), ragged=len(group.atoms) > 1)

    what = f"cut head {', '.join(map(str, dead))}"
    return Fix(what, apply, edges=len(dead), keeps_function=all(map(zero, dead)))
