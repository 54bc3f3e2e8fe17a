"""Workspace: the memory a plan runs in and the calls bound to it. After the first run nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import length_hint
from threading import Lock
from typing import Any
from weakref import finalize, ref

import numpy as np

from graphwright.array import CPU, NDArray, Storage, WriteCount, backend
from graphwright.array.vm.encode import Row, View, encode
from graphwright.autograd import Variable, changes
from graphwright.errors import ComputeError, GraphwrightError, UsageError
from graphwright.ops.call import kernel_error
from graphwright.plan.arenas import shared_arena
from graphwright.plan.collector import uncollected
from graphwright.plan.errors import DeviceFailed, OutOfMemory, StepTorn
from graphwright.plan.executor import VM
from graphwright.plan.folding import fold
from graphwright.plan.lease import Lease
from graphwright.plan.override import Override, OverrideCall, OverrideFailed
from graphwright.plan.plan import Part, Plan
from graphwright.plan.poison import PoisonCall, fill
from graphwright.plan.table import ARENA, CONST, FOLDED, HOST, PARAM, STATE, Instr
from graphwright.plan.transfer import as_array, made_of, reader, writer
from graphwright.program import FeedError
from graphwright.program.interpret import origin


class Workspace:
    """One arena and the calls bound to its addresses; used by one thread at a time.

    Args:
        plan: the tables.
        variables: variables by key to run on instead of the program's own, e.g. another sequence's cache.
        poison: fill the arena with NaN before every run and each buffer after its last use: an early free shows.
        shared: use the arena that plans of the device share; what a run left in it is there until another plan runs.

    Attributes:
        overridden: whether it heeds `plan.override`.
        handle: a weak reference to itself, by which a shared arena knows it.
    """

    def __init__(
        self,
        plan: Plan,
        variables: Mapping[str, Variable] | None = None,
        *,
        poison: bool = False,
        shared: bool = False,
    ) -> None:
        self.plan, self.poison = plan, poison
        self.device = plan.options.device
        self._kernels = backend(self.device)
        stored = [b for b in plan.buffers if b.kind in (PARAM, CONST, STATE)]
        self.variables = {b.key: self._variable(b.key, variables) for b in stored}
        self._homes = {b.key: CPU if b.on_host else self.device for b in stored}
        self._written_keys = self._keys_written()
        self._runs = WriteCount()
        finalize(self, self._runs.retire)
        self.handle = ref(self)
        self._bound: dict[str, NDArray] = {}
        self._given: dict[str, NDArray] = {}
        self._folded: list[tuple[NDArray, int]] = []
        self._calls: list[Any] = []
        self._counts: list[int] = []
        self._singles: dict[int, list[Any]] = {}
        self._arena: Storage | None = None
        self._lease: Lease | None = None
        self._views: dict[int, NDArray] = {}
        self._feeds: list[Callable[[NDArray], object] | None] = []
        self._takes: dict[str, Callable[[], NDArray]] = {}
        self._seen = -1
        self._relied: list[tuple[NDArray, int]] = []
        self._memory: dict[int, Storage] = {}
        self._placed: list[tuple[NDArray, int]] = []
        self._busy = Lock()
        self._shared = shared_arena(self._kernels) if shared else None
        self.overridden = True
        self._override: Override | None = None

    def _variable(self, key: str, variables: Mapping[str, Variable] | None) -> Variable:
        return variables[key] if variables is not None and key in variables else self.plan.program.weights[key]

    def _keys_written(self) -> list[str]:
        p = self.plan.program
        return [p.key(p.operands(n)[0].node) for n in p.writes()]

    # -- running -----------------------------------------------------------------------------------------------------
    def run(self, feeds: Mapping[str, Any] | Part, *, lease: bool = False) -> dict[str, Any]:
        """Copy the feeds in, run, give the outputs out.

        Args:
            feeds: array or tensor per input, of the plan's specs; or a part of the plan, `plan[i:j]`, which runs on
                what the slots hold: `set` gives inputs before the first part, `value` reads.
            lease: give views of the arena instead of copies; reading them after the next run raises StaleLease.
        Returns: name -> NDArray; nothing for a part.
        Raises: StalePlan, FeedError before anything runs; ComputeError naming the node's path.
        """
        if isinstance(feeds, Part):
            self._run_part(feeds)
            return {}
        return self._run(lambda: self._checked(feeds), lease)

    def step(self, arrays: Sequence[NDArray]) -> dict[str, NDArray]:
        """As `run`, on arrays in order of the inputs; the caller knows that they have the plan's specs."""
        return self._run(lambda: arrays, False)

    def _run(self, feeds: Callable[[], Sequence[NDArray]], lease: bool) -> dict[str, Any]:
        self._begin()
        try:
            if self.stale:
                self.refresh()
            arrays = feeds()
            self.end_lease()  # what was leased is read by now
            if self.poison and self._arena is not None:
                fill(self._arena)
            for feed, array in zip(self._feeds, arrays, strict=True):
                if feed is not None:
                    feed(array)
            self.execute()
            if lease:
                return {name: self._leased(self._view(slot)) for name, slot in self.plan.outputs.items()}
            return {name: take() for name, take in self._takes.items()}
        finally:
            self._end()

    def _begin(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise UsageError(
                "this workspace is running already", where=self.plan.program.name, fix="Workspace(plan) per thread"
            )
        if self._shared is not None and not self._shared.enter(self):
            self.leave_shared()  # another plan runs right now

    def _end(self) -> None:
        if self._shared is not None:
            self._shared.leave()
        self._busy.release()

    def leave_shared(self) -> None:
        """From now on use an arena of its own."""
        if self._shared is not None:
            self._shared.forget(self)
            self._shared = None
            self.forget_arena()

    def end_lease(self) -> None:
        """Make leased results of the last run stale."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def forget_arena(self) -> None:
        """Let go of the arena; the next run binds anew."""
        self.end_lease()
        self._arena, self._seen = None, -1
        self._calls, self._counts, self._singles, self._views = [], [], {}, {}
        self._feeds, self._takes = [], {}

    def _leased(self, view: NDArray) -> NDArray:
        if view.storage is not self._arena or self.device != CPU:
            return view.copy()  # memory of a variable, which others write; or of a device, which the host must ask
        if self._lease is None:
            assert self._arena is not None
            self._lease = Lease(self._arena)
        return NDArray(self._lease, view.dtype, view.shape, view.strides, view.offset)

    def _run_part(self, part: Part) -> None:
        """Instructions of a part, one by one. Raises: as `run`; UsageError for a part of another plan."""
        if part.plan is not self.plan:
            raise UsageError("a part of another plan", where=self.plan.program.name)
        if part.start:
            self._check_kept()
        self._begin()
        try:
            if self.stale:
                self.refresh()
            if part.start == 0:
                self._runs.count += 1
            for i in range(part.start, part.stop):
                if i not in self._singles:
                    self._singles[i] = self._bound_calls(i, i + 1)
                try:
                    for call in self._singles[i]:
                        call()
                except Exception as error:
                    raise self._failed(i, error) from error
        finally:
            self._end()

    def feed(self, feeds: Mapping[str, Any]) -> None:
        """Give the inputs values, for the parts of a plan. Raises: as `run`."""
        self._begin()
        try:
            if self.stale:
                self.refresh()
            for feed, array in zip(self._feeds, self._checked(feeds), strict=True):
                if feed is not None:
                    feed(array)
        finally:
            self._end()

    def set(self, slot: int, array: Any) -> None:
        """Give a slot a value. Raises: UsageError for no such slot; FeedError for another shape or dtype."""
        self._known(slot)
        self._begin()
        try:
            self._set(slot, array)
        finally:
            self._end()

    def _set(self, slot: int, array: Any) -> None:
        if self.stale:
            self.refresh()
        view, given = self._view(slot), as_array(array)
        if given.spec != view.spec:
            raise FeedError(
                "a slot takes a value of its spec", where=f"slot {slot}", expected=view.spec, got=given.spec
            )
        backend(view.device).copy(view, given.copy() if given.storage is self._arena else given)

    def _known(self, slot: int) -> None:
        if not 0 <= slot < len(self.plan.slots):
            raise UsageError("no such slot", expected=f"0..{len(self.plan.slots) - 1}", got=slot)

    @property
    def stale(self) -> bool:
        """True if an edit, or another array behind a variable, may want memory or calls to be bound again."""
        if changes.count != self._seen:
            return True
        for array, version in self._relied:  # noqa: SIM110  # half the time of any(...)
            if array.storage.version != version:
                return True
        return False

    def refresh(self) -> None:
        """Bind memory and calls anew where needed. Raises: StalePlan."""
        self.plan.check_fresh()
        stack = self.plan.overrides
        wanted = stack[-1] if stack and self.overridden else None
        self._bind()
        if wanted is not self._override:
            self._override = wanted
            self._bind_calls()
        self._seen = changes.count

    def execute(self) -> None:
        """Run the calls on what lies in the inputs. Raises: ComputeError naming the node's path."""
        self._runs.count += 1  # the version of every block that the plan writes, also if it fails half way
        calls = iter(self._calls)
        try:
            for call in calls:
                call()
        except Exception as error:
            raise self._located(len(self._calls) - length_hint(calls) - 1, error) from error

    def memory(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Inputs that are read, and outputs, as numpy views of planned memory; bfloat16 as its bits.

        Raises: UsageError on another device than the CPU.
        """
        plan = self.plan
        if self.device != CPU:
            raise UsageError("memory of a device cannot be written by hand", where=plan.program.name, got=self.device)
        inputs = {plan.buffers[plan.slots[s].buffer].key: self._view(s).to_numpy(bits=True) for s in plan.input_slots}
        return inputs, {name: self._view(s).to_numpy(bits=True) for name, s in plan.outputs.items()}

    def value(self, slot: int) -> NDArray:
        """A copy of what a slot holds; meaningful while its buffer is live.

        Raises: UsageError for no such slot, or if another plan has used a shared arena since.
        """
        self._known(slot)
        self._check_kept()
        self._bind()
        return self._view(slot).copy()

    def _check_kept(self) -> None:
        if self._shared is not None and not self._shared.used_by(self):
            raise UsageError(
                "another plan has used this memory since, or nothing has run",
                where=self.plan.program.name,
                fix="Workspace(plan), which has memory of its own",
            )

    def watched(self, name: str) -> NDArray:
        """The value of a watched node in the last run, copied. Raises: UsageError for one that was not watched."""
        if name not in self.plan.watched:
            raise UsageError(
                "this node was not watched",
                where=name,
                expected=", ".join(self.plan.watched) or "none",
                fix="program.compile(..., watch=[name])",
            )
        return self.value(self.plan.watched[name])

    def _checked(self, feeds: Mapping[str, Any]) -> list[NDArray]:
        """Feeds in order of the inputs. Raises: FeedError listing all that do not fit."""
        wrong = [f"{name}: not an input" for name in feeds if name not in self.plan.inputs]
        ready: list[NDArray] = []
        for name, spec in self.plan.inputs.items():
            given = feeds.get(name)
            if given is None:
                wrong.append(f"{name}: missing, expected {spec}")
                continue
            try:
                data = as_array(given)
            except GraphwrightError as error:
                wrong.append(f"{name}: {error.what}, got {error.got}")
                continue
            if data.spec != spec:
                wrong.append(f"{name}: expected {spec}, got {data.spec}")
            if data.device not in (CPU, self.device):
                wrong.append(f"{name}: lies on {data.device}, expected {self.device} or the host")
            ready.append(data)
        if wrong:
            raise FeedError("inputs do not fit:\n  " + "\n  ".join(wrong), where=self.plan.program.name)
        # a leased value lies in the arena that the inputs are written to
        own = (self._arena, self._lease)
        return [data.copy() if data.storage in own else data for data in ready]

    def _located(self, call: int, error: Exception) -> GraphwrightError:
        """The error of one call, with the node it ran for."""
        at = next(i for i, end in enumerate(self._counts) if call < end)
        return self._failed(at + getattr(error, "op", 0), error)  # its place in a segment of the VM

    def _failed(self, at: int, error: Exception, ran: Collection[int] | None = None) -> GraphwrightError:
        """The error of one instruction; `ran` are those that had run, by default all before it."""
        plan, instr = self.plan, self.plan.instrs[at]
        if isinstance(error, OverrideFailed) and self._override is not None:
            return self._torn(error, range(self._override.stop))
        if isinstance(error, DeviceFailed):
            return self._torn(error, range(min(at, plan.commit_start)) if ran is None else ran)
        failure = kernel_error(instr.op, [self._view(s) for s in instr.ins], error, plan.program.path(instr.node))
        failure = self._torn(failure, range(at) if ran is None else ran)
        failure.add_note(origin(plan.program, instr.node))
        return failure

    def _torn(self, failure: GraphwrightError, ran: Collection[int]) -> GraphwrightError:
        """The failure itself, or StepTorn if one of the instructions that ran wrote a state."""
        plan = self.plan
        torn = [key for i, keys in plan.early.items() if i in ran for key in keys]
        done = [plan.instrs[i] for i in sorted(ran) if i >= plan.commit_start]
        written = [plan.buffers[plan.slots[s].buffer] for instr in done for s in instr.outs]
        torn += [b.key for b in written if b.kind in (PARAM, STATE)]
        return StepTorn(failure, tuple(torn)) if torn else failure

    # -- memory ------------------------------------------------------------------------------------------------------
    def _bind(self) -> None:
        """Make memory and calls at the first run; bind again where a variable has another array than before."""
        for key in self._written_keys:
            self.variables[key].own()
        first = self._arena is None
        if first:
            self._arena = self._room()
        changed = first or any(v.data is not self._given.get(k) for k, v in self.variables.items())
        if changed:
            self._bound = {key: self._array(key, v) for key, v in self.variables.items()}
            self._given = {key: self._value(v) for key, v in self.variables.items()}
        elif any(array.storage.version != version for array, version in self._placed):
            for array, _ in self._placed:
                made_of(array, array.dtype, self.device)  # the new value, at the old address
        self._placed = [(a, a.storage.version) for key, a in self._given.items() if a is not self._bound[key]]
        self._relied = [*self.plan.guarded, *self._folded, *self._placed]
        if changed or any(array.storage.version != version for array, version in self._folded):
            with uncollected():
                folded, self._folded = fold(self.plan, self._given)
                self._memory |= folded
                self._bind_calls()

    def _room(self) -> Storage:
        """The arena. Raises: OutOfMemory."""
        size, shared = self.plan.arena_bytes, self._shared
        try:
            return self._kernels.allocate(size) if shared is None else shared.block(self, size)
        except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
            raise OutOfMemory(self.plan, self.device) from error

    @staticmethod
    def _value(variable: Variable) -> NDArray:
        assert isinstance(variable.data, NDArray)
        return variable.data

    def _array(self, key: str, variable: Variable) -> NDArray:
        """Where a variable is read: its array, or a copy on the plan's device. One that is written moves there."""
        home, data = self._homes[key], self._value(variable)
        if data.device != home and key in self._written_keys:
            variable.data = data.to(home)
            return variable.data
        return made_of(data, data.dtype, home)

    def _bind_calls(self) -> None:
        plan = self.plan
        self._views = {}
        self._calls, self._counts, self._singles = [], [], {}
        for b in plan.buffers:
            if b.kind == HOST:
                self._memory[b.index] = backend(CPU).allocate(b.nbytes)
        for segment in plan.segments:
            single = segment.kind != VM or self.poison  # what dies is filled after each
            step = 1 if single else segment.stop - segment.start
            for start in range(segment.start, segment.stop, step):
                if self._override is not None and self._override.start <= start < self._override.stop:
                    if start == self._override.start:
                        self._calls.append(OverrideCall(plan, self._override, self._view))
                    self._counts += [len(self._calls)] * step
                    continue
                self._calls += self._gate(start) + self._bound_calls(start, start + step)
                self._counts += [len(self._calls)] * step
        used = {plan.buffers[plan.slots[s].buffer].key: self._view(s) for s in plan.input_slots}
        self._feeds = [writer(used[name]) if name in used else None for name in plan.inputs]
        self._takes = {name: reader(self._view(slot)) for name, slot in plan.outputs.items()}
        for key in self._written_keys:
            self._bound[key].storage.counted_by(self._runs)
        self._relied = [*plan.guarded, *self._folded, *self._placed]

    def _gate(self, i: int) -> list[Any]:
        """What comes in front of an instruction: a device is waited for before the commit, so that it fails before."""
        return [self._settle] if i == self.plan.commit_start and self._kernels.driver is not None else []

    def _settle(self) -> None:
        """Wait for the device. Raises: DeviceFailed."""
        assert self._kernels.driver is not None
        try:
            self._kernels.driver.synchronize()
        except Exception as error:
            raise DeviceFailed(
                f"an instruction failed on the device: {error}", where=self.plan.program.name, got=str(self.device)
            ) from error

    def _bound_calls(self, start: int, stop: int) -> list[Any]:
        """Calls for a run of instructions of one executor; of ATen, for one."""
        instrs = self.plan.instrs[start:stop]
        if self.plan.choices[start].executor == VM:
            from graphwright.array.vm.segment import VmSegment  # loads numba

            calls: list[Any] = [VmSegment([self._rows(instr) for instr in instrs])]
        else:
            (instr,) = instrs
            outs, ins, work = ([self._view(s) for s in slots] for slots in (instr.outs, instr.ins, instr.work))
            if instr.op == "copy" and ins[0].device != outs[0].device:
                calls = [partial(self._kernels.copy, outs[0], ins[0])]
            else:
                calls = list(backend(outs[0].device).bind(instr.op, outs, ins, instr.attrs, work))
        return calls + self._dead_fills(start)

    def _dead_fills(self, i: int) -> list[Any]:
        """What poisons the buffers that die with an instruction."""
        dead = [self.plan.buffers[b] for b in self.plan.free_after(i)] if self.poison else []
        return [PoisonCall(self._arena, b.offset, b.nbytes) for b in dead]

    def _rows(self, instr: Instr) -> list[Row]:
        """An instruction as code of the VM."""
        outs, ins = ([self._addressed(s) for s in slots] for slots in (instr.outs, instr.ins))
        rows = encode(instr.op, outs, ins, instr.attrs)
        assert rows is not None, "the plan chose the VM where it has a form"
        return rows

    def _addressed(self, slot: int) -> View:
        array = self._view(slot)
        return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))

    def _view(self, slot: int) -> NDArray:
        found = self._views.get(slot)
        if found is None:
            found = self._views[slot] = self._make_view(slot)
        return found

    def _make_view(self, slot: int) -> NDArray:
        row = self.plan.slots[slot]
        buffer, layout = self.plan.buffers[row.buffer], row.layout
        if buffer.kind in ARENA:
            assert self._arena is not None
            offset = buffer.offset // row.dtype.itemsize + layout.offset
            return NDArray(self._arena, row.dtype, layout.shape, layout.strides, offset)
        if buffer.kind in (FOLDED, HOST):
            return NDArray(self._memory[row.buffer], row.dtype, layout.shape, layout.strides, layout.offset)
        base = self._bound[buffer.key]
        if not base.contiguous:
            raise ComputeError("a variable must lie row by row", where=buffer.key)
        return NDArray(base.storage, row.dtype, layout.shape, layout.strides, base.offset + layout.offset)
