"""Results of nodes with several have names: `sort.indices`, in references, paths of edges, files and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright.ops import OPS, result_names
from graphwright.program import Program, UnknownNode, Value, load

X = np.random.default_rng(0).normal(size=(3, 5)).astype("f4")


def net() -> Program:
    b = gw.Builder("net")
    x = b.input("x", ("B", 5))
    values, indices = b.sort(x, axis=-1, descending=True, name="top.sort")
    b.output(b.add(values, b.cast(indices, dtype="float32", name="wide"), name="sum"), "y")
    return b.build()


def test_a_name_stands_for_a_value() -> None:
    p = net()
    node = p.node("top.sort")
    for port, names in enumerate((("top.sort", "top.sort.values", "top.sort.0"), ("top.sort.indices", "top.sort.1"))):
        assert {p.value(name) for name in names} == {Value(node, port)}
    assert [p.path(Value(node, i)) for i in (0, 1)] == ["top.sort", "top.sort.indices"]
    assert p.spec("top.sort.indices").dtype.name == "int64"
    assert [p.path(n) for n in p.consumers("top.sort.indices")] == ["wide"]
    assert [p.path(n) for n in p.consumers("top.sort.values")] == ["sum"]
    with pytest.raises(UnknownNode) as caught:
        p.value("top.sort.indexes")
    assert "top.sort.indices" in str(caught.value.fix)
    for name in ("top.sort.2", "top.sort.-1", "x.0.0", "sum.values"):
        with pytest.raises(UnknownNode):
            p.value(name)
    assert p.value("sum.0") == Value(p.node("sum"))


def test_runs_and_captures_and_patches_take_the_names() -> None:
    p = net()
    run = p.run({"x": X}, keep="all")
    order = np.argsort(-X, axis=-1, kind="stable")
    assert np.array_equal(run.value("top.sort.indices").to_numpy(), order)
    patched = p.run({"x": X}, patch={"top.sort.indices": np.zeros((3, 5), np.int64)})
    assert np.allclose(patched["y"].to_numpy(), -np.sort(-X))
    assert np.allclose(p.run({"x": X}, patch={"top.sort.indices -> wide": order * 0})["y"].to_numpy(), -np.sort(-X))


def test_edges_and_edits_take_the_names(tmp_path: Path) -> None:
    p = net()
    assert [p.path(e) for e in p.out_edges("top.sort")] == ["top.sort.indices -> wide", "top.sort -> sum"]
    with p.edit("both from one node") as e:
        e.rewire("top.sort -> sum", e.add("cast", "top.sort.indices", dtype="float32"))
        made = e.add("add", "top.sort", e.add("cast", "top.sort.indices", dtype="float32", name="b"))
        e.set_outputs(y="sum", z=made, order="top.sort.indices")
    assert p.path(p.operands(p.node("sum"))[0].node) == "top.cast"
    assert np.array_equal(p(x=X)["order"].numpy(), np.argsort(-X, axis=-1, kind="stable"))
    with p.edit("two edges into one node") as e:
        e.add("junction", "top.sort.values", "top.sort", name="twice")
    with pytest.raises(gw.program.UnknownEdge, match="2 edges"):
        p.edge("top.sort -> twice")
    p.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.hash() == p.hash()
    twin = net()
    gw.program.replay(p.journal, twin)
    assert twin.hash() == p.hash()


def test_two_results_of_a_node_that_enter_one_node_are_different_edges() -> None:
    p = gw.open("bundled").program
    edges = [p.path(e) for e in p.in_edges("layers.1.attn.rope_q")]
    assert edges == ["layers.1.attn.q_heads -> layers.1.attn.rope_q", "rope.table -> layers.1.attn.rope_q",
                     "rope.table.sin -> layers.1.attn.rope_q"]  # fmt: skip
    assert [p.path(p.edge(text)) for text in edges] == edges
    assert p.edge("rope.table.cos -> layers.1.attn.rope_q") == p.edge(edges[1])
    ids = np.array([[84, 104]])
    with p.run({"ids": ids, "positions": np.arange(2)[None]}, capture=["rope.table.sin"]) as run:
        assert run.value("rope.table.sin").shape == run.value("rope.table.cos").shape


def test_a_node_of_that_name_comes_first() -> None:
    p = net()
    with p.edit("a node named like a result") as e:
        e.add("neg", "x", name="top.sort.indices")
    assert p.op(p.value("top.sort.indices").node) == "neg"
    assert p.path(p.value("top.sort.1")) == "top.sort.1"


def test_pictures_axes_and_parts_show_the_names() -> None:
    p = net()
    picture = p.to_svg()
    assert "ports indices → 0" in picture
    assert "result indices i64[B, 5]" in picture
    part = p.extract(["wide", "sum"])
    assert set(part.input_names()) == {"top.sort", "top.sort.indices"}
    assert p.extract(["top.sort"]).output_names() == ("top.sort", "top.sort.indices")
    text = p.compile(x=(3, 5)).explain("top.sort")
    assert "result values: " in text
    assert "result indices: " in text
    assert "sort(1 operand, axis=-1, descending=False) -> values, indices" in gw.ops.explain("sort")


def test_ops_with_a_fixed_number_of_results_name_them() -> None:
    assert result_names("sort", 2) == ("values", "indices")
    assert result_names("tanh", 1) == ("0",)
    assert result_names("junction", 1) == ("0",)
    assert all(len(set(row.results)) == len(row.results) for row in OPS.values())
    assert not [name for row in OPS.values() for name in row.results if not name.isidentifier()]
