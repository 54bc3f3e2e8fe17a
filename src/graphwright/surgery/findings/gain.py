"""Gain: gradients that grow or vanish along the trunk, tokens that collapse into one, chains that amplify."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import numpy as np

from graphwright.graph import NodeId
from graphwright.ops import OPS
from graphwright.program import Program, Value
from graphwright.program.axes.solve_axes import origin
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import KINDS
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import finding

_NORMS = frozenset({"rms_norm", "layer_norm", "group_norm", "batch_norm", "batch_norm_train", "softmax"})
_LEAST_ROWS = 8


@finding("gain", reads="weights")
def gain(d: Diagnosis) -> Iterator[Finding]:
    """With a probe, gradients and representations at the junctions of the trunk; without one, chains without norms."""
    if not d.program.valid:
        return
    if d.probe is not None:
        yield from _collapse(d)
        yield from _gradients(d)
    yield from _chains(d)


def trunk(p: Program) -> list[NodeId]:
    """Junctions of the shape that most of them have, in order."""
    groups: dict[object, list[NodeId]] = {}
    for node in p.junctions():
        if p.spec(node).dtype.is_float and len(p.spec(node).shape) >= 2:
            groups.setdefault(p.spec(node), []).append(node)
    return max(groups.values(), key=len, default=[])


def _gradients(d: Diagnosis) -> Iterator[Finding]:
    assert d.probe is not None
    p = d.program
    nodes = [n for n in trunk(p) if Value(n) in d.probe.run(p).values]
    slopes = d.probe.gradients(p, [Value(n) for n in nodes])
    series = {n: float(np.sqrt((slopes[Value(n)] ** 2).mean())) for n in nodes if Value(n) in slopes}
    series = {n: x for n, x in series.items() if np.isfinite(x) and x > 0}
    if len(series) > 1 and max(series.values()) > d.limits.gain * min(series.values()):
        worst = min(series, key=series.__getitem__)
        yield Finding.of(
            p,
            "gain",
            Severity.WARNING,
            "gradients change by orders of magnitude along the trunk",
            worst,
            got=f"{max(series.values()) / min(series.values()):.3g}",
            expected=f"at most {d.limits.gain:g}",
            witness={"series": {p.path(n): x for n, x in series.items()}},
        )


def _collapse(d: Diagnosis) -> Iterator[Finding]:
    """The stable rank |X|_F^2 / |X|_2^2 of what the last junction holds for the tokens of the probe."""
    assert d.probe is not None
    p = d.program
    for node in trunk(p)[-1:]:
        if Value(node) not in d.probe.run(p).values or len(p.spec(node).shape) != 3:
            continue
        values = d.probe.run(p).value(Value(node)).to_numpy("float64")
        rows = values.reshape(-1, values.shape[-1])
        if len(rows) < _LEAST_ROWS or not rows.any():
            continue
        s = np.linalg.eigvalsh(rows.T @ rows if rows.shape[0] > rows.shape[1] else rows @ rows.T)
        rank = float(s.sum() / s[-1])
        if rank < d.limits.stable_rank:
            yield Finding.of(
                p,
                "gain",
                Severity.WARNING,
                "the representations of all tokens have collapsed into one direction",
                node,
                expected=f"a stable rank of {d.limits.stable_rank:g} or more",
                got=f"{rank:.3g}",
                witness={"stable_rank": rank},
            )


def _chains(d: Diagnosis) -> Iterator[Finding]:
    """Products behind one another without a norm between: the product of their spectral norms."""
    p = d.program
    after = {n: _next(p, n) for n in p.of_kind("linear")}
    starts = [n for n in after if n not in set(after.values())]
    for start in starts:
        chain: list[NodeId] = []
        node: NodeId | None = start
        while node is not None:
            chain.append(node)
            node = after[node]
        weights = [origin(p, p.operands(n)[1]) for n in chain]
        params = [n for n in weights if n is not None]
        if len(chain) < 2 or len(params) < len(chain):
            continue
        norms = [float(np.linalg.norm(p.weights.array(p.key(n)).to_numpy("float64"), 2)) for n in params]
        if not all(np.isfinite(norms)) or not all(norms):
            continue
        total = sum(map(log, norms))
        if abs(total) > log(d.limits.gain):
            each = float(np.exp(-total / len(params)))
            yield Finding.of(
                p,
                "gain",
                Severity.WARNING,
                "a chain without norms multiplies by orders of magnitude",
                *chain,
                expected=f"1/{d.limits.gain:g} to {d.limits.gain:g}",
                got=f"{np.exp(total):.3g}",
                witness={"series": {p.path(n): x for n, x in zip(chain, norms, strict=True)}},
                fixes=(Fix(f"scale each of the {len(params)} matrices by {each:.3g}",
                           lambda e, params=params, each=each: _scale(e, params, each), edges=len(params)),),
            )  # fmt: skip


def _scale(e: Transaction, params: list[NodeId], factor: float) -> None:
    for param in dict.fromkeys(params):
        e.set_weight(param, lambda values: values * factor)


def _next(p: Program, node: NodeId) -> NodeId | None:
    """The product that alone reads a product, through elementwise ops."""
    while True:
        readers = p.consumers(node)
        if len(readers) != 1 or p.op(readers[0]) in KINDS or p.op(readers[0]) in _NORMS:
            return None
        node = readers[0]
        if p.op(node) == "linear":
            return node if p.graph.source(p.in_edges(node)[0]) != node else None
        row = OPS.get(p.op(node))
        if row is None or row.arity != 1 or not (row.traits.elementwise or row.view is not None):
            return None
