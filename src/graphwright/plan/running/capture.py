"""Executables that capture the regions of a plan as device graphs and replay them, with one launch per region.

Recording a graph executes nothing, so every step advances the state exactly once. If capturing or launching a region
fails, this region and all later ones are executed without graphs, until `retry_capture()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from weakref import finalize

from graphwright.array import CPU
from graphwright.array.memory_pool import Driver, DriverError
from graphwright.autograd import Variable
from graphwright.errors import ComputeError, Facts, UsageError
from graphwright.plan.planning.hazards import CAPTURED, Region
from graphwright.plan.planning.lowering import needs
from graphwright.plan.running.executable import Executable
from graphwright.plan.running.kernels import BoundKernels

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan

COLD, WARM, DONE, FAILED = "cold", "warm", "captured", "failed"


class CaptureRefused(ComputeError):
    """A region of a plan cannot be captured as a device graph although `require_capture` is set.

    Attributes:
        slot, op: the slot and the op that prevent the capture, if the reason is one instruction.
        reason: why the region cannot be captured.
    """

    def __init__(self, reason: str, *, slot: int | None = None, op: str = "", **facts: Unpack[Facts]) -> None:
        facts.setdefault("fix", "require_capture=False, to run without graphs")
        super().__init__(f"the plan cannot be captured as device graphs: {reason}", **facts)
        self.slot, self.op, self.reason = slot, op, reason


class CaptureTimeout(ComputeError, TimeoutError):
    """Capturing a region took longer than `watchdog` seconds."""


class CaptureState(NamedTuple):
    """State of a `CaptureExecutable`: cold (no run so far), warm (`warm` runs without graphs so far), captured, or
    failed (for the reason `reason`).
    """

    name: str
    warm: int = 0
    reason: str = ""

    def __str__(self) -> str:
        return f"warm({self.warm})" if self.name == WARM else f"failed({self.reason})" if self.reason else self.name


class CaptureExecutable(Executable):
    """An executable that captures regions (spans of instructions) as device graphs after some runs, then replays these.

    Args:
        plan: a plan for a device with graphs. Graphs read and write fixed memory, so every feed is copied there.
        variables, safe: see `Executable`.
        poison: fill the arena with NaN before every run.
        warmups: number of runs without graphs before the first capture.
        require_capture: raise CaptureRefused instead of running without graphs.
        watchdog: maximum seconds to capture a region.

    Attributes:
        state: see `CaptureState`.
        captures: number of regions captured so far. An edit keeps the graphs of the regions that it does not change.
    Raises: UsageError if the plan is for the CPU; CaptureRefused if no region can be captured and `require_capture` is
        set.
    """

    def __init__(
        self, plan: Plan, variables: Mapping[str, Variable] | None = None, *, poison: bool = False, safe: bool = False,
        warmups: int = 2, require_capture: bool = False, watchdog: float = 30.0,
    ) -> None:  # fmt: skip
        if plan.options.device == CPU:
            raise UsageError("the CPU has no graphs to capture", where=plan.program.name,
                             expected="a plan of a device with graphs", got=plan.options.device,
                             fix='Executable(plan), or program.compile(..., device="cuda")')  # fmt: skip
        kernels = BoundKernels(plan, variables, poison=poison, shared=False, in_order=False)
        super().__init__(plan, poison=poison, safe=safe, kernels=kernels)
        self.warmups, self.require_capture, self.watchdog = warmups, require_capture, watchdog
        self.regions = plan.regions()
        self.state, self.captures, self._binds = CaptureState(COLD), 0, 0
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

    def adopt(self, plan: Plan) -> bool:
        """Switch to a plan that was patched from the current one, keeping the graphs of unchanged regions.

        Returns: False, with nothing changed, if the plans have different builders, or if this is pinned or running.
        """
        arena, could = self.kernels.arena, self._capturable
        chunks = [] if arena is None else list(arena.chunks)
        if not super().adopt(plan):
            return False
        arena = self.kernels.arena
        if arena is None or len(arena.chunks) < len(chunks):
            self.release()  # before the chunks that graphs pin are freed
        self.regions = plan.regions()
        if not could and self._capturable:
            self.state = CaptureState(COLD)
        return True

    def execute(self) -> None:
        """Run all regions on the current inputs. Raises: ComputeError; CaptureRefused if `require_capture` is set."""
        if self.kernels.binds != self._binds:
            self._binds = self.kernels.binds
            self._rebound()
        if self.kernels.override is not None:
            super().execute()
            return
        self.kernels.runs.rise()
        ran: list[int] = []
        recording = self.state.name == DONE or (self.state.name != FAILED and self.state.warm >= self.warmups)
        synchronized = False
        for region in self.regions:
            if region.kind == CAPTURED and recording and self.state.name != FAILED and self._launch(region):
                ran += region.instrs
                continue
            for i in region.instrs:
                if i >= self.plan.commit_start and not synchronized and self._writes_host(i):
                    self.kernels.synchronize()  # the host must not continue a step that failed on the device
                    synchronized = True
                try:
                    for call in self._calls_of(i):
                        call()
                except Exception as error:
                    raise self.failed(i, error, ran) from error
                ran.append(i)
        self.kernels.note_run()
        if self.state.name != FAILED:
            self.state = CaptureState(DONE) if recording else CaptureState(WARM, self.state.warm + 1)

    def retry_capture(self) -> None:
        """After a failed capture, try again in the next run."""
        if self.state.name == FAILED and self._capturable:
            self.state = CaptureState(WARM, self.warmups)

    def release(self) -> None:
        """Free the graphs and unpin their memory; the next run captures them again."""
        self._graphs.clear()
        _unpin(self._pins)
        if self.state.name == DONE:
            self.state = CaptureState(WARM, self.warmups)

    # -- one region --------------------------------------------------------------------------------------------------
    def _launch(self, region: Region) -> bool:
        """Launch the graph of a region, capturing it first if needed; return False if nothing was launched."""
        driver, stream = self.kernels.backend.driver, self.kernels.backend.stream
        assert driver is not None
        try:
            numbers = self._numbers(region)
            if numbers not in self._graphs:
                self._audit(region)
                calls = [self._calls_of(i) for i in region.instrs]
                made = captured(driver, stream, chain.from_iterable(calls), self.watchdog)
                self._graphs[numbers] = _Graph(made, [self.kernels.instruction_calls.get(q) for q in numbers])
                self.captures += 1
                self._pin()
            driver.replay(self._graphs[numbers].made, stream)
        except Exception as error:
            if self.require_capture:
                where = self.plan.program.name
                raise error if isinstance(error, CaptureRefused) else CaptureRefused(str(error), where=where) from error
            self._graphs.clear()
            _unpin(self._pins)
            self.state = CaptureState(FAILED, reason=_describe(error))
            return False
        return True

    def _audit(self, region: Region) -> None:
        """Raise CaptureRefused if memory of a region is not on the device, or an instruction needs the host."""
        bound = self.kernels
        for i in region.instrs:
            instr = self.plan.instrs[i]
            where = self.plan.path(instr.node)
            for s in (*instr.ins, *instr.outs, *instr.work):
                device = bound.view(s).device
                if device != bound.device:
                    raise CaptureRefused(f"the memory of slot {s} of {instr.op} is on {device}", slot=s, op=instr.op,
                                         where=where, expected=f"memory on {bound.device}")  # fmt: skip
            asked = needs(instr, bound.backend, lambda s: bound.view(s).spec)
            if asked.why or asked.reads:
                slot = instr.ins[asked.reads[0]] if asked.reads else instr.outs[0]
                why = asked.why or f"the host reads the operand of {instr.op} in slot {slot}"
                raise CaptureRefused(why, slot=slot, op=instr.op, where=where)

    def _pin(self) -> None:
        if self._pins:
            return
        inside = [self.plan.instrs[i] for region in self.regions if region.kind == CAPTURED for i in region.instrs]
        slots = {s for instr in inside for s in (*instr.ins, *instr.outs, *instr.work)}
        storages: list[Any] = [self.kernels.view(s).storage for s in slots]
        for block in {id(s.block): s.block for s in storages}.values():
            block.pins += 1
            self._pins.append(block)

    def _rebound(self) -> None:
        """Drop the graphs that recorded calls which are no longer bound; the next run captures their regions again."""
        present = set(map(self._numbers, self.regions))
        kept = {numbers: g for numbers, g in self._graphs.items() if numbers in present and self._valid(numbers, g)}
        self.release()
        self._graphs.update(kept)
        if kept:
            self._pin()

    def _valid(self, numbers: Sequence[int], graph: _Graph) -> bool:
        """Return True if the instructions `numbers` are still bound to the calls that the graph recorded."""
        now = map(self.kernels.instruction_calls.get, numbers)
        return all(calls is not None and calls is known for calls, known in zip(now, graph.calls, strict=True))

    def _numbers(self, region: Region) -> tuple[int, ...]:
        """Return the plan builder's ids of a region's instructions, which are the same in the next plan."""
        return tuple(self.plan.buffer_layout.order[list(region.instrs)].tolist())

    def _calls_of(self, i: int) -> list[Any]:
        ends = self.kernels.call_ends
        return self.kernels.calls[ends[i - 1] if i else 0 : ends[i]]

    def _writes_host(self, i: int) -> bool:
        return any(self.kernels.view(s).device == CPU for s in self.plan.instrs[i].outs)


class _Graph(NamedTuple):
    """A captured region: the handle `made` of its device graph, and per instruction the `calls` that it recorded."""

    made: int
    calls: list[list[Any] | None]


def captured(driver: Driver, stream: int, calls: Iterable[Callable[[], object]], watchdog: float) -> int:
    """Capture calls as a graph, and return its handle, ready to replay. Only this function begins and ends captures.

    Raises: CaptureTimeout after a call once `watchdog` seconds are over; errors of the calls and of the driver. The
        capture is ended before any error is raised.
    """
    until = monotonic() + watchdog
    driver.begin_capture(stream)
    try:
        for call in calls:
            call()
            if monotonic() > until:
                raise CaptureTimeout("a graph capture took too long", expected=f"at most {watchdog} s",
                                     fix="CaptureExecutable(plan, watchdog=...) with more seconds")  # fmt: skip
    except BaseException:
        with suppress(DriverError):
            driver.end_capture(stream)
        raise
    return driver.instantiate(driver.end_capture(stream))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _unpin(pins: list[Any]) -> None:
    for block in pins:
        block.pins -= 1
    pins.clear()
