"""Sums of any number of edges: port order wherever they run, zero without an edge, links and delayed edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import fingerprint

from graphwright.array import DType, NDArray, bfloat16, dtype, empty, float64, from_numpy
from graphwright.errors import CycleError
from graphwright.program import Builder, Program
from values import grad_of


def ones(shape: tuple[int, ...], kind: DType) -> NDArray:
    return empty(shape, kind).copy_from(from_numpy(np.ones(shape, "f4")))


def four_terms() -> Program:
    """A sum whose value depends on its order: 1e8, 1, -1e8 and 0.1."""
    b = Builder()
    x = b.input("x", (2, 4))
    terms = [b.mul(x, b.const(f"c{i}", np.full(4, c, "f4")), name=f"t{i}") for i, c in enumerate((1e8, 1, -1e8, 0.1))]
    b.output(b.junction(*terms, name="sum"), "y")
    return b.build()


def order_in_plan(p: Program) -> list[str]:
    """Paths of what the plan's instruction of the junction reads, in its order."""
    plan = p.compile(x=(2, 4))
    (instr,) = plan.of("sum")
    assert instr.op == "junction"
    return [p.path(value) for slot in instr.ins if (value := plan.slots[slot].value) is not None]


def reference(p: Program, x: np.ndarray) -> bytes:
    """The sum in port order, in float32."""
    total = None
    for value in p.operands(p.node("sum")):
        term = x * p.weights.array(p.key(p.operands(value.node)[1].node)).to_numpy()
        total = term if total is None else total + term
    assert total is not None
    return total.tobytes()


@pytest.mark.parametrize("cut", range(4))
def test_plans_sum_in_port_order_after_cuts_undo_and_new_edges(cut):
    p, x = four_terms(), np.ones((2, 4), "f4")
    terms = [f"t{i}" for i in range(4)]

    def check(wanted: list[str]) -> None:
        assert order_in_plan(p) == wanted
        assert p.compile(x=(2, 4))(x=x)["y"].to_numpy().tobytes() == reference(p, x)
        assert p.run(x=x)["y"].tobytes() == reference(p, x)

    check(terms)
    before, rest = fingerprint(p), [t for t in terms if t != f"t{cut}"]
    with p.edit("cut") as e:
        e.cut(p.in_edges("sum")[cut])
    check(rest)
    with p.edit("again") as e:
        e.connect(f"t{cut}", "sum")
    check([*rest, f"t{cut}"])
    p.undo(2)
    assert fingerprint(p) == before
    check(terms)


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
def test_a_junction_without_edges_is_zero_of_its_dtype_without_gradient(kind):
    b = Builder()
    x, w = b.input("x", ("B", 3), dtype(kind)), b.param("w", ones((3,), dtype(kind)))
    total = b.junction(b.mul(x, w, name="t"), name="sum")
    b.output(total, "y")
    b.output(b.add(total, b.mul(x, b.param("v", ones((3,), dtype(kind)))), name="beside"), "z")
    p = b.build()
    with p.edit("empty") as e:
        e.cut("t -> sum")
    assert p.journal[-1].warnings == ("sum has no edges left, so its value is zero",)
    feed = ones((5, 3), dtype(kind))
    for result in (p.run(x=feed)["y"], p.compile(x=(5, 3))(x=feed)["y"]):
        assert result.spec == p.spec("sum").bind({"B": 5})
        assert result.to_numpy("float32").tolist() == [[0] * 3] * 5
    p(x=feed)["z"].sum().backward()
    assert p.weights["w"].grad is None, "no path, no gradient"
    assert grad_of(p.weights["v"]).numpy().astype("f4").tolist() == [5] * 3
    with p.edit("rename") as e:
        e.rename("t", "term")
    assert p.journal[-1].warnings == (), "warned of once, in the entry that emptied it"


