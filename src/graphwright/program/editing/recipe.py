"""Recipes: edits in a YAML file, or a journal, applied to another program of the same family.

A recipe is a list of steps, or a mapping with the list under `steps`. Each step becomes one journal entry:

    - why: a third of the neurons of the upper layers
      cut_units: {"layers.{2,3}.mlp.neurons": 0-99 200, layers.0.attn.kv_groups: 1}
    - cut: layers.1.mlp.down -> layers.1.out

The whole recipe runs on an abstract fork first: shapes are checked before a weight is read, and if a step does not fit
nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from graphwright.errors import GraphwrightError
from graphwright.program.axes.units import Units, layers, parsed
from graphwright.program.editing.replay import Replayed, conflict_of, replay
from graphwright.program.errors import ProgramFileError, UnknownAxis
from graphwright.program.fork import abstract_fork
from graphwright.program.selection import matches

if TYPE_CHECKING:
    from graphwright.files import StrPath
    from graphwright.program.editing.journal import Entry
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

_LIMIT = 4 << 20
_OPTIONS = ("why", "ragged", "correct")


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One journal entry to make.

    Attributes:
        why: for the journal.
        actions: (name, argument), in order.
        ragged, correct: see `Transaction.cut_units`.
    """

    why: str
    actions: tuple[tuple[str, Any], ...]
    ragged: bool = False
    correct: bool = True


def apply_recipe(path: StrPath, onto: Program) -> Replayed:
    """Apply the edits of a recipe, a `journal.jsonl` or a saved program to another program.

    Args:
        path: `.yaml` or `.yml` is a recipe; anything else is read as a journal.
        onto: the program to edit; unchanged if a step does not fit.
    Raises: ReplayConflict naming the first step that does not fit; ProgramFileError for an unreadable file.
    """
    if Path(path).suffix not in (".yaml", ".yml"):
        return replay(path, onto)
    steps = read_recipe(path)
    _play(steps, abstract_fork(onto))
    return Replayed(tuple(_play(steps, onto)), ())


def read_recipe(path: StrPath) -> list[RecipeStep]:
    """Return the steps of a YAML file. Raises: ProgramFileError naming the file and the malformed step."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ProgramFileError("the recipe file is too large", where=str(path), expected=f"<= {_LIMIT} bytes")
        found = yaml.safe_load(data)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ProgramFileError("cannot read the recipe", where=str(path), got=str(error)) from error
    steps = found.get("steps") if isinstance(found, Mapping) else found
    if not isinstance(steps, list) or not steps:
        raise ProgramFileError(
            "the recipe has no steps", where=str(path), expected="a list of steps", got=type(steps).__name__
        )
    return [_step(step, f"{path}, step {i}") for i, step in enumerate(steps)]


def _step(form: Any, where: str) -> RecipeStep:
    if not isinstance(form, Mapping):
        raise ProgramFileError("malformed step", where=where, expected="a mapping", got=repr(form)[:80])
    known = (*_OPTIONS, *_ACTIONS)
    if unknown := [str(k) for k in form if k not in known]:
        raise ProgramFileError(
            "unknown fields of a step", where=where, got=", ".join(unknown), expected=", ".join(known)
        )
    actions = tuple((name, value) for name, value in form.items() if name in _ACTIONS)
    if not actions:
        raise ProgramFileError("the step has no action", where=where, expected=", ".join(_ACTIONS))
    flags = {name: form[name] for name in ("ragged", "correct") if name in form}
    if any(not isinstance(v, bool) for v in flags.values()):
        raise ProgramFileError("ragged and correct are flags", where=where, expected="true or false", got=flags)
    why = form.get("why") or "; ".join(f"{name} {value}" for name, value in actions)
    return RecipeStep(str(why), actions, **flags)


def _play(steps: Sequence[RecipeStep], p: Program) -> list[Entry]:
    before = len(p.journal)
    for i, step in enumerate(steps):
        at = f"step {i} ({step.why})"
        try:
            with p.edit(step.why, tool="recipe") as e:
                for name, value in step.actions:
                    at = f"step {i} ({step.why}), {name}"
                    for what in value if isinstance(value, list) else [value]:
                        _ACTIONS[name](e, what, step)
                at = f"step {i} ({step.why}), at its end"
        except (GraphwrightError, TypeError, AttributeError, ValueError, KeyError) as error:
            raise conflict_of(error, at) from error
    return list(p.journal[before:])


# -- actions ----------------------------------------------------------------------------------------------------------
def _cut_units(e: Transaction, form: Any, step: RecipeStep) -> None:
    """`form` maps patterns of axes (or lists of layers) to units: a number, a list, or a text such as `0-4 9`."""
    for pattern, units in dict(form).items():
        e.cut_units(_units(e.program, str(pattern), _numbers(units)), ragged=step.ragged, correct=step.correct)


def _units(p: Program, pattern: str, ids: tuple[int, ...]) -> Units:
    lists = {name: len(numbers) for name, numbers in layers(p).items()}
    if pattern in lists:
        return Units(p, {pattern: tuple(range(lists[pattern]))}, {pattern: lists[pattern]})[list(ids)]
    axes = p.axes()
    names = [pattern] if pattern in axes else [name for name in axes if matches(pattern, name)]
    if not names:
        axes[pattern]  # raises UnknownAxis with the nearest names
        raise UnknownAxis("no axis matches this pattern", where=pattern)
    return Units.of(p, [axes[name] for name in names])[list(ids)]


def _numbers(form: Any) -> tuple[int, ...]:
    if isinstance(form, bool) or not isinstance(form, int | str | list):
        raise ValueError(f"units must be a number, a list or a text, not {form!r}")
    if isinstance(form, list):
        return tuple(int(i) for i in form)
    found = parsed(str(form))
    if any(i < 0 for i in found):
        raise ValueError(f"invalid unit numbers: {form!r}")
    return found


def _sides(text: Any, mark: str, form: str) -> tuple[str, str]:
    left, found, right = (part.strip() for part in str(text).rpartition(mark))
    if not (left and found and right):
        raise ValueError(f"{text!r} does not have the form {form!r}")
    return left, right


def _insert(e: Transaction, form: Any, step: RecipeStep) -> None:
    e.insert(*_sides(form, ":", "source -> target : op"))


def _connect(e: Transaction, form: Any, step: RecipeStep) -> None:
    e.connect(*_sides(form, "->", "source -> target"))


def _set(e: Transaction, form: Any, step: RecipeStep) -> None:
    for path, value in dict(form).items():
        node, attr = _sides(path, ".", "node.attr")
        e.set_attr(node, **{attr: tuple(value) if isinstance(value, list) else value})


_ACTIONS: dict[str, Callable[[Transaction, Any, RecipeStep], object]] = {
    "cut_units": _cut_units,
    "cut": lambda e, form, step: e.cut(str(form)),
    "connect": _connect,
    "insert": _insert,
    "set": _set,
    "remove": lambda e, form, step: e.remove(e.program.select(str(form))),
}
"""The actions of a step by name; those of one step run in the order in which they are written."""
