"""Architectures: what a config and its tensors mean as a graph, a family a file."""
