"""A plan patched after edits gives the bits of one made from nothing, and looks at what the edits touched alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import programs

from graphwright.array import CPU, backend, from_numpy
from graphwright.errors import GraphwrightError
from graphwright.plan import CompileOptions, Executable, Plan, make_plan
from graphwright.plan.planning.native import loops
from graphwright.program import Builder, Program
from graphwright.testing.oracle import assert_bits

UNARY = ["neg", "tanh", "relu", "copy"]


def plan_of(p: Program, before: Plan | None = None, **options) -> Plan:
    return make_plan(
        p,
        {p.path(n): p.spec(n) for n in p.inputs()},
        options=CompileOptions(deterministic=True, **options),
        before=before,
    )


def edit_at_random(p: Program, draw) -> None:
    """One edit or undo; what the program refuses changes nothing."""
    kind = draw(st.sampled_from(["insert", "rewire", "add", "cut", "output", "rename", "undo", "redo", "attr"]))
    edges = sorted(p.graph.edges())
    nodes = [n for n in p.order() if p.specs(n)]
    with suppress(GraphwrightError):
        if kind in ("undo", "redo"):
            getattr(p, kind)()
            return
        with p.edit(kind) as e:
            if kind == "insert" and edges:
                e.insert(draw(st.sampled_from(edges)), draw(st.sampled_from(UNARY)))
            elif kind == "rewire" and edges:
                edge = draw(st.sampled_from(edges))
                like = [n for n in nodes if p.spec(n) == p.spec(p.edge_value(edge))]
                e.rewire(edge, draw(st.sampled_from(like)))
            elif kind == "cut" and edges:
                e.cut(draw(st.sampled_from(edges)))
            elif kind == "add":
                a = draw(st.sampled_from(nodes))
                made = e.add(draw(st.sampled_from(UNARY)), a)
                e.set_outputs(**dict(zip(p.output_names(), p.outputs(), strict=True)), **{f"o{len(p.journal)}": made})
            elif kind == "output":
                names = p.output_names()
                e.set_outputs(**{name: p.value(draw(st.sampled_from(nodes))) for name in names[:1]})
            elif kind == "rename":
                e.rename(draw(st.sampled_from([n for n in nodes if p.op(n) != "input"])), f"new{len(p.journal)}")
            elif kind == "attr":
                casts = [n for n in nodes if p.op(n) == "cast"]
                if casts:
                    e.set_attr(casts[0], dtype="float64")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=programs(), data=st.data(), mode=st.sampled_from(["exact", "none"]), freeze=st.booleans())
def test_patched_plans_match_full_plans_after_random_edits(case, data, mode: str, freeze: bool) -> None:
    p, feeds = case
    plan = plan_of(p, rewrites=mode, freeze=freeze)
    made = [(plan, dict(plan.buffer_layout.builder.records))]
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(1, 2))):
            edit_at_random(p, data.draw)
        plan = plan_of(p, plan, rewrites=mode, freeze=freeze)
        fresh = plan_of(p, rewrites=mode, freeze=freeze)
        assert [(i.op, i.node, i.why) for i in plan.instrs] == [(i.op, i.node, i.why) for i in fresh.instrs]
        assert plan.pruned == fresh.pruned
        assert plan.rewrites == fresh.rewrites
        assert plan.choices == fresh.choices
        assert plan.lower_bound == fresh.lower_bound
        assert not plan.diff(fresh)
        assert sorted(i.op for i in plan.folds.values()) == sorted(i.op for i in fresh.folds.values())
        truth = p.run(feeds)
        for name, value in Executable(plan, poison=True).run(feeds).items():
            assert_bits(value, truth[name], what=f"{name} {plan.patched}")
        made.append((plan, dict(plan.buffer_layout.builder.records)))
    assert all(old.buffer_layout.records == rows for old, rows in made)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=programs(), data=st.data(), executor=st.sampled_from(["aten", "auto", "capture"]), freeze=st.booleans())
def test_memory_and_calls_survive_edits(case, data, executor: str, freeze: bool) -> None:
    """What stays bound is right: the same program, edited, run and with other weights, beside the interpreted run."""
    p, feeds = case
    shapes = {name: feed.shape for name, feed in feeds.items()}
    device = "sim" if executor == "capture" else "cpu"
    options = {"executor": executor, "device": device, "freeze": freeze}
    space = p.compile(shapes, deterministic=True, **options).executable()
    for k in range(data.draw(st.integers(2, 6))):
        if "w0" in p.weights and data.draw(st.booleans()):
            p.weights["w0"].own().copy_from(from_numpy(np.float32(k / 4)).expand(*p.weights["w0"].shape))
        plan = p.compile(shapes, deterministic=True, **options)
        assert plan.executable() is space
        truth = p.run(feeds)
        for _ in range(3):
            for name, value in plan(feeds).items():
                if executor != "auto":
                    assert_bits(value, truth[name], what=f"{name} {plan.patched}")
                else:
                    np.testing.assert_allclose(value.to_numpy("float64"), truth[name].to_numpy("float64"), 1e-5, 1e-6)
        edit_at_random(p, data.draw)


def stateful(n: int) -> Program:
    """A chain whose state takes each step's result, so that the order of reads and writes counts."""
    b = Builder()
    x, s, t = b.input("x", (4,)), b.state("s", np.ones(4, np.float32)), b.state("t", np.zeros(4, np.float32))
    h = b.add(x, s, name="h0")
    for i in range(1, n):
        h = b.tanh(b.add(h, t), name=f"h{i}")
    b.output(h, "y")
    b.assign(s, b.mul(s, h))
    b.assign(t, s)
    return b.build()


