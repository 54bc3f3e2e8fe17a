"""Program -> Program: the gradient as a graph, made by running the program on symbols and recording its backward.

The forward nodes keep their names, those of the backward are named `grad.<path of the forward node>.<op>`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

from graphwright.array import Spec, UnboundDim
from graphwright.autograd import active_recorder, enable_grad, grad
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import OPS, call
from graphwright.program.derived.gradient import Gradient
from graphwright.program.kinds import INPUT, SOURCES, STATE
from graphwright.program.op_graph import Value
from graphwright.program.recorder import record_into
from graphwright.program.run import tensors
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.autograd import Tensor
    from graphwright.program.program import Program

Ref = NodeId | Value | str
MODES = ("full", "one_step")
_KEPT = 8  # gradients kept per program
_following = RLock()  # a gradient is brought up to date by one thread at a time


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
    """The program that computes d Σ outputs / d wrt from the inputs of `p`, over the same params; it writes no state.

    One run's gradient is kept with the program and follows it: asked for again after an edit, the same program is
    brought up to date, which costs what the edit touched. `fork()` gives one of its own.

    Args:
        outputs: floating values, or names of nodes or outputs.
        wrt: params, inputs or inner values; the results are named `grad.<path>`. What the outputs do not read, over no
            path, has the gradient 0.
        sizes: numbers for the named sizes of the inputs.
        seeded: the program has an input `seed.<output>` more per output, to weigh its elements by; else ones.
        mode: how a gradient goes through carried state: "full" (back to the first of the steps) or "one_step" (what a
            step reads of a state is a constant).
        steps: runs to unroll; with more than one, every input has a leading axis of that size, the outputs are those of
            the last run, and `wrt` an inner value means that of the last run, a state the one before the first.
    Raises: UnboundDim for a size without a number; NoTape for a value that reaches the outputs through ops without a
        gradient only; UsageError.
    """
    sizes = sizes or {}
    roots = [endpoint(p, r) for r in ([outputs] if isinstance(outputs, Value | NodeId | str) else outputs)]
    wanted = [p.value(r) for r in wrt]
    if not roots or not wanted:
        raise UsageError("a gradient needs an output and something to differentiate by", got=f"{outputs!r}, {wrt!r}")
    if mode not in MODES or steps < 1:
        raise UsageError(
            "no such way through state", where=p.name, expected=f"{', '.join(MODES)}; steps >= 1", got=(mode, steps)
        )
    specs = [p.spec(n).bind(sizes) for n in p.inputs()]
    for node, spec in zip(p.inputs(), specs, strict=True):
        if spec.symbolic:
            raise UnboundDim(
                "an input has a size without a number",
                where=p.path(node),
                got=spec,
                fix='program.grad(outputs, wrt, {"B": 4, ...})',
            )
    if steps == 1 and not p.checkpoints and not any(p.of_kind(name) for name, row in OPS.items() if row.traits.opaque):
        return _followed(p, roots, wanted, sizes, seeded)
    if steps > 1:
        specs = [Spec((steps, *spec.shape), spec.dtype) for spec in specs]
    names = [p.path(n) for n in p.inputs()]
    if seeded:
        specs += [p.specs(r.node)[r.port].bind(sizes) for r in roots]
        names += [f"seed.{p.path(r)}" for r in roots]

    def backward(*feeds: Tensor) -> dict[str, Tensor]:
        given = dict(zip(p.input_names(), feeds, strict=False))
        for value in wanted:
            if p.op(value.node) == INPUT:
                given[p.path(value)].requires_grad = True
        leaves = {p.key(v.node): _leaf(p.weights[p.key(v.node)]) for v in wanted if p.op(v.node) == STATE}
        states = dict(leaves)
        with enable_grad():
            for t in range(steps - 1):
                states |= _advance(p, {name: x[t] for name, x in given.items()}, sizes, states, mode)
            last = {name: x[steps - 1] for name, x in given.items()} if steps > 1 else given
            values = tensors(p, last, dict(sizes), [*roots, *wanted], states)
            weights = list(feeds[len(given) :]) or [None] * len(roots)
            ends = [_total(values[r], weight) for r, weight in zip(roots, weights, strict=True)]
            sources = {v: _source(p, v, values[v], given, leaves if mode == "full" else states) for v in wanted}
            back = steps if mode == "full" else 1
            reached = [v for v in wanted if _reaches(p, v, roots, back)]
            found = dict(zip(reached, grad(ends, [sources[v] for v in reached]), strict=True)) if reached else {}
        return {
            f"grad.{p.path(v)}": found[v] if v in found else call("full_like", sources[v].detach(), value=0.0)
            for v in wanted
        }

    program = p.empty("backward")
    record_into(program, backward, specs, names)
    return program


def _followed(
    p: Program, roots: Sequence[Value], wanted: Sequence[Value], sizes: Mapping[str, int], seeded: bool
) -> Program:
    """The gradient of one run, kept with the program and brought up to date after edits."""
    refuse_broken(p)
    known: OrderedDict[Any, Gradient] = p.derived.setdefault("gradients", OrderedDict())
    key = (*roots, None, *wanted, tuple(sorted(sizes.items())), seeded)
    with _following:
        found = known.pop(key, None)  # after an error it is not kept
        if found is None or not found.usable:
            found = Gradient(p, roots, wanted, sizes, seeded)
        else:
            found.sync()
        known[key] = found
        if len(known) > _KEPT:
            known.popitem(last=False)
    return found.program


def _advance(
    p: Program, feeds: Mapping[str, Tensor], sizes: Mapping[str, int], states: Mapping[str, Tensor], mode: str
) -> dict[str, Tensor]:
    """The states after one run more, by key."""
    pairs = [p.operands(node) for node in p.assigns()]
    values = tensors(p, feeds, dict(sizes), [new for _, new in pairs], states)
    written = {p.key(state.node): values[new] for state, new in pairs}
    return {k: _leaf(v) for k, v in written.items()} if mode == "one_step" else written


def _leaf(value: Tensor) -> Tensor:
    """The value as one to differentiate by, without what made it."""
    recorder: Any = active_recorder.get()
    leaf = recorder.resolved(value).detach()
    leaf.requires_grad = leaf.dtype.is_float
    return leaf


def _source(
    p: Program, value: Value, last: Tensor, given: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> Tensor:
    """The tensor to differentiate by, for a value."""
    op = p.op(value.node)
    return given[p.path(value)] if op == INPUT else leaves[p.key(value.node)] if op == STATE else last


def _reaches(p: Program, value: Value, roots: Sequence[Value], steps: int) -> bool:
    """True if one of the roots reads the value over any path, through at most `steps` runs if it is a source."""
    needed = p.reachable(roots)
    for _ in range(steps - 1 if p.op(value.node) in SOURCES else 0):
        pairs = [p.operands(node) for node in p.assigns()]
        carried = [new for state, new in pairs if state.node in needed and new.node not in needed]
        if not carried:
            break
        needed |= p.reachable(carried)
    return value in roots or any(
        p.edge_value(e) == value for e in p.out_edges(value.node) if p.graph.target(e) in needed
    )


def _total(value: Tensor, weight: Tensor | None) -> Tensor:
    """Σ weight · value, which is differentiated."""
    if weight is not None:
        value = value * weight
    return value if value.size == 1 else value.sum()


def endpoint(p: Program, ref: Ref) -> Value:
    """A value by handle, name of a node, or name of an output."""
    return p.output(ref) if isinstance(ref, str) and ref in p.output_names() else p.value(ref)
