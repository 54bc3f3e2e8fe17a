"""One file a figure; `python -m benchmarks [NAME ...]` runs them and writes `benchmarks/results/MACHINE/NAME.json`."""
