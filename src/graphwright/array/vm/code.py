"""The machine's code: opcodes, and the sizes of rows and of the scratch. A row is 16 int64; the first is the opcode."""

from __future__ import annotations

from enum import IntEnum, auto

CELLS = 16
BYTES = 8 * CELLS
ZEROS = 128
TILES_END = ZEROS + (1 << 16)
DEPTH, BLOCK = 256, 192
"""Terms, and rows of A, of one block of a matrix product."""
STRIPS = TILES_END + (1 << 16)
SPARE = STRIPS - TILES_END
"""Bytes of the scratch from TILES_END to STRIPS."""
SCRATCH = STRIPS + 4 * DEPTH * BLOCK + 1024
"""Bytes of the scratch: zeros, a packed panel of B or the tiles of a loop, blocks of attention, packed rows of A."""
FEW = 4
"""Rows of x up to which a product is bound by the bandwidth of reading its weights."""
GROUP = 64
"""int8 weights along a row that share a scale."""
WORK = {4: 0, 2: 4 * GROUP, 1: 2 * GROUP + 4}
"""Bytes of a weight -> bytes of scratch that a product of few rows needs per (begun) group of a row."""
PAST = 2
"""As the step of a result: adjacent columns, written with non-temporal stores."""
LOCAL = 1 << 20
"""Smaller addresses are offsets into the scratch; no operating system maps memory there."""


class Code(IntEnum):
    """Opcodes; the loops are in the files of this folder, mostly under the same names."""

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
    # products with stored weights, KV caches, sampling
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
"""Optimizer steps: a row, and half a row for each of its parameters (cell 1 how many)."""

UNIFORM, BERNOULLI, DROPOUT = range(3)
"""Kinds of NOISE rows."""
STORED: dict[int, int] = {
    Code.ROWS_F32: 4,
    Code.ROWS_BF16: 2,
    Code.ROWS_I8: 1,
    Code.PANELS_BF16: 2,
    Code.PANELS_I8: 1,
}
"""Opcodes of products that read stored weights -> bytes of a weight."""
