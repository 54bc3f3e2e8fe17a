"""The functions of `nn.functional` that are one call of one op, generated from the op's row; types in the `.pyi`."""

from __future__ import annotations

from graphwright.ops import surface

globals().update(surface.functions())
__all__ = list(surface.functions())  # pyright: ignore[reportUnsupportedDunderAll]
