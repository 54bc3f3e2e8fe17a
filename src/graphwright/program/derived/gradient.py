"""The gradient of a program as a program, with backward nodes named `grad.<path of the forward node>.<op>`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

from graphwright.array import Spec, UnboundDim
from graphwright.autograd import NoTape, Tensor, active_recorder, enable_grad, grad, scoped
from graphwright.errors import UsageError, check_type
from graphwright.graph import NodeId
from graphwright.ops import call
from graphwright.program.derived.backward import BackwardGraph, updatable, writes
from graphwright.program.kinds import INPUT, SOURCES, STATE
from graphwright.program.op_graph import Value
from graphwright.program.primitives import set_outputs
from graphwright.program.recorder import record_into
from graphwright.program.run import tensors
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.program.program import Program

Ref = NodeId | Value | str
MODES = ("full", "one_step")
_CACHED = 8  # gradients per program
_updating = RLock()  # one thread at a time updates a cached gradient


def differentiate(
    p: Program,
    outputs: Ref | Sequence[Ref],
    wrt: Sequence[Ref],
    sizes: Mapping[str, int] | None = None,
    *,
    seeded: bool = False,
    mode: Literal["full", "one_step"] = "full",
    steps: int = 1,
) -> Program:
    """Return the program that computes d Σ outputs / d wrt from the inputs of `p`, over the same params.

    The gradient program assigns no state. With `steps=1` it is cached with `p` and updated in place after edits of `p`,
    visiting only nodes that the edits affect; `fork()` it to get a copy that stays unchanged.

    Args:
        outputs: floating values, or names of nodes or outputs.
        wrt: params, inputs or inner values; the results are named `grad.<path>`. A value that no output depends on
            has gradient 0.
        sizes: values of the named sizes of the inputs.
        seeded: weight the elements of each output by an additional input `seed.<output>` instead of by 1.
        mode: the gradient through loop-carried state: "full" (back to the first step) or "one_step" (a state read by a
            step is a constant).
        steps: number of runs to unroll. Above 1 every input has a leading axis of that size, the outputs are those of
            the last run, and `wrt` means an inner value of the last run, or a state before the first run (with
            "one_step" before the last).
    Raises: UnboundDim if a named size has no value; NoTape for a value that reaches the outputs only through ops
        without a gradient; UsageError for empty `outputs` or `wrt`, or an invalid mode or number of steps.
    """
    sizes = sizes or {}
    check_type("outputs", outputs, (Value, NodeId, Iterable), "a value, or a list of values")
    roots = [endpoint(p, r) for r in ([outputs] if isinstance(outputs, Value | NodeId | str) else outputs)]
    check_type("wrt", wrt, Iterable, "a list of values")
    wanted = [p.value(r) for r in wrt]
    if not roots or not wanted:
        raise UsageError("outputs or wrt is empty: a gradient needs both", got=f"{outputs!r}, {wrt!r}")
    if mode not in MODES or steps < 1:
        expected = f"mode {' or '.join(MODES)}; steps >= 1"
        raise UsageError("invalid mode or number of steps", where=p.name, expected=expected, got=(mode, steps))
    specs = [p.spec(n).bind(sizes) for n in p.inputs()]
    for node, spec in zip(p.inputs(), specs, strict=True):
        if spec.symbolic:
            raise UnboundDim("a named dimension of an input has no size", where=p.path(node), got=spec,
                             fix='program.grad(outputs, wrt, {"B": 4, ...})')  # fmt: skip
    if steps == 1 and updatable(p):
        return _cached_gradient(p, roots, wanted, sizes, seeded)
    if steps > 1:
        specs = [Spec((steps, *spec.shape), spec.dtype) for spec in specs]
    names = [p.path(n) for n in p.inputs()]
    if seeded:
        specs += [p.specs(r.node)[r.port].bind(sizes) for r in roots]
        names += [_seed_name(p, r) for r in roots]

    def backward(*feeds: Tensor) -> dict[str, Tensor]:
        given = dict(zip(p.input_names(), feeds, strict=False))
        for value in wanted:
            if p.op(value.node) == INPUT:
                given[p.path(value)].requires_grad = True
        leaves = {p.key(v.node): _leaf(p.weights[p.key(v.node)]) for v in wanted if p.op(v.node) == STATE}
        states = dict(leaves)
        with enable_grad():
            for t in range(steps - 1):
                now, written = {name: x[t] for name, x in given.items()}, writes(p)
                values = tensors(p, now, dict(sizes), [new for _, new in written], states)
                made = {p.key(state.node): values[new] for state, new in written}
                states |= {k: _leaf(v) for k, v in made.items()} if mode == "one_step" else made
            last = {name: x[steps - 1] for name, x in given.items()} if steps > 1 else given
            values = tensors(p, last, dict(sizes), [*roots, *wanted], states)
            seeds = list(feeds[len(given) :]) or [None] * len(roots)
            ends = []
            for root, seed in zip(roots, seeds, strict=True):
                end = values[root] if seed is None else values[root] * seed
                ends.append(end if end.numel() == 1 else end.sum())
            sources = {v: values[v] for v in wanted}
            for v in wanted:
                if p.op(v.node) == INPUT:
                    sources[v] = given[p.path(v)]
                elif p.op(v.node) == STATE:
                    sources[v] = (leaves if mode == "full" else states)[p.key(v.node)]
            back = steps if mode == "full" else 1
            reached = [v for v in wanted if _reaches(p, v, roots, back)]
            found = dict(zip(reached, grad(ends, [sources[v] for v in reached]), strict=True)) if reached else {}
        zeros = {v: call("full_like", sources[v].detach(), value=0.0) for v in wanted if v not in found}
        return {f"grad.{p.path(v)}": found[v] if v in found else zeros[v] for v in wanted}

    program = p.empty("backward")
    record_into(program, backward, specs, names=names)
    return program


def _seed_name(p: Program, root: Value) -> str:
    return f"seed.{p.path(root)}"


def endpoint(p: Program, ref: Ref) -> Value:
    """Return a value by handle, node name or output name."""
    return p.output(ref) if isinstance(ref, str) and ref in p.output_names() else p.value(ref)


class GradientGraph:
    """The gradient d Σ roots / d wanted as a program; `update` follows the edits of `source`, which is never changed.

    Its `program` maps the inputs of the source to `grad.<path>` per wanted value, over the same variables. `sizes` are
    the values of the named sizes of the inputs; if `seeded`, each root is weighted by an additional input
    `seed.<path>`.
    """

    def __init__(
        self, source: Program, roots: Sequence[Value], wanted: Sequence[Value], sizes: Mapping[str, int], seeded: bool
    ) -> None:
        self.source, self.roots, self.wanted = source, list(roots), list(wanted)
        self._backward = BackwardGraph(source, wanted, sizes, f"grad of {source.name}", self._seeds_at)
        self.mirror = self._backward.mirror
        self.program = self.mirror.program
        self._zeros: dict[Value, Value] = {}
        self._seeds: list[Value | None] = [None] * len(self.roots)
        if seeded:
            for i, root in enumerate(self.roots):
                spec = source.specs(root.node)[root.port].bind(sizes)
                self._seeds[i] = Value(self.mirror.recorder.source(INPUT, _seed_name(source, root), spec, {}))
        self._build([v.node for v in (*self.roots, *self.wanted)])

    @property
    def usable(self) -> bool:
        """True while only this object has edited `program`, the inputs (also the seeds) are unchanged, and the roots
        and wanted values still exist.
        """
        source, p = self.source, self.program
        if not self.mirror.usable or any(v.node not in source.graph for v in (*self.roots, *self.wanted)):
            return False
        fed = [(seed, root) for seed, root in zip(self._seeds, self.roots, strict=True)
               if seed is not None and p.op(seed.node) == INPUT]  # fmt: skip
        now = [(_seed_name(source, r), source.specs(r.node)[r.port].bind(self.mirror.sizes)) for _, r in fed]
        return [(p.path(seed.node), p.spec(seed)) for seed, _ in fed] == now

    def update(self) -> None:
        """Follow the edits since the last update. After an error this object must not be used again."""
        if self.mirror.changed:
            self._build([])

    def _build(self, needed: Sequence[NodeId]) -> None:
        with self.mirror.updating() as changed:
            self._backward.update(self.mirror.update(changed, needed))
            self._set_outputs()
        for i, seed in enumerate(self._seeds):
            if seed is not None and self.program.op(seed.node) != INPUT and self.mirror.unread(seed.node):
                self.mirror.discard([seed.node])
                self._seeds[i] = None
        self.mirror.sweep()

    def _seeds_at(self, value: Value) -> Iterable[Value]:
        return [self._seed(i) for i, root in enumerate(self.roots) if root == value]

    def _seed(self, root: int) -> Value:
        seed, mirror = self._seeds[root], self.mirror
        twin = mirror.tensor(mirror.twin(self.roots[root]))
        if seed is None or mirror.spec(seed) != twin.spec:
            mirror.discard([] if seed is None else [seed.node])
            with scoped("grad", self.source.path(self.roots[root])):
                seed = self._seeds[root] = mirror.recorder.value_of(call("full_like", twin, value=1.0))
        return seed

    def _set_outputs(self) -> None:
        """Set the outputs of the program. Raises: NoTape if roots depend on a value only through ops without a vjp."""
        source, p, outputs = self.source, self.program, {}
        reached: set[NodeId] | None = None
        for value in self.wanted:
            name, total = f"grad.{source.path(value)}", self._backward.gradient(value)
            if total is not None:
                if value in self._zeros:
                    self.mirror.discard([self._zeros.pop(value).node])
                outputs[name] = total
                continue
            readers = [n for n in source.graph.successors(value.node) if value in self.mirror.operands.get(n, ())]
            if readers and reached is None:
                reached = source.reachable(self.roots)
            if value in self.roots or (reached is not None and not reached.isdisjoint(readers)):
                what = "a value reaches the outputs only through ops without a gradient"
                got = f"{source.specs(value.node)[value.port]}, read by {', '.join(map(source.op, readers)) or 'no op'}"
                raise NoTape(what, where=source.path(value), got=got)
            self._zeros[value] = outputs[name] = self._zero(value)
        if list(outputs.items()) != list(zip(p.output_names(), p.outputs(), strict=True)):
            set_outputs(p, outputs)

    def _zero(self, value: Value) -> Value:
        known, like = self._zeros.get(value), self.mirror.twin(value)
        if known is not None:
            if self.program.operands(known.node) == [like] and self.mirror.spec(known) == self.mirror.spec(like):
                return known
            self.mirror.discard([known.node])
        with scoped("grad", self.source.path(value)):
            return self.mirror.recorder.value_of(call("full_like", self.mirror.tensor(like), value=0.0))


def _cached_gradient(
    p: Program, roots: Sequence[Value], wanted: Sequence[Value], sizes: Mapping[str, int], seeded: bool
) -> Program:
    refuse_broken(p)
    cached: OrderedDict[Any, GradientGraph] = p.derived.setdefault("gradients", OrderedDict())
    key = (*roots, None, *wanted, tuple(sorted(sizes.items())), seeded)
    with _updating:
        found = cached.pop(key, None)  # out of the cache while it is updated: an error leaves it unusable
        if found is None or not found.usable:
            found = GradientGraph(p, roots, wanted, sizes, seeded)
        else:
            found.update()
        cached[key] = found
        if len(cached) > _CACHED:
            cached.popitem(last=False)
    return found.program


def _leaf(value: Tensor) -> Tensor:
    """Return a detached copy of a value; if its dtype is floating, the copy requires a gradient."""
    recorder: Any = active_recorder.get()
    leaf = recorder.resolved(value).detach()
    leaf.requires_grad = leaf.dtype.is_float
    return leaf


def _reaches(p: Program, value: Value, roots: Sequence[Value], steps: int) -> bool:
    """Return True if a root depends on a value.

    For an input, param, const or state, also follow state that is carried through `steps` consecutive runs.
    """
    needed = p.reachable(roots)
    for _ in range(steps - 1 if p.op(value.node) in SOURCES else 0):
        assigned = [new for state, new in writes(p) if state.node in needed and new.node not in needed]
        if not assigned:
            break
        needed |= p.reachable(assigned)
    readers = [e for e in p.out_edges(value.node) if p.graph.target(e) in needed]
    return value in roots or any(p.edge_value(e) == value for e in readers)
