"""Bind kernels to addresses, rebinding when the plan or a weight array changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize, ref

import numpy as np

from graphwright.array import CPU, NDArray, Storage, WriteCount, Writers, backend
from graphwright.array.backend import queued_failure
from graphwright.array.memory_pool import owner
from graphwright.array.pattern_mirror import MirrorBackend, PatternMirror
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group
from graphwright.array.vm.encode.operands import View, copy_row
from graphwright.array.vm.encode.share import Cut, cut
from graphwright.autograd import Variable, changes
from graphwright.errors import ComputeError
from graphwright.ops import expansion, get, traits
from graphwright.plan.errors import DeviceFailed, PlanOutOfMemory, StalePlan
from graphwright.plan.options import VM
from graphwright.plan.planning.fusion import kernel_of
from graphwright.plan.planning.native import loops
from graphwright.plan.planning.plan_tables import tables_lock
from graphwright.plan.planning.planner import uncollected
from graphwright.plan.running.derived_weights import converted, fold, folded_from
from graphwright.plan.running.memory import Arena, BorrowedStorage, Given, fill, pointer, reader, shared_arena, writer
from graphwright.plan.running.override import Override, OverrideCall
from graphwright.plan.table import ARENA, FOLDED, HOST, INPUT, Instr
from graphwright.program.patterns import PatternVariable

if TYPE_CHECKING:
    from graphwright.array.vm.running.segment import VmSegment
    from graphwright.patterns import Pattern
    from graphwright.plan.plan import Plan
    from graphwright.plan.planning.fusion import FusionRegion
    from graphwright.plan.planning.planner import BufferLayout

_NOTHING, _UNKNOWN = cut(()), cut(())
_UNBOUND: list[Any] = []

ViewOf = Callable[[int], View]


class VmCode:
    """A cache of VM code per instruction and per fusion region, for later plans of the same builder."""

    def __init__(self) -> None:
        self._rows: dict[int, Cut] = {}
        self._parts: dict[FusionRegion, dict[tuple[int, int], list[Cut]]] = {}
        self._region_of: dict[int, FusionRegion] = {}

    def between(self, plan: Plan, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Return the VM code of the instructions `start..stop - 1`, one entry per instruction.

        The code of a fusion group is in the entry of its first instruction; its other entries are empty. `at` returns
        the operand that a slot is in the code.
        """
        layout = plan.buffer_layout
        numbers = layout.order[start:stop].tolist()
        code = list(map(self._rows.get, numbers, repeat(_UNKNOWN)))
        for begin, region in layout.fusion.between(start, stop):
            end, known = begin + len(region.instrs), self._parts_of(region)
            part = (max(start - begin, 0), min(stop, end) - begin)
            if part not in known:
                known[part] = self._encode_part(layout, region, *part, at)
            code[max(begin - start, 0) : end - start] = known[part]
        return self._fill(layout, numbers, code, at)

    def forget(self, instrs: Set[int]) -> None:
        """Drop the cached code of instructions."""
        for q in instrs & self._rows.keys():
            del self._rows[q]
        for q in instrs & self._region_of.keys():
            self._parts.pop(self._region_of.pop(q), None)

    def _parts_of(self, region: FusionRegion) -> dict[tuple[int, int], list[Cut]]:
        """Return the cache of a region: (start, stop) of a part -> its VM code. Drops the caches of older regions that
        share instructions with it.
        """
        if region not in self._parts:
            for q in region.instrs:
                if q in self._region_of:
                    self._parts.pop(self._region_of[q], None)
                self._region_of[q] = region
            self._parts[region] = {}
        return self._parts[region]

    def _encode_part(self, layout: BufferLayout, region: FusionRegion, start: int, stop: int, at: ViewOf) -> list[Cut]:
        """Return VM code of the positions `start..stop - 1` of a region; a group partly outside is encoded op by op."""
        numbers = region.instrs[start:stop]
        code = list(map(self._rows.get, numbers, repeat(_UNKNOWN)))
        for group in region.groups:
            first, last = group[0], group[-1] + 1
            if start <= first and last <= stop:
                rows = _encode_group(layout, region, first, last, at)
                code[first - start : last - start] = [rows, *[_NOTHING] * (last - first - 1)]
        return self._fill(layout, numbers, code, at)

    def _fill(self, layout: BufferLayout, numbers: Sequence[int], code: Sequence[Cut], at: ViewOf) -> list[Cut]:
        """Encode those of the instructions with ids `numbers` whose entry in `code` is unknown; return all entries."""
        made = list(code)
        for i in [i for i, rows in enumerate(code) if rows is _UNKNOWN] if _UNKNOWN in code else ():
            made[i] = self._rows[numbers[i]] = _encode(layout.tables.instrs[numbers[i]], at)
        return made


