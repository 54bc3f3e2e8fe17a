"""Errors of model directories, prompts, caches and exports."""

from __future__ import annotations

from typing import Unpack

from graphwright.errors import Facts, GraphwrightError, UsageError
from graphwright.safetensors import CheckpointError


class ModelNotFound(CheckpointError, FileNotFoundError):
    """No model was found at a path."""


class ConfigError(CheckpointError, ValueError):
    """A config is unreadable or contradicts itself."""


class UnsupportedArchitecture(CheckpointError):
    """No registered architecture describes the model class."""


class TensorMismatch(CheckpointError, ValueError):
    """A checkpoint does not fit its config; `missing`, `unexpected` and `misshapen` (wrong shape) list its tensors."""

    def __init__(
        self, what: str, *, missing: list[str], unexpected: list[str], misshapen: list[str], **facts: Unpack[Facts]
    ) -> None:
        super().__init__(what, **facts)
        self.missing, self.unexpected, self.misshapen = missing, unexpected, misshapen


class UnsupportedDType(CheckpointError, TypeError):
    """A weight is stored in a dtype that is not a floating-point type."""


class TokenizerMismatch(CheckpointError):
    """The tokenizer has more tokens than the embedding has rows."""


class PromptError(UsageError):
    """A prompt or mask is empty, malformed, out of range or too long."""


class StaleCache(UsageError):
    """A cache was filled by a different model or model state; `layers` are the attention nodes with stale entries."""

    layers: tuple[str, ...] = ()


class CacheFull(UsageError):
    """A cache has no room for the next token; `partial` is the text generated so far."""

    partial: str = ""


class BlockError(UsageError):
    """A paged cache was given a free or unknown block, an unknown position, or a sequence of another cache."""


class SequenceReleased(UsageError):
    """A sequence or snapshot of a paged cache was used after its release."""


class ExportError(GraphwrightError):
    """An export failed and wrote nothing, or a receipt is missing or invalid."""


class ExportLevelImpossible(ExportError):
    """The files of the requested export level cannot represent the program."""


class VerificationFailed(ExportError):
    """The exported files cannot be run, or do not compute the program's function; the target directory is unchanged."""


class CaptureError(GraphwrightError):
    """A torch module has no graph, for example because its code depends on values."""


class OnnxFileError(CheckpointError, ValueError):
    """An ONNX file is damaged, contradicts itself, or is of a version that cannot be imported."""


class UnsupportedOperator(GraphwrightError):
    """A model has operators that cannot be imported; `operators` maps each to where it occurs."""

    def __init__(self, what: str, *, operators: dict[str, tuple[str, ...]], **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.operators = operators
