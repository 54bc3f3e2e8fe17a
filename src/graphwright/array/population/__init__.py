"""Populations of small graphs in ragged arrays: compiled loops over all genomes of a generation.

Genomes are stored one after another in columns (`genes`), so that crossover and mutation of a whole generation are one
call (`breed`), distances another (`species`). `table` orders the neurons of each genome, `passes` runs and trains them
on all cases; nothing here allocates per genome. Importing a module of this folder, except `names`, loads numba.
"""
