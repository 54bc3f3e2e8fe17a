"""Regions as graphs of the simulated device: which they are, and that state and results are right whatever fails."""

from __future__ import annotations

from contextlib import suppress
from time import sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import programs
from test_plan_devices import decode, training
from test_plan_state import CASES, FEEDS, two_states

import graphwright as gw
from graphwright import optim
from graphwright.array import CPU, Device, NDArray, bfloat16, from_numpy
from graphwright.array.backend import Needs, use
from graphwright.array.cpu.kernel import KERNELS
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops import OPS
from graphwright.plan import CaptureExecutable, CaptureRefused, CaptureState, Executable, Plan
from graphwright.plan.planning.hazards import (
    CAPTURED,
    DATA,
    GAP,
    PLAIN,
    POST,
    PRE,
    SHORTEST,
    Dependency,
    dependencies,
    hoisted,
    runs,
)
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits
from graphwright.testing.simulated_device import SimBackend, SimDriver

SIM = Device("sim")


# -- which regions -----------------------------------------------------------------------------------------------------
WHY = st.sampled_from(["", "", "", "", "host"])


@given(st.lists(WHY, max_size=60))
def test_regions_match_brute_force(why: list[str]) -> None:
    n = len(why)
    every = [(a, b) for a in range(n) for b in range(a + 1, n + 1) if not any(why[a:b])]
    maximal = [(a, b) for a, b in every if (a - 1, b) not in every and (a, b + 1) not in every]
    most = max((b - a for a, b in maximal), default=0)
    first = [(a, b) for a, b in maximal if b - a == most][:1]
    assert runs(why) == [run for run in maximal if run in first or run[1] - run[0] >= SHORTEST]


@given(programs(most=20), st.data())
def test_reordering_obeys_dependencies_and_commit(case, data) -> None:
    p, feeds = case
    plan = p.compile({n: a.shape for n, a in feeds.items()}, rewrites="none", deterministic=True)
    n = len(plan.instrs)
    why = data.draw(st.lists(WHY, min_size=n, max_size=n))
    commit = data.draw(st.integers(0, n))
    found = [e for e in dependencies(plan)]
    order = hoisted(why, found, commit)
    position = {i: k for k, i in enumerate(order)}
    assert sorted(order) == list(range(n))
    assert all(position[e.before] < position[e.after] for e in found)
    assert all(position[a] < position[b] for a in range(commit) for b in range(commit, n))
    held = {k for k, i in enumerate(order) if not why[i]}
    between = [i for k, i in enumerate(order) if held and min(held) < k < max(held) and why[i]]
    for i in between:  # each is tied to something on both sides of it
        before, after = _reach(found, i, "before"), _reach(found, i, "after")
        assert any(not why[j] for j in before) or i >= commit
        assert any(not why[j] for j in after) or (i < commit < n)
    space = Executable(plan)
    truth = space.run(feeds)
    space.feed(feeds)
    for i in hoisted(why, found, n):
        space.run(plan[i : i + 1])
    for name, slot in plan.outputs.items():
        assert_bits(space.value(slot), truth[name])


def test_no_instruction_moves_across_the_commit() -> None:
    tied = [Dependency(0, 1, DATA)]
    assert hoisted(["", "host", ""], tied, 2) == [0, 1, 2]
    assert hoisted(["", "host", ""], tied, 3) == [0, 2, 1]
    assert hoisted(["", "host", "host"], tied, 2) == [0, 1, 2]
    assert hoisted(["", "", "host"], [Dependency(0, 1, DATA)], 2) == [0, 1, 2]


def _reach(found: list[Any], i: int, side: str) -> set[int]:
    other = "after" if side == "before" else "before"
    seen, stack = set(), [i]
    while stack:
        k = stack.pop()
        new = {getattr(e, side) for e in found if getattr(e, other) == k} - seen
        seen |= new
        stack += new
    return seen


def chain(n: int = 12, check_at: tuple[int, ...] = (), op: str = "assert_finite") -> Program:
    """A chain of tanh, with ops that the host looks at."""
    b = Builder("chain")
    h = b.input("x", (4,))
    for k in range(n):
        h = b.op(op, h, name=f"look{k}") if k in check_at else b.tanh(b.mul(h, b.const(f"k{k}", np.float32(1.1))))
    b.output(h, "y")
    return b.build()


