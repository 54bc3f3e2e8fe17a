"""Plans whose regions are recorded as graphs of the device, then replayed: one launch a region.

Recording runs nothing, so a step that records, falls back or replays advances the state once. Whatever fails up to the
launch is undone, the region runs plainly, and the plan stays plain until `retry_capture()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from weakref import finalize

from graphwright.array import CPU
from graphwright.array.memory_pool import DriverError
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import expansion, get
from graphwright.plan.planning.hazards import CAPTURED
from graphwright.plan.running.executable import Executable

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.array.memory_pool import Driver
    from graphwright.autograd import Variable
    from graphwright.errors import Facts
    from graphwright.plan.plan import Plan
    from graphwright.plan.planning.hazards import Region

COLD, WARM, DONE, FAILED = "cold", "warm", "captured", "failed"


class CaptureRefused(ComputeError):
    """A region cannot be a graph, and `require_capture` says that it must.

    Attributes:
        slot, op: operand and op that forbid it, if one does.
        reason: why.
    """

    def __init__(self, reason: str, *, slot: int | None = None, op: str = "", **facts: Unpack[Facts]) -> None:
        super().__init__(f"not captured: {reason}", **facts)
        self.slot, self.op, self.reason = slot, op, reason


class CaptureTimeout(ComputeError, TimeoutError):
    """Recording took longer than the watchdog allows."""


class CaptureState(NamedTuple):
    """Where a workspace stands: cold, warm (after so many plain runs), captured or failed (why)."""

    name: str
    warm: int = 0
    reason: str = ""

    def __str__(self) -> str:
        return f"warm({self.warm})" if self.name == WARM else f"failed({self.reason})" if self.reason else self.name


class CaptureExecutable(Executable):
    """A workspace that records the regions of its plan after some plain runs, and replays them from then on.

    Args:
        plan: of a device with graphs; its inputs, the arena and variables are what graphs read and write, so a feed is
            copied to its fixed place wherever it lies.
        variables: as of a Executable.
        poison: fill the arena with NaN in front of every run.
        safe: as of a Executable.
        warmups: plain runs before the first recording.
        require_capture: raise CaptureRefused instead of falling back.
        watchdog: seconds that recording a region may take.

    Attributes:
        state: see CaptureState.
        captures: how often a region was recorded. After an edit those that it left as they were stay recorded.
    Raises: UsageError for a plan of the CPU; CaptureRefused if nothing of it can be captured and it must be.
    """

    def __init__(
        self,
        plan: Plan,
        variables: Mapping[str, Variable] | None = None,
        *,
        poison: bool = False,
        safe: bool = False,
        warmups: int = 2,
        require_capture: bool = False,
        watchdog: float = 30.0,
    ) -> None:
        if plan.options.device == CPU:
            raise UsageError(
                "the CPU has no graphs to capture",
                where=plan.program.name,
                expected="a plan of a device with graphs",
                got=plan.options.device,
                fix='Executable(plan), or program.compile(..., device="cuda")',
            )
        super().__init__(plan, variables, poison=poison, safe=safe)
        self.warmups, self.require_capture, self.watchdog = warmups, require_capture, watchdog
        self.regions = plan.regions()
        self.state, self.captures = CaptureState(COLD), 0
        if not self._capturable:
            why = next((w for region in self.regions for w in region.why), "the plan has no instruction")
            if require_capture:
                raise CaptureRefused(why, where=plan.program.name)
            self.state = CaptureState(FAILED, reason=why)
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._pins: list[Any] = []
        finalize(self, _unpin, self._pins)

    @property
    def _capturable(self) -> bool:
        return any(region.kind == CAPTURED for region in self.regions)

    def _go_over(self, plan: Plan) -> None:
        could, chunks = self._capturable, [] if self._arena is None else list(self._arena.chunks)
        super()._go_over(plan)
        if self._arena is None or len(self._arena.chunks) < len(chunks):
            self.release()  # while the memory that graphs pin is there
        self.regions = plan.regions()
        if not could and self._capturable:  # it had failed for that alone
            self.state = CaptureState(COLD)

    def execute(self) -> None:
        """Run the regions on what lies in the inputs. Raises: ComputeError; CaptureRefused if capture is required."""
        if self._override is not None:
            super().execute()
            return
        self.runs.rise()
        ran: list[int] = []
        recording = self.state.name == DONE or (self.state.name != FAILED and self.state.warm >= self.warmups)
        settled = False
        for region in self.regions:
            if region.kind == CAPTURED and recording and self.state.name != FAILED and self._launched(region):
                ran += region.instrs
                continue
            for i in region.instrs:
                if i >= self.plan.commit_start and not settled and self._on_host(i):
                    self._settle()  # the host must not go on from a step that failed on the device
                    settled = True
                self._single(i, ran)
        if recording and self.state.name != FAILED:
            self.state = CaptureState(DONE)
        elif not recording and self.state.name != FAILED:
            self.state = CaptureState(WARM, self.state.warm + 1)

    def retry_capture(self) -> None:
        """After a failure, record again in the next run."""
        if self.state.name == FAILED and self._capturable:
            self.state = CaptureState(WARM, self.warmups)

    def release(self) -> None:
        """Let go of the graphs and of the memory that they pin; they are recorded again in the next run."""
        self._graphs.clear()
        _unpin(self._pins)
        if self.state.name == DONE:
            self.state = CaptureState(WARM, self.warmups)

    # -- one region --------------------------------------------------------------------------------------------------
    def _launched(self, region: Region) -> bool:
        """True if the region was queued as a graph; else nothing of it was."""
        driver, stream = self._kernels.driver, self._kernels.stream
        assert driver is not None
        try:
            numbers = self._numbers(region)
            if numbers not in self._graphs:
                self._audit(region)
                calls = [self._own_calls(i) for i in region.instrs]
                made = captured(driver, stream, chain.from_iterable(calls), self.watchdog)
                self._graphs[numbers] = _Graph(made, [self._bound_calls.get(q) for q in numbers])
                self.captures += 1
                self._pin()
            driver.replay(self._graphs[numbers].made, stream)
        except Exception as error:
            if self.require_capture:
                raise error if isinstance(error, CaptureRefused) else CaptureRefused(str(error)) from error
            self._graphs.clear()
            _unpin(self._pins)
            self.state = CaptureState(FAILED, reason=_said(error))
            return False
        return True

    def _audit(self, region: Region) -> None:
        """Look at what is bound, not at what was planned. Raises: CaptureRefused with slot and op."""
        for i in region.instrs:
            instr = self.plan.instrs[i]
            where = self.plan.path(instr.node)
            for s in (*instr.ins, *instr.outs, *instr.work):
                device = self._view(s).device
                if device != self.device:
                    raise CaptureRefused(f"slot {s} lies on {device}", slot=s, op=instr.op, where=where)
            outs, ins = ([self._view(s).spec for s in slots] for slots in (instr.outs, instr.ins))
            needs = expansion.needs(get(instr.op), self._kernels, outs, ins, instr.attrs)
            if needs.why or needs.reads:
                slot = instr.ins[needs.reads[0]] if needs.reads else instr.outs[0]
                raise CaptureRefused(needs.why or "the host reads it", slot=slot, op=instr.op, where=where)

    def _pin(self) -> None:
        """Keep what graphs touch from being given back."""
        if self._pins:
            return
        touched = [self._view(s) for r in self.regions if r.kind == CAPTURED for i in r.instrs for s in self._slots(i)]
        for block in {id(b): b for b in map(_block, touched)}.values():
            block.pins += 1
            self._pins.append(block)

    def _slots(self, i: int) -> Iterable[int]:
        instr = self.plan.instrs[i]
        return (*instr.ins, *instr.outs, *instr.work)

    # -- one instruction ---------------------------------------------------------------------------------------------
    def _single(self, i: int, ran: list[int]) -> None:
        try:
            for call in self._own_calls(i):
                call()
        except Exception as error:
            raise self._failed(i, error, ran) from error
        ran.append(i)

    def _own_calls(self, i: int) -> list[Any]:
        return self._calls[self._counts[i - 1] if i else 0 : self._counts[i]]

    def _on_host(self, i: int) -> bool:
        return any(self._view(s).device == CPU for s in self.plan.instrs[i].outs)

    def _bind_calls(self) -> None:
        """Bind, and let go of the graphs that hold other calls; they are recorded again in the next run."""
        super()._bind_calls()
        here = set(map(self._numbers, self.regions))
        kept = {numbers: g for numbers, g in self._graphs.items() if numbers in here and self._holds(numbers, g)}
        self.release()
        self._graphs.update(kept)
        if kept:
            self._pin()

    def _holds(self, numbers: Sequence[int], graph: _Graph) -> bool:
        """True if the instructions still have the calls that a graph was recorded from."""
        now = map(self._bound_calls.get, numbers)
        return all(calls is not None and calls is known for calls, known in zip(now, graph.calls, strict=True))

    def _numbers(self, region: Region) -> tuple[int, ...]:
        """The ledger's numbers of a region's instructions, the same in the next plan."""
        return tuple(self.plan.arranged.order[list(region.instrs)].tolist())

    def _gate(self, i: int) -> list[Any]:
        return []  # `execute` waits where the host goes on

    def _dead_fills(self, start: int, stop: int) -> list[Any]:
        return []  # dead in the order of the plan is not dead in the order of the regions


class _Graph(NamedTuple):
    """What was recorded of a region, and the lists of calls, one an instruction, that it was recorded from."""

    made: int
    calls: list[list[Any] | None]


def captured(driver: Driver, stream: int, calls: Iterable[Callable[[], object]], watchdog: float) -> int:
    """Record calls as a graph, ready to be replayed. The one place that begins and ends a capture.

    Raises: CaptureTimeout between two calls once `watchdog` seconds are over; what the calls and the driver raise.
        Whatever happens, the stream captures no more.
    """
    until = monotonic() + watchdog
    driver.begin_capture(stream)
    try:
        for call in calls:
            call()
            if monotonic() > until:
                raise CaptureTimeout("recording took too long", expected=f"{watchdog} s")
    except BaseException:
        with suppress(DriverError):
            driver.end_capture(stream)
        raise
    return driver.instantiate(driver.end_capture(stream))


def _said(error: Exception) -> str:
    where = getattr(error, "where", None)
    return f"{type(error).__name__}: {where}: {error}".splitlines()[0] if where else f"{type(error).__name__}: {error}"


def _block(array: NDArray) -> Any:
    return array.storage.block  # pyright: ignore[reportAttributeAccessIssue]  # of a device's storage


def _unpin(pins: list[Any]) -> None:
    for block in pins:
        block.pins -= 1
    pins.clear()
