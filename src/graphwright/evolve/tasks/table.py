"""A table of one's own, from a CSV file: one column is predicted from the others."""

from __future__ import annotations

import csv as csv_format
from pathlib import Path

import numpy as np

from graphwright.evolve.errors import TaskError
from graphwright.evolve.tasks.task import Task
from graphwright.files import StrPath, UnreadableFile

WORDS = 20  # different words of a column that become inputs
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = ("", "na", "n/a", "nan", "null", "none", "?")


def csv(path: StrPath, target: str, seed: int = 0) -> Task:
    """The columns of a CSV with a header, by commas, semicolons or tabs: one is the target, the others are inputs.

    A column of numbers is one input, standardised by the training cases; a column of words one for each of its words,
    1 where it stands. A target of words, or of at most 10 whole numbers, is a class; another one is a number to be
    predicted, in standard deviations from its mean. `meaning` of the task says which class or number an output is.
    Raises: TaskError naming the column, or line and column, that does not fit; UnreadableFile.
    """
    head, body = _cells(path)
    if target not in head:
        raise TaskError("no such column", where=path, got=target, expected=", ".join(head))
    columns = {name: _column(path, name, [(line, row[j]) for line, row in body]) for j, name in enumerate(head)}
    wanted = columns.pop(target)
    if not columns:
        raise TaskError("there is nothing to predict from", where=path, got=target)
    kinds, classes = np.unique(wanted, return_inverse=True)
    if len(kinds) < 2:
        raise TaskError("the target is the same in all rows", where=f"{path}, column {target}", got=str(kinds[0]))
    names, inputs, scaled = [], [], []
    for name, column in columns.items():
        if column.dtype.kind != "U":
            names, inputs, scaled = [*names, name], [*inputs, column], [*scaled, True]
            continue
        words = sorted(set(column.tolist()))
        if len(words) > WORDS:
            raise TaskError("too many different words for inputs", where=f"{path}, column {name}", got=len(words),
                            expected=f"at most {WORDS}", fix="take the column out, or write numbers")  # fmt: skip
        for word in words:
            names, inputs, scaled = [*names, f"{name}={word}"], [*inputs, column == word], [*scaled, False]
    x, stem = np.array(inputs, float).T, Path(path).stem
    options = {"names": tuple(names), "name": stem, "seed": seed, "scaled": np.array(scaled)}
    if wanted.dtype.kind == "U" or (len(kinds) <= 10 and np.equal(kinds, np.round(kinds)).all()):
        meaning = {target: [str(kind) if wanted.dtype.kind == "U" else int(kind) for kind in kinds]}
        return Task(x, classes, "bce" if len(kinds) == 2 else "cross_entropy", meaning=meaning, **options)
    mean, std = float(wanted.mean()), float(wanted.std())
    return Task(x, (wanted - mean) / std, "mse", meaning={target: {"mean": mean, "std": std}}, **options)


def _cells(path: StrPath) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and every row that is not empty with the number of its line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            reader = csv_format.reader(file, delimiter=max(",;\t", key=first.count))
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise TaskError("not a text in UTF-8", where=path, got=str(error), fix="save it as UTF-8") from None
    except csv_format.Error as error:
        raise TaskError("not a CSV", where=path, got=str(error)) from None
    except OSError as error:
        raise UnreadableFile("cannot read this file", where=path, cause=error) from error
    if len(rows) < 2:
        raise TaskError("the file has no rows", where=path, expected="a line of names, then lines of values")
    (_, head), body = rows[0], rows[1:]
    for k, name in enumerate(head):
        if not name or name in head[:k]:
            raise TaskError("columns have names, each another", where=f"{path}, column {k + 1}", got=repr(name))
    for line, row in body:
        if len(row) != len(head):
            raise TaskError("a row of another length", where=f"{path}:{line}", expected=len(head), got=len(row))
    return head, body


def _column(path: StrPath, name: str, cells: list[tuple[int, str]]) -> np.ndarray:
    """Numbers, float64 [N], or words, [N]. Raises: TaskError for an empty cell, or a word among numbers."""
    for line, cell in cells:
        if cell.lower() in _NOTHING:
            raise TaskError("a value is missing", where=f"{path}:{line}, column {name}", got=repr(cell),
                            fix="fill it in, or take the row out")  # fmt: skip
    numbers = [_number(cell) for _, cell in cells]
    odd = [(line, cell) for (line, cell), value in zip(cells, numbers, strict=True) if value is None]
    if not odd:
        return np.array(numbers, float)
    if 2 * len(odd) < len(cells):  # a slip, not a column of words
        raise TaskError("not a number", where=f"{path}:{odd[0][0]}, column {name}", got=odd[0][1])
    return np.array([cell for _, cell in cells])


def _number(text: str) -> float | None:
    """The number that a text is, or None if it is none that float32 holds."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST else None
