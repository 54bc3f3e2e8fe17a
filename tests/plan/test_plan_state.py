"""Carried state: reads see the step's start, writes come together at its end, and a failed step changes nothing."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.array import Spec, from_numpy, int64
from graphwright.autograd import Parameter, Tensor, Variable, grad, tensor, update
from graphwright.errors import ComputeError, IndexOutOfRange
from graphwright.plan import CompileOptions, Executable, Plan, StepTorn, make_plan
from graphwright.program import Builder, Program
from values import array_of

pytestmark = pytest.mark.usefixtures("young_heap")

A, B = np.arange(4, dtype=np.float32).reshape(2, 2), np.full((2, 2), 7.0, np.float32)


def check(p: Program, feeds: dict[str, np.ndarray], steps: int = 3) -> Plan:
    """Plans, poisoned or not, and the interpreted run give equal outputs and states, step by step."""
    keys = list(p.weights)
    start = {k: p.weights.array(k).to_numpy().copy() for k in keys}

    def reset() -> None:
        for k in keys:
            p.weights.array(k).copy_from(from_numpy(start[k]))

    specs = {p.path(n): p.spec(n) for n in p.inputs()}
    truth = []
    for _ in range(steps):
        run = p.run(feeds)
        truth.append(([run[n].to_numpy().copy() for n in run], [p.weights.array(k).to_numpy().copy() for k in keys]))
    for rewrites in ("exact", "none"):
        plan = make_plan(p, specs, options=CompileOptions(rewrites=rewrites, deterministic=True))
        for poison in (False, True):
            reset()
            space = Executable(plan, poison=poison)
            for outs, states in truth:
                result = space.run(feeds)
                assert [result[n].to_numpy().tobytes() for n in p.output_names()] == [o.tobytes() for o in outs]
                assert [p.weights.array(k).to_numpy().tobytes() for k in keys] == [s.tobytes() for s in states]
    reset()
    return plan


def two_states(write) -> Program:
    b = Builder()
    a, c = b.state("a", A), b.state("b", B)
    x = b.input("x", (2, 2))
    write(b, a, c, x)
    return b.build()


FEEDS = {"x": np.ones((2, 2), np.float32) * 0.5}

CASES = {
    "swap": lambda b, a, c, x: (b.assign(a, c), b.assign(c, a)),
    "shift": lambda b, a, c, x: (b.assign(a, c), b.assign(c, x)),
    "read after its update": lambda b, a, c, x: (
        b.assign(a, b.add(a, x, name="new")),
        b.output(b.mul(b.tanh(b.exp(x)), a), "y"),
    ),
    "old value is an output": lambda b, a, c, x: (b.assign(a, b.add(a, x)), b.output(a, "y")),
    "view of the old value is an output": lambda b, a, c, x: (
        b.assign(a, b.add(a, x)),
        b.output(b.permute(a, axes=(1, 0)), "y"),
    ),
    "old and new are outputs": lambda b, a, c, x: (b.output(_carry_new(b, a, x), "new"), b.output(a, "old")),
    "its own transpose": lambda b, a, c, x: b.assign(a, b.permute(a, axes=(1, 0))),
    "itself": lambda b, a, c, x: (b.assign(a, a), b.output(b.add(a, x), "y")),
    "sum with its transpose": lambda b, a, c, x: b.assign(a, b.add(a, b.permute(a, axes=(1, 0)))),
    "sum with a row of itself": lambda b, a, c, x: b.assign(a, b.add(b.slice(a, axis=0, start=1, size=1), x)),
    "twice itself": lambda b, a, c, x: b.assign(a, b.add(a, a)),
    "old value becomes another's": lambda b, a, c, x: (b.assign(a, b.add(a, x)), b.assign(c, a)),
    "new value becomes both": lambda b, a, c, x: _both(b, a, c, x),
    "the input": lambda b, a, c, x: (b.assign(a, x), b.output(a, "y")),
    "a constant": lambda b, a, c, x: (b.assign(a, b.const("k", B * 2)), b.output(a, "y")),
    "through an op that cannot run in place": lambda b, a, c, x: b.assign(a, b.matmul(a, x)),
    "two that read each other": lambda b, a, c, x: (b.assign(a, b.add(a, c)), b.assign(c, b.mul(c, a))),
    "new value is read in the step": lambda b, a, c, x: _read_new(b, a, x),
    "nothing else": lambda b, a, c, x: b.assign(a, b.add(a, x)),
}


def _carry_new(b, a, x):
    new = b.add(a, x)
    b.assign(a, new)
    return new


def _both(b, a, c, x) -> None:
    new = _carry_new(b, a, x)
    b.assign(c, new)


def _read_new(b, a, x) -> None:
    b.output(b.exp(_carry_new(b, a, x)), "y")


@pytest.mark.parametrize("name", CASES)
def test_programs_with_two_states_match_runs(name: str) -> None:
    p = two_states(lambda b, a, c, x: (CASES[name](b, a, c, x), b.output(b.add(a, c), "sum")))
    check(p, FEEDS)


@pytest.mark.parametrize("name", ["nothing else", "two that read each other"])
def test_unread_updates_are_in_place_at_the_end(name: str) -> None:
    p = two_states(lambda b, a, c, x: (CASES[name](b, a, c, x), b.output(b.tanh(x), "y")))
    plan = check(p, FEEDS)
    if name == "nothing else":
        assert not plan.commits
        assert [i.op for i in plan.instrs[plan.commit_start :]] == ["add"]
        assert not plan.early


def test_a_read_of_the_old_value_after_the_update_forces_a_copy() -> None:
    p = two_states(lambda b, a, c, x: (b.assign(a, b.add(a, x)), b.assign(c, b.mul(c, a)), b.output(b.tanh(x), "y")))
    plan = check(p, FEEDS)
    assert [why for why in plan.commits.values()] == ["the old value is read after the new one is made"]


@st.composite
def stateful(draw) -> Program:
    b = Builder()
    x = b.input("x", (2, 2))
    states = [b.state(f"s{i}", A + i) for i in range(draw(st.integers(1, 3)))]
    pool = [x, *states]
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["add", "mul", "tanh", "permute", "matmul", "row", "junction"]))
        one, two = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        pool.append(
            {
                "add": lambda a, c: b.add(a, c),
                "mul": lambda a, c: b.mul(a, c),
                "tanh": lambda a, c: b.tanh(a),
                "permute": lambda a, c: b.permute(a, axes=(1, 0)),
                "matmul": lambda a, c: b.matmul(a, b.tanh(c)),
                "row": lambda a, c: b.add(b.slice(a, axis=0, start=1, size=1), c),
                "junction": lambda a, c: b.junction(a, c, a),
            }[kind](one, two)
        )
    for s in draw(st.lists(st.sampled_from(states), unique=True, min_size=1)):
        b.assign(s, draw(st.sampled_from(pool)))
    for i in range(draw(st.integers(0, 2))):
        b.output(draw(st.sampled_from(pool)), f"y{i}")
    return b.build()


@given(stateful())
def test_random_stateful_programs_match_runs(p: Program) -> None:
    check(p, FEEDS, steps=2)


class _Failing:
    """Bound calls of a executable with one replaced by a failure."""

    def __init__(self, plan: Plan, at: int) -> None:
        self.space = Executable(plan)
        self.space.kernels.bind()
        calls = self.space.kernels.calls

        def fail() -> None:
            raise RuntimeError("planted")

        calls[0 if at == 0 else self.space.kernels.call_ends[at - 1]] = fail


def _training() -> tuple[Program, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    w = Parameter(from_numpy(rng.normal(size=(3, 2)).astype("f4")), name="w")
    m, v = (Variable(from_numpy(np.zeros((3, 2), "f4")), name=n) for n in "mv")
    t = Variable(from_numpy(np.zeros((), "f4")), name="t")

    def step(x: Tensor) -> Tensor:
        loss = ((x @ w.T).tanh() * 0.5).sum()
        (g,) = grad(loss, w)
        update([w, m, v, t], "adamw_step", tensor(np.float64(0.1)), tensor(np.float32(0)), g, w, m, v, t)
        return loss

    p = gw.trace(step, np.ones((4, 2), np.float32))
    return p, {"x": rng.normal(size=(4, 2)).astype("f4")}


def test_a_failure_before_the_commit_changes_no_state() -> None:
    p, feeds = _training()
    plan = make_plan(p, {"x": Spec((4, 2), p.spec("x").dtype)}, options=CompileOptions(deterministic=True))
    assert 0 < plan.commit_start < len(plan.instrs)
    keys = [k for k in p.weights if p.weights[k].name in ("w", "m", "v", "t")]
    before = {k: p.weights.array(k).tobytes() for k in keys}
    for at in range(plan.commit_start + 1):
        with pytest.raises(ComputeError, match="planted") as caught:
            _Failing(plan, at).space.run(feeds)
        assert {k: p.weights.array(k).tobytes() for k in keys} == before, plan.instrs[at]
        assert p.path(plan.instrs[at].node) in str(caught.value)
        assert "reads" in caught.value.__notes__[0]
    for at in range(plan.commit_start + 1, len(plan.instrs)):
        with pytest.raises(StepTorn) as torn:
            _Failing(plan, at).space.run(feeds)
        changed = {k for k in keys if p.weights.array(k).tobytes() != before[k]}
        assert set(torn.value.keys) == changed
        for k in keys:
            p.weights.array(k).copy_from(from_numpy(np.frombuffer(before[k], "f4").reshape(p.weights[k].shape)))


def _cache(read_new: bool) -> Program:
    b = Builder()
    cache = b.state("cache", np.zeros((1, 1, 4, 2), np.float32))
    rows, start = b.input("rows", (1, 1, 2, 2)), b.input("start", (), int64)
    new = b.kv_append(cache, rows, start)
    b.assign(cache, new)
    b.output(b.sum(new if read_new else cache, axes=(0, 1, 2, 3)), "y")
    return b.build()


@pytest.mark.parametrize("read_new", [True, False])
def test_a_cache_is_appended_in_place_and_read_in_the_same_step(read_new: bool) -> None:
    p = _cache(read_new)
    feeds = {"rows": np.ones((1, 1, 2, 2), np.float32), "start": np.asarray(1)}
    plan = check(p, feeds)
    assert not plan.commits
    assert bool(plan.early) == read_new
    assert plan.of("kv_append")[0].outs[0] != plan.of("kv_append")[0].ins[0]
    assert plan.slots[plan.of("kv_append")[0].outs[0]].buffer == plan.slots[plan.of("kv_append")[0].ins[0]].buffer


@pytest.mark.parametrize("start", [3, 4, -1])
def test_an_append_past_the_end_writes_nothing(start: int) -> None:
    p = _cache(True)
    plan = make_plan(p, {p.path(n): p.spec(n) for n in p.inputs()}, options=CompileOptions(deterministic=True))
    for run in (plan, p.run):
        with pytest.raises(IndexOutOfRange, match="kv_append"):
            run({"rows": np.ones((1, 1, 2, 2), np.float32), "start": np.asarray(start)})
        assert not p.weights.array("cache").to_numpy().any()


def test_failure_after_an_early_update_names_the_state() -> None:
    p = _cache(True)
    plan = make_plan(p, {p.path(n): p.spec(n) for n in p.inputs()}, options=CompileOptions(deterministic=True))
    with pytest.raises(StepTorn, match="cache") as torn:
        _Failing(plan, len(plan.instrs) - 1).space.run(
            {"rows": np.ones((1, 1, 2, 2), np.float32), "start": np.asarray(0)}
        )
    assert torn.value.keys == ("cache",)


def test_a_read_only_weight_is_copied_before_its_first_write() -> None:
    host = A.copy()
    host.flags.writeable = False
    b = Builder()
    w = b.param("w", Parameter(from_numpy(host), name="w"))
    b.assign(w, b.add(w, w))
    b.output(b.sum(w, axes=(0, 1)), "y")
    p = b.build()
    plan = make_plan(p, {}, options=CompileOptions(deterministic=True))
    plan({})
    assert plan({})["y"].item() == 2 * A.sum()
    assert np.array_equal(host, A)
    assert np.array_equal(p.weights.array("w").to_numpy(), 4 * A)


def test_one_value_can_be_assigned_to_two_states_that_it_reads() -> None:
    b = Builder()
    one, two = b.state("one", A), b.state("two", A + 1)
    total = b.add(one, two)
    b.assign(one, total)
    b.assign(two, total)
    p = b.build()
    plan = make_plan(p, {}, options=CompileOptions(deterministic=True))
    plan({})
    plan({})
    assert list(plan.commits.values()) == ["the new value is in another state's memory"]
    assert all(p.weights.array(k).tobytes() == (2 * (A + A + 1)).tobytes() for k in ("one", "two"))


def test_a_plan_can_run_on_other_variables_than_those_of_its_program() -> None:
    p = _cache(True)
    plan = make_plan(p, {p.path(n): p.spec(n) for n in p.inputs()}, options=CompileOptions(deterministic=True))
    mine = Variable(from_numpy(np.zeros((1, 1, 4, 2), np.float32)))
    feeds = {"rows": np.ones((1, 1, 2, 2), np.float32), "start": np.asarray(0)}
    Executable(plan, {"cache": mine}).run(feeds)
    assert mine.numpy().sum() == 4
    assert not p.weights.array("cache").to_numpy().any()


@pytest.mark.parametrize("name", CASES)
def test_calling_a_program_writes_its_states_together_eagerly_and_traced(name: str) -> None:
    def fresh() -> Program:
        return two_states(lambda b, a, c, x: (CASES[name](b, a, c, x), b.output(b.add(a, c), "sum")))

    p, q, r = fresh(), fresh(), fresh()
    compiled = gw.compile(lambda x: r(x=x), executor="aten")
    for _ in range(2):
        truth, eager, traced = p.run(FEEDS), q(x=tensor(FEEDS["x"])), compiled(tensor(FEEDS["x"]))
        for label in p.output_names():
            one, two = (t if isinstance(t, Tensor) else t[label] for t in (eager, traced))
            assert truth[label].tobytes() == array_of(one).tobytes() == array_of(two).tobytes()
        for key in p.weights:
            assert p.weights.array(key).tobytes() == q.weights.array(key).tobytes() == r.weights.array(key).tobytes()


def test_every_run_raises_the_version_of_written_variables_only() -> None:
    b = Builder()
    x, s = b.input("x", (2, 2)), b.state("s", A)
    k = b.const("k", A)
    b.assign(s, b.add(s, b.mul(x, k)))
    p = b.build()
    storage, other = (p.weights.array(key).storage for key in ("s", "k"))
    plan = make_plan(p, {"x": p.spec("x")}, options=CompileOptions(deterministic=True))
    spaces = [Executable(plan) for _ in range(2)]
    seen = [storage.version]
    for i in (0, 1, 0):
        spaces[i].run(FEEDS)
        storage = p.weights.array("s").storage
        seen.append(storage.version)
    storage.version += 1
    seen.append(storage.version)
    assert seen == sorted(set(seen))
    assert other.version == 0
    last = storage.version
    del spaces
    gc.collect()
    Executable(plan).run(FEEDS)  # the counts of memory that is gone are folded
    assert storage.version > last
    assert len(storage._counts) == 1


# -- repeated runs -----------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("how", ["vm", "aten", "poison", "safe", "sim"])
def test_repeated_runs_equal_single_runs(how: str) -> None:
    def count() -> Program:
        b = Builder("count")
        total, x = b.state("total", np.zeros(3, np.float32)), b.input("x", (3,))
        new = b.add(total, x)
        b.assign(total, new)
        b.output(b.mul(new, b.tanh(x)), "y")
        return b.build()

    def again(y: np.ndarray) -> bool:
        seen.append(y.tolist())
        x[...] += 1
        return len(seen) < 5

    options: dict[str, Any] = {"executor": how} if how in ("vm", "aten") else {"device": how} if how == "sim" else {}
    space = Executable(count().compile(x=(3,), **options), poison=how == "poison", safe=how == "safe")
    x, seen = np.array([0.5, -1, 2], np.float32), []
    space.run_while([x], "y", again)
    single, x = count(), np.array([0.5, -1, 2], np.float32)
    for k in range(5):
        np.testing.assert_allclose(seen[k], single.run({"x": x + k})["y"].to_numpy(), rtol=1e-6)
    assert len(seen) == 5
