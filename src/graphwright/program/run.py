"""Running a program node by node on arrays: afterwards every value can be read, and the gradient taken.

This is the slow reference semantics of a program; a plan must agree with it bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from graphwright.array import CPU, NDArray, empty
from graphwright.autograd import Parameter, Tensor, active_recorder, as_tensor
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import call, get
from graphwright.program.derived.rewrite import feed_name, patch_point
from graphwright.program.errors import FeedError, StaleRun, ValueReleased
from graphwright.program.gates import fold, foldable, folding_pays
from graphwright.program.kinds import ASSIGN, CONST, INPUT, STORED
from graphwright.program.op_graph import Ref, Value
from graphwright.program.patterns import patterns, reading
from graphwright.program.run_comparison import compared
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.autograd import Variable
    from graphwright.program.derived.rewrite import PatchPoint
    from graphwright.program.program import Program


def check_feeds(p: Program, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the inputs as tensors of the declared dtypes, and the sizes of named dimensions.

    Raises: FeedError listing every input that is missing, unknown or of a wrong shape or dtype.
    """
    dims: dict[str, int] = {}
    result: dict[str, Any] = {}
    declared = {p.path(n): p.spec(n) for n in p.inputs()}
    wrong = [f"{name}: not an input" for name in feeds if name not in declared]
    for name, spec in declared.items():
        if name not in feeds:
            wrong.append(f"{name}: missing, expected {spec}")
            continue
        try:
            tensor = as_tensor(feeds[name])
        except GraphwrightError as error:
            wrong.append(f"{name}: {error.what}, got {error.got}")
            continue
        have, want = tensor.dtype, spec.dtype
        if have is not want and have.kind == want.kind and (have.itemsize <= want.itemsize or have.name == "float64"):
            tensor = tensor.to(want)  # without a change of values; Python floats are float64
        if tensor.dtype is not want:
            wrong.append(f"{name}: expected {spec}, got {tensor.spec}")
        elif not spec.match(tensor.shape, dims):
            wrong.append(f"{name}: expected {spec.bind(dims)}, got {tensor.spec}")
        result[name] = tensor
    if wrong:
        lines, expected = "\n  ".join(wrong), ", ".join(f"{n}: {s}" for n, s in declared.items())
        raise FeedError(f"the inputs do not match their declaration:\n  {lines}", where=p.name, expected=expected)
    return result, dims


def step(p: Program, node: NodeId, op: str, ins: list[Any], dims: Mapping[str, int]) -> tuple[Any, ...]:
    """Return the results of one node on arrays or tensors. Raises: the op's error, which then names the node."""
    if not ins and p.is_junction(node):
        spec = p.spec(node).bind(dims)
        zero = empty(spec.sizes, spec.dtype)
        return (call("full_like", zero, value=0.0),)
    try:
        result = call(op, *ins, **get(op).bind_all_sizes(p.attrs(node), dims))
    except GraphwrightError as error:
        error.where = f"{p.path(node)} ({op})" if error.where in (None, op) else f"{p.path(node)}: {error.where}"
        error.add_note(origin(p, node))
        raise
    return result if isinstance(result, tuple) else (result,)


def origin(p: Program, node: NodeId) -> str:
    """Describe a failed node: its operands, and the edit that changed it last."""
    reads = ", ".join(f"{p.path(v)}: {p.spec(v)}" for v in p.operands(node)) or "nothing"
    entries = sorted([*p.blame(node), *p.blame(p.path(node))], key=lambda entry: entry.seq)
    edit = f'; edit "{entries[-1].why}" changed it last' if entries else ""
    return f"{p.path(node)} reads {reads}{edit}"


def evaluate(p: Program, feeds: Mapping[str, Any]) -> dict[str, Tensor]:
    """Run a program on tensors, recording ops on the autograd tape, or inside a trace under the names of the nodes.

    Returns: the outputs by name. Params are the program's own variables, which receive the gradients.
    """
    return evaluate_with(p, feeds, ())[0]


