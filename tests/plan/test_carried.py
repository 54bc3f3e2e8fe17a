"""State as one thing: kept, gone back to, reset, of its own, on every executor; and steps that cannot be torn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import Device, from_numpy
from graphwright.errors import ComputeError, UsageError
from graphwright.plan import CaptureExecutable, Executable, ParallelExecutable, StepTorn
from graphwright.program import Builder, Program

SIM = Device("sim")
X = np.linspace(-1, 1, 4, dtype=np.float32)


def recurrent() -> Program:
    """Two states that swap and mix, a counter, and a param that is written."""
    b = Builder("recurrent")
    x = b.input("x", (4,))
    h, c = (b.scope("cell").state(n, np.full(4, v, np.float32)) for n, v in (("h", 1.0), ("c", -2.0)))
    t, w = b.state("count", np.zeros((), np.float32)), b.param("w", np.full(4, 0.5, np.float32))
    b.assign(h, b.tanh(b.add(b.mul(w, c), x)))
    b.assign(c, h)
    b.assign(t, b.add(t, b.const("one", np.ones((), np.float32))))
    b.assign(w, b.mul(w, b.const("less", np.full(4, 0.9, np.float32))))
    b.output(b.add(h, c), "y")
    return b.build()


def bits(state: gw.State) -> dict[str, bytes]:
    return {key: v.data.tobytes() for key, v in state.items()}


def steps(run: Callable[..., Any], n: int) -> list[bytes]:
    return [run({"x": X * (i + 1)})["y"].tobytes() for i in range(n)]


RUNS: dict[str, Callable[[Program, gw.State], Callable[..., Any]]] = {
    "interpreted": lambda p, s: lambda feeds: p.run(feeds, state=s),
    "aten": lambda p, s: Executable(p.compile(x=(4,), deterministic=True), s).run,
    "vm": lambda p, s: Executable(p.compile(x=(4,), executor="vm"), s).run,
    "threads": lambda p, s: ParallelExecutable(p.compile(x=(4,), deterministic=True), s).run,
    "device": lambda p, s: p.compile(x=(4,), device="sim", executor="aten").new_executable(s).run,
    "captured": lambda p, s: CaptureExecutable(p.compile(x=(4,), device="sim", deterministic=True), s).run,
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("sim")
def test_every_executor_continues_from_a_snapshot(name: str) -> None:
    p = recurrent()
    before = {k: v.data.tobytes() for k, v in p.weights.items()}
    truth = steps(recurrent().run, 20)
    state = gw.State(p, own=True)
    run = RUNS[name](p, state)

    def same(found: list[bytes], expected: list[bytes]) -> None:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(*(np.frombuffer(t, "f4") for t in (a, b)), rtol=1e-6 if name == "vm" else 0)

    same(steps(run, 20), truth)
    assert state["count"].data.to_numpy() == 20
    state.reset()
    same(steps(run, 5), truth[:5])
    mark, then = state.snapshot(), bits(state)
    later = steps(run, 3)
    for _ in range(2):
        state.restore(mark)
        assert bits(state) == then
        assert steps(run, 3) == later
    state.reset("cell")
    assert (state["cell.h"].data.to_numpy()[0], state["cell.c"].data.to_numpy()[0]) == (1.0, -2.0)
    assert state["count"].data.to_numpy() == 8
    assert {k: v.data.tobytes() for k, v in p.weights.items()} == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("own", [True, False])
def test_error_inside_a_transaction_restores_all_steps(own: bool, error: type[BaseException]) -> None:
    p = recurrent()
    state = gw.State(p, own=own)
    run = Executable(p.compile(x=(4,), deterministic=True), state).run
    steps(run, 2)
    then = bits(state)

    def fails() -> None:
        with state.transaction():
            steps(run, 2)
            with state.transaction():
                steps(run, 1)
            assert bits(state) != then
            raise error

    with pytest.raises(error):
        fails()
    assert bits(state) == then
    with state.transaction() as inside:
        steps(run, 1)
        assert inside is state
    assert bits(state) != then
    assert (p.weights["count"].data.to_numpy() == 3) == (not own)


def test_snapshot_of_other_states_raises() -> None:
    p = recurrent()
    state = gw.State(p)
    assert sorted(state) == ["cell.c", "cell.h", "count", "w"]
    assert all(state[k] is p.weights[k] for k in state)
    assert "cell.h" in repr(state)
    for scope in ("cel", "cell.x", "x"):
        with pytest.raises(UsageError) as caught:
            state.reset(scope)
        assert "cell.h" in str(caught.value.expected)
    mark = state.snapshot()
    with p.edit("one number for all rows, never written") as e:
        e.remove("w.next")
        e.set_weight("w", lambda w: w[:1])
    then = bits(state)
    for back in (lambda: state.restore(mark), state.reset):
        with pytest.raises(UsageError, match="shape"):
            back()
        assert bits(state) == then
    p.undo()
    state.restore(mark)


# -- safe steps --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["plain", "threads", "captured"])
@pytest.mark.usefixtures("sim")
def test_safe_step_is_restored_after_any_fault(kind: str) -> None:
    p = recurrent()
    plan = p.compile(x=(4,), device="sim" if kind == "captured" else "cpu", deterministic=True)
    make: Any = {"plain": Executable, "threads": ParallelExecutable, "captured": CaptureExecutable}[kind]

    def faulty(at: int, error: BaseException, safe: bool) -> tuple[Any, gw.State]:
        state = gw.State(p, own=True)
        space = make(plan, state, safe=safe)
        space.run({"x": X})
        calls = space.kernels.call_ends[at] - 1

        def fail() -> None:
            raise error

        space.kernels.calls[calls] = fail
        return space, state

    torn = 0
    for at in range(len(plan.instrs)):
        for error, expected in ((ValueError("planted"), ComputeError), (KeyboardInterrupt(), KeyboardInterrupt)):
            if kind == "threads" and expected is KeyboardInterrupt:
                continue
            space, state = faulty(at, error, True)
            then = bits(state)
            with pytest.raises(expected) as caught:
                space.run({"x": X})
            assert not isinstance(caught.value, StepTorn)
            assert bits(state) == then
        space, state = faulty(at, ValueError("planted"), False)
        with pytest.raises(ComputeError) as caught:
            space.run({"x": X})
        torn += isinstance(caught.value, StepTorn)
    assert torn > 0  # the same faults tear a step that keeps no copy


def test_safe_steps_allocate_nothing_after_the_first() -> None:
    from graphwright.array.cpu import tensor_allocations

    p = recurrent()
    space = Executable(p.compile(x=(4,), deterministic=True), gw.State(p, own=True), safe=True)
    x = from_numpy(X)
    taken = []
    for safe in (False, True):
        space.safe = safe
        space.step([x])
        space.step([x])
        taken.append(tensor_allocations(lambda: [space.step([x]) for _ in range(20)]))
    assert taken[0] == taken[1]  # the results that are given out


@pytest.mark.usefixtures("sim")
def test_executors_share_state_on_any_device() -> None:
    p, truth = recurrent(), steps(recurrent().run, 6)
    runs = [
        p.compile(x=(4,), device="sim", deterministic=True),
        p.run,
        p.compile(x=(4,), device="sim", executor="aten"),
        p.compile(x=(4,), deterministic=True),
    ]
    found = [runs[i % 4]({"x": X * (i + 1)})["y"].tobytes() for i in range(6)]
    assert found == truth
    assert {v.data.device.kind for k, v in p.weights.items() if k in gw.State(p)} == {"sim"}
    there = p.run({"x": from_numpy(X).to(SIM)})["y"]  # weights that no instruction writes are on the host
    other = recurrent()
    steps(other.run, 6)
    assert (there.device, there.tobytes()) == (SIM, other.run({"x": X})["y"].tobytes())
