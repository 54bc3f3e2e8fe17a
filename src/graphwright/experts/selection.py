"""Selection of experts to cut, by scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import UsageError
from graphwright.experts.routed import RoutedLayer, routed_layers
from graphwright.program.axes.units import Units
from graphwright.program.errors import StaleSelection

if TYPE_CHECKING:
    from graphwright.program.program import Program

COMPARABLE = frozenset({"effect", "share", "mass"})
"""Scores whose values in different layers are quantities of one kind; the others are divided by their layer's mean."""


class TooFewExperts(UsageError):
    """A layer would have fewer experts than each of its tokens uses."""


def check_left(layer: RoutedLayer, left: int) -> None:
    """Raise TooFewExperts if a layer with `left` experts has fewer than its tokens use."""
    if left < (layer.k or 1):
        raise TooFewExperts("fewer experts would be left than each token uses", where=layer.name,
                            expected=f"at least {layer.k or 1} of {layer.size}", got=left)  # fmt: skip


def least(
    p: Program, scored: Mapping[str, np.ndarray], n: int | float, *, per_layer: bool = True, comparable: bool = False
) -> Units:
    """Select the experts with the least scores, for `cut_units`.

    Args:
        p: the program.
        scored: {layer: scores [E]}.
        n: number of experts, of each layer or, if not `per_layer`, of all; a float is their share, rounded down.
        per_layer: whether every layer loses the same number. Otherwise layers compete, and each keeps at least as many
            experts as its tokens use.
        comparable: whether scores of different layers are of one kind; otherwise each is divided by its layer's mean.
    Raises: TooFewExperts if a layer would keep fewer experts than its tokens use; StaleSelection for scores of another
        number of experts.
    """
    layers = routed_layers(p)
    for name, row in scored.items():
        if len(row) != layers[name].size:
            raise StaleSelection("the layer has another number of experts than were scored", where=name,
                                 expected=layers[name].size, got=len(row), fix="score again")  # fmt: skip
    chosen: dict[str, tuple[int, ...]] = {}
    if per_layer:
        for name, row in scored.items():
            count = int(len(row) * n + 1e-9) if isinstance(n, float) else n
            check_left(layers[name], len(row) - count)
            chosen[layers[name].axis.name] = tuple(sorted(np.argsort(row, kind="stable")[:count].tolist()))
    else:
        total = sum(map(len, scored.values()))
        count = int(total * n + 1e-9) if isinstance(n, float) else n
        unit = {name: 1.0 if comparable else float(np.abs(row).mean()) or 1.0 for name, row in scored.items()}
        ranked = sorted((float(v) / unit[name], i, e) for i, (name, row) in enumerate(scored.items())
                        for e, v in enumerate(row))  # fmt: skip
        names, gone = list(scored), {name: list[int]() for name in scored}
        for _, i, e in ranked:
            layer = layers[names[i]]
            if sum(map(len, gone.values())) < count and len(gone[names[i]]) < layer.size - (layer.k or 1):
                gone[names[i]].append(e)
        if sum(map(len, gone.values())) < count:
            raise TooFewExperts("the layers cannot lose this many experts", where=p.name, got=count,
                                expected=f"at most {sum(map(len, gone.values()))}")  # fmt: skip
        chosen = {layers[name].axis.name: tuple(sorted(ids)) for name, ids in gone.items()}
    return Units(p, chosen, {layers[name].axis.name: layers[name].size for name in scored})
