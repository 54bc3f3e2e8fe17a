"""Plant one defect of a given kind at a random position of a program, for tests of diagnosis.

A defect is one edit made with `check=False`; `plant` returns the node or weight that it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from graphwright.array import Spec
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import traits
from graphwright.program import Program, Value
from graphwright.program.editing.replace import redirect
from graphwright.program.kinds import INPUT, KINDS
from graphwright.surgery.findings.blocks import around
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Limits
from graphwright.surgery.findings.gradients import learning, trainable
from graphwright.surgery.findings.heads import attention_parts
from graphwright.surgery.findings.wiring import Wiring, least_arity, siblings
from graphwright.surgery.walks import flood

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planted:
    """A planted defect: its kind, and the path of a node or the key of a weight that it affects."""

    kind: str
    element: str


def plant(p: Program, kind: str, seed: int = 0) -> Planted:
    """Plant a defect of a kind, e.g. `cycle` or `dead_end`, at a random position, as one edit that undo reverts.

    Raises: UsageError for an unknown kind, an open edit, or a program without a suitable position.
    """
    if kind not in _PLANTERS:
        raise UsageError("unknown kind of defect", got=kind, expected=", ".join(_PLANTERS))
    if p.history.open is not None:
        raise UsageError("cannot plant a defect while an edit is open", where=p.name, fix="leave the with-block first")
    element = _PLANTERS[kind](p, np.random.default_rng(seed))
    if element is None:
        raise UsageError("the program has no position for this defect", where=p.name, got=kind)
    return Planted(kind, element)


def _edit(p: Program, kind: str):  # the transaction's type says it
    return p.edit(f"plant {kind}", tool="graphwright.testing.defects", check=False)


def _shuffled(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    return [items[i] for i in rng.permutation(len(items))]


def _edges(p: Program, rng: np.random.Generator) -> Iterator[tuple[NodeId, EdgeId]]:
    """Yield pairs (op node, one of its operand edges) in random order, for nodes whose first result is floating."""
    for node in _shuffled(rng, [v.node for v in _values(p)]):
        for edge in _shuffled(rng, list(p.in_edges(node))):
            yield node, edge


def _values(p: Program) -> list[Value]:
    """Return the first result of each op if it is floating, in order of creation."""
    return [Value(n) for n in sorted(p.nodes(), key=p.seq) if p.op(n) not in KINDS and p.spec(n).dtype.is_float]


def _isolated(p: Program, rng: np.random.Generator) -> str | None:
    value = _shuffled(rng, _values(p))[0]
    name = p.free_name(f"{p.path(value)}.isolated")
    with _edit(p, "isolated") as e:
        node = e.add("junction", value, name=name)
        e.cut(p.in_edges(node)[0])
    return name


def _dead_end(p: Program, rng: np.random.Generator) -> str | None:
    value = _shuffled(rng, _values(p))[0]
    base = p.path(value)
    with _edit(p, "dead_end") as e:
        here = value.node
        for k in range(int(rng.integers(1, 4))):
            here = e.add(("tanh", "sigmoid", "neg")[k], here, name=p.free_name(f"{base}.idle{k}"))
        return p.path(here)


def _orphan_source(p: Program, rng: np.random.Generator) -> str | None:
    for value in _shuffled(rng, _values(p)):
        edges = [] if p.is_junction(value.node) else p.in_edges(value.node)[: least_arity(p.op(value.node))]
        if edges:
            edge = edges[int(rng.integers(len(edges)))]
            with _edit(p, "orphan_source") as e:
                e.cut(edge)
            return p.path(value)
    return None


def _trunk(p: Program) -> list[NodeId]:
    """Return the nodes with a floating result that are on every path from the inputs to the outputs, except outputs."""
    w = Wiring(p)
    inputs = [i for i, op in enumerate(w.ops) if op == INPUT]
    found = []
    for i in range(len(w.nodes)):
        if w.ops[i] in KINDS or not p.spec(w.nodes[i]).dtype.is_float or i in w.outputs:
            continue
        around: Callable[[int], list[int]] = lambda j, i=i: [k for k in w.after[j] if k != i]  # noqa: E731
        if not w.outputs.intersection(flood(inputs, around)):
            found.append(w.nodes[i])
    return found


def _unreachable(p: Program, rng: np.random.Generator) -> str | None:
    for node in _shuffled(rng, _trunk(p)):
        name = p.free_name(f"{p.path(node)}.blank")
        with _edit(p, "unreachable") as e:
            blank = e.add("full_like", node, name=name, value=0.5)
            redirect(e, {Value(node): Value(blank)}, outputs=False)
        return p.path(node)
    return None


def _components(p: Program, rng: np.random.Generator) -> str | None:
    name = p.free_name(f"island{int(rng.integers(100))}")
    size = int(rng.integers(1, 5))
    with _edit(p, "components") as e:
        state = e.state(f"{name}.state", np.zeros(size, np.float32))
        here = e.add("tanh", state, name=f"{name}.tanh")
        if rng.integers(2):
            here = e.add("neg", here, name=f"{name}.neg")
        e.assign(state, here)
    return f"{name}.tanh"


def _cycle(p: Program, rng: np.random.Generator) -> str | None:
    w = Wiring(p)
    for junction in _shuffled(rng, list(p.junctions()) or [v.node for v in _values(p)]):
        later = [w.nodes[i] for i in flood([w.at[junction]], w.after.__getitem__)]
        same_spec = [n for n in later if p.op(n) not in KINDS and p.specs(n)[0] == p.spec(junction)]
        if p.is_junction(junction) and same_spec and p.graph.in_degree(junction):
            with _edit(p, "cycle") as e:
                e.connect(same_spec[int(rng.integers(len(same_spec)))], junction)
            return p.path(junction)
        edges = [e for e in p.in_edges(junction) if p.specs(p.edge_value(e).node)[0] == p.spec(junction)]
        if edges and len(same_spec) > 1:
            with _edit(p, "cycle") as e:
                e.rewire(edges[0], same_spec[1 + int(rng.integers(len(same_spec) - 1))])
            return p.path(junction)
    return None


def _blocked_gradient(p: Program, rng: np.random.Generator) -> str | None:
    """Insert a `stop_gradient` on an edge such that a weight loses its gradient; return its path, or None."""
    w = Wiring(p)
    learns = {w.nodes[i] for i in learning(Diagnosis(p, None, Limits(), None))}
    wanted = [n for n in trainable(p) if n in learns]
    for node, edge in _edges(p, rng):
        if not p.specs(p.edge_value(edge).node)[0].dtype.is_float or p.op(p.graph.source(edge)) in KINDS:
            continue
        trial = p.fork()
        name = p.free_name(f"{p.path(node)}.stopped")
        with trial.edit("try") as e:
            e.insert(edge, "stop_gradient", name=name)
        reached = Diagnosis(trial, None, Limits(), None)
        if any(reached.wiring.at[n] not in learning(reached) for n in wanted):
            with _edit(p, "blocked_gradient") as e:
                e.insert(edge, "stop_gradient", name=name)
            return name
    return None


def _missing_residual(p: Program, rng: np.random.Generator) -> str | None:
    for junction in _shuffled(rng, list(p.junctions())):
        found = around(p, junction)
        if found is None or not any(around(p, s) for s in siblings(p, junction)):
            continue
        edge = next(e for e in p.in_edges(junction) if p.graph.source(e) == found[0])
        with _edit(p, "missing_residual") as e:
            e.cut(edge)
        return p.path(junction)
    return None


def _unbalanced_heads(p: Program, rng: np.random.Generator) -> str | None:
    """Scale weights and biases of one group of heads: those of q by f and of k by 1/f, or of o by f and of v by 1/f.

    f is 64 or 1/64; the program still computes the same function. Returns: the attention's path, None if impossible.
    """
    for node in _shuffled(rng, list(p.of_traits(attention=True))):
        parts = attention_parts(p, node)
        names = [("q", "k"), ("o", "v")][int(rng.integers(2))]
        if not set(names) <= parts.keys():
            continue
        one, shared = parts[names[0]], parts[names[1]]
        group, each = int(rng.integers(shared.heads)), one.heads // shared.heads
        factor = 2.0 ** (6 if rng.integers(2) else -6)
        whole = range(group * each, (group + 1) * each)
        with _edit(p, "unbalanced_heads") as e:
            for part, heads, by in ((one, whole, factor), (shared, [group], 1 / factor)):
                for param, dim in ((part.weight, part.dim), (part.bias, 0)):
                    if param is not None:
                        e.set_weight(param, partial(_scaled, part=part, heads=heads, by=by, dim=dim))
        return p.path(node)
    return None


def _scaled(values: np.ndarray, part, heads, by: float, dim: int) -> np.ndarray:
    for head in heads:
        np.moveaxis(values, dim, 0)[part.slice(head)] *= by
    return values


def _interface(p: Program, rng: np.random.Generator) -> str | None:
    """Insert a cast or slice on an edge so that validation reports one new mismatch; return the node there, or None."""
    known = p.validate().mismatches
    for node, edge in _edges(p, rng):
        spec = p.spec(p.edge_value(edge))
        if not spec.dtype.is_float or p.edge_value(edge).port:
            continue
        name = p.free_name(f"{p.path(node)}.misfit")
        op, attrs = _misfit(spec, bool(rng.integers(2)))
        trial = p.fork()
        with _edit(trial, "interface") as e:
            e.insert(edge, op, name=name, **attrs)
        fresh = [m for m in trial.validate().mismatches if m not in known]
        if len(fresh) == 1 and fresh[0].where == p.path(node):
            with _edit(p, "interface") as e:
                e.insert(edge, op, name=name, **attrs)
            return p.path(node)
    return None


def _misfit(spec: Spec, narrow: bool) -> tuple[str, dict[str, Any]]:
    """Return (op, attributes): a slice that drops the last of several channels if `narrow`, else a cast."""
    width = spec.shape[-1] if len(spec.shape) else 0
    if narrow and isinstance(width, int) and width > 1:
        return "slice", {"axis": -1, "start": 0, "size": width - 1}
    return "cast", {"dtype": "float32" if spec.dtype.name == "float16" else "float16"}


def _bottleneck(p: Program, rng: np.random.Generator) -> str | None:
    """Project a value on all paths to two channels and back; return the first projection's path, None if impossible."""
    for node in _shuffled(rng, _trunk(p)):
        spec = p.spec(node)
        width = spec.shape[-1] if len(spec.shape) in (1, 2, 3) else 0
        if not isinstance(width, int) or width < 16 or p.assigns(node):
            continue
        base = p.free_name(f"{p.path(node)}.narrow")
        with _edit(p, "bottleneck") as e:
            down = e.param(f"{base}.down.weight", rng.normal(size=(2, width)).astype(np.float32))
            up = e.param(f"{base}.up.weight", rng.normal(size=(width, 2)).astype(np.float32))
            here = e.add("linear", node, down, name=f"{base}.down")
            back = e.add("linear", here, up, name=f"{base}.up")
            redirect(e, {Value(node): Value(back)}, skip=[here], outputs=False)
        return f"{base}.down"
    return None


