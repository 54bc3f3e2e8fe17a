"""Opcodes of the VM's instructions, and the sizes of instructions and of the scratch memory.

An instruction, also called a row of code, is 16 words (int64): word 0 is the opcode, the others are its arguments.
"""

from __future__ import annotations

from enum import IntEnum

CELLS = 16
BYTES = 8 * CELLS
ZEROS = 128
TILES_END = ZEROS + (1 << 16)
DEPTH, BLOCK = 256, 192
"""Terms, and rows of A, in one block of a matrix product."""
STRIPS = TILES_END + (1 << 16)
SPARE = STRIPS - TILES_END
"""Bytes of the scratch from TILES_END to STRIPS."""
SCRATCH = STRIPS + 4 * DEPTH * BLOCK + 1024
"""Bytes of the scratch: zeros, then a packed panel of B or tiles of a LOOP, blocks of attention, packed rows of A."""
FEW = 4
"""The most rows of x for which a product is bound by the bandwidth of reading its weights."""
GROUP = 64
"""Number of int8 weights along a row that share a scale."""
WORK = {4: 0, 2: 4 * GROUP, 1: 2 * GROUP + 4}
"""Bytes of a weight -> bytes of scratch that a product of few rows needs per group of a row, rounded up."""
PAST = 2
"""As the step of a result: its columns are adjacent, and written with non-temporal stores."""
LOCAL = 1 << 20
"""Addresses below it are offsets into the scratch; no operating system maps memory there."""


Code = IntEnum("Code", [
    # one operand; a name that `elementwise.py` does not define stands for the function in `formulas.activations`
    "COPY", "NEG", "ABS", "SIGN", "FLOOR", "EXP", "LOG", "SQRT", "RSQRT", "RECIPROCAL", "TANH", "SIGMOID", "ERF",
    "RELU", "SILU", "GELU", "GELU_TANH", "ROUND", "EXPM1", "LOG1P", "SIN", "COS",
    # two operands
    "ADD", "SUB", "MUL", "DIV", "MINIMUM", "MAXIMUM", "SWIGLU", "ADD_SILU", "EQ", "LT", "LE", "NE",
    "ADD_I64", "PUT_I64", "WIDEN", "NARROW", "SCALARS", "WHERE", "FILL",
    # rows
    "SUM_ROWS", "SUM_COLUMNS", "AMAX_ROWS", "SOFTMAX", "RMS_NORM", "LAYER_NORM", "CROSS_ENTROPY",
    "CROSS_ENTROPY_BACKWARD", "PRODUCT", "ADAM", "ADAMW", "SGD", "RMSPROP", "LION", "MUON", "AVERAGE",
    "ZERO_CHECK", "NOISE",
    "COPY_AXES", "GATHER_ROWS", "ADD_ROWS", "ROPE", "ROPE_TABLE", "ATTEND", "ATTEND_BACKWARD",
    # products with stored weights, KV caches, sampling
    "ROWS_F32", "ROWS_BF16", "ROWS_I8", "PANELS_BF16", "PANELS_I8", "ATTEND_CACHED", "KV_APPEND", "KV_SCATTER",
    "SAMPLE_TOKEN",
    # mixtures of experts
    "TOPK", "DISPATCH", "EXPERT_RUNS", "EXPERTS", "EXPERTS_BACKWARD", "EXPERT_PROBE",
    # block-sparse attention
    "BLOCK_PACK", "BLOCK_ATTEND", "BLOCK_ATTEND_BACKWARD", "BLOCK_MASS", "BLOCK_GATE_GRADIENT",
    "BLOCK_ENTROPY",
    # control
    "LOOP", "SHARED",
], start=0)  # fmt: skip
"""Opcodes; the loops are in the files of this folder, mostly under the same names."""

UNARY = tuple(Code)[: Code.ADD]
"""Opcodes of one operand."""
UPDATES = frozenset(
    {Code.ADAM, Code.ADAMW, Code.SGD, Code.RMSPROP, Code.LION, Code.MUON, Code.AVERAGE, Code.ZERO_CHECK}
)
"""Optimizer steps: an instruction whose word 1 counts parameters, followed by half a row for each of them."""

WORKERS = frozenset({Code.EXPERTS, Code.EXPERTS_BACKWARD, Code.EXPERT_PROBE})
"""Opcodes of which several workers run the same instruction; words 2 to 4: number of the worker, nanoseconds of all
together, how many workers may run.
"""
EXPERT_TABLE, EXPERT_CELLS, EXPERT_COUNTERS = 24, 19, 2
"""Mixtures: the word of the table where the experts begin, the words of each, the counters before those of experts."""
UNIFORM, BERNOULLI, DROPOUT = range(3)
"""Kinds of NOISE instructions."""
STORED: dict[int, int] = {Code.ROWS_F32: 4, Code.ROWS_BF16: 2, Code.ROWS_I8: 1, Code.PANELS_BF16: 2, Code.PANELS_I8: 1}
"""Opcodes of products that read stored weights -> bytes of a weight."""
