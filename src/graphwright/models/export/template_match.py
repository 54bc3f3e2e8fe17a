"""Match a program with its family's template: each residual branch, its weights and its sizes.

A program that was pruned, factored or gated still computes the template's function, with different weights. The
matcher walks from the output to the embedding and matches each branch of the residual stream, node by node, with a
branch of the template. Sizes may differ, a weight may be any constant, and a matrix any affine map. It reads no weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import dtype
from graphwright.autograd import Parameter
from graphwright.graph import NodeId
from graphwright.models.architectures.architecture import Architecture, dimension_of, size_of
from graphwright.models.codegen.modules import LAYER
from graphwright.models.export.affine_map import AffineMap, constant, constants, find_affine_map
from graphwright.models.loading import assemble, template_keys
from graphwright.ops import OPS, traits
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, INPUT, STORED
from graphwright.program.op_graph import Value
from graphwright.program.weights import abstract_array
from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

WeightSource = Value | AffineMap
"""Source of a weight of the template: a constant value, or an affine map of which it is the matrix or bias."""
TRUNK = -1
"""Branch number of the trunk: embedding, final norm and head."""


class _Mismatch(Exception):
    """The program's `node` does not match the template, for the reason `why`."""

    def __init__(self, node: NodeId, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


@dataclass(slots=True)
class MatchedPart:
    """A branch of the template, e.g. `layers.1.attn`, or its trunk, with the matching values of the program.

    Attributes:
        weights: dict from a weight's path in the template to the program's constant or affine map that has its role.
        values: dict from value of the template to value of the program.
        eps: dict from the path of a norm in the template to its eps in the program.
        key_head: the program's constant that lists the key head of each query head; None if it has no such table.
        maps: affine maps of the program, each of which replaces one matrix of the template.
        windows: (window in the program, window in the template) of each attention, None for no limit.
        counts: dict from a dimension that attributes hold, such as `chosen`, to its size in the program.
        sparse: attentions over patterns in place of dense ones, which no config describes.
        absent: terms of sums in the template that the program's sums lack, each as the value of the matrix whose zeros
            make the term zero.
    """

    name: str
    weights: dict[str, WeightSource] = field(default_factory=dict)
    values: dict[Value, Value] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)
    key_head: Value | None = None
    maps: list[AffineMap] = field(default_factory=list)
    windows: list[tuple[int | None, int | None]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    sparse: list[Value] = field(default_factory=list)
    absent: list[Value] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TemplateBranch:
    """A residual branch of the template: `junction` is the sum of the residual stream `stream` and `branch`."""

    name: str
    junction: Value
    stream: Value
    branch: Value

    @property
    def layer(self) -> int:
        """Number of the branch's layer; 0 if it is outside of layers."""
        found = LAYER.match(f"{self.name}.")
        return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class TemplateMatch:
    """A program matched with its family's template.

    Attributes:
        dims: dimensions of the template: those of the config, with more layers or experts if the program has more, and
            with the layers routed that the program routes.
        given: dimensions of the config.
        fields: dict from dimension to config field, in the config's spelling.
        keys: dict from path of a weight in the template to its checkpoint key.
        branches: residual branches of the template, in order.
        parts: for each branch its match in the program, or None.
        trunk: the match of embedding, final norm and head.
        sizes: dict from branch number (`TRUNK` for the trunk) to a dict from dimension to size in the program.
        unmatched: dict from a node of the program to the reason why no node of the template matches it.
        mismatched: numbers of template branches whose counterpart in the program computes something else.
        skipped: junctions of the program that need no match: they have a single edge or are on the residual stream.
        terms: dict from a weight's path in the template to the dimension names of its axes.
    """

    arch: Architecture
    dims: Any
    given: Any
    fields: Mapping[str, str]
    keys: Mapping[str, str]
    program: Program
    template: Program
    branches: tuple[TemplateBranch, ...]
    parts: tuple[MatchedPart | None, ...]
    trunk: MatchedPart
    sizes: Mapping[int, Mapping[str, int]]
    unmatched: Mapping[NodeId, str]
    mismatched: Set[int]
    skipped: Set[NodeId]
    terms: Mapping[str, tuple[str, ...]]

    @property
    def grown(self) -> tuple[str, ...]:
        """The dimensions in which the template is larger than the config's: layers, experts."""
        return tuple(n for n in ("layers", "experts") if getattr(self.dims, n, 0) > getattr(self.given, n, 0))

    def part(self, branch: int) -> MatchedPart | None:
        """Return the matched part of a branch or of the trunk; None if the branch is not matched."""
        return self.trunk if branch == TRUNK else self.parts[branch]

    def matched(self) -> Iterator[tuple[int, MatchedPart]]:
        """Yield (branch number, part) of the trunk and of every matched branch."""
        yield TRUNK, self.trunk
        yield from ((i, part) for i, part in enumerate(self.parts) if part is not None)

    def explained(self) -> dict[NodeId, int]:
        """Return a dict from each matched node of the program to the number of its template branch, or `TRUNK`."""
        found = dict.fromkeys(self.skipped, TRUNK)
        for i, part in self.matched():
            nodes = {v.node for v in part.values.values()}
            nodes |= {n for m in part.maps for n in (*m.nodes, *m.constants())}
            nodes |= self.program.reachable(v for v in part.weights.values() if isinstance(v, Value))
            if part.key_head is not None:
                nodes |= {part.key_head.node, *self.program.consumers(part.key_head)}
            found |= {n: i for n in nodes if i != TRUNK or n not in found}
        return {n: i for n, i in found.items() if n not in self.unmatched}


def template(model: Model, dims: Any, keys: Mapping[str, str]) -> Program:
    """Return the template of the model's family for sizes `dims`; its weights have specs, but no data.

    A weight that the program lacks has the dtype of most of the others.
    """
    program = model.program
    stored = {program.key(n): program.spec(n).dtype for n in program.params()}
    usual = Counter(stored.values()).most_common(1)[0][0] if stored else dtype("float32")
    values = {path: Parameter(abstract_array(shape, stored.get(keys[path], usual)), True, keys[path])
              for path, _, shape, _ in model.arch.weights(dims)}  # fmt: skip
    return assemble(model.arch, dims, keys, values, model.compute, "template")


def _template_dims(model: Model) -> Any:
    """Return the dimensions of the config, with as many layers as the program has in a row, and its routed layers.

    Additional layers have the window of the last one; windows are compared layer by layer.
    """
    dims, p = model.config_dims, model.program
    more = 0
    while hasattr(dims, "layers") and p.with_prefix(f"layers.{dims.layers + more}."):
        more += 1
    changes: dict[str, Any] = {"layers": dims.layers + more} if more else {}
    if more and hasattr(dims, "windows"):
        changes["windows"] = (*dims.windows, *dims.windows[-1:] * more)
    if hasattr(dims, "routed"):
        found = routed_layers(p)
        absent = (*dims.routed, *dims.routed[-1:] * more)  # a layer without a branch is as in the config
        lost = [r and not p.with_prefix(f"layers.{i}.mlp.down") for i, r in enumerate(absent)]
        changes["routed"] = tuple(i in found or r for i, r in enumerate(lost))
        changes["experts"] = max([dims.experts, *(size_of_groups(p, n) for n in found.values())])
    changes = {name: value for name, value in changes.items() if value != getattr(dims, name)}
    return replace(dims, **changes) if changes else dims


def routed_layers(p: Program) -> dict[int, NodeId]:
    """Return a dict from the number of each layer with experts to the node that computes them."""
    having = (n for n in p.nodes() if p.op(n) in OPS and OPS[p.op(n)].groups is not None)
    return {int(found[1]): n for n in having if (found := LAYER.match(p.path(n)))}


def size_of_groups(p: Program, node: NodeId) -> int:
    """Return the number of experts whose operands a node reads."""
    groups = OPS[p.op(node)].groups
    assert groups is not None
    first, width = groups(p.attrs(node))
    return (len(p.operands(node)) - first) // width


def match_template(model: Model) -> TemplateMatch:
    """Match a model's program with the template of its family."""
    return _Matcher(model).run()


class _Matcher:
    """Matches a program with its template in one walk along the residual stream, from the output to the embedding."""

    def __init__(self, model: Model) -> None:
        self.arch, self.dims, self.p = model.arch, _template_dims(model), model.program
        self.given, self.fields = model.config_dims, model.arch.config_fields(model.config)
        self.keys = template_keys(self.arch, self.dims, model.keys)
        self.t = template(model, self.dims, self.keys)
        self.fixed, self.fixed_in_template = constants(self.p), constants(self.t)
        self.computed = _after_a_matrix(self.p, self.fixed)
        self.branches = template_branches(self.t)
        stream = {branch.junction.node for branch in self.branches}
        self.inner = {self.t.path(n) for n in _sums(self.t) if n not in stream}
        self.names = {key: path for path, key in self.keys.items()}
        self.terms = {path: terms for path, _, _, terms in model.arch.weights(self.dims)}
        self.unmatched: dict[NodeId, str] = {}
        self.mismatched: set[int] = set()
        self.skipped: set[NodeId] = set()
        self.shared: dict[Value, Value] = {}
        self.trunk = MatchedPart("")
        self.parts: list[MatchedPart | None] = [None] * len(self.branches)

    # -- the residual stream -----------------------------------------------------------------------------------------
    def run(self) -> TemplateMatch:
        """Match the trunk from the output, then branch by branch along the stream to the embedding."""
        p, trunk = self.p, self.trunk
        top = self.branches[-1].junction if self.branches else None
        with self._noting():
            if p.output_names() != self.t.output_names():
                raise _Mismatch(p.outputs()[0].node, "the names of the outputs differ from the template's")
            self.match(self.t.output("logits"), p.output("logits"), trunk, top)
        at, v = len(self.branches) - 1, trunk.values.get(top) if top is not None else None
        while v is not None and not self._is_base(v):
            at, v = self._next_junction(v, at)
        sizes: dict[int, dict[str, int]] = {}
        found = TemplateMatch(self.arch, self.dims, self.given, self.fields, self.keys, p, self.t,
                              self.branches, tuple(self.parts), trunk, sizes, self.unmatched, self.mismatched,
                              self.skipped, self.terms)  # fmt: skip
        self._refuse_shared_weights(found)
        trunk_first = list(found.matched())
        for i, part in (*trunk_first[1:], trunk_first[0]):
            sizes[i] = self._sizes(part)
        hidden = sizes[TRUNK].get("hidden")
        for i, part in found.matched():
            if (size := sizes[i].get("hidden", hidden)) != hidden:
                self.unmatched[next(iter(part.values.values())).node] = f"{size} channels where the trunk has {hidden}"
                self.mismatched.add(i)
        return found

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except _Mismatch as error:
            self.unmatched[error.node] = error.why

    def _refuse_shared_weights(self, found: TemplateMatch) -> None:
        """Record each value that matches two weights of the template as unmatched: an export would untie the two."""
        owner: dict[WeightSource, str] = {}
        for _, part in found.matched():
            for path, source in part.weights.items():
                if isinstance(source, Value) and owner.setdefault(source, path) != path:
                    self.unmatched[source.node] = f"matches two weights of the template, {owner[source]} and {path}"

    def _is_base(self, v: Value) -> bool:
        """Return whether a value is an embedding; if so, match it with the template's."""
        base = self.branches[0].stream
        if not self._may_be_base(v):
            return False
        with self._noting():
            self.match(base, v, self.trunk, None)
        return True

    def _may_be_base(self, v: Value) -> bool:
        """Return whether a value has the op of the template's embedding, and no matrix before it."""
        return self.p.op(v.node) == self.t.op(self.branches[0].stream.node) and v.node not in self.computed

    def _next_junction(self, v: Value, at: int) -> tuple[int, Value | None]:
        """Match the branches that junction `v` adds to the residual stream.

        `at` is the highest number of an unmatched branch of the template. Returns: the new `at`, and the stream before
        the junction, or None where the stream ends.
        """
        p = self.p
        operands = [self.canon(u) for u in p.operands(v.node)] if p.is_junction(v.node) else []
        sums = [u for u in operands if p.is_junction(u.node) and p.path(u.node) not in self.inner]
        streams = [u for u in operands if u in sums or self._may_be_base(u)]
        if not streams:
            ends = "the residual stream ends here"
            self.unmatched[v.node] = ends if p.is_junction(v.node) else f"{p.op(v.node)} on the residual stream"
            return at, None
        self.skipped.add(v.node)
        stream = streams[0]
        operands.remove(stream)
        for k, branch in enumerate(operands):
            number = self._match_branch(branch, stream, at) if k == 0 else None
            if number is None:
                self._reject(v, branch, stream)
            else:
                at = number - 1
        return at, stream

    def _match_branch(self, branch: Value, stream: Value, at: int) -> int | None:
        """Match a branch with a template branch of number <= `at`; return this number, or None if none matches.

        The template branch whose weights `branch` reads is tried first, then the others from the highest number down.
        """
        own = self._own_number(branch, stream)
        order = sorted(range(at, -1, -1), key=lambda i: i != own)
        first: _Mismatch | None = None
        for i in order:
            part = MatchedPart(self.branches[i].name)
            part.values[self.branches[i].stream] = stream
            try:
                self.match(self.branches[i].branch, branch, part, self.branches[i].stream)
                self.parts[i] = part
                return i
            except _Mismatch as error:
                first = first or error
            if own is None and i < order[0] - 1:
                break  # an unknown branch: one attention and one MLP were tried
        if first is not None:
            self.unmatched[first.node] = first.why
        if own is not None:
            self.mismatched.add(own)
        return None

    def _own_number(self, branch: Value, stream: Value) -> int | None:
        """Return the number of the template branch whose weights a branch reads, if any."""
        p = self.p
        nodes = p.reachable([branch], beyond={stream.node})
        names = [p.path(branch), *(self.names.get(p.key(n), p.path(n)) for n in nodes if p.op(n) in STORED)]
        having = (i for i, b in enumerate(self.branches) if any(name.startswith(f"{b.name}.") for name in names))
        return next(having, None)

    def _reject(self, junction: Value, branch: Value, stream: Value) -> None:
        """Record the junction and the nodes of a branch as unmatched."""
        p = self.p
        self.unmatched.setdefault(junction.node, f"reads {p.path(branch)}, which is not a branch of the template")
        upstream = p.reachable([stream])
        for node in p.reachable([branch], beyond={stream.node}):
            if node not in upstream and p.op(node) not in STORED:
                self.unmatched.setdefault(node, f"{p.op(node)} is not in the family's block")

    # -- one value ---------------------------------------------------------------------------------------------------
    def canon(self, v: Value) -> Value:
        while self.p.is_junction(v.node) and len(operands := self.p.operands(v.node)) == 1:
            self.skipped.add(v.node)
            v = operands[0]
        return v

    def match(self, t: Value, v: Value, part: MatchedPart, stream: Value | None) -> None:
        """Match value `t` of the template with `v` of the program, and all that they are computed from up to `stream`.

        Raises: _Mismatch with the first node that differs.
        """
        v = self.canon(v)
        known = part.values.get(t, self.shared.get(t))
        if known is not None or t == stream:
            if known is not None and known != v:
                why = f"is read for the template's {self.t.path(t)}, but other ops read {self.p.path(known)} for it"
                raise _Mismatch(v.node, why)
            part.values[t] = v
            return
        if t.node in self.fixed_in_template:
            self._match_weight(t, v, part)
            return
        before = {f.name: copy(getattr(part, f.name)) for f in fields(part)}
        try:
            self._match_node(t, v, part, stream)
        except _Mismatch as error:
            for name, value in before.items():  # undo what was matched on the way
                setattr(part, name, value)
            self._match_affine_map(t, v, part, stream, error)
        part.values[t] = v
        if LAYER.match(self.t.path(t)) is None:
            self.shared[t] = v

    def _match_weight(self, t: Value, v: Value, part: MatchedPart) -> None:
        p, root = self.p, uncast(self.t, t).node
        path = self.t.path(root)
        if v.node not in self.fixed:
            raise _Mismatch(v.node, f"depends on inputs, but the template has the weight {path} here")
        found = uncast(p, v)
        if self.t.op(root) == CONST:
            same = p.op(found.node) == CONST
            if not same or p.weights.digest(p.key(found.node)) != self.t.weights.digest(self.t.key(root)):
                raise _Mismatch(v.node, "its values differ from those that follow from the config")
        elif part.weights.setdefault(path, found) != found:
            raise _Mismatch(v.node, f"is used as the template's {path}, but other ops use a different value")
        part.values[t] = v

    def _match_node(self, t: Value, v: Value, part: MatchedPart, stream: Value | None) -> None:
        p, op = self.p, self.t.op(t.node)
        if self.t.is_junction(t.node) and not p.is_junction(v.node):
            self._match_term(t, v, part, stream)
            return
        sparse = traits(op).attention and traits(p.op(v.node)).table is not None
        if (p.op(v.node) != op and not sparse) or v.port != t.port:
            raise _Mismatch(v.node, f"{p.op(v.node)} instead of {op}")
        if op == INPUT:
            if p.path(v) != self.t.path(t):
                raise _Mismatch(v.node, f"reads the input {p.path(v)} instead of {self.t.path(t)}")
            return
        wanted, given = self.t.operands(t.node), p.operands(v.node)
        if sparse:
            given = given[: traits(p.op(v.node)).table]
            part.sparse.append(v)
        else:
            self._match_attrs(t, v, part)
        if op in OPS and OPS[op].groups is not None:
            wanted, given = wanted[: len(given)], given[: len(wanted)]  # the number of experts is a size
        if len(wanted) != len(given):
            raise _Mismatch(v.node, f"reads {len(given)} values instead of {len(wanted)}")
        if traits(op).attention:
            given = self._without_table(given, part)
        for inner, value in zip(wanted, given, strict=True):
            self.match(inner, value, part, stream)

    def _match_term(self, t: Value, v: Value, part: MatchedPart, stream: Value | None) -> None:
        """Match `v` with the first of two terms of the template's sum `t`; the program lacks the other one."""
        term, lacking = self.t.operands(t.node)
        while (row := traits(self.t.op(lacking.node))).contracts != "out_in":
            found = [u for u in self.t.operands(lacking.node) if u.node not in self.fixed_in_template]
            if not found or not (row.linear_in or row.multiplies):
                raise _Mismatch(v.node, f"{self.p.op(v.node)} instead of a sum")
            lacking = found[0]
        self.match(term, v, part, stream)
        part.absent.append(lacking)

    def _match_attrs(self, t: Value, v: Value, part: MatchedPart) -> None:
        """Compare attributes. The number of heads may differ, because it is a size; eps and windows are recorded."""
        op, here, there = self.p.op(v.node), dict(self.p.attrs(v.node)), dict(self.t.attrs(t.node))
        if traits(op).normalises and "eps" in there:
            part.eps[self.t.path(t)] = here.pop("eps")
            there.pop("eps")
        if traits(op).attention:
            part.windows.append((here.pop("window", None), there.pop("window", None)))
        for name in [n for n in here if f"{op}.{n}" in self.arch.attributes]:
            dimension, size = self.arch.attributes[f"{op}.{name}"], here.pop(name)
            there.pop(name)
            if part.counts.setdefault(dimension, size) != size:
                raise _Mismatch(v.node, f"{size} along {dimension}, where another op has {part.counts[dimension]}")
        if traits(op).splits_axis and len(here["sizes"]) == len(there["sizes"]):
            here["sizes"], there["sizes"] = here["sizes"][1:], there["sizes"][1:]
        if found := attr_changes(here, there):
            raise _Mismatch(v.node, ", ".join(found))

    def _without_table(self, given: list[Value], part: MatchedPart) -> list[Value]:
        """Return the operands of an attention without gathers that repeat key heads; store their table in `part`."""
        p, found, tables = self.p, list(given), set[Value | None]()
        for port in (1, 2):
            node, table = self.canon(given[port]).node, None
            # by name: a table of key heads is written as this op, by cuts of ragged heads
            if p.op(node) == "index" and p.attrs(node)["axis"] == 1 and p.operands(node)[1].node in self.fixed:
                found[port], table = p.operands(node)[:2]
                if p.spec(table).shape != p.spec(given[0]).shape[1:2]:
                    raise _Mismatch(node, "the index table does not have one key head per query head")
            tables.add(table)
        if len(tables) > 1 or (part.key_head is not None and tables != {part.key_head}):
            raise _Mismatch(given[1].node, "keys and values are selected by different index tables")
        part.key_head = tables.pop()
        return found

    def _match_affine_map(self, t: Value, v: Value, part: MatchedPart, stream: Value | None, error: _Mismatch) -> None:
        """Match `t`, computed by one linear op of the template, with an affine map of the program that computes `v`.

        This is called after an op-by-op match failed with `error`, which is raised again if there is no such map.
        """
        wanted = find_affine_map(self.t, self.fixed_in_template, t, lambda u: u if u == stream else None)
        linear = [n for n in wanted.nodes if traits(self.t.op(n)).contracts == "out_in"] if wanted is not None else []
        if wanted is None or len(linear) != 1:
            raise error
        source = part.values.get(stream) if stream is not None else None
        stop = lambda u: source if source is not None and self.canon(u) == source else None  # noqa: E731
        found = find_affine_map(self.p, self.fixed, v, stop)
        operands = self.t.operands(linear[0])
        if found is None or (found.biased and len(operands) < 3):
            raise error
        try:
            self.match(wanted.source, found.source, part, stream)
        except _Mismatch:
            raise error from None
        for operand in operands[1:]:
            if part.weights.setdefault(self.t.path(uncast(self.t, operand)), found) != found:
                raise error
        part.maps.append(found)

    # -- sizes -------------------------------------------------------------------------------------------------------
    def _sizes(self, part: MatchedPart) -> dict[str, int]:
        """Map each dimension to its size in the program; record a changed head_dim as unmatched."""
        found = dict(part.counts)
        for path, source in part.weights.items():
            node, terms = source.node if isinstance(source, Value) else source.end.node, self.terms[path]
            shape = self.p.spec(source).sizes if isinstance(source, Value) else source.shape[: len(terms)]
            for term, size in zip(terms, shape, strict=True):
                name, unit = unit_of(term, self.dims)
                if size % unit or found.setdefault(name, size // unit) != size // unit:
                    self.unmatched[node] = f"{size} along {term} of {path} does not fit the other weights of the branch"
                if name == "head_dim" and size != self.dims.head_dim:
                    self.unmatched[node] = f"{size} along {name} of {path} instead of {self.dims.head_dim}"
        return found


def template_branches(t: Program) -> tuple[TemplateBranch, ...]:
    """Return the residual branches of a template, in order."""
    stream = _sums(t)[-1:]
    while stream and t.is_junction(before := t.operands(stream[0])[0].node):
        stream.insert(0, before)
    ends = [(n, *t.operands(n)) for n in stream]
    return tuple(TemplateBranch(t.path(b).rpartition(".")[0], Value(n), s, b) for n, s, b in ends)


def _after_a_matrix(p: Program, fixed: Container[NodeId]) -> frozenset[NodeId]:
    """Return the nodes that are computed from inputs by a product with a matrix, without the constant nodes `fixed`."""
    found: set[NodeId] = set()
    for node in p.order():
        product = traits(p.op(node)).contracts and node not in fixed
        if product or any(v.node in found for v in p.operands(node)):
            found.add(node)
    return frozenset(found)


def _sums(t: Program) -> list[NodeId]:
    return [n for n in t.order() if t.is_junction(n) and len(t.operands(n)) == 2]


def unit_of(term: str, dims: Any) -> tuple[str, int]:
    """Return (dimension that counts the units, entries per unit) of an axis such as `heads*head_dim`."""
    name, _, each = term.partition("*")
    return name, int(getattr(dims, each)) if each else 1


def attr_changes(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Describe each attribute of `here` that differs from that of the template, `there`."""
    a, b = encode_attrs(here), encode_attrs(there)
    return [f"{k} {a.get(k)} instead of {b.get(k)}" for k in b | a if a.get(k) != b.get(k)]


def uncast(p: Program, value: Value) -> Value:
    """Return the value before any casts."""
    while traits(p.op(value.node)).casts:
        value = p.operands(value.node)[0]
    return value


def key_heads(p: Program, part: MatchedPart, heads: int, kv_heads: int) -> np.ndarray:
    """Return for each query head the index of the key head that it reads."""
    if part.key_head is not None:
        return constant(p, part.key_head).astype(np.int64)
    return np.arange(heads) // max(heads // kv_heads, 1)


KINDS = ("size", "removed", "added", "rewired", "gate", "factor", "dtype", "attrs", "op")
AXES = {
    "mlp": "neurons", "heads": "heads", "kv_heads": "kv_groups", "hidden": "channels", "layers": "layers",
    "vocab": "vocabulary", "experts": "experts", "expert_width": "neurons", "shared_width": "neurons",
    "routed": "layers", "chosen": "experts per token",
}  # fmt: skip
"""Dimension of a family -> name of its units."""


@dataclass(frozen=True, slots=True)
class Deviation(Report):
    """One difference from the template, at the path of a node.

    Attributes:
        kind: another `size` or `dtype` of a weight; a node that was `removed` or `added`, or has other operands
            (`rewired`), attributes (`attrs`) or another `op`; a node of an affine map that scales a matrix (`gate`) or
            replaces it by a product (`factor`).
        levels: numbers of the export levels whose files can represent the deviation.
        axis, field, dimension: units, their config field, and the name of the dimension, if a size differs.
        branch: number of the template branch, if it is known.
        matched: whether the node is part of a matched branch.
    """

    path: str
    kind: str
    detail: str
    levels: tuple[int, ...] = ()
    axis: str = ""
    field: str = ""
    branch: int | None = None
    dimension: str = ""
    matched: bool = False
    HIDDEN: ClassVar = ("branch", "dimension", "matched")


def find_deviations(match: TemplateMatch) -> list[Deviation]:
    """Find all differences of a matched program from its template, sorted by path."""
    ours, theirs = match.program, match.template
    explained = match.explained()
    maps = {n: m.kind for _, part in match.matched() for m in part.maps for n in (*m.nodes, *m.constants())}
    found = [_classified(match, explained, maps, *d) for d in _differences(ours, theirs)]
    found += [*_added_layers(match), *_added_experts(match)]
    return sorted(found, key=lambda d: (d.path, d.kind))


def compared_by_path(ours: Program, theirs: Program) -> list[Deviation]:
    """Find all differences of a program from another one, whose nodes have the same paths; sorted by path."""
    return sorted((d for d, _, _ in _differences(ours, theirs)), key=lambda d: (d.path, d.kind))


def _added_layers(match: TemplateMatch) -> Iterator[Deviation]:
    """Yield a deviation for each branch of a layer that the config lacks, or that is routed in one of the two."""
    axis, field = AXES["layers"], match.fields.get("layers", "")
    known = match.given.layers if match.branches else 0
    routed, given = (getattr(d, "routed", ()) for d in (match.dims, match.given))
    for i, branch in enumerate(match.branches):
        path, layer = match.template.path(branch.junction), branch.layer
        if match.parts[i] is None:
            continue
        if layer >= known:
            what = f"the config has {known} layers ({axis}, {field})"
            yield Deviation(path, "added", what, (), axis, field, i, "layers", matched=True)
        elif routed and routed[layer] != given[layer] and branch.name == f"layers.{layer}.mlp":
            what = f"layer {layer} is {'dense' if given[layer] else 'routed'} here, but not in the config"
            yield Deviation(path, "op", what, (), axis, "", i, "routed", matched=True)


def _added_experts(match: TemplateMatch) -> Iterator[Deviation]:
    """Yield a deviation for each routed layer that has as many experts as the template, but more than the config."""
    if "experts" not in match.grown:
        return
    axis, field, given = AXES["experts"], match.fields.get("experts", ""), match.given.experts
    for i, part in match.matched():
        size = match.sizes[i].get("experts")
        if size == match.dims.experts:
            path = next(w for w in part.weights if "experts" in match.terms[w])
            what = f"{size} experts instead of {given} ({axis}, {field})"
            yield Deviation(path, "size", what, (), axis, field, i, "experts", matched=True)


def _classified(
    match: TemplateMatch, explained: dict[NodeId, int], maps: dict[NodeId, str], d: Deviation,
    node: NodeId | None, other: NodeId | None,
) -> Deviation:  # fmt: skip
    """Complete a deviation with its branch, dimension and final kind.

    `node` is the program's node and `other` the template's; one of them is None if it has no counterpart. `explained`
    maps matched nodes to branch numbers, `maps` nodes of affine maps to `gate` or `factor`.
    """
    t = match.template
    path = t.path(other) if other is not None else ""
    branch = explained.get(node) if node is not None else None
    if other is not None:
        at = (i for i, b in enumerate(match.branches) if other == b.junction.node or path.startswith(f"{b.name}."))
        branch = next(at, None)
    if node is not None:
        matched, kind = node in explained, maps.get(node, d.kind)
    else:
        matched = branch not in match.mismatched
        part = match.parts[branch] if branch is not None else None
        kind = "factor" if part is not None and isinstance(part.weights.get(path), AffineMap) else d.kind
    dimension = _dimension(match, path, branch) if kind == "size" else ""
    dimension = dimension_of(dimension)
    axis, field = AXES.get(dimension, ""), match.fields.get(dimension, "")
    detail = f"{d.detail} ({axis}, {field})" if field else d.detail
    return replace(d, kind=kind, axis=axis, field=field, detail=detail, branch=branch, dimension=dimension,
                   matched=matched)  # fmt: skip


def _dimension(match: TemplateMatch, path: str, branch: int | None) -> str:
    """Return the dimension whose size differs in the weight or head split at the template's `path`; "" if none does."""
    here, dims = match.sizes.get(TRUNK if branch is None else branch, {}), match.dims
    base = path.removesuffix("_split") + ".weight" if path.endswith("_split") else path
    names = [n for term in match.terms.get(base, ()) for n in term.split("*")]
    return next((n for n in names if here.get(n, size_of(dims, n)) != size_of(dims, n)), "")


def _differences(ours: Program, theirs: Program) -> Iterator[tuple[Deviation, NodeId | None, NodeId | None]]:
    """Yield each difference as (deviation, node of the program `ours` or None, node of the template or None)."""
    pairs = _paired(ours, theirs)
    mine = {node: other for other, node in pairs.items()}
    alive = ours.reachable(ours.outputs())
    for n in theirs.nodes():
        if n not in pairs:
            yield Deviation(theirs.path(n), "removed", f"{theirs.op(n)} was removed"), None, n
    for node in ours.nodes():
        if node not in mine:
            if node in alive or ours.graph.out_degree(node):
                yield Deviation(ours.path(node), "added", f"{ours.op(node)} is not in the family's block"), node, None
            continue
        for d in _node_differences(ours, node, theirs, mine[node], mine):
            yield d, node, mine[node]
    results = [(n, mine.get(v.node), v.port) for n, v in zip(ours.output_names(), ours.outputs(), strict=True)]
    wanted = [(n, v.node, v.port) for n, v in zip(theirs.output_names(), theirs.outputs(), strict=True)]
    if results != wanted:
        d = Deviation("outputs", "rewired", "a different node is the output")
        yield d, ours.outputs()[0].node, theirs.outputs()[0].node


def _paired(ours: Program, theirs: Program) -> dict[NodeId, NodeId]:
    """Map nodes of the template to nodes of the program: by path, weights by key, renamed nodes by operands."""
    by_path = {ours.path(n): n for n in ours.nodes()}
    by_key = {ours.key(n): n for kind in STORED for n in ours.of_kind(kind)}
    pairs: dict[NodeId, NodeId] = {}
    known = {theirs.path(n) for n in theirs.nodes()}
    for other in theirs.order():
        node = by_key.get(theirs.key(other)) if theirs.op(other) in STORED else by_path.get(theirs.path(other))
        if node is None:
            reads = [pairs.get(v.node) for v in theirs.operands(other)]
            near = ours.consumers(reads[0]) if reads and reads[0] is not None else ()
            renamed = (n for n in near if ours.path(n) not in known and n not in pairs.values())
            node = next((n for n in renamed if _same(ours, n, theirs, other, pairs)), None)
        if node is not None:
            pairs[other] = node
    return pairs


def _same(ours: Program, node: NodeId, theirs: Program, other: NodeId, pairs: dict[NodeId, NodeId]) -> bool:
    reads = [(v.node, v.port) for v in ours.operands(node)]
    wanted = [(pairs.get(v.node), v.port) for v in theirs.operands(other)]
    return ours.op(node) == theirs.op(other) and ours.attrs(node) == theirs.attrs(other) and reads == wanted


def _node_differences(
    ours: Program, node: NodeId, theirs: Program, other: NodeId, mine: dict[NodeId, NodeId]
) -> Iterator[Deviation]:
    path = ours.path(node)
    if ours.op(node) != theirs.op(other):
        yield Deviation(path, "op", f"{ours.op(node)} instead of {theirs.op(other)}")
    elif ours.op(node) in STORED:
        here, there = ours.spec(node), theirs.spec(other)
        if here != there:
            yield Deviation(path, "size" if here.shape != there.shape else "dtype", f"{here} instead of {there}")
        elif ours.op(node) == CONST and ours.weights.digest(ours.key(node)) != theirs.weights.digest(theirs.key(other)):
            yield Deviation(path, "attrs", "its values differ from those that follow from the config")
    elif changes := attr_changes(here := ours.attrs(node), there := theirs.attrs(other)):
        split = traits(ours.op(node)).splits_axis and here.keys() == there.keys() and here["axis"] == there["axis"]
        yield Deviation(path, "size" if split else "attrs", ", ".join(changes))
    reads = [(mine.get(v.node), v.port) for v in ours.operands(node)]
    if reads != [(v.node, v.port) for v in theirs.operands(other)]:
        here, there = (", ".join(p.path(v) for v in p.operands(n)) for p, n in ((ours, node), (theirs, other)))
        yield Deviation(path, "rewired", f"reads {here or 'nothing'} instead of {there}")
