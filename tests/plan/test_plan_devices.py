"""Plans on the simulated device: the CPU's bits, weights placed once, and on the host what the host must know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from random_programs import programs
from test_plan_state import CASES, FEEDS, two_states

import graphwright as gw
from graphwright import nn, optim
from graphwright.array import CPU, Device, DeviceUnavailable, NDArray, bfloat16, from_numpy
from graphwright.array.memory_pool import DriverError
from graphwright.autograd import Parameter, Variable, tensor
from graphwright.autograd.random import rng
from graphwright.errors import UsageError
from graphwright.models.generation.cached_program import CHOICE, derive
from graphwright.ops import call
from graphwright.plan import DeviceFailed, Executable, ParallelExecutable
from graphwright.plan.table import HOST
from graphwright.program import Builder, FeedError, Program
from graphwright.testing.oracle import assert_bits
from graphwright.testing.simulated_device import SimBackend

SIM = Device("sim")


def shapes(feeds: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: a.shape for name, a in feeds.items()}


@given(case=programs())
def test_random_programs_have_the_bits_of_the_cpu(case) -> None:
    p, feeds = case
    truth = p.compile(shapes(feeds), deterministic=True)(feeds)
    plan = p.compile(shapes(feeds), device="sim", deterministic=True)
    for poison in (False, True):
        space = Executable(plan, poison=poison)
        for _ in range(2):
            for name, value in space.run(feeds).items():
                assert value.device in (SIM, CPU)
                assert_bits(value.to(CPU), truth[name], what=name)


@pytest.mark.parametrize("name", CASES)
def test_states_have_the_bits_of_the_cpu(name: str, sim: SimBackend) -> None:
    def steps(device: str) -> list[bytes]:
        p = two_states(lambda b, a, c, x: (CASES[name](b, a, c, x), b.output(b.add(a, c), "sum")))
        plan = p.compile(x=(2, 2), device=device, deterministic=True)
        found = [plan(FEEDS)["sum"].tobytes() for _ in range(3)]
        return [*found, *(v.data.tobytes() for v in p.weights.values())]

    assert steps("sim") == steps("cpu")


def training(make: Any, x_shape: tuple[int, int] = (6, 5)) -> tuple[Any, dict[str, NDArray], Any]:
    rng = np.random.default_rng(0)
    gw.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    opt = make(model, lr=0.01)
    x, y = rng.normal(size=x_shape).astype("f4"), rng.integers(0, 3, x_shape[0])

    def step(x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return step, {"x": from_numpy(x), "y": from_numpy(y)}, (model, opt)


@pytest.mark.parametrize("executor", ["aten", "auto"])
@pytest.mark.parametrize(
    "make", [optim.AdamW, optim.RMSprop, optim.NAdam, lambda m, lr: optim.SGD(m, lr=lr, momentum=0.9)]
)
def test_a_training_step_has_the_bits_of_the_cpu(sim: SimBackend, make: Any, executor: str) -> None:
    found = {}
    for device in ("cpu", "sim"):
        step, feeds, (model, opt) = training(make)
        run = gw.compile(step, executor="aten" if device == "cpu" else executor, device=device)
        losses = []
        for k in range(6):
            opt.lr = 0.01 / (k + 1)
            losses.append(run(*feeds.values()).to(CPU).numpy().tobytes())
        assert run.traces == 1
        found[device] = [*losses, str(rng.state_dict()), *(v.data.tobytes() for v in model.variables().values())]
        assert rng.state_dict()["step"] == 6  # one a step, and on the host
        if device == "sim":
            plan = run.plan(*feeds.values())
            rate = next(b for b in plan.buffers if b.key.endswith(".lr"))
            assert rate.on_host == (make in (optim.RMSprop, optim.NAdam))  # the others take it as a tensor
            assert all(v.data.device == SIM for v in model.parameters())
            assert opt.param_groups[0].rate.data.device == CPU
    assert found["sim"] == found["cpu"]


def decode(device: str, tokens: int = 6, make: Any = None, **options: Any) -> list[bytes]:
    """Logits of greedy tokens after a prompt, and the cache that is left."""
    derived = derive(gw.open("bundled").program, 24, True)
    states = {
        k: Variable(from_numpy(np.zeros(s.bind({"B": 1}).sizes, "i8" if not s.shape else "f4")), name=k)
        for k, s in derived.states.items()
    }
    rules, keys = np.array([[1, 0, 0, 0, 1, 0]], "f4"), np.zeros((1, 4), "i8")
    greedy = dict(zip(CHOICE, (rules, keys, np.full((1, 24, 2), -1, "i4")), strict=True))
    spaces, found = {}, []
    for n in (3, 1):
        sizes = {"ids": (1, n), "positions": (1, n), **{name: x.shape for name, x in greedy.items()}}
        plan = derived.program.compile(sizes, device=device, freeze=True, **{"executor": "aten", **options})
        spaces[n] = plan.new_executable(states) if make is None else make(plan, states)
    ids, at = np.array([[84, 104, 101]]), 0
    for _ in range(tokens):
        n = ids.shape[1]
        out = spaces[n].run({"ids": ids, "positions": np.arange(at, at + n)[None], **greedy})
        logits = out["logits"].to_numpy("float32")[0, -1]
        found.append(logits.tobytes())
        at, ids = at + n, out["ids"].to_numpy()[None]
        assert ids == logits.argmax()
    return found + [v.data.tobytes() for v in states.values()]


def test_a_decode_step_has_the_bits_of_the_cpu(sim: SimBackend) -> None:
    assert decode("sim") == decode("cpu")


# -- residency ---------------------------------------------------------------------------------------------------------
def test_weights_are_copied_to_the_device_once_in_their_dtype(sim: SimBackend) -> None:
    rng = np.random.default_rng(0)
    b = Builder()
    x = b.input("x", ("B", 4))
    w = b.param("w", from_numpy(rng.normal(size=(64, 4)).astype("f4")).copy())
    half = b.param("half", tensor(rng.normal(size=(64,)).astype("f4")).to(bfloat16).data)
    b.output(b.add(b.linear(x, w), b.cast(half, dtype="float32")), "y")
    p = b.build()
    before = {k: (v.data.dtype, v.data.device) for k, v in p.weights.items()}
    feeds = {"x": np.ones((2, 4), np.float32)}
    truth = p.run(feeds)["y"].tobytes()
    plans = [p.compile(x=(n, 4), device="sim", deterministic=True) for n in (2, 3)]
    spaces = [Executable(plan) for plan in plans]
    assert sim.pool.stats().allocs == 0  # planning touches nothing
    assert spaces[0].run(feeds)["y"].tobytes() == truth
    live = sim.pool.stats().live
    assert live == plans[0].arena_bytes + 64 * 4 * 4 + 64 * 2
    spaces[1].run({"x": np.ones((3, 4), np.float32)})
    assert sim.pool.stats().live == live + plans[1].arena_bytes  # the same copies
    for _ in range(5):
        assert spaces[0].run(feeds)["y"].tobytes() == truth
    assert sim.pool.stats().live == live + plans[1].arena_bytes
    assert before == {k: (v.data.dtype, v.data.device) for k, v in p.weights.items()}
    p.weights["w"].data.copy_from(from_numpy(np.zeros((64, 4), np.float32)))  # a new value is sent again
    assert spaces[0].run(feeds)["y"].tobytes() == p.run(feeds)["y"].tobytes() != truth


def scaled(both: bool) -> Program:
    """A number that the host reads to launch `ema_step`, and with `both` the device too."""
    b = Builder()
    tau, x = b.input("tau", (), "float64"), b.input("x", (3,))
    slow = b.state("slow", np.zeros(3, np.float32))
    b.assign(slow, b.op("ema_step", tau, x, slow))
    b.output(b.mul(b.cast(tau, dtype="float32"), x) if both else b.neg(x), "y")
    return b.build()


def test_weight_written_along_with_an_edit_is_copied_again(sim: SimBackend) -> None:
    b = Builder()
    b.output(b.add(b.input("x", (4,)), b.param("w", np.ones(4, np.float32)), name="sum"), "y")
    p, feed = b.build(), {"x": np.zeros(4, np.float32)}
    p.compile(x=(4,), device="sim", deterministic=True)(feed)
    with p.edit("more") as e:
        more = {op: e.add(op, "sum") for op in ("tanh", "exp", "neg", "abs", "relu", "sigmoid")}
        e.set_outputs(y=p.output("y"), **more)
    p.weights["w"].own().copy_from(from_numpy(np.full(4, 5, np.float32)))
    assert p.compile(x=(4,), device="sim", deterministic=True)(feed)["y"].to_numpy().tolist() == [5] * 4


@pytest.mark.parametrize("both", [False, True])
def test_numbers_read_by_the_host_stay_on_the_host(both: bool, sim: SimBackend) -> None:
    results = []
    for device in ("sim", "cpu"):
        p = scaled(both)
        plan = p.compile(tau=(), x=(3,), device=device, deterministic=True)
        for tau in (0.5, 0.25):
            out = plan(tau=np.float64(tau), x=np.ones(3, np.float32))["y"]
            results.append(out.tobytes() + p.weights["slow"].data.tobytes())
        if device == "sim":
            (buffer,) = [b for b in plan.buffers if b.key == "tau"]
            assert (buffer.kind, buffer.on_host) == (HOST, True)
            assert [i.why for i in plan.instrs if i.why] == ["the device reads it too"] * both
            assert "on the host" in plan.explain("tau")
    assert results[:2] == results[2:]


def test_feeds_on_a_third_device_are_refused(sim: SimBackend) -> None:
    b = Builder()
    b.output(b.tanh(b.input("x", (3,))), "y")
    p, x = b.build(), np.ones(3, np.float32)
    plan = p.compile(x=(3,), device="sim", deterministic=True)
    there = plan(x=x)["y"]
    assert there.device == SIM
    assert_bits(plan(x=from_numpy(x).to(SIM))["y"].to(CPU), there.to(CPU))
    for wrong, device in ((from_numpy(x).to(Device("sim:1")), "sim"), (from_numpy(x).to(SIM), "cpu")):
        with pytest.raises(FeedError, match="is on") as caught:
            p.compile(x=(3,), device=device, deterministic=True)({"x": wrong, "z": x})
        assert "z: not an input" in str(caught.value)
    assert plan(x=x, borrow=True)["y"].to(CPU).tobytes() == there.tobytes()


def test_unsupported_device_requests_raise(sim: SimBackend) -> None:
    b = Builder()
    b.output(b.tanh(b.input("x", (3,))), "y")
    p = b.build()
    with pytest.raises(UsageError, match="VM"):
        p.compile(x=(3,), device="sim", executor="vm")
    with pytest.raises(DeviceUnavailable):
        p.compile(x=(3,), device="cuda", deterministic=True)
    plan = p.compile(x=(3,), device="sim", deterministic=True)
    with pytest.raises(UsageError, match="in parallel"):
        ParallelExecutable(plan)
    with pytest.raises(UsageError, match="cannot be viewed as numpy"):
        gw.compile(lambda x: x * x, device="sim", deterministic=True).bind(np.ones(3, np.float32))
    assert plan.hash != p.compile(x=(3,), deterministic=True).hash


def test_a_failure_on_the_device_leaves_states_alone(sim: SimBackend) -> None:
    b = Builder()
    table, ids, x = b.param("table", np.ones((4, 2), np.float32)), b.input("ids", (1,), "int64"), b.input("x", (2,))
    a = b.state("a", np.zeros(2, np.float32))
    b.assign(a, b.add(a, x))
    b.output(b.embedding(table, ids), "y")
    p = b.build()
    plan = p.compile(ids=(1,), x=(2,), device="sim", executor="aten")
    x1 = np.ones(2, np.float32)
    with pytest.raises(DeviceFailed, match="failed on the device") as caught:
        plan(ids=np.array([9]), x=x1)
    assert caught.value.where == "embedding (embedding)"
    assert p.weights["a"].data.to_numpy().tolist() == [0, 0]
    assert plan(ids=np.array([3]), x=x1)["y"].to_numpy().tolist() == [[1, 1]]
    assert p.weights["a"].data.to_numpy().tolist() == [1, 1]


@pytest.mark.parametrize("executor", ["aten", "capture"])
def test_without_states_a_failure_is_raised_at_the_read_with_its_node(sim: SimBackend, executor: str) -> None:
    b = Builder()
    table, ids = b.param("table", np.ones((4, 2), np.float32)), b.input("ids", (1,), "int64")
    b.output(b.tanh(b.neg(b.embedding(table, ids, name="look.up"))), "y")
    p = b.build()
    with p.edit("rename it") as e:
        e.rename("look.up", "model.embed")
    plan = p.compile(ids=(1,), device="sim", executor=executor)
    for step in range(5):  # cold, warm and captured
        before = sim.driver.syncs
        y = plan(ids=np.array([9]))["y"]
        assert sim.driver.syncs == before
        with pytest.raises(DeviceFailed, match="index out of range") as caught:
            y.to_numpy()
        assert caught.value.where == "model.embed (embedding)"
        assert any("reads table" in note and "rename it" in note for note in caught.value.__notes__)
        truth = np.tanh(-np.ones((1, 2), np.float32))
        np.testing.assert_allclose(plan(ids=np.array([step % 4]))["y"].to_numpy(), truth, 1e-6)


def test_failures_of_eager_ops_on_the_device_are_typed_errors(sim: SimBackend) -> None:
    table, ids = (from_numpy(a).to(SIM) for a in (np.ones((4, 2), np.float32), np.array([9])))
    y = call("embedding", table, ids)
    with pytest.raises(DriverError, match="embedding failed on the device: index out of range") as caught:
        y.to_numpy()
    assert caught.value.where == "embedding"


def test_parameters_on_the_device_are_used_without_a_copy(sim: SimBackend) -> None:
    weight = Parameter(from_numpy(np.ones((2, 3), np.float32)).to(SIM))
    run = gw.compile(lambda x: call("linear", x, weight), device="sim", deterministic=True)
    assert run(np.ones((1, 3), np.float32)).numpy().tolist() == [[3.0, 3.0]]
    assert run.executable(np.ones((1, 3), np.float32)).kernels._bound.popitem()[1] is weight.data
