"""Weights computed from generators: at the start, through training, saved and resumed, baked and dense again."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg

import graphwright as gw
from graphwright import surgery as sg
from graphwright.program import EmptySelection, Program
from graphwright.surgery.orthogonal.methods import gram_error, polar, second_factor

MAPS = ("cayley", "exp", "householder")


def built(shape: tuple[int, int] = (6, 6), dtype: str = "float64", seed: int = 0) -> Program:
    b = gw.Builder("one")
    w = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    b.output(b.linear(b.input("x", ("B", shape[1]), dtype), b.param("fc.weight", w), name="fc"), "y")
    return b.build()


def matrix(p: Program, path: str = "fc.orthogonal") -> np.ndarray:
    width = int(p.spec("x").shape[1])
    return p.run(x=np.eye(width, dtype=p.spec("x").dtype.name), keep=[path]).value(path).to_numpy().astype("float64")


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (4, 7), (1, 1), (5, 1)])
@pytest.mark.parametrize("scale", ["none", "scalar", "diag", "spd"])
@pytest.mark.parametrize("map", MAPS)
def test_the_initial_matrix_is_the_polar_factor_times_the_scale(map: str, scale: str, shape: tuple[int, int]) -> None:
    p = built(shape)
    w = p.weights["fc.weight"].data.to_numpy().copy()
    start = p.hash()
    assert sg.parametrize(p, "fc", map, scale) == ["fc.orthogonal"]
    q, k = polar(w), min(shape)
    s = second_factor(w, q)
    d = np.diagonal(s)[None, :] if shape[0] >= shape[1] else np.diagonal(s)[:, None]
    wanted = {"none": q, "scalar": q * np.trace(s) / k, "spd": w, "diag": q * d}[scale]
    assert np.abs(matrix(p) - wanted).max() <= 1e-12
    assert "fc.weight" not in p.weights
    p.undo()
    assert p.hash() == start


@pytest.mark.parametrize("shape", [(5, 5), (6, 4), (4, 6)])
def test_rotations_and_reflections_match_scipy(shape: tuple[int, int]) -> None:
    n, rng = max(shape), np.random.default_rng(1)
    x = rng.standard_normal((n, n)) * 0.3
    a = x - x.T
    rotations = {"cayley": np.linalg.solve(np.eye(n) - a / 2, np.eye(n) + a / 2), "exp": scipy.linalg.expm(a)}
    v = rng.standard_normal((n, n - n % 2))
    reflections = np.eye(n)
    for column in v.T:
        reflections = reflections @ (np.eye(n) - 2 * np.outer(column, column) / (column @ column))
    rotations["householder"] = reflections
    for map, rotation in rotations.items():
        p = built(shape)
        q = polar(p.weights["fc.weight"].data.to_numpy())
        sg.parametrize(p, "fc", map)
        with p.edit("turn") as e:
            e.set_weight("fc.generator.weight", v if map == "householder" else x)
        wanted = rotation @ q if shape[0] >= shape[1] else q @ rotation
        assert np.abs(matrix(p) - wanted).max() <= (1e-6 if map == "exp" else 1e-12)
        assert gram_error(matrix(p)) <= 1e-12


@pytest.mark.parametrize("map", MAPS)
def test_training_stays_orthonormal_converges_and_can_be_resumed(map: str, tmp_path) -> None:
    rng = np.random.default_rng(3)
    p = built((8, 5), "float32")
    aim = sg.lie_exp(0.8 * sg.skew(rng.standard_normal((8, 8)))) @ polar(p.weights["fc.weight"].data.to_numpy())
    x = rng.standard_normal((32, 5)).astype(np.float32)
    y = (x @ aim.T).astype(np.float32)
    sg.parametrize(p, "fc", map)
    losses = []

    def train(q: Program, steps: int) -> None:
        optimizer = gw.optim.Adam(q, lr=0.02)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = ((q(x=x)["y"] - gw.tensor(y)) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            assert gram_error(matrix(q)) <= 1e-5

    train(p, 200 if map == "cayley" else 80)
    assert losses[-1] <= 0.05 * losses[0]
    p.save(tmp_path / "saved")
    resumed = gw.load(tmp_path / "saved")
    assert np.array_equal(matrix(resumed), matrix(p))
    train(resumed, 40)  # the constraint was saved, not the matrix alone
    assert losses[-1] <= 0.05 * losses[0]


def test_baking_and_densifying_keep_the_function() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6))
    p = built()
    sg.parametrize(p, "fc", scale="spd")
    with p.edit("train") as e:
        e.set_weight("fc.generator.weight", rng.standard_normal((6, 6)))
    moved, start = p(x=x)["y"].numpy(), p.hash()
    assert sg.bake(p) == ["fc.weight"]
    assert not p.weights["fc.weight"].requires_grad
    assert np.abs(p(x=x)["y"].numpy() - moved).max() <= 1e-12
    with pytest.raises(EmptySelection):
        sg.bake(p)
    assert sg.unbake(p) == ["fc.orthogonal"]
    assert p.hash() == start
    assert np.array_equal(p(x=x)["y"].numpy(), moved)
    sg.bake(p)
    assert sg.make_dense(p) == ["fc.weight"]
    assert [q.name for q in p.parameters()] == ["fc.weight"]
    assert np.abs(p(x=x)["y"].numpy() - moved).max() <= 1e-12
    assert p.structure_hash() == built().structure_hash()
    p.undo(2)
    assert p.hash() == start
    sg.make_dense(p)
    assert p.structure_hash() == built().structure_hash()
    with pytest.raises(EmptySelection):
        sg.unbake(p)


def test_a_parametrised_model_is_trained_and_exported() -> None:
    model = gw.open("bundled", dtype="float32")
    p = model.program
    ids = [[84, 104, 101, 32]]
    before = model.logits(ids)
    sg.parametrize(p, "layers.0.attn.{v,o}", "exp", "spd")
    assert np.abs(model.logits(ids) - before).max() <= 1e-3
    sg.make_dense(p)
    assert p.structure_hash() == gw.open("bundled", dtype="float32").program.structure_hash()
    for options, text in (({"map": "log"}, "map"), ({"scale": "full"}, "scale")):
        with pytest.raises(ValueError, match=text):
            sg.parametrize(p, "layers.0.attn.v", **options)
