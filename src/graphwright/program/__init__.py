"""Program: the editable graph of ops and weights, with functions to build, trace, run, edit and draw it."""

from __future__ import annotations

import copyreg

from graphwright.errors import GraphwrightError
from graphwright.program import errors
from graphwright.program.axes.axes import Axes, AxisGroup
from graphwright.program.axes.units import Units
from graphwright.program.builder import Builder, record, trace
from graphwright.program.constraints import Constraints
from graphwright.program.derived.stack import NotStackable, stack
from graphwright.program.derived.tape import tape
from graphwright.program.diff import ProgramDiff, diff
from graphwright.program.editing.journal import Entry, Journal
from graphwright.program.editing.replay import Replayed, apply_recipe, replay
from graphwright.program.editing.transaction import Transaction
from graphwright.program.errors import *  # noqa: F403
from graphwright.program.files.load import load
from graphwright.program.files.parameters import ParameterMismatch
from graphwright.program.files.save import save
from graphwright.program.files.sending import message
from graphwright.program.formula import Formula, FormulaTooLarge, NoFormula
from graphwright.program.gates import Gate, Gates
from graphwright.program.op_graph import OpGraph, Value
from graphwright.program.program import Program
from graphwright.program.recorder import TraceRecorder
from graphwright.program.run import Run, check_feeds, evaluate, run
from graphwright.program.selection import Selection
from graphwright.program.state import State
from graphwright.program.validate import AssemblyReport, Mismatch, validate
from graphwright.program.weights import Weights

copyreg.pickle(Program, message)  # programs can be sent to other processes

_ERRORS = [n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, GraphwrightError)]
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *(name for name in _ERRORS if name not in ("GraphwrightError", "UsageError") and not name.startswith("_")),
    "AssemblyReport", "Axes", "AxisGroup", "Builder", "Constraints", "Entry", "Formula", "FormulaTooLarge", "Gate",
    "Gates", "Journal", "Mismatch", "NoFormula", "NotStackable", "OpGraph", "ParameterMismatch", "Program",
    "ProgramDiff", "Replayed", "Run", "Selection", "State", "TraceRecorder", "Transaction", "Units", "Value",
    "Weights", "apply_recipe", "check_feeds", "diff", "evaluate", "load", "record", "replay", "run", "save",
    "stack", "tape", "trace", "validate",
]  # fmt: skip
