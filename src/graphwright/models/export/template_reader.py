"""Reading a program as its family's template: which branch of the residual stream is which, and what its weights are.

A program that was pruned, factored or gated still is the template's function of other weights. It is read from the
output back: each branch that enters the stream is matched with a branch of the template, node by node. Sizes may
differ, a weight may be any constant, and a matrix any affine stretch; what does not match is told by path. No payload
is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.models.codegen.statements import LAYER
from graphwright.models.export.affine_map import Stretch, constant, constants, find_stretch
from graphwright.ops import traits
from graphwright.program import Value
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, INPUT, STORED

if TYPE_CHECKING:
    from graphwright.autograd import Variable
    from graphwright.graph import NodeId
    from graphwright.models.architectures.architecture import Architecture
    from graphwright.models.model import Model
    from graphwright.program import Program

Bound = Value | Stretch
"""What stands where the template has a weight: a constant, or a stretch whose matrix or bias it is."""
TRUNK = -1


class Unread(Exception):
    """A value is not what the template has; `node` is where, `why` in words."""

    def __init__(self, node: NodeId, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


@dataclass(slots=True)
class Part:
    """One branch of the template, or its trunk, and what the program has for it.

    Attributes:
        name: of the branch, e.g. `layers.1.attn`; "" for the trunk.
        weights: template path of a weight -> what stands there.
        values: value of the template -> value of the program.
        eps: path of a norm of the template -> its eps here.
        key_head: the table by which query heads read key heads, where there is one.
        stretches: matrices that are several ops here.
    """

    name: str
    weights: dict[str, Bound] = field(default_factory=dict)
    values: dict[Value, Value] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)
    key_head: Value | None = None
    stretches: list[Stretch] = field(default_factory=list)

    def copy(self) -> Part:
        """The same, to go on from in another way."""
        return Part(self.name, dict(self.weights), dict(self.values), dict(self.eps), self.key_head,
                    list(self.stretches))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """A branch of the template: the junction it enters, the stream it reads and adds to, its value."""

    name: str
    junction: Value
    stream: Value
    branch: Value

    @property
    def layer(self) -> int | None:
        """Number of its layer."""
        found = LAYER.match(f"{self.name}.")
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a program is, in the template's words.

    Attributes:
        arch, dims: the family and its dimensions by the config.
        program, template: what was read, and by which program.
        slots: branches of the template, in order.
        parts: of each slot what was read, or None where the program has nothing.
        trunk: embedding, last norm and head.
        sizes: slot -> dimension name -> size, the trunk under -1.
        unread: node of the program -> why it is none of the template's.
        lost: slots that hold something, but not what the template has.
        passed: junctions that were passed on the way.
    """

    arch: Architecture
    dims: Any
    program: Program
    template: Program
    slots: tuple[Slot, ...]
    parts: tuple[Part | None, ...]
    trunk: Part
    sizes: Mapping[int, Mapping[str, int]]
    unread: Mapping[NodeId, str]
    lost: frozenset[int]
    passed: frozenset[NodeId]

    @property
    def whole(self) -> bool:
        """True if everything was read."""
        return not self.unread

    def part(self, slot: int) -> Part | None:
        """What was read of a slot, or of the trunk."""
        return self.trunk if slot == TRUNK else self.parts[slot]

    def read_parts(self) -> Iterator[Part]:
        """The trunk and every branch that was read."""
        yield self.trunk
        yield from (part for part in self.parts if part is not None)

    def explained(self) -> dict[NodeId, int]:
        """Nodes of the program that were read as something of the template, each with its slot."""
        found = dict.fromkeys(self.passed, TRUNK)
        for i in range(TRUNK, len(self.slots)):
            if (part := self.part(i)) is None:
                continue
            nodes = {v.node for v in part.values.values()}
            nodes |= {n for s in part.stretches for n in (*s.nodes, *s.constants())}
            nodes |= self.program.reachable(v for v in part.weights.values() if isinstance(v, Value))
            nodes |= set() if part.key_head is None else self._table(part.key_head)
            found |= {n: i for n in nodes if i != TRUNK or n not in found}
        return {n: i for n, i in found.items() if n not in self.unread}

    def _table(self, table: Value) -> set[NodeId]:
        return {table.node, *self.program.consumers(table)}


def read(model: Model, template: Program) -> Reading:
    """Read a model's program by the template of its family."""
    return _Reader(model, template).read()


