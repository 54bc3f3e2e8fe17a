"""Executable: the memory a plan runs in and the calls bound to it. After the first run nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_, length_hint
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, NDArray, Storage, backend, changes
from graphwright.autograd import Tensor
from graphwright.errors import ComputeError, GraphwrightError, UsageError
from graphwright.ops.call import kernel_error
from graphwright.plan.errors import DeviceFailed, StepTorn, place_of
from graphwright.plan.plan import PlanSlice
from graphwright.plan.running.arena import fill
from graphwright.plan.running.kernels import BoundKernels
from graphwright.plan.running.override import OverrideFailed
from graphwright.plan.running.transfer import as_array
from graphwright.plan.table import PARAM, STATE
from graphwright.program import FeedError
from graphwright.program.run import origin
from graphwright.program.state import StateSnapshot

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.plan.running.transfer import Given


class BoundCall:
    """Inputs and outputs as numpy arrays that stay where they are; calling it runs on what lies in the inputs.

    Attributes:
        inputs: input name -> array to write to; bfloat16 as its uint16 bits. Inputs that nothing reads are left out.
        outputs: output name -> array that every run overwrites.

    It runs as planned, also after an edit of a program. Used by one thread at a time.
    Raises, when called: StalePlan, ComputeError as `Executable.run`.
    """

    # the call is an attribute: where all is one native call it is that call itself, with no code of Python before it
    __slots__ = ("__call__", "inputs", "outputs")
    __call__: Callable[[], None]

    def __init__(self, space: Executable) -> None:
        space.leave_shared()  # what the caller wrote must stay there
        space.pinned = True  # its memory is in others' hands now
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        run = _Run(space, self.inputs, self.outputs)
        self.__call__ = run if run.native is None else run.native.call(run)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in (*self.inputs.items(), *self.outputs.items()))
        return f"Bound({shapes})"


class _Run:
    """A run that looks at everything; the native call comes here when it may not run by itself.

    Attributes:
        native: what the native call runs, or None where there is more than one call to make.
    """

    __slots__ = ("_inputs", "_outputs", "_single", "_space", "native")

    def __init__(self, space: Executable, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        self._space, self._inputs, self._outputs, self._single = space, inputs, outputs, False
        self.native: Any = None
        self._look()

    def _look(self) -> None:
        space = self._space
        space.refresh()
        for kept, found in zip((self._inputs, self._outputs), space.memory(), strict=True):
            kept.update(found)
        segment = space.single
        # without one call that does it all, or where what it relies on has to be looked at, no shortcut is taken
        self._single = segment is not None and segment.short and not space.watching
        if self._single and self.native is None:
            from graphwright.array.vm.running.segment import Guarded  # loads numba

            self.native = Guarded()
        if self._single:
            self.native.aim(segment, changes.address, changes.count, space.runs.address)
        elif self.native is not None:
            self.native.rest()

    def __call__(self) -> None:
        failed = self.native.failed() if self.native is not None else 0
        if failed:
            raise self._space.failed_single(failed)
        if self._space.stale or self._single:
            self._look()
        self._space.execute()


class StaleBorrow(ComputeError):
    """A leased result was read after the next run had begun."""


class BorrowedStorage(Storage):
    """An arena as one run's results see it."""

    __slots__ = ()

    def __init__(self, arena: Storage) -> None:
        super().__init__(arena.memory, arena.nbytes, CPU)

    @property
    def memory(self) -> Any:
        """The arena. Raises: StaleBorrow once it was used again."""
        if self.closed:
            raise StaleBorrow("this result was leased, and its memory was used again", fix="copy() it, or borrow=False")
        return super().memory


