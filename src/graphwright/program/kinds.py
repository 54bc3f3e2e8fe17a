"""Kinds of node that are not ops: sources of values, and assignments of state at the end of a step.

An `input` is fed by the caller. A `param`, `const` or `state` reads a variable of `Weights` by its key. A `pattern`
reads the table of an attention pattern by its key; edits of the pattern change the memory that the table refers to, not
the value of the node. An `assign` ends a step: its first operand is the param or state node, its second the value of
that node in the next step.
"""

from __future__ import annotations

INPUT, PARAM, CONST, STATE, PATTERN, ASSIGN = "input", "param", "const", "state", "pattern", "assign"
SOURCES = frozenset({INPUT, PARAM, CONST, STATE, PATTERN})
STORED = frozenset({PARAM, CONST, STATE, PATTERN})
KINDS = SOURCES | {ASSIGN}
