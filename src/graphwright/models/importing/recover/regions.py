"""Regions of a program: reading them, proving that two compute the same, and replacing one by the other.

Rules ask for ops by name: a rule is about the way in which other libraries write a function, which has no trait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any

import numpy as np

from graphwright.array import NDArray, Spec, empty, float32, float64, from_numpy
from graphwright.array.sizes import names_of
from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.models.importing.recover.report import Recovered
from graphwright.ops import call, get, traits
from graphwright.ops.call import as_dtype
from graphwright.program.kinds import CONST, SOURCES
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_op, discard, move_edge, set_outputs, update_node
from graphwright.program.program import Program
from graphwright.program.weights import drop_weight

Draw = Callable[[np.random.Generator, Spec], np.ndarray]
"""(generator, spec with numbers as sizes) -> values of a leaf of a region."""

# by name: rules are about the way in which other code writes a function, which has no trait
VIEWS = ("reshape", "flatten", "unflatten", "permute", "squeeze", "unsqueeze", "expand", "copy")
# by name: as the lines before
IN_ORDER = ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
"""Views whose entries keep their order, so that one of equal shape is the identity."""

# by name: a residual sum is a junction, any other an add
SUMS = ("add", "junction")

TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference of two regions relative to the largest entry, by dtype: some tens of roundings."""

CONSTANTS = 3e-7
"""The same where float64 is computed from constants in float32: a few roundings of these."""

PRIMES = (2, 5, 7, 11, 13, 17, 19, 23)


