"""Units: heads, neurons, channels or experts of some axes, as a value that is counted and shown before it is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.program.errors import ForeignNode, UnitRange
from graphwright.program.selection import CountMismatch, EmptySelection, Selection

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True, repr=False)
class Units:
    """Units of some axes, by the name of the axis; or layers, by the path of their list.

    Attributes:
        program: whose.
        chosen: axis -> unit numbers, rising.
        sizes: axis -> how many units it has.
    """

    program: Program
    chosen: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]

    @staticmethod
    def of(p: Program, groups: Iterable[AxisGroup]) -> Units:
        """All units of some groups."""
        sizes = {group.name: group.size for group in groups}
        return Units(p, {name: tuple(range(n)) for name, n in sizes.items()}, sizes)

    @staticmethod
    def within(selection: Selection, kind: str) -> Units:
        """Units of one kind that a selection makes: its weights have a dimension of the axis that is not summed over.

        Where a selection makes none, those that it reads.
        """
        selection.names()  # raises StaleSelection
        p, inside = selection.program, set(selection.nodes)
        found = [g for g in p.axes().values() if kind in g.kinds]
        weights = {g.name: [m for m in g.members if m.key is not None and m.value.node in inside] for g in found}
        summed = p.axes().summed
        made = [g for g in found
                if any(not summed.get((m.value.node, m.dim, a)) for m in weights[g.name] for a in g.atoms)]  # fmt: skip
        return Units.of(p, made or [g for g in found if weights[g.name]])

    # -- looking -----------------------------------------------------------------------------------------------------
    @property
    def count(self) -> int:
        """Number of units, over all axes."""
        return sum(map(len, self.chosen.values()))

    def names(self) -> list[str]:
        """`axis[unit]` each."""
        return [f"{name}[{i}]" for name, ids in self.chosen.items() for i in ids]

    def show(self) -> Units:
        """Print a line per axis: its name, how many of its units, and which. Returns itself."""
        print(self)  # the one method whose job is to print
        return self

    def assert_count(self, n: int) -> Units:
        """Itself, if it has `n` units. Raises: CountMismatch."""
        if self.count != n:
            raise CountMismatch("other units are chosen", expected=n, got=f"{self.count}: {self.names()[:10]}")
        return self

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, i) for name, ids in self.chosen.items() for i in ids)

    def __str__(self) -> str:
        width = max(map(len, self.chosen), default=0)
        lines = [
            f"{name:<{width}}  {len(ids):>6} of {self.sizes[name]:<6} {runs(ids)[:60]}"
            for name, ids in list(self.chosen.items())[:39]
        ]
        if len(self.chosen) > 39:
            lines.append(f"... {len(self.chosen) - 39} more axes")
        return "\n".join(lines) or "(no units)"

    def __repr__(self) -> str:
        few = ", ".join(list(self.chosen)[:3]) + (", ..." if len(self.chosen) > 3 else "")
        return f"Units({self.count} of {self.program.name!r}{': ' + few if few else ''})"

    # -- choosing ----------------------------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Units:
        """Of each axis the units of these numbers, among those chosen: an int, several, a slice, or a mask.

        Raises: UnitRange.
        """
        chosen = {name: tuple(ids[i] for i in numbers(index, len(ids), name)) for name, ids in self.chosen.items()}
        return Units(self.program, chosen, self.sizes)

    def __or__(self, other: Units) -> Units:
        return self._with(other, lambda a, b: a | b)

    def __and__(self, other: Units) -> Units:
        return self._with(other, lambda a, b: a & b)

    def __sub__(self, other: Units) -> Units:
        return self._with(other, lambda a, b: a - b)

    def __invert__(self) -> Units:
        """The other units of the same axes."""
        whole = {name: tuple(range(n)) for name, n in self.sizes.items()}
        return Units(self.program, whole, self.sizes) - self

    def _with(self, other: Units, combine: Any) -> Units:
        if not isinstance(other, Units) or other.program is not self.program:
            raise ForeignNode("units of one program combine", expected=repr(self), got=repr(other)[:120])
        sizes = {**self.sizes, **other.sizes}
        chosen = {n: combine(set(self.chosen.get(n, ())), set(other.chosen.get(n, ()))) for n in sizes}
        return Units(self.program, {n: tuple(sorted(ids)) for n, ids in chosen.items()}, sizes)

    # -- verbs -------------------------------------------------------------------------------------------------------
    def edit(self, why: str, *, allow_empty: bool = False) -> Transaction:
        """Open an edit on the program. Raises: EmptySelection if no unit is chosen."""
        self.needed(allow_empty)
        return self.program.edit(why)

    def prune(
        self,
        *,
        keep: Any = None,
        drop: Any = None,
        why: str | None = None,
        ragged: bool = False,
        allow_empty: bool = False,
    ) -> Units:
        """Cut units, as one edit; returns what was cut.

        Args:
            keep: numbers, among the chosen ones, of the units that stay.
            drop: numbers of those that go; without both, all chosen units go.
            why: what the journal says.
            ragged: see `Transaction.cut_units`.
            allow_empty: nothing to cut is no error.
        Raises: EmptySelection, UsageError for `keep` beside `drop`, and what `cut_units` raises.
        """
        if keep is not None and drop is not None:
            raise UsageError("units are kept or dropped", got="keep and drop", fix="name one of them")
        gone = self if drop is None else self[drop]
        if keep is not None:
            gone = self - self[keep]
        gone.needed(allow_empty)
        if gone.count:
            with self.program.edit(why or f"prune {gone.count} of {', '.join(list(gone.chosen)[:3])}") as e:
                e.cut_units(gone, ragged=ragged)
        return gone

    def gate(self, kind: str = "hard_concrete", *, why: str | None = None, **options: Any) -> tuple[NodeId, ...]:
        """Gate the units of whole axes, or layers, as one edit; see `Transaction.gate`. Returns the handles."""
        self.needed()
        with self.program.edit(why or f"gates on {', '.join(list(self.chosen)[:3])}") as e:
            return e.gate(self, kind, **options)

    def needed(self, allow_empty: bool = False) -> None:
        """Raises: EmptySelection if no unit is chosen."""
        if not self.count and not allow_empty:
            known = ", ".join(list(self.sizes or self.program.axes())[:6])
            raise EmptySelection("no unit is selected", where=self.program.name, expected=f"units of {known}")


def numbers(index: Any, count: int, name: str) -> tuple[int, ...]:
    """Unit numbers from an int, several, a slice or a mask, rising. Raises: UnitRange, UsageError."""
    if isinstance(index, slice):
        return tuple(sorted(range(count)[index]))
    if isinstance(index, range):
        index = list(index)
    if isinstance(index, bool) or not isinstance(index, int | np.integer | Sequence | np.ndarray | set | frozenset):
        raise UsageError("units go by number", where=name, expected="an int, several, a slice or a mask", got=index)
    given = np.asarray(sorted(index) if isinstance(index, set | frozenset) else index)
    if given.dtype == np.bool_:
        if given.shape != (count,):
            raise UnitRange("a mask has an entry for each unit", where=name, expected=count, got=given.shape)
        return tuple(int(i) for i in np.flatnonzero(given))
    if given.size and given.dtype.kind not in "iu":
        raise UsageError("units go by number", where=name, expected="an int, several, a slice or a mask", got=index)
    flat = given.reshape(-1).astype(np.int64)
    if ((flat < -count) | (flat >= count)).any():
        raise UnitRange("no such unit", where=name, expected=f"0 to {count - 1}", got=index)
    return tuple(sorted({int(i) % count for i in flat}))


def runs(places: Sequence[int]) -> str:
    """Numbers as text: `0-4 6 8-9`; new places, -1, as `+3`."""
    parts: list[str] = []
    i = 0
    while i < len(places):
        j = i + 1
        step = 0 if places[i] < 0 else 1
        while j < len(places) and places[j] == places[j - 1] + step:
            j += 1
        first, last = places[i], places[j - 1]
        parts.append(f"+{j - i}" if first < 0 else f"{first}" if j - i == 1 else f"{first}-{last}")
        i = j
    return " ".join(parts)


def parsed(form: str, limit: int = 1 << 24) -> tuple[int, ...]:
    """Inverse of `runs`. Raises: ValueError for another text, or more than `limit` numbers."""
    found: list[int] = []
    for part in form.split():
        match = re.fullmatch(r"(\+?)([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        new, first, last = match.groups() if match else ("", "1", "0")
        low, high = int(first), int(last or first)
        count = low if new else high - low + 1
        if count < 1 or (new and last) or len(found) + count > limit:
            raise ValueError(f"not places along an axis: {form[:80]}")
        found += [-1] * count if new else range(low, high + 1)
    return tuple(found)
