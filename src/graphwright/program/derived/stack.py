"""Programs of one structure as one program, whose weights and values have a leading axis of members.

An op runs on stacked operands in one of three ways, tried in this order: with its axes moved by one, where that is
proven on samples to be the op on each member; by its expansion; or once per member, on slices. A value that is equal in
all members, as it depends on shared inputs and equal consts only, is not stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, product
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, Spec, sample_sizes
from graphwright.autograd import Parameter, Variable
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops import Op, compute, get
from graphwright.ops.expansion import Arithmetic
from graphwright.program.kinds import ASSIGN, CONST, INPUT, PARAM, STORED
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_assign, add_op, add_source, set_outputs, update_node
from graphwright.program.weights import add_weight, as_array, shared_variable

if TYPE_CHECKING:
    from graphwright.program.program import Program


class NotStackable(UsageError):
    """An op cannot run on stacked members, or the programs have different structures."""


def stack(programs: Sequence[Program], *, shared: Sequence[str] | None = None) -> Program:
    """Stack programs of one structure: weights and outputs get a leading axis [members, ...].

    Args:
        programs: programs with equal `structure_hash`; their weights are copied.
        shared: names of inputs that all members read; by default all. The others get the leading axis.
    Raises: NotStackable if the structures differ, for draws of random numbers, which a separate member would draw from
        the generator after the others, and for ops that update their operands; UsageError for unknown inputs.
    """
    if not programs:
        raise UsageError("no programs were given", expected="at least one program")
    first = programs[0]
    for k, other in enumerate(programs):
        if other.structure_hash() != first.structure_hash():
            ours, theirs = ({p.path(n): (p.op(n), p.specs(n)) for n in p.nodes()} for p in (first, other))
            odd = next((path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)), first.name)
            raise NotStackable(f"program {k} has another structure than program 0", where=odd, expected=ours.get(odd),
                               got=theirs.get(odd), fix="programs of one class and one configuration")  # fmt: skip
    names = first.input_names() if shared is None else tuple(shared)
    if unknown := set(names) - set(first.input_names()):
        raise UsageError("unknown inputs are shared", got=", ".join(sorted(unknown)), expected=first.input_names())
    return _Stack(programs, names).build()


class _Term(Arithmetic):
    """A value of the stacked program in place of a tensor; `spec` and `shape` are those of one member."""

    def __init__(self, maker: _Stack, value: Value, spec: Spec, stacked: bool) -> None:
        self.maker, self.value, self.spec, self.stacked = maker, value, spec, stacked
        self.shape, self.dtype, self.ndim = spec.shape, spec.dtype, len(spec.shape)

    @staticmethod
    def __gw_op__(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Any = None) -> Any:
        known = next(t for t in operands if isinstance(t, _Term))
        terms = [t if isinstance(t, _Term) else known.maker.number(t, known.dtype) for t in operands]
        found = known.maker.apply(row, terms, attrs)
        return found[0] if len(found) == 1 else tuple(found)


class _Stack:
    """The construction of one stacked program; `count` is the number of members."""

    def __init__(self, programs: Sequence[Program], shared: Sequence[str]) -> None:
        self.programs, self.shared, self.count = programs, shared, len(programs)
        self.made = programs[0].empty(f"{programs[0].name} x {len(programs)}")
        self.path = ""
        self._proven: dict[Any, bool] = {}

    def build(self) -> Program:
        p, made = self.programs[0], self.made
        values: dict[Value, _Term] = {}
        for node in p.order():
            op, self.path = p.op(node), p.path(node)
            operands = [values[v] for v in p.operands(node)]
            if op == ASSIGN:
                target, value = operands
                add_assign(made, target.value, self.stacked(value).value, self.path)
            elif op == INPUT:
                stacked, spec = self.path not in self.shared, p.spec(node)
                source = add_source(made, INPUT, self.path, self.lead(spec) if stacked else spec, {})
                values[Value(node)] = _Term(self, Value(source), spec, stacked)
            elif op in STORED:
                values[Value(node)] = self.weight(node)
            elif not operands:
                raise NotStackable("a junction without edges cannot be stacked", where=self.path)
            else:
                path, results = self.path, self.apply(get(op), operands, p.attrs(node))
                if made.path(results[0].value).startswith(f"{path}."):
                    update_node(made, results[0].value.node, name=path)
                for port, term in enumerate(results):
                    values[Value(node, port)] = term
        ends = {name: self.stacked(values[p.output(name)]).value for name in p.output_names()}
        set_outputs(made, ends)
        return made

    def lead(self, spec: Spec) -> Spec:
        """Return the spec of the stacked value."""
        return Spec((self.count, *spec.shape), spec.dtype)

    def weight(self, node: Any) -> _Term:
        """Add a source with the stacked arrays of all members; a const that is equal in all members is added once."""
        p, op = self.programs[0], self.programs[0].op(node)
        key, path = p.key(node), p.path(node)
        arrays = [q.weights.array(q.key(q.node(path))) for q in self.programs]
        equal = op == CONST and all(a is arrays[0] or a.tobytes() == arrays[0].tobytes() for a in arrays[1:])
        if not self.made.weights.has_key(key):
            first = p.weights[key]
            if equal:
                made = shared_variable(first, type(first), key)
            elif op == PARAM:
                made = Parameter(stacked_array(arrays), first.requires_grad, key)
            else:
                made = type(first)(stacked_array(arrays), name=key)
            add_weight(self.made.weights, key, made)
        source = add_source(self.made, op, path, self.made.weights[key].spec, p.attrs(node))
        return _Term(self, Value(source), p.spec(node), not equal)

    def number(self, value: float, dtype: Any) -> _Term:
        """Add a const of a number that an expansion uses."""
        name = self.free_name(f"{self.path}.const")
        array = as_array(np.asarray(value), dtype)
        add_weight(self.made.weights, name, Variable(array, name=name))
        source = add_source(self.made, CONST, name, array.spec, {"key": name})
        return _Term(self, Value(source), array.spec, stacked=False)

    def free_name(self, wanted: str) -> str:
        """Return a path and key that neither the stacked program nor a member has: `wanted`, `wanted_2`, ..."""
        both = self.made, self.programs[0]  # whose names are added sooner or later
        names = chain([wanted], (f"{wanted}_{i}" for i in count(2)))
        return next(n for n in names if all(p.find(n) is None and not p.weights.has_key(n) for p in both))

    def node(self, op: str, operands: Sequence[Value], **attrs: Any) -> Value:
        """Add an op under a free path below that of the node that is being stacked."""
        name = self.free_name(f"{self.path}.{op}")
        return Value(add_op(self.made, op, operands, get(op).complete(attrs), name))

    def stacked(self, term: _Term) -> _Term:
        """Return a term with the leading axis: a value that is equal in all members is repeated."""
        if term.stacked:
            return term
        one = self.node("unsqueeze", [term.value], axes=(0,))
        return _Term(self, self.node("expand", [one], shape=(self.count, *term.shape)), term.spec, stacked=True)

    # -- one op ------------------------------------------------------------------------------------------------------
    def apply(self, row: Op, operands: Sequence[_Term], attrs: Mapping[str, Any]) -> list[_Term]:
        """Add an op on stacked or shared operands; return its results."""
        attrs = row.complete(attrs)
        if "stream" in row.attrs:
            raise NotStackable(f"op {row.name!r} draws random numbers", where=self.path, got=row.name,
                               fix="stack models in inference mode: module.eval()")  # fmt: skip
        if row.traits.update or row.traits.updates_states:
            raise NotStackable(f"op {row.name!r} updates its operands", where=self.path, got=row.name)
        specs = row.specs([t.spec for t in operands], attrs, self.path)
        if not any(t.stacked for t in operands):
            value = self.node(row.name, [t.value for t in operands], **attrs)
            return [_Term(self, Value(value.node, i), s, stacked=False) for i, s in enumerate(specs)]
        for aligned, moved in self.candidates(row, operands, attrs):
            if self.proven(row, operands, attrs, specs, aligned, moved):
                value = self.node(row.name, [self.aligned(t, aligned) for t in operands], **moved)
                return [_Term(self, Value(value.node, i), s, stacked=True) for i, s in enumerate(specs)]
        if row.expand is not None:
            results = row.expand(operands, attrs)
            return list(results) if isinstance(results, tuple) else [results]
        return self.each(row, operands, attrs, specs)

    def each(self, row: Op, operands: Sequence[_Term], attrs: Mapping[str, Any], specs: Sequence[Spec]) -> list[_Term]:
        """Add an op once per member, on slices of the operands, and stack the results."""
        results: list[list[Value]] = [[] for _ in specs]
        for k in range(self.count):
            slices = []
            for t in operands:
                if t.stacked:
                    one = self.node("slice", [t.value], axis=0, start=k, size=1)
                    slices.append(self.node("squeeze", [one], axes=(0,)))
                else:
                    slices.append(t.value)
            node = self.node(row.name, slices, **attrs).node
            for port, found in enumerate(results):
                found.append(self.node("unsqueeze", [Value(node, port)], axes=(0,)))
        ends = [self.node("concat", found, axis=0) for found in results]
        return [_Term(self, value, s, stacked=True) for value, s in zip(ends, specs, strict=True)]

    def candidates(
        self, row: Op, operands: Sequence[_Term], attrs: Mapping[str, Any]
    ) -> Iterator[tuple[int | None, dict[str, Any]]]:
        """Yield (rank to which members are padded, or None to stack all operands as they are; attributes) to try."""
        rank = max(t.ndim for t in operands)
        options = [_moved(value, self.count) for value in attrs.values()]
        for values in product(*options):
            moved = dict(zip(attrs, values, strict=True))
            if len(operands) > 1:
                yield rank, moved
            yield None, moved

    def aligned(self, t: _Term, rank: int | None) -> Value:
        """Return the operand for a candidate: unit axes after the leading axis broadcast a member of smaller rank."""
        if rank is None:
            return self.stacked(t).value
        if not t.stacked or t.ndim == rank:
            return t.value
        return self.node("unsqueeze", [t.value], axes=tuple(range(1, 1 + rank - t.ndim)))

    def proven(
        self, row: Op, operands: Sequence[_Term], attrs: Mapping[str, Any], specs: Sequence[Spec], rank: int | None,
        moved: Mapping[str, Any],
    ) -> bool:  # fmt: skip
        """Return True if a candidate gives on samples what the op gives on each member."""
        forms = tuple((t.spec, t.stacked) for t in operands)
        known = (row.name, forms, repr(attrs), rank, repr(moved))
        if known not in self._proven:
            try:
                self._proven[known] = self._agrees(row, forms, attrs, specs, rank, moved)
            except (GraphwrightError, ValueError):
                self._proven[known] = False
        return self._proven[known]

    def _agrees(
        self, row: Op, forms: Sequence[tuple[Spec, bool]], attrs: Mapping[str, Any], specs: Sequence[Spec],
        rank: int | None, moved: Mapping[str, Any],
    ) -> bool:  # fmt: skip
        n = self.count
        dims = sample_sizes(s for s, _ in forms)
        wanted = [self.lead(s) for s in specs]
        given = []
        for spec, stacked in forms:
            shape = spec.shape if rank is None or not stacked else (1,) * (rank - len(spec.shape)) + spec.shape
            given.append(Spec((n, *shape), spec.dtype) if stacked or rank is None else spec)
        if list(row.specs(given, moved)) != wanted:
            return False
        rng = np.random.default_rng(0)
        samples = [_sample(s.bind(dims), n if stacked else None, rng) for s, stacked in forms]
        stacks = []
        for (spec, stacked), x, to in zip(forms, samples, given, strict=True):
            whole = x if stacked or rank is not None else np.broadcast_to(x, (n, *x.shape))
            stacks.append(_array(np.ascontiguousarray(whole).reshape(to.bind(dims).sizes), spec))
        ours = compute(row, stacks, row.bind_sizes(moved, dims))
        for k in range(n):
            one = [_array(x[k] if stacked else x, s) for (s, stacked), x in zip(forms, samples, strict=True)]
            for mine, theirs in zip(ours, compute(row, one, row.bind_sizes(attrs, dims)), strict=True):
                a, b = _numbers(mine)[k], _numbers(theirs)
                if not np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
                    return False
        return True


def stacked_array(arrays: Sequence[NDArray]) -> NDArray:
    """Return arrays of one spec as one array with a leading axis."""
    raised = [compute(get("unsqueeze"), [a], {"axes": (0,)})[0] for a in arrays]
    return compute(get("concat"), raised, {"axis": 0})[0]


def _moved(value: Any, count: int) -> list[Any]:
    """Return what an attribute may become with a leading axis: itself, or axes moved by one, or a longer shape."""
    found = [value]
    if type(value) is int and value >= 0:
        found.append(value + 1)
    elif type(value) is tuple and all(type(v) in (int, str) for v in value):
        raised = tuple(v + 1 if type(v) is int and v >= 0 else v for v in value)
        found += [raised, (0, *raised), (count, *value)]
    return found


def _sample(spec: Spec, count: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return positive floats, or integers 0 and 1; a leading axis of `count` members, unless it is None."""
    shape = spec.sizes if count is None else (count, *spec.sizes)
    return rng.uniform(0.1, 2, shape) if spec.dtype.is_float else rng.integers(0, 2, shape)


def _array(x: np.ndarray, spec: Spec) -> NDArray:
    return as_array(x.astype(np.float32) if spec.dtype.is_float and spec.dtype.is_low else x, spec.dtype)


def _numbers(a: NDArray) -> np.ndarray:
    return a.to_numpy("float32" if a.dtype.is_low else None)
