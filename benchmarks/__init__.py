"""One file a figure; `python -m benchmarks [NAME ...]` runs them and writes `benchmarks/results/MACHINE/NAME.json`."""

from graphwright.array.waiting import wait_briefly

wait_briefly()  # before torch loads, which these files import before the package does
