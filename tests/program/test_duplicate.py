"""Duplicating a module: the copy follows the original, with weights of its own; undo is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright.program import BoundaryMismatch, Program, UnknownNode, load
from values import array_of


def net(blocks: int = 3, residual: bool = True) -> Program:
    """Blocks x + tanh(W x), or tanh(W x), that share a scale; the last one also has a side output."""
    b, rng = gw.Builder("net"), np.random.default_rng(0)
    x = b.input("x", ("B", 4))
    scale = b.param("scale", np.full(4, 0.5, np.float32))
    for i in range(blocks):
        w = b.param(f"block.{i}.fc.weight", rng.normal(size=(4, 4)).astype("f4"), key=f"net.h.{i}.fc")
        y = b.tanh(b.linear(x, w, name=f"block.{i}.fc"), name=f"block.{i}.act")
        y = b.mul(y, scale, name=f"block.{i}.scaled")
        x = b.junction(x, y, name=f"block.{i}.out") if residual else y
    b.output(x, "y")
    return b.build()


def forward(p: Program, x: np.ndarray, blocks: list[int], residual: bool = True) -> np.ndarray:
    """The blocks in this order, in numpy, with the weights of `p`."""
    for i in blocks:
        y = np.tanh(x @ p.weights[f"net.h.{i}.fc"].data.to_numpy().T) * p.weights["scale"].data.to_numpy()
        x = x + y if residual else y
    return x


X = np.random.default_rng(1).normal(size=(2, 4)).astype("f4")


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("module", [0, 1, 2])
def test_the_copy_runs_after_the_original(module: int, residual: bool) -> None:
    p, original = net(residual=residual), net(residual=residual)
    before = p.hash()
    with p.edit("deeper") as e:
        assert e.duplicate(f"block.{module}") == f"block.{module + 1}"
    order = sorted([*range(3), module])
    assert np.allclose(p(x=X)["y"].numpy(), forward(original, X, order, residual), atol=1e-6)
    assert np.allclose(p(x=X)["y"].numpy(), forward(p, X, [0, 1, 2, 3], residual), atol=1e-6)  # keys follow the names
    paths = [p.path(n) for n in p.order() if p.op(n) == "tanh"]
    assert paths == [f"block.{i}.act" for i in range(4)]
    assert sorted(p.weights) == ["net.h.0.fc", "net.h.1.fc", "net.h.2.fc", "net.h.3.fc", "scale"]
    after = p.hash()
    p.undo()
    assert p.hash() == before
    p.redo()
    assert p.hash() == after


def test_the_copy_has_weights_of_its_own() -> None:
    p = net()
    with p.edit("deeper") as e:
        e.duplicate("block.0")
        e.set_weight("block.1.fc.weight", lambda w: 0 * w)
    assert np.allclose(p(x=X)["y"].numpy(), net()(x=X)["y"].numpy(), atol=1e-6)
    assert p.weights["net.h.0.fc"].data.to_numpy().any()
    p.undo()
    with p.edit("deeper") as e:
        e.duplicate("block.0")
    p.weights["net.h.1.fc"].own().copy_from(array_of(gw.zeros(4, 4)))  # as an optimizer writes
    assert p.weights["net.h.0.fc"].data.to_numpy().any()


def test_modules_move_up_to_the_next_free_number(tmp_path: Path) -> None:
    p = net(4)
    p.select("block").layers[2].prune()
    with p.edit("deeper") as e:
        e.duplicate("block.1")
        e.duplicate("block.1")
    numbers = [int(p.path(n).split(".")[1]) for n in p.order() if p.op(n) == "tanh"]
    assert numbers == [0, 1, 2, 3, 4]
    wanted = forward(net(4), X, [0, 1, 1, 1, 3])
    assert np.allclose(p(x=X)["y"].numpy(), wanted, atol=1e-6)
    p.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.hash() == p.hash()
    assert np.allclose(again(x=X)["y"].numpy(), wanted, atol=1e-6)
    again.undo(2)
    assert again.hash() == net(4).hash()


def test_a_module_without_a_number_is_copied_beside_it() -> None:
    b = gw.Builder("net")
    x = b.input("x", ("B", 4))
    y = b.linear(x, b.param("head.mlp.weight", np.eye(4, dtype="f4") * 2), name="head.mlp.fc")
    b.output(b.tanh(y, name="last"), "y")
    p = b.build()
    with p.edit("twice") as e:
        assert e.duplicate("head.mlp") == "head.mlp_2"
        assert e.duplicate("head.mlp") == "head.mlp_3"
    assert np.allclose(p(x=X)["y"].numpy(), np.tanh(8 * X), atol=1e-6)
    assert set(p.weights) == {"head.mlp.weight", "head.mlp_2.weight", "head.mlp_3.weight"}


def test_the_output_of_a_program_moves_to_the_copy() -> None:
    p = net(1)
    with p.edit("deeper") as e:
        e.duplicate("block.0")
    assert p.path(p.output("y")) == "block.1.out"


def test_states_and_unequal_ends_and_unknown_modules() -> None:
    p = net()
    with p.edit("recurrent") as e:
        held = e.state("block.1.held", np.zeros(4, "f4"))
        e.assign(held, e.add("sum", "block.1.act", axes=(0,), keepdims=False, name="block.1.total"))
        e.rewire("block.1.scaled -> block.1.out", e.add("add", "block.1.scaled", held, name="block.1.moved"))
    with p.edit("deeper") as e:
        e.duplicate("block.1")
    assert [p.path(n) for n in p.states()] == ["block.1.held", "block.2.held"]
    assert [[p.path(v) for v in p.operands(n)] for n in p.assigns()] == [
        [f"block.{i}.held", f"block.{i}.total"] for i in (1, 2)
    ]
    b = gw.Builder("narrow")
    b.output(b.linear(b.input("x", ("B", 4)), b.param("m.0.weight", np.ones((2, 4), "f4")), name="m.0.fc"), "y")
    narrow = b.build()
    before = narrow.hash()
    with pytest.raises(BoundaryMismatch, match="cannot follow itself"), narrow.edit("deeper") as e:
        e.duplicate("m.0")
    for path in ("m.1", "m.0.fc", "", 3):
        with pytest.raises(UnknownNode, match="no module"), narrow.edit("deeper") as e:
            e.duplicate(path)  # pyright: ignore[reportArgumentType]
    assert narrow.hash() == before


def test_a_recipe_duplicates_a_block(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("- duplicate: [block.0, block.2]\n")
    p = net()
    gw.program.apply_recipe(tmp_path / "recipe.yaml", p)
    assert np.allclose(p(x=X)["y"].numpy(), forward(net(), X, [0, 0, 1, 1, 2]), atol=1e-6)
    assert len(p.select("block").layers) == 5
