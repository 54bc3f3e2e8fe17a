"""Architectures: build a graph from a config and its tensors; the built-in families are in `families.py`."""
