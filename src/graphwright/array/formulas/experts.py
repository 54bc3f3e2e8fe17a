"""Operands and constants of mixtures of experts, which ops and kernels share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FIRST = 5
"""Index of the first operand of `expert_mlp` that belongs to an expert."""
FIRST_HEAD, HEAD_WIDTH = 6, 4
"""Index of the first operand of `routed_attention` that belongs to a head, and the operands of one head: q, k, v, o."""
FIRST_ENTRY, ENTRY_WIDTH = 5, 2
"""The same of `routed_entries`: k, v."""
FIRST_CACHED, CACHED_WIDTH = 10, 2
"""The same of `routed_attention_cached`: q, o."""
KINDS = ("mlp", "gated", "oai")
ACTS = ("silu", "relu", "tanh", "sigmoid", "gelu", "gelu_tanh")
"""Values of the attributes `kind` and `act` of `expert_mlp`."""
LEAST, MOST, GATHERED = 64, 256, 4
"""The least and the most pairs of a chunk of the algorithm `sorted`, and those of `gather`."""
LIMIT, SLOPE = 7.0, 1.702
"""The clamp of a gpt-oss expert, and the factor in its sigmoid."""


class Expert(NamedTuple):
    """The operands of one expert: gate and up [I, C] and down [C, I], each with a bias or None; no gate for `mlp`."""

    gate: Any
    gate_bias: Any
    up: Any
    up_bias: Any
    down: Any
    down_bias: Any


def group_width(attrs: Mapping[str, Any]) -> int:
    """Return the number of operands of one expert."""
    return (2 if attrs["kind"] == "mlp" else 3) * (2 if attrs["bias"] else 1)


def experts_of(operands: Sequence[Any], attrs: Mapping[str, Any]) -> list[Expert]:
    """Return the experts that these operands, `expert_mlp`'s from `FIRST` on, belong to."""
    bias, width = attrs["bias"], group_width(attrs)
    found = []
    for start in range(0, len(operands), width):
        group = list(operands[start : start + width])
        pairs = [(m, b) for m, b in zip(group[::2], group[1::2], strict=True)] if bias else [(m, None) for m in group]
        found.append(Expert(*(t for pair in [(None, None)] * (3 - len(pairs)) + pairs for t in pair)))
    return found


def chunk_size(pairs: int, low: bool, algorithm: str) -> int:
    """Return how many pairs of a token and an expert, of `pairs` in all, are multiplied at once.

    In 16 bits (`low`) all of them: gradients of chunks are not added up.
    """
    if algorithm == "gather" and not low:
        return GATHERED
    return max(pairs, 1) if low else min(max(pairs // 16, LEAST), MOST)


ALGORITHMS = ("sorted", "dense", "gather", "reference")
"""Values of the attribute `algorithm` other than "auto"."""
IN_VM = frozenset({"sorted", "gather"})
"""The algorithms of which the VM has code."""


class Choice(NamedTuple):
    """The algorithm of an op, and the reason for it."""

    algorithm: str
    why: str


FEW_PAIRS, FEW_EACH = 64, 8
"""Pairs in all, and on average for one expert, up to which `gather` is the fastest in float32.

Measured by `python -m benchmarks expert_algorithms`: above them `sorted` is. `dense` was never, not even if all experts
are chosen.
"""


def algorithm_of(x: Any, rows: Any, matrices: Sequence[Any], attrs: Mapping[str, Any]) -> Choice:
    """Return how an op runs experts on x [N, C] and runs of tokens; all arguments have the fields `shape` and `dtype`.

    It depends on shapes, dtypes and attributes alone.
    """
    if attrs["algorithm"] != "auto":
        return Choice(attrs["algorithm"], "as asked for")
    pairs, experts = rows.shape[0], len(matrices) // group_width(attrs)
    if not str(x.dtype).endswith("float32"):  # torch puts its own name before
        return Choice("sorted", f"the fastest in {x.dtype}")
    if pairs <= FEW_PAIRS and pairs <= FEW_EACH * experts:
        return Choice("gather", f"the fastest for {pairs} pairs and {experts} experts")
    return Choice("sorted", f"the fastest for {pairs} pairs and {experts} experts")
