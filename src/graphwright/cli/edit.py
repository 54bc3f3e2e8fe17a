"""`graphwright edit DIR ...`: change a model from the shell; every call is one journal entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graphwright.cli.common import Debug, Json, emit_json, say, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog='Example: graphwright edit bundled --cut "layers.1.mlp.down -> layers.1.out" --out cut')(edit)


@verb
def edit(
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    cut: Annotated[list[str] | None, typer.Option(help='Edge into a junction: "source -> target".')] = None,
    connect: Annotated[list[str] | None, typer.Option(help='New edge into a junction: "source -> target".')] = None,
    insert: Annotated[list[str] | None, typer.Option(help='An op on an edge: "source -> target : op".')] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help='An attribute: "node.attr=value", the value as JSON.')
    ] = None,
    apply: Annotated[Path | None, typer.Option(help="Replay a journal.jsonl of another model.")] = None,
    undo: Annotated[int, typer.Option(min=0, help="Take back this many entries first.")] = 0,
    why: Annotated[str, typer.Option(help="What the journal says.")] = "edit from the shell",
    log: Annotated[bool, typer.Option("--log", help="Print the journal.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Save the model here; without it only a saved model is changed, in place.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Cut, connect, insert, set, replay or undo; prints what changed, version and hashes."""
    from graphwright.errors import UsageError
    from graphwright.models import open, resolve
    from graphwright.models.saved import is_saved

    model = open(directory)
    p = model.program
    saved = is_saved(resolve(directory))
    changes = bool(cut or connect or insert or set_ or apply or undo)
    if changes and out is None and not saved:
        raise UsageError(
            "a Hugging Face directory is never changed", where=directory, fix="--out DIR saves the edited model there"
        )
    before = p.hash()
    if undo:
        p.undo(undo)
    if apply is not None:
        _replay(p, apply)
    if cut or connect or insert or set_:
        with p.edit(why, tool="graphwright edit") as e:
            for text in cut or ():
                e.cut(_edge(p, text))
            for text in connect or ():
                e.connect(*_ends(text))
            for text in insert or ():
                place, _, op = text.rpartition(":")
                e.insert(_edge(p, place), op.strip())
            for text in set_ or ():
                path, _, value = text.partition("=")
                node, _, attr = path.strip().rpartition(".")
                e.set_attr(node, **{attr: _value(value)})
    if changes:
        model.save(out if out is not None else resolve(directory), overwrite=out is None)
    facts = {
        "version": p.version,
        "before": before,
        "after": p.hash(),
        "changed": p.hash() != before,
        "journal": [e.to_json() for e in p.journal] if log else len(p.journal),
        "out": str(out) if out else None,
    }
    if as_json:
        emit_json(facts)
        return
    if changes:
        say(f"version {p.version}, hash {before[:12]} -> {facts['after'][:12]}" + (f", saved to {out}" if out else ""))
    if log or not changes:
        say(repr(p.journal))


def _ends(text: str) -> tuple[str, str]:
    from graphwright.errors import UsageError

    source, arrow, target = text.partition("->")
    if not arrow:
        raise UsageError("an edge is written source -> target", got=text, fix='"layers.1.mlp.down -> layers.1.out"')
    return source.strip(), target.strip()


def _edge(p: Any, text: str) -> Any:
    from graphwright.errors import UsageError

    source, target = _ends(text)
    found = [e for e in p.in_edges(target) if p.graph.source(e) == p.node(source)]
    if len(found) != 1:
        raise UsageError(
            "no such edge" if not found else "several edges",
            where=text,
            expected=", ".join(p.path(n) for n in p.producers(target)),
        )
    return found[0]


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    return tuple(value) if isinstance(value, list) else value


def _replay(p: Any, path: Path) -> None:
    from graphwright.graph import chain
    from graphwright.program import Journal, replay

    replay(Journal(chain.read(path)), p)
