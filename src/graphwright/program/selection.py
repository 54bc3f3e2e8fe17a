"""Selection: a set of nodes, to be counted and shown before it is edited; and the path patterns that select nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from graphwright.array import dtype as as_dtype
from graphwright.errors import UsageError, check_type
from graphwright.program.axes.axes import KINDS as UNIT_KINDS
from graphwright.program.axes.units import Units, layers
from graphwright.program.errors import CountMismatch, EmptySelection, ForeignNode, StaleSelection
from graphwright.program.gates import GateOptions
from graphwright.program.kinds import KINDS, STORED
from graphwright.report import MOST, listed, wrapped
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.gates import GateKeywords
    from graphwright.program.program import Program

_MAX_RANGE = 100_000


class BadPattern(UsageError):
    """The pattern of a selection is malformed."""


@lru_cache(512)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern; it matches a path or a prefix of its segments.

    Within a segment, `*` matches any characters, `[2-5]` an integer in the range, and `{q,k}` one of the alternatives;
    a segment `**` matches any number of segments. All other text matches itself. Raises: BadPattern.
    """
    if not pattern:
        raise BadPattern("the pattern is empty", fix="'**' selects every node")
    any_number, end = r"(?:[^.]+(?:\.|$))*", r"(?:\.|$)"
    parts = [any_number if part == "**" else _segment(part, pattern) + end for part in _segments(pattern)]
    return re.compile("^" + "".join(parts))


def _segments(pattern: str) -> list[str]:
    """Split a pattern at dots outside of braces. Raises: BadPattern."""
    segments, depth, start = [], 0, 0
    for i, char in enumerate(pattern):
        depth += (char == "{") - (char == "}")
        if not 0 <= depth <= 1:
            break
        if char == "." and depth == 0:
            segments.append(pattern[start:i])
            start = i + 1
    segments.append(pattern[start:])
    if depth:
        raise BadPattern("the pattern has unbalanced or nested braces", got=pattern)
    if not all(segments):
        raise BadPattern("the pattern has an empty segment between dots", got=pattern)
    return segments


_TOKEN = re.compile(r"(?P<any>\*)|\[(?P<low>\d+)-(?P<high>\d+)\]|\{(?P<options>[^}]*)\}|(?P<bad>\[)|(?P<text>[^*\[{]+)")


def _segment(segment: str, pattern: str) -> str:
    out = ""
    for token in _TOKEN.finditer(segment):
        if token["any"]:
            out += "[^.]*" if len(segment) > 1 else "[^.]+"
        elif token["low"] and 0 <= int(token["high"]) - int(token["low"]) <= _MAX_RANGE:
            out += f"(?:{'|'.join(map(str, range(int(token['low']), int(token['high']) + 1)))})"
        elif token["low"] or token["bad"]:
            expected = f"[low-high], high from low to low + {_MAX_RANGE}"
            raise BadPattern("invalid range in a pattern", expected=expected, got=pattern)
        elif token["options"] is not None:
            out += f"(?:{'|'.join(map(re.escape, token['options'].split(',')))})"
        else:
            out += re.escape(token["text"])
    return out


def stem(pattern: str) -> str:
    """Return a common prefix of all paths that a pattern selects."""
    return re.split(r"[*\[{]", pattern, maxsplit=1)[0].rstrip(".")


def matches(pattern: str, path: str) -> bool:
    """Return True if a pattern selects a path."""
    found = compile_pattern(pattern).match(path)
    return found is not None and (found.end() == len(path) or path[found.end() - 1] == "." or found.end() == 0)


