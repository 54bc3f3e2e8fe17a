"""Populations of small graphs in ragged arrays: what evolution does to all of them at once, compiled.

Genomes lie one behind another in columns (`genes`), so that crossover and mutation of a whole generation are one call
(`breed`), distances another (`compare`). `table` writes the rows that compute them, `forward` and `train` run these on
all cases; nothing here allocates per genome. Importing a module of this folder loads numba.
"""
