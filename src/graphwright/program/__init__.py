"""Program: the editable graph of ops and weights; building, tracing, running, editing and drawing it."""

from __future__ import annotations

from graphwright.program.builder import Builder
from graphwright.program.diff import ProgramDiff, diff
from graphwright.program.errors import (
    BadName,
    BoundaryMismatch,
    FeedError,
    ForeignNode,
    InvalidProgram,
    NameTaken,
    NotAJunction,
    NotConvex,
    NotUndoable,
    PortEmpty,
    PortTaken,
    ProgramFileError,
    ReplayConflict,
    SpecMismatch,
    UnknownEdge,
    UnknownNode,
)
from graphwright.program.interpret import Run, check_feeds, evaluate, run
from graphwright.program.journal import Entry, Journal
from graphwright.program.load import load
from graphwright.program.program import Program, Value
from graphwright.program.replay import Replayed, replay
from graphwright.program.save import save
from graphwright.program.selection import CountMismatch, EmptySelection, Selection, StaleSelection
from graphwright.program.trace import TraceRecorder, record, trace
from graphwright.program.transaction import Transaction
from graphwright.program.validate import AssemblyReport, Mismatch, validate
from graphwright.program.weights import Weights

__all__ = [
    "AssemblyReport",
    "BadName",
    "BoundaryMismatch",
    "Builder",
    "CountMismatch",
    "EmptySelection",
    "Entry",
    "FeedError",
    "ForeignNode",
    "InvalidProgram",
    "Journal",
    "Mismatch",
    "NameTaken",
    "NotAJunction",
    "NotConvex",
    "NotUndoable",
    "PortEmpty",
    "PortTaken",
    "Program",
    "ProgramDiff",
    "ProgramFileError",
    "ReplayConflict",
    "Replayed",
    "Run",
    "Selection",
    "SpecMismatch",
    "StaleSelection",
    "TraceRecorder",
    "Transaction",
    "UnknownEdge",
    "UnknownNode",
    "Value",
    "Weights",
    "check_feeds",
    "diff",
    "evaluate",
    "load",
    "record",
    "replay",
    "run",
    "save",
    "trace",
    "validate",
]
