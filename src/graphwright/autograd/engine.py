"""Backward: reverse creation order, one vjp per operation, gradients of a fan-in summed in the order they arrive."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Literal, Never, overload

from graphwright.array import NDArray, Spec
from graphwright.autograd.errors import (
    GradShapeRequired,
    GraphFreed,
    ModifiedSinceForward,
    NoTape,
    NotDifferentiable,
)
from graphwright.autograd.hooks import hooked
from graphwright.autograd.memory import nodes_behind
from graphwright.autograd.modes import enable_grad, no_grad
from graphwright.autograd.recorder import active, vjp_of
from graphwright.autograd.tape import Rule, TapeNode
from graphwright.autograd.tensor import Tensor
from graphwright.errors import ComputeError, ShapeError, UsageError
from graphwright.ops import call, compute, get

_ADD = get("add")


def backward(
    root: Tensor, grad: Tensor | None = None, *, retain_graph: bool = False, inputs: Sequence[Tensor] | None = None
) -> None:
    """See `Tensor.backward`."""
    if inputs is not None and not inputs:
        raise UsageError("backward(inputs=[]) has nothing to fill", fix="leave `inputs` out for all leaves")
    _run([root], [grad], inputs, retain_graph, create_graph=False, accumulate=True)


@overload
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: Literal[False] = False,
) -> tuple[Tensor, ...]: ...
@overload
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]: ...
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of outputs with respect to inputs, leaving every `.grad` alone.

    Args:
        grad_outputs: one per output; may be None for outputs of one element.
        retain_graph: keep saved values; as `create_graph` by default.
        create_graph: tape the backward itself, for second derivatives.
        allow_unused: give None for an input that no output depends on, instead of raising NoTape.
    Raises: NoTape, GradShapeRequired, ShapeError, GraphFreed, ModifiedSinceForward, NotDifferentiable, UsageError.
    """
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    seeds = list(grad_outputs) if grad_outputs is not None else [None] * len(roots)
    keep = create_graph if retain_graph is None else retain_graph
    if len(seeds) != len(roots):
        raise UsageError("one gradient, or None, per output", expected=len(roots), got=len(seeds))
    found = _run(roots, seeds, wanted, keep, create_graph, accumulate=False)
    for tensor, result in zip(wanted, found, strict=True):
        if result is None and not allow_unused:
            raise NoTape(
                "an input does not reach the outputs",
                where=tensor.name or None,
                got=tensor.spec,
                fix="allow_unused=True gives None for it",
            )
    return tuple(found)


def _seed(root: Tensor, grad: Tensor | None) -> Tensor:
    if not root.requires_grad:
        raise NoTape(
            "nothing to differentiate: no operand required a gradient, or it ran under no_grad()",
            got=root.spec,
            fix="requires_grad=True on what you want gradients of",
        )
    if grad is None:
        if root.size != 1:
            raise GradShapeRequired(
                "several elements need a gradient to start from",
                expected=root.spec,
                fix="backward(grad) with a tensor of that spec, or sum() first",
            )
        return call("full_like", root.detach(), value=1.0)
    if grad.spec != root.spec:
        raise ShapeError("the gradient must have the tensor's spec", expected=root.spec, got=grad.spec)
    return grad


