"""Executable: the memory of a plan and the calls bound to it. After the first run nothing more is allocated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import is_, length_hint
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, NDArray, backend, changes
from graphwright.array.world import RankLost, world
from graphwright.autograd import Tensor, Variable
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops.call import kernel_error
from graphwright.patterns import PatternShape
from graphwright.plan.errors import DeviceFailed, PlanReplaced, StepTorn, checked_index
from graphwright.plan.running.kernels import BoundKernels
from graphwright.plan.running.memory import BorrowedStorage, Given, as_array, differences, fill
from graphwright.plan.running.override import OverrideFailed, OverrideMismatch
from graphwright.plan.table import CONST, PARAM, STATE, PlanSlice
from graphwright.program.errors import FeedError
from graphwright.program.exclusive import exclusive
from graphwright.program.patterns import reading
from graphwright.program.run import origin
from graphwright.program.run_comparison import RunComparison
from graphwright.program.state import StateSnapshot

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan


class Executable:
    """The arena of a plan and the calls bound to its addresses; a second thread waits until the first has run.

    Args:
        plan: the plan.
        variables: key -> variable that replaces the program's own, e.g. the KV cache of a second sequence. A constant
            whose value a rewrite relies on (such as the 1 of x·1) cannot be replaced.
        poison: fill the arena with NaN before every run and each buffer after its last use, so that a value that was
            freed too early reads as NaN.
        shared: use the arena that plans of the device share; results are kept in it until a different plan runs.
        safe: save the states before each run and restore them if it fails, so that no step is half done.
        kernels: memory and calls, if a subclass made them.

    Attributes:
        kernels: memory and calls.
        pinned: True if callers hold views of the memory, so that a patched plan must not take it over.
    Raises: UsageError if a variable replaces a constant whose value a rewrite relies on.
    """

    def __init__(
        self, plan: Plan, variables: Mapping[str, Variable] | None = None, *, poison: bool = False,
        shared: bool = False, safe: bool = False, kernels: BoundKernels | None = None,
    ) -> None:  # fmt: skip
        self.kernels = kernels or BoundKernels(plan, variables, poison=poison, shared=shared)
        self.poison, self.safe = poison, safe
        self.pinned = False
        self._busy = Lock()
        self._runner = 0  # the thread that runs it
        self._held = ExitStack()  # the patterns that the run holds
        self._before: StateSnapshot | None = None
        self._comparison: RunComparison | None = None  # made by the first run among several ranks
        self._set_plan(plan)

    def _set_plan(self, plan: Plan) -> None:
        self.plan, self._comparison = plan, None
        # per input the array that fitted last, its spec, and the numpy dtype that fits
        self._fits: list[list[Any]] = [
            [None, s, None if s.dtype.as_bits else s.dtype.numpy] for s in plan.inputs.values()
        ]

    def adopt(self, plan: Plan) -> bool:
        """Switch to a plan patched from the current one, keeping memory and the calls that the edit did not touch.

        Returns: False, with nothing changed, if the plans have different plan builders, or if this executable is pinned
            or running.
        """
        same_builder = self.plan.buffer_layout.builder is plan.buffer_layout.builder
        if self.pinned or not same_builder or not self._busy.acquire(blocking=False):
            return False
        shared = self.kernels.shared
        if shared is not None and not shared.hold():  # another plan runs, and may take the arena
            self._busy.release()
            return False
        try:
            self._set_plan(plan)
            self.kernels.adopt(plan)
            return True
        finally:
            if shared is not None:
                shared.leave()
            self._busy.release()

    # -- runs --------------------------------------------------------------------------------------------------------
    def run(
        self, feeds: Mapping[str, Any] | PlanSlice, *, borrow: bool = False, plan: Plan | None = None
    ) -> dict[str, NDArray]:
        """Copy the feeds in, run, and return the outputs by name.

        Args:
            feeds: for each input an array or tensor with the planned spec; or a slice of the plan, `plan[i:j]`, which
                runs on the current values of slots (`feed` and `set` write them, `value` reads them) and returns {}.
            borrow: return views of the arena instead of copies; reading them after the next run raises StaleBorrow.
            plan: the plan to run; PlanReplaced is raised if the executable has adopted another one.
        Raises: StalePlan or FeedError before anything runs; ComputeError with the path of the node that failed.
        """
        if isinstance(feeds, PlanSlice):
            self._run_slice(feeds)
            return {}
        arrays = None if borrow else self.fitting(map(feeds.get, self.plan.inputs), len(feeds))
        if arrays is not None:
            return self.step(arrays, plan=plan)
        with self._running(plan):
            return self._run_held(lambda: self._checked(feeds), borrow)

    def fitting(self, values: Iterable[Any], count: int) -> list[Given] | None:
        """Return the values as arrays if all are CPU tensors or numpy arrays of the inputs' specs, else None.

        Args:
            values: one per input, in order; None for a missing one.
            count: number of values fed by the caller, including those under unknown names.
        """
        fits = self._fits
        if count != len(fits) or self.kernels.borrowed:  # a borrowed value is in the arena that inputs are written to
            return None
        arrays: list[Given] = []
        for value, known in zip(values, fits, strict=True):
            last, spec, host = known
            if type(value) is Tensor:
                array = value.data
                if type(array) is not NDArray or array.closed:
                    return None
                if array is not last:  # not checked in the last call
                    if array.shape != spec.shape or array.dtype is not spec.dtype or array.device is not CPU:
                        return None
                    known[0] = array
                arrays.append(array)
            elif type(value) is np.ndarray and value.shape == spec.shape and value.dtype == host:
                arrays.append(value)
            else:
                return None
        return arrays

    def step(
        self, arrays: Sequence[Given], wanted: Iterable[str] | None = None, *, plan: Plan | None = None
    ) -> dict[str, NDArray]:
        """Run on one array per input, as `fitting` returns them; return the outputs by name, or only those `wanted`.

        `plan` is as for `run`.
        """
        self._begin()
        try:
            if plan is not None and self.plan is not plan:
                raise PlanReplaced
            bound = self.kernels
            fed = bound.fed
            if not (fed is None or self.safe or bound.borrowed or changes.count != bound.seen or bound.stale):
                pointed = bound.pointed
                if pointed is None or not all(map(is_, arrays, pointed)):  # else their addresses are unchanged
                    self._point(arrays)
                if fed.run() is not None:
                    raise self._failed_native(fed)
                takes = bound.takes
                return {name: takes[name]() for name in (takes if wanted is None else wanted)}
        finally:
            self._end()
        with self._running(plan):
            return self._run_held(lambda: arrays, False)

    def run_while(self, arrays: Sequence[Given], name: str, again: Callable[[np.ndarray], bool]) -> None:
        """Run on `arrays`, one per input, until `again` returns False; it may write new values into them.

        It receives the output `name`, in memory that the next run overwrites.
        """
        if self.safe or self.kernels.device != CPU:  # whose outputs numpy cannot share
            while again(self.step(arrays, (name,))[name].to_numpy()):
                pass
            return
        with self._running():
            self.kernels.end_borrow()
            value = self.kernels.view(self.plan.outputs[name]).to_numpy()
            self._run_once(arrays)
            while again(value):
                if self.kernels.patterns:
                    self._held.close()  # between two runs, edits of other threads may change a pattern
                    self._held.enter_context(reading(self.kernels.patterns))
                self._run_once(arrays)

    def _point(self, arrays: Sequence[Given]) -> None:
        """Set the addresses from which the native call copies the inputs."""
        bound = self.kernels
        bound.pointed = arrays if all([point(arrays[i]) for i, point in bound.points]) else None

    def _run_held(self, feeds: Callable[[], Sequence[Given]], borrow: bool) -> dict[str, NDArray]:
        if not self.safe:
            return self._run_bound(feeds(), borrow)
        arrays, variables = feeds(), self.kernels.variables
        written = {key: variables[key] for key in self.plan.buffer_layout.written}
        if self._before is None:
            self._before = StateSnapshot(written)
        else:
            self._before.take(written)
        try:
            return self._run_bound(arrays, borrow)
        except BaseException as error:  # also a KeyboardInterrupt in the commit
            self._before.put_back(written)
            if isinstance(error, StepTorn):
                raise error.failure from error.__cause__
            raise

    def _run_bound(self, arrays: Sequence[Given], borrow: bool) -> dict[str, NDArray]:
        bound = self.kernels
        bound.end_borrow()  # borrowed feeds were copied
        self._run_once(arrays)
        if borrow:
            return {name: self._borrowed(bound.view(slot)) for name, slot in self.plan.outputs.items()}
        return {name: take() for name, take in bound.takes.items()}

    def _run_once(self, arrays: Sequence[Given]) -> None:
        bound = self.kernels
        if self.poison and bound.arena is not None:
            for chunk in bound.arena.chunks:
                fill(chunk, 0, chunk.nbytes)
        if bound.fed is None:
            with nullcontext() if world().group is None else self._compared(arrays):
                self._feed(arrays)
                self.execute()
            return
        if bound.pointed is not arrays:  # else their addresses are unchanged
            self._point(arrays)
        if bound.fed.run() is not None:
            raise self._failed_native(bound.fed)

    def execute(self) -> None:
        """Run on the inputs that were written last. Raises: ComputeError with the path of the node that failed."""
        bound = self.kernels
        bound.runs.rise()  # the version of every block that the plan writes, also if it fails half way
        calls = iter(bound.calls)
        try:
            for call in calls:
                call()
        except Exception as error:
            raise self._failed_call(len(bound.calls) - length_hint(calls) - 1, error) from error
        bound.note_run()

    def _compared(self, arrays: Sequence[Given]) -> AbstractContextManager[None]:
        """Return a context of a run, before which it is compared with the other ranks; see `RunComparison.before`."""
        if self._comparison is None:
            specs = lambda slots: [self.plan.buffer_layout.tables.slots[s].spec for s in slots]  # noqa: E731
            found = ((i.op, specs(i.ins), specs(i.outs), i.attrs) for i in self.plan.instrs)
            self._comparison = RunComparison(self.plan.program, found)
        return self._comparison.before(dict(zip(self.plan.inputs, map(as_array, arrays), strict=True)))

    def _run_slice(self, part: PlanSlice) -> None:
        if part.plan is not self.plan:
            raise UsageError("this slice belongs to a different plan", where=self.plan.program.name, expected=self.plan,
                             got=part.plan, fix="executable.run(executable.plan[i:j])")  # fmt: skip
        if part.start:
            self._check_arena_values()
        with self._running():
            if part.start == 0:
                self.kernels.runs.rise()
            for i in range(part.start, part.stop):
                try:
                    for call in self.kernels.calls_of(i):
                        call()
                except Exception as error:
                    raise self.failed(i, error) from error

    def _begin(self) -> None:
        if not self._busy.acquire(False):  # positional, which is faster: every run calls it
            if self._runner == get_ident():
                raise UsageError("this executable is already running in this thread", where=self.plan.program.name,
                                 expected="one run at a time", got="a second one before the first has ended",
                                 fix="Executable(plan) for the inner run")  # fmt: skip
            self._busy.acquire()
        self._runner = get_ident()
        shared = self.kernels.shared
        if shared is not None and not shared.enter(self.kernels):
            self.kernels.leave_shared()  # another plan runs right now
        if self.kernels.patterns:
            self._hold_patterns()

    def _hold_patterns(self) -> None:
        """Hold the patterns that the plan reads. Raises: EditBusy, PatternShape; then nothing is held."""
        try:
            self._held.enter_context(reading(self.kernels.patterns))
            for path, pattern, queries, keys in self.kernels.pattern_lengths:
                if queries > pattern.tokens[0] or keys > pattern.tokens[1]:
                    error = PatternShape(
                        "queries or keys are longer than the pattern", expected=f"at most {pattern}",
                        got=f"{queries} x {keys} tokens", fix=f"pattern.extend({max(queries, keys)})",
                    )  # fmt: skip
                    error.where = path
                    raise error
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self.kernels.patterns:
            self._held.close()
        if self.kernels.shared is not None:
            self.kernels.shared.leave()
        self._runner = 0
        self._busy.release()

    @contextmanager
    def _running(self, plan: Plan | None = None) -> Iterator[None]:
        """Hold the executable, bound to the present values of the variables. Raises: PlanReplaced, see `run`."""
        self._begin()
        if self.kernels.stale:
            self._end()
            with exclusive(self.plan.program):  # first, as the thread that holds the program may wait for this lock
                self._begin()
                try:
                    if self.kernels.stale:
                        self.kernels.refresh()
                except BaseException:
                    self._end()
                    raise
        try:
            if plan is not None and self.plan is not plan:
                raise PlanReplaced
            if self.kernels.mirrors:
                self.kernels.send_edits()
            yield
        finally:
            self._end()

    # -- values ------------------------------------------------------------------------------------------------------
    def feed(self, feeds: Mapping[str, Any]) -> None:
        """Write the inputs; call this before running slices of the plan. Raises: the errors of `run`."""
        with self._running():
            self._feed(self._checked(feeds))

    def _feed(self, arrays: Sequence[Given]) -> None:
        for feed, array in zip(self.kernels.feeds, arrays, strict=True):
            if feed is not None:
                feed(array)

    def set(self, slot: int, array: Any) -> None:
        """Write the value of a slot.

        Raises: UsageError if the index is out of range, or if elements of the slot share memory, as after an expand;
            FeedError if the array has a different shape or dtype.
        """
        shown = self.plan.slots[checked_index(self.plan, "slots", slot, self.plan.buffer_layout.slot_count)]
        if any(n > 1 and step == 0 for n, step in zip(shown.layout.shape, shown.layout.strides, strict=True)):
            raise UsageError("cannot write this slot: several of its elements share memory", where=f"slot {slot}",
                             expected="a slot whose elements have separate memory",
                             got=f"strides {shown.layout.strides}",
                             fix=f"set slot {shown.base}, of which it is a view")  # fmt: skip
        with self._running():
            view, given = self.kernels.view(slot), as_array(array)
            if given.spec != view.spec:
                raise FeedError("the array does not match the shape or dtype of the slot", where=f"slot {slot}",
                                expected=view.spec, got=given.spec,
                                fix="pass an array with the spec plan.slots[slot].spec")  # fmt: skip
            backend(view.device).copy(view, given.copy() if self._in_arena(given) else given)

    def value(self, slot: int) -> NDArray:
        """Return a copy of the value of a slot, which is valid only while the buffer of the slot is live.

        Raises: UsageError if the index is out of range, or if a different plan has used the shared arena since.
        """
        slot = checked_index(self.plan, "slots", slot, self.plan.buffer_layout.slot_count)
        self._check_arena_values()
        self.kernels.bind()
        return self.kernels.view(slot).copy()

    def watched(self, name: str) -> NDArray:
        """Return a copy of a watched node's value in the last run. Raises: UsageError if the node is not watched."""
        if name not in self.plan.watched:
            raise UsageError(f"node {name!r} is not watched", where=name,
                             expected=", ".join(self.plan.watched) or "no name: nothing is watched", got=repr(name),
                             fix="program.compile(..., watch=[name])")  # fmt: skip
        return self.value(self.plan.watched[name])

    def memory(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return two dicts, of the inputs that are read and of the outputs: name -> numpy view of the memory.

        A view of bfloat16 values shows them as uint16 bits. Raises: UsageError if the device is not the CPU.
        """
        plan, tables = self.plan, self.plan.buffer_layout.tables
        if self.kernels.device != CPU:
            raise UsageError("device memory cannot be viewed as numpy arrays", where=plan.program.name, expected=CPU,
                             got=self.kernels.device, fix="plan(feeds), or a plan for the CPU")  # fmt: skip

        def view(slot: int) -> np.ndarray:
            return self.kernels.view(slot).to_numpy(bits=True)

        inputs = {tables.buffers[tables.holders[s]][2]: view(s) for s in plan.input_slots}
        return inputs, {name: view(s) for name, s in plan.outputs.items()}

    def _checked(self, feeds: Mapping[str, Any]) -> list[NDArray]:
        """Return the feeds as arrays in order of the inputs. Raises: FeedError listing all feeds that do not fit."""
        specs, device = self.plan.inputs, self.kernels.device
        wrong = [f"{name}: not an input" for name in feeds if name not in specs]
        ready: list[NDArray] = []
        for name, spec in specs.items():
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
            if data.device not in (CPU, device):
                wrong.append(f"{name}: is on {data.device}, expected {device} or the host")
            ready.append(data)
        if wrong:
            raise FeedError("inputs do not fit:\n  " + "\n  ".join(wrong), where=self.plan.program.name,
                            expected=", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "no input",
                            got=", ".join(feeds) or "no input",
                            fix="feeds of these specs, or program.compile(...) for other shapes")  # fmt: skip
        # a borrowed value is in the arena that the inputs are written to
        return [data.copy() if self._in_arena(data) else data for data in ready]

    def _check_arena_values(self) -> None:
        """Raise UsageError if the arena does not hold the values of this plan's last run."""
        shared = self.kernels.shared
        if shared is not None and not shared.used_by(self.kernels):
            raise UsageError("this plan has not run, or a different plan has used the shared arena since",
                             where=self.plan.program.name, expected="values of this plan's last run in the arena",
                             got="a shared arena without values of this plan",
                             fix="run the plan again, or use Executable(plan), which has its own memory")  # fmt: skip

    def _borrowed(self, view: NDArray) -> NDArray:
        bound = self.kernels
        if not self._in_arena(view) or bound.device != CPU:
            return view.copy()  # memory of a variable or of a device
        chunk = view.storage
        if id(chunk) not in bound.borrowed:
            bound.borrowed[id(chunk)] = BorrowedStorage(chunk)
        return NDArray(bound.borrowed[id(chunk)], view.dtype, view.shape, view.strides, view.offset)

    def _in_arena(self, array: NDArray) -> bool:
        bound = self.kernels
        chunks = bound.arena.chunks if bound.arena is not None else ()
        return any(array.storage is known for known in (*chunks, *bound.borrowed.values()))

    # -- failures ----------------------------------------------------------------------------------------------------
    def failed_single(self, row: int) -> GraphwrightError:
        """Return the error of a run that is one VM segment; `row` is the address of the VM instruction that failed."""
        return self._failed_native(self.kernels.single, row)

    def _failed_native(self, segment: Any, row: int | None = None) -> GraphwrightError:
        error = segment.failure(row)
        failure = self._failed_call(0, error)
        failure.__cause__ = error
        return failure

    def _failed_call(self, call: int, error: Exception) -> GraphwrightError:
        """Return the error of the call with index `call`, naming its node."""
        at = next(i for i, end in enumerate(self.kernels.call_ends) if call < end)
        return self.failed(at + getattr(error, "op", 0), error)  # a VM error has the position in its segment

    def failed(self, at: int, error: Exception, ran: Collection[int] | None = None) -> GraphwrightError:
        """Return the error of instruction `at`; `ran` are the instructions that had run, by default all before it."""
        plan, instr = self.plan, self.plan.instrs[at]
        if isinstance(error, OverrideFailed) and self.kernels.override is not None:
            return self.torn(error, range(self.kernels.override.stop))
        if isinstance(error, DeviceFailed):
            return self.torn(error, range(min(at, plan.commit_start)) if ran is None else ran)
        ins = [self.kernels.view(s) for s in instr.ins]
        failure = kernel_error(instr.op, ins, error, plan.path(instr.node))
        failure = self.torn(failure, range(at) if ran is None else ran)
        if instr.node in plan.program.graph:
            failure.add_note(origin(plan.program, instr.node))
        return failure

    def torn(self, failure: GraphwrightError, ran: Collection[int]) -> GraphwrightError:
        """Return `failure`, or a StepTorn with it if one of the instructions `ran` had written a state.

        A RankLost stays one: the process has to be started again in any case.
        """
        plan = self.plan
        keys = [key for i, early in plan.early.items() if i in ran for key in early]
        done = [plan.instrs[i] for i in sorted(ran) if i >= plan.commit_start]
        written = [plan.buffers[plan.slots[s].buffer] for instr in done for s in instr.outs]
        keys += [b.key for b in written if b.kind in (PARAM, STATE)]
        if keys and isinstance(failure, RankLost):
            failure.add_note(f"states that already hold new values: {', '.join(keys)}")
            return failure
        return StepTorn(failure, tuple(keys)) if keys else failure


class BoundCall:
    """A call of a plan whose inputs and outputs are numpy arrays of fixed memory: write inputs, call, read outputs.

    Edits of the program do not change what it runs. Only one thread may use it at a time.

    Attributes:
        inputs: input name -> array to write to; bfloat16 as its uint16 bits. Inputs that nothing reads are left out.
        outputs: output name -> array that every run overwrites.
    A call raises StalePlan and ComputeError as `Executable.run` does.
    """

    # an attribute: if a run is one native call, it is that call itself, without Python code before it
    __slots__ = ("__call__", "inputs", "outputs")
    __call__: Callable[[], None]

    def __init__(self, space: Executable) -> None:
        space.kernels.leave_shared()  # no other plan may overwrite what the caller wrote
        space.pinned = True
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        run = _CheckedRun(space, self.inputs, self.outputs)
        self.__call__ = run if run.native is None else run.native.call(run)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in (*self.inputs.items(), *self.outputs.items()))
        return f"BoundCall({shapes})"


