"""Architectures: how a config and its tensors become a graph; one file per family."""
