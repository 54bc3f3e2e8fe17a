"""Dead experts and heads are left out of generated code; other switches are constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dynamic import dynamic_model, some_ids

import graphwright as gw
from graphwright import experts as ex
from graphwright.models.export.dead_units import without_dead_units
from graphwright.models.metrics import non_finite
from graphwright.safetensors import Checkpoint


@pytest.fixture
def switched() -> gw.Model:
    m = dynamic_model(null=True)
    with m.edit("switch off two experts and a head") as e:
        ex.set_alive(e, "layers.0.moe", [2, 5], alive=False)
        ex.set_alive(e, "layers.1.attn", [0], alive=False)
    return m


def test_dead_units_are_not_written(switched: gw.Model, tmp_path: Path) -> None:
    before = switched.program.hash()
    receipt = switched.export(tmp_path / "out", check="none", timed=False)
    assert (receipt.level, receipt.exact) == (5, True)
    assert switched.program.hash() == before
    gone = {f"layers.0.moe.experts.{e}" for e in (2, 5)} | {"layers.1.attn.heads.0"}
    keys = {switched.program.key(n) for n in switched.program.params()}
    assert set(Checkpoint(tmp_path / "out")) == {k for k in keys if not any(k.startswith(f"{g}.") for g in gone)}
    assert (
        receipt.cost["parameters"]["program"] - receipt.cost["parameters"]["after"] == 2 * (17 + 3 * 6 * 16) + 17 + 256
    )
    code = next((tmp_path / "out").glob("modeling_*.py")).read_text()
    assert "dict.fromkeys((0, 1, 3, 4, 6, 7), 6)" in code
    assert "False" not in code.partition("CONSTS = {")[2].partition("}")[0]


def test_without_dead_units_the_logits_are_equal(switched: gw.Model) -> None:
    ids = some_ids(2, 20)
    alive = without_dead_units(switched.program)
    assert alive is not switched.program
    made = switched.with_program(alive)
    np.testing.assert_allclose(made.logits(ids), switched.logits(ids), rtol=0, atol=1e-5)
    assert without_dead_units(alive) is alive


def changed(e: Any, p: gw.Program, kind: str) -> None:
    """Make the switch of a layer's experts more than a mask of scores."""
    alive, margin = (p.node(f"layers.0.moe.router.{name}") for name in ("alive", "margin"))
    if kind == "other score":
        e.rewire(p.in_edges(margin)[2], e.const("low", np.float32(-5)))
    elif kind == "read otherwise":
        e.set_outputs(logits=p.output("logits"), alive=e.add("logical_not", alive))
    else:
        e.assign(alive, e.add("logical_not", alive))


@pytest.mark.parametrize("kind", ["other score", "read otherwise", "assigned"])
def test_a_switch_that_does_more_than_mask_scores_is_kept(kind: str) -> None:
    m = dynamic_model()
    with m.edit("switch off, and more") as e:
        ex.set_alive(e, "layers.0.moe", [2], alive=False)
        changed(e, m.program, kind)
    assert without_dead_units(m.program) is m.program


def test_an_infinite_constant_is_no_damage(switched: gw.Model) -> None:
    assert non_finite(switched.program) == []
    with switched.edit("damage") as e:
        e.set_weight("norm.weight", lambda w: w * np.inf)
        nan = e.add("add", "lm_head.linear", e.const("bad", np.float32(np.nan)))
        e.set_outputs(logits=nan)
    assert [key for key, *_ in non_finite(switched.program)] == ["bad", "norm.weight"]
