"""The only file that talks to torch.distributed: the process group, its store, collectives and their failures.

Invariant: a call returns or raises within the timeout of the group. After a failure every further collective raises at
once.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import count, zip_longest
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as torch_ranks

from graphwright.array.world import (
    CollectivesDiffer,
    InputsDiffer,
    ProgramsDiffer,
    RankLost,
    World,
    WrongWorld,
    enter,
    world,
)
from graphwright.errors import UsageError

_torch: Any = torch_ranks  # whose stubs lack the stores
_all_gather = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor  # the name before 2.13
PrefixStore, TCPStore = _torch.PrefixStore, _torch.TCPStore
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE = 2.0
"""Most seconds, of those of the timeout, in which ranks whose collectives fail tell each other where they wait."""
_runs: Counter[str] = Counter()
"""Address of a store -> number of runs that this process has joined there; all its ranks join the same ones."""


class Pending:
    """A collective in flight."""

    __slots__ = ("_group", "_what", "_work", "then")

    def __init__(self, group: ProcessGroup, what: str, work: Any, then: Callable[[], object] | None = None) -> None:
        self._group, self._what, self._work, self.then = group, what, work, then

    def wait(self) -> None:
        """Wait until the result is there. Raises: RankLost."""
        began = perf_counter()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.lost(self._what, error) from error
        finally:
            self._group.whole.waited += perf_counter() - began
        if self.then is not None:
            self.then()


class ProcessGroup:
    """All ranks of a run, or some of them. A collective is called by all of them, in the same order.

    Attributes:
        rank, ranks: the number of this rank in the group, and how many it has.
        members: the numbers of its ranks in the run.
        timeout: most seconds until a collective that not all ranks reach raises, of which `grace` are spent on asking
            who waits where.
        sent: bytes that this rank has sent in collectives, as the algorithms of gloo need them.
        waited: seconds that this rank has waited for collectives.
        count: number of collectives of all ranks so far.
        pending: address of a bucket -> the collective in flight that uses it; None if its gate was closed.
        whole: the group of all ranks, which counts for all groups and fails with any of them.
        compared: number of runs in progress whose collectives the ranks have compared.
    """

    def __init__(
        self, store: Any, members: Sequence[int], rank: int, timeout: float, whole: ProcessGroup | None = None,
        handle: Any = None, name: str = "",
    ) -> None:  # fmt: skip
        self.store, self.members, self.timeout, self.name = store, tuple(members), timeout, name
        self.rank, self.ranks = self.members.index(rank), len(self.members)
        self.grace = min(_GRACE, timeout / 4)
        self.sent, self.waited, self.count = 0, 0.0, 0
        self.pending: dict[int, Pending | None] = {}
        self.whole = whole or self
        self._handle = handle
        self._failure: RankLost | None = None
        self._uncertain = False  # whether ranks may have begun different numbers of collectives
        self.compared = 0
        self._rounds = count()

    def divided(self, parts: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Return the groups "model" and "data" of this rank, see `World`; all ranks call it. Raises: RankLost."""
        if parts == self.ranks:
            return self, None
        rows = [range(first, first + parts) for first in range(0, self.ranks, parts)]
        columns = [range(part, self.ranks, parts) for part in range(parts)]
        found: dict[str, ProcessGroup | None] = {}
        for kind, groups in (("model", rows), ("data", columns)):
            for number, members in enumerate(groups):
                if len(members) == 1:
                    found.setdefault(kind, None)
                    continue
                try:  # every rank makes every group, in the same order
                    handle = torch_ranks.new_group([*members], timeout=timedelta(seconds=self.timeout - self.grace))
                except RuntimeError as error:
                    raise self.lost(f"making the group {kind!r}", error) from error
                if self.rank in members:
                    made = ProcessGroup(self.store, members, self.rank, self.timeout, self, handle, f"{kind}{number}/")
                    found[kind] = made
        return found["model"], found["data"]

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_reduce(self, x: torch.Tensor, what: str = "all_reduce") -> Pending:
        """Sum over the ranks, in place: in float32 or wider, in an order that depends on size and ranks alone."""
        sent = 2 * (self.ranks - 1) * x.nbytes // self.ranks
        return self._begin(what, sent, lambda: torch_ranks.all_reduce(x, group=self._handle, async_op=True))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, what: str = "all_gather") -> Pending:
        """Write the ranks' `x`, each a row-major block, one after another to `out`."""
        out, x = _bytes(out), _bytes(x)
        made = lambda: _all_gather(out, x, group=self._handle, async_op=True)  # noqa: E731
        return self._begin(what, (self.ranks - 1) * x.nbytes, made)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, what: str = "all_to_all") -> Pending:
        """Send the r-th of `ranks` equal blocks of `x` to rank r; block r of `out` is that of rank r for this rank."""
        out, x, sent = _bytes(out), _bytes(x), (self.ranks - 1) * x.nbytes // self.ranks
        made = lambda: torch_ranks.all_to_all_single(out, x, group=self._handle, async_op=True)  # noqa: E731
        return self._begin(what, sent, made)

    def reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, landing: torch.Tensor, what: str = "reduce_scatter"
    ) -> Pending:
        """Write the sum over the ranks of the block of `x` for this rank to `out`, added in the order of the ranks.

        gloo has no such collective for all dtypes; the blocks are exchanged, and each rank adds those for it.
        `landing` is scratch of the size of `x`.
        """
        found = self.all_to_all(landing, x, what)
        found.then = lambda: self.sum_blocks(out, landing)
        return found

    def sum_blocks(self, out: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write the sum of `ranks` equal blocks, added in order, to `out`."""
        first, *rest = blocks.view(self.ranks, *out.shape)
        out.copy_(first)
        for block in rest:
            out.add_(block)

    def broadcast(self, x: torch.Tensor, root: int, what: str = "broadcast") -> Pending:
        """Overwrite `x` by that of rank `root`."""
        x, sent = _bytes(x), (self.ranks - 1) * x.nbytes // self.ranks
        made = lambda: torch_ranks.broadcast(x, self.members[root], self._handle, async_op=True)  # noqa: E731
        return self._begin(what, sent, made)

    def compare(
        self, what: str, *, programs: Sequence[str] = (), inputs: Sequence[str] = (), calls: Sequence[str] = (),
        label: str = "",
    ) -> None:  # fmt: skip
        """Compare what all ranks of the group are about to do: `what`, and texts that must be equal on all of them.

        gloo ends the process if ranks call a collective with other sizes. Hashes are gathered, whose size is fixed;
        only where they differ are the texts exchanged.

        Args:
            programs: hashes of structure and weights.
            inputs: hashes of inputs.
            calls: collectives with their specs and options.
            label: what errors of this rank name, by default `what`.
        Raises: ProgramsDiffer, InputsDiffer or CollectivesDiffer with the first difference, in this order; RankLost.
        """
        label, texts = label or what, json.dumps([what, [*programs], [*inputs], [*calls]])
        own = _digest(texts)
        found = torch.empty(self.ranks * own.numel(), dtype=torch.uint8)
        made = lambda: _all_gather(found, own, group=self._handle, async_op=True)  # noqa: E731
        self._begin(label, 0, made).wait()
        if bool((found.view(self.ranks, -1) == own).all()):
            return
        rows = [json.loads(text) for text in self._exchanged(json.dumps([label, texts]), label)]
        labels, theirs = zip(*rows, strict=True)
        whats, *kinds = zip(*map(json.loads, theirs), strict=True)
        named = lambda texts: dict(zip(self.members, texts, strict=True))  # noqa: E731
        if len({*whats}) == 1:
            for error, sections in zip((ProgramsDiffer, InputsDiffer, CollectivesDiffer), kinds, strict=True):
                for row in zip_longest(*sections, fillvalue="nothing"):
                    if len({*row}) > 1:
                        raise error(named(row), label)
        raise CollectivesDiffer(named(labels), label)  # or, without a difference, calls of several threads met

    def send(self, x: torch.Tensor, to: int, spec: Any) -> None:
        """Send `x`, which has a spec, to rank `to`. Raises: CollectivesDiffer unless that waits for it; RankLost."""
        own = f"send of {spec} to rank {self.members[to]}"
        self._compare_pair(to, own, f"recv of {spec} from rank {self.members[self.rank]}")
        made = lambda: torch_ranks.isend(_bytes(x), self.members[to], self._handle)  # noqa: E731
        self._begin(own, x.nbytes, made, together=False).wait()

    def receive(self, x: torch.Tensor, source: int, spec: Any) -> None:
        """Overwrite `x`, which has a spec, by what rank `source` sends. Raises: CollectivesDiffer, RankLost."""
        own = f"recv of {spec} from rank {self.members[source]}"
        self._compare_pair(source, own, f"send of {spec} to rank {self.members[self.rank]}")
        made = lambda: torch_ranks.irecv(_bytes(x), self.members[source], self._handle)  # noqa: E731
        self._begin(own, 0, made, together=False).wait()

    def _compare_pair(self, other: int, own: str, expected: str) -> None:
        """Exchange calls with one rank, as `compare` does with all. Raises: CollectivesDiffer, RankLost."""
        label = torch.cat([_digest(own), _text(own)])
        found = torch.empty_like(label)
        at = self.members[other]
        begun = [
            self._begin(own, 0, lambda: torch_ranks.isend(label, at, self._handle), together=False),
            self._begin(own, 0, lambda: torch_ranks.irecv(found, at, self._handle), together=False),
        ]
        for pending in begun:
            pending.wait()
        digest = _digest(expected)
        if not torch.equal(found[: digest.numel()], digest):
            theirs = bytes(found[digest.numel() :].tolist()).rstrip(b"\0").decode(errors="replace")
            raise CollectivesDiffer({self.members[self.rank]: own, at: theirs}, own)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for collectives that the ranks have compared.

        After an error in it, this rank compares with the others how many collectives each has begun, before its next
        one: where all ranks met the same error they continue, and else a collective would meet another one.
        """
        whole = self.whole
        whole.compared += 1
        try:
            yield
        except BaseException:
            whole._uncertain = True
            raise
        finally:
            whole.compared -= 1

    def _check(self) -> None:
        """Raise RankLost after a failure, or if the ranks have begun different numbers of collectives."""
        whole = self.whole
        if whole._failure is None and whole._uncertain:
            whole._uncertain, what = False, "the comparison after a run that failed"
            found = whole._exchanged(str(whole.count), what)
            if len({*found}) > 1:
                waiting = {r: f"collective {n}" for r, n in enumerate(found)}
                reason = "an error ended a run before its last collective"
                whole._failure = RankLost(what, waiting, (), ranks=whole.ranks, reason=reason)
        if whole._failure is not None:
            raise whole._failure

    def _begin(self, what: str, sent: int, start: Callable[[], Any], together: bool = True) -> Pending:
        self._check()
        if together:
            what = self._counted(what)
        try:
            work = start()
        except RuntimeError as error:
            raise self.lost(what, error) from error
        self.whole.sent += sent
        return Pending(self, what, work)

    def lost(self, what: str, error: Exception) -> RankLost:
        """Return the error for a collective that failed; ask the other ranks for a short time where they wait."""
        if self.whole._failure is None:
            reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0][:160]
            me, others = self.members[self.rank], {*self.members}
            waiting, gone = {me: what}, ""
            until = monotonic() + self.grace
            try:
                self.store.set_timeout(timedelta(seconds=self.grace))
                self.store.set(f"lost/{me}", what)
                while len(waiting) < self.ranks and monotonic() < until:
                    for r in others - waiting.keys():
                        if self.store.check([f"lost/{r}"]):
                            waiting[r] = self.store.get(f"lost/{r}").decode()
                    sleep(0.01)
            except RuntimeError:  # its process has ended, which is rank 0 unless torchrun has it
                gone = "; the store of the run has ended too"
            missing = tuple(sorted(others - waiting.keys()))
            self.whole._failure = RankLost(what, waiting, missing, ranks=self.ranks, reason=reason + gone)
        return self.whole._failure

    def _counted(self, what: str) -> str:
        self.whole.count += 1
        return f"{what} (collective {self.whole.count})"

    # -- small values by the store -----------------------------------------------------------------------------------
    def exchange(self, value: str, what: str) -> list[str]:
        """Return the values of all ranks, by rank. Raises: CollectivesDiffer unless all exchange `what`; RankLost."""
        self.compare(what)
        return self._exchanged(value, what)

    def _exchanged(self, value: str, what: str) -> list[str]:
        """Exchange values by the store, which also works between collectives that differ."""
        self._check()
        key = f"{self.name}exchange/{next(self._rounds)}"
        what = self._counted(what)
        try:
            self.store.set(f"{key}/{self.rank}", value)
            keys = [f"{key}/{r}" for r in range(self.ranks)]
            self.store.wait(keys, timedelta(seconds=self.timeout - self.grace))
            return [self.store.get(k).decode() for k in keys]
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def close(self) -> None:
        """Leave the group; the process is a world of one again."""
        atexit.unregister(self.close)
        enter(None)
        self.pending.clear()
        with suppress(RuntimeError):
            torch_ranks.destroy_process_group()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a row-major tensor as bytes: gloo moves few dtypes."""
    return x.reshape(-1).view(torch.uint8)


def _digest(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(blake2b(text.encode(), digest_size=16).digest()), dtype=torch.uint8)


def _text(text: str, size: int = 240) -> torch.Tensor:
    """Return the first bytes of a text, as many on every rank."""
    return torch.frombuffer(bytearray(text.encode()[:size].ljust(size, b"\0")), dtype=torch.uint8)


def join(timeout: float, device: str = "cpu", environment: Mapping[str, str] = os.environ) -> World:
    """Join the run that torchrun's variables describe; a world of one without them.

    Args:
        timeout: most seconds to wait for the other ranks, here and in each collective.
        device: "cpu" for gloo, "cuda" for NCCL.
        environment: the variables.
    Raises: UsageError for missing or invalid variables, or without NCCL; WrongWorld if the ranks disagree about their
        number; RankLost if a rank does not come.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        enter(None)
        return world()
    rank, ranks, local_rank, local_ranks = _numbers(environment)
    if ranks == 1:
        enter(World(0, 1, local_rank, local_ranks))
        return world()
    if world().group is not None:
        raise UsageError("this process has joined a run already", where="distributed.setup",
                         fix="call distributed.close() first")  # fmt: skip
    kind = "nccl" if device == "cuda" else "gloo"
    both = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if not {"nccl": torch_ranks.is_nccl_available, "gloo": torch_ranks.is_gloo_available}[kind]():
        fix = 'use device="cpu", or a build of torch with CUDA' if kind == "nccl" else "install another build of torch"
        raise UsageError(
            f"this build of torch has no {kind}", where="distributed.setup", got=torch.__version__, fix=fix
        )
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    store = _store(rank, ranks, timeout, environment)
    group = ProcessGroup(store, range(ranks), rank, timeout)
    _meet(group)
    try:
        torch_ranks.init_process_group(
            both, store=PrefixStore("torch", store), rank=rank, world_size=ranks,
            timeout=timedelta(seconds=timeout - group.grace),
        )  # fmt: skip
    except RuntimeError as error:
        raise group.lost("setup", error) from error
    enter(World(rank, ranks, local_rank, local_ranks, group))
    atexit.register(group.close)
    return world()


