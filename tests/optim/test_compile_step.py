"""A compiled step equals the eager loop bit for bit, follows edits, and needs one plan for all rates."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_edits import insert_sigmoid, link_input_and_result

import graphwright as gw
from graphwright import amp, nn, optim
from graphwright.array import from_numpy
from graphwright.array.cpu import tensor_allocations
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.program import Builder, FeedError, Program
from values import array_of

pytestmark = pytest.mark.usefixtures("young_heap")

F = nn.functional
B = 8
INPUTS = {"x": (B, 6), "y": np.zeros(B, np.int64)}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(self.up(x)).tanh()))


def network(dropout: float = 0.0) -> Program:
    """A traced module: its dropout reads the key of the running generator."""
    gw.manual_seed(3)
    net = Net(dropout)
    p = gw.trace(net, np.zeros((B, 6), np.float32))
    names = {v: n for n, v in net.named_parameters()}
    assert len(names) == len(list(p.parameters()))
    return p


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def batches(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(B, 6)).astype("f4"), rng.integers(0, 4, B)) for _ in range(n)]


class Eager:
    """The same step as a loop would say it."""

    def __init__(self, p: Program, opt: Any, *, accumulate=1, amp=None, scaler=None, clip=None) -> None:
        self.p, self.opt, self.k, self.amp, self.scaler, self.clip = p, opt, accumulate, amp, scaler, clip
        self.at = 0

    def __call__(self, x: np.ndarray, y: np.ndarray) -> Tensor:
        if self.at % self.k == 0:
            self.opt.zero_grad()
        with amp.autocast(self.amp) if self.amp else nullcontext():
            value = loss(self.p(x=x)["out"], gw.tensor(y))
        root = value / float(self.k) if self.k > 1 else value
        (root if self.scaler is None else self.scaler.scale(root)).backward()
        self.at += 1
        if self.at % self.k == 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.opt)
            if self.clip:
                optim.clip_grad_norm_(self.p.parameters(), self.clip)
            if self.scaler is None:
                self.opt.step()
            else:
                self.scaler.step(self.opt)
                self.scaler.update()
        return value


def bits(p: Program, opt: Any = None) -> dict[str, bytes]:
    held = {**p.variables(), **({} if opt is None else opt.variables())}
    return {name: v.data.tobytes() for name, v in held.items() if not name.endswith("gradient_sum")}


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    module = import_module("graphwright.plan.compile")
    plain = module.make_plan
    monkeypatch.setattr(module, "make_plan", lambda *a, **k: made.append(0) or plain(*a, **k))
    return made


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.1},
    "accumulate": {"accumulate": 3},
    "accumulate and clip": {"accumulate": 2, "clip": 0.1},
    "bfloat16": {"amp": "bfloat16"},
    "float16 scaled": {"amp": "float16", "scaler": 2.0**12, "clip": 0.5},
    "scaled, accumulated": {"scaler": 2.0**126, "accumulate": 2},
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", list(CASES))
def test_fifty_steps_equal_the_eager_loop_bit_for_bit(case: str, dropout: float) -> None:
    options, runs = CASES[case], []
    for compiled in (False, True):
        p = network(dropout)
        opt = optim.AdamW(p, lr=1e-2)
        own = dict(options)
        if "scaler" in own:
            own["scaler"] = amp.GradScaler(own["scaler"], growth_interval=7)
        step = optim.compile_step(p, loss, opt, INPUTS, executor="aten", **own) if compiled else Eager(p, opt, **own)
        gw.manual_seed(5)
        losses = []
        for i, (x, y) in enumerate(batches(50)):
            opt.lr = 1e-2 * (1 - i / 60)
            losses.append(step(x=x, y=y).numpy().tobytes())
        scale = own["scaler"].get_scale() if "scaler" in own else 1.0
        runs.append((losses, bits(p, opt), scale))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) == 50


def test_a_step_on_the_vm_equals_eager_up_to_rounding() -> None:
    runs = []
    for compiled in (False, True):
        p = network()
        opt = optim.AdamW(p, lr=1e-2)
        step = optim.compile_step(p, loss, opt, INPUTS, clip=0.5) if compiled else Eager(p, opt, clip=0.5)
        runs.append([step(x=x, y=y).item() for x, y in batches(20)])
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-4)


def test_bfloat16_losses_match_float32_up_to_rounding() -> None:
    runs = []
    for kind in (None, "bfloat16"):
        p = network()
        step = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, amp=kind, clip=0.5)
        runs.append([step(x=x, y=y).item() for x, y in batches(20)])
    np.testing.assert_allclose(runs[1], runs[0], rtol=2.0**-7)
    assert runs[0] != runs[1]


def test_steps_match_torch() -> None:
    p = network()
    keys = [p.key(n) for n in p.params()]
    w = {k: torch.from_numpy(p.weights[k].numpy().copy()).requires_grad_() for k in keys}
    ours = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, clip=0.3, executor="aten")
    theirs = torch.optim.AdamW(list(w.values()), lr=1e-2)
    for x, y in batches(5):
        up, up_b, scale, shift, down, down_b = (
            w[k] for k in ("up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight", "down.bias")
        )
        h = torch.nn.functional.linear(torch.from_numpy(x), up, up_b)
        h = torch.nn.functional.layer_norm(h, (16,), scale, shift).tanh()
        value = torch.nn.functional.cross_entropy(torch.nn.functional.linear(h, down, down_b), torch.from_numpy(y))
        theirs.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), 0.3)
        theirs.step()
        assert abs(ours(x=x, y=y).item() - value.item()) < 1e-5
    for k in keys:
        np.testing.assert_allclose(p.weights[k].numpy(), w[k].detach().numpy(), atol=1e-5)


def test_rates_scales_and_counts_change_without_replanning(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_plans(monkeypatch)
    p = network(0.1)
    opt, scaler = optim.AdamW(p, lr=1e-2), amp.GradScaler(2.0**126, growth_interval=2)
    step = optim.compile_step(p, loss, opt, INPUTS, accumulate=2, scaler=scaler, clip=1.0, executor="aten")
    schedule = optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    scales, plan = set(), step.plan
    for x, y in batches(20):
        step(x=x, y=y)
        schedule.step()
        scales.add(scaler.get_scale())
        assert step.plan is plan
    assert len(scales) > 1
    assert len(made) == 1


@pytest.mark.parametrize("case", ["plain", "clip", "accumulate", "scaled, accumulated"])
def test_a_step_allocates_nothing_after_the_first_runs(case: str) -> None:
    p, own = network(0.1), dict(CASES[case])
    if "scaler" in own:
        own["scaler"] = amp.GradScaler(own["scaler"])
    step = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, executor="aten", **own)
    (x, y), *_ = batches(4)
    for _ in range(3):
        step(x=x, y=y)
    given = {"x": gw.tensor(x), "y": gw.tensor(y)}
    arrays = [array_of(given[name]) for name in step.program.input_names()]
    space = step.plan.executable()
    assert tensor_allocations(lambda: space.step(arrays)) == []


EDITS: dict[str, Any] = {
    "insert": insert_sigmoid,
    "another op": lambda p, e: e.rewire(p.in_edges("down.linear")[0], e.add("relu", "norm.layer_norm", name="other")),
    "link": link_input_and_result,
    "freeze": lambda p, e: e.set_attr("up.weight", trainable=False),
    "weight": lambda p, e: e.set_weight("up.weight", lambda v: v * 0.5),
    "rename": lambda p, e: e.rename("tanh", "renamed"),
    "prune": lambda p, e: e.cut_units(p.axes()["up.channels"].units([2, 5])),
}


@pytest.mark.parametrize("edit", list(EDITS))
@pytest.mark.parametrize("options", [{}, {"clip": 0.1, "accumulate": 2}, {"amp": "bfloat16"}])
def test_steps_equal_eager_after_an_edit_and_its_undo(edit: str, options: dict[str, Any]) -> None:
    runs = []
    for compiled in (False, True):
        p = network(0.2)
        opt = optim.AdamW(p, lr=1e-2)
        step = (
            optim.compile_step(p, loss, opt, INPUTS, executor="aten", **options)
            if compiled
            else Eager(p, opt, **options)
        )
        gw.manual_seed(5)
        losses = []
        for i, (x, y) in enumerate(batches(16)):
            if i == 4:
                with p.edit(edit) as e:
                    EDITS[edit](p, e)
            if i == 10:
                p.undo()
            losses.append(step(x=x, y=y).numpy().tobytes())
        runs.append((losses, bits(p)))
    assert runs[0] == runs[1]


def deep(n: int) -> Program:
    b, rng = Builder("deep"), np.random.default_rng(0)
    h = b.input("x", (B, 6))
    for i in range(n):
        w = b.param(f"w{i}", rng.normal(size=(6, 6)).astype("f4"))
        h = b.junction(h, b.tanh(b.linear(h, w, name=f"fc{i}"), name=f"act{i}"), name=f"out{i}")
    b.output(b.linear(h, b.param("head", rng.normal(size=(4, 6)).astype("f4")), name="head.fc"), "out")
    return b.build()


def test_work_after_an_edit_is_proportional_to_the_edit() -> None:
    looked, rows = [], []
    for n in (8, 80):
        p = deep(n)
        step = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, clip=1.0, executor="aten")
        (x, y), *_ = batches(1)
        step(x=x, y=y)
        made: Any = step._made
        before = made.mirror.visited
        with p.edit("insert") as e:
            e.insert(p.in_edges("act3")[0], "sigmoid", name="new")
        step(x=x, y=y)
        looked.append(made.mirror.visited - before)
        assert step.plan.patched.kind == "patched"
        rows.append(step.plan.patched.nodes)
    assert looked[0] == looked[1]
    assert rows[0] == rows[1]


@settings(max_examples=max(settings().max_examples // 2, 6))  # each compiles twelve steps
@given(st.data())
def test_steps_after_random_edits_equal_a_fresh_compile(data: st.DataObject) -> None:
    p = deep(4)
    step = optim.compile_step(p, loss, optim.SGD(p, lr=0.05), INPUTS, clip=1.0, executor="aten")
    for x, y in batches(6):
        edit_at_random(p, data.draw)
        twin = p.fork()
        fresh = optim.compile_step(twin, loss, optim.SGD(twin, lr=0.05), INPUTS, clip=1.0, executor="aten")
        assert step(x=x, y=y).numpy().tobytes() == fresh(x=x, y=y).numpy().tobytes()
        assert bits(p) == bits(twin)
        nodes = [
            sorted((s.program.op(n), len(s.program.operands(n))) for n in s.program.nodes()) for s in (step, fresh)
        ]
        assert nodes[0] == nodes[1]


def edit_at_random(p: Program, draw: Any) -> None:
    kind = draw(st.sampled_from(["insert", "rewire", "cut", "connect", "freeze", "rename", "undo", "redo", "weight"]))
    edges = sorted(e for e in p.graph.edges() if p.spec(p.edge_value(e)).shape == (B, 6))
    try:
        if kind in ("undo", "redo"):
            getattr(p, kind)()
            return
        with p.edit(kind) as e:
            if kind == "insert":
                e.insert(draw(st.sampled_from(edges)), draw(st.sampled_from(["tanh", "sigmoid", "stop_gradient"])))
            elif kind == "rewire":
                like = [n for n in p.nodes() if p.specs(n) and p.spec(n).shape == (B, 6)]
                e.rewire(draw(st.sampled_from(edges)), draw(st.sampled_from(like)))
            elif kind == "cut":
                e.cut(draw(st.sampled_from([e for j in p.junctions() for e in p.in_edges(j)])))
            elif kind == "connect":
                like = [n for n in p.nodes() if p.specs(n) and p.spec(n).shape == (B, 6)]
                e.connect(draw(st.sampled_from(like)), draw(st.sampled_from(p.junctions())))
            elif kind == "freeze":
                node = draw(st.sampled_from([n for n in p.params() if p.path(n) != "head"]))
                e.set_attr(node, trainable=not p.attrs(node).get("trainable", True))
            elif kind == "rename":
                e.rename(draw(st.sampled_from([n for n in p.nodes() if p.op(n) == "tanh"])), f"t{len(p.journal)}")
            else:
                e.set_weight("w1", np.full((6, 6), len(p.journal) / 64, np.float32))
    except gw.GraphwrightError:
        pass


def test_the_program_contains_forward_backward_and_update() -> None:
    p = network()
    step = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, clip=1.0)
    names = [step.program.path(n) for n in step.program.nodes()]
    assert {"x", "y", "up.linear", "grad.up.linear.matmul", "adamw.adamw_step"} <= set(names)
    assert step.program.output_names() == ("loss",)
    assert step.plan.commit_start < len(step.plan.instrs)
    assert step.program.to_svg().startswith("<svg")


def test_checkpoint_marks_are_followed() -> None:
    runs = []
    for mark in (False, True):
        p = deep(4)
        step = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, executor="aten")
        losses = []
        for i, (x, y) in enumerate(batches(9)):
            if mark and i == 3:
                p.checkpoint(["fc1", "act1", "out1", "fc2", "act2"])
            if mark and i == 6:
                p.checkpoint(None)
            losses.append(step(x=x, y=y).numpy().tobytes())
            again = any(p_.startswith("recompute.") for p_ in map(step.program.path, step.program.nodes()))
            assert again == (mark and 3 <= i < 6)
        runs.append((losses, bits(p)))
    assert runs[0] == runs[1]


def test_a_loss_may_be_an_output_or_have_parameters() -> None:
    b = Builder("net")
    x = b.input("x", (B, 6))
    h = b.linear(x, b.param("w", np.ones((1, 6), np.float32)), name="fc")
    b.output(b.mean(b.mul(h, h), axes=(0, 1), name="mean"), "loss")
    p = b.build()
    step = optim.compile_step(p, "loss", optim.SGD(p, lr=0.1), {"x": (B, 6)}, executor="aten")
    (x, _), *_ = batches(1)
    expected = np.ones((1, 6), np.float32) - 0.1 * 2 / B * (x @ np.ones((6, 1), np.float32)).T @ x
    step(x=x)
    np.testing.assert_allclose(p.weights["w"].numpy(), expected, rtol=1e-5)

    q, head = network(), nn.Linear(4, 4)
    opt = optim.AdamW([*q.parameters(), *head.parameters()], lr=1e-2)
    other = optim.compile_step(q, lambda out, y: F.cross_entropy(head(out), y), opt, INPUTS, executor="aten")
    twin, head2 = network(), nn.Linear(4, 4)
    head2.load_state_dict(head.state_dict())
    opt2 = optim.AdamW([*twin.parameters(), *head2.parameters()], lr=1e-2)
    for x, y in batches(5):
        opt2.zero_grad()
        value = F.cross_entropy(head2(twin(x=x)["out"]), gw.tensor(y))
        value.backward()
        opt2.step()
        assert other(x=x, y=y).item() == value.item()
    assert head.weight.numpy().tobytes() == head2.weight.numpy().tobytes()


def test_invalid_inputs_are_refused_before_anything_runs() -> None:
    p = network()
    opt = optim.AdamW(p, lr=1e-2)
    with pytest.raises(FeedError, match="y: missing"):
        optim.compile_step(p, loss, opt, {"x": (B, 6)})
    with pytest.raises(FeedError, match="pass a Spec or an example"):
        optim.compile_step(p, loss, opt, {"x": (B, 6), "y": (B,)})
    with pytest.raises(FeedError, match="z: no such input"):
        optim.compile_step(p, loss, opt, {**INPUTS, "z": (1,)})
    with pytest.raises(UsageError, match="reads no output"):
        optim.compile_step(p, lambda y: y, opt, INPUTS)
    with pytest.raises(UsageError, match="out of range"):
        optim.compile_step(p, loss, opt, INPUTS, accumulate=0)
    with pytest.raises(UsageError, match="0-d tensor"):
        optim.compile_step(p, lambda out, y: out, opt, INPUTS)(x=np.zeros((B, 6), np.float32), y=np.zeros(B, np.int64))
    step = optim.compile_step(p, loss, opt, INPUTS)
    then = bits(p)
    with pytest.raises(FeedError):
        step(x=np.zeros((B + 1, 6), np.float32), y=np.zeros(B, np.int64))
    assert bits(p) == then


def test_a_step_recovers_after_undo_of_a_breaking_edit() -> None:
    p = network()
    step = optim.compile_step(p, loss, optim.AdamW(p, lr=1e-2), INPUTS, executor="aten")
    (x, y), *_ = batches(1)
    step(x=x, y=y)
    with p.edit("no output of that name") as e:
        e.set_outputs(other="tanh")
    with pytest.raises(gw.GraphwrightError):
        step(x=x, y=y)
    p.undo()
    assert np.isfinite(step(x=x, y=y).item())


def test_a_bound_step_equals_a_called_step() -> None:
    called, bound = network(), network()
    steps = []
    for p in (called, bound):
        steps.append(gw.compile_step(p, loss, optim.Adam(p.parameters(), lr=0.05), INPUTS))
    run = steps[1].bind()
    for x, y in batches(4):
        made = steps[0](x=x, y=y)
        run.inputs["x"][:], run.inputs["y"][:] = x, y
        run()
        assert run.outputs["loss"].tobytes() == made.numpy().tobytes()
    for mine, theirs in zip(called.parameters(), bound.parameters(), strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_variables_of_the_optimizer_leave_a_weight_with_their_name_alone() -> None:
    trained = []
    for key in ("factors", "momentum"):
        b = Builder("scaled")
        h = b.linear(b.input("x", (B, 6)), b.param("w", np.full((4, 6), 0.1, "f4")))
        b.output(b.mul(h, b.const("factors", np.arange(4, dtype="f4"))), "out")
        p = b.build()
        opt = optim.SGD(p, lr=0.1, momentum=0.9)
        if key != "factors":
            key = next(name for name, v in opt.variables().items() if v.shape == (4, 6))
        with p.edit("the key of the const, and not its name, is that of a variable of the optimizer") as e:
            e.rename("factors", "factors", key=key)
        step = optim.compile_step(p, loss, opt, INPUTS)
        for x, y in batches(3):
            step(x=x, y=y)
        trained.append(p.weights["w"].data.tobytes())
    assert trained[0] == trained[1]


@pytest.mark.parametrize("executor", ["aten", "auto"])
def test_a_step_follows_an_edit_that_resizes_the_output(executor: str) -> None:
    def program(out: int) -> Program:
        b = Builder("resized")
        b.output(b.linear(b.input("x", (B, 6)), b.param("w", np.full((out, 6), 0.1, "f4")), name="h"), "out")
        return b.build()

    def squares(out: Tensor) -> Tensor:
        return (out * out + 1.0).mean()

    p, fresh, x = program(4), program(5), batches(1)[0][0]
    step = optim.compile_step(p, squares, optim.SGD(p, lr=0.1), {"x": x}, executor=executor)
    step(x=x)
    with p.edit("another output") as e:
        e.set_weight("w", np.full((5, 6), 0.1, "f4"))
    other = optim.compile_step(fresh, squares, optim.SGD(fresh, lr=0.1), {"x": x}, executor=executor)
    assert step(x=x).item() == other(x=x).item()
    assert p.weights["w"].data.tobytes() == fresh.weights["w"].data.tobytes()


def test_a_constant_of_an_earlier_trace_is_not_taken_for_a_new_one_at_its_address() -> None:
    b = Builder("constants")
    b.output(b.linear(b.input("x", (B, 6)), b.param("w", np.ones((4, 6), "f4")), name="h"), "out")
    p, seen = b.build(), []

    def constant(value: float) -> Any:
        return from_numpy(np.full((4, B), value, "f4")).permute(1, 0)  # the program stores a row-major copy

    def scaled(out: Tensor) -> Tensor:
        gc.collect()
        others = [constant(2.0)]
        while seen and id(others[-1]) not in seen and len(others) < 2000:
            others.append(constant(2.0))
        array = others[-1] if seen else constant(1.0)
        seen.append(id(array))
        return (out * Tensor(array)).sum()

    step = optim.compile_step(p, scaled, optim.SGD(p, lr=0.0), {"x": (B, 6)})
    x = np.ones((B, 6), "f4")
    assert step(x=x).item() == 6 * 4 * B
    with p.edit("another output") as e:
        e.set_outputs(out=e.add("copy", "h"))
    assert step(x=x).item() == 2 * 6 * 4 * B
