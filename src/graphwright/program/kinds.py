"""Kinds of node that are not ops: where values come from, and where state goes at the end of a step.

`input` is fed by the caller; `param`, `const` and `state` read a variable of `Weights` by its key; `write` ends a step:
its first operand is the param or state node, its second the value that node has in the next step.
"""

from __future__ import annotations

INPUT, PARAM, CONST, STATE, WRITE = "input", "param", "const", "state", "write"
SOURCES = frozenset({INPUT, PARAM, CONST, STATE})
STORED = frozenset({PARAM, CONST, STATE})
KINDS = SOURCES | {WRITE}
