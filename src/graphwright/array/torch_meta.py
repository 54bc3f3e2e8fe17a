"""Modules of torch without memory: what is built inside has shapes alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def on_meta() -> AbstractContextManager[object]:
    """A context in which torch makes tensors on its meta device."""
    return torch.device("meta")
