"""Optimizers, schedules, clipping and mixed precision, all written as tensor code."""

from __future__ import annotations

from graphwright.optim import amp
from graphwright.optim.adamw import AdamW
from graphwright.optim.clip import clip_grad_norm_, clip_grad_value_
from graphwright.optim.schedule import warmup_cosine

__all__ = ["AdamW", "amp", "clip_grad_norm_", "clip_grad_value_", "warmup_cosine"]
