"""The difference of two programs: nodes, edges, attributes and outputs by path, weights by checkpoint key."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.errors import UsageError
from graphwright.program.hashing import encode_attrs
from graphwright.program.op_graph import OpGraph
from graphwright.report import Report, listed, plain

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.graph import NodeId
    from graphwright.patterns import Pattern
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

_PRINTED = 10
"""Number of weights that are printed, those with the largest difference first."""
_CHUNK = 1 << 20  # elements compared at once in float64


@dataclass(frozen=True, slots=True)
class NodeChange(Report):
    """A node that differs: `facts` maps `op`, `specs`, `operands` and `attrs.<name>` to (before, after)."""

    path: str
    facts: dict[str, tuple[Any, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the path and the facts."""
        return {"path": self.path, **plain(self.facts)}


@dataclass(frozen=True, slots=True)
class WeightChange(Report):
    """A weight of both programs whose bytes differ.

    Attributes:
        before, after: specs; if the shapes differ, the other fields are None.
        max_abs: largest |after - before|.
        relative: ‖after - before‖₂ / ‖before‖₂.
        cosine: cosine similarity of the two as flat vectors.
    """

    key: str
    before: str
    after: str
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None


Pair = tuple[int, int, int]
"""An edge of a pattern: (plane, query block, key block)."""


@dataclass(frozen=True, slots=True)
class PatternDiff(Report):
    """An attention pattern of both programs that differs.

    Attributes:
        added, removed: edges that only one of the two has.
        changed: edges of both that allow other pairs of tokens, or have another gate.
        facts: dict from `tokens`, `block`, ... to (before, after); if block or planes differ, edges are not compared.
    """

    key: str
    added: tuple[Pair, ...] = ()
    removed: tuple[Pair, ...] = ()
    changed: tuple[Pair, ...] = ()
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        facts = [f"{name} {a} -> {b}" for name, (a, b) in self.facts.items()]
        kinds = (("+", self.added), ("-", self.removed), ("~", self.changed))
        return ", ".join([*facts, *(f"{sign}{len(pairs)} edges ({_shown(pairs)})" for sign, pairs in kinds if pairs)])


def _shown(pairs: tuple[Pair, ...]) -> str:
    """Return the first pairs as `query <- key` with their planes."""
    planes = any(plane for plane, _, _ in pairs)
    found = [f"{q} <- {k}" + (f" in plane {plane}" if planes else "") for plane, q, k in pairs[:3]]
    return ", ".join([*found, *(["..."] if len(pairs) > 3 else [])])


