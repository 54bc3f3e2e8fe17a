"""Programs whose axes are known, and the oracle of a cut: the same program with its units multiplied by 0."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import graphwright as gw
import graphwright.plan  # the planner that Program.compile calls
from graphwright.array import from_numpy
from graphwright.program import Builder, Program
from graphwright.program.axes.units import Units


def perceptron(dtype: str = "f4", hidden: int = 5) -> Program:
    """x [B, 3] -> tanh(first) -> second -> y [B, 2]."""
    rng, b = np.random.default_rng(0), Builder("perceptron")
    x = b.input("x", ("B", 3), "float64" if dtype == "f8" else "float32")

    def weight(name: str, *shape: int) -> Any:
        return b.param(name, rng.normal(size=shape).astype(dtype))

    h = b.tanh(b.linear(x, weight("first.weight", hidden, 3), weight("first.bias", hidden), name="first"), name="act")
    b.output(b.linear(h, weight("second.weight", 2, hidden), weight("second.bias", 2), name="second"), "y")
    return b.build()


def traced(module: gw.nn.Module, *examples: np.ndarray) -> Program:
    """The program of a module, its weights in the dtype of the first example."""
    for variable in module.variables().values():
        if variable.dtype.is_float:
            variable.data = from_numpy(variable.numpy().astype(examples[0].dtype))
    return gw.trace(module, *examples)


def run(p: Program, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """Outputs by name; on a fork, as a run may write state."""
    result = p.fork().run(feeds)
    return {name: np.asarray(result[name].to_numpy()) for name in p.output_names()}


def masked(p: Program, units: Units) -> Program:
    """The program with a `mul` by 0 wherever a sum over the axes reads units that go."""
    twin = p.fork()
    found = twin.axes()
    with twin.edit("mask", check=False) as e:
        for name, ids in units.chosen.items():
            group = found[name]
            gone = np.zeros(group.size, bool)
            gone[list(ids)] = True
            atoms = group.atoms
            ends = {end for a in atoms for end in occurrences(found, a)}
            for node, port, dim in sorted(ends):
                edge = twin.in_edges(node)[port]
                value = twin.edge_value(edge)
                term = found.solution.dims[value][dim]
                factor = np.where(marks(term, atoms, gone), 0.0, 1.0)
                shape = [1] * len(found.solution.dims[value])
                shape[dim] = -1
                kind = twin.spec(value).dtype.numpy
                mask = e.const(twin.free_name("mask"), factor.reshape(shape).astype(kind))
                e.rewire(edge, e.add("mul", value, mask, name=twin.free_name("masked")))
    return twin


def occurrences(found: Any, atom: Any) -> list[tuple[Any, int, int]]:
    """(node, operand, dimension) of the first operand of each sum over an axis."""
    about = found.solution.notes.get(atom)
    return [] if about is None else [(node, *ends[0]) for node, ends in about.summed]


def marks(term: Any, atoms: tuple[Any, ...], gone: np.ndarray) -> np.ndarray:
    """Indices of a dimension that belong to removed units, found by visiting every index: slow and obvious."""
    grid = gone.reshape([int(a.size) for a in atoms])
    result = []
    for index in range(int(size(term))):
        at: dict[Any, list[int]] = {}
        locate(term, index, at)
        result.append(any(grid[inside] for inside in product(*(at.get(a, ()) for a in atoms))))
    return np.array(result)


def size(term: Any) -> int:
    if hasattr(term, "factors"):
        return int(np.prod([size(f) for f in term.factors]))
    return sum(size(p) for p in term.parts) if hasattr(term, "parts") else term.size


def locate(term: Any, index: int, at: dict[Any, list[int]]) -> None:
    """Coordinates of an index on the axes that a dimension is made of, in which an axis may occur twice."""
    if hasattr(term, "factors"):
        for factor in reversed(term.factors):
            index, here = divmod(index, size(factor))
            locate(factor, here, at)
    elif hasattr(term, "parts"):
        for part in term.parts:
            if index < size(part):
                locate(part, index, at)
                return
            index -= size(part)
    else:
        at.setdefault(term, []).append(index)


def agree(p: Program, units: Units, feeds: dict[str, Any], tolerance: float, **options: Any) -> None:
    """Cut and masked give the same; undo gives back the hash and every byte; redo gives the cut again."""
    before, bits = p.hash(), {k: v.data.tobytes() for k, v in p.weights.items()}
    expected = run(masked(p, units), feeds)
    with p.edit("cut") as e:
        e.cut_units(units, **options)
    got = run(p, feeds)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=tolerance, err_msg=str(units))
    assert not p.validate().mismatches
    after = p.hash()
    p.undo()
    assert p.hash() == before
    assert {k: v.data.tobytes() for k, v in p.weights.items()} == bits
    p.redo()
    assert p.hash() == after
    p.undo()


class RandomNet:
    """A random program over rows [B, n]: what is joined, split, rotated, tied and normed on the way to one output."""

    def __init__(self, seed: int) -> None:
        self.rng, self.b, self.count = np.random.default_rng(seed), Builder(f"net_{seed}"), 0
        x = self.b.input("x", (4, 6), "float64")
        self.rows: list[tuple[Any, int]] = [(self.linear(x, 6, self.width()), self.widths[-1])]
        self.tied: tuple[Any, int] | None = None
        steps = [
            self.mlp,
            self.residual,
            self.branches,
            self.glu,
            self.heads,
            self.rotated,
            self.square,
            self.norm,
            self.conv,
        ]
        for _ in range(int(self.rng.integers(1, 6))):
            steps[self.rng.integers(len(steps))]()
        h, n = self.rows[-1]
        self.b.output(self.linear(h, n, 3), "y")
        self.program = self.b.build()

    widths: list[int]

    def width(self) -> int:
        self.widths = [*getattr(self, "widths", []), int(self.rng.choice([4, 6, 8, 12]))]
        return self.widths[-1]

    def name(self, what: str) -> str:
        self.count += 1
        return f"m{self.rng.integers(3)}.{what}{self.count}"

    def weight(self, *shape: int) -> Any:
        return self.b.param(self.name("w"), self.rng.normal(size=shape) / np.sqrt(shape[-1]))

    def linear(self, h: Any, n: int, m: int) -> Any:
        bias = [self.weight(m)] if self.rng.random() < 0.5 else []
        return self.b.linear(h, self.weight(m, n), *bias, name=self.name("linear"))

    def put(self, h: Any, n: int) -> None:
        self.rows.append((h, n))

    def act(self, h: Any) -> Any:
        return self.b.op(str(self.rng.choice(["tanh", "relu", "sigmoid", "silu"])), h, name=self.name("act"))

    def mlp(self) -> None:
        h, n = self.rows[-1]
        m = self.width()
        self.put(self.act(self.linear(h, n, m)), m)

    def residual(self) -> None:
        h, n = self.rows[-1]
        m = self.width()
        inner = self.linear(self.act(self.linear(h, n, m)), m, n)
        join = self.b.junction if self.rng.random() < 0.5 else self.b.add
        self.put(join(h, inner, name=self.name("join")), n)

    def branches(self) -> None:
        h, n = self.rows[-1]
        sizes = [self.width() for _ in range(2)]
        parts = [self.act(self.linear(h, n, m)) for m in sizes]
        self.put(self.b.concat(*parts, axis=1, name=self.name("concat")), sum(sizes))

    def glu(self) -> None:
        h, n = self.rows[-1]
        m = self.width()
        both = self.linear(h, n, 2 * m)
        a, g = (self.b.slice(both, axis=1, start=s, size=m, name=self.name("half")) for s in (0, m))
        self.put(self.b.mul(a, self.b.sigmoid(g, name=self.name("gate")), name=self.name("glu")), m)

    def heads(self) -> None:
        """[B, n] as one sequence of B positions: heads × (part of a head), fused or separate, then plain attention."""
        h, n = self.rows[-1]
        count, dim, b = int(self.rng.choice([2, 3])), 2, self.b
        both = self.linear(h, n, 3 * count * dim)
        made = []
        for i in range(3):
            part = b.slice(both, axis=1, start=i * count * dim, size=count * dim, name=self.name("part"))
            split = b.reshape(part, shape=(4, count, dim), name=self.name("split"))
            made.append(b.permute(split, axes=(1, 0, 2), name=self.name("heads")))
        scores = b.matmul(made[0], b.permute(made[1], axes=(0, 2, 1), name=self.name("kt")), name=self.name("scores"))
        rows = b.matmul(b.softmax(scores, axis=-1, name=self.name("softmax")), made[2], name=self.name("mix"))
        back = b.permute(rows, axes=(1, 0, 2), name=self.name("back"))
        self.put(b.reshape(back, shape=(4, count * dim), name=self.name("merged")), count * dim)

    def rotated(self) -> None:
        """Halves of an axis are swapped and added: i and i + n/2 go together."""
        h, n = self.rows[-1]
        a, c = (self.b.slice(h, axis=1, start=s, size=n // 2, name=self.name("half")) for s in (0, n // 2))
        other = self.b.concat(self.b.neg(c, name=self.name("neg")), a, axis=1, name=self.name("rotated"))
        self.put(self.b.add(h, other, name=self.name("sum")), n)

    def square(self) -> None:
        """One weight used twice, as in a recurrent net."""
        h, n = self.rows[-1]
        w = self.weight(n, n)
        for _ in range(2):
            h = self.b.tanh(self.b.linear(h, w, name=self.name("linear")), name=self.name("tanh"))
        self.put(h, n)

    def norm(self) -> None:
        h, n = self.rows[-1]
        self.put(self.b.rms_norm(h, self.weight(n), name=self.name("norm")), n)

    def conv(self) -> None:
        """Rows as channels of 1 pixel, grouped convolution, batch norm, and back."""
        h, n = self.rows[-1]
        groups, m, b = int(self.rng.choice([1, 2, n])), 0, self.b
        m = 2 * n if self.rng.random() < 0.5 else n
        x = b.unsqueeze(h, axes=(2,), name=self.name("image"))
        y = b.conv(x, self.weight(m, n // groups, 1), groups=groups, name=self.name("conv"))
        var = b.param(self.name("var"), self.rng.random(m) + 0.5)
        y = b.batch_norm(y, self.weight(m), var, self.weight(m), self.weight(m), name=self.name("bn"))
        self.put(b.squeeze(b.relu(y, name=self.name("relu")), axes=(2,), name=self.name("flat")), m)
