"""Factoring: trains and rings beside tensorly at equal ranks, planted rings, ratios at equal output error."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import tensorly.decomposition as tl

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import surgery as sg
from graphwright.surgery.factorise.compress import CompressOptions
from graphwright.surgery.factorise.factors import compression_ratio, reconstruct
from graphwright.surgery.factorise.methods import (
    METHODS,
    Unfolding,
    contract,
    recover,
    refine,
    relative_error,
    ring,
    train,
)
from graphwright.surgery.factorise.report import chain_speed
from graphwright.surgery.matrices import find_matrices, input_grams, output_error, values

TENSORS = ((16, 16, 16), (32, 32, 32), (48, 40, 44), (12, 12, 12, 12))
SWEEPS = 10
PLANTED = (((8, 8, 8), (2, 2, 2)), ((8, 9, 10), (3, 3, 3)), ((6,) * 4, (2, 3, 2, 3)), ((6,) * 4, (3,) * 4))


def decompositions() -> list[Figure]:
    figures = []
    for shape in TENSORS:
        tensor = np.random.default_rng(0).standard_normal(shape)
        d = len(shape)
        inner, around = [8] * (d - 1), [3, 4, *[6] * (d - 2)]
        start = np.random.default_rng(1)
        cores = [start.standard_normal((around[k], p, around[(k + 1) % d])) for k, p in enumerate(shape)]
        calls = {
            "train": lambda: train(Unfolding.of(tensor), ranks=inner),
            "tensorly tensor_train": lambda: tl.tensor_train(tensor, [1, *inner, 1]).factors,
            "ring": lambda: ring(Unfolding.of(tensor), ranks=around),
            "tensorly tensor_ring": lambda: tl.tensor_ring(tensor, [*around, around[0]]).factors,
            f"ring, {SWEEPS} sweeps": lambda: refine(tensor, cores, SWEEPS)[0],
            f"tensorly tensor_ring_als, {SWEEPS} sweeps": lambda: (
                tl.tensor_ring_als(tensor, [*around, around[0]], n_iter_max=SWEEPS, tol=0, random_state=0).factors
            ),
        }
        notes = {name: f"relative error {relative_error(tensor, [np.asarray(c) for c in call()]):.6f}"
                 for name, call in calls.items()}  # fmt: skip
        figure = Figure(
            f"Decomposing a Gaussian tensor {'x'.join(map(str, shape))}",
            f"ranks {inner} (train), {around} (ring), float64",
        )
        add_rounds(figure, rounds(calls, n=15, warm=1), note=notes)
        took = [row.value for row in figure.rows]
        figure.notes.append(f"tensorly / ours: train {took[1] / took[0]:.2f}, ring {took[3] / took[2]:.2f}, "
                           f"sweeps {took[5] / took[4]:.2f}")  # fmt: skip
        figures.append(figure)
    return figures


def recovery() -> Figure:
    figure = Figure(
        "Planted rings found to 1e-8", "random cores, 10 seeds, at most 300 sweeps and 3 starts each; tensorly once"
    )
    for shape, ranks in (
        ((8, 8, 8), (2, 2, 2)),
        ((8, 9, 10), (3, 3, 3)),
        ((6,) * 4, (2, 3, 2, 3)),
        ((6,) * 4, (3,) * 4),
    ):
        ours = theirs = 0
        seconds = [0.0, 0.0]
        for seed in range(10):
            rng = np.random.default_rng(100 + seed)
            d = len(shape)
            tensor = contract([rng.standard_normal((ranks[k], p, ranks[(k + 1) % d])) for k, p in enumerate(shape)])
            started = perf_counter()
            ours += recover(tensor, ranks, 300, 3, seed)[1][-1] <= 1e-8
            seconds[0] += perf_counter() - started
            started = perf_counter()
            found = tl.tensor_ring_als(tensor, [*ranks, ranks[0]], n_iter_max=300, tol=1e-12, random_state=seed).factors
            theirs += relative_error(tensor, [np.asarray(c) for c in found]) <= 1e-8
            seconds[1] += perf_counter() - started
        what = f"{'x'.join(map(str, shape))}, ranks {'-'.join(map(str, ranks))}"
        figure.add(f"{what}: ours", ours, "of 10", f"{seconds[0]:.2f} s")
        figure.add(f"{what}: tensorly", theirs, "of 10", f"{seconds[1]:.2f} s")
    return figure


def at_equal_error() -> Figure:
    """The ratio that each method reaches within an error of the outputs."""
    figure = Figure(
        "Ratio within an output error", "bundled model, layers.1.mlp.up [512, 192], 2048 calibration tokens"
    )
    model = gw.open("bundled")
    data = sg.Calibration.of(model, max_tokens=2048, context=256)
    found, _ = find_matrices(model.program, "layers.1.mlp.up")
    gram = input_grams(model.program, found, data)[found[0].path]
    w = values(model.program, found[0].key)
    for name, make in METHODS.items():
        fit = make(w, gram, CompressOptions())
        for allowed in (0.01, 0.05, 0.2):
            low, high, best, chain = 0.0, 1.0, 0.0, None
            for _ in range(12):  # the largest error of the method's own kind whose outputs are within the bound
                middle = (low + high) / 2
                factors = fit.within_error(middle)
                if output_error(w, reconstruct(factors), gram) <= allowed:
                    low, best, chain = middle, compression_ratio(factors), factors
                else:
                    high = middle
            took = None if chain is None or best <= 1 else chain_speed(chain)
            note = "not smaller" if took is None else f"{took.before:.3f} ms dense, {took.after:.3f} ms as factors"
            figure.add(f"{name}, error {allowed}", best, "x", note)
    for bits, low in ((8, 127), (4, 7)):
        scale = np.abs(w).max(axis=1, keepdims=True) / low
        error = output_error(w, np.rint(w / scale) * scale, gram)
        figure.add(f"int{bits} per row, for its bytes", 16 / bits, "x", f"output error {error:.4f}, against bfloat16")
    return figure


def run() -> list[Figure]:
    return [*decompositions(), recovery(), at_equal_error()]