class Regions:
    """A newly recorded program whose regions are replaced; no edit is recorded.

    Attributes:
        p: the program.
        report: what was recovered so far.
        sizes: two sets of values of the named sizes.
    """

    def __init__(self, p: Program) -> None:
        self.p, self.report = p, Recovered()
        names = list(dict.fromkeys(n for v in p.inputs() for d in p.spec(v).shape for n in names_of(d)))
        self.sizes = [{name: (PRIMES * (len(names) + 1))[i + shift] for i, name in enumerate(names)}
                      for shift in (0, 1)]  # fmt: skip
        self._proved: dict[Any, bool] = {}

    # -- reading -------------------------------------------------------------------------------------------------------
    def values(self, *ops: str) -> Iterator[Value]:
        """Yield the first results of all nodes of these ops, in topological order, while they exist."""
        nodes = [n for op in ops for n in self.p.of_kind(op)]
        for node in sorted(nodes, key=self.p.order_labels.key):
            if node in self.p.graph:
                yield Value(node)

    def parts(self, value: Value, *ops: str) -> list[Value] | None:
        """Return the operands of a value if one of these ops made it, else None."""
        return self.p.operands(value.node) if value.port == 0 and self.p.op(value.node) in ops else None

    def is_op(self, value: Value, *ops: str) -> bool:
        """Return whether one of these ops made a value."""
        return self.p.op(value.node) in ops

    def attr(self, value: Value, name: str) -> Any:
        """Return an attribute of the node that made a value."""
        return self.p.attrs(value.node)[name]

    def shape(self, value: Value) -> tuple[int | str, ...]:
        """Return the shape of a value."""
        return self.p.spec(value).shape

    def number(self, value: Value) -> float | None:
        """Return the number that a constant of one entry holds, also one that is cast or expanded; else None."""
        while self.is_op(value, "cast", *VIEWS):
            value = self.p.operands(value.node)[0]
        if self.is_op(value, "full_like"):
            return float(self.attr(value, "value"))
        if not self.is_op(value, CONST):
            return None
        array = self.p.weights.array(self.p.key(value.node))
        return float(array.to_numpy("float64").ravel()[0]) if array.size == 1 and array.dtype.kind != "bool" else None

    def with_number(self, value: Value, *ops: str) -> tuple[Value, float] | None:
        """Return (operand, number) of one of these ops on a value and a number; the number of others is the second."""
        operands = self.parts(value, *ops)
        if operands is None or len(operands) != 2:
            return None
        for at in (1, 0) if self.is_op(value, "mul", "add", "junction") else (1,):
            number = self.number(operands[at])
            if number is not None:
                return operands[1 - at], number
        return None

    def scaled(self, value: Value) -> tuple[Value, float] | None:
        """Return (operand, factor) of a product or quotient of a value and a number, or of a negation."""
        if (negated := self.parts(value, "neg")) is not None:
            return negated[0], -1.0
        found = self.with_number(value, "mul", "div")
        if found is None or not isfinite(found[1]) or not found[1]:
            return None
        return found if self.is_op(value, "mul") else (found[0], 1 / found[1])

    def readers(self, value: Value) -> list[NodeId]:
        """Return the nodes that read a value, each once."""
        return list(self.p.consumers(value))

    def next(self, value: Value, *ops: str) -> Value | None:
        """Return the only reader of a value, if it is one of these ops and the value is not an output; else None."""
        found = self.readers(value)
        if len(found) != 1 or value in self.p.outputs() or self.p.op(found[0]) not in ops:
            return None
        return Value(found[0])

    def above(self, value: Value, *ops: str) -> list[Value]:
        """Return a value and those from which it is made by these ops of one operand (or a number), nearest first."""
        found = [value]
        while self.is_op(found[-1], *ops):
            inner = self.scaled(found[-1]) if self.is_op(found[-1], "mul", "div") else None
            if self.is_op(found[-1], "mul", "div") and inner is None:
                break
            found.append(inner[0] if inner is not None else self.p.operands(found[-1].node)[0])
        return found

    def module(self, value: Value) -> str:
        """Return the path of the module whose code made a value, with a dot at the end; `""` outside modules."""
        path = self.p.path(value.node).rpartition(".")[0]
        return f"{path}." if path else ""

    # -- computing -----------------------------------------------------------------------------------------------------
    def compute(
        self,
        roots: Sequence[Value],
        given: Mapping[Value, NDArray],
        sizes: Mapping[str, int],
        *,
        shapes: bool = False,
        wide: bool = False,
    ) -> list[NDArray]:
        """Return the values of roots where some values are given, for numbers as named sizes.

        Args:
            shapes: take any array of the right shape for operands of which only the shape counts.
            wide: compute in float64 what the program computes in float32; `given` has float64 then.
        Raises: GraphwrightError.
        """
        known = dict(given)
        stack = [v for v in roots]
        while stack:
            value = stack[-1]
            if value in known:
                stack.pop()
                continue
            node = value.node
            if self.p.op(node) == CONST:
                array = self.p.weights.array(self.p.key(node))
                known[value] = as_dtype(array, float64) if wide and array.dtype is float32 else array
                continue
            operands = self.p.operands(node)
            if shapes and traits(self.p.op(node)).valueless:
                ins = [known.get(v) or _unread(self.p.spec(v).bind(sizes)) for v in operands]
            elif missing := [v for v in operands if v not in known]:
                stack += missing
                continue
            else:
                ins = [known[v] for v in operands]
            attrs = get(self.p.op(node)).bind_all_sizes(self.p.attrs(node), sizes)
            if wide:
                attrs = {name: float64 if value is float32 else value for name, value in attrs.items()}
            made = call(self.p.op(node), *ins, **attrs)
            made = made if isinstance(made, tuple) else (made,)
            known |= {Value(node, port): result for port, result in enumerate(made)}
        return [known[v] for v in roots]

    def leaves(self, roots: Iterable[Value], cut: Iterable[Value]) -> list[Value]:
        """Return the values that roots are computed from: those in `cut`, inputs, params and states."""
        found, stack, stop = dict[Value, None](), list(roots), set(cut)
        seen = set(stack)
        while stack:
            value = stack.pop()
            if value in stop or (self.p.op(value.node) in SOURCES and self.p.op(value.node) != CONST):
                found[value] = None
                continue
            for operand in self.p.operands(value.node):
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return list(found)

    def agree(self, old: Value, new: Value, draws: Mapping[Value, Draw | None]) -> bool:
        """Return whether two values are the same function of these leaves, by random values of them at two sizes.

        They are compared in their own dtype, which shows how they round, and float32 also in float64, which shows how
        constants differ. Params, inputs and states are leaves too. Equal pairs of regions are compared once.
        """
        form = (self._form(old, draws), self._form(new, draws), tuple(id(d) for d in draws.values()))
        if form not in self._proved:
            ways = (True, False) if self.p.spec(old).dtype is float32 else (False,)
            self._proved[form] = self.p.spec(old) == self.p.spec(new) and all(
                self._equal(old, new, draws, sizes, wide) for sizes in self.sizes for wide in ways
            )
        return self._proved[form]

    def _equal(
        self, old: Value, new: Value, draws: Mapping[Value, Draw | None], sizes: Mapping[str, int], wide: bool
    ) -> bool:
        rng, given = np.random.default_rng(sum(sizes.values())), dict[Value, NDArray]()
        try:
            for leaf in self.leaves((old, new), draws):
                spec = self.p.specs(leaf.node)[leaf.port].bind(sizes)
                kind = float64 if wide and spec.dtype is float32 else spec.dtype
                given[leaf] = arrays((draws.get(leaf) or normal)(rng, spec), Spec(spec.shape, kind))
            made = self.compute((old, new), given, sizes, wide=wide)
            first, second = (a.to_numpy("float64") for a in made)
        except GraphwrightError:
            return False
        if not np.isfinite(first).all() or first.shape != second.shape:
            return False
        tolerance = CONSTANTS if wide else TOLERANCE.get(self.p.spec(old).dtype.name, 0.0)
        return not first.size or bool(np.abs(first - second).max() <= tolerance * max(np.abs(first).max(), 1e-6))

    def _form(self, root: Value, cut: Mapping[Value, Any]) -> tuple[Any, ...]:
        """Return a value's region without its names: equal regions have equal forms."""
        numbers: dict[Value, int] = {value: -1 - i for i, value in enumerate(cut)}
        lines: list[Any] = [(self.p.spec(value), number) for value, number in numbers.items()]

        def visit(value: Value) -> int:
            if value not in numbers:
                node, op = value.node, self.p.op(value.node)
                if op == CONST:
                    array = self.p.weights.array(self.p.key(node))
                    line: Any = (op, array.spec, array.tobytes())
                else:
                    inner = [visit(v) for v in ([] if op in SOURCES else self.p.operands(node))]
                    attrs = {} if op in SOURCES else self.p.attrs(node)
                    line = (op, value.port, repr(sorted(attrs.items())), *inner, self.p.specs(node))
                numbers[value] = len(lines)
                lines.append(line)
            return numbers[value]

        visit(root)
        return tuple(lines)

    # -- replacing -----------------------------------------------------------------------------------------------------
    def add(self, op: str, operands: Sequence[Value], name: str, after: Value | None = None, **attrs: Any) -> Value:
        """Add an op under a free name."""
        before = None if after is None else after.node
        return Value(add_op(self.p, op, operands, attrs, self.p.free_name(name), after=before))

    def replace(self, old: Value, new: Value) -> None:
        """Let all readers of a value read another one, and remove what is not read any more."""
        self.redirect(old, new)
        self.sweep([old.node])

    def redirect(self, old: Value, new: Value) -> None:
        """Let all readers of a value read another one."""
        p = self.p
        for edge in p.out_edges(old.node):
            if p.edge_value(edge) == old and p.graph.target(edge) != new.node:
                move_edge(p, edge, new)
        outputs = zip(p.output_names(), p.outputs(), strict=True)
        set_outputs(p, {name: new if v == old else v for name, v in outputs})

    def rename(self, value: Value, name: str) -> None:
        """Give a node a name, if the name is free."""
        if self.p.path(value.node) != name:
            update_node(self.p, value.node, name=self.p.free_name(name))

    def sweep(self, nodes: Iterable[NodeId]) -> None:
        """Remove nodes that nothing reads, and then their operands; inputs and params stay."""
        p, results, stack = self.p, {v.node for v in self.p.outputs()}, list(nodes)
        while stack:
            node = stack.pop()
            if node not in p.graph or p.out_edges(node) or node in results:
                continue
            if p.op(node) == CONST:
                key = p.key(node)
                discard(p, [node])
                if not p.readers(key):
                    drop_weight(p.weights, key)
                    self.report.dropped.append(key)
            elif p.op(node) not in SOURCES:
                stack += p.producers(node)
                discard(p, [node])

    def found(self, kind: str, value: Value) -> None:
        """Note a recovered region."""
        self.report.found.setdefault(kind, []).append(self.p.path(value.node))

    def leave(self, kind: str, value: Value, why: str) -> None:
        """Note a region that stays as it is."""
        self.report.left.setdefault(kind, {})[self.p.path(value.node)] = why


