"""Tasks on data: logic, sequences, points in a plane, small data sets of scikit-learn, MNIST and CSV files."""

from __future__ import annotations

import csv as csv_format
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from graphwright.errors import MissingExtra
from graphwright.evolve.errors import TaskError, need
from graphwright.evolve.tasks.task import Task
from graphwright.files import StrPath, UnreadableFile, open_regular


def xor() -> Task:
    """Create the XOR task on two bits; all four cases are used for training, validation and test.

    Fitness is (4 - Σ|error|)². A network solves the task if all four outputs are on the right side of 0.5.
    Source: Stanley and Miikkulainen 2002, section 4.1.
    """
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    return Task(x, _XOR, "bce", fitness_batch=_xor_fitness, split="same", target=1.0, name="xor")


_XOR = np.array([0.0, 1.0, 1.0, 0.0])


def _xor_fitness(answers: np.ndarray) -> np.ndarray:
    return (4.0 - np.abs(answers[..., 0] - _XOR).sum(1)) ** 2


def parity(bits: int = 8, seed: int = 0) -> Task:
    """Create the parity task on all bit strings of a length, read one bit per step; half of them are for training.

    The network needs memory, such as delay links. The metric is the accuracy at the last step.
    """
    need(1 <= bits <= 12, "bits is out of range", where="parity", expected="1 to 12", got=bits)
    x = (np.arange(2**bits)[:, None] >> np.arange(bits)) & 1
    y = np.cumsum(x, 1) % 2
    return Task(x[..., None], y[..., None], "bce", split=(0.5, 0.25, 0.25), target=1.0, name="parity", seed=seed)


def irregular_sine(count: int = 600, steps: int = 20, seed: int = 0) -> Task:
    """Create the task of predicting the next sample of sin(t + phase) at irregular times.

    Inputs [N, steps, 2] are the current sample and the time to the next one, from U(0.05, 1.55). The first 4 steps are
    not scored.
    """
    rng = np.random.default_rng(seed)
    gap = rng.uniform(0.05, 1.55, (count, steps + 1))
    value = np.sin(gap.cumsum(1) + rng.uniform(0, 2 * np.pi, (count, 1)))
    x = np.stack([value[:, :-1], gap[:, 1:]], -1)
    return Task(x, value[:, 1:, None], "mse", target=0.98, names=("value", "pause"), name="irregular-sine", seed=seed,
                skip=4)  # fmt: skip


def event_xor(bits: int = 8, count: int = 1000, seed: int = 0) -> Task:
    """Create the parity task on run-length encoded random bits, scored at the last run of each sequence.

    Inputs [N, bits, 2] are the bit and length of each run. The parity depends on the lengths of all runs of ones.
    """
    need(1 <= bits <= 64, "bits is out of range", where="event_xor", expected="1 to 64", got=bits)
    rng = np.random.default_rng(seed)
    strings = rng.integers(0, 2, (count, bits))
    begins = np.c_[np.ones(count, bool), strings[:, 1:] != strings[:, :-1]]
    run = begins.cumsum(1) - 1
    x = np.zeros((count, bits, 2), np.float32)
    np.put_along_axis(x[..., 0], run, strings.astype(np.float32), 1)
    np.add.at(x[..., 1], (np.arange(count)[:, None], run), 1.0)
    return Task(x, strings.sum(1) % 2, "bce", target=0.95, lengths=run[:, -1] + 1, names=("bit", "length"),
                name="event-xor", seed=seed)  # fmt: skip


def two_moons(count: int = 500, noise: float = 0.2, seed: int = 0) -> Task:
    """Create the task of classifying points of two interlocking half circles, with Gaussian noise."""
    rng = np.random.default_rng(seed)
    half = count // 2
    a, b = np.linspace(0, np.pi, half), np.linspace(0, np.pi, count - half)
    points = np.concatenate([np.c_[np.cos(a), np.sin(a)], np.c_[1 - np.cos(b), 0.5 - np.sin(b)]])
    points += rng.normal(size=points.shape) * noise
    return Task(points, np.r_[np.zeros(half), np.ones(count - half)], "bce", target=0.97, name="two-moons", seed=seed)


