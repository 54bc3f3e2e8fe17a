"""In-place operators of a captured graph, replaced where no other value shares the memory.

Most graphs of networks have only in-place activations and sums. Without them a graph needs no decomposition by torch,
which captures it a second time.
"""

from __future__ import annotations

import operator as python
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import OutputKind

from graphwright.models.importing.operators import find, operator_name

aten: Any = torch.ops.aten
_ROWS = {
    aten.batch_norm.default, aten.dropout.default, aten.flatten.using_ints, aten.reshape.default, aten.chunk.default,
    aten.contiguous.default, aten.unflatten.int, aten.narrow.default, aten.expand_as.default, aten.split.sizes,
    aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout, aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
}  # fmt: skip
"""Composite operators with a row that torch decomposes all the same, as they may return or write an operand."""
_DROPOUT = {aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default, aten.feature_dropout_.default,
            aten.alpha_dropout.default, aten.alpha_dropout_.default}  # fmt: skip


def without_writes(exported: ExportedProgram) -> bool:
    """Replace in-place operators by those that return what they would write; return whether the graph is then plain.

    It is plain if it has only operators with rows, none of which writes. An operator that writes to memory which is
    read later under another name, such as through a view, stays.
    """
    graph, signature = exported.graph_module.graph, exported.graph_signature
    shared: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # node -> the nodes whose memory may be that of its result
    plain = all(s.kind == OutputKind.USER_OUTPUT for s in signature.output_specs)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function":
            plain = plain and node.op in ("placeholder", "output")
            shared[node] = {node}
        elif not isinstance(target, torch._ops.OpOverload):
            plain = plain and (target is python.getitem or getattr(target, "__module__", "") == "_operator")
            _join(node, shared)
        elif target in _DROPOUT and not node.args[2]:  # it returns its operand, which torch's decomposition copies
            _replace(exported, node, node.args[0])
        elif not target._schema.is_mutable:
            plain = plain and _has_row(node)
            if _is_fresh(target):
                shared[node] = {node}
            else:
                _join(node, shared)
        elif (made := _functional_form(node)) is None or not _alone(node, shared, order):
            plain = False
            _join(node, shared)
        else:
            source: Any = node.args[0]
            with graph.inserting_after(node):
                new = graph.call_function(made, node.args, node.kwargs)
            new.meta, order[new] = dict(node.meta), order[node]
            _replace(exported, node, new)
            source.replace_all_uses_with(new, lambda user, at=order[new], new=new: order[user] > at)
            shared[new] = {new}
            plain = plain and _has_row(new)
    exported.graph_module.recompile()
    return plain


def _join(node: torch.fx.Node, shared: dict[torch.fx.Node, set[torch.fx.Node]]) -> None:
    """Note that a node's result may be memory of any of its operands."""
    together = {node}.union(*(shared[n] for n in node.all_input_nodes))
    shared |= dict.fromkeys(together, together)


def _alone(
    node: torch.fx.Node, shared: dict[torch.fx.Node, set[torch.fx.Node]], order: dict[torch.fx.Node, int]
) -> bool:
    """Return whether what an in-place operator writes is read later through its first operand alone."""
    source: Any = node.args[0]
    readers = [user for other in shared[source] - {source} for user in other.users]
    inside = all(n.op == "call_function" for n in shared[source])
    return inside and all(order[user] <= order[node] or _is_size(user) for user in readers)


def _has_row(node: torch.fx.Node) -> bool:
    target: Any = node.target
    name, overload = operator_name(target)
    if name == "sym_size":
        return True
    if find(name, overload) is None:
        return False
    if target is aten.batch_norm.default:
        return not node.args[5]  # the statistics of a batch would be written
    return target in _ROWS or _stays_whole(target)


def _stays_whole(target: Any) -> bool:
    """Return whether a decomposition that keeps operators with rows would keep this one."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return not composite or target in _decomposable()


@cache
def _decomposable() -> frozenset[Any]:
    return frozenset(default_decompositions())


def _is_fresh(target: Any) -> bool:
    """Return whether an operator's results share no memory with its operands."""
    schema = target._schema
    if target is aten.batch_norm.default:
        return True
    aliased = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return not aliased and _stays_whole(target) and target is not aten.lift_fresh_copy.default


def _is_size(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and operator_name(node.target)[0] == "sym_size"


def _functional_form(node: torch.fx.Node) -> Any:
    """Return the operator that returns what an in-place one writes, in the same dtype, or None."""
    target: Any = node.target
    name, overload = operator_name(target)
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") and not name.endswith("__") else None
    made = getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None
    if made is None or find(*operator_name(made)) is None or not (made in _ROWS or _stays_whole(made)):
        return None
    kinds = {n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)} - {
        torch.bool
    }  # bools promote no other dtype
    return made if len(kinds) == 1 and next(iter(kinds)).is_floating_point else None


def _replace(exported: ExportedProgram, node: torch.fx.Node, by: Any) -> None:
    """Remove a node; its readers, and the outputs, read another one."""
    exported.graph_signature.replace_all_uses(node.name, by.name)
    node.replace_all_uses_with(by)
    exported.graph_module.graph.erase_node(node)
