"""`graphwright edit DIR ...`: edit a model from the shell; every call is one journal entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graphwright.cli.common import Debug, Dir, Json, Overwrite, command, emit_json, say


@command('graphwright edit bundled --cut "layers.1.mlp.down -> layers.1.out" --out cut')
def edit(
    directory: Dir,
    target: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Directory for the model, as --out.", show_default=False)
    ] = None,
    cut: Annotated[
        list[str] | None, typer.Option(metavar="EDGE", help='Edge into a junction: "source -> target".')
    ] = None,
    connect: Annotated[
        list[str] | None, typer.Option(metavar="EDGE", help='New edge into a junction: "source -> target".')
    ] = None,
    insert: Annotated[
        list[str] | None, typer.Option(metavar="EDGE:OP", help='Insert an op on an edge: "source -> target : op".')
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="ATTR", help='Set an attribute: "node.attr=value", the value as JSON.'),
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Apply the edits of a recipe.yaml or journal.jsonl.")
    ] = None,
    undo: Annotated[int, typer.Option(metavar="N", min=0, help="Undo this many journal entries first.")] = 0,
    why: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Reason for the journal; by default the edits.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Print the journal.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save the model here; without it a saved model is changed in place."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Cut, connect, insert, set, replay, undo; or the journal.

    The edits of one call are one journal entry. Prints version and hashes.
    """
    from graphwright.errors import UsageError
    from graphwright.models import open, resolve
    from graphwright.models.open import is_saved
    from graphwright.program import apply_recipe

    if None not in (target, out) and target != out:
        raise UsageError("OUT and --out differ", got=f"{target} and --out {out}", fix="give one of them")
    out = out or target
    model = open(directory)
    p = model.program
    saved = is_saved(resolve(directory))
    changes = bool(cut or connect or insert or set_ or apply or undo)
    if changes and out is None and not saved:
        raise UsageError(
            "a Hugging Face directory is never changed in place", where=directory, fix="save elsewhere with --out DIR"
        )
    before, entries = p.hash(), len(p.journal)
    if undo:
        p.undo(undo)
    if apply is not None:
        apply_recipe(apply, p)
    asked = {"cut": cut, "connect": connect, "insert": insert, "set": set_}
    if any(asked.values()):
        summary = "; ".join(f"{kind} {text}" for kind, texts in asked.items() for text in texts or ())
        with p.edit(why or summary, tool="graphwright edit") as e:
            for text in cut or ():
                e.cut(text)
            for text in connect or ():
                e.connect(*_sides(text.partition("->"), "source -> target"))
            for text in insert or ():
                e.insert(*_sides(text.rpartition(":"), "source -> target : op"))
            for text in set_ or ():
                path, value = _sides(text.partition("="), "node.attr=value")
                node, attr = _sides(path.rpartition("."), "node.attr=value")
                e.set_attr(node, **{attr: _value(value)})
    saved_to = out if out is not None else resolve(directory)
    if changes:
        model.save(saved_to, overwrite=out is None or overwrite)
    facts = {
        "version": p.version,
        "before": before,
        "after": p.hash(),
        "changed": p.hash() != before,
        "journal": [e.to_json() for e in p.journal] if log else len(p.journal),
        "warnings": [warning for e in p.journal[entries:] for warning in e.warnings],
        "out": str(out) if out else None,
    }
    if as_json:
        emit_json(facts)
        return
    if changes:
        say(f"version {p.version}, hash {before[:12]} -> {facts['after'][:12]}" + f", saved to {saved_to}")
    for warning in facts["warnings"]:
        say(f"warning  {warning}")
    if log or not changes:
        say(repr(p.journal))


def _sides(parts: tuple[str, str, str], form: str) -> tuple[str, str]:
    """Strip both sides of a separator. Raises: UsageError if one is empty."""
    from graphwright.errors import UsageError

    left, _, right = (part.strip() for part in parts)
    if not (left and right):
        raise UsageError("an edit has the wrong form", expected=f'"{form}"', got="".join(parts))
    return left, right


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return tuple(value) if isinstance(value, list) else value