def _numbers(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return rank, ranks, local rank and local ranks. Raises: UsageError for missing or invalid variables."""
    missing = [name for name in VARIABLES if name not in environment]
    if missing and (environment.get("WORLD_SIZE") != "1" or "RANK" in missing):
        raise UsageError("variables of torchrun are missing", where="distributed.setup", expected=", ".join(VARIABLES),
                         got=f"no {', '.join(missing)}", fix="torchrun --nproc-per-node 2 script.py")  # fmt: skip
    given = {name: environment[name] for name in ("RANK", "WORLD_SIZE")}
    given["LOCAL_RANK"] = environment.get("LOCAL_RANK", given["RANK"])
    given["LOCAL_WORLD_SIZE"] = environment.get("LOCAL_WORLD_SIZE", given["WORLD_SIZE"])
    try:
        rank, ranks, local_rank, local_ranks = map(int, given.values())
    except ValueError:
        rank, ranks, local_rank, local_ranks = -1, 0, 0, 0
    if not (0 <= rank < ranks and 0 <= local_rank < local_ranks <= ranks):
        raise WrongWorld("the rank or the number of ranks is invalid", where="distributed.setup",
                         expected="0 <= RANK < WORLD_SIZE, 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE",
                         got=", ".join(f"{name}={value}" for name, value in given.items()))  # fmt: skip
    return rank, ranks, local_rank, local_ranks


def _store(rank: int, ranks: int, timeout: float, environment: Mapping[str, str]) -> Any:
    """Return the store of the run: that of torchrun, else of rank 0. Raises: RankLost if it cannot be reached."""
    of_torchrun = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    try:
        made = TCPStore(
            host, int(port), None, rank == 0 and not of_torchrun, timedelta(seconds=timeout), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        fix = "start rank 0, and check MASTER_ADDR and MASTER_PORT"
        reason = f"cannot reach the store at {host}:{port}: {str(error).splitlines()[0][:160]}"
        missing = () if rank == 0 else (0,)
        raise RankLost("setup", {rank: "setup"}, missing, ranks=ranks, reason=reason, fix=fix) from error
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    _runs[f"{host}:{port}"] += 1
    return PrefixStore(f"graphwright/{attempt}/{_runs[f'{host}:{port}']}", made)


def _meet(group: ProcessGroup) -> None:
    """Wait until all ranks are there. Raises: RankLost naming those that are not; WrongWorld."""
    store, ranks, until = group.store, group.ranks, monotonic() + group.timeout
    store.set(f"here/{group.rank}", str(ranks))
    here: dict[int, str] = {}
    try:
        while len(here) < ranks and monotonic() < until:
            for r in set(range(ranks)) - here.keys():
                if store.check([f"here/{r}"]):
                    here[r] = store.get(f"here/{r}").decode()
            if any(n != str(ranks) for n in here.values()):
                break
            sleep(0.005)
    except RuntimeError as error:
        raise group.lost("setup", error) from error
    if wrong := {r: n for r, n in here.items() if n != str(ranks)}:
        got = ", ".join(f"rank {r} {n} ranks" for r, n in sorted(wrong.items()))
        raise WrongWorld("the ranks disagree about their number", where="distributed.setup", got=got,
                         expected=f"{ranks} ranks, as rank {group.rank} has it")  # fmt: skip
    if len(here) < ranks:
        missing = tuple(r for r in range(ranks) if r not in here)
        raise RankLost("setup", dict.fromkeys(here, "setup"), missing, ranks=ranks,
                       reason=f"no word from them in {group.timeout:g} s",
                       fix="start all ranks, or raise the timeout")  # fmt: skip
