"""Automatic mixed precision: 16 bits where they are safe, with explicit casts."""

from __future__ import annotations

from graphwright.amp.mixed_precision import GradScaler, apply, autocast

__all__ = ["GradScaler", "apply", "autocast"]
