"""The functions of `nn.functional` that call one op, generated from its definition; typed in `op_functions.pyi`."""

from __future__ import annotations

from graphwright.ops import surface

globals().update(surface.functions())
__all__ = list(surface.functions())  # pyright: ignore[reportUnsupportedDunderAll]
