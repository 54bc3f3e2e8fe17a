"""Fused ops dissolved by an edit: the same values, primitives alone, and undone to the same hash."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import Builder
from graphwright.errors import UsageError
from graphwright.ops import OPS
from graphwright.program import Program

FUSED = [name for name, row in OPS.items() if row.expand is not None]


def around(name: str, seed: int) -> tuple[Program, dict[str, np.ndarray]]:
    """A program of one op and what to feed it."""
    inputs, attrs = OPS[name].sample(np.random.default_rng(seed))
    feeds = {f"x{i}": np.asarray(x) for i, x in enumerate(inputs)}
    b = Builder(name)
    results = b.op(name, *(b.input(n, x.shape, x.dtype) for n, x in feeds.items()), name="block.fused", **attrs)
    for i, value in enumerate(results if type(results) is tuple else (results,)):
        b.output(value, f"y{i}")
    return b.build(), feeds


@pytest.mark.parametrize("name", FUSED)
def test_the_expansion_of_a_node_keeps_the_function(name: str) -> None:
    for seed in range(3):
        p, feeds = around(name, seed)
        run = p.run(feeds)
        before, found = p.hash(), {label: run[label].to_numpy().copy() for label in p.output_names()}
        made = p.expand(p.nodes())
        assert all(OPS[op].expand is None for n in p.nodes() if (op := p.op(n)) in OPS)
        assert set(made) <= set(p.nodes())
        assert p.node("block.fused") in made
        now, planned = p.run(feeds), p.compile({n: x.shape for n, x in feeds.items()}, deterministic=True)(feeds)
        for label, then in found.items():
            for values in (now, planned):
                np.testing.assert_allclose(values[label].to_numpy(), then, rtol=1e-12, atol=1e-12)
        p.undo()
        assert p.hash() == before


def test_a_whole_model_expands_with_symbolic_sizes() -> None:
    model = gw.open("bundled")
    p = model.program
    before, found = p.hash(), np.asarray(model.logits([84, 104, 101]))
    acts = p.select(op="silu")
    p.expand(acts)
    assert p.op(p.node("layers.0.mlp.act")) == "mul"
    assert p.op(p.node("layers.0.mlp.act.sigmoid")) == "sigmoid"
    p.expand(p.nodes(), "all of it")
    assert not {p.op(n) for n in p.nodes()} & set(FUSED)
    np.testing.assert_allclose(np.asarray(model.logits([84, 104, 101])), found, rtol=1e-4, atol=1e-4)
    assert [entry.why for entry in p.journal] == ["expand fused ops", "all of it"]
    p.undo(2)
    assert p.hash() == before


def test_expanding_no_fused_op_raises() -> None:
    p, _ = around("silu", 0)
    p.expand(p.nodes())
    with pytest.raises(UsageError, match="no fused op"):
        p.expand(p.nodes())


@pytest.mark.parametrize("shape", [("B", 3), ("B", 3, 4), ("B", 3, "T"), (5, 3, "T"), ("B", 3, "T", "U")])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_batch_statistics_of_a_symbolic_batch_size_can_be_expanded(shape: tuple[int | str, ...], kind: str) -> None:
    b, rng = Builder("net"), np.random.default_rng(0)
    x = b.input("x", shape, kind)
    rest = [b.input(n, (3,), kind) for n in ("mean", "var", "weight", "bias")]
    for value, label in zip(b.op("batch_norm_train", x, *rest, name="norm"), ("y", "mean", "var"), strict=True):
        b.output(value, f"new_{label}")
    p = b.build()
    sizes = {"B": 6, "T": 3, "U": 2}
    feeds = {n: rng.normal(size=3).astype(kind) for n in ("mean", "var", "weight", "bias")}
    feeds["x"] = rng.normal(size=[sizes[n] if isinstance(n, str) else n for n in shape]).astype(kind)
    found = {label: p.run(feeds)[label].to_numpy().copy() for label in p.output_names()}
    p.expand(p.nodes())
    assert not {p.op(n) for n in p.nodes()} & set(FUSED)
    now, planned = p.run(feeds), p.compile({n: x.shape for n, x in feeds.items()})(feeds)
    for label, then in found.items():
        for values in (now, planned):
            np.testing.assert_allclose(values[label].to_numpy(), then, rtol=1e-5, atol=1e-6)
