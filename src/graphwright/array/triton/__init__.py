"""Kernels in Triton for NVIDIA GPUs; they need the extra `triton`, and run in Triton's interpreter without a GPU."""
