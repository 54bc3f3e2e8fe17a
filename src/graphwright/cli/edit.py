"""`graphwright edit DIR ...`: edit a model from the shell; every call is one journal entry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphwright.cli.common import Command, Dir, Output, Overwrite, argument, flag, option
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


@Command('graphwright edit bundled --cut "layers.1.mlp.down -> layers.1.out" --out cut')
def edit(
    directory: Dir,
    target: Annotated[Path | None, argument("OUT", "Directory for the model, as --out.")] = None,
    cut: Annotated[list[str] | None, option("EDGE", 'Edge "source -> target", or units "axis: 0-4 9".')] = None,
    connect: Annotated[list[str] | None, option("EDGE", 'New edge into a junction: "source -> target".')] = None,
    insert: Annotated[list[str] | None, option("EDGE:OP", 'Insert an op on an edge: "source -> target : op".')] = None,
    set_: Annotated[list[str] | None, option("ATTR", 'Set "node.attr=value", the value as JSON.', "--set")] = None,
    duplicate: Annotated[list[str] | None, option("MODULE", "Repeat a module, such as a block layers.3.")] = None,
    resize_vocab: Annotated[int | None, option("N", "Change the number of token ids of a model.", min=1)] = None,
    apply: Annotated[Path | None, option("FILE", "Apply the edits of a recipe.yaml or journal.jsonl.")] = None,
    undo: Annotated[int, option("N", "Undo this many journal entries first.", min=0)] = 0,
    why: Annotated[str | None, option("TEXT", "Reason for the journal; by default the edits.")] = None,
    log: Annotated[bool, flag("--log", "Print the journal.")] = False,
    out: Annotated[Path | None, option("DIR", "Save the model here; else a saved model changes in place.")] = None,
    overwrite: Overwrite = False,
) -> Output:
    """Edit a model or program: cut, connect, insert, set, duplicate, replay or undo.

    The edits of one call are one journal entry; a call without edits prints the journal. Prints the version and the
    hashes before and after.
    """
    from graphwright.models import Model, resolve
    from graphwright.models.open import is_saved, open_any
    from graphwright.program import apply_recipe

    if None not in (target, out) and target != out:
        raise UsageError("OUT and --out differ", got=f"{target} and --out {out}", fix="give one of them")
    out = out or target
    model = open_any(directory)
    p = model.program if isinstance(model, Model) else model
    if resize_vocab is not None and not isinstance(model, Model):
        raise UsageError("this program is not a language model", where="--resize-vocab", fix="leave the option out")
    changes = bool(cut or connect or insert or set_ or duplicate or resize_vocab or apply or undo)
    if changes and out is None and not is_saved(resolve(directory)):
        expected = "a saved model or program"
        raise UsageError(
            "cannot change this directory in place", where=directory, expected=expected, fix="give --out DIR"
        )
    before, entries = p.hash(), len(p.journal)
    if undo:
        p.undo(undo)
    if apply is not None:
        apply_recipe(apply, p)
    asked: dict[str, Sequence[str]] = {
        "cut": cut or (), "connect": connect or (), "insert": insert or (), "set": set_ or (),
        "duplicate": duplicate or (), "resize-vocab": () if resize_vocab is None else (str(resize_vocab),),
    }  # fmt: skip
    if any(asked.values()):
        summary = "; ".join(f"{kind} {text}" for kind, texts in asked.items() for text in texts)
        with p.edit(why or summary, tool="graphwright edit") as e:
            for text in asked["cut"]:
                if "->" in text or ":" not in text:
                    e.cut(text)
                else:
                    _cut_units(e, *_sides(text.rpartition(":"), "axis: 0-4 9"))
            for text in asked["connect"]:
                e.connect(*_sides(text.partition("->"), "source -> target"))
            for text in asked["insert"]:
                e.insert(*_sides(text.rpartition(":"), "source -> target : op"))
            for text in asked["set"]:
                path, value = _sides(text.partition("="), "node.attr=value")
                node, attr = _sides(path.rpartition("."), "node.attr=value")
                e.set_attr(node, **{attr: _value(value)})
            for text in asked["duplicate"]:
                e.duplicate(text)
            if resize_vocab is not None and isinstance(model, Model):
                model.resize_vocab(resize_vocab)
    saved_to, after = resolve(directory) if out is None else out, p.hash()
    warned = [warning for e in p.journal[entries:] for warning in e.warnings]
    lines = [f"warning  {warning}" for warning in warned]
    if changes:
        model.save(saved_to, overwrite=out is None or overwrite)
        lines.insert(0, f"version {p.version}, hash {before[:12]} -> {after[:12]}, saved to {saved_to}")
    if log or not changes:
        lines.append(repr(p.journal))
    facts = {
        "version": p.version,
        "before": before,
        "after": after,
        "changed": after != before,
        "journal": [e.to_json() for e in p.journal] if log else len(p.journal),
        "warnings": warned,
        "out": str(out) if out else None,
    }
    return Output(facts, "\n".join(lines))


def _sides(parts: tuple[str, str, str], form: str) -> tuple[str, str]:
    """Return the stripped texts on both sides of a separator. Raises: UsageError if one is empty."""
    left, _, right = (part.strip() for part in parts)
    if not (left and right):
        raise UsageError("cannot parse an edit", expected=f'"{form}"', got="".join(parts))
    return left, right


def _cut_units(e: Transaction, axis: str, units: str) -> None:
    """Cut units of the axes that match a pattern. Raises: UsageError for units in another form."""
    from graphwright.program.editing.replay import units_named

    try:
        e.cut_units(units_named(e.program, axis, units))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError("cannot parse units", where=axis, expected="such as 0-4 9", got=units) from error


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return tuple(value) if isinstance(value, list) else value