def kinds(plan: Plan) -> list[tuple[str, int]]:
    return [(r.kind, len(r.instrs)) for r in plan.regions()]


def test_regions_outside_graphs_have_reasons(sim: SimBackend) -> None:
    p = chain(14, (0, 6, 13))
    plan = p.compile(x=(4,), device="sim", executor="capture")
    assert kinds(plan) == [(PRE, 1), (CAPTURED, 10), (GAP, 1), (CAPTURED, 12), (POST, 1)]
    assert {w for r in plan.regions() if r.kind != CAPTURED for w in r.why} == {"the host reads its result"}
    assert plan.schedule.dispatches == 5
    short = chain(8, (2,)).compile(x=(4,), device="sim", executor="capture")  # 4 in front are too few
    assert kinds(short) == [(PRE, 5), (CAPTURED, 10)]
    assert "fewer than 8" in short.regions()[0].why[0]
    cpu = p.compile(x=(4,), executor="capture")
    assert [r.kind for r in cpu.regions()] == [PLAIN]
    assert set(cpu.regions()[0].why) == {"no graphs on cpu"}
    assert "no graphs to capture" in cpu.explain("look0")
    with pytest.raises(UsageError, match="CPU"):
        CaptureExecutable(cpu)


def test_a_renamed_op_keeps_its_region(sim: SimBackend) -> None:
    OPS["peek"], KERNELS["peek"] = OPS["assert_finite"], KERNELS["assert_finite"]
    try:
        plans = [
            chain(14, (0, 6), op).compile(x=(4,), device="sim", executor="capture") for op in ("assert_finite", "peek")
        ]
        assert plans[0].regions() == plans[1].regions()
    finally:
        del OPS["peek"], KERNELS["peek"]


def test_independent_instructions_move_out_of_graphs(sim: SimBackend) -> None:
    """Two looks at inputs stand in the middle of the program, and depend on nothing there."""
    b = Builder("moves")
    x, z = b.input("x", (4,)), b.input("z", (4,))
    h = x
    for _ in range(6):
        h = b.tanh(h)
    seen = b.op("assert_finite", z)
    for _ in range(4):
        h = b.tanh(h)
    b.output(b.add(h, seen), "y")
    b.output(b.op("assert_finite", b.neg(z)), "n")
    p = b.build()
    feeds = {"x": np.ones(4, np.float32), "z": np.full(4, 2, np.float32)}
    plan = p.compile(x=(4,), z=(4,), device="sim", executor="capture", layout="naive")  # no storage edge holds them
    assert kinds(plan) == [(PRE, 1), (CAPTURED, 12), (POST, 1)]
    space = CaptureExecutable(plan)
    for _ in range(5):
        for name, value in space.run(feeds).items():
            assert value.tobytes() == p.run(feeds)[name].tobytes()


# -- results -----------------------------------------------------------------------------------------------------------
@given(case=programs())
def test_captured_random_programs_have_the_bits_of_the_cpu(case) -> None:
    p, feeds = case
    shapes = {name: a.shape for name, a in feeds.items()}
    truth = p.compile(shapes, deterministic=True)(feeds)
    space = p.compile(shapes, device="sim", executor="capture").new_executable()
    assert isinstance(space, CaptureExecutable)
    for _ in range(4):
        for name, value in space.run(feeds).items():
            assert_bits(value.to(CPU), truth[name], what=name)
    assert space.state.name == ("captured" if any(r.kind == CAPTURED for r in space.regions) else "failed")
    space.release()


@pytest.mark.parametrize("name", CASES)
def test_captured_states_advance_once_a_step(name: str, sim: SimBackend) -> None:
    def steps(**options: Any) -> list[bytes]:
        p = two_states(lambda b, a, c, x: (CASES[name](b, a, c, x), b.output(b.add(a, c), "sum")))
        plan = p.compile(x=(2, 2), deterministic=True, **options)
        found = [plan(FEEDS)["sum"].tobytes() for _ in range(5)]
        return [*found, *(v.data.tobytes() for v in p.weights.values())]

    assert steps(device="sim", executor="capture") == steps()