def _tensor(p: Program, rng: np.random.Generator) -> str | None:
    params = [n for n in p.params() if p.spec(n).dtype.is_float and p.spec(n).size]
    if not params:
        return None
    node = _shuffled(rng, params)[0]
    index, value = int(rng.integers(p.spec(node).size)), (np.nan, np.inf, -np.inf)[int(rng.integers(3))]

    def spoil(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[index] = value
        return values

    with _edit(p, "tensor") as e:
        e.set_weight(node, spoil)
    return p.path(node)


def _unlike_siblings(p: Program, rng: np.random.Generator) -> str | None:
    """Change one of three or more siblings: an attribute, or the scale of a matrix."""
    norms = {n for n in p.nodes() if traits(p.op(n)).normalises and "eps" in p.attrs(n) and len(siblings(p, n)) > 1}
    causal = [n for n in p.of_traits(attention=True) if p.attrs(n).get("causal") and len(siblings(p, n)) > 1]
    stored = [
        n for n in p.params() if len(p.spec(n).shape) == 2 and p.spec(n).dtype.is_float and len(siblings(p, n)) > 1
    ]
    choices: list[tuple[NodeId, Callable[[Any, NodeId], object]]] = [
        *((n, lambda e, n: e.set_attr(n, eps=0.1)) for n in norms),
        *((n, lambda e, n: e.set_attr(n, causal=False)) for n in causal),
        *((n, lambda e, n: e.set_weight(n, lambda values: 12 * values)) for n in stored),
    ]
    if not choices:
        return None
    node, change = _shuffled(rng, sorted(choices, key=lambda pair: p.path(pair[0])))[0]
    with _edit(p, "unlike_siblings") as e:
        change(e, node)
    return p.path(node)


_PLANTERS: dict[str, Callable[[Program, np.random.Generator], str | None]] = {
    planter.__name__[1:]: planter
    for planter in (_isolated, _dead_end, _orphan_source, _unreachable, _components, _cycle, _blocked_gradient,
                    _missing_residual, _unbalanced_heads, _interface, _bottleneck, _tensor,
                    _unlike_siblings)
}  # fmt: skip
"""Kind of defect -> function that plants one: the path of a node or key of a weight, or None without a position."""
KINDS_OF_DEFECT = tuple(_PLANTERS)
