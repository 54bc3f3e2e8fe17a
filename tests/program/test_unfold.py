"""Unfolding an op into one per unit: the same function, one edge per unit, and back to the same hash."""

from __future__ import annotations

import numpy as np
import pytest
from program_samples import fingerprint, weight_bytes

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.program import Builder, Program
from graphwright.program.editing.edits import RemoveEdge

HEADS, KV, D, WIDTH, T = 4, 2, 3, 12, 5


def attention(dtype: str = "f4", seed: int = 0, bias: bool = False) -> Program:
    """q, k, v, sdpa with two key heads for four query heads, o; a residual sum; logits."""
    rng = np.random.default_rng(seed)
    b = Builder("attention")
    x = b.input("x", ("B", T, WIDTH), {"f4": "float32", "f8": "float64"}[dtype])

    def linear(name: str, x, rows: int, columns: int, bias: bool = False):
        operands = [b.param(f"{name}.weight", (rng.normal(size=(rows, columns)) / 4).astype(dtype))]
        operands += [b.param(f"{name}.bias", rng.normal(size=rows).astype(dtype))] if bias else []
        return b.linear(x, *operands, name=name)

    def heads(name: str, x, n: int):
        return b.permute(b.unflatten(x, axis=2, sizes=(n, D), name=f"{name}_split"), axes=(0, 2, 1, 3), name=name)

    q, k, v = (
        heads(f"{n}_heads", linear(n, x, m * D, WIDTH, bias), m) for n, m in zip("qkv", (HEADS, KV, KV), strict=True)
    )
    rows = b.permute(b.sdpa(q, k, v, scale=0.5, name="sdpa"), axes=(0, 2, 1, 3), name="rows")
    o = linear("o", b.flatten(rows, start=2, end=3, name="merged"), WIDTH, HEADS * D, bias)
    b.output(linear("head", b.junction(x, o, name="out"), 7, WIDTH), "logits")
    return b.build()


def feeds(p: Program) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(2, T, WIDTH)).astype(p.spec("x").dtype.name)}


def logits(p: Program, weights: dict[str, np.ndarray] | None = None) -> np.ndarray:
    twin = p.fork()
    with twin.edit("masked") as e:
        for key, value in (weights or {}).items():
            e.set_weight(key, value)
    return twin.run(feeds(p))["logits"].to_numpy()


def masked(p: Program, key: str, axis: int, units: int, unit: int) -> dict[str, np.ndarray]:
    """The weight with one unit's rows or columns zero."""
    w = p.weights.array(key).to_numpy().copy()
    rows, share = np.moveaxis(w, axis, 0), w.shape[axis] // units
    rows[unit * share : (unit + 1) * share] = 0
    return {key: w}


