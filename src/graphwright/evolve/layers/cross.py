"""Crossover of layers: what both parents have in the same shape comes whole from one of them, moments and all.

Layers are aligned by name: those of the start keep theirs, and a part that a mutation added is named by the run's
registry, so equal names are equal innovations. Structure, and layers that differ in size, are those of the fitter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.evolve.layers.member import Moments

if TYPE_CHECKING:
    from graphwright.program import Program


def cross(
    child: Program, moments: Moments, father: Program, others: Moments, rng: np.random.Generator
) -> tuple[Moments, list[str]]:
    """Give a fork of the mother layers of the father, each with one half; the moments of the child, and their names."""
    mine, theirs = _layers(child), _layers(father)
    taken: list[str] = []
    found = dict(moments)
    with child.edit("cross over", author="evolution", tool="graphwright.evolve", keep_undo=False) as e:
        for name, weights in mine.items():
            if {k: s for k, s in weights.items()} != theirs.get(name) or rng.random() < 0.5:
                continue
            taken.append(name)
            for key in weights:
                e.set_weight(key, father.weights.array(key))
                for moment in [m for m in found if _of(m, key)]:
                    del found[moment]
                found.update({m: value for m, value in others.items() if _of(m, key)})
    return found, taken


def _layers(p: Program) -> dict[str, dict[str, tuple[int, ...]]]:
    """Layer -> its weights (running statistics among them) and their shapes."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key in p.weights:
        found.setdefault(key.rpartition(".")[0], {})[key] = p.weights[key].shape
    return found


def _of(moment: str, key: str) -> bool:
    """Whether a state of an optimizer, `adam.<key>.steps`, belongs to a weight."""
    return moment.partition(".")[2].rpartition(".")[0] == key
