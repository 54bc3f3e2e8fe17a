"""Terms of a compiled step against an eager loop with retained gradients: bit for bit, through edits and resumes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_edits import insert_sigmoid

import graphwright as gw
from graphwright import amp, nn, optim
from graphwright.autograd import Tensor, Variable
from graphwright.errors import GraphwrightError, UsageError
from graphwright.optim import StateError, StepTerm, StepView
from graphwright.program import Program
from graphwright.program.kinds import KINDS

F = nn.functional
INPUTS = {"x": (8, 6), "y": np.zeros(8, np.int64)}


class Net(nn.Module):
    """Two layers; the last run's inner value stays readable."""

    def __init__(self) -> None:
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 4)
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.held = self.norm(self.up(x)).tanh()
        return self.down(self.held)


class Pull(StepTerm):
    """Σ over units of mean(gradient · value) · bias², a loss of the bias alone."""

    def nodes(self, program: Program) -> Any:
        return [program.path(n) for n in program.of_kind("tanh")]

    def trains(self, program: Program) -> Any:
        return ["up.bias"]

    def __call__(self, view: StepView) -> Tensor:
        nodes = self.nodes(view.program)
        if not nodes:
            return (view.parameter("up.bias") ** 2.0).sum()
        return pull(view.gradient(nodes[0]), view.value(nodes[0]), view.parameter("up.bias"))


class Speed(StepTerm):
    """Only measures: a moving average of the squared gradient at a node."""

    name = "life"

    def __init__(self) -> None:
        self.mean = Variable(np.zeros((), np.float32), name="life.speed")

    def nodes(self, program: Program) -> Any:
        return ["tanh"]

    def variables(self) -> Any:
        return {"speed": self.mean}

    def __call__(self, view: StepView) -> None:
        square = (view.gradient("tanh") ** 2.0).mean() * 1e3
        self.mean.assign(0.9 * self.mean + 0.1 * square)
        view.report("life.speed", self.mean)
        view.report("life.loss", view.loss * 1.0)


class Decay(StepTerm):
    """½λ Σ w² over all params."""

    def trains(self, program: Program) -> Any:
        return [program.key(n) for n in program.params()]

    def __call__(self, view: StepView) -> Tensor:
        squares = [(view.parameter(k) ** 2.0).sum() for k in self.trains(view.program)]
        return 0.05 * sum(squares[1:], squares[0])


def pull(gradient: Tensor, value: Tensor, bias: Any) -> Tensor:
    return 100.0 * ((gradient * value.to(gradient.dtype)).mean(0) * bias * bias).sum()


def network() -> tuple[Net, Program]:
    gw.manual_seed(3)
    net = Net()
    p = gw.trace(net, np.zeros((8, 6), np.float32))
    for variable in p.variables().values():
        if variable.ndim == 1:
            variable.assign(gw.tensor(np.linspace(-0.5, 0.7, len(variable), dtype="f4")))
    return net, p


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(8, 6)).astype("f4"), "y": rng.integers(0, 4, 8)}


def bits(p: Program, opt: Any) -> dict[str, bytes]:
    held = {**p.variables(), **opt.variables()}
    return {name: v.data.tobytes() for name, v in held.items() if not name.endswith("gradient_sum")}


def eager(net: Net, opt: Any, batches: int, *, accumulate=1, amp_dtype=None, scaler=None, clip=None) -> list[bytes]:
    """The losses of a loop with the terms `Pull` and `Decay`."""
    scale = (lambda t: t) if scaler is None else scaler.scale
    losses, params = [], list(net.parameters())
    for i in range(batches):
        if i % accumulate == 0:
            opt.zero_grad()
        given = batch(i)
        with nullcontext() if amp_dtype is None else amp.autocast(amp_dtype):
            value = loss(net(gw.tensor(given["x"])), gw.tensor(given["y"]))
        net.held.retain_grad()
        scale(value / float(accumulate) if accumulate > 1 else value).backward()
        factor = float(accumulate) * (1.0 if scaler is None else 1.0 / scaler.get_scale())
        g = net.held.grad.float() * factor if factor != 1.0 else net.held.grad.float()
        terms = [pull(g, net.held.detach(), net.up.bias)]
        squares = [(p**2.0).sum() for p in params]
        terms.append(0.05 * sum(squares[1:], squares[0]))
        for term in terms:
            scale(term / float(accumulate) if accumulate > 1 else term).backward()
        if (i + 1) % accumulate == 0:
            if scaler is not None:
                scaler.unscale_(opt)
            if clip:
                optim.clip_grad_norm_(params, clip)
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()
        losses.append(value.numpy().tobytes())
    return losses


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.1},
    "bfloat16": {"amp": "bfloat16"},
    "float16 scaled": {"amp": "float16", "scaler": 2.0**10, "clip": 0.5},
    "accumulate": {"accumulate": 3},
    "accumulate, scale and clip": {"accumulate": 2, "scaler": 2.0**8, "clip": 0.5},
}


