"""Populations run on arrays: outputs of all genomes, steps of environments, gradient training; one native call each.

Results do not depend on the number of threads: genomes are independent, and each is computed by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from graphwright.array.population.forward import LANES, forward
from graphwright.array.population.genes import Genes
from graphwright.array.population.names import LOSSES
from graphwright.array.population.table import Table, tabulate
from graphwright.array.population.train import train

_TILE = 1024  # cases at a time: values of a genome stay in the cache


def _padded(count: int) -> int:
    return max(LANES, -(-count // LANES) * LANES)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros that begin at a cache line."""
    size = prod(shape)
    raw = np.zeros(size + LANES, np.float32)
    shift = -raw.ctypes.data % 64 // 4
    return raw[shift : shift + size].reshape(shape)


@dataclass(frozen=True, slots=True)
class Cases:
    """Inputs as the loops read them: float32 [tiles, steps, inputs + 1, padded], the last row of ones.

    Attributes:
        count, steps, inputs: sizes of what was given.
    """

    blocks: np.ndarray
    count: int
    steps: int
    inputs: int

    @staticmethod
    def of(x: np.ndarray, tile: int = _TILE) -> Cases:
        """Cases of an array [N, inputs] or [N, T, inputs]."""
        values = np.asarray(x, np.float32)
        values = values[:, None] if values.ndim == 2 else values
        count, steps, inputs = values.shape
        width = min(_padded(count), tile)
        tiles = max(1, -(-count // width))
        blocks = _aligned((tiles, steps, inputs + 1, width))
        blocks[:, :, inputs] = 1.0
        for k in range(tiles):
            part = values[k * width : (k + 1) * width]
            blocks[k, :, :inputs, : len(part)] = part.transpose(1, 2, 0)
        return Cases(blocks, count, steps, inputs)


def spread(call: Callable[[int, int, int], Any], genomes: int, threads: int) -> None:
    """Call with (thread, low, high) over equal shares of the genomes."""
    threads = max(1, min(threads, genomes))
    ends = [genomes * k // threads for k in range(threads + 1)]
    if threads == 1:
        call(0, 0, genomes)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(call, k, ends[k], ends[k + 1]) for k in range(threads)]:
            done.result()


def outputs(table: Table, genes: Genes, cases: Cases, threads: int = 1) -> np.ndarray:
    """What all genomes answer to all cases: float32 [G, N, T, outputs]; delayed links read 0 before the first step."""
    genomes, out = len(table.row_off) - 1, table.outputs.shape[1]
    tiles, steps, _, width = cases.blocks.shape
    ring, most = table.ring, table.most
    run = forward()
    y = np.empty((tiles, genomes, steps, out, width), np.float32)
    memory = [_aligned((ring, most, width)) for _ in range(max(1, min(threads, genomes)))]

    def call(thread: int, low: int, high: int) -> None:
        values = memory[thread].ctypes.data
        for k in range(tiles):
            x = cases.blocks[k].ctypes.data
            at = y[k].ctypes.data
            run(
                table, genes.weight, x, steps, 0, cases.inputs, steps, 0, width, values, 0, ring, most, at, out,
                low, high,
            )  # fmt: skip

    spread(call, genomes, threads)
    whole = y[0] if tiles == 1 else y.transpose(1, 2, 3, 0, 4).reshape(genomes, steps, out, tiles * width)
    return whole[..., : cases.count].transpose(0, 3, 1, 2)


class Session:
    """A population in environments: each call is one step of all genomes in all their episodes.

    Args:
        table, genes: the population.
        episodes: of each genome.
        inputs: numbers that a genome sees.
    """

    def __init__(self, table: Table, genes: Genes, episodes: int, inputs: int, threads: int = 1) -> None:
        self._threads = threads
        self._genomes, self._out = len(table.row_off) - 1, table.outputs.shape[1]
        self._width, self._episodes, self._inputs = _padded(episodes), episodes, inputs
        self._ring, self._most = table.ring, table.most
        self._x = _aligned((self._genomes, self._ring, inputs + 1, self._width))
        self._x[:, :, inputs] = 1.0
        self._y = _aligned((self._genomes, 1, self._out, self._width))
        self._values = _aligned((self._genomes, self._ring, self._most, self._width))
        self._run, self._steps = forward(), 0
        # addresses and strides do not change from step to step
        self._before = (table, genes.weight, self._x.ctypes.data, self._ring, self._x[0].nbytes, inputs, 1)
        self._after = (self._width, self._values.ctypes.data, self._values[0].nbytes, self._ring, self._most)
        self._after += (self._y.ctypes.data, self._out)

    def step(self, x: np.ndarray) -> np.ndarray:
        """Float32 [G, episodes, inputs] to [G, episodes, outputs]; valid until the next step."""
        self._x[:, self._steps % self._ring, : self._inputs, : self._episodes] = x.transpose(0, 2, 1)
        if self._threads == 1:
            self._run(*self._before, self._steps, *self._after, 0, self._genomes)
        else:
            spread(self._part, self._genomes, self._threads)
        self._steps += 1
        return self._y[:, 0, :, : self._episodes].transpose(0, 2, 1)

    def _part(self, thread: int, low: int, high: int) -> None:
        self._run(*self._before, self._steps, *self._after, low, high)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a population is trained on.

    Attributes:
        cases: the inputs; target: float32 [T, outputs, padded]; share: what each case and step counts.
        heads: int64 [H, 3]: loss, first output, one behind the last; worth: float64 [H], what a head counts.
    """

    cases: Cases
    target: np.ndarray
    share: np.ndarray
    heads: np.ndarray
    worth: np.ndarray

    @staticmethod
    def of(
        x: np.ndarray,
        target: np.ndarray,
        loss: str | Sequence[tuple[str, int, int, float]],
        counts: np.ndarray | None = None,
    ) -> Lesson:
        """Inputs [N, inputs] or [N, T, inputs]; targets [N, outputs] or [N, T, outputs], one-hot for cross entropy.

        Args:
            loss: of all outputs; or of several heads: loss, first output, one behind the last, weight.
            counts: [N, T]; 0 leaves a step of a case out.
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
    table: Table,
    genes: Genes,
    lesson: Lesson,
    epochs: np.ndarray,
    lr: np.ndarray,
    clip: float = 1.0,
    threads: int = 1,
) -> np.ndarray:
    """Steps of Adam on all genomes, in place; the whole lesson is one batch.

    Args:
        epochs: int64 [G]; lr: float64 [G].
    Returns: float64 [G, 2]: losses before the first and before the last step.
    """
    genomes, out = len(table.row_off) - 1, table.outputs.shape[1]
    _, steps, _, width = lesson.cases.blocks.shape
    most = table.most
    losses = np.zeros((genomes, 2))
    memory = [_aligned((3, steps, most, width)) for _ in range(max(1, min(threads, genomes)))]
    run = train()

    def call(thread: int, low: int, high: int) -> None:
        run(
            table, genes, lesson.cases.blocks.ctypes.data, lesson.cases.inputs, steps, width,
            lesson.target.ctypes.data, lesson.share.ctypes.data, out, lesson.heads, lesson.worth,
            np.asarray(epochs, np.int64), np.asarray(lr, np.float64), float(clip), memory[thread].ctypes.data, most,
            losses, low, high,
        )  # fmt: skip

    spread(call, genomes, threads)
    return losses


__all__ = ["Cases", "Lesson", "Session", "fit", "outputs", "tabulate"]
