"""Rules about weights (not finite, degenerate, unread, in contradiction to the config) and bottleneck layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from graphwright.graph import NodeId
from graphwright.graph.analysis import dominators
from graphwright.models.loading import EMBEDDING, TIED_HEAD
from graphwright.models.metrics import non_finite
from graphwright.models.metrics import validate as validate_model
from graphwright.ops import traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.kinds import CONST, PARAM, STORED
from graphwright.program.op_graph import Value
from graphwright.program.selection import matches
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity, grown, removed, rewired
from graphwright.surgery.findings.gradients import roots

if TYPE_CHECKING:
    from graphwright.program.program import Program


def tensor(d: Diagnosis) -> Iterator[Finding]:
    """Report weights that nothing reads, defective values, and contradictions to the model's config."""
    yield from _unused(d)
    yield from _values(d)
    yield from _contradictions(d)


def _unused(d: Diagnosis) -> Iterator[Finding]:
    p, w = d.program, d.wiring
    for i, node in enumerate(w.nodes):
        if w.ops[i] in STORED and w.unread(i) and node not in d.claimed:
            yield Finding.of(p, "tensor", Severity.ERROR, "nothing reads the weight", node,
                             fixes=(removed(p, [node], keeps=True),), witness={"key": p.key(node)})  # fmt: skip
    for mismatch in d.mismatches:
        if mismatch.kind == "name":
            yield Finding("tensor", mismatch.where, mismatch.what, severity=Severity.ERROR)


def _values(d: Diagnosis) -> Iterator[Finding]:
    """Report weights with NaN or infinity, and trained matrices that are zero or have nearly dependent rows."""
    p = d.program
    bad = set()
    for key, count, first in non_finite(p):
        bad.add(key)
        yield Finding.of(p, "tensor", Severity.ERROR, f"{count} values are not finite", p.readers(key)[0],
                         got=f"the first at {list(first)}", fixes=(*restore(d, key, part=True), _clamp(key)),
                         witness={"key": key, "first": list(first), "count": count})  # fmt: skip
    added, scales = _added(d.original), norm_scales(p)
    for node in p.params():
        key, spec = p.key(node), p.spec(node)
        if key in bad or not spec.dtype.is_float or min(spec.sizes, default=0) == 0:
            continue
        if len(spec.shape) < 2 and node not in scales:  # a bias may be zero
            continue
        values = p.weights.array(key).to_numpy("float32").reshape(spec.sizes[0], -1)
        if not values.any():
            if key not in added:  # a new matrix starts at zero, so that the function stays the same
                yield Finding.of(p, "tensor", Severity.WARNING, "all values are zero", node,
                                 fixes=restore(d, key), witness={"key": key})  # fmt: skip
            continue
        used = values[values.any(axis=1)][:, values.any(axis=0)]  # zero units are ignored here
        least = d.limits.rank * min(used.shape)
        if least >= 1 and (rank := effective_rank(used)) < least:
            yield Finding.of(p, "tensor", Severity.WARNING, "the rows are nearly dependent", node,
                             expected=f"an effective rank of {least:.1f} or more", got=f"{rank:.2f}",
                             witness={"key": key, "effective_rank": round(rank, 4)},
                             fixes=restore(d, key))  # fmt: skip


def norm_scales(p: Program) -> set[NodeId]:
    """Return the params that scale the result of a norm. A zero in such a param blocks a channel after the norm."""
    if not p.valid:
        return set()
    ends = ((node, c) for node, c in p.axes().solution.corrections if c.offset == 0)
    found = (origin(p, p.operands(node)[c.port]) for node, c in ends)
    return {n for n in found if n is not None and p.op(n) == PARAM}


def effective_rank(matrix: np.ndarray) -> float:
    """exp(H(s / Σ s)) for singular values s and entropy H. Source: Roy and Vetterli 2007, "The effective rank"."""
    small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = small.astype(np.float64)
    s = np.sqrt(np.clip(np.linalg.eigvalsh(wide @ wide.T), 0, None))
    share = s[s > 0] / s.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def _added(p: Program) -> set[str]:
    """Return the keys of params that an edit in the journal added and whose value no later edit set."""
    keys: set[str] = set()
    for record in (record for entry in p.journal for record in entry.edits):
        if record["edit"] == "AddNode" and record["op"] == PARAM:
            keys.add(record["attrs"]["key"])
        elif record["edit"] == "SetWeight":
            keys.discard(record["key"])
    return keys


def restore(d: Diagnosis, key: str, part: bool = False) -> tuple[Fix, ...]:
    """Return (fix,) to restore a weight (with `part` its non-finite entries) from the checkpoint; () if impossible."""
    if d.model is None or d.model.checkpoint is None:
        return ()
    source = d.model.original.weights
    if not source.has_key(key) or source[key].spec != d.program.weights[key].spec:
        return ()
    array, current = source.array(key), d.program.weights.array(key)
    values = array.to_numpy("float32")
    if not np.isfinite(values).all() or np.array_equal(array.to_numpy(bits=True), current.to_numpy(bits=True)):
        return ()
    if part:
        what = f"restore the values of {key} that are not finite from the checkpoint"
        return (Fix(what, lambda e: e.set_weight(key, lambda now: np.where(np.isfinite(now), now, values))),)
    return (Fix(f"restore {key} from the checkpoint", lambda e: e.set_weight(key, values)),)


