"""All genomes on all cases: the rows of a table, 16 cases at a time. Importing this module loads numba.

Memory: inputs and the bias are shared rows of cases; a genome's values live in one buffer per call, as many steps deep
as the longest delay asks for. Cases are padded to whole vectors.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array.population.activations import activate
from graphwright.array.population.table import Table
from graphwright.array.vm import vector as v
from graphwright.array.vm.machine import source
from graphwright.native import njit

LANES = 16


@cache
def forward() -> Any:
    """The compiled loop; see `run` in its body for what the arguments are."""
    return _build(source(Path(__file__).parent))


def _build(stamp: int) -> Any:
    @njit(cache=True, error_model="numpy", nogil=True)
    def run(
        table: Table,
        weight: np.ndarray,
        x: int,
        x_ring: int,
        genome_stride: int,
        inputs: int,
        steps: int,
        begin: int,
        padded: int,
        values: int,
        values_stride: int,
        ring: int,
        most_rows: int,
        y: int,
        outputs: int,
        low: int,
        high: int,
    ) -> int:
        """Genomes low to high.

        Args:
            x: address of float32 [x_ring, inputs + 1, padded], or with a stride in bytes one such block per genome;
                step t lies at t modulo x_ring.
            begin: step at which this call starts; what came before lies in `values`.
            values: address of float32 [ring, most_rows, padded], zeroed before the first step; with a stride in bytes
                one per genome, else all genomes use it in turn, and it is zeroed here.
            y: address of float32 [G, steps, outputs, padded].
        """
        row_bytes = 4 * padded
        step_bytes = row_bytes * most_rows
        zero = np.float32(0.0)
        for g in range(low, high):
            base, count = table.row_off[g], table.row_off[g + 1] - table.row_off[g]
            feed, mine = x + g * genome_stride, values + g * values_stride
            if ring > 1 and not values_stride:
                for n in range(0, ring * step_bytes, 4 * LANES):
                    v.store(mine + n, v.splat(zero))
            for t in range(steps):
                now = mine + ((begin + t) % ring) * step_bytes
                for r in range(count):
                    kind, first, last = table.rows[base + r, 0], table.rows[base + r, 1], table.rows[base + r, 2]
                    for n in range(0, row_bytes, 4 * LANES):
                        total = v.splat(zero)
                        for i in range(first, last):
                            src, delay = table.links[i, 0], table.links[i, 1]
                            w = v.splat(weight[table.links[i, 2]])
                            if src > inputs:
                                at = now
                                if delay:
                                    at = mine + ((begin + t + ring - delay) % ring) * step_bytes
                                part = v.mul(v.load(at + (src - inputs - 1) * row_bytes + n), w)
                            elif delay > begin + t:
                                part = v.splat(zero)
                            else:
                                part = v.mul(
                                    v.load(
                                        feed + (((begin + t - delay) % x_ring) * (inputs + 1) + src) * row_bytes + n
                                    ),
                                    w,
                                )
                            total = part if i == first else v.add(total, part)
                        v.store(now + r * row_bytes + n, activate(kind, total))
                out = y + (g * steps + t) * outputs * row_bytes
                for o in range(outputs):
                    for n in range(0, row_bytes, 4 * LANES):
                        v.store(out + o * row_bytes + n, v.load(now + np.int64(table.outputs[g, o]) * row_bytes + n))
        return 0 if stamp else 1

    return run