def test_the_capture_state_and_dispatches_are_reported(sim: SimBackend) -> None:
    plan = chain(14, (0, 6)).compile(x=(4,), device="sim", executor="capture")
    space: Any = CaptureExecutable(plan, poison=True)
    rng, seen = np.random.default_rng(0), []
    oracle = chain(14, (0, 6))
    addresses: set[Any] = set()
    for k in range(50):
        seen.append(str(space.state))
        x = rng.normal(size=4).astype("f4")
        feed = x if k % 2 else from_numpy(x).to(SIM)
        launched, replayed = sim.driver.launches, sim.driver.replays
        got = space.run({"x": feed})["y"]
        used = sim.driver.launches - launched, sim.driver.replays - replayed
        assert got.tobytes() == oracle.run(x=x)["y"].tobytes()
        addresses.add(tuple(space.kernels.view(s).storage.block.address for s in plan.input_slots))
        if k > 2:  # poison, the feed, two looks, the copy of the output
            assert used == (1 + 1 + 2 + 1, 2)
            assert plan.schedule.dispatches == 2 + 2
    assert seen[:5] == ["cold", "warm(1)", "warm(2)", "captured", "captured"]
    assert {*seen[3:]} == {"captured"}
    assert len(addresses) == 1
    assert space.captures == 2


@pytest.mark.parametrize("make", [optim.AdamW, optim.RMSprop, optim.NAdam])
def test_a_captured_training_step_has_the_bits_of_the_cpu(sim: SimBackend, make: Any) -> None:
    found = {}
    for device in ("cpu", "sim"):
        step, feeds, (model, opt) = training(make)
        run = gw.compile(step, executor="aten" if device == "cpu" else "capture", device=device)
        losses = []
        for k in range(8):
            opt.lr = 0.01 / (k + 1)
            losses.append(run(*feeds.values()).to(CPU).numpy().tobytes())
        space = run.executable(*feeds.values())
        found[device] = losses + [v.data.tobytes() for v in model.variables().values()]
    assert space.state.name == "captured"
    assert space.captures == 1  # another learning rate is no other graph
    assert run.traces == 1
    assert max(len(r.instrs) for r in space.regions if r.kind == CAPTURED) > 10
    assert found["sim"] == found["cpu"]


def test_twenty_captured_tokens_equal_those_of_the_cpu(sim: SimBackend) -> None:
    """A prefill and single tokens: each signature has graphs of its own, and the length lives on the device."""
    assert decode("sim", 20, executor="capture") == decode("cpu", 20)


def test_each_signature_has_its_own_graphs(sim: SimBackend) -> None:
    b = Builder("lengths")
    x, n = b.input("x", ("T", 3)), b.state("n", np.zeros((), np.float32))
    b.assign(n, b.add(n, b.sum(x, axes=(0, 1))))
    b.output(b.mul(b.tanh(x), n), "y")
    p = b.build()
    oracle, run = p.fork(), gw.compile(p, device="sim", executor="capture")
    rng = np.random.default_rng(0)
    for length in (5, 1, 1, 5) * 4:
        fed = rng.normal(size=(length, 3)).astype("f4")
        assert run(x=fed)["y"].to(CPU).numpy().tobytes() == oracle.run(x=fed)["y"].tobytes()
        assert p.weights["n"].data.tobytes() == oracle.weights["n"].data.tobytes()
    plans = list(p.derived["plans"].values())
    assert [plan.executable().captures for plan in plans] == [1, 1]


# -- failures ----------------------------------------------------------------------------------------------------------
def counter() -> Program:
    b = Builder("counter")
    x, a = b.input("x", (4,)), b.state("a", np.zeros(4, np.float32))
    h = b.add(a, x)
    for _ in range(5):
        h = b.tanh(b.mul(h, x))
    b.assign(a, b.add(a, b.op("assert_finite", x)))
    b.output(h, "y")
    return b.build()


