"""Invalid experts and choices: each is refused by a typed error before any work, and nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe import EXPERTS, ids, program

import graphwright as gw
from graphwright import experts as ex
from graphwright.errors import IndexOutOfRange, ShapeError, UsageError
from graphwright.ops import call
from graphwright.program.errors import StaleSelection

LAYER = "layers.0.mlp"
GOOD: dict[str, Any] = {
    "offsets": [0, 3, 6], "rows": [0, 1, 2, 0, 1, 2, 0, 0, 0, 0], "pairs": [0, 2, 4, 1, 3, 5, 0, 0, 0, 0],
}  # fmt: skip


def mixed(dtype: str, width: int = 4, tokens: int = 3, **runs: list[int]) -> gw.Tensor:
    """Two experts; `width` is that of the second one's up product, `tokens` the size that its matrices expect."""
    rng = np.random.default_rng(0)
    given = [np.array({**GOOD, **runs}[n]) for n in ("offsets", "rows", "pairs")]
    shapes = [(4, 3), (4, 3), (3, 4), (4, tokens), (width, tokens), (tokens, 4)]
    matrices = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    x, weights = rng.normal(size=(5, 3)).astype(dtype), rng.normal(size=(5, 2)).astype(dtype)
    return call("expert_mlp", *map(gw.tensor, (x, *given, weights, *matrices)))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("runs", "what"),
    [({"offsets": [0, 6, 3]}, "offsets"), ({"offsets": [2, 3, 6]}, "offsets"), ({"offsets": [0, 3, 60]}, "offsets"),
     ({"rows": [0, 1, 99, *GOOD["rows"][3:]]}, "expected 0 to 4"), ({"rows": [0, -1, *GOOD["rows"][2:]]}, "row"),
     ({"pairs": [0, 2, 77, *GOOD["pairs"][3:]]}, "expected 0 to 9")],
)  # fmt: skip
def test_runs_out_of_range_are_refused(runs, what, dtype):
    assert np.isfinite(mixed(dtype).numpy()).all()
    with pytest.raises(IndexOutOfRange, match=what):
        mixed(dtype, **runs)


@pytest.mark.parametrize(
    ("given", "what"),
    [({"width": 5}, r"expert 1, gate(.|\n)*expected \(5, 3\)(.|\n)*got +f32\[4, 3\]"), ({"tokens": 2}, "expert 1"),
     ({"offsets": [0, 3, 4, 6]}, r"E \+ 1")],
)  # fmt: skip
def test_experts_and_choices_of_other_sizes_are_refused_by_number(given, what):
    with pytest.raises((ShapeError, UsageError), match=what):
        mixed("f4", **given)


def test_a_router_with_rows_for_other_experts_is_refused_and_nothing_changes():
    p = program()
    digest, entries = p.hash(), len(p.journal)
    with pytest.raises(UsageError), p.edit("a row less") as e:
        e.set_attr(f"{LAYER}.router.dispatch", experts=EXPERTS - 1)
    with pytest.raises(UsageError), p.edit("a matrix of another width") as e:
        e.set_weight(f"{LAYER}.experts.1.up.weight", np.zeros((8, 11)))
    assert p.hash() == digest
    assert len(p.journal) == entries
    with p.edit("a router that never chooses the last expert") as e:
        e.set_weight(f"{LAYER}.router.weight", np.zeros((EXPERTS - 1, 12)))
    with pytest.raises(ex.NotAMixture, match="one row per expert"), p.edit("add") as e:
        ex.add(e, LAYER)


def test_experts_selected_before_a_cut_are_stale():
    p = program()
    early = p.axes()[f"{LAYER}.experts"].units([3])
    scores = ex.scores(p, "weights").layers
    with p.edit("cut") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units([0]))
    digest = p.hash()
    with pytest.raises(StaleSelection), p.edit("cut") as e:
        e.cut_units(early)
    with pytest.raises(StaleSelection, match=r"layers\.0\.mlp"), p.edit("cut by figures of all five") as e:
        e.cut_units(ex.least(p, scores, 1))
    assert p.hash() == digest


def test_the_use_of_experts_follows_them_through_edits():
    p = program()
    use = ex.usage(p, {"ids": ids(16, 12)})
    count = use[LAYER].count.copy()
    assert len(set(count.tolist())) == EXPERTS
    with p.edit("in one edit") as e:
        e.cut_units(use.least(1))
        e.permute(f"{LAYER}.experts", [2, 0, 3, 1])
        left = [i for i in range(EXPERTS) if i != np.argmin(count)]
        order = [left[i] for i in (2, 0, 3, 1)]
        np.testing.assert_allclose(use.scores("share")[LAYER], use[LAYER].share[order])
        weights = [p.weights[f"{LAYER}.experts.{i}.up.weight"].numpy().copy() for i in order[1:3]]
        ex.merge(e, LAYER, [1, 2], by=use, align=False)
    share = count[order[1:3]] / count[order[1:3]].sum()
    merged = p.weights[f"{LAYER}.experts.{order[1]}.up.weight"].numpy()
    np.testing.assert_allclose(merged, share[0] * weights[0] + share[1] * weights[1], rtol=1e-6)
    with p.edit("one that was not measured") as e:
        ex.clone(e, LAYER, 0)
    with pytest.raises(StaleSelection, match="measure again"):
        use.least(1)


def test_numbers_out_of_range_are_refused():
    for make in (lambda: gw.nn.MoE(4, 3, 0), lambda: gw.nn.MoE(4, 3, 2, 3), lambda: gw.nn.ThresholdRouter(4, 2, 2.5),
                 lambda: gw.nn.ThresholdRouter(4, 2, 1, kappa=-1.0), lambda: ex.ghost(weight=-1.0)):  # fmt: skip
        with pytest.raises(UsageError):
            make()


def test_a_token_that_is_not_a_number_is_reported_where_anomalies_are_looked_for():
    m = gw.nn.MoE(4, 3, 3, router=gw.nn.ThresholdRouter(4, 3, 1))
    x = np.ones((5, 4), "f4")
    x[2] = np.nan
    ex.calibrate(m, gw.tensor(np.random.default_rng(0).normal(size=(64, 4)).astype("f4")), 1)
    found: Any = m.route(gw.tensor(x))
    assert found.unrouted.numpy().tolist()[2]
    assert np.isnan(m(gw.tensor(x)).numpy()).any(1).tolist() == [False, False, True, False, False]