@pytest.mark.parametrize(("dtype", "limit"), [("f4", 1e-6), ("f8", 1e-13)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("node", "axis", "units"),
    [("o", "in", 4), ("sdpa", "heads", 4), ("q", "out", 4), ("k", "out", 2), ("head", "in", 12)],
)
def test_unfolding_keeps_the_function_and_folding_restores_the_hash(node, axis, units, bias, dtype, limit):
    p = attention(dtype, bias=bias)
    before, stored, want = p.hash(), [id(v.data) for v in p.weights.values()], logits(p)
    with p.edit("unfold") as e:
        made = e.unfold(node, axis)
    assert p.path(made) == node
    assert p.validate().ok
    of_units = [
        n
        for n in p.nodes()
        if p.op(n) == ("sdpa" if node == "sdpa" else "linear") and p.path(n) in {f"{node}.{u}" for u in range(units)}
    ]
    assert len(of_units) == units
    assert np.abs(logits(p) - want).max() <= limit
    assert np.abs(p.compile(feeds(p))(feeds(p))["logits"].to_numpy() - want).max() <= limit
    assert [id(v.data) for v in p.weights.values()] == stored, "no weight was copied and no key changed"
    with p.edit("fold") as e:
        e.fold(node)
    assert p.hash() == before
    assert logits(p).tobytes() == want.tobytes()


@pytest.mark.parametrize("unit", range(HEADS))
@pytest.mark.parametrize("bias", [False, True])
def test_cutting_the_edge_of_an_unfolded_head_masks_it(unit, bias):
    p = attention(bias=bias)
    want = logits(p, masked(p, "o.weight", 1, HEADS, unit))
    for node, axis in (("o", "in"), ("sdpa", "heads")):
        with p.edit("unfold") as e:
            e.unfold(node, axis)
        total = "o.sum" if bias and node == "o" else node
        with p.edit("cut") as e:
            e.cut(p.in_edges(total)[unit])
        assert np.abs(logits(p) - want).max() <= 1e-6
        with pytest.raises(UsageError, match="does not sum all units"), p.edit("fold") as e:
            e.fold(node)
        p.undo(2)


def test_cutting_an_unfolded_unit_masks_its_neurons():
    p = attention()
    want = logits(p, masked(p, "q.weight", 0, 6, 4))
    with p.edit("unfold and cut") as e:
        e.cut(p.in_edges(e.unfold("q", "out", units=6))[4])
    assert np.abs(logits(p) - want).max() <= 1e-6


def test_unfolded_programs_support_undo_replay_save_and_gradients():
    p = attention(bias=True)
    start, states = p.fork(), [fingerprint(p)]
    for node, axis in (("o", "in"), ("sdpa", "heads"), ("v", "out")):
        with p.edit(f"unfold {node}") as e:
            e.unfold(node, axis)
        states.append(fingerprint(p))
    with p.edit("fold") as e:
        e.fold("o")
    states.append(fingerprint(p))
    for want in states[-2::-1]:
        p.undo()
        assert fingerprint(p) == want
    p.redo(4)
    assert fingerprint(p) == states[-1]
    twin = start.fork()
    gw.program.replay(p, twin)
    assert twin.hash() == p.hash()
    wanted, found = ({k: g for k, g in zip(q.weights, grads(q), strict=True)} for q in (start, p))
    assert all(np.abs(found[k] - wanted[k]).max() <= 1e-4 for k in wanted)


def grads(p: Program) -> list[np.ndarray]:
    run = p.run(feeds(p))
    return [g.to_numpy() for g in run.grad("logits", [p.node(n) for n in p.params()])]


def test_a_loaded_unfolded_program_can_be_folded(tmp_path):
    p = attention()
    before = p.hash()
    with p.edit("unfold") as e:
        e.unfold("o", "in")
    p.save(tmp_path / "p", history="none")
    q = gw.load(tmp_path / "p")
    assert weight_bytes(q) == weight_bytes(p)
    with q.edit("fold") as e:
        e.fold("o")
    assert q.hash() == before


@pytest.mark.parametrize("axis", ["in", "rows", "columns", "heads"])
@pytest.mark.parametrize("shapes", [((2, 6, 4, 8), (2, 6, 8, 2)), ((6, 4, 8), (2, 1, 8, 6)), ((4, 2), (2, 6))])
def test_products_of_any_rank_can_be_unfolded(axis, shapes):
    b = Builder()
    rng = np.random.default_rng(0)
    one, two = (b.input(n, s, "float64") for n, s in zip("ab", shapes, strict=True))
    b.output(b.matmul(one, two, name="m"), "y")
    p = b.build()
    arrays = {n: rng.normal(size=s) for n, s in zip("ab", shapes, strict=True)}
    before = p.hash()
    if axis == "heads" and len(shapes[0]) < 3:
        with pytest.raises(ShapeError), p.edit("unfold") as e:
            e.unfold("m", axis)
        return
    with p.edit("unfold") as e:
        e.unfold("m", axis, units=2)
    np.testing.assert_allclose(p.run(arrays)["y"].to_numpy(), arrays["a"] @ arrays["b"], rtol=0, atol=1e-13)
    with p.edit("fold") as e:
        e.fold("m")
    assert p.hash() == before


def test_an_output_of_an_unfolded_node_is_moved_and_restored():
    b = Builder()
    x, w = b.input("x", (4,)), b.param("w", np.eye(4, dtype="f4"))
    b.output(b.matmul(b.unflatten(x, axis=0, sizes=(1, 4)), w, name="m"), "y")
    p = b.build()
    before = p.hash()
    with p.edit("unfold") as e:
        total = e.unfold("m", "columns")
    assert p.output("y").node == total
    assert len(p.in_edges(total)) == 4
    np.testing.assert_array_equal(p.run(x=np.arange(4, dtype="f4"))["y"].to_numpy(), [[0, 1, 2, 3]])
    with p.edit("fold") as e:
        e.fold("m")
    assert p.hash() == before


@pytest.mark.parametrize(
    ("node", "axis", "units", "error"),
    [
        ("o", "heads", None, UsageError),
        ("rows", "in", None, UsageError),
        ("out", "in", None, UsageError),
        ("x", "in", None, UsageError),
        ("o", 0, None, UsageError),
        ("o", "in", 5, ShapeError),
        ("o", "in", 0, ShapeError),
        ("o", "in", -2, ShapeError),
        ("o", "in", 2.0, ShapeError),
        ("o", "in", True, ShapeError),
        ("sdpa", "heads", 3, ShapeError),
        ("sdpa", "heads", 8, ShapeError),
    ],
)
def test_refused_unfoldings_change_nothing(node, axis, units, error):
    p = attention()
    before = fingerprint(p)
    with pytest.raises(error) as caught, p.edit("unfold") as e:
        e.unfold(node, axis, units)
    assert node in str(caught.value)
    assert fingerprint(p) == before


@pytest.mark.parametrize("part", ["q.1.placed", "q.1", "q.1.part"])
def test_a_part_without_its_operand_is_not_folded(part):
    p = attention()
    with p.edit("unfold") as e:
        e.unfold("q", "out")
    before = fingerprint(p)

    def cut_and_fold() -> None:
        with p.edit("cut and fold") as e:
            e.do(RemoveEdge(p.in_edges(part)[0]))
            e.fold("q")

    with pytest.raises(UsageError, match="does not sum all units"):
        cut_and_fold()
    assert fingerprint(p) == before


def test_only_complete_units_are_folded():
    p = attention()
    for node in ("o", "out", "x", "rows"):
        with pytest.raises(UsageError, match="does not sum all units"), p.edit("fold") as e:
            e.fold(node)
    with p.edit("unfold") as e:
        e.unfold("o", "in")
    with p.edit("look at a head") as e:
        e.add("neg", "o.1", name="look")
    with pytest.raises(UsageError, match="outside the unfolded op reads a part") as caught, p.edit("fold") as e:
        e.fold("o")
    assert caught.value.got == "look"
    p.undo()
    with p.edit("another part") as e:
        e.set_attr("o.1.part", start=0)
    with pytest.raises(UsageError, match="does not sum all units"), p.edit("fold") as e:
        e.fold("o")