class Logged(SimDriver):
    """Notes the name of each call."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.log: list[str] = []

    def _tick(self, what: str, outside_capture: bool = False) -> None:
        self.log.append(what)
        super()._tick(what, outside_capture)


def test_results_and_state_survive_every_capture_failure() -> None:
    x = np.full(4, 0.5, np.float32)
    truth, oracle = [], counter()
    for _ in range(5):
        truth.append((oracle.run(x=x)["y"].tobytes(), oracle.weights["a"].data.tobytes()))
    k, fell_back, raised = 0, set(), set()
    while True:
        driver = Logged(SIM)
        use(SIM, SimBackend(SIM, driver))
        p = counter()
        space = CaptureExecutable(p.compile(x=(4,), device="sim", executor="capture"))

        def step(space: Executable = space, p: Program = p) -> tuple[bytes, bytes]:
            return space.run({"x": x})["y"].tobytes(), p.weights["a"].data.tobytes()

        assert [step(), step()] == truth[:2]
        began = driver.calls
        driver.fail_at = began + 1 + k
        made = None
        with suppress(GraphwrightError):
            made = step()
        failed_at = driver.log[began + k] if driver.calls > began + k else ""
        driver.fail_at = None
        assert not driver.capturing
        if made is not None:
            assert made == truth[2], failed_at
            if space.state.name == "failed":
                assert "InjectedFault" in str(space.state)
                assert step() == truth[3]  # plainly
                assert space.state.name == "failed"
                space.retry_capture()
                assert step() == truth[4]
                assert str(space.state) == "captured"
                fell_back.add(failed_at)
        else:  # an error outside the region: all of the step, or nothing of it
            raised.add(failed_at)
            now = p.weights["a"].data.tobytes()
            assert now in (truth[1][1], truth[2][1]), failed_at
            assert step() == truth[2 if now == truth[1][1] else 3]
        space.release()
        if not failed_at:
            break
        k += 1
    use(SIM)
    assert fell_back == {"begin_capture", "launch", "end_capture", "instantiate", "replay"}
    assert "synchronize" in raised


@pytest.mark.parametrize("planted", ["upload", "fallback", "table"])
def test_audit_refuses_non_capturable_operands(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is hidden from the plan, so that only the audit can see it."""
    backend = SimBackend(SIM, SimDriver(SIM))
    use(SIM, backend)
    try:
        b = Builder("planted")
        h = b.input("x", (4,), "bfloat16" if planted == "fallback" else "float32")
        scale = b.const("scale", np.float32(2.0))
        for _ in range(4):
            h = b.tanh(h)
        b.output(h if planted == "fallback" else b.mul(h, scale), "y")
        p = b.build()
        plan = p.compile(x=(4,), device="sim", executor="capture")
        assert kinds(plan) == [(CAPTURED, len(plan.instrs))]
        x = from_numpy(np.ones(4, np.float32))
        feed = gw.tensor(x.to_numpy()).to(bfloat16).data if planted == "fallback" else x
        truth = p.run(x=feed)["y"].tobytes()
        spaces = [CaptureExecutable(plan), CaptureExecutable(plan, require_capture=True)]
        if planted == "upload":
            for space in spaces:
                space.kernels._homes["scale"] = CPU
                monkeypatch.setattr(backend, "bind", _uploading(backend))
        elif planted == "fallback":
            backend.without = {"tanh": frozenset({bfloat16})}
        else:
            monkeypatch.setattr(backend, "needs", lambda *facts: Needs(allocates=True))
        for _ in range(4):
            assert spaces[0].run({"x": feed})["y"].tobytes() == truth
        assert spaces[0].state.name == "failed"
        assert spaces[0].captures == 0
        assert backend.driver.replays == 0
        for _ in range(2):
            spaces[1].run({"x": feed})
        with pytest.raises(CaptureRefused) as caught:
            spaces[1].run({"x": feed})
        assert (caught.value.op, caught.value.slot is not None) == ("mul" if planted == "upload" else "tanh", True)
        assert not backend.driver.capturing
    finally:
        use(SIM)


def _uploading(backend: SimBackend) -> Any:
    """A backend that sends operands of the host by itself, as a careless one would."""
    plain = backend.bind

    def bind(name: str, outs: Any, ins: list[NDArray], attrs: Any, work: Any = ()) -> list[Any]:
        return plain(name, outs, [a.to(SIM) for a in ins], attrs, work)

    return bind


def test_plan_without_capturable_instructions_reports_it(sim: SimBackend) -> None:
    plan = chain(3, (0, 1, 2)).compile(x=(4,), device="sim", executor="capture")
    space = CaptureExecutable(plan)
    assert space.state == CaptureState("failed", reason="the host reads its result")
    space.run({"x": np.ones(4, np.float32)})
    space.retry_capture()
    assert space.state.name == "failed"
    with pytest.raises(CaptureRefused):
        CaptureExecutable(plan, require_capture=True)