@pytest.mark.parametrize("way", ["graph", "checkpoint"])
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_an_eager_loop_with_retained_gradients(case: str, way: str) -> None:
    """Bit for bit; where batches are summed, up to the order of the sum."""
    runs = []
    for compiled in (False, True):
        net, p = network()
        opt, own = optim.AdamW(net.parameters(), lr=1e-2), dict(CASES[case])
        if "scaler" in own:
            own["scaler"] = amp.GradScaler(own["scaler"], growth_interval=7)
        if not compiled:
            own = {"amp_dtype" if n == "amp" else n: v for n, v in own.items()}
            runs.append((eager(net, opt, 20, **own), p, opt))
            continue
        if way == "checkpoint":
            p.checkpoint([n for n in p.nodes() if p.op(n) not in KINDS and p.path(n) != "down.linear"])
        step = gw.compile_step(p, loss, opt, INPUTS, deterministic=True, also=[Pull(), Decay()], **own)
        runs.append(([step(batch(i)).numpy().tobytes() for i in range(20)], p, opt))
    if "accumulate" not in CASES[case]:
        assert runs[0][0] == runs[1][0]
        assert bits(*runs[0][1:]) == bits(*runs[1][1:])
        assert len(set(runs[0][0])) == 20
        return
    mine, theirs = ([np.frombuffer(x, "f4") for x in losses] for losses, _, _ in runs)
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_an_l2_term_is_the_weight_decay_of_sgd() -> None:
    found = []
    for also, decay in (([Decay()], 0.0), ([], 0.1)):
        _, p = network()
        opt = optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=decay)
        step = gw.compile_step(p, loss, opt, INPUTS, also=also)
        found.append(([step(batch(i)).item() for i in range(30)], p))
    np.testing.assert_allclose(*(losses for losses, _ in found), rtol=1e-5)
    for a, b in zip(*(p.parameters() for _, p in found), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_term_is_its_difference_quotient_in_float64() -> None:
    """Value and gradient at the node are constants of the term."""
    _, p = network()
    given = batch(0)
    opt = optim.SGD(p, lr=1.0)
    start = {k: v.numpy().astype("f8") for k, v in p.variables().items()}
    gw.compile_step(p, loss, opt, INPUTS, deterministic=True, also=[Pull()])(given)
    moved = {k: v.numpy().astype("f8") - start[k] for k, v in p.variables().items()}
    _, q = network()
    gw.compile_step(q, loss, optim.SGD(q, lr=1.0), INPUTS, deterministic=True)(given)
    plain = {k: v.numpy().astype("f8") - start[k] for k, v in q.variables().items()}
    added = {k: plain[k] - moved[k] for k in moved}
    assert all(np.abs(a).max() < 1e-6 for k, a in added.items() if k != "up.bias")

    x, w, b = given["x"].astype("f8"), start["up.weight"], start["up.bias"]
    z = x @ w.T + b
    z = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5)
    h = np.tanh(z * start["norm.weight"] + start["norm.bias"])
    scores = h @ start["down.weight"].T + start["down.bias"]
    share = np.exp(scores - scores.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    g = (share - np.eye(4)[given["y"]]) / 8 @ start["down.weight"]
    f = lambda b: 100.0 * ((g * h).mean(0) * b * b).sum()  # noqa: E731
    eps = 1e-5
    steps = np.eye(12) * eps
    slope = np.array([(f(b + e) - f(b - e)) / (2 * eps) for e in steps])
    np.testing.assert_allclose(added["up.bias"], slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("executor", ["aten", "vm"])
def test_a_term_that_measures_changes_no_bit(executor: str) -> None:
    runs = []
    for also in ([], [Speed()]):
        _, p = network()
        opt = optim.AdamW(p, lr=1e-2)
        step = gw.compile_step(p, loss, opt, INPUTS, executor=executor, also=also)
        losses = []
        for i in range(10):
            losses.append(step(batch(i)).numpy().tobytes())
            assert set(step.reports) == ({"life.speed", "life.loss"} if also else set())
            if also:
                assert step.reports["life.loss"].numpy().tobytes() == losses[-1]
        runs.append((losses, bits(p, opt)))
        if also:
            assert step.plan.program.output_names() == ("loss", "life.speed", "life.loss")
            assert "life.speed" in [step.plan.program.path(n) for n in step.plan.program.of_kind("state")]
    assert runs[0] == runs[1]


def test_a_resumed_term_continues_bit_for_bit_and_another_one_is_refused(tmp_path: Path) -> None:
    def make(also: list[StepTerm]) -> tuple[Program, Any, Any]:
        _, p = network()
        opt = optim.AdamW(p, lr=1e-2)
        return p, opt, gw.compile_step(p, loss, opt, INPUTS, also=also)

    def run(step: Any, first: int, last: int) -> list[bytes]:
        found = []
        for i in range(first, last):
            found.append(step(batch(i)).numpy().tobytes())
            found += [t.numpy().tobytes() for t in step.reports.values()]
        return found

    whole = run(make([Speed(), Pull()])[2], 0, 60)
    p, opt, step = make([Speed(), Pull()])
    half = run(step, 0, 30)
    gw.save_state(tmp_path / "state", p, opt, compiled=step, step=30)
    q, opt, step = make([Speed(), Pull()])
    run(step, 70, 72)
    assert gw.load_state(tmp_path / "state", q, opt, compiled=step) == 30
    assert half + run(step, 30, 60) == whole

    p, opt, step = make([Pull()])
    with pytest.raises(StateError, match=r"also of the step: expected \['life', 'pull'\], got \['pull'\]"):
        gw.load_state(tmp_path / "state", p, opt, compiled=step)


@pytest.mark.parametrize("options", [{}, {"amp": "bfloat16"}, {"accumulate": 2, "clip": 0.5}])
def test_terms_follow_edits_and_undo(options: dict[str, Any]) -> None:
    """A step that is updated equals one that is compiled again after each edit; a cut node is no longer asked for."""

    def cut(p: Program, e: Any) -> None:
        e.rewire(p.in_edges("down.linear")[0], e.add("relu", "norm.layer_norm", name="other"))
        e.remove("again")
        e.remove("tanh")

    edits: list[Any] = [
        None,
        insert_sigmoid,
        lambda p, e: e.insert(p.in_edges("tanh")[0], "neg", name="turned"),
        lambda p, e: e.rename("tanh", "renamed"),
        "undo",
        lambda p, e: e.cut_units(p.axes()["up.channels"].units([2, 5])),
        lambda p, e: e.set_attr("up.bias", trainable=False),
        "undo",
        cut,
        "undo",
    ]
    runs = []
    for again in (False, True):
        _, p = network()
        opt = optim.AdamW(p, lr=1e-2)
        make = lambda p=p, opt=opt: gw.compile_step(  # noqa: E731
            p, loss, opt, INPUTS, deterministic=True, also=[Pull(), Decay()], **options
        )
        step, found = make(), []
        for k, change in enumerate(edits):
            if change == "undo":
                p.undo()
            elif change is not None:
                with p.edit("change") as e:
                    change(p, e)
            step = make() if again else step
            found += [step(batch(4 * k + i)).numpy().tobytes() for i in range(4)]
        runs.append((found, bits(p, opt)))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) == len(runs[0][0])


def test_a_step_within_a_budget_equals_one_without() -> None:
    runs: list[Any] = []
    for share in (None, 0.97):
        _, p = network()
        opt = optim.SGD(p, lr=0.1)
        budget = None if share is None else int(share * runs[0][0])
        step = gw.compile_step(p, loss, opt, INPUTS, deterministic=True, remat=budget, also=[Pull(), Speed()])
        losses = [step(batch(i)).numpy().tobytes() for i in range(3)]
        runs.append((step.plan.arena_bytes, losses, bits(p, opt)))
    assert runs[1][0] <= 0.97 * runs[0][0]
    assert runs[0][1:] == runs[1][1:]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_are_zero_where_the_loss_does_not_depend(checkpoint: bool) -> None:
    """And a lazy optimizer steps a parameter that only a term trains."""
    _, p = network()
    with p.edit("a branch") as e:
        e.add("linear", "x", e.param("side.weight", np.ones((2, 6), "f4")), name="side")
        e.add("topk", "side", name="top", k=1)
    if checkpoint:
        p.checkpoint(["tanh"])

    class Side(StepTerm):
        def nodes(self, program: Program) -> Any:
            return ["side", "top", "tanh", "up.bias"]

        def trains(self, program: Program) -> Any:
            return ["side.weight"]

        def __call__(self, view: StepView) -> Tensor:
            assert view.grad("side.weight") is None
            assert view.parameter("up.weight").requires_grad is False
            view.report("zero", view.gradient("side").abs().sum() + view.gradient("top").sum())
            view.report("ids", view.value("top.indices"))
            view.report("same", view.gradient("up.bias") - view.grad("up.bias"))
            view.report("logits", view.named("out"))
            view.report("targets", view.named("y"))
            return (view.parameter("side.weight") * view.value("side").mean()).sum()

    opt = optim.SGD(p, lr=0.5, lazy=True)
    step = gw.compile_step(p, loss, opt, INPUTS, also=[Pull(), Side()], deterministic=True)
    given = batch(0)
    step(given)
    assert all(v.grad is None for v in p.parameters())
    assert (step.reports["zero"].item(), step.reports["ids"].shape) == (0.0, (8, 1))
    assert not step.reports["same"].numpy().any()
    assert step.reports["targets"].numpy().tolist() == given["y"].tolist()
    mean = (given["x"].astype("f8") @ np.ones((6, 2))).mean()
    np.testing.assert_allclose(p.weights["side.weight"].numpy(), 1 - 0.5 * mean, rtol=1e-5)


def test_a_frozen_parameter_is_not_trained_by_a_term() -> None:
    _, p = network()
    with p.edit("freeze") as e:
        e.set_attr("up.bias", trainable=False)
    before = p.weights["up.bias"].numpy().copy()
    gw.compile_step(p, loss, optim.SGD(p, lr=0.5), INPUTS, also=[Pull()])(batch(0))
    assert np.array_equal(p.weights["up.bias"].numpy(), before)


def term(nodes: Any = (), trains: Any = (), call: Any = lambda view: None, name: str = "bad") -> StepTerm:
    made = type("Made", (StepTerm,), {"nodes": lambda s, p: nodes, "trains": lambda s, p: trains,
                                      "__call__": lambda s, view: call(view)})()  # fmt: skip
    made.name = name
    return made


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ([term(trains=["other.weight"], call=lambda view: view.loss)], "does not have"),
        ([term(nodes=["nothing"])], "nothing"),
        ([term(trains=["nothing"])], "not a param"),
        ([term(call=lambda view: view.value("tanh"))], "did not ask for"),
        ([term(nodes=["down.linear"], call=lambda view: view.gradient("tanh"))], "did not ask for"),
        ([term(nodes=["tanh"], call=lambda view: view.value("tanh", 1))], "did not ask for"),
        ([term(trains=["up.bias"], call=lambda view: view.parameter("up.bias"))], "0-d"),
        ([term(call=lambda view: view.loss)], "trains no parameter"),
        ([term(call=lambda view: view.report("loss", view.loss))], "has this name"),
        ([term(call=lambda view: view.report("a", view.loss)) for _ in range(2)], "has this name"),
        ([term(call=lambda view: view.named("z"))], "no such value"),
        ([lambda view: None], "a list of: StepTerm"),
        ([term(name="a.b")], "invalid name"),
    ],
)
def test_wrong_terms_are_refused_and_nothing_is_lost(also: Any, message: str) -> None:
    _, p = network()
    opt = optim.SGD([*p.parameters()], lr=0.5)
    with p.edit("a weight of its own") as e:
        e.param("other.weight", np.ones(3, "f4"))
    before = bits(p, opt)
    with pytest.raises((GraphwrightError, UsageError), match=message):
        gw.compile_step(p, loss, opt, INPUTS, also=also)(batch(0))
    assert bits(p, opt) == before
    gw.compile_step(p, loss, opt, INPUTS, also=[Pull(), Pull()])(batch(0))
