"""Kernels in Triton for NVIDIA GPUs; they need the extra `triton`, and run in Triton's interpreter without a GPU."""

from importlib import import_module

_FAMILIES = (
    "attention embedding experts grouped launch loss norm optimize paged random reduce rope scatter select softmax"
)
for _family in _FAMILIES.split():
    import_module(f"{__name__}.{_family}")  # registers its kernels