class Executable(BoundKernels):
    """One arena and the calls bound to its addresses; used by one thread at a time.

    Args:
        plan: the tables.
        variables: variables by key to run on instead of the program's own, e.g. another sequence's cache. A constant
            that a rewrite relied on is none of them: UsageError.
        poison: fill the arena with NaN before every run and each buffer after its last use: an early free shows.
        shared: use the arena that plans of the device share; what a run left in it is there until another plan runs.
        safe: keep a copy of what a run writes, and take it back if the run fails in its commit: no step is torn.
    """

    _before: StateSnapshot | None = None
    _fits: list[list[Any]]
    """Per input the array that fitted last, its spec, and the dtype of numpy that fits."""

    def run(self, feeds: Mapping[str, Any] | PlanSlice, *, borrow: bool = False) -> dict[str, Any]:
        """Copy the feeds in, run, give the outputs out.

        Args:
            feeds: array or tensor per input, of the plan's specs; or a part of the plan, `plan[i:j]`, which runs on
                what the slots hold: `set` gives inputs before the first part, `value` reads.
            borrow: give views of the arena instead of copies; reading them after the next run raises StaleBorrow.
        Returns: name -> NDArray; nothing for a part.
        Raises: StalePlan, FeedError before anything runs; ComputeError naming the node's path.
        """
        if isinstance(feeds, PlanSlice):
            self._run_part(feeds)
            return {}
        arrays = None if borrow else self.fitting(map(feeds.get, self.plan.inputs), len(feeds))
        return self._run(lambda: self._checked(feeds), borrow) if arrays is None else self.step(arrays)

    def _take(self, plan: Plan) -> None:
        super()._take(plan)
        self._fits = [[None, s, None if s.dtype.as_bits else s.dtype.numpy] for s in plan.inputs.values()]

    def fitting(self, values: Iterable[Any], count: int) -> list[Given] | None:
        """Tensors, as arrays, and arrays of numpy, if all have the inputs' specs, lie on the CPU and are open.

        Args:
            values: in order of the inputs.
            count: how many were given, of any name.
        """
        fits = self._fits
        if count != len(fits) or self._borrowed:  # a leased value lies in the arena that the inputs are written to
            return None
        arrays: list[Given] = []
        for value, known in zip(values, fits, strict=True):
            last, spec, host = known
            if type(value) is Tensor:
                array = value.data
                if type(array) is not NDArray or array.closed:
                    return None
                if array is not last:  # not that of the call before
                    if array.shape != spec.shape or array.dtype is not spec.dtype or array.device is not CPU:
                        return None  # on a device it may lie where the plan cannot read it
                    known[0] = array
                arrays.append(array)
            elif type(value) is np.ndarray and value.shape == spec.shape and value.dtype == host:
                arrays.append(value)
            else:
                return None
        return arrays

    def step(self, arrays: Sequence[Given]) -> dict[str, NDArray]:
        """As `run`, on arrays in order of the inputs; the caller knows that they have the plan's specs and are open."""
        self._begin()
        try:
            fed = self._fed
            if fed is None or self.safe or self.watching or self._borrowed or changes.count != self._seen:
                return self._run_held(lambda: arrays, False)
            pointed = self._pointed
            if pointed is None or not all(map(is_, arrays, pointed)):  # else they are read where they were
                self._point(arrays)
            if fed.run() is not None:
                raise self._failed_native(fed)
            return {name: take() for name, take in self._takes.items()}
        finally:
            self._end()

    def _point(self, arrays: Sequence[Given]) -> None:
        """Tell the native call where the inputs lie, which it copies."""
        self._pointed = arrays if all([point(arrays[i]) for i, point in self._points]) else None

    def _run(self, feeds: Callable[[], Sequence[Given]], borrow: bool) -> dict[str, Any]:
        self._begin()
        try:
            return self._run_held(feeds, borrow)
        finally:
            self._end()

    def _run_held(self, feeds: Callable[[], Sequence[Given]], borrow: bool) -> dict[str, Any]:
        if self.stale:
            self.refresh()
        if not self.safe:
            return self._run_bound(feeds(), borrow)
        arrays, written = feeds(), {key: self.variables[key] for key in self.plan.arranged.written}
        if self._before is None:
            self._before = StateSnapshot(written)
        else:
            self._before.take(written)
        try:
            return self._run_bound(arrays, borrow)
        except BaseException as error:  # an interrupt in the commit too
            self._before.put_back(written)
            if isinstance(error, StepTorn):
                raise error.failure from error.__cause__
            raise

    def _run_bound(self, arrays: Sequence[Given], borrow: bool) -> dict[str, Any]:
        self.end_borrow()  # what was leased is read by now
        if self.poison and self._arena is not None:
            for chunk in self._arena.chunks:
                fill(chunk)
        if self._fed is not None:
            self._point(arrays)
            if self._fed.run() is not None:
                raise self._failed_native(self._fed)
        else:
            for feed, array in zip(self._feeds, arrays, strict=True):
                if feed is not None:
                    feed(array)
            self.execute()
        if borrow:
            return {name: self._leased(self._view(slot)) for name, slot in self.plan.outputs.items()}
        return {name: take() for name, take in self._takes.items()}

    def _begin(self) -> None:
        if not self._busy.acquire(False):  # by place: this is in every run
            raise UsageError(
                "this workspace is running already",
                where=self.plan.program.name,
                expected="one run at a time",
                got="a second one before the first has ended",
                fix="Executable(plan) per thread",
            )
        if self._shared is not None and not self._shared.enter(self):
            self.leave_shared()  # another plan runs right now

    def _end(self) -> None:
        if self._shared is not None:
            self._shared.leave()
        self._busy.release()

    def _leased(self, view: NDArray) -> NDArray:
        if not self._in_arena(view) or self.device != CPU:
            return view.copy()  # memory of a variable, which others write; or of a device, which the host must ask
        chunk = view.storage
        if id(chunk) not in self._borrowed:
            self._borrowed[id(chunk)] = BorrowedStorage(chunk)
        return NDArray(self._borrowed[id(chunk)], view.dtype, view.shape, view.strides, view.offset)

    def _in_arena(self, array: NDArray) -> bool:
        """True for memory of the arena, as it is or leased."""
        chunks = self._arena.chunks if self._arena is not None else ()
        return any(array.storage is known for known in (*chunks, *self._borrowed.values()))

    def _run_part(self, part: PlanSlice) -> None:
        """Instructions of a part, one by one. Raises: as `run`; UsageError for a part of another plan."""
        if part.plan is not self.plan:
            raise UsageError(
                "a part of another plan",
                where=self.plan.program.name,
                expected=self.plan,
                got=part.plan,
                fix="workspace.run(workspace.plan[i:j])",
            )
        if part.start:
            self._check_kept()
        self._begin()
        try:
            if self.stale:
                self.refresh()
            if part.start == 0:
                self.runs.rise()
            for i in range(part.start, part.stop):
                if i not in self._singles:
                    self._singles[i] = self._calls_of(i, i + 1)
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
        """Give a slot a value.

        Raises: UsageError for no such slot, or one that shows a value several times, as an expansion does; FeedError
            for another shape or dtype.
        """
        shown = self.plan.slots[self._known(slot)]
        if any(n > 1 and step == 0 for n, step in zip(shown.layout.shape, shown.layout.strides, strict=True)):
            raise UsageError(
                "several elements of this slot are one number in memory",
                where=f"slot {slot}",
                expected="a slot with a number in memory for each element",
                got=f"strides {shown.layout.strides}",
                fix=f"set slot {shown.base}, of which it is a view",
            )
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
                "a slot takes a value of its spec",
                where=f"slot {slot}",
                expected=view.spec,
                got=given.spec,
                fix="plan.slots[slot].spec says which",
            )
        backend(view.device).copy(view, given.copy() if self._in_arena(given) else given)

    def _known(self, slot: int) -> int:
        return place_of(self.plan, "slots", slot, self.plan.arranged.slots)

    def failed_single(self, row: int) -> GraphwrightError:
        """What to raise after a row of the code of `single` failed, by its address."""
        return self._failed_native(self.single, row)

    def _failed_native(self, segment: Any, row: int | None = None) -> GraphwrightError:
        error = segment.failure(row)
        failure = self._located(0, error)
        failure.__cause__ = error
        return failure

    def execute(self) -> None:
        """Run the calls on what lies in the inputs. Raises: ComputeError naming the node's path."""
        self.runs.rise()  # the version of every block that the plan writes, also if it fails half way
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
            raise UsageError(
                "memory of a device cannot be written by hand",
                where=plan.program.name,
                expected=CPU,
                got=self.device,
                fix="plan(feeds), or a plan of the CPU",
            )
        ledger = plan.arranged.ledger
        inputs = {
            ledger.buffers[ledger.slots[s].buffer][2]: self._view(s).to_numpy(bits=True) for s in plan.input_slots
        }
        return inputs, {name: self._view(s).to_numpy(bits=True) for name, s in plan.outputs.items()}

    def value(self, slot: int) -> NDArray:
        """A copy of what a slot holds; meaningful while its buffer is live.

        Raises: UsageError for no such slot, or if another plan has used a shared arena since.
        """
        slot = self._known(slot)
        self._check_kept()
        self._bind()
        return self._view(slot).copy()

    def _check_kept(self) -> None:
        if self._shared is not None and not self._shared.used_by(self):
            raise UsageError(
                "another plan has used this memory since, or nothing has run",
                where=self.plan.program.name,
                expected="what the last run of this plan left in the arena",
                got="the arena that plans share, in use by others",
                fix="Executable(plan), which has memory of its own",
            )

    def watched(self, name: str) -> NDArray:
        """The value of a watched node in the last run, copied. Raises: UsageError for one that was not watched."""
        if name not in self.plan.watched:
            raise UsageError(
                "this node was not watched",
                where=name,
                expected=", ".join(self.plan.watched) or "nothing: the plan has no watch",
                got=repr(name),
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
            specs = self.plan.inputs
            raise FeedError(
                "inputs do not fit:\n  " + "\n  ".join(wrong),
                where=self.plan.program.name,
                expected=", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "no input",
                got=", ".join(feeds) or "no input",
                fix="feeds of these specs, or program.compile(...) for others: a new shape is a new plan",
            )
        # a leased value lies in the arena that the inputs are written to
        return [data.copy() if self._in_arena(data) else data for data in ready]

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
        failure = kernel_error(instr.op, [self._view(s) for s in instr.ins], error, plan.path(instr.node))
        failure = self._torn(failure, range(at) if ran is None else ran)
        if instr.node in plan.program.graph:
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
