"""One file a figure; `python -m benchmarks [NAME ...]` runs them and writes `benchmarks/results/MACHINE/NAME.json`."""

import os

from graphwright.array.backend import SPINS

os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch loads, which these files do before the package does
