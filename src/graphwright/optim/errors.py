"""What goes wrong with a saved training."""

from __future__ import annotations

from graphwright.safetensors import CheckpointError


class StateError(CheckpointError):
    """A saved training is damaged, of another schema, or of another model or optimizer."""