def _encode_group(layout: BufferLayout, region: FusionRegion, first: int, last: int, at: ViewOf) -> Cut:
    tables = layout.tables

    def operand(slot: int) -> View | Inner:
        tile = region.tiles.get(layout.home_of(tables.holders[slot]))
        return at(slot) if tile is None else Inner(tile)

    members, instrs = [], [tables.instrs[q] for q in region.instrs[first:last]]
    for instr in instrs:
        dtypes = [tables.slots[s].dtype for s in (*instr.outs, *instr.ins)]
        outs, ins = ([operand(s) for s in slots] for slots in (instr.outs, instr.ins))
        form = get(instr.op).vm
        assert form is not None, "the plan groups instructions that the VM runs"
        members.append(Member(form, outs, ins, instr.attrs, dtypes))
    rows = encode_group(tables.slots[instrs[0].outs[0]].layout.shape, members)
    assert rows is not None, "the plan made a group without tiles"
    return cut(rows)


def _encode(instr: Instr, at: ViewOf) -> Cut:
    outs, ins, work = (list(map(at, slots)) for slots in (instr.outs, instr.ins, instr.work))
    form = expansion.vm_form(get(instr.op))
    rows = None if form is None else form.rows(outs, ins, instr.attrs, work)
    assert rows is not None, "the plan chose the VM for an op without a VM form"
    return cut(rows)


def _pattern_lengths(plan: Plan, variables: Mapping[str, Variable]) -> list[tuple[str, Pattern, int, int]]:
    """Return (path of the node, its pattern, queries, keys) of the attentions that begin at a pattern's first query."""
    tables, found = plan.buffer_layout.tables, list[tuple[str, Any, int, int]]()
    for instr in plan.instrs:
        at = traits(instr.op).table
        if at is None or "q_start" in instr.attrs["optional"]:
            continue
        variable = variables.get(tables.buffers[tables.holders[instr.ins[at]]][2])
        if isinstance(variable, PatternVariable):
            queries, keys = (tables.slots[s].layout.shape[2] for s in instr.ins[:2])
            found.append((plan.path(instr.node), variable.pattern, queries, keys))
    return found


