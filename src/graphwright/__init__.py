"""Graphwright: open a neural network as a graph, edit it while it runs, export it with proof."""

__version__ = "0.1.0.dev0"
