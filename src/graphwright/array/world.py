"""The ranks of a run: which process this is among how many. A single process is a world of one.

A run may hold several copies of a model, each divided among neighbouring ranks: rank r has part r % parts of the copy
r // parts. The ranks of a copy are the group "model"; those that have the same part of all copies are the group "data".

Only `process_group` talks to the other ranks; it is loaded when there are any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphwright.errors import ComputeError, UsageError

if TYPE_CHECKING:
    from graphwright.array.process_group import ProcessGroup
    from graphwright.array.spec import Spec


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


class ProgramsDiffer(UsageError):
    """The ranks do not have the same program, or weights, where they must; nothing has run.

    Attributes:
        hashes: rank of the run -> what differs, and its hash.
    """

    def __init__(self, hashes: Mapping[int, str], where: str) -> None:
        self.hashes = dict(hashes)
        super().__init__(
            "the ranks do not have the same program", where=where, expected="the same structure and weights",
            got="; ".join(f"rank {r}: {text}" for r, text in sorted(hashes.items())),
            fix="open the same model, or make it after gw.manual_seed with one seed, and make equal edits on all ranks",
        )  # fmt: skip


class CollectivesDiffer(UsageError):
    """The ranks run other collectives, or the same one with other shapes, dtypes or options; no value was exchanged.

    Attributes:
        calls: rank of the run -> its call, the first one that differs.
    """

    def __init__(self, calls: Mapping[int, str], where: str) -> None:
        self.calls = dict(calls)
        got = "; ".join(f"rank {r}: {text}" for r, text in sorted(calls.items()))
        super().__init__("the ranks do not run the same collective", where=where, got=got,
                         expected="equal calls, with arrays of one shape and dtype, on all ranks")  # fmt: skip


class InputsDiffer(UsageError):
    """The ranks that have a divided model together were given different inputs; nothing has run.

    Attributes:
        inputs: rank of the run -> the input that differs, with a hash of its values.
    """

    def __init__(self, inputs: Mapping[int, str], where: str) -> None:
        self.inputs = dict(inputs)
        super().__init__(
            "the ranks of a divided model were given different inputs", where=where, expected="the same",
            got="; ".join(f"rank {r}: {text}" for r, text in inputs.items()),
            fix="give all ranks of a copy the same arrays, prompts, options and seeds; a DataLoader that is made after "
            "the division does",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of a run.

    Attributes:
        rank, ranks: the number of this process, and how many there are.
        local_rank, local_ranks: the same among the ranks on this host.
        group: what talks to the other ranks; None in a world of one.
        parts: number of ranks that a copy of a divided model has; 1 before a model is divided.
        model, data: what talks to the ranks of the groups "model" and "data"; None where that is this rank alone.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    group: ProcessGroup | None = None
    parts: int = 1
    model: ProcessGroup | None = None
    data: ProcessGroup | None = None

    @property
    def part(self) -> int:
        """The number of this rank's part of a divided model."""
        return self.rank % self.parts

    @property
    def copy(self) -> int:
        """The number of the copy of the model of which this rank has a part, and of this rank's batch."""
        return self.rank // self.parts

    @property
    def copies(self) -> int:
        """The number of copies of the model, each of which is fed a batch."""
        return self.ranks // self.parts


GROUPS = ("run", "model", "data")
"""The groups of ranks, as attributes of collectives name them."""
_ALONE = World()
_current = [_ALONE]
_entered = [False]
"""Whether a run was joined, or left."""


def world() -> World:
    """Return the ranks of the run; a world of one until `process_group.join` makes another."""
    return _current[0]


def described(name: str, operands: Sequence[Spec], attrs: Mapping[str, Any]) -> str:
    """Return a collective as a text that is equal on all ranks that run it together."""
    text, rank = [f"{name} of {' '.join(map(str, operands))}"], len(operands[0].shape)
    for option, value in attrs.items():
        negative = option in ("axis", "split", "join") and -rank <= value < 0
        if option not in ("ranks", "group", "rank"):
            text.append(f"{option}={value + rank if negative else value}")
    return ", ".join(text)


def joined(where: str) -> World:
    """Return the ranks of the run. Raises: UsageError if torchrun started several, and the run was not joined."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1 and not _entered[0]:
        raise UsageError("this process has not joined the run of which it is a rank", where=where,
                         got=f"WORLD_SIZE={ranks}", fix="call graphwright.distributed.setup() first")  # fmt: skip
    return _current[0]


def enter(made: World | None) -> None:
    """Make `made` the world of this process; None for a world of one."""
    _current[0] = made or _ALONE
    _entered[0] = True


def group_of(ranks: int, group: str) -> ProcessGroup | None:
    """Return what talks to the ranks of a group of `GROUPS`; None if that is this rank alone.

    Raises: WrongWorld unless the group has `ranks` ranks.
    """
    here = _current[0]
    count, found = {
        "run": (here.ranks, here.group), "model": (here.parts, here.model), "data": (here.copies, here.data),
    }[group]  # fmt: skip
    if count != ranks:
        raise WrongWorld(
            "an op is for another number of ranks than the run has", expected=f"{ranks} ranks in the group {group!r}",
            got=f"{count}", fix="call graphwright.distributed.setup() first, or make the program again",
        )  # fmt: skip
    return found


def divide_ranks(parts: int) -> World:
    """Make copies of a model possible that `parts` neighbouring ranks have together; all ranks call it.

    Raises: WrongWorld unless the run has a multiple of `parts` ranks, or if its ranks are divided otherwise already;
        RankLost.
    """
    here = joined("tensor_parallel")
    if parts < 1 or here.ranks % parts or here.parts not in (1, parts):
        divided = f", divided into copies of {here.parts}" if here.parts > 1 else ""
        raise WrongWorld("a model cannot be divided among so many ranks of the run", where="tensor_parallel",
                         expected="a divisor of the number of ranks, the same for all models of the run",
                         got=f"{parts} of {here.ranks} ranks{divided}",
                         fix=f"torchrun --nproc-per-node {parts} ..., and gw.distributed.setup()" if parts > 0 else
                         "ranks=None for all ranks of the run")  # fmt: skip
    if here.parts != parts and here.group is not None:
        model, data = here.group.divided(parts)
        enter(replace(here, parts=parts, model=model, data=data))
    return _current[0]