class _Reader:
    """One walk along the residual stream, from the output back."""

    def __init__(self, model: Model, template: Program) -> None:
        self.arch, self.dims, self.p, self.t = model.arch, model.dims, model.program, template
        self.fixed, self.fixed_there = constants(self.p), constants(template)
        self.slots = tuple(self._slots())
        self.names = {key: path for path, key in model.keys.items()}
        self.terms = {path: terms for path, _, _, terms in model.arch.weights(model.dims)}
        self.unread: dict[NodeId, str] = {}
        self.lost: set[int] = set()
        self.passed: set[NodeId] = set()
        self.shared: dict[Value, Value] = {}

    # -- the template ------------------------------------------------------------------------------------------------
    def _slots(self) -> Iterator[Slot]:
        """Junctions of the template: the first operand is the stream, the second the branch."""
        t = self.t
        for node in t.order():
            if t.is_junction(node) and len(operands := t.operands(node)) == 2:
                yield Slot(t.path(operands[1]).rpartition(".")[0], Value(node), *operands)

    # -- the stream --------------------------------------------------------------------------------------------------
    def read(self) -> Reading:
        """Trunk from above, then branch by branch down the stream to the embedding."""
        p, t = self.p, self.t
        trunk = Part("")
        parts: list[Part | None] = [None] * len(self.slots)
        top = self.slots[-1].junction if self.slots else None
        try:
            result = t.output("logits")
            if p.output_names() != t.output_names():
                raise Unread(p.outputs()[0].node, "the outputs have other names")
            self.match(result, p.output("logits"), trunk, top)
        except Unread as error:
            self.unread[error.node] = error.why
        at, v = len(self.slots) - 1, trunk.values.get(top) if top is not None else None
        while v is not None and not self._is_base(v, trunk):
            at, v = self._down(v, at, parts)
        self._twice([trunk, *(part for part in parts if part is not None)])
        sizes = {i: self._sizes(part) for i, part in enumerate(parts) if part is not None}
        sizes[TRUNK] = self._sizes(trunk)
        hidden = sizes[TRUNK].get("hidden")
        for i, found in sizes.items():
            if found.get("hidden", hidden) != hidden:
                self._lose(i, parts[i], f"{found['hidden']} channels where the trunk has {hidden}")
        told = (dict(self.unread), frozenset(self.lost), frozenset(self.passed))
        return Reading(self.arch, self.dims, p, t, self.slots, tuple(parts), trunk, sizes, *told)

    def _twice(self, parts: list[Part]) -> None:
        """A weight that stands for two of the template's is a connection of its own, and is not written out twice."""
        owner: dict[Bound, str] = {}
        for part in parts:
            for path, bound in part.weights.items():
                if isinstance(bound, Value) and owner.setdefault(bound, path) != path:
                    self.unread[bound.node] = f"stands for {owner[bound]} and for {path}"

    def _lose(self, slot: int, part: Part | None, why: str) -> None:
        assert part is not None
        self.unread[next(iter(part.values.values())).node] = why
        self.lost.add(slot)

    def _is_base(self, v: Value, trunk: Part) -> bool:
        """True for the embedding, which is entered into the trunk."""
        base = self.slots[0].stream
        if self.p.op(v.node) != self.t.op(base.node):
            return False
        try:
            self.match(base, v, trunk, None)
        except Unread as error:
            self.unread[error.node] = error.why
        return True

    def _down(self, v: Value, at: int, parts: list[Part | None]) -> tuple[int, Value | None]:
        """One junction: the branches that enter it are matched; returns the next slot and the stream below."""
        p = self.p
        operands = [self.canon(u) for u in p.operands(v.node)] if p.is_junction(v.node) else []
        base = self.t.op(self.slots[0].stream.node)
        streams = [u for u in operands if p.is_junction(u.node) or p.op(u.node) == base]
        if not streams:
            ends = "the residual stream ends here"
            self.unread[v.node] = ends if p.is_junction(v.node) else f"{p.op(v.node)} on the residual stream"
            return at, None
        self.passed.add(v.node)
        stream = streams[0]
        branches = list(operands)
        branches.remove(stream)
        for k, branch in enumerate(branches):
            chosen = self._place(branch, stream, at) if k == 0 else None
            if chosen is None:
                self._fail(v, branch, stream)
                continue
            slot, part = chosen
            parts[slot] = part
            at = slot - 1
        return at, stream

    def _place(self, branch: Value, stream: Value, at: int) -> tuple[int, Part] | None:
        """The slot that a branch is for: its own if it still stands below the one above, else the nearest that fits."""
        own = self._own(branch, stream)
        order = list(range(at, -1, -1))
        if own in order:
            order.remove(own)
            order.insert(0, own)
        why: Unread | None = None
        for slot in order:
            part = Part(self.slots[slot].name)
            part.values[self.slots[slot].stream] = stream
            try:
                self.match(self.slots[slot].branch, branch, part, self.slots[slot].stream)
                return slot, part
            except Unread as error:
                why = why or error
            if own is None and slot < order[0] - 1:
                break  # a stranger: two kinds of branches were tried
        if why is not None:
            self.unread[why.node] = why.why
        if own is not None:
            self.lost.add(own)
        return None

    def _own(self, branch: Value, stream: Value) -> int | None:
        """The slot whose weights a branch reads."""
        p = self.p
        mine = p.reachable([branch], beyond={stream.node})
        names = [self.names.get(p.key(n), p.path(n)) for n in mine if p.op(n) in STORED]
        names.append(p.path(branch))
        for i, slot in enumerate(self.slots):
            if any(name.startswith(f"{slot.name}.") for name in names):
                return i
        return None

    def _fail(self, junction: Value, branch: Value, stream: Value) -> None:
        p = self.p
        self.unread.setdefault(junction.node, f"reads {p.path(branch)}, which is no branch of the template")
        below = p.reachable([stream])
        for node in p.reachable([branch], beyond={stream.node}):
            if node not in below and p.op(node) not in STORED:
                self.unread.setdefault(node, f"{p.op(node)} is not in the family's block")

    # -- one value ---------------------------------------------------------------------------------------------------
    def canon(self, v: Value) -> Value:
        """A junction of one edge is what it reads."""
        while self.p.is_junction(v.node) and len(operands := self.p.operands(v.node)) == 1:
            self.passed.add(v.node)
            v = operands[0]
        return v

    def match(self, t: Value, v: Value, part: Part, stream: Value | None) -> None:
        """Take a value of the program for one of the template, and with it all that it is computed from.

        Raises: Unread with the node that is another.
        """
        v = self.canon(v)
        known = part.values.get(t, self.shared.get(t))
        if known is not None or t == stream:
            if known is not None and known != v:
                raise Unread(v.node, f"stands where {self.t.path(t)} is read, which is {self.p.path(known)}")
            part.values[t] = v
            return
        if t.node in self.fixed_there:
            self._bind(t, v, part)
            return
        before = part.copy()
        try:
            self._node(t, v, part, stream)
        except Unread as error:
            part.weights, part.values, part.eps = before.weights, before.values, before.eps
            part.key_head, part.stretches = before.key_head, before.stretches
            self._stretch(t, v, part, stream, error)
        part.values[t] = v
        if not is_layered(self.t, t):
            self.shared[t] = v

    def _bind(self, t: Value, v: Value, part: Part) -> None:
        p, root = self.p, uncast(self.t, t).node
        path = self.t.path(root)
        if v.node not in self.fixed:
            raise Unread(v.node, f"is computed where {path} is a weight")
        found = uncast(p, v)
        if self.t.op(root) == CONST:
            same = p.op(found.node) == CONST
            if not same or p.weights.digest(p.key(found.node)) != self.t.weights.digest(self.t.key(root)):
                raise Unread(v.node, "other numbers than the config gives")
        elif part.weights.setdefault(path, found) != found:
            raise Unread(v.node, f"is read where {path} is read too, which is another weight here")
        part.values[t] = v

    def _node(self, t: Value, v: Value, part: Part, stream: Value | None) -> None:
        p, op = self.p, self.t.op(t.node)
        if p.op(v.node) != op or v.port != t.port:
            raise Unread(v.node, f"{p.op(v.node)} instead of {op}")
        if op == INPUT:
            if p.path(v) != self.t.path(t):
                raise Unread(v.node, f"the input {p.path(v)} instead of {self.t.path(t)}")
            return
        self._attrs(t, v, part)
        wanted, given = self.t.operands(t.node), p.operands(v.node)
        if len(wanted) != len(given):
            raise Unread(v.node, f"reads {len(given)} values instead of {len(wanted)}")
        if traits(op).attention:
            given = self._without_table(given, part)
        for inner, value in zip(wanted, given, strict=True):
            self.match(inner, value, part, stream)

    def _attrs(self, t: Value, v: Value, part: Part) -> None:
        """Equal, but for the number of heads, and eps, which follows the width."""
        op, here, there = self.p.op(v.node), dict(self.p.attrs(v.node)), dict(self.t.attrs(t.node))
        if op == "rms_norm":  # the norm of every template; of other norms eps must match
            part.eps[self.t.path(t)] = here.pop("eps")
            there.pop("eps")
        if traits(op).splits_axis and len(here["sizes"]) == len(there["sizes"]):
            here["sizes"], there["sizes"] = here["sizes"][1:], there["sizes"][1:]
        a, b = encode_attrs(here), encode_attrs(there)
        if a != b:
            raise Unread(v.node, ", ".join(f"{k} {a.get(k)} instead of {b.get(k)}" for k in b if a.get(k) != b.get(k)))

    def _without_table(self, given: list[Value], part: Part) -> list[Value]:
        """Operands of attention; where key heads are read by a table, the heads and the table apart."""
        p, found = self.p, list(given)
        for port in (1, 2):
            node = self.canon(given[port]).node
            if p.op(node) == "index" and p.attrs(node)["axis"] == 1 and p.operands(node)[1].node in self.fixed:
                found[port], table = p.operands(node)[:2]
                if part.key_head is not None and part.key_head != table:
                    raise Unread(node, "keys and values are read by two tables")
                part.key_head = table
        if part.key_head is not None and found[1:3] == [a for a in given[1:3]]:
            raise Unread(given[1].node, "keys and values are read in two ways")
        return found

    def _stretch(self, t: Value, v: Value, part: Part, stream: Value | None, error: Unread) -> None:
        """Where the ops differ: the same place of the template may be an affine map that is written otherwise here."""
        wanted = find_stretch(self.t, self.fixed_there, t, lambda u: u if u == stream else None)
        linear = [n for n in wanted.nodes if traits(self.t.op(n)).contracts == "out_in"] if wanted is not None else []
        if wanted is None or len(linear) != 1:
            raise error
        below = part.values.get(stream) if stream is not None else None

        def stop(u: Value) -> Value | None:
            return below if below is not None and self.canon(u) == below else None

        found = find_stretch(self.p, self.fixed, v, stop)
        if found is None:
            raise error
        operands = self.t.operands(linear[0])
        if found.biased and len(operands) < 3:
            raise error
        try:
            self.match(wanted.source, found.source, part, stream)
        except Unread:
            raise error from None
        for operand in operands[1:]:
            if part.weights.setdefault(self.t.path(uncast(self.t, operand)), found) != found:
                raise error
        part.stretches.append(found)

    # -- sizes -------------------------------------------------------------------------------------------------------
    def _sizes(self, part: Part) -> dict[str, int]:
        """Dimension name -> size here; what a place of a head is, is fixed."""
        found: dict[str, int] = {}
        for path, bound in part.weights.items():
            for term, size in zip(self.terms[path], shape_of(self.p, bound, len(self.terms[path])), strict=True):
                name, _, each = term.partition("*")
                unit = int(getattr(self.dims, each)) if each else 1
                if size % unit or found.setdefault(name, size // unit) != size // unit:
                    node = bound.node if isinstance(bound, Value) else bound.end.node
                    self.unread[node] = f"{size} along {term} of {path}"
                if name in ("vocab", "head_dim") and size != getattr(self.dims, name):
                    node = bound.node if isinstance(bound, Value) else bound.end.node
                    self.unread[node] = f"{size} along {name} of {path} instead of {getattr(self.dims, name)}"
        return found


def uncast(p: Program, value: Value) -> Value:
    """The weight behind casts of it."""
    while traits(p.op(value.node)).casts:
        value = p.operands(value.node)[0]
    return value


def shape_of(p: Program, bound: Bound, rank: int) -> tuple[int, ...]:
    """Shape of the weight that something stands for."""
    if isinstance(bound, Value):
        return p.spec(bound).sizes
    return bound.shape if rank == 2 else bound.shape[:1]


def is_layered(p: Program, value: Value) -> bool:
    """True below a numbered layer."""
    return LAYER.match(p.path(value)) is not None


def key_heads(p: Program, part: Part, heads: int, kv_heads: int) -> np.ndarray:
    """For each query head the key head that it reads."""
    if part.key_head is not None:
        return constant(p, part.key_head).astype(np.int64)
    return np.arange(heads) // max(heads // kv_heads, 1)


Places = dict[str, np.ndarray]
"""Dimension name -> for each place of the template the place here, or -1 for none."""


def places_of(reading: Reading, slot: int, dims: Any) -> Places | str:
    """Where the sizes of one branch go in a template of sizes `dims`; or why they do not fit."""
    part, sizes, found = reading.part(slot), reading.sizes[slot], Places()
    assert part is not None
    for name, size in sizes.items():
        wanted = int(getattr(dims, name))
        if name in ("heads", "kv_heads"):
            continue
        if size > wanted:
            return f"{size} along {name}, where the class has {wanted}"
        known = _before(reading, TRUNK if name == "hidden" else slot, name, wanted)
        here = np.arange(size) if known is None else known
        found[name] = np.full(wanted, -1)
        found[name][here] = np.arange(size)
    if "heads" in sizes:
        table = key_heads(reading.program, part, sizes["heads"], sizes["kv_heads"])
        known = _before(reading, slot, "heads", dims.heads)
        made = heads_places(table, sizes["kv_heads"], dims.heads, dims.kv_heads, known)
        if made is None:
            given = f"{sizes['heads']} query heads on {sizes['kv_heads']} key heads"
            return f"{given}, where the class has {dims.heads} on {dims.kv_heads}"
        found["heads"], found["kv_heads"] = made
    return found


def heads_places(
    table: np.ndarray, kv_here: int, heads: int, kv_heads: int, before: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Where query heads and key heads go in a template of even groups; None if they do not fit.

    A key head that more query heads read than a group has is repeated.

    Args:
        table: for each query head here the key head it reads.
        kv_here: number of key heads here.
        heads, kv_heads: of the template.
        before: for each query head here its place in the source, where that is known.
    Returns: for each query head and each key head of the template the one here, or -1.
    """
    each = heads // kv_heads
    queries, keys = np.full((kv_heads, each), -1), np.full(kv_heads, -1)
    if before is not None:
        readers = [set(table[before // each == group].tolist()) for group in range(kv_heads)]
        if all(len(read) <= 1 for read in readers):
            queries.reshape(-1)[before] = np.arange(len(table))
            return queries.reshape(-1), np.array([next(iter(read), -1) for read in readers])
    groups = [np.flatnonzero(table == k) for k in range(kv_here)]
    chunks = [(k, g[i : i + each]) for k, g in enumerate(groups) for i in range(0, len(g), each)]
    if len(chunks) > kv_heads:
        return None
    for at, (k, chunk) in enumerate(chunks):
        keys[at] = k
        queries[at, : len(chunk)] = chunk
    return queries.reshape(-1), keys


def _before(reading: Reading, slot: int, name: str, wanted: int) -> np.ndarray | None:
    """For each unit here its place in the source, if a weight knows it and all lie within the template."""
    part, p = reading.part(slot), reading.program
    terms = {path: dims for path, _, _, dims in reading.arch.weights(reading.dims)}
    for path, bound in part.weights.items() if part is not None else ():
        if not isinstance(bound, Value) or p.op(bound.node) not in STORED:
            continue
        for dim, term in enumerate(terms[path]):
            first, _, each = term.partition("*")
            if first != name:
                continue
            places = _origin(p.weights[p.key(bound.node)], dim)
            unit = int(getattr(reading.dims, each)) if each else 1
            known = None if places is None else places[::unit] // unit
            if known is not None and _inside(known, wanted):
                return known
    return None


def _inside(places: np.ndarray, size: int) -> bool:
    """True for different places from 0 to size - 1."""
    return len(np.unique(places)) == len(places) and bool(((places >= 0) & (places < size)).all())


def _origin(variable: Variable, dim: int) -> np.ndarray | None:
    """For each place along an axis of a weight the one it had at first, -1 for a new one; None if it is not known."""
    places, step = np.arange(variable.shape[dim]), variable.lineage
    while step is not None:
        back = np.asarray(step.index_maps[dim]) if dim in step.index_maps else np.arange(step.sizes[dim])
        if len(places) and places.max() >= len(back):
            return None  # another shape was set in between
        places = np.where(places < 0, -1, back[places])
        step = step.before
    return places


def misfits(reading: Reading, dims: Any) -> list[tuple[int, str]]:
    """Branches that do not fit into a template of sizes `dims`, each with the reason."""
    slots = [i for i in range(TRUNK, len(reading.slots)) if reading.part(i) is not None]
    return [(i, found) for i in slots if isinstance(found := places_of(reading, i, dims), str)]
