"""Functions of the package by torch's names: `gw.exp`, `gw.softmax`, ...; typed in `top.pyi`."""

from graphwright.autograd import names
from graphwright.autograd.tensor import Tensor  # noqa: F401  # its methods fill the table

globals().update(names.functions())
__all__ = sorted(names.functions())  # pyright: ignore[reportUnsupportedDunderAll]
