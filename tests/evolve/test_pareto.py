"""NSGA-II against brute force."""

from __future__ import annotations

import numpy as np

from graphwright.evolve.pareto import crowding, dominates, fronts, survivors


def test_fronts_match_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(300):
        values = rng.integers(0, 5, (int(rng.integers(1, 14)), int(rng.integers(1, 4)))).astype(float)

        def over(i, j, values=values):
            return all(values[i] >= values[j]) and any(values[i] > values[j])

        left, expected, front = set(range(len(values))), {}, 0
        while left:
            free = {j for j in left if not any(over(i, j) for i in left)}
            expected |= dict.fromkeys(free, front)
            left -= free
            front += 1
        assert fronts(values).tolist() == [expected[i] for i in range(len(values))]
        assert dominates(values).tolist() == [[over(i, j) for j in range(len(values))] for i in range(len(values))]


def test_crowding_distances_of_a_small_example():
    values = np.array([[0.0, 4.0], [1.0, 3.0], [3.0, 1.0], [4.0, 0.0], [0.0, 0.0]])
    rank = fronts(values)
    assert rank.tolist() == [0, 0, 0, 0, 1]
    room = crowding(values, rank)
    assert room[[0, 3, 4]].tolist() == [np.inf] * 3
    assert room[1] == (3 - 0) / 4 + (4 - 1) / 4
    assert survivors(values, 3).tolist() == [0, 3, 1]


def test_equal_members_do_not_dominate_each_other():
    assert fronts(np.ones((4, 2))).tolist() == [0, 0, 0, 0]
    assert (crowding(np.ones((4, 2)), np.zeros(4, int))[1:3] == 0).all()
