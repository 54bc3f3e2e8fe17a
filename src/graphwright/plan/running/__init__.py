"""Execution of plans: memory, bound kernels, captured graphs, threads, overrides."""
