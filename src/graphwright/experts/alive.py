"""Experts switched off and on: a dead expert has no tokens, and keeps all that it learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphwright.errors import UsageError
from graphwright.experts.routers import NotAMixture, threshold_routers
from graphwright.nn.router import AllDead

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


def set_alive(e: Transaction, layer: str, experts: Sequence[int], alive: bool = True) -> None:
    """Switch experts of a layer with a threshold router on or off; a plan of the program stays valid.

    Args:
        e: an open edit.
        layer: path of the layer or of its router, "" for a program that is one layer.
        experts: their numbers.
        alive: False to switch off.
    Raises: NotAMixture; UsageError for a number that the layer does not have; AllDead if no expert would be left.
    """
    routers = {path: r for r in threshold_routers(e.program) for path in (r.path, r.path.rpartition(".")[0])}
    if layer not in routers:
        raise NotAMixture("no layer of this name has a threshold router", where=layer, expected=", ".join(routers))
    key = routers[layer].alive
    now = e.program.weights.array(key).to_numpy().copy()
    if wrong := [i for i in experts if not 0 <= i < len(now)]:
        raise UsageError("the layer does not have this expert", where=layer, expected=f"0 to {len(now) - 1}", got=wrong)
    now[list(experts)] = alive
    if not now.any():
        raise AllDead("no expert would be left alive", where=layer, got=f"{len(now)} dead", fix="leave one alive")
    e.set_weight(key, now)
