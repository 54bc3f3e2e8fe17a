"""Block-sparse attention patterns as editable graphs; numpy only, no tensors."""

from .changes import PatternChange
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
from .generators import causal_full, full, sliding_window
from .pattern import Pattern, PatternEdit

__all__ = ["BlockRange", "BlockSize", "CausalityViolation", "EdgeExists", "GateNotAllowed", "HeadMismatch", "MaskLost",
           "NoGenerator", "Pattern", "PatternChange", "PatternEdit", "PatternFileError", "PatternShape", "causal_full",
           "full", "sliding_window"]  # fmt: skip
