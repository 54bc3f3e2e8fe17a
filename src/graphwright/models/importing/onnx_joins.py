"""Nodes of a graph that are one operation here: x Wᵀ + b, which files write as Transpose, MatMul and Add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphwright.array import NDArray
from graphwright.models.importing.onnx_lower import OnnxNode
from graphwright.models.importing.onnx_operators.networks import LINEAR


def join_linear(
    nodes: Sequence[OnnxNode], tensors: Mapping[str, NDArray], outputs: Sequence[str]
) -> tuple[OnnxNode, ...]:
    """Return the nodes with each product by a transposed weight [out, in], and the bias added to it, joined to one.

    The joined node has the name of the product, and the position of the last of its nodes.
    """
    reads = Counter(n for node in nodes for n in node.inputs) + Counter(outputs)
    transposed = {node.outputs[0]: node.inputs[0] for node in nodes if _turns_weight(node, tensors)}
    products: dict[str, OnnxNode] = {}
    made: dict[int, OnnxNode] = {}
    positions: dict[str, int] = {}
    for position, node in enumerate(nodes):
        x, weight = node.inputs if len(node.inputs) == 2 else ("", "")
        if node.kind == "MatMul" and weight in transposed and x not in transposed:
            reads[weight] -= 1
            joined = replace(node, kind=LINEAR, inputs=(x, transposed[weight]))
            products[node.outputs[0]], positions[node.outputs[0]] = joined, position
            made[position] = joined
        elif node.kind == "Add" and (found := _with_bias(node, products, reads, tensors)) is not None:
            del made[positions[found.name]]
            made[position] = replace(products[found.name], inputs=found.inputs, outputs=node.outputs)
        else:
            made[position] = node
    return tuple(n for n in made.values() if not (n.outputs and n.outputs[0] in transposed and not reads[n.outputs[0]]))


def _turns_weight(node: OnnxNode, tensors: Mapping[str, NDArray]) -> bool:
    """Return whether a node transposes a stored floating matrix."""
    array = tensors.get(node.inputs[0]) if node.kind == "Transpose" and node.inputs else None
    order = list(node.attributes.get("perm", (1, 0)))
    return array is not None and len(array.shape) == 2 and array.dtype.is_float and order == [1, 0]


def _with_bias(
    node: OnnxNode, products: Mapping[str, OnnxNode], reads: Mapping[str, int], tensors: Mapping[str, NDArray]
) -> OnnxNode | None:
    """Return the operands of a product and the bias that a node adds, named by the product; None for another node."""
    for value, bias in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
        product = products.get(value)
        if product is None or len(product.inputs) != 2 or reads[value] != 1 or bias not in tensors:
            continue
        if tensors[bias].shape == tensors[product.inputs[1]].shape[:1]:
            return replace(product, name=value, inputs=(*product.inputs, bias))
    return None
