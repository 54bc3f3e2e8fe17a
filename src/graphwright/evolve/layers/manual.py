"""A member edited by hand: its parts get names as the run deals them, and its edit is kept to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Spec, from_numpy
from graphwright.evolve.mutations.registry import parts
from graphwright.files import blake2b_128
from graphwright.program.editing.journal import Entry
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.evolve.layers.member import Birth
    from graphwright.graph import NodeId
    from graphwright.program import Program, Transaction


def name_parts(e: Transaction, before: Collection[NodeId], named: Callable[[str, set[str]], str]) -> None:
    """Rename the parts `b<number>` that an edit made.

    Args:
        before: nodes that were there before the edit.
        named: the name of a part by its structure and by the names that are taken.
    """
    p = e.program
    inside = {part: [n for n in p.nodes() if p.path(n).partition(".")[0] == part] for part in sorted(parts(p))}
    made = [part for part, nodes in inside.items() if not any(n in before for n in nodes)]
    taken, given = set(inside) - set(made), dict[str, str]()
    for part in made:
        given[part] = named(_structure(p, part, inside[part]), taken)
        taken.add(given[part])
    changed = [part for part in made if given[part] != part]
    for ending in (":", ""):  # by way of names that nobody has
        for part in changed:
            for n in inside[part]:
                path = f"{given[part]}{ending}.{p.path(n).partition('.')[2]}"
                e.rename(n, path, key=path if p.op(n) in STORED else None)


def _structure(p: Program, part: str, nodes: list[NodeId]) -> str:
    """A digest of the ops of a part, of what they read and of who reads them."""

    def said(n: NodeId) -> str:
        return p.path(n).removeprefix(part)

    lines = [f"{said(n)} {p.op(n)} {[*map(said, p.producers(n))]} {sorted(map(said, p.consumers(n)))}" for n in nodes]
    return blake2b_128("\n".join(sorted(lines)).encode())


def entry(birth: Birth) -> tuple[Entry, dict[str, Any]]:
    """The edit by which somebody came to be, as a line of a journal, and zeros for the weights that it brings."""
    brought: dict[str, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "blake2b" in value and "spec" in value:
                spec = Spec.from_json(value["spec"])
                brought[value["blake2b"]] = from_numpy(np.zeros(spec.sizes, spec.dtype.numpy))
            for inner in value.values():
                look(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                look(inner)

    look(birth.edits)
    facts = {"seq": 0, "time": "", "why": birth.why, "author": birth.author, "tool": None, "line": None,
             "base_version": 0, "edits": birth.edits, "before": "", "after": "", "undoes": None, "redoes": None,
             "warnings": (), "prev": "", "hash": ""}  # fmt: skip
    return Entry.from_json(facts), brought
