"""Programs whose axes are known, and the oracle of a cut: the same program with its units multiplied by 0."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright.program import Builder, Program
from graphwright.program.units import Units


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
    kind = examples[0].dtype
    for parameter in module.parameters():
        parameter.data = gw.tensor(parameter.numpy().astype(kind)).data
    for buffer in module.buffers() if hasattr(module, "buffers") else ():
        if buffer.dtype.is_float:
            buffer.data = gw.tensor(buffer.numpy().astype(kind)).data
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
            ends = {end for a in atoms for end in said(found, a)}
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


def said(found: Any, atom: Any) -> list[tuple[Any, int, int]]:
    """(node, operand, dimension) of the first operand of each sum over an axis."""
    about = found.solution.said.get(atom)
    return [] if about is None else [(node, *ends[0]) for node, ends in about.summed]


def marks(term: Any, atoms: tuple[Any, ...], gone: np.ndarray) -> np.ndarray:
    """Places of a dimension that belong to units that go, by walking over the places one by one: the slow way."""
    grid = gone.reshape([int(a.size) for a in atoms])
    result = []
    for place in range(int(size(term))):
        at: dict[Any, int] = {}
        locate(term, place, at)
        inside = [at.get(a) for a in atoms]
        result.append(all(i is not None for i in inside) and bool(grid[tuple(inside)]))
    return np.array(result)


def size(term: Any) -> int:
    if hasattr(term, "factors"):
        return int(np.prod([size(f) for f in term.factors]))
    return sum(size(p) for p in term.parts) if hasattr(term, "parts") else term.size


def locate(term: Any, place: int, at: dict[Any, int]) -> None:
    """Coordinates of a place on the axes that a dimension is made of."""
    if hasattr(term, "factors"):
        for factor in reversed(term.factors):
            place, here = divmod(place, size(factor))
            locate(factor, here, at)
    elif hasattr(term, "parts"):
        for part in term.parts:
            if place < size(part):
                locate(part, place, at)
                return
            place -= size(part)
    else:
        at[term] = place


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
