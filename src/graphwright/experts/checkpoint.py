"""Gradient checkpoints of routed models: what experts compute is recomputed, how tokens are routed is not."""

from __future__ import annotations

from collections.abc import Iterable

from graphwright.experts.routed import routed_layers
from graphwright.program.axes.units import layers
from graphwright.program.kinds import KINDS
from graphwright.program.program import Program


def checkpoint(program: Program, blocks: Iterable[str] | None = None) -> int:
    """Mark blocks for gradient checkpointing, except what chooses and weighs experts; return the number of marks.

    Choices, runs and the weights of experts are kept: they are small, and a choice that is computed again could differ.
    See `Program.checkpoint`.

    Args:
        program: a program with routed layers.
        blocks: paths of modules to mark, such as `layers.3`; by default each module of the lists that contain routed
            layers. A routed layer outside of lists is a block of its own.
    Raises: NotAMixture; UsageError for nodes that are already marked.
    """
    found, kept = routed_layers(program), set()
    for layer in found.values():
        inside = program.dependents([layer.tokens.node])
        kept |= program.reachable([layer.choice, layer.weights]) & inside - {layer.tokens.node}
    chosen = list(blocks) if blocks is not None else _blocks(program, list(found))
    count = 0
    for block in chosen:
        nodes = [n for n in program.with_prefix(f"{block}.") if program.op(n) not in KINDS and n not in kept]
        if nodes:
            program.checkpoint(nodes)
            count += 1
    return count


def _blocks(program: Program, names: list[str]) -> list[str]:
    """Return the modules of the outermost lists that contain the layers of these names."""
    lists, found = layers(program), dict[str, None]()
    for name in names:
        inside = [prefix for prefix in lists if name.startswith(f"{prefix}.")]
        if inside:
            prefix = min(inside, key=len)
            found[f"{prefix}.{name[len(prefix) + 1 :].partition('.')[0]}"] = None
        else:
            found[name] = None
    return list(found)
