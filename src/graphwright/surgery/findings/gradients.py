"""Rules about gradients: blocked, vanishing or exploding gradients; losses that read probabilities as logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import log
from typing import TYPE_CHECKING

import numpy as np

from graphwright.graph import NodeId
from graphwright.ops import OPS, traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.editing.transaction import Transaction
from graphwright.program.gates import Gates
from graphwright.program.kinds import CONST, KINDS, PARAM, SOURCES, STATE
from graphwright.program.op_graph import Value
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity, bypassed, rewired
from graphwright.surgery.findings.wiring import Wiring, template
from graphwright.surgery.walks import flood, next_reader

if TYPE_CHECKING:
    from graphwright.program.program import Program


KIND = "blocked_gradient"


def blocked_gradient(d: Diagnosis) -> Iterator[Finding]:
    """Report trainable params without a differentiable path to the loss; with a probe also vanishing gradients."""
    yield from by_structure(d)
    if d.probe is not None and d.probe.loss is not None and d.program.valid:
        yield from _by_probe(d)


def roots(d: Diagnosis) -> list[int]:
    """Return the indices of the nodes at which backpropagation starts: the loss, or all floating outputs."""
    p, w = d.program, d.wiring
    if d.probe is not None and isinstance(d.probe.loss, str):
        name = d.probe.loss
        return [w.at[p.output(name).node if name in p.output_names() else p.node(name)]]
    return [w.at[v.node] for v in p.outputs() if v.node in w.at and p.specs(v.node)[v.port].dtype.is_float]


def trainable(p: Program) -> list[NodeId]:
    """Return the param nodes that an optimizer would train."""
    return [n for n in p.params() if p.attrs(n).get("trainable", True) and p.spec(n).dtype.is_float]


def learning(d: Diagnosis, starts: Sequence[int] | None = None) -> set[int]:
    """Return the indices of the nodes that gradients reach from `starts`, by default from the loss."""
    p, w = d.program, d.wiring
    return set(flood(roots(d) if starts is None else starts,
                     lambda i: [*_differentiated(p, w, i), *w.assigned(i)] if _open(p, w, i) else []))  # fmt: skip


def _open(p: Program, w: Wiring, i: int) -> bool:
    """Return whether a node passes a gradient on to its operands."""
    row = OPS.get(w.ops[i])
    if row is None:
        return w.ops[i] in SOURCES
    return row.passes_gradient(p.attrs(w.nodes[i]))


def _differentiated(p: Program, w: Wiring, i: int) -> list[int]:
    """Return the floating operands to which a node passes a gradient; one multiplied by a fixed 0 gets none."""
    node = w.nodes[i]
    values = p.operands(node)
    shut: set[int] = set()
    if traits(w.ops[i]).multiplies and len(values) == 2:
        shut = {1 - k for k, v in enumerate(values) if _frozen_zero(p, v.node) or _closed(p, node, v)}
    return [w.at[v.node] for k, v in enumerate(values) if k not in shut and p.specs(v.node)[v.port].dtype.is_float]


def _frozen_zero(p: Program, node: NodeId) -> bool:
    op = p.op(node)
    if (op == PARAM and p.attrs(node).get("trainable", True)) or op not in (PARAM, CONST):
        return False
    return p.spec(node).size == 1 and not p.weights.array(p.key(node)).to_numpy().any()


def _closed(p: Program, product: NodeId, gate: Value) -> bool:
    """Return whether the multiplication `product` has the factor `gate`, and this gate is fixed at 0."""
    if not traits(p.op(gate.node)).gates or product not in (gates := Gates(p)):
        return False
    return set(gates[product].states) == {"closed"}


def by_structure(d: Diagnosis, loss: str | None = None) -> Iterator[Finding]:
    """Report each node that blocks the gradients of trained weights. `loss` names the output that is the loss."""
    p, w = d.program, d.wiring
    starts = roots(d) if loss is None else [w.at[p.output(loss).node]]
    learns = learning(d, starts)
    ends = set(flood(starts, w.before.__getitem__))
    blocked: dict[NodeId, list[NodeId]] = defaultdict(list)
    for param in trainable(p):
        if w.at[param] in ends and w.at[param] not in learns:  # other rules report weights that no output reads
            blocked[w.nodes[_first_blocker(p, w, w.at[param], ends)]].append(param)
    for node, params in blocked.items():
        yield Finding.of(p, KIND, Severity.ERROR, f"no gradient passes, so {len(params)} trained weights get none",
                         node, *params, got=p.op(node), fixes=tuple(_fixes(p, node, params)),
                         witness={"blocker": p.path(node), "params": [p.path(n) for n in params]})  # fmt: skip


def _first_blocker(p: Program, w: Wiring, start: int, ends: set[int]) -> int:
    """Return the first node after the param `start` that blocks its gradient from the loss; `start` if no node does."""
    order, seen = [start], {start}
    for i in order:  # grows during iteration
        if i != start and not _open(p, w, i):
            return i
        for j in w.after[i]:
            if j in ends and j not in seen:
                if w.ops[j] not in KINDS and i not in _differentiated(p, w, j):
                    return j
                seen.add(j)
                order.append(j)
    return start


def _fixes(p: Program, node: NodeId, params: Sequence[NodeId]) -> Iterator[Fix]:
    row = OPS.get(p.op(node))
    if row is not None and row.stops_gradient(p.attrs(node)):
        yield bypassed(p, node, keeps=True)
    elif traits(p.op(node)).multiplies and any(_closed(p, node, v) for v in p.operands(node)):
        yield Fix(f"let the gate {p.path(node)} train", lambda e: e.set_gate(node, "soft"), edges=1)
    elif traits(p.op(node)).multiplies:
        gates = [v.node for v in p.operands(node) if _frozen_zero(p, v.node) and p.op(v.node) == PARAM]
        for gate in gates:
            yield Fix(f"let {p.path(gate)} train, so that it opens",
                      lambda e, gate=gate: e.set_attr(gate, trainable=True), edges=1, keeps_function=True)  # fmt: skip

    def freeze(e: Transaction) -> None:
        for param in params:
            e.set_attr(param, trainable=False)

    yield Fix(f"freeze {len(params)} weights that cannot learn", freeze, edges=1 + len(params), keeps_function=True)


# -- by a probe --------------------------------------------------------------------------------------------------------
def _by_probe(d: Diagnosis) -> Iterator[Finding]:
    """Report gradients that are zero, not finite or far below those of similar params; report dead ReLU units."""
    assert d.probe is not None
    p, w, learns = d.program, d.wiring, learning(d)
    params = [n for n in trainable(p) if w.at[n] in learns]
    norms = {v.node: float(np.linalg.norm(g)) for v, g in d.probe.gradients(p, [Value(n) for n in params]).items()}
    same_kind: dict[str, list[float]] = defaultdict(list)
    for node, norm in norms.items():
        same_kind[_role(p, node)].append(norm)
    silent, now = _silent(d), set(flood(roots(d), w.before.__getitem__))
    for node, norm in norms.items():
        median, at = float(np.median(same_kind[_role(p, node)])), w.at[node]
        if not np.isfinite(norm):
            what = "the gradient is not finite"
        elif norm == 0 or norm < d.limits.gradient * median:
            if at not in now or any(p.op(v.node) == STATE for n in p.consumers(node) for v in p.operands(n)):
                continue  # a weight that acts through a state often has no gradient in the first step
            if _cancelled(p, node) or silent.keys() & flood([at], w.after.__getitem__):
                continue
            what = "the gradient is zero" if norm == 0 else "the gradient is far below the median of its kind"
        else:
            continue
        witness = {"norm": norm if np.isfinite(norm) else str(norm), "median": median}
        yield Finding.of(p, KIND, Severity.WARNING, what, node, witness=witness)
    for i, units in silent.items():
        what = f"{len(units)} units are inactive on all rows of the probe"
        yield Finding.of(p, KIND, Severity.WARNING, what, w.nodes[i], witness={"units": units})


def _role(p: Program, node: NodeId) -> str:
    """Return a text that similar params share: the path with `*` for numbers, or without numbers the tensor rank."""
    name, numbers = template(p.path(node))
    return name if numbers else f"rank {len(p.spec(node).shape)}"


def _silent(d: Diagnosis) -> dict[int, list[int]]:
    """Map ReLU nodes with at least `limits.rows` probe rows to their units that are zero on every row."""
    assert d.probe is not None
    run, found = d.probe.run(d.program), {}
    for node in d.program.of_traits(rectifies=True):
        rows = run.values[Value(node)].to_numpy("float32") if Value(node) in run.values else np.zeros(0)
        if rows.ndim < 2:
            continue
        axis = -1 if rows.ndim <= 3 else 1  # the channel axis of images is 1
        rows = np.moveaxis(rows, axis, -1).reshape(-1, rows.shape[axis])
        units = np.flatnonzero(~rows.any(axis=0))
        if len(rows) >= d.limits.rows and len(units):
            found[d.wiring.at[node]] = units.tolist()
    return found


def _cancelled(p: Program, node: NodeId) -> bool:
    """Return whether the gradient of a bias is zero by construction.

    Softmax cancels a shift that all keys share (if there is no rotary embedding); batch norm cancels a bias before it.
    """

    def passes(reader: NodeId, port: int) -> bool:
        row = OPS.get(p.op(reader))
        if row is None or row.traits.attention or row.traits.batch_statistics:
            return False
        bias = row.traits.addend == port
        return row.view is not None or row.traits.convert or bias or row.traits.sums or row.traits.nary

    end, port = next_reader(p, node, passes)
    row = traits(p.op(end))
    return (row.attention and port == 1) or (row.batch_statistics and port == 0)


_LEAST_ROWS = 8


def gain(d: Diagnosis) -> Iterator[Finding]:
    """Report linear chains of extreme gain; with a probe also extreme gradients or rank in the residual stream."""
    if not d.program.valid:
        return
    if d.probe is not None:
        yield from _collapse(d)
        yield from _gradients(d)
    yield from _chains(d)


def trunk(p: Program) -> list[NodeId]:
    """Return the junctions of the most frequent spec, in order: in a transformer, the residual stream."""
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
    series = {p.path(v): float(np.sqrt((slope**2).mean())) for v, slope in slopes.items()}
    series = {path: x for path, x in series.items() if np.isfinite(x) and x > 0}
    if len(series) > 1 and max(series.values()) > d.limits.gain * min(series.values()):
        worst = p.node(min(series, key=series.__getitem__))
        yield Finding.of(p, "gain", Severity.WARNING, "gradients change by orders of magnitude along the trunk", worst,
                         got=f"{max(series.values()) / min(series.values()):.3g}",
                         expected=f"at most {d.limits.gain:g}", witness={"series": series})  # fmt: skip


def _collapse(d: Diagnosis) -> Iterator[Finding]:
    """Report a small stable rank ‖X‖_F² / ‖X‖₂² of tokens' representations at the end of the residual stream."""
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
            what = "the representations of all tokens have collapsed to one direction"
            yield Finding.of(p, "gain", Severity.WARNING, what, node, witness={"stable_rank": rank}, got=f"{rank:.3g}",
                             expected=f"a stable rank of {d.limits.stable_rank:g} or more")  # fmt: skip


