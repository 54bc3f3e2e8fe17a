"""Kernels in Triton for NVIDIA GPUs; they need the extra `triton`, and run in Triton's interpreter without a GPU.

`kernel.table` returns the handwritten kernels. `expressions` and `fused` write the source of generated ones, without
Triton.
"""