@pytest.mark.parametrize("what", ["stalls", "invalidates"])
def test_stalled_or_invalidated_recording_ends_once(
    what: str, sim: SimBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = chain(6)
    space = CaptureExecutable(p.compile(x=(4,), device="sim", executor="capture"), watchdog=0.05)
    x = np.ones(4, np.float32)
    for _ in range(2):
        space.run({"x": x})
    plain, ends = sim.driver.enqueue, []

    def enqueue(*work: Any) -> Any:
        if sim.driver.capturing:
            sleep(0.1) if what == "stalls" else sim.driver.invalidate(0)
        plain(*work)

    ended = sim.driver.end_capture
    monkeypatch.setattr(sim.driver, "enqueue", enqueue)
    monkeypatch.setattr(sim.driver, "end_capture", lambda stream: (ends.append(1), ended(stream))[1])
    assert space.run({"x": x})["y"].tobytes() == p.run(x=x)["y"].tobytes()
    assert ("took too long" if what == "stalls" else "invalidated") in str(space.state)
    assert not sim.driver.capturing
    assert ends == [1]


def test_captured_memory_is_pinned(sim: SimBackend) -> None:
    b = Builder("held")
    h = b.input("x", (4,))
    for _ in range(6):
        h = b.tanh(b.mul(h, b.param("w", np.float32(0.9)) if _ == 0 else h))
    b.output(h, "y")
    p = b.build()
    space = CaptureExecutable(p.compile(x=(4,), device="sim", executor="capture"))
    x, w = np.ones(4, np.float32), p.weights["w"]
    for _ in range(4):
        space.run({"x": x})
    assert space.kernels.arena is not None
    for give_back in (space.kernels.arena.chunks[0].close, sim.pool.reset):
        with pytest.raises(UsageError, match="captured graph"):
            give_back()
    other = from_numpy(np.full(4096, 9.0)).to(SIM)  # memory allocated between replays has another address
    assert space.run({"x": x})["y"].tobytes() == p.run(x=x)["y"].tobytes()
    captures = space.captures
    w.data.copy_from(from_numpy(np.asarray(0.3, np.float32)))  # a new value at the same address
    assert space.run({"x": x})["y"].tobytes() == p.run(x=x)["y"].tobytes()
    assert space.captures == captures
    w.data = from_numpy(np.asarray(0.7, np.float32))  # another array
    assert space.run({"x": x})["y"].tobytes() == p.run(x=x)["y"].tobytes()
    assert space.captures == captures + 1
    space.release()
    assert str(space.state) == "warm(2)"
    assert space.run({"x": x})["y"].tobytes() == p.run(x=x)["y"].tobytes()
    assert other.to_numpy().min() == 9.0
    del space
    sim.pool.reset()


def test_an_edit_recaptures_only_touched_regions(sim: SimBackend) -> None:
    p = chain(32, (10, 21))
    plan, x = p.compile(x=(4,), device="sim", executor="capture"), np.linspace(-1, 1, 4, dtype=np.float32)
    assert [kind for kind, _ in kinds(plan)] == [CAPTURED, GAP, CAPTURED, GAP, CAPTURED]
    space: Any = plan.executable()

    def run() -> int:
        """Regions recorded in a run of the program as it is."""
        plan, before = p.compile(x=(4,), device="sim", executor="capture"), space.captures
        assert plan.executable() is space
        for _ in range(2):
            assert plan(x=x)["y"].tobytes() == p.run(x=x)["y"].tobytes()
        assert plan.patched.kind == "patched" or not p.journal
        return space.captures - before

    assert [run() for _ in range(2)] == [0, 3]
    for k in ("tanh_3", "tanh_14", "tanh_28"):
        with p.edit("one region") as e:
            e.insert(p.in_edges(k)[0], "relu")
        assert run() == 1
    with p.edit("a new weight, at the end") as e:
        e.rewire(p.in_edges("tanh_30")[0], e.add("mul", "tanh_29", e.param("w", np.float32(0.5))))
    assert run() == 1
    with p.edit("a value of the first lives longer") as e:
        e.rewire(p.in_edges("tanh_30")[0], e.add("mul", "tanh_29", "tanh_2"))
    assert run() == 3  # the chain ran in one span; later values have other addresses now
    with p.edit("a name") as e:
        e.rename("look10", "seen")
    assert run() == 0
    for _ in range(3):
        p.undo()
    assert run() == 3
    p.undo()
    assert run() == 1
    assert str(space.state) == "captured"
    space.release()
    assert run() == 3
