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
