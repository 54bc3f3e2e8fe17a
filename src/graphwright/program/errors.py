"""Errors of programs: unknown names, invalid edits, conflicts, and unreadable files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import NotUndoable as NotUndoable

if TYPE_CHECKING:
    from graphwright.errors import Facts
    from graphwright.program.validate import Mismatch


class UnknownNode(UsageError, KeyError):
    """No node, output or weight has this name."""


class UnknownEdge(UsageError, KeyError):
    """No edge connects these nodes, or several do."""


class UnknownAxis(UsageError, KeyError):
    """No axis has this name."""


class UnknownGate(UsageError, KeyError):
    """The node or result belongs to no gate, or the gated units are not those of an axis."""


class ForeignNode(UsageError):
    """The object is not a node, value or selection of this program."""


class BadName(UsageError):
    """The name is not a dotted path."""


class NameTaken(UsageError):
    """Another node, output, weight or axis has this name."""


class PortTaken(UsageError):
    """The port already has an edge."""


class PortEmpty(UsageError):
    """The port has no edge."""


class EditClosed(UsageError):
    """An edit was used outside its with-block."""


class NotAJunction(UsageError):
    """Edges can be added and cut only at junctions."""


class SpecMismatch(UsageError):
    """Shapes or dtypes along edges do not match; `mismatches` lists all of them."""

    def __init__(self, mismatches: list[GraphwrightError], fix: str | None = None) -> None:
        self.mismatches, first, count = mismatches, mismatches[0], len(mismatches)
        where = ", ".join(str(m.where) for m in mismatches[:4]) + (", ..." if count > 4 else "")
        if count == 1:
            super().__init__(first.what, where=where, expected=first.expected, got=first.got, fix=fix or first.fix)
            return
        lines = [f"shapes or dtypes of {count} nodes do not match"]
        for m in mismatches:
            facts = [f"{n} {v}" for n, v in (("expected", m.expected), ("got", m.got)) if v is not None]
            lines.append(f"    {m.where}: {m.what}" + (f" ({', '.join(facts)})" if facts else ""))
        super().__init__("\n".join(lines), where=where, fix=fix or first.fix)


class _WithFindings(UsageError):
    def __init__(self, what: str = "", *, findings: tuple[Mismatch, ...] = (), **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.findings = findings


class InvalidProgram(_WithFindings):
    """The program was left broken and cannot run; `findings` has one `Mismatch` per defect."""


class ConstraintViolated(_WithFindings):
    """The edit would violate an enforced constraint of the program; `findings` has one `Mismatch` per violation."""


class FrozenAxis(UsageError):
    """The axis cannot be resized: an input, an output or an op fixes its size."""


class EmptyAxis(UsageError):
    """The edit would remove all units of an axis."""


class RaggedUnit(UsageError):
    """The unit cannot be removed alone: groups would have unequal numbers of units."""


class UnitRange(UsageError, IndexError):
    """The index of a unit is out of range, or a mask has the wrong length."""


class EmptySelection(UsageError):
    """The selection is empty where at least one element is needed."""


class StaleSelection(UsageError):
    """Selected nodes were deleted, or selected axes resized, since the selection was made."""


class CountMismatch(UsageError):
    """The selection does not have the asserted size."""


class GateNotAllowed(UsageError):
    """This value, edge or axis cannot be gated."""


class NotZeroPreserving(GateNotAllowed):
    """Setting a unit of the axis to zero is not the same as removing it."""


class SoftGates(UsageError):
    """The program has gates where only a fixed structure is allowed."""


class DeadGate(UsageError):
    """The gate has no gradient at its initial value."""


class FeedError(UsageError):
    """Inputs of a run are missing, unknown or of a wrong shape or dtype; all are listed."""


class ValueReleased(UsageError):
    """The run did not keep this value, or was closed."""


class StaleRun(UsageError):
    """The program or a weight changed after the run."""


class BoundaryMismatch(UsageError):
    """A subprogram does not fit the boundary of the selection that it replaces."""


class NotConvex(UsageError):
    """The selection is not convex: a path of the graph leaves it and comes back."""


class ReplayConflict(UsageError):
    """A journal entry or recipe step does not fit the program."""


class ProgramFileError(GraphwrightError, ValueError):
    """The saved program is incomplete, damaged, not a program, or written by a newer version."""