def evaluate_with(
    p: Program, feeds: Mapping[str, Any], more: Sequence[Value]
) -> tuple[dict[str, Tensor], Mapping[Value, Tensor]]:
    """Run a program as `evaluate` does; also return the values `more`, params as variables."""
    recorder: Any = active_recorder.get()
    checked, dims = check_feeds(p, feeds)
    with reading(() if recorder is not None else patterns(p).values()):
        values = tensors(p, checked, dims, [*p.outputs(), *more, *p.assigns()], trained=True)
    others = {v: values[v] for v in more}
    outputs = {name: values[v] for name, v in zip(p.output_names(), p.outputs(), strict=True)}
    if p.assigns():
        pairs = [p.operands(node) for node in p.order() if p.op(node) == ASSIGN]
        assigned = [p.weights[p.key(target.node)] for target, _ in pairs]
        memory = {id(w.data.storage) for w in assigned if isinstance(w.data, NDArray)}
        # outside a trace, results in memory that is about to be written are copied
        now = recorder.resolved if recorder is not None else lambda t: t.clone() if id(t.data.storage) in memory else t
        outputs = {name: now(t) for name, t in outputs.items()}
        others = {v: t if isinstance(t, Parameter) else now(t) for v, t in others.items()}
        for variable, value in zip(assigned, [now(values[v]) for _, v in pairs], strict=True):
            variable.assign(value)
    return outputs, others


def tensors(
    p: Program, feeds: Mapping[str, Tensor], dims: Mapping[str, int], roots: Sequence[Value | NodeId],
    states: Mapping[str, Tensor] | None = None, *, trained: bool = False,
) -> dict[Value, Tensor]:  # fmt: skip
    """Compute the roots and every value that they need, as tensors; no variable is written.

    Args:
        feeds, dims: inputs by name, of the declared dtypes; numbers by named size.
        states: values by key to use in place of variables.
        trained: True if gradients of weights are needed. A unit gate may then multiply the weight of the next linear op
            instead of the op's operand, and the values between the gate and this op are not gated.
    """
    refuse_broken(p)
    recorder: Any = active_recorder.get()
    groups: dict[NodeId, Any] = {}
    if recorder is not None:
        recorder.depends(p)
        recorder.assume(lambda: p.checkpoints)
        here = object()  # each run in one trace has its own checkpoint groups
        groups = {node: (here, k) for k, group in enumerate(p.checkpoints) for node in group}
    values: dict[Value, Tensor] = {}
    needed = p.reachable(roots)
    late = foldable(p, {v for v in roots if isinstance(v, Value)}) if trained else {}
    folded: dict[NodeId, NodeId] = {}  # product -> the site whose gate multiplies its weight
    with nullcontext() if recorder is not None else compared(p, needed, dims, feeds):
        for node in p.order():
            op = p.op(node)
            if node not in needed or op == ASSIGN:
                continue
            if node in late and folding_pays(p, node, late[node], values):
                values[Value(node)], folded[late[node]] = values[p.operands(node)[0]], node
                continue
            if op in STORED:
                key = p.key(node)
                values[Value(node)] = states[key] if states and key in states else p.weights[key]
            elif op == INPUT:
                values[Value(node)] = feeds[p.path(node)]
            else:
                ins = [values[v] for v in p.operands(node)]
                if recorder is not None:
                    recorder.recomputed.group = groups.get(node)
                if node in folded:
                    if recorder is not None:
                        recorder.expect("mul", p.path(folded[node]))
                    x, g = p.operands(folded[node])
                    ins[1] = fold(values[x].shape, values[g], ins[1])
                if recorder is not None:
                    recorder.expect(op, p.path(node))
                for port, result in enumerate(step(p, node, op, ins, dims)):
                    values[Value(node, port)] = result if isinstance(result, Tensor) else Tensor(result)
    if recorder is not None:
        recorder.recomputed.group = None
    return values