@settings(deadline=None)
@given(data=st.data())
def test_states_match_full_plans_after_edits(data) -> None:
    p, feeds = stateful(4), {"x": np.linspace(-1, 1, 4, dtype=np.float32)}
    for _ in range(data.draw(st.integers(1, 5))):
        edit_at_random(p, data.draw)
        twin = p.fork()
        for _ in range(2):
            truth = twin.run(feeds)
            result = p.compile(x=(4,), deterministic=True)(feeds)
            for name in p.output_names():
                assert_bits(result[name], truth[name])
            for key in ("s", "t"):
                if key in p.weights:
                    assert_bits(p.weights.array(key), twin.weights.array(key))


def chain(n: int) -> Program:
    b = Builder()
    h = b.input("x", (4, 4))
    w = b.param("w", np.eye(4, dtype=np.float32))
    for i in range(n // 2):
        h = b.tanh(b.linear(h, w, name=f"linear{i}"), name=f"h{i}")
    b.output(h, "y")
    return b.build()


@pytest.mark.parametrize("n", [100, 1000, pytest.param(10_000, marks=pytest.mark.deep)])
def test_visited_records_are_proportional_to_the_cone(n: int) -> None:
    p = chain(n)
    plan = p.compile(x=(4, 4), deterministic=True)
    assert (plan.patched.kind, plan.patched.nodes) == ("full", n + 2)
    feed = {"x": np.ones((4, 4), np.float32)}
    plan(feed)
    for k in (3, 30, n // 2 - 2):
        with p.edit("insert") as e:
            e.insert(p.in_edges(f"h{k}")[0], "relu")
        plan = p.compile(x=(4, 4), deterministic=True)
        assert plan.patched.kind == "patched"
        assert plan.patched.nodes == 2
        assert plan.patched.buffers <= 2
    assert_bits(plan(feed)["y"], p.run(feed)["y"])
    p.undo()
    assert p.compile(x=(4, 4), deterministic=True).patched.nodes <= 3


def test_equal_records_are_visited_once_when_their_representative_is_deleted() -> None:
    b, n = Builder(), 100
    x = b.input("x", (4,))
    same = [b.tanh(x, name=f"h{k}") for k in range(n)]
    b.output(b.concat(*[b.unflatten(h, axis=0, sizes=(1, 4)) for h in same], axis=0), "y")
    p = b.build()
    feed = {"x": np.arange(4, dtype="f4")}
    assert sum(i.op == "tanh" for i in p.compile(x=(4,), deterministic=True).instrs) == 1
    for k in (0, 7, 1):  # the first; one in between; the first remaining one
        with p.edit("insert") as e:
            e.insert(p.in_edges(f"h{k}")[0], "relu")
        plan = p.compile(x=(4,), deterministic=True)
        assert plan.patched.nodes <= 3 * n
        assert plan.compact().hash == plan_of(p).hash
        assert_bits(plan(feed)["y"], p.run(feed)["y"])
    assert sum(i.op == "tanh" for i in plan.instrs) == 2


def test_full_plans_state_their_reason() -> None:
    p = chain(40)
    first = p.compile(x=(4, 4), deterministic=True)
    assert first.patched.why == "the first plan"
    with p.edit("many") as e:
        for k in range(12):
            e.insert(p.in_edges(f"h{k}")[0], "relu")
    plan = p.compile(x=(4, 4), deterministic=True)
    assert plan.patched.kind == "full"
    assert "24 of 54 nodes" in plan.patched.why
    assert plan.compact().hash == plan_of(p).hash == plan.hash
    with p.edit("one") as e:
        e.insert(p.in_edges("h18")[0], "relu")
    assert p.compile(x=(4, 4), deterministic=True).patched.kind == "patched"
    assert p.compile(x=(4, 4), deterministic=True).compact().hash == plan_of(p).hash
    fast = p.compile(x=(4, 4), rewrites="fast", deterministic=True)
    with p.edit("one more") as e:
        e.insert(p.in_edges("h17")[0], "relu")
    assert fast.patched.kind == p.compile(x=(4, 4), rewrites="fast", deterministic=True).patched.kind == "full"


def test_a_constant_that_an_edit_removes_is_no_longer_assumed() -> None:
    """What read it was edited; another constant of its name is looked at again."""
    b, feed = Builder("ones"), {"x": np.arange(4, dtype="f4")}
    h = b.input("x", (4,))
    for i in range(8):
        h = b.mul(h, b.const(f"one{i}", np.float32(1)), name=f"h{i}")
    b.output(h, "y")
    p = b.build()
    p.compile(x=(4,), deterministic=True)
    key = p.key(p.node("one3"))
    with p.edit("other factor") as e:
        e.rewire(p.in_edges("h3")[1], "one2")
        e.remove("one3")
    plan = p.compile(x=(4,), deterministic=True)
    assert plan.patched.kind == "patched"
    assert key not in plan.assumptions
    with p.edit("again") as e:
        e.rewire(p.in_edges("h3")[1], e.const("one3", np.float32(2)))
    plan = p.compile(x=(4,), deterministic=True)
    assert "assumed" not in plan.patched.why
    assert_bits(plan(feed)["y"], feed["x"] * 2)


@pytest.mark.parametrize(("inserted", "kind"), [(6, "patched"), (7, "full")])
def test_edit_of_up_to_a_quarter_of_the_nodes_is_patched(inserted: int, kind: str) -> None:
    p = chain(40)  # 42 rows; an insertion makes one and has one looked at again: 12 of 48, 14 of 49
    p.compile(x=(4, 4), deterministic=True)
    with p.edit("insert") as e:
        for k in range(inserted):
            e.insert(p.in_edges(f"h{k}")[0], "relu")
    assert p.compile(x=(4, 4), deterministic=True).patched[::2] == (kind, 2 * inserted)


@pytest.mark.parametrize(("rows", "kind"), [(3, "patched"), (4, "full")])
def test_arena_above_five_quarters_of_the_bound_is_planned_in_full(rows: int, kind: str) -> None:
    """What is cut leaves a hole of `rows` times 64 bytes below twelve buffers of 64 that live at once."""
    b = Builder("hole")
    x = b.input("x", (16,))
    hole = b.tanh(b.expand(x, shape=(rows, 16)), name="hole")
    kept = [b.tanh(x, name="h0")]
    for i in range(1, 12):
        kept.append(b.tanh(kept[-1], name=f"h{i}"))
    total = b.junction(*kept, b.sum(hole, axes=(0,), keepdims=False, name="flat"), name="total")
    b.output(total, "y")
    p, feed = b.build(), {"x": np.linspace(-1, 1, 16, dtype=np.float32)}
    p.compile(x=(16,), deterministic=True)
    with p.edit("cut") as e:
        e.cut("flat -> total")
    plan = p.compile(x=(16,), deterministic=True)
    assert (plan.patched.kind, plan.lower_bound) == (kind, 12 * 64)
    assert plan.compact().arena_bytes == plan.lower_bound
    assert_bits(plan(feed)["y"], p.run(feed)["y"])


def test_patching_keeps_addresses() -> None:
    p = chain(200)
    feed = {"x": np.ones((4, 4), np.float32)}
    plan = p.compile(x=(4, 4), deterministic=True)
    plan(feed)
    kernels: Any = plan.executable().kernels
    (arena,) = kernels.arena.chunks
    bound = dict(plan.executable().kernels.instruction_calls)
    for k in range(50):
        with p.edit("insert") as e:
            e.insert(p.in_edges(f"h{2 * k}")[0], "relu")
        plan = p.compile(x=(4, 4), deterministic=True)
        plan(feed)
    kernels = plan.executable().kernels
    assert kernels.arena.chunks == [arena]
    kept = sum(bound[q] is calls for q, calls in plan.executable().kernels.instruction_calls.items() if q in bound)
    assert kept >= 140
    assert_bits(plan(feed)["y"], p.run(feed)["y"])


def test_a_view_of_a_copy_may_be_an_output_beside_a_state() -> None:
    b = Builder()
    x, s = b.input("x", (2, 3)), b.state("s", np.zeros(3, np.float32))
    flat = b.reshape(b.permute(x, axes=(1, 0)), shape=(6,))
    b.output(b.reshape(flat, shape=(3, 2)), "transposed")
    b.assign(s, b.add(s, s))
    p, feed = b.build(), {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert_bits(plan_of(p)(feed)["transposed"], p.run(feed)["transposed"])


def test_concurrent_compiles_after_an_edit_get_one_plan() -> None:
    p = chain(400)
    p.compile(x=(4, 4), deterministic=True)
    for k in range(5):
        with p.edit("insert") as e:
            e.insert(p.in_edges(f"h{k}")[0], "relu")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: p.compile(x=(4, 4), deterministic=True), range(8)))
        assert len({id(plan) for plan in found}) == 1
        assert [i.node for i in found[0].instrs] == [i.node for i in plan_of(p).instrs]


def test_planning_and_binding_an_older_plan_run_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both walk the arrays of one builder: it must not grow under the feet of who binds."""
    b = Builder("folds")
    w = b.cast(b.param("w", np.eye(4, dtype=np.float32)), dtype="bfloat16")
    b.output(b.tanh(b.matmul(b.input("x", (4, 4)), b.cast(w, dtype="float32")), name="t"), "y")
    p, feed = b.build(), {"x": np.ones((4, 4), np.float32)}
    made: list[Plan | BaseException] = []

    def make() -> None:
        try:
            made.append(p.compile(x=(4, 4), freeze=True, deterministic=True))
        except BaseException as error:
            made.append(error)

    def slowly(n: int) -> SimpleNamespace:
        def moved(*lists: object) -> np.ndarray:
            beside.start()
            beside.join(0.2)  # it waits for the walk here
            return loops(n).moved(*lists)

        return SimpleNamespace(moved=moved)

    plan, beside = p.compile(x=(4, 4), freeze=True, deterministic=True), Thread(target=make)
    with p.edit("insert") as e:
        e.insert(p.in_edges("t")[0], "relu")
    monkeypatch.setattr("graphwright.plan.running.kernels.loops", slowly)
    before = Executable(plan).run(feed)["y"]
    beside.join()
    monkeypatch.undo()
    (patched,) = made
    assert isinstance(patched, Plan)
    assert_bits(patched(feed)["y"], p.run(feed)["y"])
    p.undo()
    assert_bits(before, p.run(feed)["y"])


def test_growing_the_arena_keeps_addresses() -> None:
    """A hundred patches, each with one more value that lives to the end; what was bound stays where it was."""
    b = Builder("growing")
    x = b.input("x", (64,))
    made = [b.tanh(x, name="h0")]
    for i in range(1, 20):
        made.append(b.tanh(made[-1], name=f"h{i}"))
    b.output(b.junction(*made, name="sum"), "y")
    p, feed = b.build(), {"x": np.linspace(-1, 1, 64, dtype=np.float32)}
    plan = p.compile(x=(64,), deterministic=True)
    first = plan.arena_bytes
    space: Any = plan.executable()
    space.kernels.leave_shared()  # in a shared one a larger plan may replace the first chunk
    plan(feed)
    bound: dict[int, tuple[int, int]] = {}
    truth = p.run(feed)["y"]
    for k in range(100):
        with p.edit("one more") as e:
            e.connect(e.add("sigmoid", f"more{k - 1}" if k else "x", name=f"more{k}"), "sum")
        plan = p.compile(x=(64,), deterministic=True)
        assert plan.patched.kind == "patched"
        truth = p.run(feed)["y"]
        assert_bits(plan(feed, borrow=bool(k % 2))["y"], truth)
        assert plan.executable() is space
        addresses = {s: (backend(CPU).address(a), a.nbytes) for s, a in space.kernels._views.items()}
        assert addresses.items() >= {s: address for s, address in bound.items() if s in addresses}.items()
        assert len(addresses.keys() & bound.keys()) >= len(bound) - 2
        spans = sorted((c.memory.data_ptr(), c.memory.data_ptr() + c.nbytes) for c in space.kernels.arena.chunks)
        assert all(any(low <= at and at + size <= high for low, high in spans) for at, size in addresses.values())
        bound = addresses
    assert_bits(Executable(plan, poison=True).run(feed)["y"], truth)
    assert plan.arena_bytes > 4 * first
    assert 2 < len(space.kernels.arena.chunks) < 10


def test_a_weight_removed_and_read_again_has_its_current_value() -> None:
    b = Builder("away")
    x = b.input("x", (4,))
    w, v = (b.param(n, np.full(4, k, np.float32)) for n, k in (("w", 2.0), ("v", 3.0)))
    b.output(b.add(b.mul(x, w, name="product"), v), "y")
    p, feed = b.build(), {"x": np.ones(4, np.float32)}
    edge = p.in_edges("product")[1]
    assert p.compile(x=(4,), deterministic=True)(feed)["y"].to_numpy()[0] == 5
    space = p.compile(x=(4,), deterministic=True).executable()
    with p.edit("read another") as e:
        e.rewire(edge, "v")
    assert p.compile(x=(4,), deterministic=True)(feed)["y"].to_numpy()[0] == 6
    p.weights["w"].data = from_numpy(np.full(4, 7.0, np.float32))
    with p.edit("read it again") as e:
        e.rewire(edge, "w")
    assert p.compile(x=(4,), deterministic=True)(feed)["y"].to_numpy()[0] == 10
    with p.edit("a new one") as e:
        e.rewire(edge, e.param("u", np.full(4, 0.5, np.float32)))
    calls = dict(space.kernels.instruction_calls)
    assert p.compile(x=(4,), deterministic=True)(feed)["y"].to_numpy()[0] == 3.5
    assert p.compile(x=(4,), deterministic=True).executable() is space
    assert (
        len([q for q, c in space.kernels.instruction_calls.items() if calls.get(q) is c]) == 1
    )  # of two, the one that is as it was


@pytest.mark.parametrize("borrow", [False, True])
def test_a_held_plan_runs_although_an_edit_takes_its_executable_at_the_last_moment(monkeypatch, borrow):
    """The edit comes between the two steps of `plan(...)`: fetching the executable and running it."""
    b = Builder()
    b.output(b.neg(b.input("x", (2,)), name="act"), "y")
    p = b.build()
    x = np.array([1.0, 2.0], np.float32)
    held = p.compile(x=(2,))
    assert np.array_equal(held({"x": x}, borrow=borrow)["y"], -x)
    fetch, taken = Plan.executable, []

    def late(plan: Plan) -> Executable:
        space = fetch(plan)
        if plan is held and not taken:
            taken.append(space)
            with p.edit("another activation") as e:
                e.insert("x -> act", "exp")
            assert fetch(p.compile(x=(2,))) is space  # as a thread of its own would do
        return space

    monkeypatch.setattr(Plan, "executable", late)
    assert np.array_equal(held({"x": x}, borrow=borrow)["y"], -x)
    assert taken
    assert np.allclose(p.compile(x=(2,))({"x": x})["y"], -np.exp(x), rtol=1e-6)
