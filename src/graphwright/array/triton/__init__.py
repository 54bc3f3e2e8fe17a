"""Kernels in Triton for NVIDIA GPUs; they need the extra `triton`, and run in Triton's interpreter without a GPU.

Importing this folder fills the table of kernels (`kernel.TRITON`), if Triton is installed.
"""

from importlib import import_module
from importlib.util import find_spec

_FAMILIES = (
    "attention embedding experts grouped launch loss norm optimize paged random reduce rope scatter select softmax"
)
if find_spec("triton") is not None:
    for _family in _FAMILIES.split():
        import_module(f"{__name__}.{_family}")  # registers its kernels
