"""Plans on several threads: the bits of the plan in order, whatever order the edges allow; errors and limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import programs
from test_plan_devices import decode, training
from test_plan_state import CASES, FEEDS, two_states

import graphwright as gw
from graphwright import optim
from graphwright.array.cpu.kernel import KERNELS, Kernel
from graphwright.array.ndarray import from_numpy
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import OPS
from graphwright.ops.registry import op
from graphwright.ops.rules import same
from graphwright.plan import (
    Cancelled,
    CancelToken,
    DeadlineExceeded,
    Executable,
    ParallelExecutable,
    Plan,
    StepTorn,
)
from graphwright.plan.planning.hazards import DATA, STATE, STORAGE, Dependency, dependencies
from graphwright.plan.running import parallel
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits


def plan_of(p: Program, feeds: dict[str, np.ndarray], **options: Any) -> Plan:
    return p.compile({name: a.shape for name, a in feeds.items()}, **{"executor": "aten", **options})


@contextmanager
def hooked(name: str, hook: Callable[[], object]) -> Iterator[str]:
    """An op that copies its operand and calls `hook` when it runs."""
    absent = ("vjp", "sample", "axes", "emit", "onnx")
    cells = {"__doc__": "x, and a call.", "arity": 1, "infer": staticmethod(same), **dict.fromkeys(absent)}
    op(name)(type(name, (), {**cells, "why": dict.fromkeys(absent, "an op of this test")}))
    KERNELS[name] = Kernel(lambda o, i, a, w: [hook, lambda: o[0].copy_(i[0])], None, "here:1")
    try:
        yield name
    finally:
        del OPS[name], KERNELS[name]


@contextmanager
def in_time(seconds: float = 5.0) -> Iterator[None]:
    """No hang and no lost thread."""
    threads, began = threading.active_count(), monotonic()
    yield
    assert monotonic() - began < seconds
    assert threading.active_count() <= threads


# -- the edges ---------------------------------------------------------------------------------------------------------
def shuffled(plan: Plan, found: tuple[Dependency, ...], seed: int) -> list[int]:
    """A random order that obeys the edges, the commit last."""
    rng = np.random.default_rng(seed)
    waits: list[set[int]] = [set() for _ in plan.instrs]
    for e in found:
        waits[e.after].add(e.before)
    order: list[int] = []
    while len(order) < len(plan.instrs):
        ready = [i for i, before in enumerate(waits) if i not in order and before <= {*order}]
        front = [i for i in ready if i < plan.commit_start]
        order.append(int(rng.choice(front or ready)))
    return order


def run_in(plan: Plan, order: list[int], feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    space = Executable(plan)
    space.feed(feeds)
    for i in order:
        space.run(plan[i : i + 1])
    return {name: space.value(slot) for name, slot in plan.outputs.items()}


@given(programs(most=20), st.sampled_from(["none", "exact"]), st.integers(0, 99))
def test_every_order_that_obeys_dependencies_has_equal_bits(case, rewrites: str, seed: int) -> None:
    p, feeds = case
    plan = plan_of(p, feeds, rewrites=rewrites)
    truth = Executable(plan).run(feeds)
    for name, value in run_in(plan, shuffled(plan, dependencies(plan), seed), feeds).items():
        assert_bits(value, truth[name], what=name)


def branches(n: int = 6, width: int = 32) -> tuple[Program, dict[str, np.ndarray]]:
    """Chains side by side whose memory is used again and again."""
    b = Builder("branches")
    x = b.input("x", (width, width))
    ends = []
    for k in range(n):
        h = b.mul(x, b.const(f"k{k}", np.float32(k + 1)))
        for _ in range(4):
            h = b.softmax(b.matmul(h, x))
        ends.append(h)
    b.output(b.junction(*ends), "y")
    b.output(b.add(ends[0], ends[0]), "twice")
    return b.build(), {"x": np.random.default_rng(0).normal(size=(width, width)).astype(np.float32)}


def test_without_storage_dependencies_live_data_is_overwritten() -> None:
    """The red twin: what the test above would not see otherwise."""
    p, feeds = branches()
    plan = plan_of(p, feeds)
    truth = Executable(plan).run(feeds)
    found = dependencies(plan)
    assert {e.kind for e in found} == {DATA, STORAGE}
    broken = tuple(e for e in found if e.kind == DATA)
    wrong = 0
    for seed in range(20):
        assert_bits(run_in(plan, shuffled(plan, found, seed), feeds)["y"], truth["y"])
        order = shuffled(plan, broken, seed)
        wrong += run_in(plan, order, feeds)["y"].to_numpy().tobytes() != truth["y"].to_numpy().tobytes()
    assert wrong > 10


@pytest.mark.parametrize("name", CASES)
def test_state_is_read_before_it_is_written(name: str) -> None:
    p = two_states(lambda b, a, c, x: (CASES[name](b, a, c, x), b.output(b.add(a, c), "sum")))
    plan = plan_of(p, FEEDS)
    start = {k: v.data.to_numpy().copy() for k, v in p.weights.items()}

    def results(order: list[int]) -> list[bytes]:
        for k, v in start.items():
            p.weights[k].data.copy_from(from_numpy(v))
        outs = run_in(plan, order, FEEDS)
        return [a.tobytes() for a in outs.values()] + [v.data.tobytes() for v in p.weights.values()]

    truth = results(list(range(len(plan.instrs))))
    for seed in range(10):
        assert results(shuffled(plan, dependencies(plan), seed)) == truth


def test_a_state_is_updated_in_place_after_its_readers() -> None:
    p = two_states(lambda b, a, c, x: (CASES["read after its update"](b, a, c, x), b.output(b.tanh(a), "t")))
    plan = plan_of(p, FEEDS)
    assert STATE in {e.kind for e in dependencies(plan)}


# -- threads -----------------------------------------------------------------------------------------------------------
@settings(max_examples=20)
@given(programs(most=20), st.integers(1, 4))
def test_threads_match_one_thread(case, threads: int) -> None:
    p, feeds = case
    for executor in ("aten", "vm"):
        plan = plan_of(p, feeds, executor=executor)
        truth = Executable(plan).run(feeds)
        space = ParallelExecutable(plan, threads=threads)
        for _ in range(2):
            for name, value in space.run(feeds).items():
                assert_bits(value, truth[name], what=name)
        space.close()


def test_threads_match_one_thread_under_heavy_memory_reuse() -> None:
    p, feeds = branches(width=96)
    plan = plan_of(p, feeds)
    truth = Executable(plan).run(feeds)
    space = ParallelExecutable(plan, threads=4)
    with in_time(20):
        for _ in range(30):
            for name, value in space.run(feeds).items():
                assert_bits(value, truth[name])
        space.close()


def test_a_training_step_has_equal_bits_on_one_and_several_threads() -> None:
    found = []
    for threads in (0, 3):
        step, feeds, (model, opt) = training(optim.AdamW)
        plan = gw.compile(step, executor="aten").plan(*feeds.values())
        space = ParallelExecutable(plan, threads=threads) if threads else Executable(plan)
        losses = []
        for k in range(5):
            opt.lr = 0.1 / (k + 1)
            losses += [a.tobytes() for a in space.run(feeds).values()]
        found.append([*losses, *(v.data.tobytes() for v in (*model.variables().values(), *opt.variables().values()))])
        if isinstance(space, ParallelExecutable):
            space.close()
    assert found[0] == found[1]


def test_a_fault_at_any_instruction_leaves_states_unchanged_or_raises_step_torn() -> None:
    step, feeds, (model, opt) = training(optim.AdamW)
    plan = gw.compile(step, executor="aten").plan(*feeds.values())
    space = ParallelExecutable(plan, threads=2)
    space.run(feeds)
    variables = [*model.variables().values(), *opt.variables().values()]
    assert len(plan.instrs) - plan.commit_start >= 1
    for at in range(len(plan.instrs)):
        before = [v.data.tobytes() for v in variables]
        calls = space._task_calls()
        calls[at] = [fails]
        space._task_calls = lambda calls=calls: calls  # type: ignore[method-assign]
        with pytest.raises(ComputeError) as caught:
            space.run(feeds)
        del space._task_calls
        if at < plan.commit_start:
            assert [v.data.tobytes() for v in variables] == before
            assert not isinstance(caught.value, StepTorn)
        elif [v.data.tobytes() for v in variables] != before:
            assert isinstance(caught.value, StepTorn)
    space.run(feeds)
    space.close()


def test_every_executor_generates_the_same_twenty_tokens() -> None:
    """In order, on threads, captured in graphs; the VM rounds otherwise and gives the same tokens."""
    truth = decode("cpu", 20)
    assert decode("cpu", 20, make=lambda plan, states: ParallelExecutable(plan, states, threads=2)) == truth
    vm = decode("cpu", 20, executor="vm")
    tokens = [[int(np.frombuffer(logits, np.float32).argmax()) for logits in found[:20]] for found in (truth, vm)]
    assert tokens[0] == tokens[1]


def two(hook: str, other: str) -> tuple[Program, dict[str, np.ndarray]]:
    """Two nodes side by side, and one that reads no operand at all."""
    b = Builder("two")
    x = b.input("x", (4,))
    b.output(b.add(b.op(hook, x, name="first"), b.op(other, b.neg(x), name="second")), "y")
    b.output(b.const("zero", np.zeros(3, np.float32)), "z")
    return b.build(), {"x": np.ones(4, np.float32)}


def test_independent_nodes_run_concurrently() -> None:
    barrier = threading.Barrier(2)
    with hooked("meet", lambda: barrier.wait(4)), in_time():
        p, feeds = two("meet", "meet")
        space = ParallelExecutable(plan_of(p, feeds, layout="naive"), threads=2)  # no storage edge keeps them apart
        for _ in range(3):
            assert space.run(feeds)["y"].to_numpy().tolist() == [0, 0, 0, 0]
        space.close()


def fails() -> None:
    raise RuntimeError("it broke")


def test_first_error_is_raised_after_running_instructions_finish() -> None:
    ended = []

    def slow() -> None:
        sleep(0.3)
        ended.append(1)

    with hooked("fails", fails), hooked("slow", slow), in_time():
        p, feeds = two("slow", "fails")
        space = ParallelExecutable(plan_of(p, feeds, layout="naive"), threads=2)
        for n in (1, 2):
            with pytest.raises(ComputeError, match="it broke") as caught:
                space.run(feeds)
            assert "second" in str(caught.value)
            assert any("second reads" in note for note in caught.value.__notes__)
            assert len(ended) == n
        space.close()


def test_a_failed_or_stopped_step_leaves_states_alone() -> None:
    token = CancelToken()
    for name, stop, expected in (
        ("fails", fails, ComputeError),
        ("cancels", token.cancel, Cancelled),
        ("lasts", lambda: sleep(0.2), DeadlineExceeded),
    ):
        with hooked(name, stop), in_time():
            b = Builder("step")
            a, x = b.state("a", np.zeros(2, np.float32)), b.input("x", (2,))
            b.assign(a, b.add(a, x))
            b.output(b.neg(b.op(name, x)), "y")
            p, feeds = b.build(), {"x": np.ones(2, np.float32)}
            space = ParallelExecutable(plan_of(p, feeds), threads=2)
            late = name == "lasts"
            with pytest.raises(expected):
                space.run(feeds, cancel=None if late else token, deadline=0.1 if late else None)
            assert p.weights.array("a").to_numpy().tolist() == [0, 0]
            space.close()
    with pytest.raises(TimeoutError):
        raise DeadlineExceeded("too late")


def test_a_run_cancelled_after_an_early_update_raises_step_torn() -> None:
    token = CancelToken()
    with hooked("cancels", token.cancel):
        b = Builder("cache")
        cache = b.state("cache", np.zeros((1, 1, 4, 2), np.float32))
        rows, at = b.input("rows", (1, 1, 1, 2)), b.input("at", (), "int64")
        new = b.op("kv_append", cache, rows, at)
        b.assign(cache, new)
        b.output(b.neg(b.op("cancels", b.tanh(new))), "y")
        p = b.build()
        plan = p.compile(rows=(1, 1, 1, 2), at=(), deterministic=True)
        assert plan.early
        with pytest.raises(StepTorn) as caught:
            ParallelExecutable(plan, threads=1).run(
                {"rows": np.ones((1, 1, 1, 2), np.float32), "at": np.int64(1)}, cancel=token
            )
        assert caught.value.keys == ("cache",)


def test_a_cancelled_token_runs_nothing() -> None:
    token, seen = CancelToken(), []
    token.cancel()
    with hooked("seen", lambda: seen.append(1)):
        p, feeds = two("seen", "seen")
        space = ParallelExecutable(plan_of(p, feeds), threads=2)
        with pytest.raises(Cancelled, match="cancelled"):
            space.run(feeds, cancel=token)
        assert not seen
        space.run(feeds)
        assert len(seen) == 2
        space.close()


def test_each_of_two_threads_has_its_own_token() -> None:
    """The second waits until the first has run, which must neither take nor drop the token of the second."""
    inside, go, token, results = threading.Event(), threading.Event(), CancelToken(), []

    def hold() -> None:
        inside.set()
        go.wait(4)

    with hooked("hold", hold), in_time():
        p, feeds = two("hold", "hold")
        space = ParallelExecutable(plan_of(p, feeds), threads=1)

        def first() -> None:
            results.append(space.run(feeds)["y"].to_numpy().tolist())

        def second() -> None:
            with pytest.raises(Cancelled) as caught:
                space.run(feeds, cancel=token)
            results.append(caught.value)

        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        threads[0].start()
        inside.wait(4)
        token.cancel()
        threads[1].start()
        threads[1].join(0.1)
        go.set()
        for thread in threads:
            thread.join()
        assert results[0] == [0, 0, 0, 0]
        assert isinstance(results[1], Cancelled)


def test_nested_parallel_run_raises() -> None:
    p, feeds = branches(2)
    inner = ParallelExecutable(plan_of(p, feeds), threads=2)
    with hooked("nests", lambda: inner.run(feeds)), in_time():
        q, x = two("nests", "copy")
        outer = ParallelExecutable(plan_of(q, x), threads=2)
        with pytest.raises(ComputeError, match="nested parallel run"):
            outer.run(x)
        outer.close()
    inner.run(feeds)
    inner.close()
    with pytest.raises(UsageError, match="thread"):
        ParallelExecutable(inner.plan, threads=0)


def test_ignoring_dependencies_changes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor itself goes by the edges: without those of storage, it computes something else."""
    p, feeds = branches()
    plan = plan_of(p, feeds)
    truth = Executable(plan).run(feeds)["y"].tobytes()
    monkeypatch.setattr(parallel, "dependencies", lambda plan: tuple(e for e in dependencies(plan) if e.kind == DATA))
    space = ParallelExecutable(plan, threads=1)
    monkeypatch.setattr(parallel, "heappop", lambda ready: ready.pop())  # another order that the edges allow
    assert space.run(feeds)["y"].tobytes() != truth
