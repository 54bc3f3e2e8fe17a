"""Models: open, run, generate, train, and export with a checked receipt."""

from __future__ import annotations

from graphwright.errors import NonFinite
from graphwright.models.architectures.architecture import Architecture, WeightKey
from graphwright.models.architectures.registry import architectures, register
from graphwright.models.errors import (
    BlockError,
    CacheFull,
    ConfigError,
    ExportError,
    ExportLevelImpossible,
    ModelNotFound,
    PromptError,
    SequenceReleased,
    StaleCache,
    TensorMismatch,
    TokenizerMismatch,
    UnsupportedArchitecture,
    UnsupportedDType,
    VerificationFailed,
)
from graphwright.models.generation.cache import KVCache, StaticCache
from graphwright.models.generation.generate import GenerationOptions, GenerationResult
from graphwright.models.generation.paged import PagedCache
from graphwright.models.generation.sampling import Sampling, SamplingRequest
from graphwright.models.generation.sequence import CachedSequence
from graphwright.models.inspect import Inspection
from graphwright.models.model import Model
from graphwright.models.open import inspect_path, open, resolve
from graphwright.models.tokenizer import train_bpe

__all__ = [
    "Architecture", "BlockError", "CacheFull", "CachedSequence", "ConfigError", "ExportError", "ExportLevelImpossible",
    "GenerationOptions", "GenerationResult", "Inspection", "KVCache", "Model", "ModelNotFound", "NonFinite",
    "PagedCache", "PromptError", "Sampling", "SamplingRequest", "SequenceReleased", "StaleCache", "StaticCache",
    "TensorMismatch", "TokenizerMismatch", "UnsupportedArchitecture", "UnsupportedDType", "VerificationFailed",
    "WeightKey", "architectures", "inspect_path", "open", "register", "resolve",
    "train_bpe",
]  # fmt: skip
