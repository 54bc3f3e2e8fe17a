"""Advantages of the PPO example against sums written out: a cut-off episode bootstraps, a fallen one does not."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ppo_cartpole.py"))


def test_advantages_are_the_sums_of_generalised_advantage_estimation():
    rng = np.random.default_rng(0)
    steps, carts = 12, 3
    rewards, values, after = rng.normal(size=(3, steps, carts))
    fell = rng.random((steps, carts)) < 0.2
    over = fell | (rng.random((steps, carts)) < 0.2)  # some are cut off
    assert (over & ~fell).any()
    found = EXAMPLE["advantages"](rewards, values, after, fell, over)
    gamma, lam = EXAMPLE["GAMMA"], EXAMPLE["LAMBDA"]
    for cart in range(carts):
        for t in range(steps):
            total, k = 0.0, t
            while k < steps:
                bootstrap = 0.0 if fell[k, cart] else gamma * after[k, cart]
                total += (gamma * lam) ** (k - t) * (rewards[k, cart] + bootstrap - values[k, cart])
                if over[k, cart]:
                    break
                k += 1
            np.testing.assert_allclose(found[t, cart], total, rtol=1e-12)


def test_truncated_episode_bootstraps_from_the_last_value():
    carts = EXAMPLE["Carts"](np.random.default_rng(0))
    carts.age[:] = carts.env.limit - 2
    carts.state[1, 2] = carts.env.state[1, 2] = 0.3  # this one falls
    led, fell, over = carts.step(np.ones(8, bool))
    assert (fell == (np.arange(8) == 1)).all()
    assert (over == fell).all()
    assert np.abs(carts.state[1]).max() <= 0.05  # restarts
    np.testing.assert_array_equal(carts.state[2:], led[2:])
    led, fell, over = carts.step(np.ones(8, bool))
    assert not fell.any()
    assert (over == (np.arange(8) != 1)).all()  # 500 steps
    assert (led[over] != carts.state[over]).any(1).all()  # the value is asked of where it led, not of the new start
    assert (carts.age == (np.arange(8) == 1)).all()
