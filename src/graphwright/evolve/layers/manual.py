"""Manual edits of candidates: names for the parts that an edit added, and journal entries to replay the edit."""

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
    from graphwright.evolve.layers.candidate import CandidateBirth
    from graphwright.graph import NodeId
    from graphwright.program import Program, Transaction


def name_parts(e: Transaction, before: Collection[NodeId], named: Callable[[str, set[str]], str]) -> None:
    """Rename the parts `b<number>` that an edit made.

    Args:
        e: the open edit.
        before: nodes that existed before the edit.
        named: chooses the name of a part, given its structure and the names in use.
    """
    p = e.program
    inside = {part: [n for n in p.nodes() if p.path(n).partition(".")[0] == part] for part in sorted(parts(p))}
    made = [part for part, nodes in inside.items() if not any(n in before for n in nodes)]
    taken, given = set(inside) - set(made), dict[str, str]()
    for part in made:
        given[part] = named(_structure(p, part, inside[part]), taken)
        taken.add(given[part])
    changed = [part for part in made if given[part] != part]
    for ending in (":", ""):  # temporary names avoid collisions
        for part in changed:
            for n in inside[part]:
                path = f"{given[part]}{ending}.{p.path(n).partition('.')[2]}"
                e.rename(n, path, key=path if p.op(n) in STORED else None)


def _structure(p: Program, part: str, nodes: list[NodeId]) -> str:
    """Digest the ops of a part with their producers and consumers."""

    def name(n: NodeId) -> str:
        return p.path(n).removeprefix(part)

    lines = [f"{name(n)} {p.op(n)} {[*map(name, p.producers(n))]} {sorted(map(name, p.consumers(n)))}" for n in nodes]
    return blake2b_128("\n".join(sorted(lines)).encode())


def entry(birth: CandidateBirth) -> tuple[Entry, dict[str, Any]]:
    """Make the journal entry of a manual edit, and zeros for the weights that it added."""
    added: dict[str, Any] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if "blake2b" in value and "spec" in value:
                spec = Spec.from_json(value["spec"])
                added[value["blake2b"]] = from_numpy(np.zeros(spec.sizes, spec.dtype.numpy))
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                collect(inner)

    collect(birth.edits)
    facts = {"seq": 0, "time": "", "why": birth.why, "author": birth.author, "tool": None, "line": None,
             "base_version": 0, "edits": birth.edits, "before": "", "after": "", "undoes": None, "redoes": None,
             "warnings": (), "prev": "", "hash": ""}  # fmt: skip
    return Entry.from_json(facts), added
