"""Backward: nodes in reverse creation order, one vjp each; gradients of a shared value are summed as they arrive."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from heapq import heappop, heappush
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Never, overload

from graphwright.array import Dim, NDArray, Spec
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.errors import GradShapeRequired, GraphFreed, ModifiedSinceForward, NoTape, NotDifferentiable
from graphwright.autograd.modes import enable_grad, no_grad
from graphwright.autograd.recorder import Symbol, active_recorder, differentiating, scoped
from graphwright.autograd.tape import Hook, TapeNode, reachable_nodes
from graphwright.errors import ComputeError, ShapeError, UsageError
from graphwright.ops import Op, call, compute, get

if TYPE_CHECKING:
    from graphwright.autograd.tape import VjpRule
    from graphwright.autograd.tensor import Tensor

_ADD = get("add")


def backward(
    root: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Add d root / d leaf to `grad` of every leaf that requires it.

    Args:
        gradient: gradient with respect to the root, of the root's spec; required unless the root has one element.
        retain_graph: keep saved values for a further backward; equals `create_graph` by default.
        create_graph: tape the backward itself, for second derivatives.
        inputs: fill `grad` of these tensors only; they may be leaves or inner tensors.
    Raises: GradShapeRequired, GraphFreed, NoTape, ModifiedSinceForward; UsageError if `inputs` is empty.
    """
    wanted = [inputs] if isinstance(inputs, TensorBase) else inputs
    if wanted is not None and not wanted:
        raise UsageError("backward(inputs=[]) has no tensor to fill", fix="leave `inputs` out for all leaves")
    keep = create_graph if retain_graph is None else retain_graph
    _run([root], [gradient], wanted, keep, create_graph, accumulate=True)


