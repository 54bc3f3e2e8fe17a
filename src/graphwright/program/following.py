"""Who keeps something per node learns which nodes changed since it last looked."""

from __future__ import annotations

from weakref import ref

from graphwright.graph import NodeId


class Changed(set[NodeId]):
    """Nodes that were put in, taken out, changed, rewired or moved in the order since this was last cleared."""


class Followers:
    """The sets to enter changes into; one that nobody holds any more is left out."""

    def __init__(self) -> None:
        self._sets: list[ref[Changed]] = []

    def follow(self) -> Changed:
        """A new set."""
        made = Changed()
        self._sets = [r for r in self._sets if r() is not None] + [ref(made)]
        return made

    def note(self, node: NodeId) -> None:
        """Enter a change."""
        for known in self._sets:
            found = known()
            if found is not None:
                found.add(node)
