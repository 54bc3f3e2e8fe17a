"""Models: architectures as data, opening, running, generating, exporting with proof."""

from __future__ import annotations

from graphwright.errors import NonFinite
from graphwright.models.architectures.architecture import Architecture, WeightKey, architectures, register
from graphwright.models.errors import (
    BlockError,
    CacheFull,
    ConfigError,
    ExportError,
    ExportLevelImpossible,
    ModelNotFound,
    PromptError,
    StaleCache,
    TensorMismatch,
    TokenizerMismatch,
    UnsupportedArchitecture,
    UnsupportedDType,
    VerificationFailed,
)
from graphwright.models.generation.cache import StaticCache
from graphwright.models.generation.generate import GenerationResult
from graphwright.models.generation.paged import PagedCache
from graphwright.models.generation.sampling import Sampling, SamplingRequest
from graphwright.models.generation.sequence import Sequence
from graphwright.models.inspect import Inspection, inspect_path
from graphwright.models.model import Model
from graphwright.models.open import open, resolve
from graphwright.program import Released

__all__ = [
    "Architecture",
    "BlockError",
    "CacheFull",
    "ConfigError",
    "ExportError",
    "ExportLevelImpossible",
    "GenerationResult",
    "Inspection",
    "Model",
    "ModelNotFound",
    "NonFinite",
    "PagedCache",
    "PromptError",
    "Released",
    "Sampling",
    "SamplingRequest",
    "Sequence",
    "StaleCache",
    "StaticCache",
    "TensorMismatch",
    "TokenizerMismatch",
    "UnsupportedArchitecture",
    "UnsupportedDType",
    "VerificationFailed",
    "WeightKey",
    "architectures",
    "inspect_path",
    "open",
    "register",
    "resolve",
]