@overload
def grad(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None, retain_graph: bool | None = None,
    create_graph: bool = False, allow_unused: Literal[False] = False,
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def grad(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None, retain_graph: bool | None = None,
    create_graph: bool = False, allow_unused: bool = ...,
) -> tuple[Tensor | None, ...]: ...  # fmt: skip
def grad(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None, retain_graph: bool | None = None,
    create_graph: bool = False, allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return gradients of outputs with respect to inputs; no `.grad` changes.

    Args:
        grad_outputs: the gradient with respect to each output; may be None for an output of one element.
        retain_graph: keep saved values for a further backward; equals `create_graph` by default.
        create_graph: tape the backward itself, for second derivatives.
        allow_unused: return None for an input that no output depends on, instead of raising NoTape.
    Raises: NoTape, GradShapeRequired, ShapeError, GraphFreed, ModifiedSinceForward, NotDifferentiable, UsageError.
    """
    roots = [outputs] if isinstance(outputs, TensorBase) else list(outputs)
    wanted = [inputs] if isinstance(inputs, TensorBase) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, TensorBase) else grad_outputs
    seeds = [None] * len(roots) if given is None else list(given)
    keep = create_graph if retain_graph is None else retain_graph
    if len(seeds) != len(roots):
        raise UsageError("grad_outputs does not have one entry per output", expected=len(roots), got=len(seeds))
    found = _run(roots, seeds, wanted, keep, create_graph, accumulate=False)
    for tensor, result in zip(wanted, found, strict=True):
        if result is None and not allow_unused:
            what, fix = "the outputs do not depend on this input", "pass allow_unused=True to get None for this input"
            raise NoTape(what, where=tensor.name or None, got=tensor.spec, fix=fix)
    return tuple(found)


def _seed(root: Tensor, grad: Tensor | None) -> Tensor:
    if not root.requires_grad:
        what = "the tensor has no tape: neither it nor an operand required a gradient, or no_grad() was active"
        fix = "set requires_grad=True on the tensors to differentiate with respect to, and compute outside no_grad()"
        raise NoTape(what, got=root.spec, fix=fix)
    if grad is None:
        if root.numel() != 1:
            what = "backward got no initial gradient, and the tensor does not have exactly one element"
            fix = "pass a gradient of the tensor's spec, or sum() the tensor first"
            raise GradShapeRequired(what, expected=f"a gradient {root.spec}", fix=fix)
        return call("full_like", root.detach(), value=1.0)
    if grad.spec != root.spec:
        raise ShapeError("the initial gradient does not have the spec of the tensor", expected=root.spec, got=grad.spec)
    return grad


def unbroadcast(grad: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """Sum over the axes along which `shape` was broadcast to the shape of `grad`.

    Each run of adjacent axes is summed in a call of its own, so that each call sums the rows or columns of a matrix.
    """
    have = _dims(grad)
    if have == shape:
        return grad
    lead = len(have) - len(shape)
    axes = [*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1 != have[lead + i])]
    gone = 0
    for n, axis in enumerate(axes):
        if n + 1 == len(axes) or axes[n + 1] != axis + 1:
            grad = call("sum", grad, axes=tuple(a - gone for a in axes[gone : n + 1]), keepdims=False)
            gone = n + 1
    return grad if _dims(grad) == shape else call("reshape", grad, shape=shape)


def _dims(x: Tensor) -> tuple[Dim, ...]:
    """Return the shape as a spec has it: comparing it compares no values of named sizes."""
    return x.data.spec.shape if isinstance(x.data, Symbol) else x.data.shape


def _covers(shape: tuple[Dim, ...], operand: tuple[Dim, ...]) -> bool:
    """Return True if the shape `operand` broadcasts to `shape`."""
    lead = len(shape) - len(operand)
    return lead >= 0 and all(n in (1, have) for n, have in zip(operand, shape[lead:], strict=True))


class _BackwardPass:
    """The state of one backward pass.

    Given `wanted` tensors, only nodes that depend on them are differentiated, and only with respect to operands that
    depend on them.

    Attributes:
        waiting: node -> gradients of its results so far.
        queue: heap of the waiting nodes, the last created first.
        leaves: id -> (leaf, gradient so far).
        retained: (tensor, gradient) of inner tensors with `retain_grad`, for their `grad`.
        wanted_at: (node, result number) -> indices in `wanted` of the tensors that are this result.
        results: gradients of the wanted tensors.
        held: ids of the storages of gradients that the caller, hooks, Functions or `grad` may keep.
        path: nodes that depend on a wanted tensor, and ids of wanted leaves; None without `wanted`.
    """

    def __init__(
        self, roots: Sequence[Tensor], wanted: Sequence[Tensor] | None, *, create_graph: bool, retain: bool, widen: bool
    ) -> None:
        self.waiting: dict[TapeNode, list[Tensor | None]] = {}
        self.queue: list[tuple[int, TapeNode]] = []
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self.retained: list[tuple[Tensor, Tensor]] = []
        self.create_graph, self.retain, self.widen = create_graph, retain, widen
        self.wanted_at: dict[tuple[TapeNode, int], list[int]] = {}
        for i, t in enumerate(wanted or ()):
            if t.node is not None:
                self.wanted_at.setdefault((t.node, t.port), []).append(i)
        self.results: list[Tensor | None] = [None] * len(wanted or ())
        self.held: set[int] = set()
        self.path: Container[TapeNode | int] | None = None if wanted is None else _dependents(roots, wanted)

    def needs(self, node: TapeNode) -> tuple[bool, ...]:
        """Return for each operand of the node whether its gradient is needed."""
        path = self.path
        if path is None:
            return tuple([edge is not None for edge in node.edges])
        return tuple([edge is not None and _source(edge) in path for edge in node.edges])

    def send(self, edge: Any, grad: Tensor) -> None:
        """Add `grad` to the gradient of `edge`: a leaf tensor, or (node, result number), whose node is queued."""
        if not isinstance(edge, tuple):
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
        """Run the vjp of the waiting node that was created last."""
        node = heappop(self.queue)[1]
        grads = self.waiting.pop(node)
        if node.hooks is not None:
            for port, hooks in node.hooks.items():
                if (g := grads[port]) is not None:
                    grads[port] = self.run_hooks(hooks, g, node.out_specs[port])
        if node.retained is not None:
            for tensor in (r() for r in node.retained):
                if tensor is not None and (g := grads[tensor.port]) is not None:
                    self.retained.append((tensor, g))
        if self.wanted_at:
            for port, g in enumerate(grads):
                for i in self.wanted_at.get((node, port), ()) if g is not None else ():
                    self.results[i] = g
        needs = self.needs(node)
        if not any(needs):
            return
        found = _vjp(node, grads, needs, self.create_graph)
        if not isinstance(node.op, Op):  # a user's Function
            self.hold(*grads, *found)
        if not self.retain:
            node.free()
        for edge, g in zip(node.edges, found, strict=True):
            if g is not None:
                self.send(edge, g)

    def finish(self) -> None:
        """Call the hooks of the leaves, whose gradients are now complete."""
        for key, (leaf, g) in self.leaves.items():
            if leaf.hooks:
                self.leaves[key] = (leaf, self.run_hooks(leaf.hooks, g, g.spec))

    def run_hooks(self, hooks: Sequence[Hook], grad: Tensor, spec: Spec) -> Tensor:
        """Return the gradient after all hooks. Raises: ShapeError, UsageError for an invalid gradient of a hook."""
        for hook in list(hooks):
            self.hold(grad)
            given: Any = hook.call(grad)
            if given is None:
                continue
            if not isinstance(given, TensorBase):
                raise UsageError("a hook returned neither a tensor nor None", got=type(given).__name__)
            if given.spec != spec:
                raise ShapeError("a hook changed the spec of the gradient", expected=spec, got=given.spec)
            grad = as_tensor(given)
        self.hold(grad)
        return grad

    def hold(self, *grads: Tensor | None) -> None:
        """Note that code outside may keep these gradients."""
        self.held.update(id(g.data.storage) for g in grads if g is not None and isinstance(g.data, NDArray))


def _source(edge: Any) -> TapeNode | int:
    return edge[0] if isinstance(edge, tuple) else id(edge)


def _dependents(roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> set[TapeNode | int]:
    """Return the tape nodes between `wanted` and `roots`, both included, and the ids of the leaves in `wanted`."""
    found: set[TapeNode | int] = {id(t) if t.node is None else t.node for t in wanted}
    for node in sorted(reachable_nodes(roots), key=lambda n: n.seq):  # an operation is created after its operands
        if any(edge is not None and _source(edge) in found for edge in node.edges):
            found.add(node)
    return found


def _run(
    roots: Sequence[Tensor], seeds: Sequence[Tensor | None], wanted: Sequence[Tensor] | None, retain: bool,
    create_graph: bool, accumulate: bool,
) -> list[Tensor | None]:  # fmt: skip
    with enable_grad() if create_graph else no_grad():
        started = [(root, _seed(root, seed)) for root, seed in zip(roots, seeds, strict=True)]
        outer = differentiating.set(True)
        try:
            return _differentiate(started, wanted, retain, create_graph, accumulate)
        finally:
            differentiating.reset(outer)


def _differentiate(
    started: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor] | None, retain: bool, create_graph: bool,
    accumulate: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Run the backward pass from `started`, pairs of a root and its initial gradient."""
    roots = [root for root, _ in started]
    state = _BackwardPass(roots, wanted, create_graph=create_graph, retain=retain, widen=accumulate)
    for root, seed in started:
        state.send(root if root.node is None else (root.node, root.port), seed)
    while state.queue:
        state.step()
    state.finish()
    for i, tensor in enumerate(wanted or ()):
        if tensor.node is None and id(tensor) in state.leaves:
            state.results[i] = state.leaves[id(tensor)][1]
    state.hold(*(seed for _, seed in started))
    for tensor, g in state.retained:
        _accumulate(tensor, g, state.held)
    if accumulate:
        filled = state.leaves.values() if wanted is None else zip(wanted, state.results, strict=True)
        for tensor, g in filled:
            if g is not None:
                _accumulate(tensor, g, state.held)
    return state.results


def _vjp(
    node: TapeNode, grads: list[Tensor | None], needs: tuple[bool, ...], create_graph: bool
) -> list[Tensor | None]:
    ins, outs = _unpack(node, create_graph)
    if node.path:
        with scoped("grad", node.path):
            return pull_back(node.op, grads, ins, outs, node.attrs, needs, node.in_specs)
    return pull_back(node.op, grads, ins, outs, node.attrs, needs, node.in_specs)


def pull_back(
    op: VjpRule, grads: Sequence[Tensor | None], ins: Sequence[Tensor | Spec], outs: Sequence[Tensor | Spec],
    attrs: Mapping[str, Any], needs: tuple[bool, ...], in_specs: Sequence[Spec],
) -> list[Tensor | None]:  # fmt: skip
    """Map gradients of an op's results to gradients of its operands, summed to the operands' shapes.

    Args:
        ins, outs: the operands and results; a spec for each that the op does not save.
        needs: per operand whether its gradient is needed; the others get None.
    Raises: NotDifferentiable; ComputeError if the vjp omits a gradient or returns one of the wrong spec.
    """
    if op.vjp is None:
        raise NotDifferentiable(f"op {op.name!r} has no gradient: {op.why.get('vjp')}")
    result = op.vjp(grads[0] if len(grads) == 1 else tuple(grads), ins, outs, attrs, needs)
    if len(result) > len(needs):
        raise ComputeError("a vjp returned too many gradients", where=op.name, expected=len(needs), got=len(result))
    final: list[Tensor | None] = []
    for g, need, spec in zip_longest(result, needs, in_specs):  # a missing gradient is None, or omitted at the end
        if not need or g is None:
            if need and spec.dtype.is_float:
                raise ComputeError("a vjp omitted a gradient that is needed", where=op.name, expected=spec)
            final.append(None)
            continue
        if _dims(g) != spec.shape and _covers(_dims(g), spec.shape):
            g = unbroadcast(g, spec.shape)
        if _dims(g) != spec.shape or g.data.dtype is not spec.dtype:
            raise ComputeError("a vjp returned a gradient of the wrong spec", where=op.name, expected=spec, got=g.spec)
        final.append(g)
    return final


def _unpack(node: TapeNode, create_graph: bool) -> tuple[list[Tensor | Spec], list[Tensor | Spec]]:
    """Return operands and results: saved ones as tensors (on the tape if backward is taped), the others as specs."""
    if node.saved is None:
        fix = "call the first backward with retain_graph=True"
        raise GraphFreed("an earlier backward freed the saved values of this tape", where=node.op.name, fix=fix)
    recorder = active_recorder.get()
    named = None if recorder is None else recorder.named
    ins: list[Tensor | Spec] = [*node.in_specs] if named is None else [*map(named.spec, node.in_specs)]
    outs: list[Tensor | Spec] = [*node.out_specs] if named is None else [*map(named.spec, node.out_specs)]
    for index, data, version in node.saved:
        if isinstance(data, NDArray) and data.version != version:
            _refuse_modified(node, index, data)
        if index >= len(ins):
            port = index - len(ins)
            outs[port] = _on_tape(data, (node, port) if create_graph else None)
            continue
        edge = node.edges[index] if create_graph else None
        ins[index] = _on_tape(data, edge) if edge is None or isinstance(edge, tuple) else edge
    return ins, outs


def _refuse_modified(node: TapeNode, index: int, data: NDArray) -> Never:
    operands = len(node.edges)
    edge = node.edges[index] if index < operands else None
    name = f" ({edge.name})" if isinstance(edge, TensorBase) and edge.name else ""
    value = f"operand {index}{name}" if index < operands else f"result {index - operands}"
    what = f"{value} is read by backward, but was overwritten after the forward pass"
    op, line, fix = node.op.name, node.line, "write to a clone(), or after backward()"
    raise ModifiedSinceForward(what, op=op, value=value, line=line, where=f"{op} at {line}", got=data.spec, fix=fix)


def _on_tape(data: Any, edge: tuple[TapeNode, int] | None) -> Tensor:
    tensor = as_tensor(data)
    if edge is not None:
        tensor.node, tensor.port = edge
        tensor.requires_grad = True
    return tensor


def _accumulate(leaf: Tensor, g: Tensor, held: set[int]) -> None:
    """Add `g` to `leaf.grad`, in place unless one of them is on a tape. If that is None, store `g`.

    It is copied first if it is strided or its storage is `held`; the storage of what is stored is held from then on.
    """
    recorder = active_recorder.get()
    if recorder is not None:
        recorder.before_grad(leaf)
    if leaf.grad is not None and leaf.grad.dtype is not g.dtype:  # the user set it in the 16-bit dtype of the parameter
        leaf.grad = leaf.grad.to(g.dtype)
    if leaf.grad is not None:
        have, new = leaf.grad.data, g.data
        if isinstance(have, NDArray) and isinstance(new, NDArray) and not (g.requires_grad or leaf.grad.requires_grad):
            compute(_ADD, [have, new], {}, [have])
        else:
            leaf.grad = leaf.grad + g
        return
    g = g if g.requires_grad else g.detach()
    array = g.data
    if isinstance(array, NDArray):
        if id(array.storage) in held or not array.contiguous:
            g = call("copy", g)
            array = g.concrete("a gradient")
        held.add(id(array.storage))
    leaf.grad = g
