"""Plans on the VM against ATen: random programs, errors, poison, no compilation, what explain says."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from numba.core.event import install_recorder
from random_programs import programs

import graphwright as gw
from graphwright import nn, optim
from graphwright.array.vm import machine
from graphwright.errors import ComputeError
from graphwright.plan import Executable
from graphwright.program import Builder


@settings(deadline=None)
@given(programs())
def test_random_programs_match_aten(given_program) -> None:
    p, feeds = given_program
    shapes = {name: a.shape for name, a in feeds.items()}
    truth = Executable(p.compile(shapes)).run(feeds)
    for poison in (False, True):
        plan = p.compile(shapes, executor="vm")
        space = Executable(plan, poison=poison)
        for _ in range(2):
            for name, value in space.run(feeds).items():
                ours, theirs = value.to_numpy("float32"), truth[name].to_numpy("float32")
                np.testing.assert_allclose(ours, theirs, rtol=1e-2 if value.dtype.is_low else 3e-6, atol=3e-6)
        if not poison:
            assert len(space.kernels.calls) >= plan.schedule.dispatches


def chain(n: int) -> gw.Program:
    b = Builder("chain")
    x = b.input("x", ("N",))
    for i in range(n):
        x = b.tanh(x, name=f"t{i}")
    b.output(x, "y")
    return b.build()


def test_plans_edits_and_shapes_compile_no_native_code() -> None:
    p = chain(3)
    made = machine.build()
    with install_recorder("numba:compile") as compiled:
        for n in range(1, 501):
            if n % 9:
                with p.edit("more") as e:
                    e.insert(p.in_edges("t1")[0], ("relu", "exp", "silu")[n % 3])
            else:
                for _ in range(8):
                    p.undo()
            plan = p.compile(x=(n,), executor="vm")
            if n % 10 == 0:
                plan(x=np.ones(n, np.float32))
    assert not compiled.buffer
    assert machine.build() is made


def test_large_ops_run_on_aten_with_a_reason() -> None:
    p = chain(3)
    small = p.compile(x=(1000,), executor="auto")
    assert [s.kind for s in small.segments] == ["vm"]
    assert "on vm" in small.explain("t1")
    assert small.schedule.dispatches == 1
    assert small.groups == ((0, 1, 2),)
    b = Builder("large")
    b.output(b.gelu(b.input("x", ("N",)), name="g"), "y")
    large = b.build().compile(x=(1 << 20,), executor="auto")
    assert [s.kind for s in large.segments] == ["aten"]
    assert "large" in large.explain("g")


@pytest.mark.usefixtures("no_native_code")
def test_without_native_code_plans_run_on_aten_and_say_so() -> None:
    plan = chain(2).compile(x=(4,), executor="auto")
    assert [s.kind for s in plan.segments] == ["aten"]
    assert "switched off: GRAPHWRIGHT_NATIVE=0" in plan.explain("t0")
    with pytest.raises(gw.GraphwrightError, match="GRAPHWRIGHT_NATIVE"):
        chain(2).compile(x=(4,), executor="vm")


def test_plans_made_while_the_vm_is_built_switch_over_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions, programs, training steps and generation; a plan that the caller holds stays as it is."""
    followers: list[Any] = []
    monkeypatch.setattr(machine.part, "_ready", False)
    monkeypatch.setattr(machine.part, "_looked", float("inf"))
    monkeypatch.setattr(machine.part, "start", lambda follow=None: followers.append(follow))
    p, x = chain(2), np.linspace(-1, 1, 4, dtype=np.float32)
    function, program = gw.compile(lambda x: (x * 2.0).tanh()), gw.compile(p)
    cache = gw.open("bundled").new_cache(32, kind="static")
    net = Builder("net")
    net.output(net.linear(net.input("x", ("B", 4)), net.param("w", np.ones((3, 4), np.float32))), "y")
    trained = net.build()
    inputs = {"x": np.ones((2, 4), np.float32), "t": np.zeros((2, 3), np.float32)}
    loss = nn.functional.mse_loss
    step = gw.compile_step(trained, lambda y, t: loss(y, t), optim.SGD(trained, lr=0.1), inputs)

    def run() -> list[str]:
        function(x)
        program(x=x)
        step(inputs)
        cache.prefill(np.array([[1]]))
        assert program._latest is not None
        (decode,) = [bound.space.plan for bound in cache.steps.spaces.values()]
        plans = function.plan(x), program._latest[0], step.plan, decode
        return [max(s.kind for s in plan.segments) for plan in plans]

    held = p.compile(x=(4,))
    assert run() == ["aten"] * 4
    assert "being built" in held.explain("t0")
    monkeypatch.setattr(machine.part, "_ready", True)
    followers[0]()
    assert run() == ["vm"] * 4
    assert [s.kind for s in held.segments] == ["aten"]
    assert not held.fresh


