"""Run populations: compute outputs, take steps in environments, train, each by one native call per thread.

Results do not depend on the number of threads: genomes are independent, and each is computed by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from graphwright.array.population.genes import Genes
from graphwright.array.population.names import LOSSES
from graphwright.array.population.passes import LANES, advance, answer, train
from graphwright.array.population.table import Table

_TILE = 1024  # cases at a time: values of a genome remain in the cache


def _padded(count: int) -> int:
    return max(LANES, -(-count // LANES) * LANES)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Allocate float32 zeros aligned to a cache line."""
    size = prod(shape)
    raw = np.zeros(size + LANES, np.float32)
    shift = -raw.ctypes.data % 64 // 4
    return raw[shift : shift + size].reshape(shape)


@dataclass(frozen=True, slots=True)
class Cases:
    """Inputs of networks, in the layout that the compiled loops read.

    Attributes:
        blocks: float32 [tiles, steps, inputs + 1, padded]: tiles of cases, padded to whole vectors. Entry `inputs` of
            the third axis is 1, the bias.
        count, steps, inputs: number of cases, of steps and of inputs.
    """

    blocks: np.ndarray
    count: int
    steps: int
    inputs: int

    @staticmethod
    def of(x: np.ndarray, tile: int = _TILE) -> Cases:
        """Pack inputs [N, inputs] or [N, T, inputs] of N cases and T steps, `tile` cases per tile."""
        values = np.asarray(x, np.float32)
        values = values[:, None] if values.ndim == 2 else values
        count, steps, inputs = values.shape
        width = min(_padded(count), tile)
        tiles = max(1, -(-count // width))
        blocks = np.zeros((tiles, steps, inputs + 1, width), np.float32)
        blocks[:, :, inputs] = 1.0
        for k in range(tiles):
            part = values[k * width : (k + 1) * width]
            blocks[k, :, :inputs, : len(part)] = part.transpose(1, 2, 0)
        return Cases(blocks, count, steps, inputs)


def spread(call: Callable[[int, int], Any], genomes: int, threads: int) -> None:
    """Run `call(low, high)` on consecutive ranges of genomes, one per thread and about equally large."""
    threads = max(1, min(threads, genomes))
    if threads == 1:
        call(0, genomes)
        return
    ends = [genomes * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, ends[:-1], ends[1:]))


def outputs(table: Table, genes: Genes, cases: Cases, threads: int = 1) -> np.ndarray:
    """Return the outputs of all genomes, float32 [G, N, T, outputs]; delayed links read 0 before the first step."""
    genomes, out = table.outputs.shape
    tiles, steps, _, width = cases.blocks.shape
    y = np.empty((tiles, genomes, steps, out, width), np.float32)
    room = table.ring * table.most * width + LANES

    def call(low: int, high: int) -> None:
        answer(table, genes.weight, cases.blocks, np.empty(room, np.float32), y, low, high)

    spread(call, genomes, threads)
    whole = y[0] if tiles == 1 else y.transpose(1, 2, 3, 0, 4).reshape(genomes, steps, out, tiles * width)
    return whole[..., : cases.count].transpose(0, 3, 1, 2)


class Session:
    """A population that acts in environments; a call of `step` is one step of all genomes in all their episodes.

    Args:
        table, genes: the population.
        episodes: number of episodes per genome.
        inputs: number of inputs of a genome.
    """

    def __init__(self, table: Table, genes: Genes, episodes: int, inputs: int, threads: int = 1) -> None:
        self._table, self._weight, self._threads = table, genes.weight, threads
        self._genomes, out = table.outputs.shape
        width = _padded(episodes)
        self._x = _aligned((self._genomes, table.ring, inputs + 1, width))
        self._x[:, :, inputs] = 1.0
        self._y = _aligned((self._genomes, out, width))
        self._values = _aligned((self._genomes, table.ring, table.most, width))
        self._shown = self._x[:, :, :inputs, :episodes].transpose(1, 0, 3, 2)
        self._answers = self._y[:, :, :episodes].transpose(0, 2, 1)
        self._steps = 0

    def step(self, x: np.ndarray) -> np.ndarray:
        """Map inputs, float32 [G, episodes, inputs], to outputs [G, episodes, outputs], valid until the next step."""
        self._shown[self._steps % len(self._shown)] = x
        spread(self._part, self._genomes, self._threads)
        self._steps += 1
        return self._answers

    def _part(self, low: int, high: int) -> None:
        advance(self._table, self._weight, self._x, self._values, self._y, self._steps, low, high)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training data of a population.

    Attributes:
        cases: the inputs.
        target: float32 [T, outputs, padded]; the last axis holds the cases, padded to whole vectors.
        share: float32 [T, padded], weights of the cases at each step, with sum 1.
        heads: int64 [H, 3]; per head the kind of its loss (index into `LOSSES`), its first output, its last output + 1.
        loss_weights: float64 [H], a factor per head.
    """

    cases: Cases
    target: np.ndarray
    share: np.ndarray
    heads: np.ndarray
    loss_weights: np.ndarray

    @staticmethod
    def of(
        x: np.ndarray, target: np.ndarray, loss: str | Sequence[tuple[str, int, int, float]],
        counts: np.ndarray | None = None,
    ) -> Lesson:  # fmt: skip
        """Pack inputs [N, inputs] or [N, T, inputs] and targets [N, outputs] or [N, T, outputs].

        Args:
            target: one-hot for cross entropy.
            loss: `mse`, `bce` or `cross_entropy`, or a list of heads (loss, first output, last output + 1, weight).
            counts: [N, T], relative weights of the cases at each step; 0 excludes a step of a case.
        """
        cases = Cases.of(x, tile=_padded(len(x)))
        width = cases.blocks.shape[-1]
        values = np.asarray(target, np.float32)
        values = values[:, None] if values.ndim == 2 else values
        wanted = _aligned((cases.steps, values.shape[2], width))
        wanted[:, :, : len(values)] = values.transpose(1, 2, 0)
        share = _aligned((cases.steps, width))
        share[:, : cases.count] = 1.0 if counts is None else np.asarray(counts, np.float32).T
        share /= share.sum()
        heads = [(loss, 0, values.shape[2], 1.0)] if isinstance(loss, str) else list(loss)
        table = np.array([(LOSSES.index(kind), start, stop) for kind, start, stop, _ in heads], np.int64)
        return Lesson(cases, wanted, share, table, np.array([head[3] for head in heads]))


def fit(
    table: Table, genes: Genes, lesson: Lesson, epochs: np.ndarray, lr: np.ndarray, clip: float = 1.0, threads: int = 1
) -> np.ndarray:
    """Train all genomes in place with Adam; the whole lesson is one batch.

    Args:
        epochs: int64 [G], number of steps of each genome.
        lr: float64 [G], learning rates.
        clip: bound on the norm of a genome's gradient; 0 for no bound.
    Returns: float64 [G, 2]: losses before the first and before the last step.
    """
    genomes, out = len(table.row_off) - 1, table.outputs.shape[1]
    _, steps, _, width = lesson.cases.blocks.shape
    most = table.most
    losses, gradient = np.zeros((genomes, 2)), np.empty(len(genes.weight), np.float32)  # genomes share no weights

    def call(low: int, high: int) -> None:
        memory = _aligned((3, steps, most, width))
        train(
            table, genes, lesson.cases.blocks.ctypes.data, lesson.cases.inputs, steps, width,
            lesson.target.ctypes.data, lesson.share.ctypes.data, out, lesson.heads, lesson.loss_weights,
            np.asarray(epochs, np.int64), np.asarray(lr, np.float64), float(clip), memory.ctypes.data, most,
            gradient, losses, low, high,
        )  # fmt: skip

    spread(call, genomes, threads)
    return losses
