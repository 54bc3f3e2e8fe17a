"""Running a program node by node: on arrays every value can be read, on tensors it is differentiated or traced.

This is the slow, plain meaning of a program; a plan must agree with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from graphwright.array import NDArray, Spec, empty
from graphwright.autograd import Tensor, active_recorder, as_tensor
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import call
from graphwright.program.errors import FeedError
from graphwright.program.kinds import INPUT, STORED, WRITE
from graphwright.program.program import Program, Value
from graphwright.program.validate import refuse_broken

Ref = NodeId | Value | str


def check_feeds(p: Program, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Feeds as tensors of the declared dtypes, and the numbers behind named sizes.

    Raises: FeedError listing every missing, unknown, misshapen or mistyped feed.
    """
    dims: dict[str, int] = {}
    result: dict[str, Any] = {}
    wrong: list[str] = []
    declared = {p.path(n): p.spec(n) for n in p.inputs()}
    wrong += [f"{name}: not an input" for name in feeds if name not in declared]
    for name, spec in declared.items():
        if name not in feeds:
            wrong.append(f"{name}: missing, expected {spec}")
            continue
        try:
            tensor = as_tensor(feeds[name])
        except GraphwrightError as error:
            wrong.append(f"{name}: {error.what}, got {error.got}")
            continue
        if tensor.dtype is not spec.dtype:
            if not _exact(tensor, spec):
                wrong.append(f"{name}: expected {spec}, got {tensor.spec}")
                continue
            tensor = tensor.to(spec.dtype)
        if not spec.match(tensor.shape, dims):
            bound = spec.bind(dims)
            wrong.append(f"{name}: expected {bound}, got {tensor.spec}")
        result[name] = tensor
    if wrong:
        raise FeedError(
            "inputs do not fit:\n  " + "\n  ".join(wrong),
            where=p.name,
            expected=", ".join(f"{n}: {s}" for n, s in declared.items()),
        )
    return result, dims


def _exact(tensor: Tensor, spec: Spec) -> bool:
    """True if a conversion to the declared dtype cannot change a value: within the kind, to at least the width."""
    have, want = tensor.dtype, spec.dtype
    return have.kind == want.kind and (have.itemsize <= want.itemsize or have.name == "float64")