def test_ops_without_a_vm_form_split_segments() -> None:
    b = Builder("mixed")
    x = b.input("x", (4,))
    b.output(b.tanh(b.cumsum(b.exp(x, name="e"), axis=0, name="sums"), name="t"), "y")
    p = b.build()
    plan = p.compile(x=(4,), executor="vm")
    assert [s.kind for s in plan.segments] == ["vm", "aten", "vm"]
    assert "no such op" in plan.explain("sums")
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(plan(x=x)["y"].to_numpy(), np.tanh(np.exp(x).cumsum()), rtol=1e-6)


def test_an_index_out_of_range_names_its_node_and_the_next_run_succeeds() -> None:
    b = Builder("loss")
    z, t = b.input("z", (2, 3)), b.input("t", (2,), "int64")
    loss, _ = b.cross_entropy(b.tanh(z), t, name="ce")
    b.output(b.mean(b.exp(loss), axes=None), "y")
    p = b.build()
    plan = p.compile({"z": (2, 3), "t": (2,)}, executor="vm")
    assert len(plan.segments) == 1
    z = np.ones((2, 3), np.float32)
    with pytest.raises(ComputeError, match="ce"):
        plan(z=z, t=np.array([0, 3]))
    truth = p.run(z=z, t=np.array([0, 2]))["y"].item()
    assert plan(z=z, t=np.array([0, 2]))["y"].item() == pytest.approx(truth, rel=1e-6)


def test_unknown_executors_are_refused() -> None:
    with pytest.raises(gw.GraphwrightError, match="executor"):
        chain(1).compile(x=(2,), executor="gpu")


def scored(z: gw.Tensor, t: gw.Tensor) -> gw.Tensor:
    return nn.functional.cross_entropy(z.tanh(), t, reduction="none").exp()


def test_bound_call_names_the_failed_node_and_recovers() -> None:
    z, t = np.ones((2, 3), np.float32), np.array([0, 2])
    run = gw.compile(scored, executor="vm")
    bound = run.bind(z, t)
    bound.inputs["z"][:], bound.inputs["t"][:] = z, t
    bound()
    truth = bound.outputs["out"].copy()
    bound.inputs["z"][:], bound.inputs["t"][:] = z, 3
    with pytest.raises(ComputeError, match="cross_entropy"):
        bound()
    with pytest.raises(ComputeError, match="cross_entropy"):
        run(gw.tensor(z), gw.tensor(np.array([0, 3])))
    bound.inputs["z"][:], bound.inputs["t"][:] = z, t
    bound()
    assert bound.outputs["out"].tolist() == truth.tolist()
    np.testing.assert_allclose(run(gw.tensor(z), gw.tensor(t)).numpy(), truth)


def test_inputs_of_any_layout_are_read() -> None:
    run = gw.compile(lambda x, y: x * 2 + y, executor="vm")
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    cases = [(base[:, :3], base[:, 3:]), (base[:, ::2], base[:, 1::2]), (base[:, 3:], base[:, :3])] * 2
    for x, y in cases:
        given = gw.tensor(x), gw.tensor(y)
        for _ in range(3):
            assert run(*given).tolist() == (2 * x + y).tolist()
    views = gw.tensor(base)[:, :3], gw.tensor(base)[:, 3:]
    assert run(*views).tolist() == (2 * base[:, :3] + base[:, 3:]).tolist()


def test_bound_calls_notice_changed_constants() -> None:
    scale = gw.autograd.Variable(np.float32(2.0))
    bound = gw.compile(lambda x: x * scale, executor="vm").bind(np.ones(3, np.float32))
    bound.inputs["x"][:] = 1
    bound()
    assert bound.outputs["out"].tolist() == [2.0] * 3
    scale.assign(gw.tensor(np.float32(5.0)))
    bound()
    assert bound.outputs["out"].tolist() == [5.0] * 3


