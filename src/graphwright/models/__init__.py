"""Models: architectures as data, opening, running, generating, exporting with proof."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, Key, architectures, register
from graphwright.models.errors import (
    BlockError,
    CacheFull,
    ConfigError,
    ExportError,
    ModelNotFound,
    PromptError,
    Released,
    RungImpossible,
    StaleCache,
    TensorMismatch,
    TokenizerMismatch,
    UnsupportedArchitecture,
    UnsupportedDType,
    VerificationFailed,
)
from graphwright.models.generation.cache import Cache
from graphwright.models.generation.generate import Generation
from graphwright.models.generation.paged import PagedCache
from graphwright.models.generation.sampling import Draw, NonFinite, Sampling
from graphwright.models.generation.sequence import Sequence
from graphwright.models.inspect import Inspection, inspect_path
from graphwright.models.model import Model
from graphwright.models.open import open, resolve

__all__ = [
    "Architecture",
    "BlockError",
    "Cache",
    "CacheFull",
    "ConfigError",
    "Draw",
    "ExportError",
    "Generation",
    "Inspection",
    "Key",
    "Model",
    "ModelNotFound",
    "NonFinite",
    "PagedCache",
    "PromptError",
    "Released",
    "RungImpossible",
    "Sampling",
    "Sequence",
    "StaleCache",
    "TensorMismatch",
    "TokenizerMismatch",
    "UnsupportedArchitecture",
    "UnsupportedDType",
    "VerificationFailed",
    "architectures",
    "inspect_path",
    "open",
    "register",
    "resolve",
]
