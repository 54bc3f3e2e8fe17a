"""Orthonormal factors: error and time of polar, QR and Newton-Schulz beside SVD, torch and geotorch.

QR, the cheapest peer, gives orthonormal columns but not the nearest ones. The eigenvectors of WᵀW, from which `polar`
starts, have a row of their own: what it takes beyond them is one Gram matrix and three products.
"""

from __future__ import annotations

from collections.abc import Callable

import geotorch
import numpy as np
import torch

from benchmarks.harness import Figure, add_rounds, rounds
from graphwright.surgery.orthogonal.methods import gram_error, newton_schulz, polar, qr

SIZES = (64, 128, 256, 512, 1024, 2048)


def by_svd(w: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(w)
    return u @ vt


def by_torch(w: np.ndarray) -> Callable[[], np.ndarray]:
    """The parametrization of torch, set to a weight: what it projects it to."""
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.float64)

    def project() -> np.ndarray:
        torch.nn.utils.parametrizations.orthogonal(linear, orthogonal_map="householder")
        with torch.no_grad():
            linear.weight = torch.from_numpy(w)
            found = linear.weight.detach().numpy()
        torch.nn.utils.parametrize.remove_parametrizations(linear, "weight")
        return found

    return project


def by_geotorch(w: np.ndarray) -> Callable[[], np.ndarray]:
    def project() -> np.ndarray:
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(w))
        geotorch.orthogonal(linear, "weight")
        return linear.weight.detach().numpy()

    return project


def run() -> list[Figure]:
    figures = []
    for n in SIZES:
        w = np.random.default_rng(n).standard_normal((n, n))
        gram = w.T @ w
        narrow = w.astype(np.float32)
        calls: dict[str, Callable[[], np.ndarray]] = {
            "polar": lambda w=w: polar(w),
            "SVD (numpy)": lambda w=w: by_svd(w),
            "QR, positive diagonal": lambda w=w: qr(w),
            "Newton-Schulz": lambda w=w: newton_schulz(w),
            "Newton-Schulz, float32": lambda w=narrow: newton_schulz(w),
            "torch parametrization": by_torch(w),
        }
        if n <= 512:  # it makes a QR of its own at each call and is slow beyond
            calls["geotorch"] = by_geotorch(w)
        notes = {}
        nearest = by_svd(w)
        for name, call in calls.items():
            q = np.asarray(call(), np.float64)
            away = np.linalg.norm(w - q) / np.linalg.norm(w - nearest)
            notes[name] = f"error {gram_error(q):.1e}, {away:.4f} x as far from W as the nearest"
        calls["eigenvectors of the Gram matrix alone"] = lambda gram=gram: np.linalg.eigh(gram)[1]
        figure = Figure(f"Orthonormal factor of a Gaussian [{n}, {n}]", "float64 unless said")
        add_rounds(figure, rounds(calls, n=15 if n <= 512 else 5, warm=1), note=notes)
        took = {row.who: row.value for row in figure.rows}
        fastest = min(("SVD (numpy)", "QR, positive diagonal", "Newton-Schulz"), key=lambda name: took[name])
        alone = took["eigenvectors of the Gram matrix alone"]
        others = min(took["SVD (numpy)"], took["Newton-Schulz"])
        figure.notes += [
            f"polar takes {took['polar'] / took[fastest]:.2f} x the time of {fastest}, of which the eigenvectors alone "
            f"take {alone / took[fastest]:.2f}",
            f"SVD and Newton-Schulz, which give the nearest factor too, take {others / took['polar']:.2f} x its time",
        ]
        figures.append(figure)
    return figures
