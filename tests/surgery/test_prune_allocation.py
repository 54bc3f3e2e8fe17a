"""Allocation against all possibilities, and its rules."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from graphwright.errors import UsageError
from graphwright.surgery.pruning import allocate as allocation
from graphwright.surgery.pruning.allocate import Curve, smallest
from graphwright.surgery.pruning.prune import PruneOptions


def curves(seed: int, sizes=(5, 4, 6), costs=(1.0, 1.0, 1.0), kinds=("a", "a", "b")) -> list[Curve]:
    rng = np.random.default_rng(seed)
    return [Curve(f"axis{i}", kinds[i], n, np.sort(rng.exponential(size=n)), c)
            for i, (n, c) in enumerate(zip(sizes, costs, strict=True))]  # fmt: skip


def allocate(found: list[Curve], met: Any, **options: Any) -> dict[str, int]:
    """Where the budget can be met."""
    kept = allocation.allocate(found, met, **options)
    assert kept is not None
    return kept


def budget(found: list[Curve], most: float):
    return lambda kept: sum(c.cost * kept[c.axis] for c in found) <= most


def lost(found: list[Curve], kept: Mapping[str, int]) -> float:
    return sum(c.growth[: c.size - kept[c.axis]].sum() for c in found)


@pytest.mark.parametrize("seed", range(12))
def test_allocation_is_optimal_for_equal_costs(seed):
    found = curves(seed)
    kept = allocate(found, budget(found, 8), min_keep=0.0)
    best = min(
        (dict(zip([c.axis for c in found], sizes, strict=True))
         for sizes in product(range(1, 6), range(1, 5), range(1, 7)) if sum(sizes) <= 8),
        key=lambda k: lost(found, k),
    )  # fmt: skip
    assert lost(found, kept) == pytest.approx(lost(found, best))


@pytest.mark.parametrize("scope", ["global", "loss", "kind", "layer"])
@pytest.mark.parametrize("round_to", [1, 2, 3])
def test_the_budget_is_met_with_the_fewest_blocks(scope, round_to):
    found = curves(3, (12, 12, 30), (2.0, 2.0, 1.0))
    met = budget(found, 50)
    kept = allocate(found, met, scope=scope, round_to=round_to, min_keep=0.2)
    assert met(kept)
    for c in found:
        assert kept[c.axis] == c.size or kept[c.axis] % round_to == 0
        assert kept[c.axis] >= 0.2 * c.size
    taken = sum(c.cost * kept[c.axis] for c in found)
    assert taken > 50 - max(c.cost for c in found) * round_to * (1 if round_to == 1 else 2)


def test_scopes_layer_and_kind_cut_equal_shares():
    found = curves(0, (100, 50, 40))
    kept = allocate(found, budget(found, 95), scope="layer", round_to=1)
    shares = [kept[c.axis] / c.size for c in found]
    assert max(shares) - min(shares) <= 1 / 40 + 1e-9
    found = curves(0, (40, 40, 80), kinds=("a", "a", "b"))
    kept = allocate(found, budget(found, 80), scope="kind", min_keep=0.0, round_to=1)
    assert abs((kept["axis0"] + kept["axis1"]) / 80 - kept["axis2"] / 80) <= 1 / 40


@pytest.mark.parametrize(
    ("kind", "size", "step"),
    [("neurons", 512, 16), ("channels", 64, 16), ("neurons", 63, 8), ("neurons", 12, 2), ("kv_groups", 64, 1)],
)
def test_sizes_are_multiples_of_sixteen_except_on_short_axes_and_heads(kind, size, step):
    (curve,) = curves(0, (size,), costs=(1,), kinds=(kind,))
    seen = set()
    for most in range(step, size):
        seen |= set(allocate([curve], lambda sizes, most=most: sizes["axis0"] <= most, min_keep=0.0).values())
    assert seen == {n for n in range(1, size) if n % step == 0}


def test_axes_of_equal_size_keep_equal_sizes():
    found = curves(1, (20, 20, 20))
    kept = allocate(found, budget(found, 40), uniform=True)
    assert kept["axis0"] == kept["axis1"]
    assert allocate(found, budget(found, 40))["axis0"] != allocate(found, budget(found, 40))["axis1"]


def test_an_unreachable_budget_returns_none():
    found = curves(1)
    assert allocation.allocate(found, lambda kept: False) is None
    assert smallest(found, 1, 0.5) == {"axis0": 3, "axis1": 2, "axis2": 3}
    assert allocate(found, lambda kept: True) == {c.axis: c.size for c in found}
    with pytest.raises(UsageError):
        PruneOptions(scope="everything")  # pyright: ignore[reportArgumentType]  # what is tested
