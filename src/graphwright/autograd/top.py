"""Functions and dtypes of the package by torch's names: `gw.exp`, `gw.double`, ...; typed in `top.pyi`."""

from graphwright.array import Device, DType
from graphwright.autograd import names, pointwise
from graphwright.autograd.tensor import Tensor  # noqa: F401  # its methods fill the table

device, dtype = Device, DType
"""The classes of devices and dtypes by torch's names."""
ALIASES = {name: kind for name, kind in pointwise.CASTS.items() if name not in (kind.name, "char", "byte")}
"""Short name of a dtype -> the dtype."""
ALIASES["bool"] = pointwise.CASTS["bool"]
globals().update(names.functions() | ALIASES)
__all__ = sorted([*names.functions(), *ALIASES, "device", "dtype"])  # pyright: ignore[reportUnsupportedDunderAll]
