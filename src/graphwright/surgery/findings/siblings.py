"""The rule about siblings: nodes and weights of repeated blocks that correspond, of which one is unlike the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.ops import OPS
from graphwright.program.axes.axes import KINDS
from graphwright.surgery.errors import NothingToPrune
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.tensors import norm_scales, restore
from graphwright.surgery.findings.wiring import template
from graphwright.surgery.pruning.prunable import PrunableAxis, prunable
from graphwright.surgery.pruning.zeros import idle

if TYPE_CHECKING:
    from graphwright.program.program import Program

KIND = "unlike_siblings"
_LEAST = 3
"""Fewest siblings, the node itself included, among which one can be called the odd one."""
_SMALLEST = 16
"""Shortest side of a matrix whose spectrum is compared with that of noise."""


def unlike_siblings(d: Diagnosis) -> Iterator[Finding]:
    """Report attributes, scales and spectra of weights, and shares of idle units that differ from all siblings'."""
    if d.program.valid:
        yield from _attributes(d)
        yield from _weights(d)
        yield from _idle(d)


def _attributes(d: Diagnosis) -> Iterator[Finding]:
    """Report an attribute with a value that no sibling has, if the siblings' value would give the same specs."""
    p, declared = d.program, _declared(d)
    groups: dict[tuple[str, str], list[NodeId]] = defaultdict(list)
    for node in p.nodes():
        name, numbers = template(p.path(node))
        if numbers and p.op(node) in OPS:
            groups[p.op(node), name].append(node)
    for (op, _), nodes in groups.items():
        for attr in OPS[op].attrs if len(nodes) >= _LEAST else ():
            values = {n: p.attrs(n)[attr] for n in nodes}
            counts = Counter(map(repr, values.values()))
            ((usual, count),) = counts.most_common(1)
            if count < len(nodes) - max(1, len(nodes) // 4):
                continue
            wanted = next(v for v in values.values() if repr(v) == usual)
            for node, value in values.items():
                if counts[repr(value)] == 1 and (p.path(node), attr, repr(value)) not in declared:
                    yield from _attribute(p, node, attr, wanted, count)


def _attribute(p: Program, node: NodeId, attr: str, wanted: object, count: int) -> Iterator[Finding]:
    ins = [p.specs(v.node)[v.port] for v in p.operands(node)]
    try:
        if OPS[p.op(node)].specs(ins, {**p.attrs(node), attr: wanted}) != p.specs(node):
            return
    except GraphwrightError:  # the siblings' value does not fit this node's operands
        return
    value = p.attrs(node)[attr]
    yield Finding.of(p, KIND, Severity.WARNING, f"{attr} differs from that of {count} siblings", node,
                     where=f"{p.path(node)}, {attr}", expected=str(wanted), got=str(value),
                     witness={"attribute": attr, "value": value, "siblings": wanted, "count": count},
                     fixes=(Fix(f"set {attr} of {p.path(node)} to {wanted}",
                                lambda e: e.set_attr(node, **{attr: wanted}), ops=1),))  # fmt: skip


def _declared(d: Diagnosis) -> set[tuple[str, str, str]]:
    """Return (path, attribute, value) of the nodes that the model's config describes: such values are intended."""
    if d.model is None or d.model.checkpoint is None:
        return set()
    source = d.model.original
    ops = ((n, source.attrs(n)) for n in source.nodes() if source.op(n) in OPS)
    return {(source.path(n), attr, repr(value)) for n, attrs in ops for attr, value in attrs.items()}


def _weights(d: Diagnosis) -> Iterator[Finding]:
    """Report matrices and scales of norms with an odd magnitude, and matrices that look like noise."""
    p, scales = d.program, norm_scales(d.program)
    groups: dict[tuple[str, int], list[NodeId]] = defaultdict(list)
    for node in p.params():
        name, numbers = template(p.path(node))
        spec = p.spec(node)
        if numbers and spec.dtype.is_float and min(spec.sizes, default=0) and (len(spec.shape) > 1 or node in scales):
            groups[name, len(spec.shape)].append(node)
    for nodes in groups.values():
        values = {n: p.weights.array(p.key(n)).to_numpy("float64") for n in nodes}
        known = [n for n in nodes if np.isfinite(values[n]).all() and values[n].any()]
        if len(known) < _LEAST:
            continue
        logs = np.array([log(np.sqrt((values[n] ** 2).mean())) for n in known])
        gaps = _gaps(logs)
        i = int(np.argmax(np.abs(gaps)))  # an odd value also moves its neighbours' gaps: the largest is reported first
        others = _gaps(np.delete(logs, i))
        spread = 1.4826 * float(np.median(np.abs(others - np.median(others))))  # robust standard deviation
        if abs(gaps[i]) > max(log(d.limits.unlike), 6 * spread):
            yield _odd_scale(d, known[i], exp(gaps[i]))
        flat = {n: m for n in known if min((m := values[n].reshape(len(values[n]), -1)).shape) >= _SMALLEST}
        if len(flat) >= _LEAST:
            yield from _noise(d, {n: flatness(m) for n, m in flat.items()})


def _gaps(logs: np.ndarray) -> np.ndarray:
    """Return the differences from the median of the nearest siblings, two on each side: a trend over depth is none."""
    windows = ([j for j in range(max(0, i - 2), min(len(logs), i + 3)) if j != i] for i in range(len(logs)))
    return np.array([logs[i] - np.median(logs[near]) for i, near in enumerate(windows)])


def _odd_scale(d: Diagnosis, node: NodeId, ratio: float) -> Finding:
    p, key = d.program, d.program.key(node)
    rescale = Fix(f"divide {key} by {ratio:.3g}", lambda e: e.set_weight(key, lambda values: values / ratio), edges=2)
    return Finding.of(p, KIND, Severity.WARNING, "the values have another magnitude than those of the siblings", node,
                      expected=f"1/{d.limits.unlike:g} to {d.limits.unlike:g} times the RMS of the nearest",
                      got=f"{ratio:.3g}", witness={"key": key, "ratio": round(ratio, 6)},
                      fixes=(*restore(d, key), rescale))  # fmt: skip


def flatness(matrix: np.ndarray) -> float:
    """(Σ s²)² / Σ s⁴ of the singular values, as a share of its expectation mn/(m+n+1) for noise [m, n].

    It is 1 ± 0.01 for independent entries of one variance, and less for a matrix with preferred directions. Source:
    moments of the Marchenko-Pastur law.
    """
    rows, columns = matrix.shape
    small = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    return float(np.trace(small) ** 2 / (small**2).sum() * (rows + columns + 1) / (rows * columns))


def _noise(d: Diagnosis, found: dict[NodeId, float]) -> Iterator[Finding]:
    p = d.program
    for node, value in found.items():
        others = max(x for n, x in found.items() if n != node)
        if abs(value - 1) < d.limits.noise and others < 1 - 2.5 * d.limits.noise:
            yield Finding.of(p, KIND, Severity.WARNING, "the matrix looks like noise, unlike those of its siblings",
                             node, expected=f"a spectrum of flatness {others:.2f} or less", got=f"{value:.3f}",
                             witness={"key": p.key(node), "flatness": round(value, 6), "siblings": round(others, 6)},
                             fixes=restore(d, p.key(node)))  # fmt: skip


def _idle(d: Diagnosis) -> Iterator[Finding]:
    """Report axes with far more units of zero weight than their siblings have."""
    p = d.program
    try:
        axes = [a for a in prunable(p, None, (*KINDS, "units")) if len(a.group.atoms) == 1]
    except NothingToPrune:
        return
    groups: dict[str, list[tuple[PrunableAxis, np.ndarray]]] = defaultdict(list)
    for axis in axes:
        if template(axis.name)[1]:
            groups[template(axis.name)[0]].append((axis, np.flatnonzero(idle(p, axis))))
    for members in groups.values():
        shares = [len(units) / axis.size for axis, units in members]
        usual = float(np.median(shares))
        for (axis, units), share in zip(members, shares, strict=True) if len(members) >= _LEAST else ():
            if share > usual + d.limits.idle:
                kept = units[: axis.size - 1]
                fix = Fix(f"cut {len(kept)} idle units of {axis.name}",
                          lambda e, name=axis.name, kept=kept: e.cut_units(e.program.axes()[name].units(kept)),
                          edges=len(axis.consumers), keeps_function=True)  # fmt: skip
                yield Finding.of(p, KIND, Severity.WARNING, f"{len(units)} of {axis.size} units contribute nothing",
                                 axis.start, where=axis.name, expected=f"a share near the siblings' {usual:.0%}",
                                 got=f"{share:.0%}", fixes=(fix,),
                                 witness={"axis": axis.name, "units": units.tolist(), "siblings": usual})  # fmt: skip
