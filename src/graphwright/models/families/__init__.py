"""The families that come with the package, one file each; importing this registers them."""

from __future__ import annotations

from graphwright.models.families import llama, mistral, qwen2, qwen3

__all__ = ["llama", "mistral", "qwen2", "qwen3"]
