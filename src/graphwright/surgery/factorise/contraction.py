"""In which order a vector is contracted with the cores, found by dynamic programming over all subsets of them.

Cores are never contracted with each other, so that no intermediate value is a matrix of the size of W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple


class Step(NamedTuple):
    """One product.

    Attributes:
        core: which one comes in.
        kept: labels of the running value that stay, in their order.
        summed: labels that the product sums over.
        free: labels of the core that come in.
    """

    core: int
    kept: tuple[str, ...]
    summed: tuple[str, ...]
    free: tuple[str, ...]


def contraction_order(
    start: Sequence[str], cores: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> tuple[list[Step], int]:
    """The cheapest order, and its floating point operations per vector.

    Args:
        start: labels of the vector's modes.
        cores: labels of each core's axes; a label that two of vector and cores have is summed over.
        sizes: of all labels.
    """
    whole = (1 << len(cores)) - 1
    best: dict[int, tuple[int, int, int]] = {0: (0, -1, -1)}  # cores done -> cost, last core, cores done before it
    for done in range(whole + 1):  # every subset comes after the subsets of it
        if done not in best:
            continue
        value = set(_open(start, cores, done))
        for k, labels in enumerate(cores):
            if done >> k & 1:
                continue
            kept = prod(sizes[name] for name in value - set(labels))
            cost = best[done][0] + 2 * kept * prod(sizes[name] for name in labels)
            after = done | 1 << k
            if after not in best or cost < best[after][0]:
                best[after] = cost, k, done
    order: list[int] = []
    done = whole
    while done:
        _, k, done = best[done]
        order.append(k)
    steps: list[Step] = []
    running = list(start)
    for k in reversed(order):
        shared = tuple(name for name in cores[k] if name in running)
        kept = tuple(name for name in running if name not in shared)
        free = tuple(name for name in cores[k] if name not in shared)
        steps.append(Step(k, kept, shared, free))
        running = [*kept, *free]
    return steps, best[whole][0]


def _open(start: Sequence[str], cores: Sequence[Sequence[str]], done: int) -> tuple[str, ...]:
    """Labels of the running value after some cores."""
    count: dict[str, int] = dict.fromkeys(start, 1)
    for k, labels in enumerate(cores):
        if done >> k & 1:
            for name in labels:
                count[name] = count.get(name, 0) + 1
    return tuple(name for name, n in count.items() if n == 1)