class Filters(TypedDict, total=False):
    """The filters of `Selection.of` as keyword arguments."""

    op: str | None
    kind: str | None
    dtype: object
    where: Callable[[NodeId], bool] | None
    regex: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Selection:
    """Nodes of one program, in topological order, with the query that found them.

    Attributes:
        program, version: the program and the version of it that was searched.
        nodes: handles, in topological order.
        query: pattern and filters, for `refresh` and `why_not`; None for a combination of selections.
    """

    program: Program
    nodes: tuple[NodeId, ...]
    version: int
    query: Mapping[str, Any] | None = field(default=None, repr=False)

    @staticmethod
    def of(
        p: Program, pattern: str = "**", *, op: str | None = None, kind: str | None = None, dtype: object = None,
        where: Callable[[NodeId], bool] | None = None, regex: str | None = None,
    ) -> Selection:  # fmt: skip
        """Select the nodes whose path matches a pattern, such as `layers.*.attn.{q,k}`, and that pass all filters.

        If there are none, the pattern selects params, consts and states by their checkpoint keys.

        Args:
            op: name of an op or kind (`param`, `input`, ...).
            kind: `op` for all ops, `source` for inputs, params, consts, states and assigns.
            dtype: dtype of the first result.
            where: predicate on handles.
            regex: regular expression to search for in the path.
        """
        query = {"pattern": pattern, "op": op, "kind": kind, "dtype": dtype, "where": where, "regex": regex}
        tests = _tests(p, query)
        found = [n for n in p.with_prefix(stem(pattern or "")) if all(test(n) for _, test in tests)]
        if not found:
            tests, stored = _tests(p, query, p.key), (n for k in STORED for n in p.of_kind(k))
            found = [n for n in stored if all(test(n) for _, test in tests)]
        return Selection(p, _ordered(p, found), p.version, query)

    # -- looking -----------------------------------------------------------------------------------------------------
    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    def names(self) -> list[str]:
        """Return the paths of the nodes. Raises: StaleSelection."""
        self._alive()
        return [self.program.path(n) for n in self.nodes]

    def show(self) -> Selection:
        """Print path, op and specs of the nodes, at most 40 lines; returns itself."""
        print(self)  # printing is the purpose of this method
        return self

    def assert_count(self, n: int) -> Selection:
        """Return itself if it has `n` nodes. Raises: CountMismatch with the first names."""
        if self.count != n:
            got = f"{self.count}: {self.names()[:10]}"
            raise CountMismatch("the selection has an unexpected number of nodes", expected=n, got=got)
        return self

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self.nodes)

    def __contains__(self, node: object) -> bool:
        return node in self.nodes

    def __repr__(self) -> str:
        alive = [self.program.path(n) for n in self.nodes[:3] if n in self.program.graph]
        names = ": " + ", ".join(alive) + (", ..." if self.count > 3 else "") if alive else ""
        return f"Selection({self.count} node{'s' * (self.count != 1)} of {self.program.name!r}{names})"

    def __str__(self) -> str:
        self._alive()
        p = self.program
        width = max((len(p.path(n)) for n in self.nodes[: MOST + 1]), default=0)
        lines = [f"{p.path(n):<{width}}  {p.op(n):<14} {', '.join(map(repr, p.specs(n)))}" for n in self.nodes]
        return wrapped("\n".join(listed(lines))) or "(empty selection)"

    # -- sets --------------------------------------------------------------------------------------------------------
    def __or__(self, other: Selection) -> Selection:
        return self._made(set(self.nodes) | self._other(other))

    def __and__(self, other: Selection) -> Selection:
        return self._made(set(self.nodes) & self._other(other))

    def __sub__(self, other: Selection) -> Selection:
        return self._made(set(self.nodes) - self._other(other))

    def __invert__(self) -> Selection:
        return self._made(set(self.program.nodes()) - set(self.nodes))

    def nth(self, i: int) -> Selection:
        """Select only node `i`, counted from 0; a negative `i` counts from the end. Raises: CountMismatch."""
        if not -self.count <= i < self.count:
            raise CountMismatch("node index out of range", expected=f"{-self.count} <= index < {self.count}", got=i)
        return self._made({self.nodes[i]})

    def where(self, test: Callable[[NodeId], bool]) -> Selection:
        """Select the nodes that pass a test."""
        return self._made({n for n in self.nodes if test(n)})

    def parents(self, k: int = 1) -> Selection:
        """Select nodes at most `k` edges upstream, without the selection itself."""
        return self._grown(k, self.program.graph.predecessors)

    def children(self, k: int = 1) -> Selection:
        """Select nodes at most `k` edges downstream, without the selection itself."""
        return self._grown(k, self.program.graph.successors)

    def between(self, other: Selection) -> Selection:
        """Select the nodes on paths from this selection to the other, ends included."""
        return self._made(self.program.reachable(self._other(other)) & self.program.dependents(self.nodes))

    def inner(self) -> Selection:
        """Select the nodes whose operands and readers are all in this selection."""
        return self - self.boundary()

    def boundary(self) -> Selection:
        """Select the nodes of this selection that read a node outside of it, or that a node outside of it reads."""
        inside, graph = set(self.nodes), self.program.graph
        return self.where(lambda n: any(m not in inside for m in (*graph.predecessors(n), *graph.successors(n))))

    def in_edges(self) -> tuple[EdgeId, ...]:
        """Return the edges that enter from outside, in the order of target and port."""
        inside, p = set(self.nodes), self.program
        return tuple(e for n in self.nodes for e in p.in_edges(n) if p.graph.source(e) not in inside)

    def out_edges(self) -> tuple[EdgeId, ...]:
        """Return the edges that leave to the outside, in the order of their sources."""
        inside, p = set(self.nodes), self.program
        return tuple(e for n in self.nodes for e in p.out_edges(n) if p.graph.target(e) not in inside)

    # -- units -------------------------------------------------------------------------------------------------------
    def units(self, kind: str) -> Units:
        """Return the units of one kind (`heads`, `neurons`, ...) that the nodes produce; see `Units.within`."""
        if kind not in (*UNIT_KINDS, "units"):
            raise UsageError("unknown kind of units", expected=", ".join((*UNIT_KINDS, "units")), got=kind)
        return Units.within(self, kind)

    @property
    def heads(self) -> Units:
        """Query heads in the results of the nodes."""
        return self.units("heads")

    @property
    def kv_groups(self) -> Units:
        """Key heads in the results of the nodes, each with its query heads."""
        return self.units("kv_groups")

    @property
    def neurons(self) -> Units:
        """Hidden units of an MLP in the results of the nodes."""
        return self.units("neurons")

    @property
    def channels(self) -> Units:
        """Channels of the residual stream or of convolutions in the results of the nodes."""
        return self.units("channels")

    @property
    def experts(self) -> Units:
        """Experts of mixture-of-experts layers in the results of the nodes."""
        return self.units("experts")

    @property
    def layers(self) -> Units:
        """Numbered modules, such as `layers.3`, that contain the nodes."""
        self.names()  # raises StaleSelection
        here, whole = layers(self.program, self.nodes), layers(self.program)
        chosen = {prefix: tuple(whole[prefix].index(n) for n in numbers) for prefix, numbers in here.items()}
        return Units(self.program, chosen, {prefix: len(whole[prefix]) for prefix in here})

    # -- refreshing -------------------------------------------------------------------------------------------------
    def refresh(self) -> Selection:
        """Repeat the query on the present program; of a combination of selections, keep the nodes that still exist."""
        if self.query is None:
            alive = [n for n in self.nodes if n in self.program.graph]
            return replace(self, nodes=_ordered(self.program, alive), version=self.program.version)
        return Selection.of(self.program, **self.query)

    def why_not(self, path: str) -> str:
        """Return a text that names the filter by which the selection left out the node with this path."""
        node = self.program.node(path)
        if node in self.nodes:
            return f"{path} is selected"
        for name, test in _tests(self.program, self.query or {}):
            if not test(node):
                return f"{path} was dropped by {name}"
        return f"{path} is not in the selections that were combined"

    def _alive(self) -> None:
        lost = [n for n in self.nodes if n not in self.program.graph]
        if lost:
            names = ", ".join(self.program.history.describe(n)[0] or repr(n) for n in lost[:10])
            raise StaleSelection("selected nodes were deleted", got=names, fix="selection.refresh()")

    # -- edits -------------------------------------------------------------------------------------------------------
    def edit(self, why: str, *, allow_empty: bool = False) -> Transaction:
        """Check the selection and open an edit of the program. Raises: EmptySelection, StaleSelection."""
        self._alive()
        if not self.nodes and not allow_empty:
            pattern = (self.query or {}).get("pattern", "")
            near = ", ".join(get_close_matches(pattern, [self.program.path(n) for n in self.program.nodes()], 3, 0.3))
            fix = f"did you mean {near}?" if near else None
            raise EmptySelection("no nodes are selected", where=pattern or self.program.name, fix=fix)
        return self.program.edit(why)

    def replace(self, subprogram: Program, why: str = "replace a selection") -> dict[str, NodeId]:
        """Replace the selection by `subprogram`, in one edit; return a dict from path in it to new node."""
        with self.edit(why) as e:
            return e.replace(self, subprogram)

    def remove(self, why: str = "remove a selection") -> None:
        """Remove the nodes, in one edit; all readers outside of the selection must be junctions."""
        with self.edit(why) as e:
            e.remove(self)

    @keywords(GateOptions)
    def gate(
        self, kind: str = "hard_concrete", *, why: str | None = None, **options: Unpack[GateKeywords]
    ) -> tuple[NodeId, ...]:
        """Gate the result of each node, in one edit; see `Transaction.gate`."""
        with self.edit(why or "gates on nodes") as e:
            return e.gate(list(self.nodes), kind, **options)

    def _other(self, other: Selection) -> set[NodeId]:
        """Return the nodes of another selection of this program. Raises: ForeignNode, StaleSelection."""
        if not isinstance(other, Selection) or other.program is not self.program:
            what = "of different programs" if isinstance(other, Selection) else "with an object of another type"
            raise ForeignNode(f"cannot combine selections {what}", where=repr(self), got=repr(other)[:120])
        other._alive()
        return set(other.nodes)

    def _made(self, nodes: set[NodeId]) -> Selection:
        replace(self, nodes=tuple(nodes))._alive()
        return Selection(self.program, _ordered(self.program, nodes), self.program.version)

    def _grown(self, k: int, step: Callable[[NodeId], tuple[NodeId, ...]]) -> Selection:
        seen, front = set(self.nodes), set(self.nodes)
        for _ in range(k):
            front = {m for n in front for m in step(n)} - seen
            seen |= front
        return self._made(seen - set(self.nodes))


