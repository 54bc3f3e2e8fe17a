"""What a run keeps in memory besides the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphwright.program import Program


def activation_memory(program: Program, inputs: Mapping[str, Any]) -> int:
    """Bytes of the arena in which a run of these inputs lays out all that it computes: that of the plan.

    Args:
        program: before or after an operation.
        inputs: arrays by input name, as for a run.
    Raises: as `Program.compile`.
    """
    return program.compile(inputs).arena_bytes