class Run:
    """The values of one run; `with program.run(...) as run:` frees them at the end.

    Attributes:
        program, version: the program and the version of it that ran.
        values: value -> array, for the values that were kept.
        keep: which values are available after the run: `all`, `outputs` or `some`.
        seconds: duration of the run.
        times: seconds by node, of every node that ran.
        patched: True if a value was replaced by a patch.
        closed: True once the values are freed.
    """

    def __init__(self, program: Program, keep: str, feeds: Mapping[str, NDArray], dims: Mapping[str, int]) -> None:
        self.program, self.version, self.keep = program, program.version, keep
        self.values: dict[Value, NDArray] = {}
        self.times: dict[NodeId, float] = {}
        self.seconds = 0.0
        self.patched = self.closed = False
        self._feeds, self._dims = feeds, dims
        self._weights: dict[str, tuple[NDArray, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the kept values, shared memory counted once; weights and inputs are not counted."""
        weights = [v.data for v in self.program.weights.values() if isinstance(v.data, NDArray)]
        foreign = {id(array.storage) for array in (*weights, *self._feeds.values())}
        blocks = {id(a.storage): a.storage.nbytes for a in self.values.values()}
        return sum(nbytes for block, nbytes in blocks.items() if block not in foreign)

    def value(self, ref: Ref) -> NDArray:
        """Return the array of a node or value. Raises: ValueReleased if the array was freed, or the run is closed."""
        wanted = self.program.value(ref)
        if wanted not in self.values:
            what, fix = "this value was freed when its last reader had run", "run(..., keep='all')"
            if wanted.node not in self.times:
                what, fix = "the run did not compute this value: no output needs it", "run(..., capture=[value])"
            if self.closed:
                what, fix = "the run is closed", "read values before close()"
            raise ValueReleased(what, where=self.program.path(wanted), fix=fix)
        return self.values[wanted]

    def grad(
        self, outputs: Ref | Sequence[Ref], wrt: Sequence[Ref], seed: Sequence[Any] | None = None
    ) -> list[NDArray]:
        """Return the gradients of Σ outputs (with seeds: Σ seed · output), by `program.grad` on the values of this run.

        Args:
            outputs: floating values, or names of nodes or outputs.
            wrt: params, inputs or inner values.
            seed: an array per output, of its shape and dtype; ones by default.
        Returns: an array per `wrt`, in order.
        Raises: StaleRun if the program or a weight changed since; ValueReleased after `close()`; errors of gradients.
        """
        self._check_fresh()
        roots = [outputs] if isinstance(outputs, Ref) else list(outputs)
        if seed is not None and len(seed) != len(roots):
            what = "seed does not have one array per output"
            raise UsageError(what, where=self.program.name, expected=len(roots), got=len(seed))
        gradient = self.program.grad(outputs, wrt, self._dims, seeded=seed is not None)
        seeds = dict(zip(gradient.input_names()[len(self._feeds) :], seed or (), strict=True))
        known = {self.program.path(v): (self.program.op(v.node), a) for v, a in self.values.items() if v.port == 0}
        given = {}
        for node in gradient.nodes():
            op, array = known.get(gradient.path(node), ("", None))
            # a const of the gradient itself may have a path of the program
            if array is not None and op == gradient.op(node) != CONST and len(gradient.specs(node)) == 1:
                given[Value(node)] = array
        found = run_nodes(gradient, {**self._feeds, **seeds}, keep="outputs", given=given)
        return [found[name] for name in gradient.output_names()]

    def _check_fresh(self) -> None:
        p = self.program
        if self.closed:
            raise ValueReleased("the run is closed", where=p.name, fix="take gradients before close()")
        if self.patched:
            raise UsageError("a patched run has no gradient: its values are not those of the program", where=p.name,
                             fix="make the patch an edit, or run without it")  # fmt: skip
        if p.version != self.version:
            edits = ", ".join(entry.why for entry in p.journal if entry.base_version >= self.version)
            expected, got = f"version {self.version}", f"version {p.version}: {edits}"
            raise StaleRun("the program was edited after this run", where=p.name, expected=expected, got=got,
                           fix="run again")  # fmt: skip
        read, now = self._weights.items(), p.weights.array
        changed = [key for key, (array, v) in read if now(key) is not array or array.storage.version != v]
        if changed:
            raise StaleRun("weights changed after this run", where=p.name, got=", ".join(changed[:5]), fix="run again")

    def close(self) -> None:
        """Free the values, but not weights, inputs or arrays that the caller holds. May be called again."""
        self.values, self._feeds, self._weights, self.closed = {}, {}, {}, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> NDArray:
        return self.value(self.program.output(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.program.output_names())

    def __repr__(self) -> str:
        kept = "closed" if self.closed else f"{len(self.values)} values, {self.nbytes:,} bytes"
        ran = f"{1e3 * self.seconds:.3g} ms, outputs {', '.join(self) or 'none'}"
        return f"Run({self.program.name!r} version {self.version}, keep={self.keep!r}: {kept}, {ran})"


def run(
    p: Program, feeds: Mapping[str, Any] | None = None, *, keep: str | Sequence[Ref] = "all",
    capture: Collection[PatchPoint] = (), patch: Mapping[PatchPoint, Any] | None = None,
    state: Mapping[str, Variable] | None = None, **named: Any,
) -> Run:  # fmt: skip
    """Run node by node on arrays; states and params are assigned together at the end.

    A value that is not kept is freed after its last reader; memory that views share is freed with the last view. The
    run is on the device of the inputs. A variable on another device, such as a state that a plan moved, is copied to
    that device when it is read, and stays on its own device when it is assigned.

    Args:
        feeds, named: arrays or tensors by input name.
        keep: "all", "outputs", or the values to keep besides the outputs.
        capture: more values (or values of edges) to keep.
        patch: dict from a node (its first result), a value or an edge to an array of the same shape that replaces it;
            floating arrays are rounded to the dtype of the value.
        state: variables by key to use instead of the program's own, such as a `State`.
    Raises: FeedError and, for an unknown `keep`, UsageError before anything runs; ComputeError with the node's path; a
        failed run assigns nothing.
    """
    if isinstance(keep, str) and keep not in ("all", "outputs"):
        raise UsageError("unknown value of keep", where=p.name, expected="'all', 'outputs' or a list of values",
                         got=repr(keep), fix=f"keep=[{keep!r}]" if p.find(keep) is not None else None)  # fmt: skip
    if not isinstance(feeds, Mapping | None):
        expected = f"a mapping of {', '.join(p.input_names())}"
        raise FeedError("the inputs are not a mapping", where=p.name, expected=expected, got=repr(feeds)[:80])
    return run_nodes(p, {**(feeds or {}), **named}, keep=keep, capture=capture, patch=patch, state=state)


def run_nodes(
    p: Program, feeds: Mapping[str, Any], *, keep: str | Sequence[Ref], capture: Collection[PatchPoint] = (),
    patch: Mapping[PatchPoint, Any] | None = None, state: Mapping[str, Variable] | None = None,
    given: Mapping[Value, NDArray] | None = None, whole: bool = True,
) -> Run:  # fmt: skip
    """Run a program as `run` does, or only a part of it.

    Args:
        given: known value -> its array. Nodes that compute these values, or are needed only for them, do not run.
        whole: False runs only what the kept values need, and assigns nothing.
    """
    start = perf_counter()
    refuse_broken(p)
    with reading(patterns(p).values()):
        return _run_nodes(p, feeds, start, keep, capture, patch, state, given, whole)


def _run_nodes(
    p: Program, feeds: Mapping[str, Any], start: float, keep: str | Sequence[Ref], capture: Collection[PatchPoint],
    patch: Mapping[PatchPoint, Any] | None, state: Mapping[str, Variable] | None,
    given: Mapping[Value, NDArray] | None, whole: bool,
) -> Run:  # fmt: skip
    checked, dims = check_feeds(p, feeds)
    arrays: dict[str, Any] = {name: t.data for name, t in checked.items()}
    wanted = {p.value(r) for r in (keep if not isinstance(keep, str) else ())}
    captured = [patch_point(p, r) for r in capture]
    wanted |= {p.edge_value(at) if isinstance(at, EdgeId) else at for at in captured}
    device = next((a.device for a in arrays.values() if a.device != CPU), CPU)
    patches = _patches(p, patch or {}, dims)
    made = Run(p, "all" if keep == "all" else "some" if wanted else "outputs", arrays, dims)
    made.patched = bool(patches)
    values: dict[Value, Any] = dict(given or {})
    kept = wanted | set(p.outputs()) if whole else wanted
    known = {v.node for v in values}
    needed = p.reachable([*kept, *(p.assigns() if whole else ())], beyond=known) - known
    order = [node for node in p.order() if node in needed]
    unread = Counter(p.edge_value(e) for node in order for e in p.in_edges(node))
    assigned: list[tuple[str, NDArray]] = []
    with compared(p, needed, dims, checked):
        for node in order:
            began, op = perf_counter(), p.op(node)
            edges = p.in_edges(node)
            if op in STORED:
                array = _variable(p, p.key(node), state).data
                if array is p.weights.array(p.key(node)):
                    made._weights[p.key(node)] = array, array.storage.version
                results: tuple[Any, ...] = (array.to(device),)
            elif op == INPUT:
                results = (arrays[p.path(node)],)
            else:
                ins: list[Any] = [patches[e] if e in patches else values[p.edge_value(e)] for e in edges]
                if op == ASSIGN:
                    assigned.append((p.key(p.operands(node)[0].node), ins[1]))
                    results = ()
                else:
                    results = step(p, node, op, ins, dims)
                del ins
            for port, result in enumerate(results):
                values[Value(node, port)] = patches.get(Value(node, port), result)
            made.times[node] = perf_counter() - began
            if keep != "all":
                unread.subtract(p.edge_value(e) for e in edges)
                read = {p.edge_value(e) for e in edges} | {Value(node, port) for port in range(len(results))}
                for v in read - kept:
                    if not unread[v]:
                        values.pop(v, None)
    if assigned:
        fresh = [array.copy() for _, array in assigned]  # all values are read before any variable is written
        memory = {id(_variable(p, key, state).data.storage) for key, _ in assigned}
        values = {v: a.copy() if id(a.storage) in memory else a for v, a in values.items()}
        for (key, _), array in zip(assigned, fresh, strict=True):
            _variable(p, key, state).own().copy_from(array)
            if keep == "all":  # the run kept the value it read; else the assignment makes the run stale
                made._weights.pop(key, None)
    made.values = values if keep == "all" else {v: a for v, a in values.items() if v in kept}
    made.seconds = perf_counter() - start
    return made


def _variable(p: Program, key: str, state: Mapping[str, Variable] | None) -> Variable:
    return state[key] if state is not None and key in state else p.weights[key]


def _patches(p: Program, patch: Mapping[PatchPoint, Any], dims: Mapping[str, int]) -> dict[Value | EdgeId, Any]:
    """Map each patched value or edge to its array. Raises: FeedError listing arrays of a wrong shape or dtype."""
    given = {patch_point(p, ref): as_tensor(array) for ref, array in patch.items()}
    specs = {at: p.spec(p.edge_value(at) if isinstance(at, EdgeId) else at).bind(dims) for at in given}
    found = {at: (t.to(specs[at].dtype) if t.dtype.is_float and specs[at].dtype.is_float else t).data
             for at, t in given.items()}  # fmt: skip
    pairs = [(at, specs[at], array.spec) for at, array in found.items()]
    wrong = [f"{feed_name(p, at)}: expected {spec}, got {got}" for at, spec, got in pairs if got != spec]
    if wrong:
        raise FeedError("patches do not match the values that they replace:\n  " + "\n  ".join(wrong), where=p.name)
    return found