def _chains(d: Diagnosis) -> Iterator[Finding]:
    """Report chains of linear maps, without norms in between, whose product of spectral norms is extreme."""
    p = d.program
    after = {n: _next(p, n) for n in p.of_traits(contracts="out_in")}
    inner = set(after.values())
    for start in [n for n in after if n not in inner]:
        chain = flood([start], lambda n: [m for m in [after[n]] if m is not None])
        params = [n for n in (origin(p, p.operands(n)[1]) for n in chain) if n is not None]
        if len(chain) < 2 or len(params) < len(chain):
            continue
        norms = [float(np.linalg.norm(p.weights.array(p.key(n)).to_numpy("float64"), 2)) for n in params]
        if not all(np.isfinite(norms)) or not all(norms):
            continue
        total = sum(map(log, norms))
        if abs(total) > log(d.limits.gain):
            each = float(np.exp(-total / len(params)))
            fix = Fix(f"scale each of the {len(params)} matrices by {each:.3g}",
                      lambda e, params=params, each=each: _scale(e, params, each), edges=len(params))  # fmt: skip
            yield Finding.of(p, "gain", Severity.WARNING, "a chain without norms scales by orders of magnitude", *chain,
                             expected=f"1/{d.limits.gain:g} to {d.limits.gain:g}", got=f"{np.exp(total):.3g}",
                             witness={"series": {p.path(n): x for n, x in zip(chain, norms, strict=True)}},
                             fixes=(fix,))  # fmt: skip