@dataclass(frozen=True, slots=True, repr=False)
class ProgramDiff(Report):
    """Result of `program.diff(other)`, as the change from `other` to `program`.

    Attributes:
        added, removed, changed: nodes by path; renamed nodes have their new path.
        renamed: old path -> new path, of nodes with the same handle in both.
        edges_added, edges_removed: `source.port -> target.port`; edges into a junction have `*` for a port.
        outputs: name -> (value before, value after) of outputs that differ; None where the output is missing.
        weights: weights whose bytes differ; missing: keys that only `other` has; extra: keys that only `program` has.
        equal: number of weights with equal bytes.
        resized: axis -> (size before, size after), for axes of both programs.
        patterns: attention patterns of both programs whose edges differ.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: dict[str, str]
    changed: tuple[NodeChange, ...]
    edges_added: tuple[str, ...]
    edges_removed: tuple[str, ...]
    outputs: dict[str, tuple[str | None, str | None]]
    weights: tuple[WeightChange, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    equal: int
    resized: dict[str, tuple[int, int]] = field(default_factory=dict)
    patterns: tuple[PatternDiff, ...] = ()
    FIGURES: ClassVar = ("identical",)

    @property
    def identical(self) -> bool:
        """True if the two programs are equal in structure and in every byte."""
        return not any(getattr(self, name) for name in self.__slots__ if name not in ("equal", "resized"))

    def _text(self) -> str:
        if self.identical:
            return f"identical ({self.equal} weights)"
        kinds = (
            [f"+ {path}" for path in self.added],
            [f"- {path}" for path in self.removed],
            [f"~ axis {name}: {before} -> {after}" for name, (before, after) in self.resized.items()],
            [f"~ {old} was renamed to {new}" for old, new in self.renamed.items()],
            [f"~ {c.path}: {name} {a} -> {b}" for c in self.changed for name, (a, b) in c.facts.items()],
            [f"+ edge {e}" for e in self.edges_added],
            [f"- edge {e}" for e in self.edges_removed],
            [f"~ output {name}: {a} -> {b}" for name, (a, b) in self.outputs.items()],
            [f"+ weight {key}" for key in self.extra],
            [f"- weight {key}" for key in self.missing],
            [f"~ pattern {each.key}: {each}" for each in self.patterns],
        )
        lines = [line for found in kinds for line in listed(found)]
        for w in sorted(self.weights, key=lambda w: -(w.relative if w.relative is not None else math.inf))[:_PRINTED]:
            line = f"~ weight {w.key}: " + (f"{w.before} -> {w.after} " if w.before != w.after else "")
            if w.max_abs is not None:
                line += f"max |d| {w.max_abs:.3g}, relative {w.relative:.3g}, cosine {w.cosine:.6f}"
            lines.append(line.rstrip())
        if len(self.weights) > _PRINTED:
            lines.append(f"... {len(self.weights) - _PRINTED} more weights with smaller differences")
        return "\n".join(lines)


def diff(p: Program, other: Program) -> ProgramDiff:
    """Return the change from `other` to this program. A weight that both store in one shared array is not read."""
    if not isinstance(other, OpGraph):
        raise UsageError("the object to compare with is not a program", got=repr(other)[:80], expected="a Program")
    renamed = renames(p, other)
    here, there = _paths(p, {}), _paths(other, renamed)
    common = [path for path in there if path in here]
    facts = {path: _facts(p, here[path], other, there[path], renamed) for path in common}
    new, old = _edges(p, {}), _edges(other, renamed)
    after, before = _outputs(p, {}), _outputs(other, renamed)
    outputs: dict[str, tuple[str | None, str | None]] = {
        n: (before.get(n), after.get(n)) for n in {**before, **after} if before.get(n) != after.get(n)
    }
    if not outputs and list(before) != list(after):
        outputs = {"(order)": (", ".join(before), ", ".join(after))}
    own, theirs = p.patterns, other.patterns
    shared = [key for key in other.weights if p.weights.has_key(key) and key not in own and key not in theirs]
    both = [key for key in theirs if key in own and p.weights.digest(key) != other.weights.digest(key)]
    compared = [_compare(key, p, other) for key in shared]
    return ProgramDiff(
        added=tuple(path for path in here if path not in there),
        removed=tuple(path for path in there if path not in here),
        renamed=renamed,
        changed=tuple(NodeChange(path, found) for path, found in facts.items() if found),
        edges_added=tuple((new - old).elements()),
        edges_removed=tuple((old - new).elements()),
        outputs=outputs,
        weights=tuple(w for w in compared if w is not None),
        missing=tuple(k for k in other.weights if not p.weights.has_key(k)),
        extra=tuple(k for k in p.weights if not other.weights.has_key(k)),
        equal=compared.count(None),
        patterns=tuple(_pattern_diff(key, own[key], theirs[key]) for key in both),
        resized=_resized(p, other) if any(w is not None and w.before != w.after for w in compared) else {},
    )


def _pattern_diff(key: str, now: Pattern, before: Pattern) -> PatternDiff:
    names = ("tokens", "block", "planes", "q_start", "causal", "base")
    facts = {n: (getattr(before, n), getattr(now, n)) for n in names if getattr(before, n) != getattr(now, n)}
    if facts.keys() & {"block", "planes"}:
        return PatternDiff(key, facts=facts)
    found = before.diff(now)
    added, removed, changed = (tuple(map(tuple, rows.tolist())) for rows in (found.added, found.removed, found.changed))
    return PatternDiff(key, added, removed, changed, facts)


def _resized(p: Program, other: Program) -> dict[str, tuple[int, int]]:
    """Map each axis whose sizes differ to (size before, size after); empty if a program is invalid."""
    try:
        now, before = p.axes(), other.axes()
    except UsageError:
        return {}
    sizes = {name: (before[name].size, now[name].size) for name in before if name in now}
    return {name: pair for name, pair in sizes.items() if pair[0] != pair[1]}


def renames(p: Program, other: Program) -> dict[str, str]:
    """Map the path in `other` to the path in `p` for each node renamed between two states of one program.

    Handles identify nodes only within one history. So the result is empty unless most common paths have the same handle
    in both programs. A node counts as renamed only if its op, and its attributes or specs, are the same in both.
    """
    handles, others = ({q.path(n): n for n in q.nodes()} for q in (p, other))
    common = handles.keys() & others.keys()
    if 2 * sum(handles[path] == others[path] for path in common) <= len(common):
        return {}
    now = {n: path for path, n in handles.items() if path not in common}
    return {
        path: now[n]
        for path, n in others.items()
        if n in now
        and (p.op(n), p.seq(n)) == (other.op(n), other.seq(n))
        and (p.specs(n) == other.specs(n) or encode_attrs(p.attrs(n)) == encode_attrs(other.attrs(n)))
    }


Names = Mapping[str, str]
"""Path in the program -> path to report, for renamed nodes."""


def _path(p: Program, ref: NodeId | Value, names: Names) -> str:
    return names.get(p.path(ref), p.path(ref))


def _paths(p: Program, names: Names) -> dict[str, NodeId]:
    return {_path(p, n, names): n for n in p.order()}


def _operands(p: Program, node: NodeId, names: Names) -> list[str]:
    return [_path(p, v.node, names) + (f".{v.port}" if v.port else "") for v in p.operands(node)]


def _facts(p: Program, n: NodeId, other: Program, m: NodeId, renamed: Names) -> dict[str, tuple[Any, Any]]:
    facts: dict[str, tuple[Any, Any]] = {}
    if p.op(n) != other.op(m):
        facts["op"] = (other.op(m), p.op(n))
    new, old = encode_attrs(p.attrs(n)), encode_attrs(other.attrs(m))
    differ = [k for k in {**old, **new} if (k in old, old.get(k)) != (k in new, new.get(k))]
    facts |= {f"attrs.{k}": (old.get(k), new.get(k)) for k in differ}
    if p.specs(n) != other.specs(m):
        facts["specs"] = (repr(list(other.specs(m))), repr(list(p.specs(n))))
    if (before := _operands(other, m, renamed)) != (after := _operands(p, n, {})):
        facts["operands"] = (before, after)
    return facts


def _edges(p: Program, names: Names) -> Counter[str]:
    """Count edges by their text `source.port -> target.port`; for a junction the target port is written `*`."""
    return Counter(
        f"{_path(p, v.node, names)}.{v.port} -> {path}.{'*' if p.is_junction(node) else i}"
        for path, node in _paths(p, names).items()
        for i, v in enumerate(p.operands(node))
    )


def _outputs(p: Program, names: Names) -> dict[str, str]:
    return {n: f"{_path(p, v.node, names)}.{v.port}" for n, v in zip(p.output_names(), p.outputs(), strict=True)}


def _compare(key: str, p: Program, other: Program) -> WeightChange | None:
    a, b = other.weights.array(key), p.weights.array(key)
    if (a is b and a.storage is b.storage) or (a.spec == b.spec and other.weights.digest(key) == p.weights.digest(key)):
        return None
    names = (repr(a.spec), repr(b.spec))
    return WeightChange(key, *names, *_distance(a, b)) if a.shape == b.shape else WeightChange(key, *names)


def _distance(a: NDArray, b: NDArray) -> tuple[float, float, float]:
    """Return (largest absolute difference, relative L2 distance, cosine) of two arrays, computed in float64."""
    x, y = (np.ascontiguousarray(v.to_numpy()).reshape(-1) for v in (a, b))
    largest = delta = xx = yy = xy = 0.0
    for i in range(0, len(x), _CHUNK):
        u, v = x[i : i + _CHUNK].astype(np.float64), y[i : i + _CHUNK].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            d = v - u
            largest = float(np.maximum(largest, np.abs(d).max(initial=0.0)))  # keeps NaN, as max() would not
            delta, xx, yy, xy = delta + d @ d, xx + u @ u, yy + v @ v, xy + u @ v
    norm = math.sqrt(xx) * math.sqrt(yy)
    relative = math.sqrt(delta) / math.sqrt(xx) if xx else (0.0 if delta == 0 else math.inf)
    cosine = xy / norm if norm else (1.0 if xx == yy else 0.0)
    return largest, float(relative), float(cosine)