def _ordered(p: Program, nodes: Any) -> tuple[NodeId, ...]:
    return tuple(sorted(nodes, key=p.order_labels.key))


def _tests(
    p: Program, query: Mapping[str, Any], name: Callable[[NodeId], str] | None = None
) -> list[tuple[str, Callable[[NodeId], bool]]]:
    """Return the filters of a query as (description, predicate); the pattern matches `name` of a node, or its path."""
    name = name or p.path
    tests: list[tuple[str, Callable[[NodeId], bool]]] = []
    if (pattern := query.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise BadPattern("the pattern is not a string", got=repr(pattern)[:80], fix="pass a predicate as where=")
        tests.append((f"pattern={pattern!r}", lambda n: matches(pattern, name(n))))
    if (op := query.get("op")) is not None:
        tests.append((f"op={op!r}", lambda n: p.op(n) == op))
    if (kind := query.get("kind")) is not None:
        if kind not in ("op", "source"):
            raise UsageError("unknown kind of nodes", expected="op or source", got=kind)
        tests.append((f"kind={kind!r}", lambda n: (p.op(n) in KINDS) == (kind == "source")))
    if (dtype := query.get("dtype")) is not None:
        wanted = as_dtype(dtype)
        tests.append((f"dtype={wanted.name!r}", lambda n: bool(p.specs(n)) and p.specs(n)[0].dtype is wanted))
    if (regex := query.get("regex")) is not None:
        try:
            found = re.compile(regex)
            found.search("")
        except (re.error, TypeError) as error:
            raise BadPattern("invalid regular expression", where="regex", got=f"{regex!r:.80}: {error}") from None
        tests.append((f"regex={regex!r}", lambda n: found.search(p.path(n)) is not None))
    if (test := query.get("where")) is not None:
        check_type("where", test, Callable, "a function of a handle")  # pyright: ignore[reportArgumentType]  # it is one
        tests.append(("where=...", test))
    return tests
