"""Rewrites of users: two functions of tensors, the first of which is found in a program and replaced by the second.

Both functions are traced with the specs of each occurrence of the pattern, and run on random samples.
Only if all results and gradients agree is the program edited, once for each rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Spec, float32, sample_sizes
from graphwright.autograd import Tensor, as_tensor, grad, scoped
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import NodeId
from graphwright.plugins import load_plugins
from graphwright.program.agreement import largest_difference
from graphwright.program.builder import record
from graphwright.program.editing.replace import boundary, replace
from graphwright.program.errors import NotConvex
from graphwright.program.kinds import CONST, INPUT, PARAM, STATE
from graphwright.program.op_graph import Value
from graphwright.program.validate import refuse_broken
from graphwright.report import Report
from graphwright.settings import AtLeastOne, NotNegative, Settings
from graphwright.surgery.rewriting.pattern import Occurrence, occurrences, removable

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

Function = Callable[..., Any]
_SEED = 0x5EED


class NotEquivalent(UsageError):
    """The replacement of a rewrite computes other values or gradients than its pattern."""


@dataclass(frozen=True, slots=True)
class Rewrite(Settings):
    """A pattern and its replacement, both functions of the same tensors.

    Attributes:
        name: name of the rewrite, for the journal and for `register_rewrite`.
        pattern: function of tensors to search for. It uses no parameters of its own: weights are arguments.
        replacement: function of the same tensors that returns results of the same specs. Its own parameters become
            weights of the program.
        examples: one array, tensor or spec per argument. Only its rank, and its dtype where the code of the pattern
            depends on the dtype, must be that of the values in the program; its sizes have no effect.
        tolerance: largest accepted difference of results and gradients, relative to the largest absolute value of the
            pattern's result or gradient.
        samples: number of random samples on which both functions run, for each combination of specs.
    """

    name: str
    pattern: Function
    replacement: Function
    examples: tuple[Any, ...]
    tolerance: NotNegative = 1e-5
    samples: AtLeastOne = 3

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not isinstance(self.name, str) or not self.name:
            raise UsageError("a rewrite needs a name", expected="a text", got=repr(self.name)[:80])
        if not isinstance(self.examples, tuple | list) or not len(self.examples):
            raise UsageError("a rewrite has no examples", where=self.name, expected="one per argument of the pattern",
                             got=type(self.examples).__name__, fix="examples=(gw.rand(2, 3),)")  # fmt: skip
        if wrong := [name for name in ("pattern", "replacement") if not callable(getattr(self, name))]:
            raise UsageError("not a function", where=f"{self.name}, {wrong[0]}", expected="a function of tensors",
                             got=repr(getattr(self, wrong[0]))[:80])  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class RewriteReport(Report):
    """The result of one rewrite.

    Attributes:
        rewrite: name of the rewrite.
        replaced: paths of the nodes whose results were replaced, in topological order; empty if nothing was edited.
        skipped: (path, reason) of occurrences that were left as they are.
        error: largest relative difference that the proofs found.
    """

    rewrite: str
    replaced: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    error: float


_registered: dict[str, Rewrite] = {}


def register_rewrite(rule: Rewrite) -> Rewrite:
    """Register a rewrite as a pass: `rewrite(program)` applies it. Raises: UsageError if the name is taken.

    A package registers its rewrites by an entry point of the group `graphwright.passes`, which names a `Rewrite`.
    """
    if rule.name in _registered:
        raise UsageError("a rewrite of this name is already registered", where=rule.name, fix="choose another name")
    _registered[rule.name] = rule
    return rule


def rewrites() -> dict[str, Rewrite]:
    """Return a dict of the registered rewrites by name, in order of registration; the first call loads plugins."""
    load_plugins("graphwright.passes", register_rewrite)
    return dict(_registered)


def rewrite(program: Program, *rules: Rewrite | str) -> list[RewriteReport]:
    """Apply rewrites to a program in order, each at all its occurrences, in one sweep and as one edit.

    Where two occurrences overlap, the first in topological order is replaced. Inner values of an occurrence that other
    nodes read stay in the program. A rewrite without occurrences makes no edit.

    Args:
        rules: rewrites, or names of registered ones; by default all registered ones.
    Returns: a report per rewrite; `program.undo()` reverts the last rewrite that made an edit.
    Raises: NotEquivalent if a replacement does not compute what its pattern computes; TraceError if a function cannot
        be traced; UsageError for an invalid rewrite; InvalidProgram for a program that an earlier edit left broken.
        The program is then as before the rewrite that failed.
    """
    known = rewrites()
    chosen: list[Rewrite] = []
    for rule in rules or known.values():
        if isinstance(rule, str):
            if rule not in known:
                expected = ", ".join(known) or "none is registered"
                raise UsageError("no rewrite of this name is registered", got=rule, expected=expected)
            rule = known[rule]
        if not isinstance(rule, Rewrite):
            raise UsageError("not a rewrite", expected="a Rewrite, or the name of a registered one",
                             got=repr(rule)[:80])  # fmt: skip
        chosen.append(rule)
    refuse_broken(program)
    return [_Sweep(program, rule).apply() for rule in chosen]


@dataclass(frozen=True, slots=True)
class _Site:
    """A proven occurrence.

    Attributes:
        arguments, results: values of the program that the replacement reads, and those that it replaces.
        nodes: the nodes to remove.
        shared: further nodes of the occurrence and its consts, readers first; removed if nothing reads them any more.
    """

    replacement: Program
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    nodes: list[NodeId]
    shared: list[NodeId]


def _replace(e: Transaction, site: _Site, moved: Mapping[Value, Value], path: str) -> dict[Value, Value]:
    """Replace one site in an open edit; return a dict from old to new result, like `moved` of the earlier sites.

    The node of the first result gets the path of the node that it replaces.
    """
    p, sub = e.program, site.replacement
    arguments = [moved.get(v, v) for v in site.arguments]
    inputs = dict(zip(sub.input_names(), arguments, strict=True))
    made = replace(e, site.nodes, sub, inputs | dict(zip(sub.output_names(), site.results, strict=True)))
    for node in site.shared:
        if node in p.graph and not p.out_edges(node) and node not in {v.node for v in p.outputs()}:
            e.remove(node)
    ends = [(sub.path(v), v.port) for v in sub.outputs()]
    values = [inputs[path] if path in inputs else Value(made[path], port) for path, port in ends]
    if values[0] not in arguments and p.free_name(path) == path:
        e.rename(values[0].node, path)
    return dict(zip(site.results, values, strict=True))


class _Sweep:
    """One application of a rewrite to a program."""

    def __init__(self, p: Program, rule: Rewrite) -> None:
        self.p, self.rule = p, rule
        self.skipped: list[tuple[str, str]] = []
        self.error = 0.0
        self._proven: set[tuple[Spec, ...]] = set()
        self._traced: dict[tuple[Spec, ...], Program | None] = {}

    def apply(self) -> RewriteReport:
        p, rule = self.p, self.rule
        sites = list(self.sites())
        names = tuple(p.path(site.results[0]) for site in sites)
        if sites:
            with p.edit(f"rewrite {rule.name}", author="pass", tool=rule.name) as e:
                moved: dict[Value, Value] = {}
                for site, path in zip(sites, names, strict=True):
                    moved.update(_replace(e, site, moved, path))
                    e.annotate(path, rewrite=rule.name, error=self.error)
        return RewriteReport(rule.name, names, tuple(self.skipped), self.error)

    def sites(self) -> Iterator[_Site]:
        """Yield the sites to replace. Each is proven; no two share a node."""
        p, rule = self.p, self.rule
        skeleton = self.pattern(tuple(_spec(x) for x in rule.examples))
        taken: set[NodeId] = set()
        done: set[Value] = set()
        for rough in occurrences(p, skeleton, exact=False):
            ends = tuple(rough[v] for v in skeleton.outputs())
            arguments = tuple(rough[Value(n)] for n in skeleton.inputs())
            if ends[0] in done or (found := self.exactly(arguments, ends)) is None:
                continue
            pattern, occurrence = found
            path, nodes = p.path(ends[0]), removable(p, pattern, occurrence)
            whole = {have.node for want, have in occurrence.items() if pattern.op(want.node) not in (INPUT, CONST)}
            done.add(ends[0])
            if taken & whole:
                self.skipped.append((path, "the occurrence overlaps with an earlier one"))
                continue
            try:
                boundary(p, nodes)
            except NotConvex as error:
                self.skipped.append((path, error.what))
                continue
            with scoped(*path.split(".")[:-1]):
                after = self.replacement(tuple(p.spec(v) for v in arguments), [p.spec(v) for v in ends], path)
            self.prove(pattern, after, path)
            taken |= {*nodes, *(v.node for v in ends)}
            shared = {have.node for want, have in occurrence.items() if pattern.op(want.node) != INPUT} - set(nodes)
            yield _Site(after, arguments, ends, nodes, sorted(shared, key=p.order_labels.key, reverse=True))

    def exactly(self, arguments: Sequence[Value], ends: Sequence[Value]) -> tuple[Program, Occurrence] | None:
        """Trace the pattern with the specs of the arguments; return it and its occurrence at `ends`, or None."""
        specs = tuple(self.p.spec(v) for v in arguments)
        if specs not in self._traced:
            try:
                self._traced[specs] = self.pattern(specs)
            except Exception as error:  # code of the user, which ran on the examples
                self._traced[specs] = None
                what = error.what if isinstance(error, GraphwrightError) else f"{type(error).__name__}: {error}"
                self.skipped.append((self.p.path(ends[0]), f"the pattern fails for these specs: {what}"))
        pattern = self._traced[specs]
        if pattern is None or len(pattern.outputs()) != len(ends):
            return None
        fixed = {Value(n): v for n, v in zip(pattern.inputs(), arguments, strict=True)}
        fixed |= {want: have for want, have in zip(pattern.outputs(), ends, strict=True) if want not in fixed}
        found = next(occurrences(self.p, pattern, fixed), None)
        return None if found is None else (pattern, found)

    def pattern(self, specs: tuple[Spec, ...]) -> Program:
        """Trace the pattern. Raises: UsageError if a pattern of this form cannot be searched for."""
        made, where = _traced(self.rule.pattern, specs), f"pattern of rewrite {self.rule.name!r}"
        if own := [made.path(n) for kind in (PARAM, STATE) for n in made.of_kind(kind)]:
            raise UsageError("the pattern reads variables of its own", where=where, got=", ".join(own[:5]),
                             fix="make each weight an argument of the pattern")  # fmt: skip
        if idle := [made.path(v) for v in made.outputs() if made.op(v.node) in (INPUT, CONST)]:
            raise UsageError("a result of the pattern is not computed", where=where, got=", ".join(idle))
        used = made.reachable(made.outputs())
        if unused := [made.path(n) for n in made.inputs() if n not in used]:
            raise UsageError("the pattern does not use an argument", where=where, got=", ".join(unused))
        return made

    def replacement(self, specs: tuple[Spec, ...], wanted: Sequence[Spec], path: str) -> Program:
        """Trace the replacement. Raises: UsageError if its results have other specs than those of the pattern."""
        made = _traced(self.rule.replacement, specs)
        if made.assigns() or any(made.op(v.node) in (PARAM, STATE) for v in made.outputs()):
            raise UsageError("the replacement assigns a variable, or returns one as it is",
                             where=f"rewrite {self.rule.name!r} at {path}")  # fmt: skip
        if (got := [made.spec(v) for v in made.outputs()]) != list(wanted):
            raise UsageError("the replacement has results of other specs than the pattern",
                             where=f"rewrite {self.rule.name!r} at {path}", expected=list(wanted), got=got)  # fmt: skip
        return made

    # -- proofs ------------------------------------------------------------------------------------------------------
    def prove(self, before: Program, after: Program, path: str) -> None:
        """Run both programs on samples, in float32 where they are narrower. Raises: NotEquivalent.

        Programs of specs that were proven before are not run again.
        """
        specs = tuple(before.spec(n) for n in before.inputs())
        if specs in self._proven:
            return
        self._proven.add(specs)
        dims = sample_sizes(specs)
        wide = tuple(Spec(s.bind(dims).shape, float32) if s.dtype.is_low else s.bind(dims) for s in specs)
        if wide != specs:
            before, after = record(self.rule.pattern, wide)[0], record(self.rule.replacement, wide)[0]
        rng = np.random.default_rng(_SEED)
        for _ in range(self.rule.samples):
            sample = [_sample(s, rng) for s in wide]
            seeds = [_sample(before.spec(v), rng) for v in before.outputs()]
            ours, theirs = (_values(q, sample, seeds) for q in (before, after))
            for what, one in ours.items():
                self.compare(what, one, theirs[what], path)

    def compare(self, what: str, one: np.ndarray | None, two: np.ndarray | None, path: str) -> None:
        """Compare two arrays; None is a gradient of zero. Raises: NotEquivalent."""
        if one is None and two is None:
            return
        other = one if two is None else two
        one, two = (np.zeros_like(other) if x is None else x for x in (one, two))
        gap, scale = largest_difference(one, two)
        error = gap / max(scale, float(np.finfo(np.float32).tiny))
        if not error <= self.rule.tolerance:
            raise NotEquivalent(f"the replacement computes another {what} than the pattern",
                                where=f"rewrite {self.rule.name!r} at {path}",
                                expected=f"a relative difference of at most {self.rule.tolerance:g}",
                                got=f"{error:.3g}", fix="correct the replacement, or pass tolerance=")  # fmt: skip
        self.error = max(self.error, error)


def _traced(fn: Function, specs: tuple[Spec, ...]) -> Program:
    """Trace a function with specs that may have named sizes, which stay variable."""
    dims = sample_sizes(specs)
    made = record(fn, [s.bind(dims) for s in specs])[0]
    if not dims:
        return made
    shapes = {name: s.shape for name, s in zip(made.input_names(), specs, strict=True) if s.symbolic}
    return record(fn, [s.bind(dims) for s in specs], sizes=shapes)[0]


def _spec(example: Any) -> Spec:
    return example if isinstance(example, Spec) else as_tensor(example).spec


def _sample(spec: Spec, rng: np.random.Generator) -> np.ndarray:
    """Return standard normal floats, or integers 0 and 1 (bools)."""
    if spec.dtype.is_float:
        return rng.standard_normal(spec.sizes).astype(spec.dtype.name)
    return rng.integers(0, 2, spec.sizes).astype(spec.dtype.name)


def _values(q: Program, sample: Sequence[np.ndarray], seeds: Sequence[np.ndarray]) -> Mapping[str, np.ndarray | None]:
    """Return the results of a program, and the gradients of Σ seed · result by its floating inputs, by their names."""
    feeds = [Tensor(as_tensor(x).data, requires_grad=x.dtype.kind == "f") for x in sample]
    outs = list(q(**dict(zip(q.input_names(), feeds, strict=True))).values())
    found: dict[str, np.ndarray | None] = {f"result {i}": out.numpy() for i, out in enumerate(outs)}
    roots = [(out, as_tensor(seed)) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad]
    wanted = [(i, x) for i, x in enumerate(feeds) if x.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if roots and wanted:
        grads = grad([r for r, _ in roots], [x for _, x in wanted], [s for _, s in roots], allow_unused=True)
    for (i, _), g in zip(wanted, grads, strict=True):
        found[f"gradient by argument {i}"] = None if g is None else g.numpy()
    return found
