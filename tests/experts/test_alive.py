"""Experts switched off by edits: the plan stays, undo restores, the last one is kept."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.errors import UsageError

E, C, N = 5, 6, 40


def opened() -> tuple[gw.Program, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(N, C)).astype("f4")
    m = nn.Sequential(nn.Residual(ex.DynMoE(C, 4, E, 2, name="m.", seed=0)))
    ex.calibrate(m, gw.tensor(x), 2)
    return gw.trace(m, gw.tensor(x)), x


def test_a_dead_expert_has_no_tokens_in_the_same_plan_and_lives_again_after_undo():
    p, x = opened()
    plan, before = p.compile(x=(N, C)), p.hash()
    start = np.asarray(plan({"x": x})["out"])
    for layer in ("0.inner", "0.inner.router"):
        with p.edit("switch off two") as e:
            ex.set_alive(e, layer, [1, 3], alive=False)
        dead = p.run({"x": x})
        assert not np.asarray(dead.value("0.inner.router.mask"))[:, [1, 3]].any()
        np.testing.assert_allclose(np.asarray(plan({"x": x})["out"]), np.asarray(dead["out"]), rtol=0, atol=1e-6)
        assert (np.asarray(dead["out"]) != start).any()
        p.undo()
        assert p.hash() == before
        np.testing.assert_array_equal(np.asarray(plan({"x": x})["out"]), start)
    with p.edit("off and on") as e:
        ex.set_alive(e, "0.inner", [0], alive=False)
        ex.set_alive(e, "0.inner", [0])
    np.testing.assert_array_equal(np.asarray(plan({"x": x})["out"]), start)


def test_refused_edits_leave_the_program_as_it_was():
    p, _ = opened()
    before, entries = p.hash(), len(p.journal)
    cases = (("0.inner", range(E), ex.AllDead), ("0.inner", [E], UsageError), ("1.inner", [0], ex.NotAMixture))
    for layer, ids, error in cases:
        with pytest.raises(error), p.edit("switch off") as e:
            ex.set_alive(e, layer, list(ids), alive=False)
    assert p.hash() == before
    assert len(p.journal) == entries
