"""What planning leaves alone, and what changes without a new plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import Device, from_numpy
from graphwright.array import storage as poison
from graphwright.array.cpu import CpuBackend
from graphwright.autograd import Parameter, Variable
from graphwright.ops import compute
from graphwright.plan import CaptureExecutable, Executable
from graphwright.plan.planning.plan_builder import PlanBuilder
from graphwright.plan.planning.plan_tables import PlanTables
from graphwright.plan.running import derived_weights as folding
from graphwright.plan.running.executable import BoundCall
from graphwright.plan.table import Instr
from graphwright.program import Builder, Program, load, save

SIM = Device("sim")


def counted() -> Program:
    b = Builder("counted")
    x, w = b.input("x", ("B", 4)), b.param("w", np.full((4, 4), 0.5, "f4"))
    n, kept = b.state("n", np.zeros((), "f4")), b.const("k", np.full((4,), 2, "f4"))
    b.assign(n, b.add(n, b.const("one", np.ones((), "f4"))))
    b.output(b.mul(b.add(b.tanh(b.matmul(x, w, name="product"), name="act"), n), kept, name="last"), "y")
    return b.build()


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def test_planning_runs_no_kernel_and_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    p = gw.open("bundled").program
    monkeypatch.setattr(CpuBackend, "bind", lambda *args: pytest.fail("an op was bound"))
    monkeypatch.setattr(CpuBackend, "to_host", lambda *args: pytest.fail("an array was read"))
    choices: Any = ({}, {"rewrites": "fast"}, {"executor": "auto"}, {"watch": ("layers.1.out",)}, {"device": "sim"})
    for options in choices:
        plan = p.compile(ids=(1, 8), positions=(1, 8), deterministic=True, **options)
        assert plan.instrs
        assert plan.hash
    assert not any(v.data.storage.touched for v in p.weights.values() if v.data.storage.readonly)


def test_planning_between_two_steps_advances_no_state() -> None:
    p, q = counted(), counted()
    for n in range(4):
        for _ in range(2):
            q.compile(x=(2, 4), rewrites="fast" if n % 2 else "none", deterministic=True)
            q.compile(x=(n + 1, 4), deterministic=True)
        assert (
            q.compile(x=(2, 4), deterministic=True)(x=X)["y"].tobytes()
            == p.compile(x=(2, 4), deterministic=True)(x=X)["y"].tobytes()
        )
        assert q.weights["n"].item() == n + 1


def test_a_loaded_program_has_an_equal_plan_hash(tmp_path) -> None:
    p = counted()
    save(p, tmp_path / "p")
    assert (
        load(tmp_path / "p").compile(x=(2, 4), deterministic=True).hash == p.compile(x=(2, 4), deterministic=True).hash
    )


def test_poison_is_nan_in_any_float_and_huge_in_any_integer() -> None:
    memory = np.zeros(64, np.uint8)
    poison.fill(memory)
    assert memory[:2].tolist() == [0xF8, 0x7F]
    for kind in ("f2", "f4", "f8"):
        assert np.isnan(memory.view(kind)).all()
    assert np.isnan((memory.view("u2").astype("u4") << 16).view("f4")).all()  # bfloat16
    assert (memory.view("i4") > 10**9).all()
    assert (memory.view("i8") > 10**18).all()


def test_a_value_read_after_its_release_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness at work: a plan that frees a value one reader too early."""
    b = Builder()
    x = b.input("x", (4,))
    early = b.tanh(x, name="early")
    late = b.exp(b.neg(early, name="middle"), name="late")
    b.output(b.add(b.mul(late, late), early, name="sum"), "y")
    plan = b.build().compile(x=(4,), rewrites="none", deterministic=True)
    fed, freed = {"x": X[0]}, plan.free_after
    assert np.isfinite(Executable(plan, poison=True).run(fed)["y"].to_numpy()).all()
    (buffer,) = {plan.slots[plan.of("early")[0].outs[0]].buffer}
    cut = next(i for i, instr in enumerate(plan.instrs) if instr.node == plan.program.node("middle"))
    monkeypatch.setattr(type(plan), "free_after", lambda self, i: (*freed(i), *((buffer,) if i == cut else ())))
    assert np.isnan(Executable(plan, poison=True).run(fed)["y"].to_numpy()).all()


