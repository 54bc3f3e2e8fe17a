"""What can be wrong with a graph of ops, or with a change of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from graphwright.errors import GraphwrightError, UsageError

if TYPE_CHECKING:
    from graphwright.errors import Facts
    from graphwright.program.validate import Mismatch


class UnknownNode(UsageError, KeyError):
    """No node of this name or handle."""


class UnknownAxis(UsageError, KeyError):
    """No axis of this name."""


class UnknownGate(UsageError, KeyError):
    """A node that is no gate, or a gate that opens nothing of this name."""


class GateNotAllowed(UsageError):
    """A place where a value may not be multiplied by a gate."""


class NotZeroPreserving(GateNotAllowed):
    """An axis on which a unit that is zero is something else than a unit that is gone."""


class SoftGates(UsageError):
    """Gates that are neither cut nor open, where only a finished structure will do."""


class DeadGate(UsageError):
    """A gate that begins where it has no gradient."""


class FrozenAxis(UsageError):
    """An axis whose size is bound: to an input, an output, or an op that has no rule for it."""


class RaggedUnit(UsageError):
    """A unit that can't go alone: the others of its kind would differ in number."""


class UnitRange(UsageError, IndexError):
    """No unit of this number."""


class EmptyAxis(UsageError):
    """Cutting the last unit of an axis."""


class UnknownEdge(UsageError, KeyError):
    """No edge between these nodes, or several."""


class NameTaken(UsageError):
    """A node of this name exists."""


class BadName(UsageError):
    """A name that cannot be a dotted path."""


class PortTaken(UsageError):
    """A port takes exactly one edge, and has it."""


class PortEmpty(UsageError):
    """A port would be left without its edge."""


class NotAJunction(UsageError):
    """Edges are added and cut at junctions only."""


class ForeignNode(UsageError):
    """A node of another program."""


class InvalidProgram(UsageError):
    """The program is open for repair and cannot run; `findings` says why, one `Mismatch` each."""

    def __init__(self, what: str = "", *, findings: tuple[Mismatch, ...] = (), **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.findings = findings


class ConstraintViolated(UsageError):
    """An edit would leave a constraint violated that the program is held to; `findings` says where."""

    def __init__(self, what: str = "", *, findings: tuple[Mismatch, ...] = (), **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.findings = findings


class ProgramFileError(GraphwrightError, ValueError):
    """A saved program that is incomplete, damaged, newer than this package, or was never one."""


class FeedError(UsageError):
    """Missing, unknown or misshapen inputs of a run; all are listed."""


class Released(UsageError):
    """A value that a run did not keep, or any of a run that was closed."""


class StaleRun(UsageError):
    """The program or a weight changed after a run, so its values are no longer what the program computes."""


class BoundaryMismatch(UsageError):
    """A subprogram does not fit where it is put."""


class NotConvex(UsageError):
    """A path leaves the selection and comes back."""


class NotUndoable(UsageError):
    """There is nothing to undo, or the bytes to undo it with are gone."""


class ReplayConflict(UsageError):
    """A journal entry does not fit the program it is replayed on."""


def _line(error: GraphwrightError) -> str:
    known = [
        f"{name} {value}" for name, value in (("expected", error.expected), ("got", error.got)) if value is not None
    ]
    return f"{error.where}: {error.what}" + (f" ({', '.join(known)})" if known else "")


class SpecMismatch(UsageError):
    """Shapes or dtypes do not fit along edges; `mismatches` lists every one."""

    def __init__(self, mismatches: list[GraphwrightError], fix: str | None = None) -> None:
        self.mismatches = mismatches
        first, one = mismatches[0], len(mismatches) == 1
        places = "\n".join(f"    {_line(m)}" for m in mismatches)
        super().__init__(
            first.what if one else f"{len(mismatches)} places do not fit\n{places}",
            where=", ".join(str(m.where) for m in mismatches[:4]) + (", ..." if len(mismatches) > 4 else ""),
            expected=first.expected if one else None,
            got=first.got if one else None,
            fix=fix or first.fix,
        )
