"""The machine's code: rows of 16 int64, the first of which says what the row does."""

from __future__ import annotations

from enum import IntEnum, auto

CELLS = 16
BYTES = 8 * CELLS
ZEROS = 128
TILES_END = ZEROS + (1 << 16)
DEPTH, BLOCK = 256, 192
"""Terms and rows of A that a product takes at a time."""
STRIPS = TILES_END + (1 << 16)
SPARE = STRIPS - TILES_END
"""Bytes of the part before it."""
SCRATCH = STRIPS + 4 * DEPTH * BLOCK + 1024
"""Bytes that code works in: zeros, which must be there; a packed panel, or a loop's tiles; blocks of attention; rows of
a product's A, packed.
"""
FEW = 4
"""Rows of activations up to which a product is bound by reading its weights."""
GROUP = 64
"""Weights along a row that share a scale, where they are int8."""
WORK = {4: 0, 2: 4 * GROUP, 1: 2 * GROUP + 4}
"""Bytes of a weight -> of the scratch that a product of few rows takes for each begun group of a row."""
PAST = 2
"""As the step of a result: its columns are adjacent, and go past the caches."""
LOCAL = 1 << 20
"""Addresses below count from the scratch; no operating system maps memory there."""


class Code(IntEnum):
    """What a row does; the loops are in the files of this folder, mostly under the same names."""

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
    ROUND = auto()
    # two operands
    ADD = auto()
    SUB = auto()
    MUL = auto()
    DIV = auto()
    MINIMUM = auto()
    MAXIMUM = auto()
    SWIGLU = auto()
    ADD_SILU = auto()
    EQ = auto()
    LT = auto()
    LE = auto()
    NE = auto()
    ADD_I64 = auto()
    PUT_I64 = auto()
    WIDEN = auto()
    NARROW = auto()
    SCALARS = auto()
    # others
    WHERE = auto()
    FILL = auto()
    SUM_ROWS = auto()
    SUM_COLUMNS = auto()
    AMAX_ROWS = auto()
    SOFTMAX = auto()
    RMS_NORM = auto()
    LAYER_NORM = auto()
    CROSS_ENTROPY = auto()
    CROSS_ENTROPY_BACKWARD = auto()
    PRODUCT = auto()
    ADAM = auto()
    ADAMW = auto()
    SGD = auto()
    RMSPROP = auto()
    LION = auto()
    MUON = auto()
    AVERAGE = auto()
    NOISE = auto()
    COPY_AXES = auto()
    GATHER_ROWS = auto()
    ADD_ROWS = auto()
    ROPE = auto()
    ROPE_TABLE = auto()
    ATTEND = auto()
    ATTEND_BACKWARD = auto()
    # weights as they are stored, cached keys
    ROWS_F32 = auto()
    ROWS_BF16 = auto()
    ROWS_I8 = auto()
    PANELS_BF16 = auto()
    PANELS_I8 = auto()
    ATTEND_CACHED = auto()
    KV_APPEND = auto()
    KV_SCATTER = auto()
    SAMPLE_TOKEN = auto()
    # control
    LOOP = auto()
    SHARED = auto()
    SERVE = auto()


UPDATES = frozenset({Code.ADAM, Code.ADAMW, Code.SGD, Code.RMSPROP, Code.LION, Code.MUON, Code.AVERAGE})
"""Steps of optimizers: a row, and half a row for each of its parameters (cell 1 how many)."""

UNIFORM, BERNOULLI, DROPOUT = range(3)
"""What a NOISE row makes of uniform numbers."""
STORED: dict[int, int] = {
    Code.ROWS_F32: 4,
    Code.ROWS_BF16: 2,
    Code.ROWS_I8: 1,
    Code.PANELS_BF16: 2,
    Code.PANELS_I8: 1,
}
"""Products with weights as they are stored: bytes of a weight."""