@given(seed=st.integers(0, 10**6))
def test_random_graphs_of_links_match_a_numpy_loop(seed):
    """y_j = act(b_j + sum of W y_i) over a random acyclic graph, float64."""
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, 5, rng.integers(2, 8))
    b = Builder()
    x = b.input("x", (3, int(widths[0])), float64)
    biases = [rng.normal(size=(3, int(w))) for w in widths]
    for j, bias in enumerate(biases[1:], 1):
        total = b.junction(b.const(f"b{j}", bias), name=f"j{j}")
        b.tanh(total, name=f"y{j}")
    b.output(b.neg(x, name="keep"), "y")
    p = b.build()
    pairs = [(i, j) for j in range(1, len(widths)) for i in range(j) if rng.random() < 0.6]
    matrices = {pair: rng.normal(size=(int(widths[pair[1]]), int(widths[pair[0]]))) for pair in pairs}
    with p.edit("links") as e:
        for i, j in [pairs[k] for k in rng.permutation(len(pairs))]:
            e.link("x" if i == 0 else f"y{i}", f"j{j}", matrices[i, j])
        e.set_outputs(**{f"y{j}": f"y{j}" for j in range(1, len(widths))})
    feed = rng.normal(size=(3, int(widths[0])))
    values = [feed]
    for j in range(1, len(widths)):
        values.append(np.tanh(biases[j] + sum(values[i] @ matrices[i, j].T for i in range(j) if (i, j) in matrices)))
    run = p.run(x=feed)
    for j in range(1, len(widths)):
        np.testing.assert_allclose(run[f"y{j}"].to_numpy(), values[j], rtol=0, atol=1e-12)


def test_a_diamond_of_links_matches_manual_values():
    """x = 1 along W = 1 and 2, then 3 and 4: 1·3 + 2·4 = 11."""
    b = Builder()
    x = b.input("x", (1, 1))
    arms = [b.junction(b.const(f"zero{i}", [[0.0]]), name=f"arm{i}") for i in range(2)]
    b.output(b.junction(b.const("zero", [[0.0]]), name="end"), "y")
    p = b.build()
    assert [p.path(a) for a in arms] == ["arm0", "arm1"]
    assert p.path(x) == "x"
    with p.edit("diamond") as e:
        for source, target, weight in (("x", "arm0", 1), ("x", "arm1", 2), ("arm0", "end", 3), ("arm1", "end", 4)):
            e.link(source, target, [[float(weight)]])
    assert p.run(x=np.ones((1, 1), "f4"))["y"].to_numpy().tolist() == [[11]]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_delayed_edges_match_a_numpy_loop_in_runs_and_plans(delay):
    rng = np.random.default_rng(delay)
    weight = rng.normal(size=(3, 3)).astype("f4")
    b = Builder()
    x = b.input("x", (2, 3))
    h = b.tanh(b.junction(x, name="j"), name="h")
    b.output(b.linear(h, b.param("w", weight), name="back"), "y")
    p = b.build()
    before = fingerprint(p)
    with pytest.raises(CycleError) as caught, p.edit("too soon") as e:
        e.connect("back", "j", delay=0)
    assert [p.path(n) for n in caught.value.path] == ["j", "h", "back"]
    assert fingerprint(p) == before
    with p.edit("feed back") as e:
        e.connect("back", "j", delay=delay)
    assert len(p.states()) == delay
    planned = p.fork()
    plan = planned.compile(x=(2, 3))
    past = [np.zeros((2, 3), "f4")] * delay
    for _ in range(20):
        feed = rng.normal(size=(2, 3)).astype("f4")
        past.append(np.tanh(feed + past[-delay]) @ weight.T)
        np.testing.assert_allclose(p.run(x=feed)["y"].to_numpy(), past[-1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(plan(x=feed)["y"].to_numpy(), past[-1], rtol=0, atol=1e-5)
    p.undo()
    assert fingerprint(p) == before


def test_delayed_edges_keep_narrow_dtypes():
    b = Builder()
    x = b.input("x", (1,), bfloat16)
    b.output(b.junction(x, name="j"), "y")
    p = b.build()
    with p.edit("sum up") as e:
        e.connect("j", "j", delay=1)
    feed = ones((1,), bfloat16)
    assert [p.run(x=feed)["y"].to_numpy("float32").tolist() for _ in range(4)] == [[1], [2], [3], [4]]