def test_a_bound_step_is_one_native_call_that_counts_writes_and_is_freed_with_its_last_reference() -> None:
    w = gw.Parameter(np.ones(3, np.float32), name="w")
    opt = optim.SGD([w], lr=0.1)

    def step(x: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = (x * w).sum()
        loss.backward()
        opt.step()
        return loss

    bound = gw.compile(step, executor="vm").bind(np.ones(3, np.float32))
    bound.inputs["x"][:] = 1
    assert isinstance(bound.__call__, BuiltinFunctionType)
    before = w.data.version
    for _ in range(5):
        bound()
    assert w.data.version == before + 5
    np.testing.assert_allclose(w.numpy(), 0.5, rtol=1e-6)
    w.assign(gw.tensor(np.full(3, 2.0, np.float32)))  # from outside: the next call sees it
    bound()
    np.testing.assert_allclose(w.numpy(), 1.9, rtol=1e-6)
    last = ref(bound.outputs["out"])
    gc.disable()
    try:
        del bound
        assert last() is None, "no cycle keeps the memory"
    finally:
        gc.enable()


F = nn.functional
LOSSES = {
    "error ** 2": lambda y, t: ((y - t) ** 2).mean(),
    "sum of error ** 2.0": lambda y, t: ((y - t) ** 2.0).sum(),
    "(mean) ** 0.5": lambda y, t: ((y - t) ** 2).mean() ** 0.5,
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "huber_loss": F.huber_loss,
    "clamp": lambda y, t: F.mse_loss(y.clamp(-1.0, 1.0), t),
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t),
    "log_softmax": lambda y, t: -(F.log_softmax(y, -1) * t).mean(),
    "cross_entropy": lambda y, t: F.cross_entropy(y, gw.tensor([0, 1, 1, 0]), label_smoothing=0.1),
}
LAYERS = {"Tanh": nn.Tanh, "LeakyReLU": nn.LeakyReLU, "ELU": nn.ELU, "Softplus": nn.Softplus, "GELU": nn.GELU}
OPTIMIZERS = {
    "Adam": lambda net: optim.Adam(net, lr=1e-2),
    "SGD": lambda net: optim.SGD(net, lr=1e-2, momentum=0.9),
    "AdamW of groups": lambda net: optim.AdamW(
        [{"params": [p for p in net.parameters() if p.ndim == k], "weight_decay": 0.1 * k} for k in (1, 2)], lr=1e-2
    ),
}


@pytest.mark.parametrize(
    ("loss", "layer", "optimizer", "clip"),
    [
        *((loss, "Tanh", "Adam", False) for loss in LOSSES),
        *(("mse_loss", layer, "Adam", False) for layer in LAYERS),
        *(("error ** 2", "Tanh", optimizer, clip) for optimizer in OPTIMIZERS for clip in (False, True)),
    ],
)
def test_usual_training_steps_are_one_vm_call(loss: str, layer: str, optimizer: str, clip: bool) -> None:
    """Forward, gradient, clipping and update; with the results of ATen."""
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(4, 3)).astype("f4"), rng.integers(0, 2, (4, 2)).astype("f4")
    losses: dict[str, list[float]] = {}
    for executor in ("vm", "aten"):
        gw.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 7), LAYERS[layer](), nn.Linear(7, 2))
        opt = OPTIMIZERS[optimizer](net)

        def body(x: gw.Tensor, t: gw.Tensor, net: nn.Module = net, opt: optim.Optimizer = opt) -> gw.Tensor:
            opt.zero_grad()
            value = LOSSES[loss](net(x), t)
            value.backward()
            if clip:
                optim.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
            return value

        step = gw.compile(body, executor=executor)
        losses[executor] = [step(x, t).item() for _ in range(5)]
        if executor == "vm":
            plan = step.plan(x, t)
            assert [s.kind for s in plan.segments] == ["vm"], [
                (i.op, c.why) for i, c in zip(plan.instrs, plan.choices, strict=True) if c.executor != "vm"
            ]
    np.testing.assert_allclose(losses["vm"], losses["aten"], rtol=1e-5, atol=1e-6)
