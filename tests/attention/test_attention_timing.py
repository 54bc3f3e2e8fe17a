"""Measured attention: random patterns of a density, results that are checked before they are timed, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import graphwright as gw
from graphwright import attention as at
from graphwright.attention import timing
from graphwright.autograd import grad
from graphwright.cli import app

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(("tokens", "density", "block"), [(512, 0.25, 16), (500, 0.5, 64), (77, 1.0, 16), (64, 0.9, 1)])
def test_random_patterns_have_the_density_of_their_dense_mask(tokens: int, density: float, block: int):
    pattern = timing.random_pattern(tokens, density, block, seed=3)
    mask = pattern.to_dense()[0]
    assert not np.triu(mask, 1).any()
    assert mask.diagonal().all()
    share = mask.sum() / (tokens * (tokens + 1) / 2)
    assert timing.density_of(pattern) == pytest.approx(share)
    assert abs(share - density) <= block**2 / (tokens * (tokens + 1) / 2) + block / tokens
    other = timing.random_pattern(tokens, density, block, seed=4).to_dense()[0]
    assert density == 1 or (mask != other).any()


def test_density_has_the_own_blocks_as_its_least():
    assert len(timing.random_pattern(256, 0.0, 64)) == 4


@pytest.mark.parametrize("spoiled", [None, "out", "dq", "dk", "dv"])
def test_each_wrong_result_is_found(spoiled: str | None):
    rng, pattern = np.random.default_rng(0), timing.random_pattern(200, 0.4, 16)
    arrays = [rng.normal(size=(1, 2, 200, 8)).astype("f4") for _ in range(4)]
    q, k, v, g = (gw.tensor(x) for x in arrays)
    for x in (q, k, v):
        x.requires_grad = True
    y = at.attend(q, k, v, pattern)
    found = {"out": y.numpy().copy()}
    found |= {name: x.numpy().copy() for name, x in zip(("dq", "dk", "dv"), grad(y, (q, k, v), g), strict=True)}
    if spoiled is not None:
        found[spoiled][0, 1] *= 1.01
    wrong = timing.wrong_by(pattern, arrays, found["out"], [found[name] for name in ("dq", "dk", "dv")])
    assert wrong < 1e-4 if spoiled is None else wrong > timing._TOLERANCE


def test_results_over_another_pattern_are_not_timed(monkeypatch: pytest.MonkeyPatch):
    fewer = timing.attend

    def attend(q, k, v, pattern):
        return fewer(q, k, v, timing.random_pattern(96, 0.0, 16))

    monkeypatch.setattr(timing, "attend", attend)
    with pytest.raises(timing.WrongOutput, match="differs from dense attention"):
        timing.measure(96, 0.8, block=16, rounds=1)


def test_times_name_density_dense_and_backward():
    found = timing.measure(200, 0.5, heads=2, width=16, block=16, rounds=2)
    facts = found.to_json()
    times = [facts[name] for name in ("forward", "both", "again", "dense_forward", "dense_both")]
    assert min(times) > 0
    assert facts["flex_forward"] is None
    assert facts["faster_both"] == pytest.approx(facts["dense_both"] / facts["both"])
    assert f"density {found.density:.1%}" in str(found)
    assert "dense causal" in str(found)


def test_the_command_prints_one_document():
    args = ["bench", "attention", "--tokens", "130", "--density", "0.5", "--block", "16", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["tokens"] == 130
    assert facts["error"] < 1e-3
    assert CliRunner().invoke(app, ["bench", "decode"]).exit_code == 2