def _scale(e: Transaction, params: list[NodeId], factor: float) -> None:
    for param in dict.fromkeys(params):
        e.set_weight(param, lambda values: values * factor)


def _next(p: Program, node: NodeId) -> NodeId | None:
    """Return the next linear map if it is the only reader of `node`, directly or through elementwise ops; else None."""

    def passes(reader: NodeId, port: int) -> bool:
        row = OPS.get(p.op(reader))
        if row is None or row.arity != 1 or row.traits.normalises or row.traits.contracts == "out_in":
            return False
        return row.traits.elementwise or row.view is not None

    end, port = next_reader(p, node, passes)
    return end if port == 0 and traits(p.op(end)).contracts == "out_in" else None


def double_softmax(d: Diagnosis) -> Iterator[Finding]:
    """Report a softmax before `cross_entropy`, and a sigmoid before `bce_with_logits`.

    Logits limited to [0, 1] keep the loss of K classes above ln(1 + (K - 1)/e), and flatten its gradient.
    """
    p, w = d.program, d.wiring
    for i, node in enumerate(w.nodes):
        own = traits(w.ops[i])
        scores = p.in_edges(node)[0] if own.loss and own.applies and p.in_edges(node) else None
        if scores is None or p.edge_port(scores) != 0:
            continue
        squash = p.graph.source(scores)
        if p.op(squash) == own.applies and p.operands(squash):
            what = f"the loss takes logits, but reads the result of a {p.op(squash)}"
            yield Finding.of(p, "double_softmax", Severity.WARNING, what, node, squash, edges=(scores,),
                             witness={"loss": p.path(node), "from": p.path(squash)},
                             fixes=(rewired(p, scores, p.operands(squash)[0], keeps=False),))  # fmt: skip
