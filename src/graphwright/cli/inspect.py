"""`graphwright inspect DIR`: describe a model from headers alone, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphwright.cli.common import Debug, Dir, Json, command, emit_json, say


@command("graphwright inspect bundled --depth 2")
def inspect(
    directory: Dir,
    depth: Annotated[int, typer.Option(metavar="N", min=1, help="Levels of the tree.")] = 3,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Describe a model from its headers: modules, bytes, FLOPs.

    Reads no weights. FLOPs and KV bytes are per token.
    """
    from graphwright.models import UnsupportedArchitecture, open, resolve

    try:
        model = open(directory)
    except UnsupportedArchitecture as error:
        _unknown(resolve(directory), error, as_json)
        return
    facts = model.inspect()
    if as_json:
        emit_json({**facts.to_json(), "notes": list(model.notes)})
        return
    say(facts.text(depth))
    for note in model.notes:
        say(f"note: {note}")
    if tensors:
        say()
        for row in facts.tensors:
            say(f"{row.key:<56} {row.dtype:<9} {row.shape!s:<16} {row.bytes:>12,} B")


def _unknown(path: Path, error: Any, as_json: bool) -> None:
    """Describe a model of an unsupported architecture: its tensors, grouped by path."""
    from graphwright.safetensors import Checkpoint

    with Checkpoint(path) as checkpoint:
        rows = [{"key": i.key, "dtype": i.tag, "shape": list(i.shape), "bytes": i.nbytes} for i in checkpoint.infos()]
    if as_json:
        emit_json({"family": None, "note": error.what, "tensors": rows})
        return
    say(f"{error.what}: {error.got}\n  try      {error.fix}")
    say(f"{len(rows)} tensors, {sum(row['bytes'] for row in rows):,} B")
    groups: dict[str, list[int]] = {}
    for row in rows:
        count = groups.setdefault(".".join(row["key"].split(".")[:3]), [0, 0])
        count[0] += 1
        count[1] += row["bytes"]
    for name, (count, size) in groups.items():
        say(f"  {name:<48} {count:>5} tensor{'s' if count > 1 else ' '} {size:>14,} B")