class Run:
    """The values of one interpreted run.

    Attributes:
        program, version: what ran.
        values: arrays by value; every node's, or those asked for.
        keep: which those are: `all`, `outputs` or `some`.
        seconds: how long the run took.
    """

    def __init__(self, program: Program, values: dict[Value, NDArray], keep: str = "all", seconds: float = 0.0) -> None:
        self.program, self.version, self.values = program, program.version, values
        self.keep, self.seconds = keep, seconds

    @property
    def nbytes(self) -> int:
        """Bytes of the values kept, each block of memory once; weights that they read are not counted."""
        own = {id(v.data.storage) for v in self.program.weights.values() if isinstance(v.data, NDArray)}
        blocks = {id(a.storage): a.storage.nbytes for a in self.values.values() if id(a.storage) not in own}
        return sum(blocks.values())

    def value(self, ref: Ref) -> NDArray:
        """The array of a node or value. Raises: UsageError if it was not kept."""
        wanted = self.program.value(ref)
        if wanted not in self.values:
            raise UsageError("this value was not kept", where=self.program.path(wanted), fix="run(..., keep='all')")
        return self.values[wanted]

    def __getitem__(self, name: str) -> NDArray:
        return self.values[self.program.output(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.program.output_names())

    def __repr__(self) -> str:
        return (
            f"Run({self.program.name!r} version {self.version}, keep={self.keep!r}: {len(self.values)} values, "
            f"{self.nbytes:,} bytes, {1e3 * self.seconds:.3g} ms, outputs {', '.join(self) or 'none'})"
        )


def run(
    p: Program,
    feeds: Mapping[str, Any],
    *,
    keep: str | Sequence[Ref] = "all",
    capture: Collection[Ref | EdgeId] = (),
    patch: Mapping[Ref | EdgeId, Any] | None = None,
) -> Run:
    """Run node by node on arrays; states and params are written together at the end.

    Args:
        feeds: arrays or tensors by input name.
        keep: "all", "outputs", or the values to keep beside the outputs.
        capture: more values (or what edges carry) to keep.
        patch: arrays to put in place of a node's first result, a value, or what one edge carries.
    Raises: FeedError before anything runs; ComputeError with the node's path; a failed run writes nothing.
    """
    start = perf_counter()
    refuse_broken(p)
    checked, dims = check_feeds(p, feeds)
    arrays = {name: t.data for name, t in checked.items()}
    wanted = {p.value(r) for r in (keep if not isinstance(keep, str) else ())}
    wanted |= {p.edge_value(r) if isinstance(r, EdgeId) else p.value(r) for r in capture}
    swaps = {(k if isinstance(k, EdgeId) else p.value(k)): as_tensor(v).data for k, v in (patch or {}).items()}
    writes: list[tuple[str, NDArray]] = []
    values: dict[Value, Any] = {}
    roots = [*p.outputs(), *wanted, *p.writes()]
    needed = p.reachable(roots)
    for node in p.order():
        if node not in needed:
            continue
        op = p.op(node)
        if op in STORED:
            results: tuple[Any, ...] = (p.weights.array(p.key(node)),)
        elif op == INPUT:
            results = (arrays[p.path(node)],)
        else:
            ins = [swaps[e] if e in swaps else values[p.edge_value(e)] for e in p.in_edges(node)]
            if op == WRITE:
                target = p.operands(node)[0].node
                writes.append((p.key(target), ins[1]))
                continue
            results = _node(p, node, op, ins, dims)
        for port, result in enumerate(results):
            values[Value(node, port)] = swaps.get(Value(node, port), result)
    if writes:
        fresh = [array.copy() for _, array in writes]  # all are read before any is written
        memory = {id(p.weights.array(key).storage) for key, _ in writes}
        values = {v: a.copy() if id(a.storage) in memory else a for v, a in values.items()}
        for (key, _), array in zip(writes, fresh, strict=True):
            p.weights[key].own().copy_from(array)
    if keep != "all":
        kept = wanted | set(p.outputs())
        values = {v: a for v, a in values.items() if v in kept}
    mode = "all" if keep == "all" else "some" if wanted else "outputs"
    return Run(p, values, mode, perf_counter() - start)


def _node(p: Program, node: NodeId, op: str, ins: list[Any], dims: Mapping[str, int]) -> tuple[Any, ...]:
    if not ins and p.is_junction(node):
        spec = p.spec(node).bind(dims)
        zero = empty(spec.shape, spec.dtype)  # type: ignore[arg-type]  # bound
        return (call("full_like", zero, value=0.0),)
    try:
        result = call(op, *ins, **p.attrs(node))
    except GraphwrightError as error:
        error.where = f"{p.path(node)} ({op})" if error.where in (None, op) else f"{p.path(node)}: {error.where}"
        error.add_note(origin(p, node))
        raise
    return result if isinstance(result, tuple) else (result,)


def origin(p: Program, node: NodeId) -> str:
    """Where a node that failed comes from: what it reads, and the edit that last touched it."""
    reads = ", ".join(f"{p.path(v)}: {p.spec(v)}" for v in p.operands(node)) or "nothing"
    entries = sorted([*p.blame(node), *p.blame(p.path(node))], key=lambda entry: entry.seq)
    edit = f'; edit "{entries[-1].why}" touched it last' if entries else ""
    return f"{p.path(node)} reads {reads}{edit}"


def evaluate(p: Program, feeds: Mapping[str, Any]) -> dict[str, Tensor]:
    """Run on tensors: taped if gradients are wanted, recorded under the nodes' names inside a trace.

    Returns: the outputs by name. Params are the program's own variables, so gradients land on them.
    """
    recorder: Any = active_recorder.get()
    checked, dims = check_feeds(p, feeds)
    values = tensors(p, checked, dims, [*p.outputs(), *p.writes()])
    outputs = {name: values[v] for name, v in zip(p.output_names(), p.outputs(), strict=True)}
    if p.writes():
        pairs = [p.operands(node) for node in p.order() if p.op(node) == WRITE]
        written = [p.weights[p.key(target.node)] for target, _ in pairs]
        now = recorder.resolved if recorder is not None else lambda t: _apart(t, written)
        outputs = {name: now(t) for name, t in outputs.items()}
        for variable, value in zip(written, [now(values[v]) for _, v in pairs], strict=True):
            variable.assign(value)
    return outputs


def tensors(
    p: Program, feeds: Mapping[str, Tensor], dims: Mapping[str, int], roots: Sequence[Value | NodeId]
) -> dict[Value, Tensor]:
    """Every value that the roots need, as tensors; writes nothing.

    Args:
        feeds, dims: as `check_feeds` gives them.
    """
    refuse_broken(p)
    recorder: Any = active_recorder.get()
    if recorder is not None:
        recorder.depends(p)
    values: dict[Value, Tensor] = {}
    needed = p.reachable(roots)
    for node in p.order():
        op = p.op(node)
        if node not in needed or op == WRITE:
            continue
        if op in STORED:
            values[Value(node)] = p.weights[p.key(node)]
        elif op == INPUT:
            values[Value(node)] = feeds[p.path(node)]
        else:
            if recorder is not None:
                recorder.expect(op, p.path(node))
            for port, result in enumerate(_node(p, node, op, [values[v] for v in p.operands(node)], dims)):
                values[Value(node, port)] = result if isinstance(result, Tensor) else Tensor(result)
    return values


def _apart(tensor: Tensor, written: Sequence[Tensor]) -> Tensor:
    """A tensor whose value stays when the given variables are written to."""
    memory = {id(w.data.storage) for w in written}  # type: ignore[union-attr]  # variables hold arrays
    return tensor.clone() if id(tensor.data.storage) in memory else tensor  # type: ignore[union-attr]


def as_host(array: NDArray) -> np.ndarray:
    """An array as numpy; bfloat16 widened to float32."""
    return array.to_numpy("float32" if array.dtype.name == "bfloat16" else None)
