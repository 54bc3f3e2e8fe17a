"""The machine's code: rows of 16 int64, the first of which says what the row does."""

from __future__ import annotations

from enum import IntEnum, auto

CELLS = 16
BYTES = 8 * CELLS
FEW = 4
"""Rows of activations up to which a product is bound by reading its weights."""
GROUP = 64
"""Weights along a row that share a scale, where they are int8."""
PART = 1 << 17
"""Bytes of weights that a thread takes at a time: some 3 µs."""


class Code(IntEnum):
    """What a row does; the loops are in `loops.py`, under the same names."""

    # one operand
    COPY = 0
    NEG = auto()
    ABS = auto()
    SIGN = auto()
    FLOOR = auto()
    EXP = auto()
    LOG = auto()
    SQRT = auto()
    RSQRT = auto()
    RECIPROCAL = auto()
    TANH = auto()
    SIGMOID = auto()
    ERF = auto()
    RELU = auto()
    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()
    # two operands
    ADD = auto()
    SUB = auto()
    MUL = auto()
    DIV = auto()
    MINIMUM = auto()
    MAXIMUM = auto()
    EQ = auto()
    LT = auto()
    LE = auto()
    # others
    WHERE = auto()
    FILL = auto()
    SUM_ROWS = auto()
    SUM_COLUMNS = auto()
    AMAX_ROWS = auto()
    SOFTMAX = auto()
    RMS_NORM = auto()
    CROSS_ENTROPY = auto()
    CROSS_ENTROPY_BACKWARD = auto()
    PRODUCT = auto()
    ADAMW = auto()
    ROPE = auto()
    KV_APPEND = auto()
    KV_SCATTER = auto()
    MORE = auto()  # cells of the row before it
    # in parts, which threads share
    ROWS_F32 = auto()
    ROWS_BF16 = auto()
    ROWS_I8 = auto()
    PANELS_BF16 = auto()
    PANELS_I8 = auto()
    ATTEND = auto()


SHARED = frozenset({Code.ROWS_F32, Code.ROWS_BF16, Code.ROWS_I8, Code.PANELS_BF16, Code.PANELS_I8, Code.ATTEND})
"""Rows that threads share; their last cell says in how many parts."""