def trained(monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[list[bytes], list[bytes]]:
    """Three steps of a small net, plain and under poison: losses and what the steps carry, as bytes.

    Args:
        monkeypatch: the planner is not told that the backward reads what tanh gave.
    """
    gw.manual_seed(0)
    p = gw.trace(gw.nn.Sequential(gw.nn.Linear(4, 6), gw.nn.Tanh(), gw.nn.LayerNorm(6), gw.nn.Linear(6, 3)), X)
    step = gw.compile_step(p, lambda out: (out * out).mean(), gw.optim.AdamW(p.parameters()), {"x": (2, 4)},
                           executor="aten")  # fmt: skip
    if monkeypatch is not None:
        declared, init, visible, programs = PlanTables.instruction, PlanBuilder.__init__, {}, {}

        def remember(self: PlanBuilder, p: Any, *args: Any, **options: Any) -> None:
            init(self, p, *args, **options)
            programs[id(self.tables)] = p

        def hidden(self: PlanTables, instr: Instr, *args: Any, **options: Any) -> int:
            made, program = declared(self, instr, *args, **options), programs[id(self)]
            if program.path(instr.node).startswith("grad."):
                of = [self.slots[s].value for s in instr.ins]
                shown = [v is None or program.op(v.node) != "tanh" for v in of]
                visible[instr.outs] = tuple(s for s, known in zip(instr.ins, shown, strict=True) if known)
                self.reads._of = lambda each: visible.get(each.outs, each.ins)
            return made

        monkeypatch.setattr(PlanBuilder, "__init__", remember)
        monkeypatch.setattr(PlanTables, "instruction", hidden)
    plan, found = step.plan, []
    for dead in (False, True):
        own = {key: Variable(v.data.copy(), name=key) for key, v in plan.program.weights.items()}
        space = Executable(plan, own, poison=dead)
        losses = [space.run({n: X for n in plan.inputs})["loss"].tobytes() for _ in range(3)]
        found.append([*losses, *(v.data.tobytes() for v in own.values())])
    return found[0], found[1]


def test_a_training_step_under_poison_equals_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, poisoned = trained()
    assert poisoned == plain
    assert np.isfinite(np.frombuffer(plain[2], np.float32)).all()
    _, poisoned = trained(monkeypatch)
    assert np.isnan(np.frombuffer(poisoned[2], np.float32)).all()


def test_folded_values_are_computed_once_per_weight_version(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder("transposed")
    w = b.param("w", np.arange(12, dtype=np.float16).reshape(3, 4))
    transposed = b.permute(b.permute(b.permute(w, axes=(1, 0)), axes=(1, 0)), axes=(1, 0))
    b.output(b.linear(b.input("x", ("B", 3)), b.cast(transposed, dtype="float32"), name="product"), "y")
    p, x, made = b.build(), np.ones((5, 3), np.float32), []
    monkeypatch.setattr(folding, "compute", lambda *args: made.append(args[0].name) or compute(*args))
    plan, longer = (
        p.compile(x=(2, 3), freeze=True, deterministic=True),
        p.compile(x=(5, 3), freeze=True, deterministic=True),
    )
    assert [i.op for i in plan.instrs] == ["linear"]
    spaces = [plan.executable(), Executable(plan), Executable(longer)]
    for k in range(3):
        for space, rows in zip(spaces, (2, 2, 5), strict=True):
            for _ in range(2):
                assert space.run({"x": x[:rows]})["y"].to_numpy()[0].tolist() == [
                    12 + 3 * k,
                    15 + 3 * k,
                    18 + 3 * k,
                    21 + 3 * k,
                ]
        assert made.count("cast") == k + 1  # for all executables of both plans, none in a run
        assert len({id(storage) for space in spaces for storage in space.kernels._memory.values()}) == 1
        p.weights["w"].own().copy_from(from_numpy(np.arange(12, dtype=np.float16).reshape(3, 4) + np.float16(k + 1)))


@pytest.mark.parametrize("bound", [False, True])
def test_weights_that_another_plan_writes_are_folded_again_after_each_of_its_runs(bound: bool) -> None:
    weight = Parameter(from_numpy(np.ones((3, 4), np.float16)), True, "w")
    b = Builder("reader")
    transposed = b.permute(b.permute(b.permute(b.param("w", weight), axes=(1, 0)), axes=(1, 0)), axes=(1, 0))
    b.output(b.linear(b.input("x", (5, 3)), b.cast(transposed, dtype="float32")), "y")
    plan, x = b.build().compile(x=(5, 3), freeze=True), np.ones((5, 3), np.float32)
    assert [i.op for i in plan.instrs] == ["linear"]
    b = Builder("writer")
    w = b.param("w", weight)
    b.assign(w, b.add(w, b.input("step", (), dtype="float16")))
    b.output(w, "old")
    add = b.build().compile(step=()).executable()
    space = plan.executable()
    call = BoundCall(space) if bound else None
    for k in range(6):
        for _ in range(1 + k % 3):  # runs after the first compare the counts of the writer's runs
            if call is None:
                y = space.run({"x": x})["y"].to_numpy()
            else:
                call.inputs["x"][...] = x
                call()
                y = call.outputs["y"]
            assert y.tolist() == np.full((5, 4), 3.0 * (1 + k)).tolist()
        add.run({"step": np.float16(1)})


# -- what is memory, not plan ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.usefixtures("sim")
def test_writing_weights_and_constants_in_place_needs_no_new_plan(device: str, freeze: bool) -> None:
    p = counted()
    plan = p.compile(x=(2, 4), device=device, freeze=freeze, deterministic=True)
    space = plan.new_executable() if device == "sim" else Executable(plan)
    for k in range(6):
        for key, value in (("w", 0.1 * k), ("n", float(k))):
            p.weights[key].own().copy_from(from_numpy(np.float32(value)).expand(*p.weights[key].shape))
        want = (np.tanh(X @ np.full((4, 4), np.float32(0.1 * k))) + k) * 2
        np.testing.assert_allclose(space.run({"x": X})["y"].to_numpy(), want, rtol=1e-5, atol=1e-6)
        assert p.compile(x=(2, 4), device=device, freeze=freeze, deterministic=True) is plan
    if isinstance(space, CaptureExecutable):
        assert (str(space.state), space.captures) == ("captured", 1)


@pytest.mark.usefixtures("sim")
def test_a_changed_learning_rate_is_used_by_a_captured_step() -> None:
    losses = {}
    for device in ("cpu", "sim"):
        gw.manual_seed(0)
        net = gw.nn.Linear(4, 1)
        opt = gw.optim.AdamW(net, lr=0.1)

        def step(x, opt=opt, net=net):
            opt.zero_grad()
            loss = (net(x) * net(x)).mean()
            loss.backward()
            opt.step()
            return loss

        run, losses[device] = gw.compile(step, device=device, executor="aten" if device == "cpu" else "auto"), []
        for k in range(8):
            opt.lr = 0.1 / (1 + k % 3)
            losses[device].append(float(run(X).to(Device("cpu")).numpy()))
        assert run.traces == 1
        if device == "sim":
            space: Any = run.executable(X)
            assert space.captures == sum(r.kind == "capture" for r in space.regions)
    assert losses["sim"] == losses["cpu"]


def test_moments_of_unedited_weights_survive_an_edit() -> None:
    p = counted()
    b = gw.compile(p, deterministic=True)
    opt = gw.optim.AdamW(p.parameters(), lr=0.1)

    def step() -> None:
        opt.zero_grad()
        p(x=gw.tensor(X))[p.output_names()[0]].sum().backward()
        opt.step()

    step()
    moments = {k: v.data.tobytes() for k, v in opt.variables().items()}
    b(x=X)
    with p.edit("another activation") as e:
        e.insert(p.in_edges("last")[0], "relu")
    b(x=X)
    assert p.compile(x=(2, 4), deterministic=True).patched.kind in ("patched", "full")
    assert {k: v.data.tobytes() for k, v in opt.variables().items()} == moments
    step()
    assert {k: v.data.tobytes() for k, v in opt.variables().items()} != moments


def plus_one() -> Any:
    b = Builder("plus_one")
    b.output(b.add(b.input("x", (200, 200)), b.const("one", np.ones((), "f4"))), "y")
    plan = b.build().compile(x=(200, 200), deterministic=True)
    return lambda value: plan(x=np.full((200, 200), value, "f4"))["y"]


def test_a_result_lives_as_long_as_its_views() -> None:
    run = plus_one()
    first, second = run(0), run(1)
    as_torch, part = torch.from_dlpack(first), second.to_numpy()[3:5]
    del first, second
    later = [run(i) for i in range(2, 6)]
    assert (as_torch == 1).all()
    assert (part == 2).all()
    assert [[float(r.to_numpy().min()), float(r.to_numpy().max())] for r in later] == [[n, n] for n in (3, 4, 5, 6)]


def test_memory_of_unreferenced_large_results_is_reused() -> None:
    run = plus_one()
    assert len({run(i).to_numpy().ctypes.data for i in range(6)}) == 1
    held = [run(i) for i in range(4)]
    assert len({r.to_numpy().ctypes.data for r in held}) == 4
