"""The graph of a program: read like any `Graph`, changed only by edits, so that each change has a journal entry.

`primitives.py` and `tombstones.py` call the methods of `Graph` for it, as `Graph.add_node(p.graph, ...)`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

from graphwright.errors import UsageError
from graphwright.graph import Graph

_CHANGES = (
    "add_node", "add_edge", "remove_edge", "remove_node", "rewire_edge", "restore_edge", "restore_node",
    "restore_rewire", "set_node", "set_edge", "add_nodes", "add_edges", "remove_nodes", "remove_edges", "rewire_edges",
    "restore_nodes", "restore_edges", "restore_rewires", "restore_lists", "sort_lists", "clear",
)  # fmt: skip
"""The methods of `Graph` that change it."""


def _refuse(what: str) -> NoReturn:
    raise UsageError("the graph of a program is changed by edits only, so that they can be undone", where=what,
                     expected="a verb of an edit: connect, cut, insert, remove, set_attr, ...",
                     got="a direct change of program.graph",
                     fix="with program.edit('why') as e: ...; or edit program.graph.copy()")  # fmt: skip


def _refusal(name: str) -> Any:
    def refused(self: ProgramGraph, /, *args: Any, **columns: Any) -> NoReturn:
        _refuse(f"program.graph.{name}")

    refused.__name__, refused.__doc__ = name, "Raise UsageError: a program is changed by its edits."
    return refused


class ProgramGraph(Graph):
    """The graph of a program. Methods that would change it raise UsageError; `copy` returns a graph that can change."""

    def writing(self) -> AbstractContextManager[None]:
        """Raise UsageError: columns are written by edits."""
        _refuse("program.graph")

    def copy(self) -> Graph:
        """Return an independent copy as a plain `Graph`."""
        return Graph.copy(self, Graph)


for _name in _CHANGES:
    setattr(ProgramGraph, _name, _refusal(_name))
