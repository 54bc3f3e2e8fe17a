"""What a workspace binds: memory of a plan, and calls to its addresses; anew where a plan or an array is another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate, chain, repeat
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import numpy as np

from graphwright.array import CPU, NDArray, WriteCount, backend
from graphwright.array.backend import queued_failure
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group
from graphwright.array.vm.encode.operands import View, copy_row
from graphwright.array.vm.encode.share import cut
from graphwright.autograd import changes
from graphwright.errors import ComputeError
from graphwright.ops import expansion, get
from graphwright.plan.errors import DeviceFailed, OutOfMemory
from graphwright.plan.plan import StalePlan
from graphwright.plan.planning.executors import VM
from graphwright.plan.planning.native import loops
from graphwright.plan.planning.plan_builder import walking
from graphwright.plan.planning.planner import uncollected
from graphwright.plan.planning.residency import fold, folded_from
from graphwright.plan.running.arena import Arena, PoisonCall, shared_arena
from graphwright.plan.running.override import OverrideCall
from graphwright.plan.running.transfer import made_of, pointer, reader, writer
from graphwright.plan.table import ARENA, FOLDED, HOST, INPUT

if TYPE_CHECKING:
    from graphwright.array import Storage
    from graphwright.array.vm.encode.share import Cut
    from graphwright.array.vm.running.segment import VmSegment
    from graphwright.autograd import Variable
    from graphwright.plan.plan import Plan
    from graphwright.plan.planning.buffer_layout import BufferLayout
    from graphwright.plan.planning.fusion import FusionRegion
    from graphwright.plan.running.executable import BorrowedStorage
    from graphwright.plan.running.override import Override
    from graphwright.plan.running.transfer import Given
    from graphwright.plan.table import Instr

_NOTHING, _UNKNOWN = cut(()), cut(())

ViewOf = Callable[[int], NDArray]


class VmCode:
    """Rows by instruction and by stretch of fusion groups, kept from plan to plan of one ledger."""

    def __init__(self) -> None:
        self._rows: dict[int, Cut] = {}
        self._parts: dict[FusionRegion, dict[tuple[int, int], list[Cut]]] = {}
        self._within: dict[int, FusionRegion] = {}

    def between(self, plan: Plan, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Rows of a plan's instructions from one place to another; those of a whole group with its first.

        Args:
            at: slot -> where it lies.
        """
        arranged = plan.arranged
        numbers = arranged.order[start:stop].tolist()
        code = list(map(self._rows.get, numbers, repeat(_UNKNOWN)))
        for begin, stretch in arranged.fusion.between(start, stop):
            end, known = begin + len(stretch.instrs), self._parts_of(stretch)
            part = (max(start - begin, 0), min(stop, end) - begin)
            if part not in known:
                known[part] = self._of_part(arranged, stretch, *part, at)
            code[max(begin - start, 0) : end - start] = known[part]
        return self._filled(arranged, numbers, code, at)

    def forget(self, instrs: Set[int]) -> None:
        """Instructions that went, or touch what lies elsewhere now."""
        for q in instrs & self._rows.keys():
            del self._rows[q]
        for q in instrs & self._within.keys():
            self._parts.pop(self._within.pop(q), None)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
        self._parts.clear()
        self._within.clear()

    def _parts_of(self, stretch: FusionRegion) -> dict[tuple[int, int], list[Cut]]:
        """What is known of a stretch; another one that had some of its instructions is of no plan any more."""
        if stretch not in self._parts:
            for q in stretch.instrs:
                if q in self._within:
                    self._parts.pop(self._within[q], None)
                self._within[q] = stretch
            self._parts[stretch] = {}
        return self._parts[stretch]

    def _of_part(self, arranged: BufferLayout, stretch: FusionRegion, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Rows of some instructions of a stretch; those of a group of which not all are there, by themselves."""
        numbers = stretch.instrs[start:stop]
        code = list(map(self._rows.get, numbers, repeat(_UNKNOWN)))
        for group in stretch.groups:
            first, last = group[0], group[-1] + 1
            if start <= first and last <= stop:
                rows = _group(arranged, stretch, first, last, at)
                code[first - start : last - start] = [rows, *[_NOTHING] * (last - first - 1)]
        return self._filled(arranged, numbers, code, at)

    def _filled(self, arranged: BufferLayout, numbers: Sequence[int], code: Sequence[Cut], at: ViewOf) -> list[Cut]:
        """Rows of instructions, with those made that are not there."""
        made = list(code)
        for i in [i for i, rows in enumerate(code) if rows is _UNKNOWN] if _UNKNOWN in code else ():
            made[i] = self._rows[numbers[i]] = _rows(arranged.ledger.instrs[numbers[i]], at)
        return made


def _group(arranged: BufferLayout, stretch: FusionRegion, first: int, last: int, at: ViewOf) -> Cut:
    ledger = arranged.ledger

    def operand(slot: int) -> View | Inner:
        tile = stretch.tiles.get(arranged.place(ledger.slots[slot].buffer))
        return _addressed(at(slot)) if tile is None else Inner(tile)

    members, instrs = [], [ledger.instrs[q] for q in stretch.instrs[first:last]]
    for instr in instrs:
        dtypes = [ledger.slots[s].dtype for s in (*instr.outs, *instr.ins)]
        outs, ins = ([operand(s) for s in slots] for slots in (instr.outs, instr.ins))
        form = get(instr.op).vm
        assert form is not None, "the plan groups instructions that the VM runs"
        members.append(Member(form, outs, ins, instr.attrs, dtypes))
    rows = encode_group(ledger.slots[instrs[0].outs[0]].layout.shape, members)
    assert rows is not None, "the plan made a group where there are tiles"
    return cut(rows)


def _addressed(array: NDArray) -> View:
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def _rows(instr: Instr, at: ViewOf) -> Cut:
    outs, ins, work = ([_addressed(at(s)) for s in slots] for slots in (instr.outs, instr.ins, instr.work))
    form = expansion.vm_form(get(instr.op))
    rows = None if form is None else form.rows(outs, ins, instr.attrs, work)
    assert rows is not None, "the plan chose the VM where it has a form"
    return cut(rows)


_UNBOUND: list[Any] = []


def _first(instructions: int, calls: int = 1) -> Iterable[int]:
    """Calls of each of some instructions, of which the first has them all."""
    return (calls, *repeat(0, instructions - 1))


def _gone(before: np.ndarray, after: np.ndarray) -> set[int]:
    """Numbers of one order, each there once, that are not in another, which mostly begins and ends as it does."""
    short = min(len(before), len(after))
    start, stop = (
        int(np.argmax(differ)) if differ.any() else short
        for differ in (before[:short] != after[:short], (before[::-1][:short] != after[::-1][:short]))
    )
    return set(before[start : len(before) - stop].tolist()) - set(after[start : len(after) - stop].tolist())


class BoundKernels:
    """Memory and calls of a plan, for a `Executable` to run.

    Attributes:
        overridden: whether it heeds `plan.override`.
        pinned: True if its calls and memory are in others' hands, so that it stays with its plan.
        handle: a weak reference to itself, by which a shared arena knows it.
        runs: how often it has run, as the version of what it writes.
        watching: whether what it relies on is written by plans, so that versions have to be looked at.
    """

    def __init__(
        self,
        plan: Plan,
        variables: Mapping[str, Variable] | None = None,
        *,
        poison: bool = False,
        shared: bool = False,
        safe: bool = False,
    ) -> None:
        self.poison, self.safe = poison, safe
        self.device = plan.options.device
        self._kernels = backend(self.device)
        self._own = {} if variables is None else variables
        self._take(plan)
        plan.check_variables(self._own)
        self.handle = ref(self)
        self.pinned = False
        self.runs = WriteCount()
        finalize(self, self.runs.retire)
        self._bound: dict[str, NDArray] = {}
        self._given: dict[str, NDArray] = {}
        self._folded: list[tuple[NDArray, int]] = []
        self._folds: Mapping[int, Any] = {}
        self._calls: list[Any] = []
        self._apart = False  # the calls are to be put together again
        self._sizes: list[Iterable[int]] = []
        self._ends: list[int] | None = None
        self._singles: dict[int, list[Any]] = {}
        self._arena: Arena | None = None
        self._borrowed: dict[int, BorrowedStorage] = {}
        self._views: dict[int, NDArray] = {}
        self._feeds: list[Callable[[Given], object] | None] = []
        self._takes: dict[str, Callable[[], NDArray]] = {}
        self._seen = -1
        self._relied: list[tuple[NDArray, int]] = []
        self.watching = False
        self._memory: dict[int, Storage] = {}
        self._bound_calls: dict[int, list[Any]] = {}
        self._code = VmCode()
        self._segments: dict[Any, Any] = {}
        self._readers: dict[int, Callable[[], NDArray]] = {}
        self._writers: dict[int, Callable[[Given], object]] = {}
        self._placed: list[tuple[NDArray, int]] = []
        self._scratch: np.ndarray | None = None
        self._fed: Any = None
        self._points: list[tuple[int, Callable[[Given], bool]]] = []
        self._pointed: Sequence[Given] | None = None
        self._busy = Lock()
        self._shared = shared_arena(self._kernels) if shared else None
        self.overridden = True
        self._override: Override | None = None

    def _take(self, plan: Plan) -> None:
        """The plan to run, with what it reads and writes by key, and what of that lies on the host."""
        self.plan = plan
        arranged, own = plan.arranged, self._own
        ledger = arranged.ledger
        keys = (*arranged.read, *(ledger.buffers[ledger.holders[s]][2] for s in folded_from(plan)))
        self.variables = {key: own.get(key, arranged.variables[key]) for key in keys}
        self._homes = {ledger.buffers[b][2]: CPU for b in ledger.on_host}

    def adopt(self, plan: Plan) -> bool:
        """Go on with a plan patched from this one: memory stays, and so do the calls that the edit did not touch.

        Returns: False, with nothing changed, if the plan is of another ledger or this workspace runs or is pinned.
        """
        before, after = self.plan.arranged, plan.arranged
        if self.pinned or before.ledger is not after.ledger or not self._busy.acquire(blocking=False):
            return False
        shared = self._shared
        if shared is not None and not shared.hold():  # another plan runs, and may take the arena away
            self._busy.release()
            return False
        try:
            self._go_over(plan)
            return True
        finally:
            if shared is not None:
                shared.leave()
            self._busy.release()

    def _go_over(self, plan: Plan) -> None:
        """Keep the calls and views of what lies where it did."""
        before, after = self.plan.arranged, plan.arranged
        self._take(plan)
        self._seen, self._override = -1, None
        if self._arena is None or not self._arena.holds(after.ends):
            self._arena = None  # bound anew at the next run
            return
        self._forget_calls(_gone(before.order, after.order))
        moved = after.moved_since(before)
        if moved.any():
            self._forget(np.flatnonzero(moved))
        self._apart, self._singles = True, {}

    @property
    def stale(self) -> bool:
        """True if an edit, or another array behind a variable, may want memory or calls to be bound again."""
        if changes.count != self._seen:
            return True
        return self.watching and any(array.storage.version != version for array, version in self._relied)

    def refresh(self) -> None:
        """Bind memory and calls anew where needed. Raises: StalePlan."""
        self.plan.check_fresh()
        stack = self.plan.overrides
        wanted = stack[-1] if stack and self.overridden else None
        if wanted is not self._override:
            self._override, self._apart = wanted, True
        self._bind()
        self.watching = any(array.storage.counted for array, _ in self._relied)
        self._seen = changes.count

    @property
    def _counts(self) -> list[int]:
        """Per instruction, the number of calls up to its last one."""
        if self._ends is None:
            self._ends = list(accumulate(chain.from_iterable(self._sizes)))
        return self._ends

    @property
    def single(self) -> VmSegment | None:
        """The one native segment that does it all, if it is so."""
        only = self._calls[0] if len(self._calls) == 1 else None
        return only if hasattr(only, "run") else None

    # -- the arena ----------------------------------------------------------------------------------------------------
    def leave_shared(self) -> None:
        """From now on use an arena of its own."""
        if self._shared is not None:
            self._shared.forget(self)
            self._shared = None
            self.forget_arena()

    def end_borrow(self) -> None:
        """Make leased results of the last run stale."""
        for borrow in self._borrowed.values():
            borrow.close()
        self._borrowed.clear()

    def forget_arena(self) -> None:
        """Let go of the arena; the next run binds anew."""
        self.end_borrow()
        self._arena, self._seen = None, -1
        self._calls, self._sizes, self._ends, self._singles, self._feeds, self._takes = [], [], None, {}, [], {}
        self._fed, self._points, self._pointed = None, [], None
        for kept in (self._bound_calls, self._code, self._segments, self._views, self._readers, self._writers):
            kept.clear()

    # -- memory ------------------------------------------------------------------------------------------------------
    def _bind(self) -> None:
        """Make memory and calls at the first run; bind again what has another array or place than before."""
        for key in self.plan.arranged.written:
            self.variables[key].own()
        first = self._arena is None
        arena = self._arena if self._arena is not None else Arena()
        if arena.ends != self.plan.arranged.ends:
            arena.grow(self.plan.arranged.ends, self._chunk)
        self._arena = arena
        other = {k for k, v in self.variables.items() if v.data is not self._given.get(k)}
        changed = first or not other.isdisjoint(self._given)
        if other:
            self._check_arrays()
            self._bound |= {key: self._array(key, self.variables[key]) for key in other}
            self._given |= {key: self._value(self.variables[key]) for key in other}
        if changed:
            for kept in (self._bound_calls, self._code, self._views, self._readers, self._writers):
                kept.clear()
        behind = any(array.storage.version != version for array, version in self._placed)
        self._let_go(self._given.keys() - self.variables.keys())
        self._placed = [(a, a.storage.version) for key, a in self._given.items() if a is not self._bound[key]]
        for array, _ in self._placed if behind else ():
            made_of(array, array.dtype, self.device)  # the new value, at the old address
        self._relied = [*self.plan.guarded, *self._folded, *self._placed]
        if changed or any(array.storage.version != version for array, version in self._folded):
            with uncollected():
                self._fold()
                self._bind_calls()
        elif self._apart:
            with uncollected():
                if self.plan.folds.keys() != self._folds.keys():
                    self._fold()
                self._bind_calls()

    def _let_go(self, keys: Set[str]) -> None:
        """Forget arrays that the plan does not read; they may be others when it does again."""
        ledger = self.plan.arranged.ledger
        for slot in [s for s in self._views if ledger.buffers[ledger.slots[s].buffer][2] in keys] if keys else ():
            for kept in (self._views, self._readers, self._writers):
                kept.pop(slot, None)
        for key in keys:
            del self._given[key], self._bound[key]

    def _chunk(self, i: int, size: int) -> Storage:
        """Memory of the arena. Raises: OutOfMemory."""
        try:
            return self._kernels.allocate(size) if self._shared is None else self._shared.chunk(self, i, size)
        except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
            raise OutOfMemory.of_arena(self.plan, self.device) from error

    def _check_arrays(self) -> None:
        """Raises: StalePlan for a variable whose array has another shape or dtype than was planned."""
        ledger = self.plan.arranged.ledger
        for s in (*self.plan.arranged.sources, *folded_from(self.plan)):
            kind, _, key = ledger.buffers[ledger.slots[s].buffer]
            if kind not in (INPUT, HOST) and self.variables[key].spec != ledger.slots[s].spec:
                raise StalePlan(
                    "a weight has another shape than was planned",
                    where=f"{self.plan.program.name}: {key}",
                    expected=ledger.slots[s].spec,
                    got=self.variables[key].spec,
                    fix="program.compile(...) again",
                )

    @staticmethod
    def _value(variable: Variable) -> NDArray:
        assert isinstance(variable.data, NDArray)
        return variable.data

    def _array(self, key: str, variable: Variable) -> NDArray:
        """Where a variable is read: its array, or a copy on the plan's device. One that is written moves there."""
        data, home = self._value(variable), self._homes.get(key, self.device)
        if data.device != home and key in self.plan.arranged.written:
            variable.data = data.to(home)
            return variable.data
        return made_of(data, data.dtype, home)

    def _fold(self) -> None:
        """Compute what depends on frozen weights alone, and bind anew what reads it where it lies elsewhere now."""
        self._folds = self.plan.folds
        memory, self._folded = fold(self.plan, self._given)
        other = [buffer for buffer, storage in memory.items() if self._memory.get(buffer) is not storage]
        self._memory |= memory
        if other:
            self._forget(other)

    def _forget(self, buffers: Sequence[int] | np.ndarray) -> None:
        """Bind anew what uses buffers."""
        arranged = self.plan.arranged
        ledger, mark = arranged.ledger, np.zeros(len(arranged.home), np.bool_)
        mark[buffers] = True
        with walking:  # a plan of the same ledger may be made by another thread
            lists = (*ledger.reads.arrays(), *ledger.outs.arrays(), *ledger.works.arrays())
            instrs = loops(len(arranged.order)).moved(arranged.order, *lists, mark).tolist()
            slots = np.flatnonzero(mark[np.frombuffer(ledger.holders, np.int32)[: arranged.slots]]).tolist()
            del lists
        self._forget_calls(set(instrs))
        for slot in slots:
            for kept in (self._views, self._readers, self._writers):
                kept.pop(slot, None)

    def _forget_calls(self, instrs: Set[int]) -> None:
        """Bind instructions anew, where they still run."""
        self._code.forget(instrs)
        for q in instrs & self._bound_calls.keys():
            del self._bound_calls[q]

    def _bind_calls(self) -> None:
        plan = self.plan
        order = plan.arranged.order.tolist()
        self._calls, self._sizes, self._ends, self._singles = [], [], None, {}
        self._apart = False
        self._place_host()
        segments: dict[Any, Any] = {}
        nearby = {id(op): known for rows, known in self._segments.values() for op in (rows[0], rows[-1])}
        together = {group[0]: group[-1] + 1 for group in plan.groups} if self.poison else {}
        for segment in plan.segments:
            over = self._override
            if over is not None and over.start <= segment.start and segment.stop <= over.stop:
                call = [OverrideCall(plan, over, self._view)] if segment.start == over.start else []
                self._calls += call
                self._sizes.append(_first(segment.stop - segment.start, len(call)))
            elif self.poison:  # what dies is filled after each instruction or group
                at = segment.start
                while at < segment.stop:
                    stop = together.get(at, at + 1)
                    calls = self._gate(at) + self._calls_of(at, stop)
                    self._calls += calls
                    self._sizes.append(_first(stop - at, len(calls)))
                    at = stop
            elif segment.kind == VM:
                from graphwright.array.vm.running.segment import VmSegment  # loads numba

                rows = self._code.between(plan, segment.start, segment.stop, self._view)
                key = tuple(map(id, rows))
                known = self._segments.get(key)
                if known is None:
                    near = nearby.get(id(rows[0])) or nearby.get(id(rows[-1]))
                    known = (rows, VmSegment(rows, self._room_of_vm(), near))
                segments[key] = known
                self._calls.append(known[1])
                self._sizes.append(_first(segment.stop - segment.start))
            else:
                part, bound = order[segment.start : segment.stop], self._bound_calls
                lists = list(map(bound.get, part, repeat(_UNBOUND)))
                for i in [i for i, calls in enumerate(lists) if calls is _UNBOUND] if _UNBOUND in lists else ():
                    lists[i] = bound[part[i]] = self._calls_of(segment.start + i, segment.start + i + 1)
                if segment.start <= plan.commit_start < segment.stop:
                    lists[plan.commit_start - segment.start] = [
                        *self._gate(plan.commit_start),
                        *lists[plan.commit_start - segment.start],
                    ]
                self._sizes.append(map(len, lists))
                self._calls += chain.from_iterable(lists)
        self._segments = segments
        ledger = plan.arranged.ledger
        used = {ledger.buffers[ledger.slots[s].buffer][2]: s for s in plan.input_slots}
        self._feeds = [self._writer(used[name]) if name in used else None for name in plan.inputs]
        self._bind_fed([self._view(used[name]) if name in used else None for name in plan.inputs])
        self._takes = {name: self._reader(slot) for name, slot in plan.outputs.items()}
        for key in plan.arranged.written:
            self._bound[key].storage.counted_by(self.runs)
        self._relied = [*plan.guarded, *self._folded, *self._placed]
        for array, _ in self._relied:
            array.storage.watched = True

    def _place_host(self) -> None:
        """Memory for what lies on the host, of a plan on another device."""
        ledger = self.plan.arranged.ledger
        for b in ledger.on_host:
            kind, size, _ = ledger.buffers[b]
            if kind == HOST and b not in self._memory:
                self._memory[b] = backend(CPU).allocate(size)

    def _gate(self, i: int) -> list[Any]:
        """What comes in front of an instruction: a device is waited for before the commit, so that it fails before."""
        return [self._settle] if i == self.plan.commit_start and self._kernels.driver is not None else []

    def _settle(self) -> None:
        """Wait for the device. Raises: DeviceFailed."""
        assert self._kernels.driver is not None
        try:
            self._kernels.driver.synchronize()
        except DeviceFailed:
            raise
        except Exception as error:
            raise DeviceFailed(
                f"an instruction failed on the device: {error}", where=self.plan.program.name, got=str(self.device)
            ) from error

    def _bind_fed(self, targets: Sequence[NDArray | None]) -> None:
        """Where one native call does it all, one that also copies the inputs, from wherever they are pointed to."""
        self._fed, self._points, self._pointed = None, [], None
        single = self.single
        if single is None or self.poison or any(t is not None and t.nbytes % 4 for t in targets):
            return
        address = backend(CPU).address
        copies = [copy_row(address(t), t.nbytes // 4, address(t)) if t is not None else None for t in targets]
        rows = [row for row in copies if row is not None]
        fed = self._fed = single.after(rows, self.runs.address)
        read = [(i, target) for i, target in enumerate(targets) if target is not None]
        self._points = [(i, pointer(target, fed.source_of(at))) for at, (i, target) in enumerate(read)]

    def _room_of_vm(self) -> np.ndarray:
        """Scratch of the VM, one for all segments."""
        if self._scratch is None:
            from graphwright.array.vm.running.segment import new_scratch  # loads numba

            self._scratch = new_scratch()
        return self._scratch

    def _writer(self, slot: int) -> Callable[[Given], object]:
        if slot not in self._writers:
            self._writers[slot] = writer(self._view(slot))
        return self._writers[slot]

    def _reader(self, slot: int) -> Callable[[], NDArray]:
        if slot not in self._readers:
            self._readers[slot] = reader(self._view(slot))
        return self._readers[slot]

    def _calls_of(self, start: int, stop: int) -> list[Any]:
        """Calls for a run of instructions of one executor; of ATen, for one."""
        arranged = self.plan.arranged
        instr = arranged.ledger.instrs[arranged.order[start]]
        if arranged.ledger.choice(arranged.order[start]).executor == VM:
            from graphwright.array.vm.running.segment import VmSegment  # loads numba

            calls: list[Any] = [VmSegment(self._code.between(self.plan, start, stop, self._view), self._room_of_vm())]
        else:
            outs, ins, work = ([self._view(s) for s in slots] for slots in (instr.outs, instr.ins, instr.work))
            if get(instr.op).traits.convert and ins[0].device != outs[0].device:
                calls = [partial(self._kernels.copy, outs[0], ins[0])]
            else:
                calls = self._kernel(instr, outs, ins, work)
        return calls + self._dead_fills(start, stop)

    def _kernel(self, instr: Instr, outs: list[NDArray], ins: list[NDArray], work: list[NDArray]) -> list[Any]:
        """Calls of a kernel; one that waits in a queue knows which node it fails for."""
        kernels = backend(outs[0].device)
        if kernels.driver is None:
            return expansion.bind(get(instr.op), kernels, outs, ins, instr.attrs, work)
        plan, row = self.plan, self.plan.arranged.ledger.rows.get(instr.node)
        path = plan.path(instr.node) if row is None else row.path  # of a plan from before an edit
        known = queued_failure.set(partial(DeviceFailed.of, plan.program, instr.node, path, instr.op, ins))
        try:
            return expansion.bind(get(instr.op), kernels, outs, ins, instr.attrs, work)
        finally:
            queued_failure.reset(known)

    def _dead_fills(self, start: int, stop: int) -> list[Any]:
        """What poisons the buffers that die with instructions."""
        if not self.poison:
            return []
        dead = [self.plan.buffers[b] for i in range(start, stop) for b in self.plan.free_after(i)]
        assert self._arena is not None
        return [PoisonCall(*self._arena.at(b.offset), b.nbytes) for b in dead]

    def _view(self, slot: int) -> NDArray:
        found = self._views.get(slot)
        if found is None:
            found = self._views[slot] = self._make_view(slot)
        return found

    def _make_view(self, slot: int) -> NDArray:
        arranged = self.plan.arranged
        row = arranged.ledger.slots[slot]
        layout, place = row.layout, arranged.place(row.buffer)
        kind, _, key = arranged.ledger.buffers[place]
        if arranged.fusion.tiles[place] >= 0:  # looked at by itself, not in its group
            if place not in self._memory:
                self._memory[place] = backend(CPU).allocate(arranged.ledger.buffers[place][1])
            return NDArray(self._memory[place], row.dtype, layout.shape, layout.strides, layout.offset)
        if kind in ARENA:
            assert self._arena is not None
            chunk, at = self._arena.at(int(arranged.offsets[place]))
            return NDArray(chunk, row.dtype, layout.shape, layout.strides, at // row.dtype.itemsize + layout.offset)
        if kind in (FOLDED, HOST):
            return NDArray(self._memory[place], row.dtype, layout.shape, layout.strides, layout.offset)
        base = self._bound[key]
        if not base.contiguous:
            raise ComputeError("a variable must lie row by row", where=key, fix="variable.own(), which copies it")
        return NDArray(base.storage, row.dtype, layout.shape, layout.strides, base.offset + layout.offset)
