"""An arena for all plans that run one after another: as large as the largest, never two runs at once in it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array import CPU, Device, Storage, backend
from graphwright.array.backend import use
from graphwright.errors import UsageError
from graphwright.plan import Executable, PlanOutOfMemory, StaleBorrow
from graphwright.plan.running.executable import BoundCall
from graphwright.plan.running.memory import shared_arena
from graphwright.program import Builder, Program
from graphwright.testing.simulated_device import SimBackend, SimDriver

pytestmark = pytest.mark.usefixtures("young_heap")


def net() -> Program:
    b = Builder("net")
    h = b.input("x", ("T", 8))
    for _ in range(3):
        h = b.softmax(b.tanh(h))
    b.output(h, "y")
    return b.build()


def feed(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, 8)).astype("f4")


@pytest.fixture(autouse=True)
def _alone() -> None:
    gc.collect()


def chunks(plans: list) -> dict[int, Storage]:
    """What the arenas of the plans' own executables are made of, each once."""
    arenas = [space.kernels.arena for space in (p.executable() for p in plans) if space.kernels.arena is not None]
    return {id(chunk): chunk for arena in arenas for chunk in arena.chunks}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_plans_of_twenty_shapes_share_the_largest_arena(lengths: list[int]) -> None:
    p = net()
    plans = []
    for n in lengths:
        plans.append(p.compile(x=(n, 8), deterministic=True))
        assert plans[-1](x=feed(n))["y"].tobytes() == p.run(x=feed(n))["y"].tobytes()
    (held,) = chunks(plans).values()
    assert held is shared_arena(backend(CPU))._chunks[0]()  # plans of other tests may be alive, and hold more of them
    assert held.nbytes >= max(plan.arena_bytes for plan in plans)
    for n, plan in zip(lengths[::-1], plans[::-1], strict=True):
        assert plan(x=feed(n))["y"].tobytes() == p.run(x=feed(n))["y"].tobytes()
    assert list(chunks(plans).values()) == [held]


def test_separate_executables_allocate_the_sum() -> None:
    """What the shared one is compared with."""
    p = net()
    spaces = [Executable(p.compile(x=(n, 8), deterministic=True)) for n in (5, 10, 20)]
    for n, space in zip((5, 10, 20), spaces, strict=True):
        space.run({"x": feed(n)})
    assert len({id(chunk) for s in spaces if s.kernels.arena is not None for chunk in s.kernels.arena.chunks}) == 3


def test_reading_an_arena_that_another_plan_used_raises() -> None:
    p = net()
    small, large = p.compile(x=(2, 8), watch=("tanh",), deterministic=True), p.compile(x=(9, 8), deterministic=True)
    small(x=feed(2))
    kept = small.executable().watched("tanh").tobytes()
    borrow = small(x=feed(2), borrow=True)["y"]
    assert borrow.to_numpy().shape == (2, 8)
    large(x=feed(9))
    for ask in (lambda: small.executable().watched("tanh"), lambda: small.executable().run(small[1:2])):
        with pytest.raises(UsageError, match="different plan"):
            ask()
    with pytest.raises(StaleBorrow):
        borrow.to_numpy()
    small(x=feed(2))
    assert small.executable().watched("tanh").tobytes() == kept


def test_bound_memory_is_not_shared() -> None:
    p = net()
    small, large = p.compile(x=(2, 8), deterministic=True), p.compile(x=(9, 8), deterministic=True)
    small(x=feed(2))
    bound = BoundCall(small.executable())
    bound.inputs["x"][:] = feed(2)
    large(x=feed(9))
    bound()
    assert bound.outputs["y"].tobytes() == p.run(x=feed(2))["y"].tobytes()