# -- values of leaves --------------------------------------------------------------------------------------------------
def arrays(values: np.ndarray, spec: Spec) -> NDArray:
    """Return values as an array of a spec's dtype."""
    array = from_numpy(np.ascontiguousarray(values))
    return array if array.dtype is spec.dtype else call("cast", array, dtype=spec.dtype)


def _unread(spec: Spec) -> NDArray:
    return empty(spec.sizes, spec.dtype)


def normal(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Draw entries of mean 0 and variance 1; small integers, and bools that are mostly true."""
    if spec.dtype.kind == "float":
        return rng.normal(size=spec.sizes)
    return rng.integers(0, 50, spec.sizes) if spec.dtype.kind != "bool" else rng.random(spec.sizes) < 0.7


def rows(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Draw rows of sizes between 1e-7 and 10, so that a constant added to their squares counts."""
    return rng.normal(size=spec.sizes) * 10.0 ** rng.uniform(-7, 1, (*spec.sizes[:-1], 1))


def bias(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Draw numbers that are added to scores; some keys, but not the first, are hidden by -inf."""
    drawn = rng.normal(size=spec.sizes)
    hidden = rng.random(spec.sizes) < 0.3
    hidden[..., 0] = False
    return np.where(hidden, -inf, drawn)


def some_hidden(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Draw bools that are true for keys that are hidden: some, but not the first."""
    drawn = rng.random(spec.sizes) < 0.3
    drawn[..., 0] = False
    return drawn
