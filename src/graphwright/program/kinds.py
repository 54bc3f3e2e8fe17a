"""Kinds of node that are not ops: sources of values, and assignments of state at the end of a step.

An `input` is fed by the caller. A `param`, `const` or `state` reads a variable of `Weights` by its key. An `assign`
ends a step: its first operand is the param or state node, its second the value of that node in the next step.
"""

from __future__ import annotations

INPUT, PARAM, CONST, STATE, ASSIGN = "input", "param", "const", "state", "assign"
SOURCES = frozenset({INPUT, PARAM, CONST, STATE})
STORED = frozenset({PARAM, CONST, STATE})
KINDS = SOURCES | {ASSIGN}