def test_concurrent_plans_use_two_arenas() -> None:
    p = net()
    plans = [p.compile(x=(n, 8), deterministic=True) for n in (64, 65)]
    truth = [p.run(x=feed(n))["y"].tobytes() for n in (64, 65)]
    wrong: list[int] = []
    start = threading.Barrier(2)

    def work(k: int) -> None:
        start.wait(5)
        wrong.extend(k for _ in range(200) if plans[k](x=feed(64 + k))["y"].tobytes() != truth[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_nested_plan_uses_its_own_arena() -> None:
    p = net()
    outer, inner = p.compile(x=(4, 8), deterministic=True), p.compile(x=(3, 8), deterministic=True)
    found = []
    (y,) = outer.output_slots
    with outer.override(lambda ins, outs: found.append((inner(x=feed(3)), outs[y].copy_from(outs[y])))):
        outer(x=feed(4))
    assert found[0][0]["y"].tobytes() == p.run(x=feed(3))["y"].tobytes()
    mine, theirs = inner.executable().kernels.arena, outer.executable().kernels.arena
    assert mine is not None
    assert theirs is not None
    assert mine.chunks[0] is not theirs.chunks[0]


def test_out_of_memory_reports_sizes_and_other_plans_still_run() -> None:
    p = net()
    fits, huge = p.compile(x=(4, 8), deterministic=True), p.compile(x=(1 << 44, 8), deterministic=True)
    truth = fits(x=feed(4))["y"].tobytes()
    for space in (huge.executable(), Executable(huge)):
        with pytest.raises(PlanOutOfMemory, match="arena on cpu") as caught:
            space.kernels.refresh()
        assert (
            caught.value.needed == huge.arena_bytes >= caught.value.lower_bound >= caught.value.largest[0][0] > 1 << 48
        )
        assert {path for _, path in caught.value.largest} <= {p.path(n) for n in p.nodes()}
    assert fits(x=feed(4))["y"].tobytes() == truth
    small = SimBackend(Device("sim:3"), SimDriver(Device("sim:3"), capacity=1 << 22))
    use(Device("sim:3"), small)
    fits, large = (p.compile(x=(n, 8), device="sim:3", deterministic=True) for n in (4, 1 << 18))
    assert fits(x=feed(4))["y"].tobytes() == truth
    with pytest.raises(PlanOutOfMemory, match="sim:3"):
        large.executable().kernels.refresh()
    assert fits(x=feed(4))["y"].tobytes() == truth


@pytest.mark.parametrize("rows", [2**58, 2**61, 2**63])
def test_sizes_beyond_any_memory_raise_out_of_memory(rows: int) -> None:
    p = net()
    fits = p.compile(x=(4, 8), deterministic=True)
    with pytest.raises(PlanOutOfMemory, match="any machine") as caught:
        p.compile(x=(rows, 8), deterministic=True)
    error = caught.value
    assert error.needed == error.lower_bound == error.largest[0][0] == rows * 8 * 4
    assert {path for _, path in error.largest} <= {p.path(n) for n in p.nodes()}
    assert all((error.where, error.expected, error.got, error.fix))
    assert fits(x=feed(4))["y"].tobytes() == p.run(x=feed(4))["y"].tobytes()


def test_arena_is_freed_with_the_last_plan() -> None:
    p = net()
    rows = 5000 + shared_arena(backend(CPU)).nbytes // 32  # more than plans of other tests hold
    p.compile(x=(rows, 8), deterministic=True)(x=feed(rows))
    assert shared_arena(backend(CPU)).nbytes >= rows * 8 * 4
    del p
    gc.collect()
    assert shared_arena(backend(CPU)).nbytes < rows * 8 * 4


def test_a_patched_plan_takes_over_the_shared_executable() -> None:
    """Memory and calls stay over an edit; what another plan left in between is refused, and runs keep their bits."""
    p = net()
    old, other = p.compile(x=(6, 8), deterministic=True), p.compile(x=(30, 8), deterministic=True)
    old(x=feed(6))
    space = old.executable()
    with p.edit("one more") as e:
        e.insert(p.out_edges(p.node("softmax"))[0], "neg")
    new = p.compile(x=(6, 8), deterministic=True)
    assert new.executable() is space
    assert new.patched.kind == "patched"
    assert new(x=feed(6))["y"].tobytes() == p.run(x=feed(6))["y"].tobytes()
    other(x=feed(30))
    with p.edit("and another") as e:
        e.insert(p.out_edges(p.node("softmax"))[0], "tanh")
    last = p.compile(x=(6, 8), deterministic=True)
    assert last.executable() is space
    with pytest.raises(UsageError, match="different plan"):
        space.value(last.output_slots[0])
    assert last(x=feed(6))["y"].tobytes() == p.run(x=feed(6))["y"].tobytes()
    assert new.executable() is not space


def test_patching_inside_a_run_keeps_the_running_arena() -> None:
    p, q = net(), net()
    inner, outer = p.compile(x=(4, 8), deterministic=True), q.compile(x=(40, 8), deterministic=True)
    inner(x=feed(4))
    space, seen = inner.executable(), []

    def fn(ins, outs) -> None:
        with p.edit("inside") as e:
            e.insert(p.out_edges(p.node("softmax"))[0], "neg")
        new = p.compile(x=(4, 8), deterministic=True)
        seen.append((new.executable() is space, new(x=feed(4))["y"].tobytes()))
        outs[outer.output_slots[0]].copy_from(ins[outer.input_slots[0]])

    with outer.override(fn):
        outer(x=feed(40))
    assert seen == [(False, p.run(x=feed(4))["y"].tobytes())]