def unbroadcast(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum over the axes along which `shape` was broadcast to the shape of `grad`.

    Axes that lie apart are summed one run after the other, the first ones first: each is then a sum of rows or columns.
    """
    if grad.shape == shape:
        return grad
    lead = grad.ndim - len(shape)
    axes = [*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1 and grad.shape[lead + i] != 1)]
    gone = 0
    for n, axis in enumerate(axes):
        if n + 1 == len(axes) or axes[n + 1] != axis + 1:
            grad = call("sum", grad, axes=tuple(a - gone for a in axes[gone : n + 1]), keepdims=False)
            gone = n + 1
    return grad if grad.shape == shape else call("reshape", grad, shape=shape)


def _covers(shape: tuple[int, ...], operand: tuple[int, ...]) -> bool:
    """True if an operand of shape `operand` broadcasts to `shape`."""
    lead = len(shape) - len(operand)
    return lead >= 0 and all(n in (1, have) for n, have in zip(operand, shape[lead:], strict=True))


class _Pass:
    """One backward pass: gradients that wait for their node, and what the leaves have received.

    With `wanted` tensors only the nodes that lead to them are differentiated, and only by what leads there.
    """

    def __init__(
        self, roots: Sequence[Tensor], wanted: Sequence[Tensor] | None, *, create_graph: bool, retain: bool, widen: bool
    ) -> None:
        self.waiting: dict[TapeNode, list[Tensor | None]] = {}
        self.queue: list[tuple[int, TapeNode]] = []
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self.inner: list[tuple[Tensor, Tensor]] = []
        self.create_graph, self.retain, self.widen = create_graph, retain, widen
        self.at: dict[tuple[TapeNode, int], list[int]] = {}
        for i, t in enumerate(wanted or ()):
            if t.node is not None:
                self.at.setdefault((t.node, t.port), []).append(i)
        self.results: list[Tensor | None] = [None] * len(wanted or ())
        self.leads: Container[TapeNode | int] | None = None if wanted is None else _leading(roots, wanted)

    def needs(self, node: TapeNode) -> tuple[bool, ...]:
        """Which operands of a node want a gradient."""
        leads = self.leads
        if leads is None:
            return tuple([edge is not None for edge in node.edges])
        return tuple([edge is not None and _end(edge) in leads for edge in node.edges])

    def send(self, edge: Any, grad: Tensor) -> None:
        """Add a gradient to a leaf or to one result of a node."""
        if isinstance(edge, Tensor):
            if self.widen and edge.grad_dtype is not grad.data.dtype:
                grad = grad.to(edge.grad_dtype)
            known = self.leaves.get(id(edge))
            self.leaves[id(edge)] = (edge, grad if known is None else known[1] + grad)
            return
        node, port = edge
        slots = self.waiting.get(node)
        if slots is None:
            slots = self.waiting[node] = [None] * len(node.out_specs)
            heappush(self.queue, (-node.seq, node))
        held = slots[port]
        slots[port] = grad if held is None else held + grad

    def step(self) -> None:
        """Differentiate the youngest waiting node."""
        node = heappop(self.queue)[1]
        grads = self.waiting.pop(node)
        if node.hooks is not None:
            for port, hooks in node.hooks.items():
                if (g := grads[port]) is not None:
                    grads[port] = hooked(hooks, g, node.out_specs[port])
        if node.retained is not None:
            for tensor in (r() for r in node.retained):
                if tensor is not None and (g := grads[tensor.port]) is not None:
                    self.inner.append((tensor, g))
        if self.at:
            for port, g in enumerate(grads):
                for place in self.at.get((node, port), ()) if g is not None else ():
                    self.results[place] = g
        needs = self.needs(node)
        if not any(needs):
            return
        found = _vjp(node, grads, needs, self.create_graph)
        if not self.retain:
            node.free()
        for edge, g in zip(node.edges, found, strict=True):
            if g is not None:
                self.send(edge, g)

    def finish(self) -> None:
        """Call the hooks of the leaves, whose sums are whole now."""
        for key, (leaf, g) in self.leaves.items():
            if leaf.hooks:
                self.leaves[key] = (leaf, hooked(leaf.hooks, g, g.spec))


def _end(edge: Any) -> TapeNode | int:
    return id(edge) if isinstance(edge, Tensor) else edge[0]


def _leading(roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> set[TapeNode | int]:
    """Nodes from which a wanted tensor is reached, and the ids of the wanted leaves."""
    leads: set[TapeNode | int] = {id(t) if t.node is None else t.node for t in wanted}
    for node in sorted(nodes_behind(roots), key=lambda n: n.seq):  # what an operation reads is older than it
        if any(edge is not None and _end(edge) in leads for edge in node.edges):
            leads.add(node)
    return leads


def _run(
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    wanted: Sequence[Tensor] | None,
    retain: bool,
    create_graph: bool,
    accumulate: bool,
) -> list[Tensor | None]:
    with enable_grad() if create_graph else no_grad():
        started = [(root, _seed(root, seed)) for root, seed in zip(roots, seeds, strict=True)]
        state = _Pass(roots, wanted, create_graph=create_graph, retain=retain, widen=accumulate)
        for root, seed in started:
            state.send(root if root.node is None else (root.node, root.port), seed)
        while state.queue:
            state.step()
        state.finish()
        for i, tensor in enumerate(wanted or ()):
            if tensor.node is None and id(tensor) in state.leaves:
                state.results[i] = state.leaves[id(tensor)][1]
        given = {id(seed.data.storage) for _, seed in started if isinstance(seed.data, NDArray)}
        for tensor, g in state.inner:
            _accumulate(tensor, g, given)
        if accumulate:
            filled = state.leaves.values() if wanted is None else zip(wanted, state.results, strict=True)
            for tensor, g in filled:
                if g is not None:
                    _accumulate(tensor, g, given)
    return state.results


def _vjp(
    node: TapeNode, grads: list[Tensor | None], needs: tuple[bool, ...], create_graph: bool
) -> list[Tensor | None]:
    """Gradients of a node's operands, checked against what the engine asked for."""
    ins, outs = _unpack(node, create_graph)
    if node.path:
        with vjp_of(node.path):
            return pull_back(node.op, grads, ins, outs, node.attrs, needs, node.in_specs)
    return pull_back(node.op, grads, ins, outs, node.attrs, needs, node.in_specs)


def pull_back(
    op: Rule,
    grads: Sequence[Tensor | None],
    ins: Sequence[Tensor | Spec],
    outs: Sequence[Tensor | Spec],
    attrs: Mapping[str, Any],
    needs: tuple[bool, ...],
    in_specs: Sequence[Spec],
) -> list[Tensor | None]:
    """Gradients of an op's operands from those of its results, summed back to the operands' shapes.

    Args:
        ins, outs: operands and results that the row saves; specs of the others.
        needs: which operands want a gradient; the others get None.
    Raises: NotDifferentiable; ComputeError if the vjp gives something else than it was asked for.
    """
    if op.vjp is None:
        raise NotDifferentiable(f"op {op.name!r} has no gradient", got=op.why.get("vjp"))
    result = op.vjp(grads[0] if len(grads) == 1 else tuple(grads), ins, outs, attrs, needs)
    if len(result) != len(needs):
        raise ComputeError(
            "a vjp must give one gradient per operand", where=op.name, expected=len(needs), got=len(result)
        )
    final: list[Tensor | None] = []
    for g, need, spec in zip(result, needs, in_specs, strict=True):
        if not need or g is None:
            if need and spec.dtype.is_float:
                raise ComputeError("a vjp left out a gradient that was asked for", where=op.name)
            final.append(None)
            continue
        if g.data.shape != spec.shape and _covers(g.shape, spec.sizes):
            g = unbroadcast(g, spec.sizes)
        if g.data.shape != spec.shape or g.data.dtype is not spec.dtype:
            raise ComputeError("a vjp gave a gradient of another spec", where=op.name, expected=spec, got=g.spec)
        final.append(g)
    return final


def _unpack(node: TapeNode, create_graph: bool) -> tuple[list[Tensor | Spec], list[Tensor | Spec]]:
    """Saved operands and results as tensors, on the tape again if the backward is taped; specs of the others."""
    if node.saved is None:
        raise GraphFreed(
            "backward ran through this graph before",
            where=node.op.name,
            fix="backward(retain_graph=True) the first time",
        )
    ins: list[Tensor | Spec] = [*node.in_specs]
    outs: list[Tensor | Spec] = [*node.out_specs]
    for place, data, version in node.saved:
        if isinstance(data, NDArray) and data.version != version:
            _refuse_modified(node, place, data)
        if place >= len(ins):
            port = place - len(ins)
            outs[port] = _on_tape(data, (node, port) if create_graph else None)
            continue
        edge = node.edges[place] if create_graph else None
        ins[place] = edge if isinstance(edge, Tensor) else _on_tape(data, edge)
    return ins, outs


def _refuse_modified(node: TapeNode, place: int, data: NDArray) -> Never:
    operands = len(node.edges)
    edge = node.edges[place] if place < operands else None
    name = f" ({edge.name})" if isinstance(edge, Tensor) and edge.name else ""
    value = f"operand {place}{name}" if place < operands else f"result {place - operands}"
    raise ModifiedSinceForward(
        f"{value} was overwritten after the forward pass, and backward reads it",
        op=node.op.name,
        value=value,
        line=node.line,
        where=f"{node.op.name} at {node.line}",
        got=data.spec,
        fix="write to a clone(), or after backward()",
    )


def _on_tape(data: Any, edge: tuple[TapeNode, int] | None) -> Tensor:
    tensor = Tensor(data)
    if edge is not None:
        tensor.node, tensor.port = edge
        tensor.requires_grad = True
    return tensor


def _accumulate(leaf: Tensor, g: Tensor, given: set[int]) -> None:
    """Add to a leaf's gradient; the first one is kept as it is when nobody else holds its memory."""
    recorder = active.get()
    if recorder is not None:
        recorder.received(leaf)
    if leaf.grad is not None and leaf.grad.dtype is not g.dtype:  # set by hand in the parameter's own 16 bits
        leaf.grad = leaf.grad.to(g.dtype)
    if leaf.grad is not None and isinstance(leaf.grad.data, NDArray) and isinstance(g.data, NDArray):
        compute(_ADD, [leaf.grad.data, g.data], {}, [leaf.grad.data])
        return
    if leaf.grad is not None:
        leaf.grad = leaf.grad + g
        return
    g = g.detach() if not g.requires_grad or g.node is None else g
    array = g.data
    if isinstance(array, NDArray):
        if id(array.storage) in given or not array.contiguous:
            array = array.copy()
            g = Tensor(array)
        given.add(id(array.storage))
    leaf.grad = g