def blobs(classes: int = 3, count: int = 150, seed: int = 0) -> Task:
    """Create the task of classifying points of Gaussian clouds whose centres are on a circle, one cloud per class."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    angle = 2 * np.pi * y / classes
    x = np.c_[np.cos(angle), np.sin(angle)] + 0.3 * rng.normal(size=(count, 2))
    return Task(x, y, "cross_entropy", target=0.95, name="blobs", seed=seed)


def iris(seed: int = 0) -> Task:
    """Create the task of classifying 150 irises by four standardised measurements. Needs the extra `evolve`."""
    x, y, names = _sklearn("load_iris")
    return Task(x, y, "cross_entropy", target=0.97, names=names, name="iris", seed=seed, scaled=True)


def digits(seed: int = 0) -> Task:
    """Create the task of classifying 1797 images of digits with 8 x 8 pixels. Needs the extra `evolve`."""
    x, y, names = _sklearn("load_digits")
    return Task(x / 16.0, y, "cross_entropy", target=0.98, names=names, name="digits", seed=seed)


def mnist(directory: StrPath, limit: int | None = None, seed: int = 0) -> Task:
    """Create the MNIST task from the four IDX files in a directory, which may be gzipped.

    The training file is split 5 to 1 into training and validation cases; the test file contains the test cases.
    `limit` is the largest number of cases that are read per file.
    Raises: data.CorruptIdx if a file is damaged; TaskError with the path of a missing file.
    """
    from graphwright.data import read_idx

    folder, arrays = Path(directory), []
    for stem in (f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")):
        found = [p for name in (stem, f"{stem}.gz", stem.replace("-idx", ".idx")) if (p := folder / name).is_file()]
        need(found, "a file of the data set is missing", where=folder / stem, fix="download it; .gz is read too")
        arrays.append(read_idx(found[0])[:limit])
    x, y, tx, ty = arrays
    x, tx = (part.reshape(len(part), -1).astype(np.float32) / 255.0 for part in (x, tx))
    task = Task(x, y, "cross_entropy", split=(0.75, 0.15, 0.1), target=0.98, name="mnist", seed=seed)
    rows = np.random.default_rng(seed).permutation(len(x))
    whole = Task(np.concatenate([x, tx]), np.concatenate([y, ty]), "cross_entropy", split="same").train
    cut = max(1, len(x) // 6)
    task.train, task.valid = whole.take(rows[cut:]), whole.take(rows[:cut])
    task._test = whole.take(np.arange(len(x), len(x) + len(tx)))
    return task


def _sklearn(loader: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError:
        raise MissingExtra("evolve", f"the data of {loader}") from None
    data = getattr(datasets, loader)()
    return data.data, data.target, tuple(map(str, data.feature_names))


WORDS = 20  # maximum number of different words in a column
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = ("", "na", "n/a", "nan", "null", "none", "?")


def csv(path: StrPath, target: str, seed: int = 0) -> Task:
    """Create a task from a CSV file with a header: the column `target` is predicted from all other columns.

    Values are separated by commas, semicolons or tabs. A column of numbers becomes one input, standardised by the
    training cases; a column of words becomes one input of 0 or 1 per word. A target of words, or of at most 10
    different integers, is a class; any other target is standardised. `meaning` of the task describes the outputs.
    Raises: TaskError with the column, or line and column, that is invalid; UnreadableFile if the file cannot be read.
    """
    head, body = _cells(path)
    need(target in head, "the file has no such column", where=path, got=target, expected=", ".join(head))
    columns = {name: _column(path, name, [(line, row[j]) for line, row in body]) for j, name in enumerate(head)}
    wanted = columns.pop(target)
    need(columns, "the target is the only column of the file", where=path, got=target)
    kinds, classes = np.unique(wanted, return_inverse=True)
    one = f"{path}, column {target}"
    need(len(kinds) > 1, "the target is the same in all rows", where=one, got=str(kinds[0]))
    inputs: list[tuple[str, np.ndarray, bool]] = []  # name, values, whether to standardise
    for name, column in columns.items():
        if column.dtype.kind != "U":
            inputs.append((name, column, True))
            continue
        words = sorted(set(column.tolist()))
        need(len(words) <= WORDS, "a column has too many different words", where=f"{path}, column {name}",
             got=len(words), expected=f"at most {WORDS}", fix="remove the column, or encode it as numbers")  # fmt: skip
        inputs += [(f"{name}={word}", column == word, False) for word in words]
    names, values, scaled = zip(*inputs, strict=True)
    x = np.array(values, float).T
    options = {"names": names, "name": Path(path).stem, "seed": seed, "scaled": np.array(scaled)}
    if wanted.dtype.kind == "U" or (len(kinds) <= 10 and np.equal(kinds, np.round(kinds)).all()):
        meaning = {target: [str(kind) if wanted.dtype.kind == "U" else int(kind) for kind in kinds]}
        return Task(x, classes, "bce" if len(kinds) == 2 else "cross_entropy", meaning=meaning, **options)
    mean, std = float(wanted.mean()), float(wanted.std())
    return Task(x, (wanted - mean) / std, "mse", meaning={target: {"mean": mean, "std": std}}, **options)


def _cells(path: StrPath) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and (line number, cells) for each row that is not empty."""
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = csv_format.reader(file, delimiter=max(",;\t", key=first.count))
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise TaskError("the file is not UTF-8 text", where=path, got=str(error), fix="save it as UTF-8") from None
    except csv_format.Error as error:
        raise TaskError("the file is not valid CSV", where=path, got=str(error)) from None
    except OSError as error:
        raise UnreadableFile("cannot read the file", where=path, cause=error) from error
    need(len(rows) > 1, "the file has no rows below the header", where=path, expected="a header and lines of values")
    (_, head), body = rows[0], rows[1:]
    for k, name in enumerate(head):
        need(name, "a column has no name", where=f"{path}, column {k + 1}")
        need(name not in head[:k], "two columns have the same name", where=f"{path}, column {k + 1}", got=name)
    for line, row in body:
        need(len(row) == len(head), "a row does not have as many cells as the header", where=f"{path}:{line}",
             expected=len(head), got=len(row))  # fmt: skip
    return head, body


def _column(path: StrPath, name: str, cells: list[tuple[int, str]]) -> np.ndarray:
    """Convert a column to numbers, float64 [N], or to words, [N].

    Raises: TaskError if a cell is empty, or if fewer than half of the cells are not numbers.
    """
    for line, cell in cells:
        if cell.lower() in _NOTHING:
            raise TaskError("a value is missing", where=f"{path}:{line}, column {name}", got=repr(cell),
                            fix="fill it in, or remove the row")  # fmt: skip
    numbers = [_number(cell) for _, cell in cells]
    odd = [(line, cell) for (line, cell), value in zip(cells, numbers, strict=True) if value is None]
    if not odd:
        return np.array(numbers, float)
    if 2 * len(odd) < len(cells):  # probably typos, not a column of words
        raise TaskError("a cell is not a number", where=f"{path}:{odd[0][0]}, column {name}", got=odd[0][1])
    return np.array([cell for _, cell in cells])


def _number(text: str) -> float | None:
    """Return the number that a cell contains, or None if the cell is not a number or exceeds float32."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST else None
