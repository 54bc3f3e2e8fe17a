"""Each kind of grid task beside a loop over its cells, and the laws of the dataset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.data import AugmentedTasks, GridError, GridTask, grids
from graphwright.data.grid_tasks import transformed
from graphwright.data.grids import KINDS

Cells = list[list[int]]


def tallied(x: Cells) -> Cells:
    found = [c for row in x for c in row if c]
    return [[found[0]] * len(found)]


def boxed(x: Cells) -> Cells:
    ys = [y for y, row in enumerate(x) if any(row)]
    xs = [i for i in range(len(x[0])) if any(row[i] for row in x)]
    return [[x[y][i] for i in range(xs[0], xs[-1] + 1)] for y in range(ys[0], ys[-1] + 1)]


def fallen(x: Cells) -> Cells:
    columns = [[row[i] for row in x] for i in range(len(x[0]))]
    columns = [[0] * c.count(0) + [v for v in c if v] for c in columns]
    return [[c[y] for c in columns] for y in range(len(x))]


SLOW: dict[str, Callable[[Cells], Cells]] = {
    "copy": lambda x: x,
    "flip": lambda x: [list(reversed(row)) for row in x],
    "transpose": lambda x: [[row[i] for row in x] for i in range(len(x[0]))],
    "crop": boxed,
    "mirror": lambda x: [[*row, *reversed(row)] for row in x],
    "gravity": fallen,
    "count": tallied,
}
"""The rules without random words, in the frame in which they are stated."""


def both(task: GridTask) -> list[tuple[Cells, Cells]]:
    return [(a.tolist(), b.tolist()) for a, b in (*task.pairs, (task.question, task.answer))]


def framed(x: Cells, symmetry: int) -> Cells:
    return transformed(np.array(x), symmetry).tolist()


def follows(kind: str, task: GridTask) -> bool:
    """Whether one rule of the kind explains all pairs and the answer."""
    pairs = both(task)
    if kind in SLOW:
        return any(all(framed(b, g) == SLOW[kind](framed(a, g)) for a, b in pairs) for g in range(8))
    if kind == "rotate":
        return any(all(framed(a, k) == b for a, b in pairs) for k in (1, 2, 3))
    if kind == "shift":
        side = len(pairs[0][0])
        return any(
            all(b == [[a[y - dy][x - dx] for x in range(side)] for y in range(side)] for a, b in pairs)
            for dy in range(side) for dx in range(side) if dy or dx
        )  # fmt: skip
    assert kind == "recolour"
    table: dict[int, int] = {}
    for a, b in pairs:
        if np.shape(a) != np.shape(b):
            return False
        for old, new in zip(np.ravel(a).tolist(), np.ravel(b).tolist(), strict=True):
            if table.setdefault(old, new) != new or old == new:
                return False
    return len(set(table.values())) == len(table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_follows_one_rule_of_its_kind(kind: str) -> None:
    for colours in (2, 10):
        source = grids(kind, side=4, colours=colours, pairs=3, seed=colours)
        for i in range(40):
            task = source[i]
            assert follows(kind, task), (i, both(task))
            assert max(int(g.max()) for g in task.grids) < colours
            assert all(a.shape == (4, 4) for a, _ in (*task.pairs, (task.question, task.answer)))
            assert task.name == f"{kind}-{i}"


@pytest.mark.parametrize("kind", KINDS)
def test_augmentation_commutes_with_the_rule(kind: str) -> None:
    source = grids(kind, side=4, pairs=2, seed=3, count=10)
    made = AugmentedTasks(source, 6)
    assert all(follows(kind, made[i]) for i in range(len(made)))


def test_a_task_of_another_kind_is_found_out() -> None:
    """The check of the two tests above can fail: tasks of a kind do not follow another one."""
    for a in KINDS:
        for b in KINDS:
            wrong = sum(follows(b, task) for task in (grids(a, side=4, pairs=2, seed=1)[i] for i in range(6)))
            assert wrong == (6 if a == b or (a, b) == ("copy", "crop") else 0), (a, b)  # full grids are their own box


@pytest.mark.parametrize("kind", SLOW)
def test_a_fixed_rule_is_the_one_that_the_kind_states(kind: str) -> None:
    for seed in (0, 9):
        task = grids(kind, side=5, pairs=2, seed=seed, fixed=True)[seed]
        assert all(b == SLOW[kind](a) for a, b in both(task))


@pytest.mark.parametrize("kind", ["recolour", "shift", "rotate"])
def test_a_fixed_rule_does_not_depend_on_seed_and_index(kind: str) -> None:
    tasks = [grids(kind, side=4, pairs=2, seed=seed, fixed=True)[i] for seed in (0, 1) for i in (0, 5)]
    joined = GridTask(tuple(pair for t in tasks for pair in (*t.pairs, (t.question, t.answer))), *tasks[0].pairs[0])
    assert follows(kind, joined)
    assert tasks[0] != tasks[1]
    free = [grids(kind, side=4, pairs=2)[i] for i in range(8)]
    joined = GridTask(tuple(pair for t in free for pair in (*t.pairs, (t.question, t.answer))), *free[0].pairs[0])
    assert not follows(kind, joined)


@given(seed=st.integers(0, 2**63 - 1), index=st.integers(0, 99))
def test_a_task_depends_on_seed_and_index_only(seed: int, index: int) -> None:
    first, second = (grids(("shift", "count"), side=3, seed=seed, count=100) for _ in range(2))
    _ = [second[i] for i in range(0, 100, 17)]
    assert first[index] == second[index]
    assert first[index].name.startswith("count" if index % 2 else "shift")


def test_all_colours_and_frames_occur_with_equal_probability() -> None:
    source = grids("gravity", side=6, pairs=1, colours=6)
    cells = np.concatenate([source[i].question.reshape(-1) for i in range(200)])
    shares = np.bincount(cells, minlength=6) / len(cells)
    assert shares[0] == pytest.approx(0.5, abs=0.03)
    assert shares[1:] == pytest.approx(0.1, abs=0.02)
    falls = {g: 0 for g in range(8)}
    for i in range(200):
        for g in range(8):
            a, b = both(source[i])[0]
            falls[g] += framed(b, g) == SLOW["gravity"](framed(a, g))
    assert all(30 <= n <= 75 for n in falls.values()), falls  # each direction is that of two frames


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kind": "spin"}, "kind"),
        ({"kind": ()}, "kind"),
        ({"side": 1}, "side"),
        ({"side": 31}, "side"),
        ({"kind": "mirror", "side": 16}, "side"),
        ({"side": 4.0}, "side"),
        ({"colours": 1}, "colours"),
        ({"colours": 11}, "colours"),
        ({"pairs": -1}, "pairs"),
        ({"pairs": True}, "pairs"),
        ({"seed": -1}, "seed"),
        ({"count": 0}, "count"),
        ({"fixed": 1}, "fixed"),
    ],
)
def test_bad_fields_are_named(options: dict, field: str) -> None:
    with pytest.raises(GridError) as caught:
        grids(**{"kind": "flip", **options})
    assert caught.value.where == field