def _clamp(key: str) -> Fix:
    def finite(values: np.ndarray) -> np.ndarray:
        known = values[np.isfinite(values)]
        top = float(np.abs(known).max()) if known.size else 0.0
        return np.nan_to_num(values, nan=0.0, posinf=top, neginf=-top)

    what = f"clamp {key}: NaN to 0, infinity to the largest finite entry"
    return Fix(what, lambda e: e.set_weight(key, finite), edges=1)


def _contradictions(d: Diagnosis) -> Iterator[Finding]:
    """Report weights that the config requires and the program lacks, and weights for which the config has no use."""
    model, p = d.model, d.original
    if model is None:
        return
    for mismatch in (m for m in validate_model(model).mismatches if m.kind == "tied_mismatch"):
        yield Finding("tensor", mismatch.where, mismatch.what, None, mismatch.expected, mismatch.got,
                      severity=Severity.ERROR)  # fmt: skip
    present, edits = {p.key(n) for n in p.params()}, [record for entry in p.journal for record in entry.edits]
    stored = present | {p.key(n) for n in p.of_kind(CONST)}  # buffers of an imported class
    added = {record["attrs"]["key"] for record in edits if record["edit"] == "AddNode" and "key" in record["attrs"]}
    gone = {record["path"] for record in edits if record["edit"] == "RemoveNode"}
    expected = {key: path for path, key in model.keys.items()}
    for key, path in expected.items():
        if key not in stored and path not in gone:
            yield Finding("tensor", key, "the config requires this weight, but it is missing", severity=Severity.ERROR)
    for key in sorted(present - expected.keys() - added):
        yield Finding.of(p, "tensor", Severity.ERROR, "the config does not know this weight", p.readers(key)[0],
                         witness={"key": key})  # fmt: skip
    yield from _tie(d)


def _tie(d: Diagnosis) -> Iterator[Finding]:
    """Report an output head that does not share the embedding's weight although the config ties the two."""
    p = d.program
    head, path = TIED_HEAD.removesuffix(".weight"), {p.path(n): n for n in p.nodes()}
    if d.model is None or not getattr(d.model.dims, "tied", False) or head not in path or EMBEDDING not in path:
        return
    edge = next((e for e in p.in_edges(path[head]) if p.edge_port(e) == 1), None)
    read = None if edge is None else origin(p, p.edge_value(edge))
    if edge is None or read is None or read == path[EMBEDDING]:
        return
    source = path[EMBEDDING]
    while p.graph.source(edge) != read:  # after a cast
        edge = p.in_edges(p.graph.source(edge))[0]
    fixes = ()
    if p.spec(source) == p.spec(read):
        one, two = (p.weights.array(p.key(n)).to_numpy(bits=True) for n in (source, read))
        fixes = (rewired(p, edge, p.value(source), keeps=bool(np.array_equal(one, two))),)
    what = "the config ties it to the embedding, but it is a separate weight"
    yield Finding.of(p, "tensor", Severity.ERROR, what, read, path[head], edges=(edge,), expected=EMBEDDING,
                     got=p.path(read), fixes=fixes)  # fmt: skip


def bottleneck(d: Diagnosis) -> Iterator[Finding]:
    """Report nodes through which all paths lead, with far fewer features than the nodes before and after them."""
    p, w = d.program, d.wiring
    seen: set[NodeId] = set()
    for start in p.inputs() if p.valid else ():
        above = dominators(p.graph, start)
        for end in roots(d):
            chain: list[tuple[int, NodeId]] = []
            node = w.nodes[end] if w.nodes[end] in above else None
            while node is not None:
                chain += [(width, node)] if (width := features(p, node)) else []
                node = above.get(node)
            steps = [(width, [n for _, n in run][-1]) for width, run in groupby(chain, key=lambda step: step[0])]
            for later, (width, node), before in zip(steps, steps[1:], steps[2:], strict=False):
                least = d.limits.width * min(later[0], before[0])
                declared = any(matches(pattern, p.path(node)) for pattern in d.limits.declared)
                if width < least and node not in seen and not declared:
                    seen.add(node)
                    yield Finding.of(p, "bottleneck", Severity.INFO, f"all information passes through {width} features",
                                     node, before[1], later[1], expected=f"{ceil(least)} or more", got=str(width),
                                     witness={"widths": [before[0], width, later[0]]},
                                     fixes=_widen(p, node, ceil(least) - width))  # fmt: skip


def features(p: Program, node: NodeId) -> int:
    """Return the number of features of a floating value: the size of its last axis, or of axis 1 after convolutions.

    Return 0 for values without a feature axis, such as attention heads, and for named sizes.
    """
    specs = p.specs(node)
    if len(specs) != 1 or not specs[0].dtype.is_float or len(specs[0].shape) < 2:
        return 0
    axis = _axis(p, node)
    size = 0 if axis is None else specs[0].shape[axis]
    return size if isinstance(size, int) else 0


def _axis(p: Program, node: NodeId) -> int | None:
    rank = len(p.spec(node).shape)
    return rank - 1 if rank < 4 else 1 if traits(p.op(node)).channels_first else None


def _widen(p: Program, node: NodeId, more: int) -> tuple[Fix, ...]:
    """Return (fix,) to grow a node's feature axis by `more` units; () if the axis cannot grow."""
    dim = _axis(p, node)
    for group in p.axes().values():
        if any(m.value == Value(node) and m.dim == dim for m in group.members) and not group.mixed:
            return grown(group, group.size + more)
    return ()
