"""Running a program node by node on tensors: taped for gradients, or recorded inside a trace.

`step` is what one node means; everything that runs a program without a plan goes through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array import NDArray, empty
from graphwright.autograd import Tensor, Variable, active_recorder
from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.ops import call
from graphwright.program.feeds import check_feeds
from graphwright.program.gates.folded import fold, foldable, worth
from graphwright.program.kinds import INPUT, STORED, WRITE
from graphwright.program.program import Program, Value
from graphwright.program.validate import refuse_broken


def step(p: Program, node: NodeId, op: str, ins: list[Any], dims: Mapping[str, int]) -> tuple[Any, ...]:
    """The results of one node on arrays or tensors. Raises: ComputeError or UsageError with its path and origin."""
    if not ins and p.is_junction(node):
        spec = p.spec(node).bind(dims)
        zero = empty(spec.sizes, spec.dtype)
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
    values = tensors(p, checked, dims, [*p.outputs(), *p.writes()], trained=True)
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
    p: Program,
    feeds: Mapping[str, Tensor],
    dims: Mapping[str, int],
    roots: Sequence[Value | NodeId],
    states: Mapping[str, Tensor] | None = None,
    *,
    trained: bool = False,
) -> dict[Value, Tensor]:
    """Every value that the roots need, as tensors; writes nothing.

    Args:
        feeds, dims: as `check_feeds` gives them.
        states: values by key that stand for those of variables.
        trained: gradients by weights are wanted: gates may multiply these instead (`gates.folded`), so that what is
            between a gate and its product is without the gate.
    """
    refuse_broken(p)
    recorder: Any = active_recorder.get()
    groups: dict[NodeId, Any] = {}
    if recorder is not None:
        recorder.depends(p)
        recorder.rely(lambda: p.checkpoints)
        here = object()  # another run in the same trace has subgraphs of its own
        groups = {node: (here, k) for k, group in enumerate(p.checkpoints) for node in group}
    values: dict[Value, Tensor] = {}
    needed = p.reachable(roots)
    late = foldable(p, {v for v in roots if isinstance(v, Value)}) if trained else {}
    folded: dict[NodeId, NodeId] = {}  # product -> the site whose gate its weight takes
    for node in p.order():
        op = p.op(node)
        if node not in needed or op == WRITE:
            continue
        if node in late and worth(p, node, late[node], values):
            values[Value(node)], folded[late[node]] = values[p.operands(node)[0]], node
            continue
        if op in STORED:
            key = p.key(node)
            values[Value(node)] = states[key] if states and key in states else p.weights[key]
        elif op == INPUT:
            values[Value(node)] = feeds[p.path(node)]
        else:
            if recorder is not None:
                recorder.expect(op, p.path(node))
                recorder.recomputed.group = groups.get(node)
            ins = [values[v] for v in p.operands(node)]
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


def _apart(tensor: Tensor, written: Sequence[Variable]) -> Tensor:
    """A tensor whose value stays when the given variables are written to."""
    assert isinstance(tensor.data, NDArray)  # nothing is traced here
    memory = {id(w.data.storage) for w in written}
    return tensor.clone() if id(tensor.data.storage) in memory else tensor
