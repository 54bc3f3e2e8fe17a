"""Rewrites of users: what is found, what is proven, and that one undo reverts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import plugins, surgery
from graphwright.errors import UsageError
from graphwright.surgery.rewriting import rewrite as rewriting

F = gw.nn.functional
X = (gw.rand(2, 3),)
SILU = surgery.Rewrite("fuse silu", lambda x: x * x.sigmoid(), lambda x: F.silu(x), X)
WRONG: Any = None, 2.5, "a", gw.rand(2, 3)


class Net(gw.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = gw.nn.Linear(3, 4), gw.nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        h = self.b(h.sigmoid() * h)  # the operands of the product in the other order
        return h * h.sigmoid()


def ops(p) -> list[str]:
    return [p.op(n) for n in p.select(kind="op")]


def traced(fn, *examples):
    """The program, its inputs and its output before a rewrite."""
    p = gw.trace(fn, *examples)
    feeds = {n: e.numpy() for n, e in zip(p.input_names(), examples, strict=True)}
    return p, feeds, p.run(feeds)["out"].to_numpy()


def test_every_occurrence_is_replaced_in_one_edit_and_undo_reverts_it():
    p, feeds, before = traced(Net(), gw.randn(5, 3))
    hash_before, paths = p.hash(), [n for n in p.select(kind="op").names() if "mul" in n]
    (report,) = gw.rewrite(p, SILU)
    assert report.replaced == tuple(paths)
    assert ops(p) == ["linear", "silu", "linear", "silu"]
    assert [p.op(p.node(path)) for path in paths] == ["silu", "silu"]  # paths stay
    np.testing.assert_allclose(p.run(feeds)["out"].to_numpy(), before, rtol=1e-5, atol=1e-6)
    entry = p.journal[-1]
    assert (entry.author, entry.tool, entry.why) == ("pass", "fuse silu", "rewrite fuse silu")
    assert 0 < report.error < 1e-6
    assert p.blame(paths[0])[-1].seq == entry.seq
    p.undo()
    assert p.hash() == hash_before
    assert np.array_equal(p.run(feeds)["out"].to_numpy(), before)
    p.redo()
    assert ops(p) == ["linear", "silu", "linear", "silu"]


def test_a_replay_of_the_journal_gives_the_rewritten_program():
    p = gw.trace(Net(), gw.randn(5, 3))
    twin = p.fork()
    gw.rewrite(p, SILU)
    gw.replay(p.journal, twin)
    assert twin.hash() == p.hash()


def stopped(x):
    return gw.ops.call("stop_gradient", x * x.sigmoid())


@pytest.mark.parametrize("wrong", [lambda x: x * x.sigmoid() * 1.001, stopped], ids=["result", "gradient"])
def test_a_replacement_that_differs_is_refused_and_nothing_is_edited(wrong):
    p = gw.trace(Net(), gw.randn(5, 3))
    before, version = p.hash(), p.version
    with pytest.raises(surgery.NotEquivalent, match=r"rewrite 'silu' at .*another (result|gradient)"):
        gw.rewrite(p, surgery.Rewrite("silu", SILU.pattern, wrong, X))
    assert (p.hash(), p.version) == (before, version)


def test_the_tolerance_admits_an_approximation():
    p = gw.trace(lambda x: x.tanh(), gw.rand(2, 3))
    hard = surgery.Rewrite("hard tanh", lambda x: x.tanh(), lambda x: x.clamp(-1, 1), X, tolerance=1.0)
    (report,) = gw.rewrite(p, hard)
    assert "tanh" not in ops(p)
    assert 0.1 < report.error < 1


def test_inner_values_with_other_readers_stay():
    def fn(x):
        s = x.sigmoid()
        return x * s + s

    p, feeds, before = traced(fn, gw.randn(2, 3))
    gw.rewrite(p, SILU)
    assert sorted(ops(p)) == ["junction", "sigmoid", "silu"]
    np.testing.assert_allclose(p.run(feeds)["out"].to_numpy(), before, rtol=1e-6, atol=1e-7)


def test_a_value_shared_by_two_occurrences_goes_when_both_are_replaced():
    def fn(x):
        s = x.sigmoid()
        return x * s + (x * s).tanh()

    p, feeds, before = traced(fn, gw.randn(2, 3))
    (report,) = gw.rewrite(p, SILU)
    assert len(report.replaced) == 2
    assert sorted(ops(p)) == ["add", "silu", "silu", "tanh"]
    np.testing.assert_allclose(p.run(feeds)["out"].to_numpy(), before, rtol=1e-6, atol=1e-7)


def test_of_overlapping_occurrences_the_first_is_replaced():
    p, feeds, before = traced(lambda x: x.neg().neg().neg(), gw.randn(2, 3))
    twice = surgery.Rewrite("neg neg", lambda x: x.neg().neg(), lambda x: x, X)
    (report,) = gw.rewrite(p, twice)
    assert ops(p) == ["neg"]
    assert report.skipped == (("neg_3", "the occurrence overlaps with an earlier one"),)
    assert np.array_equal(p.run(feeds)["out"].to_numpy(), before)
    assert p.input_names() == ("x",)


def test_constants_and_attributes_must_be_equal():
    half = surgery.Rewrite("half", lambda x: x * 0.5, lambda x: x / 2.0, X)
    p = gw.trace(lambda x: x * 0.5 + x * 0.25, gw.rand(2, 3))
    (report,) = gw.rewrite(p, half)
    assert len(report.replaced) == 1
    assert sorted(ops(p)) == ["add", "div", "mul"]
    mean = surgery.Rewrite("mean", lambda x: x.mean(1), lambda x: x.sum(1) / x.shape[1], X)
    q = gw.trace(lambda x: x.mean(0), gw.rand(3, 3))
    assert gw.rewrite(q, mean)[0].replaced == ()
    assert q.version == 0


def test_several_results_and_sizes_of_the_site():
    def pattern(x, y):
        m = x.mean(-1, keepdim=True)
        return x - m, y * m

    def replacement(x, y):
        m = x.sum(-1, keepdim=True) * (1 / x.shape[-1])
        return x + m.neg(), m * y

    def fn(a, b):
        centred, scaled = pattern(a, b)
        return centred.tanh() + scaled

    p, feeds, before = traced(fn, gw.randn(5, 7), gw.randn(5, 7))
    rule = surgery.Rewrite("two", pattern, replacement, (gw.rand(2, 3), gw.rand(2, 3)))
    assert len(gw.rewrite(p, rule)[0].replaced) == 1
    assert "mean" not in ops(p)
    np.testing.assert_allclose(p.run(feeds)["out"].to_numpy(), before, rtol=1e-5, atol=1e-6)


def test_a_pattern_that_fails_for_other_specs_is_reported():
    def pattern(x):
        _, columns = x.shape
        return x.tanh() * columns

    p = gw.trace(lambda x: x.tanh() * 3, gw.rand(2, 4, 3))
    (report,) = gw.rewrite(p, surgery.Rewrite("a", pattern, pattern, X))
    assert report.replaced == ()
    assert report.skipped == (
        ("mul", "the pattern fails for these specs: ValueError: too many values to unpack (expected 2)"),
    )


def test_a_broken_program_is_refused():
    p = gw.trace(Net(), gw.rand(5, 3))
    with p.edit("break", check=False) as e:
        e.cut("a.linear -> sigmoid")
    with pytest.raises(gw.program.InvalidProgram):
        gw.rewrite(p, SILU)


def test_a_path_that_leaves_an_occurrence_and_comes_back_is_reported():
    p = gw.trace(lambda x: (lambda u: (u, u.tanh().exp()))(x.neg()), gw.rand(2, 3))
    rule = surgery.Rewrite("pair", lambda x, y: (x.neg(), y.exp()), lambda x, y: (x * -1, y.exp()), (*X, *X))
    (report,) = gw.rewrite(p, rule)
    assert report.replaced == ()
    assert p.version == 0
    assert report.skipped == (("neg", "a path leaves the selection and comes back"),)


def test_a_sum_matches_a_junction_and_named_sizes_stay():
    model = gw.open("bundled")
    p, ids = model.program, np.arange(8)[None]
    before, hash_before = model.logits(ids), p.hash()
    examples = (gw.rand(1, 2, 3), gw.rand(1, 2, 3))
    lerp = surgery.Rewrite("residual", lambda a, b: a + b, lambda a, b: gw.lerp(a, b, 0.5) * 2, examples)
    (report,) = gw.rewrite(p, lerp)
    assert len(report.replaced) == 8
    assert not p.junctions()
    assert p.spec("layers.0.mid").shape == ("B", "T", 192)
    after = model.logits(ids)
    assert 0 < np.abs(after - before).max() < 1e-4
    p.undo()
    assert p.hash() == hash_before


def test_parameters_of_the_replacement_become_weights_and_are_shared_between_sites():
    norm = gw.nn.LayerNorm(4)
    rule = surgery.Rewrite("norm", lambda x: x.tanh(), lambda x: x.tanh() + 0.0 * norm(x), (gw.rand(2, 4),))
    p = gw.trace(lambda x: x.tanh().tanh(), gw.rand(2, 4))
    gw.rewrite(p, rule)
    assert len(p.weights) - len(p.select(op="const")) == 2
    assert ops(p).count("layer_norm") == 2


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(rewriting, "_registered", {})
    monkeypatch.setattr(plugins, "_loaded", set())


def test_registered_rewrites_are_passes(registry, monkeypatch, caplog):
    class Point:
        name = "broken"

        def load(self):
            raise ImportError("no such package")

    class Good:
        name = "good"

        def load(self):
            return surgery.Rewrite("neg neg", lambda x: x.neg().neg(), lambda x: x, X)

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point(), Good()])
    assert list(surgery.rewrites()) == ["neg neg"]
    assert "'broken' was skipped" in caplog.text
    surgery.register_rewrite(SILU)
    with pytest.raises(UsageError, match="already registered"):
        surgery.register_rewrite(SILU)
    p = gw.trace(lambda x: (x * x.sigmoid()).neg().neg(), gw.rand(2, 3))
    twin = p.fork()
    assert [r.rewrite for r in gw.rewrite(p)] == ["neg neg", "fuse silu"]
    assert ops(p) == ["silu"]
    gw.rewrite(twin, "neg neg")
    assert sorted(ops(twin)) == ["mul", "sigmoid"]
    with pytest.raises(UsageError, match="no rewrite of this name is registered"):
        gw.rewrite(p, "fuse")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: surgery.Rewrite("", SILU.pattern, SILU.replacement, X), "needs a name"),
        (lambda: surgery.Rewrite("a", SILU.pattern, SILU.replacement, ()), "no examples"),
        (lambda: surgery.Rewrite("a", SILU.pattern, SILU.replacement, X, samples=0), "samples"),
        (lambda: surgery.Rewrite("a", SILU.pattern, SILU.replacement, X, samples=WRONG[1]), "samples"),
        (lambda: surgery.Rewrite("a", SILU.pattern, SILU.replacement, X, tolerance=WRONG[2]), "tolerance"),
        (lambda: surgery.Rewrite("a", SILU.pattern, WRONG[0], X), r"replacement: (.|\n)*a function"),
        (lambda: surgery.Rewrite("a", SILU.pattern, SILU.replacement, WRONG[3]), "examples: "),
        (lambda: surgery.Rewrite("a", gw.nn.Linear(3, 3), SILU.replacement, X), "variables of its own"),
        (lambda: surgery.Rewrite("a", lambda x: x, SILU.replacement, X), "not computed"),
        (
            lambda: surgery.Rewrite("a", lambda x, y: x.sigmoid(), SILU.replacement, (*X, *X)),
            "does not use an argument",
        ),
        (lambda: surgery.Rewrite("a", SILU.pattern, lambda x: x.sum(), X), "results of other specs"),
        (lambda: surgery.Rewrite("a", SILU.pattern, lambda x: gw.Parameter(np.ones((5, 4), "f")), X), "as it is"),
        (lambda: "silu", "no rewrite of this name"),
        (lambda: 3, "not a rewrite"),
    ],
)
def test_invalid_rewrites_are_refused_before_an_edit(rule, message):
    p = gw.trace(Net(), gw.rand(5, 3))
    with pytest.raises(gw.GraphwrightError, match=message):
        gw.rewrite(p, rule())
    assert p.version == 0


def test_equal_infinities_agree():
    def pattern(x):
        return gw.where(x > 0, x / 0.0, x)

    rule = surgery.Rewrite("inf", pattern, lambda x: gw.where(x > 0, x / 0.0, 1.0 * x), X)
    (report,) = gw.rewrite(gw.trace(pattern, gw.rand(2, 3)), rule)
    assert (report.replaced, report.error) == (("where",), 0.0)
