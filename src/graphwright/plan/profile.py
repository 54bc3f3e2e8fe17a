"""Profile a plan: seconds, floating-point operations and bytes, by instruction and by path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.errors import UsageError
from graphwright.ops import Cost, get
from graphwright.plan.running.executable import Executable

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Timing:
    """One instruction: its index, the node it runs, and its cost; seconds are the median of the runs."""

    index: int
    path: str
    op: str
    executor: str
    seconds: float
    cost: Cost


class Profile(NamedTuple):
    """Timings of all instructions, each run by itself, and the seconds of a whole run as dispatched."""

    timings: tuple[Timing, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """Sum over the instructions; more than `wall` where one call runs several of them."""
        return sum(t.seconds for t in self.timings)

    def by_path(self, depth: int = 2) -> dict[str, tuple[float, int, int]]:
        """Seconds, floating-point operations and bytes by path, truncated to `depth` segments, the slowest first."""
        found: dict[str, tuple[float, int, int]] = {}
        for t in self.timings:
            key = ".".join(t.path.split(".")[:depth])
            seconds, flops, moved = found.get(key, (0.0, 0, 0))
            found[key] = (seconds + t.seconds, flops + t.cost.flops, moved + t.cost.read + t.cost.write)
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def text(self, most: int = 20) -> str:
        """The slowest instructions as a table."""
        lines = [f"{'us':>10} {'share':>6} {'GFLOP/s':>8} {'GB/s':>6}  executor  op and node"]
        for t in sorted(self.timings, key=lambda t: -t.seconds)[:most]:
            per = max(t.seconds, 1e-9) * 1e9
            share = t.seconds / self.seconds if self.seconds else 0.0
            rates = f"{t.cost.flops / per:8.1f} {(t.cost.read + t.cost.write) / per:6.1f}"
            lines.append(f"{1e6 * t.seconds:10.1f} {share:6.1%} {rates}  {t.executor:<8}  {t.op} {t.path}")
        rest = len(self.timings) - most
        more = f", {rest} more instructions" if rest > 0 else ""
        lines.append(f"{1e6 * self.seconds:10.1f} instructions, {1e6 * self.wall:.1f} as dispatched{more}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def profile(plan: Plan, feeds: Mapping[str, Any], n: int = 5) -> Profile:
    """Run a plan `n` times whole and `n` times instruction by instruction; loop-carried state advances with each.

    Raises: UsageError for n < 1; as `Executable.run`.
    """
    if n < 1:
        raise UsageError("a profile needs at least one run", where=plan.program.name, expected="n >= 1", got=n,
                         fix="n=5")  # fmt: skip
    space = Executable(plan)
    walls, taken = [], [[0.0] * n for _ in plan.instrs]
    space.run(feeds)  # binds
    for _ in range(n):
        began = perf_counter()
        space.run(feeds)
        walls.append(perf_counter() - began)
    for k in range(n):
        space.feed(feeds)
        for i, seconds in enumerate(taken):
            part = plan[i : i + 1]
            began = perf_counter()
            space.run(part)
            seconds[k] = perf_counter() - began
    timings = []
    for i, (instr, choice) in enumerate(zip(plan.instrs, plan.choices, strict=True)):
        ins, outs = ([plan.slots[s].spec for s in slots] for slots in (instr.ins, instr.outs))
        cost = get(instr.op).cost(ins, outs, instr.attrs)
        path = plan.program.path(instr.node)
        timings.append(Timing(i, path, instr.op, choice.executor, median(taken[i]), cost))
    return Profile(tuple(timings), median(walls))
