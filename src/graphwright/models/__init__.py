"""Models: architectures as data, opening, running, generating, exporting with proof."""

from __future__ import annotations

from graphwright.models.architecture import Architecture, Key, architectures, register
from graphwright.models.cache import Cache
from graphwright.models.errors import (
    CacheFull,
    ConfigError,
    ExportError,
    ModelNotFound,
    PromptError,
    RungImpossible,
    StaleCache,
    TensorMismatch,
    TokenizerMismatch,
    UnsupportedArchitecture,
    UnsupportedDType,
    VerificationFailed,
)
from graphwright.models.generate import Generation
from graphwright.models.inspect import Inspection, inspect_path
from graphwright.models.model import Model
from graphwright.models.open import open, resolve
from graphwright.models.sampling import NonFinite, Sampling

__all__ = [
    "Architecture",
    "Cache",
    "CacheFull",
    "ConfigError",
    "ExportError",
    "Generation",
    "Inspection",
    "Key",
    "Model",
    "ModelNotFound",
    "NonFinite",
    "PromptError",
    "RungImpossible",
    "Sampling",
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
