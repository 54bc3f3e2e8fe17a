"""The ranks of a run: which process this is among how many. A single process is a world of one.

Only `process_group` talks to the other ranks; it is loaded when there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.errors import ComputeError, UsageError

if TYPE_CHECKING:
    from graphwright.array.process_group import ProcessGroup


class WrongWorld(UsageError):
    """A program or a call is made for another number of ranks than the run has."""


class RankLost(ComputeError):
    """A collective failed because a rank ended, or did not reach it within the timeout.

    Attributes:
        collective: the collective that failed on this rank.
        waiting: rank -> the collective in which it waits.
        missing: the ranks that reached no failing collective: they ended, or are elsewhere.
    """

    def __init__(
        self, collective: str, waiting: Mapping[int, str], missing: tuple[int, ...], *, ranks: int, reason: str,
        fix: str = "start all ranks again; a training resumes from the last state that was saved",
    ) -> None:  # fmt: skip
        self.collective, self.waiting, self.missing = collective, dict(waiting), missing
        what = "the ranks wait in different collectives"
        if missing:
            what = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not reach a collective"
        rows = "; ".join(f"rank {r} waits in {at}" for r, at in sorted(waiting.items()))
        expected = f"{ranks} ranks in the same collective"
        super().__init__(what, where=collective, expected=expected, got=f"{rows}; {reason}", fix=fix)


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of a run.

    Attributes:
        rank, ranks: the number of this process, and how many there are.
        local_rank, local_ranks: the same among the ranks on this host.
        group: what talks to the other ranks; None in a world of one.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    group: ProcessGroup | None = None


_ALONE = World()
_current = [_ALONE]


def world() -> World:
    """Return the ranks of the run; a world of one until `process_group.join` makes another."""
    return _current[0]


def enter(made: World | None) -> None:
    """Make `made` the world of this process; None for a world of one."""
    _current[0] = made or _ALONE


def group_of(ranks: int) -> ProcessGroup | None:
    """Return what talks to the other ranks, None for a world of one. Raises: WrongWorld unless there are `ranks`."""
    found = _current[0]
    if found.ranks != ranks:
        raise WrongWorld(
            "an op is for another number of ranks than the run has", expected=f"{ranks} ranks",
            got=f"a run of {found.ranks}", fix="call graphwright.distributed.setup() first, or make the program again",
        )  # fmt: skip
    return found.group
