"""Block-sparse attention patterns as editable graphs; numpy only, no tensors."""

from .changes import PatternChange
from .content import PatternDiff, PatternSummary
from .errors import (
    BlockRange,
    BlockSize,
    CausalityViolation,
    EdgeExists,
    GateNotAllowed,
    HeadMismatch,
    MaskLost,
    NoGenerator,
    PatternFileError,
    PatternShape,
)  # fmt: skip
from .generators import (
    GENERATORS,
    block_local,
    causal_full,
    dilated,
    document,
    full,
    random_blocks,
    sliding_window,
    star,
    topk,
)  # fmt: skip
from .pattern import Pattern, PatternEdit

__all__ = ["GENERATORS", "BlockRange", "BlockSize", "CausalityViolation", "EdgeExists", "GateNotAllowed",
           "HeadMismatch", "MaskLost", "NoGenerator", "Pattern", "PatternChange", "PatternDiff", "PatternEdit",
           "PatternFileError", "PatternShape", "PatternSummary", "block_local", "causal_full", "dilated", "document",
           "full", "random_blocks", "sliding_window", "star", "topk"]  # fmt: skip
