"""Grid tasks as ids and back, their symmetries beside loops over cells, and their drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from graphwright.data import AugmentedTasks, DataLoader, GridError, GridTask, ListedTasks, Subset, collate_tasks, grids
from graphwright.data.grid_tasks import ANSWER, END, PAD, PAIR, ROW, SYMMETRIES, inverse, read_answer, transformed
from graphwright.errors import IndexOutOfRange

GRIDS = hnp.arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.integers(0, 9))
PALETTES = st.permutations(range(1, 10)).map(lambda p: [0, *p])


@st.composite
def tasks(draw: st.DrawFn) -> GridTask:
    pairs = draw(st.lists(st.tuples(GRIDS, GRIDS), max_size=3))
    return GridTask(tuple(pairs), draw(GRIDS), draw(GRIDS))


def slow_encode(task: GridTask) -> tuple[list[int], list[int]]:
    def rows(grid: np.ndarray) -> list[int]:
        found: list[int] = []
        for row in grid:
            for cell in row:
                found.append(int(cell))
            found.append(10)
        return found

    prompt: list[int] = []
    for a, b in task.pairs:
        prompt = prompt + rows(a) + [12] + rows(b) + [11]
    return prompt + rows(task.question) + [12], [*rows(task.answer), 13]


@given(task=tasks(), padding=st.integers(0, 3))
def test_decode_inverts_encode(task: GridTask, padding: int) -> None:
    prompt, answer = task.encode()
    assert (prompt.tolist(), answer.tolist()) == slow_encode(task)
    end = [PAD] * padding
    again = GridTask.decode([*prompt, *end], [*answer, *end])
    assert again == task
    assert hash(again) == hash(task)
    assert [g.tolist() for g in again.grids] == [g.tolist() for g in task.grids]


@given(ids=st.lists(st.integers(-1, 15), max_size=12))
def test_ids_decode_to_a_task_that_encodes_to_them_or_are_refused(ids: list[int]) -> None:
    answer = [1, ROW, END]
    try:
        task = GridTask.decode(ids, answer)
    except GridError:
        return
    while ids and ids[-1] == PAD:
        ids.pop()
    assert task.encode()[0].tolist() == ids


@pytest.mark.parametrize(
    ("prompt", "answer", "field"),
    [
        ([1, ROW], [1, ROW, END], "prompt"),
        ([], [1, ROW, END], "prompt"),
        ([1, ROW, PAIR, 2, ROW, ANSWER], [1, ROW, END], "pairs[0]"),
        ([1, ROW, ANSWER, 1, PAIR, 2, ROW, ANSWER], [1, ROW, END], "pairs[0].output"),
        ([1, ROW, 1, 2, ROW, ANSWER], [1, ROW, END], "question"),
        ([1, ROW, ANSWER], [1, ROW], "answer"),
        ([1, ROW, ANSWER], [END], "answer"),
        ([1, ROW, ANSWER], [1, PAIR, ROW, END], "answer"),
        ([1, ROW, ANSWER], [ROW, END], "answer"),
    ],
)
def test_invalid_ids_of_a_task_are_refused_by_field(prompt: list[int], answer: list[int], field: str) -> None:
    with pytest.raises(GridError) as caught:
        GridTask.decode(prompt, answer)
    assert caught.value.where == field


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ([[1, 2], [3]], "different lengths"),
        ([1, 2], "not a grid"),
        ([[1.0]], "not a grid"),
        ([[True]], "not a grid"),
        (np.zeros((31, 1), int), "not a grid"),
        (np.zeros((0, 3), int), "not a grid"),
        ([[10]], "out of range"),
        ([[-1]], "out of range"),
    ],
)
def test_bad_grids_are_named_by_field(grid: object, text: str) -> None:
    with pytest.raises(GridError, match=text) as caught:
        GridTask((([[0]], grid),), [[0]], [[0]])  # pyright: ignore[reportArgumentType]
    assert caught.value.where == "pairs[0].output"


def test_grids_are_read_only_copies() -> None:
    grid = np.ones((2, 2), int)
    task = GridTask((), grid, grid)
    grid[:] = 5
    assert task.question.max() == 1
    with pytest.raises(ValueError, match="read-only"):
        task.question[0, 0] = 2


# -- symmetries --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("symmetry", range(SYMMETRIES))
def test_symmetries_move_cells_as_maps_of_the_square_do(symmetry: int) -> None:
    grid = np.arange(6).reshape(2, 3)
    h, w = grid.shape
    expected = {
        0: [[grid[y][x] for x in range(w)] for y in range(h)],
        1: [[grid[y][w - 1 - x] for y in range(h)] for x in range(w)],
        2: [[grid[h - 1 - y][w - 1 - x] for x in range(w)] for y in range(h)],
        3: [[grid[h - 1 - y][x] for y in range(h)] for x in range(w)],
        4: [[grid[y][x] for y in range(h)] for x in range(w)],
        5: [[grid[h - 1 - y][x] for x in range(w)] for y in range(h)],
        6: [[grid[h - 1 - y][w - 1 - x] for y in range(h)] for x in range(w)],
        7: [[grid[y][w - 1 - x] for x in range(w)] for y in range(h)],
    }[symmetry]
    assert transformed(grid, symmetry).tolist() == expected
    assert transformed(transformed(grid, symmetry), inverse(symmetry)).tolist() == grid.tolist()


@given(task=tasks(), symmetry=st.integers(0, 7), palette=PALETTES)
def test_a_transformed_task_is_undone_by_the_inverses(task: GridTask, symmetry: int, palette: list[int]) -> None:
    changed = task.transformed(symmetry, palette)
    for old, new in zip(task.grids, changed.grids, strict=True):
        assert transformed(new, inverse(symmetry)).tolist() == [[palette[c] for c in row] for row in old.tolist()]
    assert changed.transformed(inverse(symmetry), np.argsort(palette)) == task


@pytest.mark.parametrize(
    ("options", "field"),
    [({"symmetry": 8}, "symmetry"), ({"palette": [1, 0, *range(2, 10)]}, "palette"), ({"palette": [0] * 10}, "palette"),
     ({"palette": range(9)}, "palette")],
)  # fmt: skip
def test_bad_transformations_are_named(options: dict, field: str) -> None:
    with pytest.raises(GridError) as caught:
        grids("copy")[0].transformed(**options)
    assert caught.value.where == field


def test_augmented_tasks_are_variants_drawn_from_seed_and_index() -> None:
    source = grids("flip", side=3, count=4, colours=5)
    made = AugmentedTasks(source, 50, colours=5)
    assert len(made) == 200
    found = set()
    for i in range(200):
        task = source[i % 4]
        variants = [task.transformed(g) for g in range(8)]
        hits = []
        for g, variant in enumerate(variants):
            table = np.full(10, -1)
            for a, b in zip(variant.grids, made[i].grids, strict=True):
                if a.shape == b.shape:
                    table[a] = b
            if all(np.array_equal(table[a], b) for a, b in zip(variant.grids, made[i].grids, strict=True)):
                hits.append((g, tuple(table[1:5])))
        assert hits
        found.add(hits[0])
        assert all(table_value <= 4 for _, table in hits for table_value in table)
    assert {g for g, _ in found} == set(range(8))
    assert len(found) > 60
    assert made[7] == AugmentedTasks(source, 50, colours=5)[7] != AugmentedTasks(source, 50, seed=1, colours=5)[7]


# -- datasets ----------------------------------------------------------------------------------------------------------
def test_batches_are_padded_rows() -> None:
    source = grids("crop", side=4, pairs=1)
    batch = source.batch(np.array([3, 0, 8]))
    for row, i in enumerate((3, 0, 8)):
        for name, ids in zip(("prompt", "answer"), source[i].encode(), strict=True):
            whole = batch[name].numpy()[row]
            assert whole[: len(ids)].tolist() == ids.tolist()
            assert (whole[len(ids) :] == PAD).all()
    assert len({len(source[i].encode()[1]) for i in (3, 0, 8)}) > 1


def test_streams_do_not_depend_on_workers() -> None:
    source = grids(["flip", "crop"], side=3, pairs=1, seed=5, count=13)
    one, two = (
        [{k: v.numpy() for k, v in batch.items()} for batch in DataLoader(source, 4, shuffle=True, num_workers=n)]
        for n in (0, 2)
    )
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    listed = DataLoader(ListedTasks([source[i] for i in range(13)]), 4, shuffle=True)
    first = next(iter(listed))["prompt"].numpy()
    np.testing.assert_array_equal(first, one[0]["prompt"])
    chosen = next(iter(DataLoader(Subset(source, [5, 2]), 2, collate_fn=collate_tasks)))
    np.testing.assert_array_equal(chosen["answer"].numpy(), source.batch(np.array([5, 2]))["answer"].numpy())


def test_an_index_outside_the_dataset_is_refused() -> None:
    for index in (-1, 3):
        with pytest.raises(IndexOutOfRange):
            grids("copy", count=3)[index]


def test_drawings_have_a_square_per_cell_inside_the_picture() -> None:
    task = grids("mirror", side=3, pairs=2)[1]
    for guess, word in ((task.answer, "guess: right"), (task.question, "guess: wrong")):
        root = ET.fromstring(task.to_svg(guess))
        cells = [e for e in root.iter() if e.tag.endswith("rect") and e.get("stroke") == "#6e7781"]
        assert len(cells) == sum(g.size for g in task.grids) + guess.size
        assert word in [e.text for e in root.iter()]
        width, height = float(root.get("width") or 0), float(root.get("height") or 0)
        for e in cells:
            x, y, w, h = (float(e.get(name) or -1) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height
    assert "3 x 3" in repr(task)
    assert task._repr_html_() == task.to_svg()


def test_an_answer_is_read_strictly() -> None:
    assert read_answer([1, 2, ROW, 3, 4, ROW, END, PAD]).tolist() == [[1, 2], [3, 4]]
    for ids in ([1, ROW, END, 1], [1, ROW, 1, 2, ROW, END], [1, ROW, PAD, END], [[1]], [1.5], []):
        with pytest.raises(GridError):
            read_answer(ids)
