"""Automatic mixed precision: 16 bits where they are safe, with explicit casts."""

from __future__ import annotations

from graphwright.amp.autocast import apply, autocast
from graphwright.amp.scaler import GradScaler

__all__ = ["GradScaler", "apply", "autocast"]
