"""Program: the editable graph of ops and weights; building, tracing, running, editing and drawing it."""

from __future__ import annotations

from graphwright.program.builder import Builder
from graphwright.program.errors import (
    BadName, BoundaryMismatch, FeedError, ForeignNode, InvalidProgram, NameTaken, NotAJunction, NotConvex, NotUndoable,
    PortEmpty, PortTaken, ReplayConflict, SpecMismatch, UnknownNode,
)  # fmt: skip
from graphwright.program.interpret import Run, check_feeds, evaluate, run
from graphwright.program.journal import Entry, Journal
from graphwright.program.program import Program, Value
from graphwright.program.selection import CountMismatch, EmptySelection, Selection, StaleSelection
from graphwright.program.trace import TraceRecorder, record, trace
from graphwright.program.transaction import Transaction
from graphwright.program.weights import Weights

__all__ = ["BadName", "BoundaryMismatch", "Builder", "CountMismatch", "EmptySelection", "Entry", "FeedError", "ForeignNode",
           "InvalidProgram", "Journal", "NameTaken", "NotAJunction", "NotConvex", "NotUndoable", "PortEmpty", "PortTaken",
           "Program", "ReplayConflict", "Run", "Selection", "SpecMismatch", "StaleSelection", "TraceRecorder", "Transaction",
           "UnknownNode", "Value", "Weights", "check_feeds", "evaluate", "record", "run", "trace"]  # fmt: skip
