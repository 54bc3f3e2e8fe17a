"""Populations of small graphs in ragged arrays: compiled loops over all genomes of a generation.

Genomes are stored one after another in columns (`genes`), so that crossover and mutation of a whole generation are one
call (`breed`), distances another (`compare`). `table` orders the neurons of each genome, `forward` and `train` run them
on all cases; nothing here allocates per genome. Importing a module of this folder loads numba.
"""
