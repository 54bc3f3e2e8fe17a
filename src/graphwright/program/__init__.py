"""Program: the editable graph of ops and weights; building, tracing, running, editing and drawing it."""

from __future__ import annotations

from graphwright.program.axes.axes import Axes, AxisGroup
from graphwright.program.axes.units import Units
from graphwright.program.builder import Builder
from graphwright.program.constraints import Constraints
from graphwright.program.derived.tape import tape
from graphwright.program.diff import ProgramDiff, diff
from graphwright.program.editing.journal import Entry, Journal
from graphwright.program.editing.recipe import apply_recipe
from graphwright.program.editing.replay import Replayed, replay
from graphwright.program.editing.transaction import Transaction
from graphwright.program.errors import (
    BadName,
    BoundaryMismatch,
    ConstraintViolated,
    CountMismatch,
    DeadGate,
    EmptyAxis,
    EmptySelection,
    FeedError,
    ForeignNode,
    FrozenAxis,
    GateNotAllowed,
    InvalidProgram,
    NameTaken,
    NotAJunction,
    NotConvex,
    NotUndoable,
    NotZeroPreserving,
    PortEmpty,
    PortTaken,
    ProgramFileError,
    RaggedUnit,
    ReplayConflict,
    SoftGates,
    SpecMismatch,
    StaleRun,
    StaleSelection,
    UnitRange,
    UnknownAxis,
    UnknownEdge,
    UnknownGate,
    UnknownNode,
    ValueReleased,
)
from graphwright.program.files.load import load
from graphwright.program.files.parameters import ParameterMismatch
from graphwright.program.files.save import save
from graphwright.program.gates import Gate, Gates
from graphwright.program.op_graph import OpGraph, Value
from graphwright.program.program import Program
from graphwright.program.recorder import TraceRecorder
from graphwright.program.run import Run, check_feeds, evaluate, run
from graphwright.program.selection import Selection
from graphwright.program.state import State
from graphwright.program.trace import record, trace
from graphwright.program.validate import AssemblyReport, Mismatch, validate
from graphwright.program.weights import Weights

__all__ = [
    "AssemblyReport",
    "Axes",
    "AxisGroup",
    "BadName",
    "BoundaryMismatch",
    "Builder",
    "ConstraintViolated",
    "Constraints",
    "CountMismatch",
    "DeadGate",
    "EmptyAxis",
    "EmptySelection",
    "Entry",
    "FeedError",
    "ForeignNode",
    "FrozenAxis",
    "Gate",
    "GateNotAllowed",
    "Gates",
    "InvalidProgram",
    "Journal",
    "Mismatch",
    "NameTaken",
    "NotAJunction",
    "NotConvex",
    "NotUndoable",
    "NotZeroPreserving",
    "OpGraph",
    "ParameterMismatch",
    "PortEmpty",
    "PortTaken",
    "Program",
    "ProgramDiff",
    "ProgramFileError",
    "RaggedUnit",
    "ReplayConflict",
    "Replayed",
    "Run",
    "Selection",
    "SoftGates",
    "SpecMismatch",
    "StaleRun",
    "StaleSelection",
    "State",
    "TraceRecorder",
    "Transaction",
    "UnitRange",
    "Units",
    "UnknownAxis",
    "UnknownEdge",
    "UnknownGate",
    "UnknownNode",
    "Value",
    "ValueReleased",
    "Weights",
    "apply_recipe",
    "check_feeds",
    "diff",
    "evaluate",
    "load",
    "record",
    "replay",
    "run",
    "save",
    "tape",
    "trace",
    "validate",
]
