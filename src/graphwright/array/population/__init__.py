"""Populations of small networks as ragged arrays, processed by compiled loops over all genomes.

Genomes are stored one after another in columns (`genes`), so that crossover and mutation of a whole generation are one
call (`breed`) and all distances another (`species`). `table` orders the neurons of each genome, `passes` runs and
trains all genomes on all cases; no loop allocates memory per genome. Importing a module of this folder, except `names`,
loads numba.
"""
