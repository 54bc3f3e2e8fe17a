"""`graphwright bench`: short measurements on this machine."""

from __future__ import annotations

from typing import Annotated

from graphwright.cli.common import Command, Output, Seed, argument, flag, option


@Command("graphwright bench attention --tokens 2048 --density 0.1")
def bench(
    what: Annotated[str, argument("WHAT", "What to measure: attention.")],
    tokens: Annotated[int, option("N", "Queries and keys.", min=1)] = 4096,
    density: Annotated[float, option("SHARE", "Share of the causal pairs that are allowed.", min=0, max=1)] = 0.1,
    heads: Annotated[int, option("N", "Heads.", min=1)] = 1,
    width: Annotated[int, option("N", "Entries of a query.", min=1)] = 64,
    block: Annotated[int, option("N", "Tokens of a block.", min=1)] = 64,
    rounds: Annotated[int, option("N", "Measurements of each call; the median counts.", min=1)] = 3,
    flex: Annotated[bool, flag("--flex", "Also compile and measure FlexAttention's forward: about a minute.")] = False,
    seed: Seed = 0,
) -> Output:
    """Measure attention over a random pattern beside dense attention, forward and backward.

    Results are checked before they are timed. Dense attention takes most of the time: minutes for 65536 tokens.
    """
    from graphwright.array.vm.machine import part
    from graphwright.attention.timing import measure
    from graphwright.errors import UsageError

    if what != "attention":
        raise UsageError("unknown measurement", expected="attention", got=what)
    part.wait()
    times = measure(tokens, density, heads, width, block, rounds=rounds, flex=flex, seed=seed)
    return Output(times.to_json(), str(times))
