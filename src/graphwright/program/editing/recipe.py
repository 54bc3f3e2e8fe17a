"""Recipes: edits written down by a person, or a journal, made again on another program of the family.

A recipe is YAML: a list of steps, or a mapping with the list under `steps`. Each step is one entry of the journal:

    - why: a third of the neurons of the upper layers
      cut_units: {"layers.{2,3}.mlp.neurons": 0-99 200, layers.0.attn.kv_groups: 1}
    - cut: layers.1.mlp.down -> layers.1.out

The whole recipe is tried on a hollow program first: shapes are checked before a weight is read, and nothing is changed
if a step does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from graphwright.errors import GraphwrightError
from graphwright.program.axes.units import Units, layers, parsed
from graphwright.program.editing.replay import Replayed, replay
from graphwright.program.errors import ProgramFileError, ReplayConflict, UnknownAxis
from graphwright.program.fork import hollow
from graphwright.program.selection import matches

if TYPE_CHECKING:
    from graphwright.files import StrPath
    from graphwright.program.editing.journal import Entry
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

_LIMIT = 4 << 20
_OPTIONS = ("why", "ragged", "correct")


@dataclass(frozen=True, slots=True)
class Step:
    """One entry to be made.

    Attributes:
        why: for the journal.
        verbs: (verb, what it is told), in order.
        ragged, correct: see `Transaction.cut_units`.
    """

    why: str
    verbs: tuple[tuple[str, Any], ...]
    ragged: bool = False
    correct: bool = True


def apply_recipe(path: StrPath, onto: Program) -> Replayed:
    """Make the edits of a recipe, or of a `journal.jsonl` or saved program, on another program.

    Args:
        path: `.yaml` or `.yml` is a recipe; anything else is read as a journal.
        onto: the program; as it was if a step does not fit.
    Raises: ReplayConflict naming the first step that does not fit; ProgramFileError for a file that cannot be read.
    """
    if Path(path).suffix not in (".yaml", ".yml"):
        return replay(path, onto)
    steps = read_recipe(path)
    _play(steps, hollow(onto))
    return Replayed(tuple(_play(steps, onto)), ())


def read_recipe(path: StrPath) -> list[Step]:
    """The steps of a YAML file. Raises: ProgramFileError naming the file, and the step that is no step."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ProgramFileError("a recipe of this size is none", where=str(path), expected=f"<= {_LIMIT} bytes")
        found = yaml.safe_load(data)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ProgramFileError("cannot read this recipe", where=str(path), got=str(error)) from error
    steps = found.get("steps") if isinstance(found, Mapping) else found
    if not isinstance(steps, list) or not steps:
        raise ProgramFileError("a recipe is a list of steps", where=str(path), got=type(steps).__name__)
    return [_step(step, f"{path}, step {i}") for i, step in enumerate(steps)]


def _step(form: Any, where: str) -> Step:
    if not isinstance(form, Mapping):
        raise ProgramFileError("a step is a mapping", where=where, got=repr(form)[:80])
    known = (*_OPTIONS, *_VERBS)
    if unknown := [str(k) for k in form if k not in known]:
        raise ProgramFileError("not in a recipe", where=where, got=", ".join(unknown), expected=", ".join(known))
    verbs = tuple((name, value) for name, value in form.items() if name in _VERBS)
    if not verbs:
        raise ProgramFileError("the step does nothing", where=where, expected=", ".join(_VERBS))
    flags = {name: form[name] for name in ("ragged", "correct") if name in form}
    if any(not isinstance(v, bool) for v in flags.values()):
        raise ProgramFileError("true or false is wanted", where=where, got=flags)
    why = form.get("why") or "; ".join(f"{name} {value}" for name, value in verbs)
    return Step(str(why), verbs, **flags)


def _play(steps: Sequence[Step], p: Program) -> list[Entry]:
    before = len(p.journal)
    for i, step in enumerate(steps):
        at = f"step {i} ({step.why})"
        try:
            with p.edit(step.why, tool="recipe") as e:
                for name, value in step.verbs:
                    at = f"step {i} ({step.why}), {name}"
                    for what in value if isinstance(value, list) else [value]:
                        _VERBS[name](e, what, step)
                at = f"step {i} ({step.why}), at its end"
        except (GraphwrightError, TypeError, AttributeError, ValueError, KeyError) as error:
            what = error.what if isinstance(error, GraphwrightError) else f"cannot be read: {error}"
            facts = (error.where, error.got) if isinstance(error, GraphwrightError) else ()
            got = ": ".join(str(fact) for fact in facts if fact is not None) or None
            fix = error.fix if isinstance(error, GraphwrightError) else None
            raise ReplayConflict(f"does not fit: {what}", where=at, got=got, fix=fix) from error
    return list(p.journal[before:])


# -- verbs -------------------------------------------------------------------------------------------------------------
def _cut_units(e: Transaction, form: Any, step: Step) -> None:
    """Axes (or lists of layers) by pattern -> places: a number, a list, or a text such as `0-4 9`."""
    for pattern, places in dict(form).items():
        e.cut_units(_units(e.program, str(pattern), _numbers(places)), ragged=step.ragged, correct=step.correct)


def _units(p: Program, pattern: str, places: tuple[int, ...]) -> Units:
    lists = {name: len(numbers) for name, numbers in layers(p).items()}
    if pattern in lists:
        return Units(p, {pattern: tuple(range(lists[pattern]))}, {pattern: lists[pattern]})[list(places)]
    axes = p.axes()
    names = [pattern] if pattern in axes else [name for name in axes if matches(pattern, name)]
    if not names:
        axes[pattern]  # raises UnknownAxis with the nearest names
        raise UnknownAxis("no axis of this name", where=pattern)
    return Units.of(p, [axes[name] for name in names])[list(places)]


def _numbers(form: Any) -> tuple[int, ...]:
    if isinstance(form, bool) or not isinstance(form, int | str | list):
        raise ValueError(f"places are a number, a list or a text, not {form!r}")
    if isinstance(form, list):
        return tuple(int(i) for i in form)
    found = parsed(str(form))
    if any(i < 0 for i in found):
        raise ValueError(f"not places along an axis: {form!r}")
    return found


def _sides(text: Any, mark: str, form: str) -> tuple[str, str]:
    left, found, right = (part.strip() for part in str(text).rpartition(mark))
    if not (left and found and right):
        raise ValueError(f"{text!r} is not {form!r}")
    return left, right


def _insert(e: Transaction, form: Any, step: Step) -> None:
    e.insert(*_sides(form, ":", "source -> target : op"))


def _connect(e: Transaction, form: Any, step: Step) -> None:
    e.connect(*_sides(form, "->", "source -> target"))


def _set(e: Transaction, form: Any, step: Step) -> None:
    for path, value in dict(form).items():
        node, attr = _sides(path, ".", "node.attr")
        e.set_attr(node, **{attr: tuple(value) if isinstance(value, list) else value})


_VERBS: dict[str, Callable[[Transaction, Any, Step], object]] = {
    "cut_units": _cut_units,
    "cut": lambda e, form, step: e.cut(str(form)),
    "connect": _connect,
    "insert": _insert,
    "set": _set,
    "remove": lambda e, form, step: e.remove(e.program.select(str(form))),
}
"""What a step may say; several in one step are made in the order in which they stand."""
