"""Traces with named sizes: sizes of inputs that stay variable in the traced program.

The traced code sees ints. It is traced once more for each name, with that size doubled. Every int that followed is
replaced by the name, and the resulting program must infer the specs of all traces. A slice of fixed size becomes an
index, because its axis has no fixed size to be checked against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Dim, Spec
from graphwright.autograd import TraceError, Variable
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.kinds import ASSIGN, CONST, INPUT, STORED
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_assign, add_op, add_source, set_outputs
from graphwright.program.weights import add_weight, as_array

if TYPE_CHECKING:
    from graphwright.program.program import Program

Shape = Sequence[int | str | None]


def named_specs(p: Program, sizes: Mapping[str, Shape]) -> tuple[dict[str, Spec], dict[str, int]]:
    """Return the specs of the inputs of a trace with the names of `sizes`, and the size of each name in the trace.

    Raises: UsageError for an unknown input, a wrong number of axes, or sizes that contradict each other or the trace.
    """
    specs, dims = {n: p.spec(n) for n in p.input_names()}, dict[str, int]()
    for name, shape in sizes.items():
        if name not in specs:
            raise UsageError("sizes are given for an unknown input", got=name, expected=", ".join(specs))
        given = specs[name].sizes
        named = tuple(have if want is None else want for want, have in zip(shape, given, strict=False))
        if len(shape) != len(given) or not Spec(named, specs[name].dtype).match(given, dims):
            what = "the sizes of an input do not match its example"
            raise UsageError(what, where=name, expected=specs[name], got=f"{tuple(shape)} with {dims}")
        specs[name] = Spec(named, specs[name].dtype)
    return specs, dims


def with_names(p: Program, sizes: Mapping[str, Shape], again: Callable[[Mapping[str, Spec]], Program]) -> Program:
    """Return a traced program with named sizes.

    Args:
        p: the trace of the examples.
        sizes: dict from input names to shapes of names, ints, and None for the size of the example.
        again: function that traces the same code with other specs of inputs, given by name.
    Raises: UsageError for sizes that do not match the examples; TraceError naming op and size where the code is valid
        for the example's size only, because it contains the size in a constant, a loop or a product.
    """
    specs, dims = named_specs(p, sizes)
    traces: dict[str, tuple[Mapping[str, int], Program]] = {}
    for name in dims:
        others = {**dims, name: 2 * dims[name]}
        try:
            traces[name] = others, again({n: spec.bind(others) for n, spec in specs.items()})
        except GraphwrightError as error:
            what = f"the traced code fails where the named size {name} is {others[name]} instead of {dims[name]}"
            raise TraceError(what, where=error.where, got=str(error), fix=f"leave {name} fixed") from error
    return _merged(p, specs, dims, traces)


def _merged(
    p: Program, specs: Mapping[str, Spec], dims: Mapping[str, int], traces: Mapping[str, tuple[Mapping[str, int], Any]]
) -> Program:
    for name, (_, other) in traces.items():
        ends, twins = ([(q.path(v.node), v.port) for v in q.outputs()] for q in (p, other))
        if ends != twins or p.output_names() != other.output_names() or len(p) != len(other):
            raise _other_ops(p, other, name, dims[name])
    made = p.empty(p.name)
    values: dict[Value, Value] = {}
    twins = {name: dict(zip(p.order(), other.order(), strict=False)) for name, (_, other) in traces.items()}
    for node in p.order():
        op, path = p.op(node), p.path(node)
        same = {name: twins[name].get(node) for name in traces}
        for name, (_, other) in traces.items():
            if (twin := same[name]) is None or _form(other, twin) != _form(p, node):
                raise _baked(p, node, name, "is not recorded for other sizes")
        reads = [values[v] for v in p.operands(node)]
        if op == ASSIGN:
            if made.specs(reads[0].node)[0] != made.specs(reads[1].node)[reads[1].port]:
                raise _baked(p, node, ", ".join(dims), "assigns a value of variable size to a state")
            add_assign(made, reads[0], reads[1], path)
            continue
        if op == INPUT:
            copy = add_source(made, INPUT, path, specs[path], {})
        elif op in STORED:
            copy = _stored(p, node, made, dims, traces, same)
        elif traits(op).slices and isinstance(made.spec(reads[0]).shape[p.attrs(node)["axis"]], str):
            copy = _indexed(p, node, made, reads[0], {n: (traces[n][1], twin) for n, twin in same.items() if twin})
        else:
            others = {n: (traces[n][0][n], traces[n][1].attrs(twin)) for n, twin in same.items() if twin is not None}
            attrs = {key: _name(p, node, dims, value, {n: (size, a[key]) for n, (size, a) in others.items()})
                     for key, value in p.attrs(node).items()}  # fmt: skip
            try:
                copy = add_op(made, op, reads, attrs, path)
            except GraphwrightError as error:
                names = {d for v in reads for d in made.specs(v.node)[v.port].shape if isinstance(d, str)}
                raise _baked(p, node, ", ".join(sorted(names)), f"cannot have a named size: {error}") from error
        for name, (others_dims, other) in {"": (dims, p), **traces}.items():
            found = p.specs(node) if not name else other.specs(same[name])
            if tuple(s.bind(others_dims) for s in made.specs(copy)) != tuple(found):
                raise _baked(p, node, name or ", ".join(dims), "has another result for other sizes")
        for port in range(len(p.specs(node))):
            values[Value(node, port)] = Value(copy, port)
    set_outputs(made, {label: values[v] for label, v in zip(p.output_names(), p.outputs(), strict=True)})
    return made


def _form(p: Program, node: NodeId) -> tuple[Any, ...]:
    return p.op(node), p.path(node), [(p.path(v.node), v.port) for v in p.operands(node)], list(p.attrs(node))


def _name(p: Program, node: NodeId, dims: Mapping[str, int], value: Any, others: Mapping[str, tuple[int, Any]]) -> Any:
    """Return an attribute with names for the ints that follow a size; `others` maps names to (size, value there)."""
    if isinstance(value, tuple | list) and all(len(v) == len(value) for _, v in others.values()):
        return type(value)(_name(p, node, dims, item, {n: (size, v[i]) for n, (size, v) in others.items()})
                           for i, item in enumerate(value))  # fmt: skip
    moved = [name for name, (_, other) in others.items() if other != value]
    for name in moved:
        if len(moved) > 1 or type(value) is not int or (value, others[name][1]) != (dims[name], others[name][0]):
            raise _baked(p, node, ", ".join(moved), f"has {value} where other sizes give {others[name][1]}")
    return moved[0] if moved else value


def _stored(
    p: Program, node: NodeId, made: Program, dims: Mapping[str, int],
    traces: Mapping[str, tuple[Mapping[str, int], Program]], same: Mapping[str, Any],
) -> NodeId:  # fmt: skip
    """Add a param, const or state; a const that follows the sizes may repeat one number, or count from 0."""
    key, path, spec = p.key(node), p.path(node), p.spec(node)
    variable = p.weights[key]
    if p.op(node) != CONST:
        add_weight(made.weights, key, variable)
        return add_source(made, p.op(node), path, spec, p.attrs(node))
    others = {n: (traces[n][0][n], traces[n][1].spec(twin).shape) for n, twin in same.items()}
    shape: Sequence[Dim] = _name(p, node, dims, spec.shape, others)
    named = [d for d in shape if isinstance(d, str)]
    arrays = [variable.data.to_numpy()]
    arrays += [q.weights.array(q.key(same[n])).to_numpy() for n, (_, q) in traces.items()]
    number = arrays[0].reshape(-1)[:1]
    if not named and all(np.array_equal(array, arrays[0]) for array in arrays):
        add_weight(made.weights, key, variable)
        return add_source(made, CONST, path, spec, p.attrs(node))
    if named and number.size and all((array == number).all() for array in arrays):
        scalar = Variable(as_array(number.reshape(()), spec.dtype), name=key)
        add_weight(made.weights, key, scalar)
        source = add_source(made, CONST, made.free_name(f"{path}.scalar"), scalar.spec, p.attrs(node))
        return add_op(made, "expand", [Value(source)], {"shape": tuple(shape)}, path)
    if len(named) == 1 and all(np.array_equal(array.reshape(-1), np.arange(array.size)) for array in arrays):
        x = next(n for n in made.inputs() if named[0] in made.spec(n).shape)
        axis = made.spec(x).shape.index(named[0])
        found = add_op(made, "iota", [Value(x)], {"axis": axis}, made.free_name(f"{path}.iota"))
        found = add_op(made, "cast", [Value(found)], {"dtype": spec.dtype.name}, made.free_name(f"{path}.cast"))
        return add_op(made, "reshape", [Value(found)], {"shape": tuple(shape)}, path)
    raise _baked(p, node, ", ".join(named or dims), "is a constant that depends on the size")


def _indexed(p: Program, node: NodeId, made: Program, x: Value, others: Mapping[str, tuple[Program, NodeId]]) -> NodeId:
    """Add a slice of an axis of named size as an `index` of a fixed number of entries, counted from either end.

    `others` maps names of sizes to (trace with another size, its slice).
    """
    starts, ends = set[int](), set[int]()
    for name, (program, twin) in {"": (p, node), **others}.items():
        taken, read = program.attrs(twin), program.operands(twin)[0]
        if (taken["size"], taken["step"]) != (p.attrs(node)["size"], p.attrs(node)["step"]):
            raise _baked(p, node, name, f"takes {p.attrs(node)['size']} entries, but {taken['size']} for other sizes")
        starts.add(taken["start"])
        ends.add(taken["start"] - program.specs(read.node)[read.port].sizes[taken["axis"]])
    first = min(starts if len(starts) == 1 else ends)
    if min(len(starts), len(ends)) > 1:
        raise _baked(p, node, ", ".join(others), f"starts at {p.attrs(node)['start']}, unlike for other sizes")
    ids = as_array(np.arange(p.attrs(node)["size"]) * p.attrs(node)["step"] + first)
    key = made.free_name(f"{p.path(node)}.ids")
    add_weight(made.weights, key, Variable(ids, name=key))
    source = add_source(made, CONST, key, ids.spec, {"key": key})
    return add_op(made, "index", [x, Value(source)], {"axis": p.attrs(node)["axis"]}, p.path(node))


def _other_ops(p: Program, other: Program, name: str, size: int) -> TraceError:
    """Return the error for code that records other ops for another value of the named size `name`."""
    pairs = zip(p.order(), other.order(), strict=False)
    first = next((n for n, twin in pairs if _form(p, n) != _form(other, twin)), p.order()[-1])
    text = f"the traced code is valid for one value of the named size {name} only: from {p.path(first)} on it records "
    text += f"other ops where {name} is {2 * size} instead of {size}, because a loop or a branch depends on it"
    fix = f"leave {name} fixed, or replace the loop or branch by tensor operations"
    return TraceError(text, where=f"{p.path(first)} ({p.op(first)})", expected=f"{len(p)} nodes for all sizes",
                      got=f"{len(other)} nodes where {name} is {2 * size}", fix=fix)  # fmt: skip


def _baked(p: Program, node: NodeId, name: str, what: str) -> TraceError:
    text = f"the traced code is valid for one value of the named size {name} only: {p.path(node)} {what}"
    fix = "compute from shapes with tensor operations, pass the value as an input, or leave the size fixed"
    return TraceError(text, where=f"{p.path(node)} ({p.op(node)})", got=p.specs(node)[0] if p.specs(node) else None,
                      fix=fix)  # fmt: skip