class _CheckedRun:
    """The run of a `BoundCall` in Python, which binds again if something changed since the last run.

    Attributes:
        native: a native call that runs the plan if nothing changed, and else calls this object. None unless a run is
            one native call without helper threads.
    """

    __slots__ = ("_inputs", "_outputs", "_single", "_space", "native")

    def __init__(self, space: Executable, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        self._space, self._inputs, self._outputs, self._single = space, inputs, outputs, False
        self.native: Any = None
        self._refresh()

    def _refresh(self) -> None:
        space, bound = self._space, self._space.kernels
        bound.refresh()
        for arrays, found in zip((self._inputs, self._outputs), space.memory(), strict=True):
            arrays.update(found)
        segment = bound.single
        # no shortcut with several calls, or where each run must check assumptions or hold patterns
        self._single = segment is not None and segment.short and not bound.writers and not bound.patterns
        if self._single and self.native is None:
            from graphwright.array.vm.running.segment import Guarded  # loads numba

            self.native = Guarded()
        if self._single:
            self.native.aim(segment, changes.address, changes.count, bound.runs.address)
        elif self.native is not None:
            self.native.rest()

    def __call__(self) -> None:
        failed = self.native.failed() if self.native is not None else 0
        if failed:
            raise self._space.failed_single(failed)
        if self._space.kernels.stale or self._single:
            self._refresh()
        with reading(self._space.kernels.patterns):
            if self._space.kernels.mirrors:
                self._space.kernels.send_edits()
            self._space.execute()


def check_override(plan: Plan, feeds: Mapping[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Run with and without the active override, on copies of the variables, and compare outputs and states.

    Raises: OverrideMismatch listing all differences; UsageError if no override is active; the errors of
        `Executable.run`.
    """
    if not plan.overrides:
        raise UsageError("the plan has no override to check", where=plan.program.name,
                         expected="a call inside of a block of plan.override", got="no active override",
                         fix="with plan.override(fn): plan.check_override(feeds)")  # fmt: skip
    found: list[dict[str, NDArray]] = []
    for overridden in (True, False):
        # constants that a rewrite assumed are not copied; nothing writes them
        stored = {b.key for b in plan.buffers if b.kind in (PARAM, CONST, STATE)} - plan.assumptions.keys()
        copies = {key: Variable(plan.program.weights.array(key).copy(), name=key) for key in stored}
        space = Executable(plan, copies, poison=True)
        space.kernels.overridden = overridden
        results = {name: a.to(CPU) for name, a in space.run(feeds).items()}
        found.append({**results, **{f"state {key}": v.data.to(CPU) for key, v in sorted(copies.items())}})
    if wrong := differences(found[0], found[1], rtol, atol):
        raise OverrideMismatch("the values of the override differ from those of the plan:\n  " + "\n  ".join(wrong),
                               where=plan.program.name)  # fmt: skip