class BoundKernels:
    """The memory of a plan and the calls bound to it.

    Args:
        plan: the plan.
        variables: key -> variable that replaces the program's own.
        poison: bind calls that fill dead memory with NaN.
        shared: use the arena that plans of the device share.
        separate: give each segment its own VM scratch and make no single native call, so that segments can run in
            parallel.
        in_order: True if calls run in the order of the plan, False if the caller runs them by region.

    Attributes:
        arena: the memory that the plan's offsets refer to; None before the first run.
        shared: the shared arena, or None.
        handle: weak reference to this object, which identifies it in a shared arena.
        borrowed: id of an arena chunk -> the storage of results borrowed from it.
        calls: the calls of a run.
        runs: number of runs, used as the version of the arrays that they write.
        binds: number of times that calls were bound.
        writers: the plans that write arrays that this one assumes unchanged; each run checks whether they ran.
        feeds: per input the function that copies an array into the plan's memory; None for an input that is not read.
        takes: output name -> function that returns a copy of the output.
        fed: a native call that copies the inputs and runs all instructions, or None. `points` are (index of an input,
            function that sets its address in the call).
        overridden: False to ignore `plan.override`.
        override: the override that is bound, or None.
        patterns: the attention patterns that the plan reads; a run holds them, so that edits wait.
        pattern_lengths: (path, pattern, queries, keys) of each attention that begins at the first query of a pattern.
        mirrors: key of a pattern -> its copy on the device, of which `send_edits` and `note_run` are the two ends of a
            run.
    """

    def __init__(
        self, plan: Plan, variables: Mapping[str, Variable] | None, *, poison: bool, shared: bool,
        separate: bool = False, in_order: bool = True,
    ) -> None:  # fmt: skip
        self.poison, self.device = poison, plan.options.device
        self._separate, self._in_order = separate, in_order
        self.backend = backend(self.device)
        self._own = {} if variables is None else variables
        self._set_plan(plan)
        plan.check_variables(self._own)
        self.handle = ref(self)
        self.shared = shared_arena(self.backend) if shared else None
        self.arena: Arena | None = None
        self.borrowed: dict[int, BorrowedStorage] = {}
        self.runs, self.binds = WriteCount(), 0
        finalize(self, self.runs.retire)
        self.overridden = True
        self.writers, self._writer_runs = Writers(), 0
        self.override: Override | None = None
        self.seen = -1
        self._rebind = False  # the call list must be made again
        self._refold = True  # folded values must be computed again
        self.mirrors: dict[str, PatternMirror] = {}
        self._given: dict[str, NDArray] = {}  # arrays of the variables
        self._bound: dict[str, NDArray] = {}  # what is read for them: the same, or copies on the device
        self._copied: list[tuple[NDArray, int]] = []
        self._folded: list[tuple[NDArray, int]] = []
        self._folds: Mapping[int, Any] = {}
        self._assumed: list[tuple[NDArray, int]] = []
        self._memory: dict[int, Storage] = {}  # of buffers outside of the arena
        self._views: dict[int, NDArray] = {}
        self._operands: dict[int, View] = {}  # of VM code
        self._readers: dict[int, Callable[[], NDArray]] = {}
        self._writers: dict[int, Callable[[Given], object]] = {}
        self.instruction_calls: dict[int, list[Any]] = {}
        self._group_of: dict[int, tuple[FusionRegion, int]] = {}  # of the instructions whose calls a group's kernel has
        self._code = VmCode()
        self._segments: dict[Any, Any] = {}
        self._scratch: np.ndarray | None = None
        self._first_reader = -1
        self._clear_calls()

    def _clear_calls(self) -> None:
        self.calls: list[Any] = []
        self._sizes: list[Iterable[int]] = []
        self._ends: list[int] | None = None
        self._singles: dict[int, list[Any]] = {}
        self.feeds: list[Callable[[Given], object] | None] = []
        self.takes: dict[str, Callable[[], NDArray]] = {}
        self.fed: Any = None
        self.points: list[tuple[int, Callable[[Given], bool]]] = []
        self.pointed: Sequence[Given] | None = None

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        layout, tables, own = plan.buffer_layout, plan.buffer_layout.tables, self._own
        keys = (*layout.read, *(tables.buffers[tables.holders[s]][2] for s in folded_from(plan)))
        self.variables = {key: own.get(key, layout.variables[key]) for key in keys}
        found = (v.pattern for v in self.variables.values() if isinstance(v, PatternVariable))
        self.patterns: tuple[Pattern, ...] = tuple({id(pattern): pattern for pattern in found}.values())
        self.pattern_lengths = _pattern_lengths(plan, self.variables) if self.patterns else []
        self._homes = {tables.buffers[b][2]: CPU for b in tables.on_host}

    def adopt(self, plan: Plan) -> None:
        """Switch to a plan patched from the current one, keeping memory, views and calls that are still valid."""
        before, after = self.plan.buffer_layout, plan.buffer_layout
        self._set_plan(plan)
        self.seen, self.override = -1, None
        if self.arena is None or not self.arena.fits(after.ends):
            self.arena = None  # bound again at the next run
            return
        self._forget_calls(_removed(before.order, after.order))
        moved = after.moved_since(before)
        if moved.any():
            self._forget_buffers(np.flatnonzero(moved))
        self._rebind, self._singles = True, {}

    @property
    def stale(self) -> bool:
        """True if calls may have to be rebound: after an edit, or when the array of a variable was replaced."""
        if changes.count != self.seen:
            return True
        return bool(self.writers) and self._written()

    def _written(self) -> bool:
        """Return True if a plan wrote an array that this one assumes unchanged."""
        runs = self.writers.runs
        if runs != self._writer_runs:
            if any(array.storage.version != version for array, version in self._assumed):
                return True
            self._writer_runs = runs
        return False

    def refresh(self) -> None:
        """Rebind memory and calls where needed. Raises: StalePlan."""
        self.plan.check_assumptions()
        stack = self.plan.overrides
        wanted = stack[-1] if stack and self.overridden else None
        if wanted is not self.override:
            self.override, self._rebind = wanted, True
        self.bind()
        seen = changes.count  # before `writers`, so that a plan which begins to write meanwhile is noticed
        self.writers, self._writer_runs = Writers(array.storage for array, _ in self._assumed), -1
        self.seen = seen

    @property
    def call_ends(self) -> list[int]:
        """Per instruction, the number of calls up to and including its own last call."""
        if self._ends is None:
            self._ends = list(accumulate(chain.from_iterable(self._sizes)))
        return self._ends

    @property
    def single(self) -> VmSegment | None:
        """The VM segment that is the only call of a run; None if a run has other calls."""
        only = self.calls[0] if len(self.calls) == 1 else None
        return only if hasattr(only, "run") else None

    # -- the arena ---------------------------------------------------------------------------------------------------
    def leave_shared(self) -> None:
        """Stop using the shared arena; the next run allocates an arena for this object alone."""
        if self.shared is not None:
            self.shared.forget(self)
            self.shared = None
            self.forget_arena()

    def end_borrow(self) -> None:
        """Invalidate results of the last run that were borrowed."""
        for storage in self.borrowed.values():
            storage.close()
        self.borrowed.clear()

    def forget_arena(self) -> None:
        """Release the arena and all calls; the next run binds again."""
        self.end_borrow()
        self.arena, self.seen = None, -1
        self._clear_calls()
        self._segments.clear()
        self._clear_bound()

    def _clear_bound(self) -> None:
        self._code = VmCode()
        calls, memory = (self.instruction_calls, self._group_of), (self._views, self._operands)
        for table in (*calls, *memory, self._readers, self._writers):
            table.clear()

    # -- memory ------------------------------------------------------------------------------------------------------
    def bind(self) -> None:
        """Allocate memory and bind calls, or rebind those whose array or address has changed."""
        layout = self.plan.buffer_layout
        for key in layout.written:
            variable = self.variables[key]
            array = variable.data
            if variable.shared or array is not self._given.get(key) or array.storage.readonly:
                variable.own()
        first = self.arena is None
        other = {k for k, v in self.variables.items() if v.data is not self._given.get(k)}
        changed = other & self._given.keys()
        if other:  # before the arena, whose error then knows the room that weights leave
            self._check_arrays(other)
            self._bound |= {key: self._array(key, self.variables[key]) for key in other}
            self._given |= {key: _data(self.variables[key]) for key in other}
        if first:
            self._clear_bound()
        elif changed:
            self._forget_arrays(changed)
        self._refold |= first or bool(changed)
        arena = Arena() if self.arena is None else self.arena
        if arena.ends != layout.ends:
            arena.grow(layout.ends, self._chunk)
        self.arena = arena
        outdated = any(array.storage.version != version for array, version in self._copied)
        self._forget_variables(self._given.keys() - self.variables.keys())
        self._copied = [(a, a.storage.version) for key, a in self._given.items()
                        if a is not self._bound[key] and key not in self.mirrors]  # fmt: skip
        for array, _ in self._copied if outdated else ():
            converted(array, array.dtype, self.device)  # writes the new values to the same address
        refold = self._refold or any(array.storage.version != version for array, version in self._folded)
        if refold or self._rebind:
            with uncollected():
                self._rebind = True  # also by the next run, if binding fails
                if refold or self.plan.folds.keys() != self._folds.keys():
                    self._fold()
                    self._refold = False
                self._bind_calls()
                self._rebind = False
        self._assumed = [*self.plan.assumptions.values(), *self._folded, *self._copied]
        for array, _ in self._assumed:
            array.storage.watched = True

    def _forget_variables(self, keys: Set[str]) -> None:
        """Drop the arrays of variables that the plan no longer reads; they may change before plans read them again."""
        tables = self.plan.buffer_layout.tables
        for slot in [s for s in self._views if tables.buffers[tables.holders[s]][2] in keys] if keys else ():
            self._forget_view(slot)
        for key in keys:
            del self._given[key], self._bound[key]
            self.mirrors.pop(key, None)

    def _forget_arrays(self, keys: Set[str]) -> None:
        """Drop the views of variables whose array is another now, and the calls that read or write them."""
        layout, tables = self.plan.buffer_layout, self.plan.buffer_layout.tables
        homes = {tables.holders[s]: layout.home_of(tables.holders[s]) for s in self._views}
        self._forget_buffers([b for b, home in homes.items() if tables.buffers[home][2] in keys])

    def _forget_view(self, slot: int) -> None:
        for table in (self._views, self._operands, self._readers, self._writers):
            table.pop(slot, None)

    def _chunk(self, i: int, size: int) -> Storage:
        """Allocate chunk `i` of the arena. Raises: PlanOutOfMemory."""
        try:
            with owner(f"arena of {self.plan.program.name}"):
                return self.backend.allocate(size) if self.shared is None else self.shared.chunk(self, i, size)
        except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError
            raise PlanOutOfMemory.of_arena(self.plan, self.device, error) from error

    def _check_arrays(self, keys: Set[str]) -> None:
        """Raise StalePlan if the shape or dtype of one of these variables is not the planned one."""
        tables = self.plan.buffer_layout.tables
        for s in (*self.plan.buffer_layout.sources, *folded_from(self.plan)):
            kind, _, key = tables.buffers[tables.holders[s]]
            if key in keys and kind not in (INPUT, HOST) and self.variables[key].spec != tables.slots[s].spec:
                raise StalePlan("the shape or dtype of a weight changed after planning",
                                where=f"{self.plan.program.name}: {key}", expected=tables.slots[s].spec,
                                got=self.variables[key].spec, fix="program.compile(...) again")  # fmt: skip

    def _array(self, key: str, variable: Variable) -> NDArray:
        """Return the array that calls read for a variable; a variable that the plan writes is moved to the device."""
        data, home = _data(variable), self._homes.get(key, self.device)
        if data.device != home and key in self.plan.buffer_layout.written:
            with owner(key):
                variable.data = data.to(home)
            return variable.data
        if home != CPU and isinstance(variable, PatternVariable):
            mirror = self.mirrors.get(key)
            if mirror is None or mirror.pattern is not variable.pattern:
                mirror = self.mirrors[key] = PatternMirror(variable.pattern, cast(MirrorBackend, self.backend))
            return mirror.table
        with owner(key):
            return converted(data, data.dtype, home)

    def send_edits(self) -> None:
        """Queue the edits of patterns since the last run; calls are bound again if a pattern outgrew its arrays."""
        outgrown = {key for key, mirror in self.mirrors.items() if mirror.send()}
        if outgrown:
            self._bound |= {key: self.mirrors[key].table for key in outgrown}
            self._forget_arrays(outgrown)
            self._bind_calls()

    def note_run(self) -> None:
        """Note that a run was launched, which applies the edits that `send_edits` queued."""
        for mirror in self.mirrors.values():
            mirror.ran()

    def _edits_before(self, start: int, stop: int) -> list[Any]:
        """Return the calls that apply edits, if the first instruction that reads a pattern is one of these."""
        return [mirror.apply for mirror in self.mirrors.values()] if start <= self._first_reader < stop else []

    def _find_reader(self) -> int:
        """Return the first instruction that reads a pattern's copy, or -1."""
        tables = self.plan.buffer_layout.tables
        instrs = enumerate(self.plan.instrs) if self.mirrors else ()
        return next((i for i, instr in instrs
                     if any(tables.buffers[tables.holders[s]][2] in self.mirrors for s in instr.ins)), -1)  # fmt: skip

    def _fold(self) -> None:
        """Compute values that depend on frozen weights only, and drop the calls that read them at an old address."""
        memory, self._folded = fold(self.plan, self._given)
        self._folds = self.plan.folds
        other = [buffer for buffer, storage in memory.items() if self._memory.get(buffer) is not storage]
        self._memory |= memory
        if other:
            self._forget_buffers(other)

    def _forget_buffers(self, buffers: Sequence[int] | np.ndarray) -> None:
        layout, tables = self.plan.buffer_layout, self.plan.buffer_layout.tables
        mark = np.zeros(len(layout.home), np.bool_)
        mark[buffers] = True
        with tables_lock:
            lists = (*tables.reads.arrays(), *tables.outs.arrays(), *tables.works.arrays())
            instrs = loops(len(layout.order)).moved(layout.order, *lists, mark).tolist()
            slots = np.flatnonzero(mark[np.frombuffer(tables.holders, np.int32)[: layout.slot_count]]).tolist()
            del lists
        self._forget_calls(set(instrs))
        for slot in slots:
            self._forget_view(slot)

    def _forget_calls(self, instrs: Set[int]) -> None:
        self._code.forget(instrs)
        for q in instrs & self.instruction_calls.keys():
            del self.instruction_calls[q]

    def view(self, slot: int) -> NDArray:
        """Return an array over the memory of a slot."""
        if slot not in self._views:
            self._views[slot] = self._make_view(slot)
        return self._views[slot]

    def operand(self, slot: int) -> View:
        """Return the operand that a slot is in VM code, with its address."""
        found = self._operands.get(slot)
        if found is None:
            array = self.view(slot)
            found = View(array.dtype, array.shape, array.strides, backend(CPU).address(array))
            self._operands[slot] = found
        return found

    def _make_view(self, slot: int) -> NDArray:
        plan, tables = self.plan.buffer_layout, self.plan.buffer_layout.tables
        row = tables.slots[slot]
        layout, buffer = row.layout, plan.home_of(row.buffer)
        kind, size, key = tables.buffers[buffer]
        if plan.fusion.tiles[buffer] >= 0 or kind == HOST:  # a tile is read outside of its group
            if buffer not in self._memory:
                self._memory[buffer] = (backend(CPU) if kind == HOST else self.backend).allocate(size)
        elif kind in ARENA:
            assert self.arena is not None
            chunk, at = self.arena.at(int(plan.offsets[buffer]))
            return NDArray(chunk, row.dtype, layout.shape, layout.strides, at // row.dtype.itemsize + layout.offset)
        elif kind != FOLDED:
            base = self._bound[key]
            if not base.contiguous:
                raise ComputeError("the array of this variable is not contiguous", where=key,
                                   got=f"strides {base.strides}", fix="variable.own(), which copies it")  # fmt: skip
            return NDArray(base.storage, row.dtype, layout.shape, layout.strides, base.offset + layout.offset)
        return NDArray(self._memory[buffer], row.dtype, layout.shape, layout.strides, layout.offset)

    # -- calls -------------------------------------------------------------------------------------------------------
    def _bind_calls(self) -> None:
        plan, tables = self.plan, self.plan.buffer_layout.tables
        self._clear_calls()
        self._first_reader = self._find_reader()
        segments: dict[Any, Any] = {}
        nearby = {id(op): known for rows, known in self._segments.values() for op in (rows[0], rows[-1])}
        for segment in plan.segments:
            over = self.override
            if over is not None and over.start <= segment.start and segment.stop <= over.stop:
                call = [OverrideCall(plan, over, self.view)] if segment.start == over.start else []
                self._add_calls(segment.stop - segment.start, call)
            elif self.poison:
                self._bind_poisoned(segment.start, segment.stop)
            elif segment.kind == VM:
                from graphwright.array.vm.running.segment import VmSegment  # loads numba

                rows = self._code.between(plan, segment.start, segment.stop, self.operand)
                key = tuple(map(id, rows))
                known = self._segments.get(key)
                if known is None:
                    near = nearby.get(id(rows[0])) or nearby.get(id(rows[-1]))
                    known = (rows, VmSegment(rows, self._vm_scratch(), near))
                segments[key] = known
                self._add_calls(segment.stop - segment.start, [known[1]])
            else:
                self._bind_aten(segment.start, segment.stop)
        self._segments = segments
        used = {tables.buffers[tables.holders[s]][2]: s for s in plan.input_slots}
        slots = [used.get(name) for name in plan.inputs]
        self.feeds = [None if s is None else self._once(self._writers, s, writer) for s in slots]
        self._bind_fed([None if s is None else self.view(s) for s in slots])
        self.takes = {name: self._once(self._readers, slot, reader) for name, slot in plan.outputs.items()}
        for key in plan.buffer_layout.written:
            self._bound[key].storage.counted_by(self.runs)
        self.binds += 1

    def _add_calls(self, instructions: int, calls: list[Any]) -> None:
        """Append the calls of a span of `instructions` instructions; all count as calls of its first instruction."""
        self.calls += calls
        self._sizes.append((len(calls), *repeat(0, instructions - 1)))

    def _bind_poisoned(self, start: int, stop: int) -> None:
        """Bind instructions or groups one by one, each followed by calls that fill the memory no longer needed."""
        together = {group[0]: group[-1] + 1 for group in self.plan.groups}
        while start < stop:
            end = together.get(start, start + 1)
            before = [*self._wait_before(start), *self._edits_before(start, end)]
            self._add_calls(end - start, [*before, *self._calls_of(start, end)])
            start = end

    def _bind_aten(self, start: int, stop: int) -> None:
        part, bound = self.plan.buffer_layout.order[start:stop].tolist(), self.instruction_calls
        ends = self._group_ends(start, stop, part)
        lists = list(map(bound.get, part, repeat(_UNBOUND)))
        for i in [i for i, calls in enumerate(lists) if calls is _UNBOUND] if _UNBOUND in lists else ():
            if lists[i] is _UNBOUND:
                end = ends.get(start + i, start + i + 1)
                calls = [self._calls_of(start + i, end), *([] for _ in range(start + i + 1, end))]
                lists[i : end - start] = calls
                bound.update(zip(part[i : end - start], calls, strict=True))
        commit = self.plan.commit_start
        if start <= commit < stop:
            lists[commit - start] = [*self._wait_before(commit), *lists[commit - start]]
        if edits := self._edits_before(start, stop):
            lists[self._first_reader - start] = [*edits, *lists[self._first_reader - start]]
        self._sizes.append(map(len, lists))
        self.calls += chain.from_iterable(lists)

    def _group_ends(self, start: int, stop: int, part: Sequence[int]) -> dict[int, int]:
        """Map the first instruction of each fusion group in a span to the end of the group.

        Calls of instructions that were bound alone, or in another group, are dropped; `part`: ids of the instructions.
        """
        layout, ends, now = self.plan.buffer_layout, dict[int, int](), dict[int, Any]()
        for begin, region in layout.fusion.between(start, stop):
            for group in region.groups:
                ends[begin + group[0]] = begin + group[-1] + 1
                now |= {region.instrs[i]: (region, group[0]) for i in group}
        if now or self._group_of:
            for q in [q for q in part if self._group_of.get(q) != now.get(q)]:
                self.instruction_calls.pop(q, None)
                self._group_of.pop(q, None)
            self._group_of |= now
        return ends

    def _wait_before(self, i: int) -> list[Any]:
        """Return [call that waits for the device] if `i` starts the commit, so failures write no state; else []."""
        waits = self._in_order and i == self.plan.commit_start and self.backend.driver is not None
        return [self.synchronize] if waits else []

    def synchronize(self) -> None:
        """Wait for the device. Raises: DeviceFailed."""
        assert self.backend.driver is not None
        try:
            self.backend.driver.synchronize()
        except DeviceFailed:
            raise
        except Exception as error:
            raise DeviceFailed(f"an instruction failed on the device: {error}", where=self.plan.program.name,
                               got=str(self.device)) from error  # fmt: skip

    def _bind_fed(self, targets: Sequence[NDArray | None]) -> None:
        """If a run is one native call, set `fed` to a native call that first copies the inputs into `targets`."""
        single = self.single
        if single is None or self._separate or self.poison or any(t is not None and t.nbytes % 4 for t in targets):
            return
        address = backend(CPU).address
        read = [(i, target) for i, target in enumerate(targets) if target is not None]
        rows = [row for _, t in read if (row := copy_row(address(t), t.nbytes // 4, address(t))) is not None]
        fed = self.fed = single.after(rows, self.runs.address)
        self.points = [(i, pointer(target, fed.source_of(at))) for at, (i, target) in enumerate(read)]

    def _vm_scratch(self) -> np.ndarray:
        """Return scratch memory for a VM segment; segments share it unless they may run in parallel."""
        if self._scratch is None or self._separate:
            from graphwright.array.vm.running.segment import new_scratch  # loads numba

            self._scratch = new_scratch()
        return self._scratch

    def _once(self, cache: dict[int, Any], slot: int, make: Callable[[NDArray], Any]) -> Any:
        if slot not in cache:
            cache[slot] = make(self.view(slot))
        return cache[slot]

    def calls_of(self, i: int) -> list[Any]:
        """Return calls that run instruction `i` by itself."""
        if i not in self._singles:
            self._singles[i] = self._calls_of(i, i + 1)
        return self._singles[i]

    def _calls_of(self, start: int, stop: int) -> list[Any]:
        """Return the calls of instruction `start`, or of the fusion group `start..stop - 1`."""
        layout, tables = self.plan.buffer_layout, self.plan.buffer_layout.tables
        instr = tables.instrs[layout.order[start]]
        if tables.choice(layout.order[start]).executor == VM:
            from graphwright.array.vm.running.segment import VmSegment  # loads numba

            calls: list[Any] = [VmSegment(self._code.between(self.plan, start, stop, self.operand), self._vm_scratch())]
        elif stop - start > 1:
            calls = self._bind_group(start, instr)
        else:
            outs, ins, work = ([self.view(s) for s in slots] for slots in (instr.outs, instr.ins, instr.work))
            if get(instr.op).traits.convert and ins[0].device != outs[0].device:
                calls = [partial(self.backend.copy, outs[0], ins[0])]
            else:
                calls = self._bind_kernel(instr, outs, ins, work)
        if self.poison and self._in_order:
            assert self.arena is not None
            dead = [self.plan.buffers[b] for i in range(start, stop) for b in self.plan.free_after(i)]
            calls += [partial(fill, *self.arena.at(b.offset), b.nbytes) for b in dead]
        return calls

    def _bind_kernel(self, instr: Instr, outs: list[NDArray], ins: list[NDArray], work: list[NDArray]) -> list[Any]:
        """Return the calls of an instruction's kernel; if a call fails in a device queue, the error names the node."""
        kernels = backend(outs[0].device)
        if kernels.driver is None:
            return expansion.bind(get(instr.op), kernels, outs, ins, instr.attrs, work)
        with self._failure_names(instr, ins):
            return expansion.bind(get(instr.op), kernels, outs, ins, instr.attrs, work)

    def _bind_group(self, start: int, instr: Instr) -> list[Any]:
        """Return the launch of the generated kernel of the fusion group that begins at `start` with `instr`."""
        layout = self.plan.buffer_layout
        ((begin, region),) = layout.fusion.between(start, start + 1)
        group = next(group for group in region.groups if begin + group[0] == start)
        kernel, slots = kernel_of(layout, region, group)
        outs = {layout.tables.slots[s].buffer for i in group for s in layout.tables.instrs[region.instrs[i]].outs}
        arrays = [self.view(s) for s in slots]
        written = [layout.tables.slots[s].buffer in outs for s in slots]
        with self._failure_names(instr, arrays):
            return self.backend.bind_fused(kernel, arrays, written)

    @contextmanager
    def _failure_names(self, instr: Instr, ins: Sequence[NDArray]) -> Iterator[None]:
        """Make failures in a device queue, of calls bound meanwhile, name the instruction's node."""
        plan, record = self.plan, self.plan.buffer_layout.builder.records.get(instr.node)
        path = plan.path(instr.node) if record is None else record.path  # None: the node was deleted
        known = queued_failure.set(partial(DeviceFailed.of, plan.program, instr.node, path, instr.op, ins))
        try:
            yield
        finally:
            queued_failure.reset(known)


def _data(variable: Variable) -> NDArray:
    assert isinstance(variable.data, NDArray)
    return variable.data


def _removed(before: np.ndarray, after: np.ndarray) -> set[int]:
    """Return the ids in `before` that are not in `after`; fast if the two orders share their beginning and end."""
    short = min(len(before), len(after))
    start, stop = (
        int(np.argmax(differ)) if differ.any() else short
        for differ in (before[:short] != after[:short], (before[::-1][:short] != after[::-1][:short]))
    )
    return set(before[start : len(before) - stop].tolist()) - set(after[start : len(after) - stop].tolist())
