"""What can be wrong with a model directory, a prompt or an export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from graphwright.errors import GraphwrightError, UsageError
from graphwright.safetensors import CheckpointError

if TYPE_CHECKING:
    from graphwright.errors import Facts


class ModelNotFound(CheckpointError, FileNotFoundError):
    """No model lies at this path."""


class ConfigError(CheckpointError, ValueError):
    """A config that is missing, unreadable, or contradicts itself."""


class UnsupportedArchitecture(CheckpointError):
    """A model class that no registered architecture describes."""


class TensorMismatch(CheckpointError, ValueError):
    """Tensors missing, left over or of another shape than the config says; all are listed."""

    def __init__(
        self, what: str, *, missing: list[str], unexpected: list[str], misshapen: list[str], **facts: Unpack[Facts]
    ) -> None:
        super().__init__(what, **facts)
        self.missing, self.unexpected, self.misshapen = missing, unexpected, misshapen


class UnsupportedDType(CheckpointError, TypeError):
    """A tensor of a dtype that is carried but not computed with."""


class TokenizerMismatch(CheckpointError):
    """A tokenizer with more tokens than the model has rows for."""


class PromptError(UsageError):
    """A prompt that cannot be run: empty, out of range, or too long."""


class StaleCache(UsageError):
    """A cache filled by another state of the model; `layers` are the attention nodes whose rows are wrong."""

    layers: tuple[str, ...] = ()


class CacheFull(UsageError):
    """No room for the next token; `partial` holds the text so far."""

    partial: str = ""


class BlockError(UsageError):
    """A block of a pool that is not held, or not of this pool."""


class ExportError(GraphwrightError):
    """A model could not be exported; nothing was written."""


class ExportLevelImpossible(ExportError):
    """The rung that was asked for cannot carry this structure."""


class VerificationFailed(ExportError):
    """What was written does not compute what the program does; nothing was left at the target."""
