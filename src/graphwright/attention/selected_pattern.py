"""The blocks that native sparse attention selects often, as edges of a pattern."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from graphwright.attention.native_sparse import NativeSparse
from graphwright.autograd import Tensor, as_tensor, no_grad
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.patterns import Pattern
from graphwright.report import Report


@dataclass(frozen=True, slots=True)
class SelectedPattern(Report):
    """A pattern made of selected blocks, and how far it moves the output on the same inputs.

    Attributes:
        min_freq: least share of the queries of a block, in all sequences, that read a key block.
        edges: number of edges, those of blocks that every query reads included.
        density: edges relative to all causal pairs of blocks.
        drift: largest difference of an entry of the module's output if the selected branch attends over the pattern.
        mean_drift: mean absolute difference.
        pattern: one plane per key head; its edges are one entry of its journal.
        frequency: float64 [G, query blocks, key blocks], the shares.
    """

    min_freq: float
    edges: int
    density: float
    drift: float
    mean_drift: float
    pattern: Pattern = field(repr=False)
    frequency: np.ndarray = field(repr=False)

    def _text(self) -> str:
        head = (
            f"{self.edges} edges, {self.density:.0%} of the causal blocks, read by {self.min_freq:.0%} of the queries"
        )
        return f"{head}\noutput moves by at most {self.drift:.3g}, {self.mean_drift:.3g} on average"


def to_pattern(attention: NativeSparse, x: Tensor, min_freq: float = 0.5) -> SelectedPattern:
    """Connect the blocks that at least a share of the queries of a block read, and measure the change of the output.

    Queries choose as in evaluation: without ghosts.

    Args:
        attention: the module.
        x: inputs of the module [B, T, dim]; the pattern is for T tokens.
        min_freq: the share, in [0, 1].
    Raises: UsageError for a share out of range; ShapeError.
    """
    if not 0 <= min_freq <= 1:
        raise UsageError("invalid share of queries", where="min_freq", expected="0 to 1", got=min_freq)
    with no_grad():
        made = attention.attend(x)
        time, size, groups = x.shape[1], attention.block, attention.kv_heads
        frequency = _frequency(attention, made.choice.blocks.numpy(), made.choice.gates.numpy(), time)
        pattern = Pattern(time, block=size, planes=groups)
        planes, queries, keys = np.nonzero((frequency >= min_freq) & (frequency > 0))
        with pattern.edit(f"blocks read by {min_freq:.0%} of the queries", author="pass") as e:
            e.connect_many(queries, keys, planes)
        q, k, v = attention._selected_operands(x)
        options = {"scale": attention.head_dim**-0.5, "planes": groups}
        with pattern.reading():
            selected = call("block_sdpa", q, k, v, as_tensor(pattern.table), **options)[0]
        moved = attention._mixed(x, (made.compressed, selected, made.sliding), made.choice).out - made.out
    distance = np.abs(moved.numpy("float64"))
    blocks = -(-time // size)
    density = len(queries) / (groups * blocks * (blocks + 1) / 2)
    return SelectedPattern(
        float(min_freq), len(queries), density, float(distance.max()), float(distance.mean()), pattern, frequency
    )


def _frequency(attention: NativeSparse, lists: np.ndarray, gates: np.ndarray, time: int) -> np.ndarray:
    """Return the share of the queries of each query block that read each key block [G, query blocks, key blocks]."""
    size = attention.block
    blocks = -(-time // size)
    read = np.zeros((*lists.shape[:3], blocks + 1))
    np.put_along_axis(read, np.where((lists >= 0) & (gates != 0), lists, blocks), 1.0, axis=3)
    count = read[..., :blocks].sum(axis=0)  # [G, R, key blocks]; whole numbers, so that a share is exact
    if attention.granularity == "tile":
        return count / len(lists)
    starts = np.arange(0, time, size)
    queries = np.minimum(time - starts, size)[:, None]
    return np.add.reduceat(count, starts, axis=1) / (len(lists) * queries)
