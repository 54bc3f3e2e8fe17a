"""Optimizers against torch's, eager and compiled, per option; groups, masters, edits of what they train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import bfloat16, empty, from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.errors import UsageError
from graphwright.optim import SGD, Adam, AdamW, Optimizer, RMSprop, accumulate, ema_update
from values import grad_of

ADAM: list[dict[str, Any]] = [
    {},
    {"lr": 0.03},
    {"betas": (0.5, 0.7)},
    {"betas": (0.0, 0.0)},
    {"eps": 1e-2},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "lr": 0.1},
    {"amsgrad": True, "lr": 0.03},
    {"maximize": True, "weight_decay": 0.1},
]
SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.03, "momentum": 0.9, "dampening": 0.3},
    {"lr": 0.03, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "weight_decay": 0.2},
    {"lr": 0.03, "momentum": 0.5, "nesterov": True, "weight_decay": 0.2},
    {"lr": 0.01, "momentum": 0.5, "dampening": 0.9, "maximize": True, "weight_decay": 0.2},
]
RMSPROP: list[dict[str, Any]] = [
    {},
    {"alpha": 0.7},
    {"eps": 1e-2},
    {"weight_decay": 0.3},
    {"lr": 1e-3, "momentum": 0.9},
    {"centered": True, "alpha": 0.9},
    {"lr": 1e-3, "centered": True, "momentum": 0.5, "weight_decay": 0.1, "maximize": True},
]
KINDS = {"Adam": Adam, "AdamW": AdamW, "SGD": SGD, "RMSprop": RMSprop}

SHAPES = [(5, 3), (3,), (2, 1, 4)]
STEPS = 100
OPTIONS = [
    *((kind, o) for kind in ("Adam", "AdamW") for o in ADAM),
    *(("SGD", o) for o in SGD_OPTIONS),
    *(("RMSprop", o) for o in RMSPROP),
]


def values(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(np.float32) for s in SHAPES]


def ours() -> list[Parameter]:
    return [Parameter(from_numpy(v), name=f"p{i}") for i, v in enumerate(values(0))]


def theirs() -> list[torch.Tensor]:
    return [torch.tensor(v, requires_grad=True) for v in values(0)]


def give(params: Sequence[Parameter | torch.Tensor], grads: list[np.ndarray]) -> None:
    for p, g in zip(params, grads, strict=True):
        if isinstance(p, torch.Tensor):
            p.grad = torch.from_numpy(g.copy())
        else:
            p.grad = Tensor(from_numpy(g.copy()))


def assert_equal(mine: list[Parameter], reference: list[torch.Tensor], rtol: float = 1e-6) -> None:
    for p, q in zip(mine, reference, strict=True):
        np.testing.assert_allclose(p.data.to_numpy(), q.detach().numpy(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("width", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_a_hundred_steps_are_those_of_torch(kind, options, width):
    """The weights stay near 1: what is compared is relative to that, not to what cancels."""
    mine = [Parameter(from_numpy(v.astype(width)), name=f"p{i}") for i, v in enumerate(values(0))]
    reference = [torch.tensor(v.astype(width), requires_grad=True) for v in values(0)]
    a, b = KINDS[kind](mine, **options), getattr(torch.optim, kind)(reference, **options)
    for step in range(STEPS):
        grads = [g.astype(width) for g in values(step + 1)]
        give(mine, grads)
        give(reference, grads)
        a.step()
        b.step()
    assert_equal(mine, reference, 1e-6 if width == "float32" else 1e-12)
    assert all(a.state_of(p).steps.item() == STEPS for p in mine)


MOMENTS = {
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
    ],
)
def test_moments_are_those_of_torch(kind, options):
    mine, reference = ours(), theirs()
    a, b = KINDS[kind](mine, **options), getattr(torch.optim, kind)(reference, **options)
    for step in range(10):
        give(mine, values(step + 1))
        give(reference, values(step + 1))
        a.step()
        b.step()
    for p, q in zip(mine, reference, strict=True):
        state = a.state_of(p).moments.values()
        for own, name in zip(state, MOMENTS[kind], strict=True):
            np.testing.assert_allclose(own.numpy(), b.state[q][name].numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_torch(kind):
    group = getattr(torch.optim, kind)([torch.zeros(1)]).param_groups[0]
    own = KINDS[kind]([Parameter(from_numpy(np.zeros(1, "f4")))]).param_groups[0]
    assert own.lr == group["lr"]
    assert {n: group[n] for n in own.options if n in group} == {n: v for n, v in own.options.items() if n in group}


def test_a_parameter_without_gradient_waits_and_is_corrected_by_its_own_steps():
    mine, reference = ours(), theirs()
    a, b = AdamW(mine, 0.05), torch.optim.AdamW(reference, 0.05)
    for step in range(30):
        grads = values(step + 1)
        for params in (mine, reference):
            give(params, grads)
            if step < 10 or step % 3:
                params[1].grad = None
        a.step()
        b.step()
    assert_equal(mine, reference)


def test_groups_have_their_own_numbers_and_a_schedule_moves_them_together():
    mine, reference = ours(), theirs()
    rest = {"lr": 0.002, "weight_decay": 0.2, "betas": (0.6, 0.9), "eps": 1e-4}
    a = AdamW([{"params": mine[:1]}, {"params": mine[1:], **rest}], lr=0.01)
    b = torch.optim.AdamW([{"params": reference[:1]}, {"params": reference[1:], **rest}], lr=0.01)
    for step in range(20):
        rate = 1 / (1 + step)
        a.lr = 0.01 * rate
        for group, base in zip(b.param_groups, (0.01, 0.002), strict=True):
            group["lr"] = base * rate
        give(mine, values(step + 1))
        give(reference, values(step + 1))
        a.step()
        b.step()
    assert_equal(mine, reference)


def test_decay_on_matrices_only():
    mine, reference = ours(), theirs()
    a = AdamW(mine, 0.1, weight_decay=0.5, decay_matrices_only=True)
    plain = {"params": [reference[1]], "weight_decay": 0.0}
    b = torch.optim.AdamW([{"params": [reference[0], reference[2]]}, plain], 0.1, weight_decay=0.5)
    give(mine, values(1))
    give(reference, values(1))
    a.step()
    b.step()
    assert_equal(mine, reference)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AdamW, {"lr": -1.0}),
        (AdamW, {"lr": float("nan")}),
        (AdamW, {"betas": (1.0, 0.9)}),
        (AdamW, {"betas": (0.9,)}),
        (Adam, {"eps": -1.0}),
        (Adam, {"weight_decay": -1}),
        (SGD, {"lr": -0.1}),
        (SGD, {"momentum": -0.1}),
        (SGD, {"nesterov": True}),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        (RMSprop, {"alpha": 1.0}),
        (RMSprop, {"momentum": -1.0}),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(kind, options):
    with pytest.raises(UsageError, match="out of range"):
        kind(ours(), **options)


def test_duplicates_and_unknown_entries_are_refused():
    p, q, _ = ours()
    with pytest.raises(UsageError, match="twice"):
        AdamW([p, q, p])
    with pytest.raises(UsageError, match="twice"):
        AdamW([{"params": [p]}, {"params": [q, p]}])
    with pytest.raises(UsageError, match="momentum"):
        AdamW([{"params": [p], "momentum": 0.9}])
    with pytest.raises(UsageError, match="nothing to train"):
        SGD([])
    with pytest.raises(UsageError, match="has params"):
        SGD([{"lr": 0.1}])


@pytest.mark.parametrize("kind", [iter, lambda params: dict(enumerate(params)).values()])
def test_an_iterable_of_parameters_can_be_read_more_than_once(kind):
    params = ours()
    opt = AdamW(kind(params), 0.1)
    give(params, values(1))
    before = params[0].data.to_numpy().copy()
    opt.step()
    assert not np.array_equal(params[0].data.to_numpy(), before)


def test_zero_grad():
    params = ours()
    give(params, values(1))
    AdamW(params).zero_grad()
    assert [p.grad for p in params] == [None] * 3


def test_zero_grad_in_place_keeps_the_memory():
    params = ours()
    give(params[:2], values(1)[:2])
    grad_of(params[0]).numpy()[:] = np.nan
    held = [grad_of(p).data for p in params[:2]]
    AdamW(params).zero_grad(set_to_none=False)
    assert [grad_of(p).data for p in params[:2]] == held
    assert not any(grad_of(p).numpy().any() for p in params[:2])
    assert params[2].grad is None


def test_zero_grad_in_place_is_traced():
    p = ours()[0]
    opt = AdamW([p], weight_decay=0.0)

    def step(x):
        opt.zero_grad()
        (p * x).sum().backward()
        opt.zero_grad(set_to_none=False)
        (p * x).sum().backward()
        opt.step()
        return p.grad

    seen = gw.compile(step)(np.full(p.shape, 3.0, np.float32))
    assert np.array_equal(seen.numpy(), np.full(p.shape, 3.0))


# -- 16 bits -----------------------------------------------------------------------------------------------------------
def low(value: np.ndarray) -> Parameter:
    return Parameter(empty(value.shape, bfloat16).copy_from(from_numpy(value)), name="low")


def test_masters_keep_what_16_bits_would_lose():
    start = np.full((4, 4), 1.0, np.float32)
    twin, p = Parameter(from_numpy(start.copy()), name="twin"), low(start)
    a, b = AdamW([twin], 1e-4, weight_decay=0.0), AdamW([p], 1e-4, weight_decay=0.0)
    for step in range(50):
        g = np.random.default_rng(step).normal(1, 0.1, (4, 4)).astype(np.float32)
        give([twin], [g])
        p.grad = Tensor(from_numpy(g))
        a.step()
        b.step()
    master = b.state_of(p).master
    assert master is not None
    np.testing.assert_allclose(master.data.to_numpy(), twin.data.to_numpy(), rtol=1e-6)
    rounded = torch.tensor(twin.data.to_numpy()).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(p.data.to_numpy("float32"), rounded)
    assert (twin.data.to_numpy() < 0.996).all()  # 50 steps of 1e-4, each below half a bfloat16 step at 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_16_bit_parameter_that_was_set_from_outside_is_trained_from_there(compiled):
    p = low(np.zeros((3,), np.float32))
    opt = AdamW([p], 0.5, weight_decay=0.0)

    def step(g):
        opt.zero_grad()
        (p.float() * g).sum().backward()
        opt.step()
        return p.float().sum()

    run = gw.compile(step) if compiled else step
    one = Tensor(from_numpy(np.ones(3, np.float32)))
    run(one)
    np.testing.assert_allclose(p.data.to_numpy("float32"), -0.5)
    p.assign(Tensor(low(np.array([100.0, 0.0, -100.0], np.float32)).data))
    run(one)
    np.testing.assert_allclose(p.data.to_numpy("float32"), [99.5, -0.5, -100.5], atol=0.3)


# -- compiled ----------------------------------------------------------------------------------------------------------
def test_a_compiled_step_equals_the_eager_one_and_sees_a_new_rate_without_a_trace():
    results = []
    for compiled in (False, True):
        params = ours()
        opt = AdamW(params, 0.05, weight_decay=0.1)

        def step(x, opt=opt, params=params):
            opt.zero_grad()
            loss = ((params[0] * x).sum() + (params[1] * params[1]).sum()) * params[2].sum()
            loss.backward()
            opt.step()
            return loss

        run: Any = gw.compile(step) if compiled else step
        for k in range(8):
            opt.lr = 0.05 / (k + 1)
            run(Tensor(from_numpy(values(k + 1)[0])))
        if compiled:
            assert run.traces == 1
        results.append([p.data.to_numpy() for p in params])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# -- what follows edits ------------------------------------------------------------------------------------------------
def program() -> gw.Program:
    b = gw.Builder()
    x = b.input("x", ("B", 3))
    b.output(b.junction(b.linear(x, b.param("w", values(0)[0][:3] * 1.0)), name="sum"), "y")
    return b.build()


def test_parameters_that_an_edit_adds_are_trained_as_new_ones():
    p = program()
    opt = AdamW(p, 0.1, weight_decay=0.0)
    x = np.ones((2, 3), np.float32)

    def step():
        opt.zero_grad()
        y = p(x=x)
        (y * y).sum().backward()
        opt.step()

    for _ in range(40):
        step()
    assert len(opt.state) == 1
    with p.edit("add") as e:
        e.link("x", "sum", np.full((3, 3), 0.5, np.float32), name="new")
    added = next(q for q in p.parameters() if q.name == "new.weight")
    step()
    moved = added.data.to_numpy() - 0.5
    np.testing.assert_allclose(np.abs(moved), 0.1, rtol=1e-3)  # a first step of Adam is lr, whatever came before
    assert opt.state_of(added).steps.item() == 1
    p.undo()
    step()
    assert [q.name for q in opt.parameters()] == ["w"]


def test_a_changed_shape_starts_its_moments_anew():
    p = program()
    opt = AdamW(p, 0.1)
    x = np.ones((2, 3), np.float32)

    def step():
        opt.zero_grad()
        p(x=x).sum().backward()
        opt.step()

    step()
    with p.edit("narrow") as e:
        e.set_weight("w", lambda w: w[:2])
    step()
    (q,) = p.parameters()
    assert opt.state_of(q).moments["m"].shape == (2, 3)
    assert opt.state_of(q).steps.item() == 1


def test_two_parameters_of_one_name_keep_their_states_apart():
    params = [Parameter(from_numpy(v), name="same") for v in values(0)]
    opt = AdamW(params)
    assert len(opt.variables()) == 1 + 3 * 3


def perceptron() -> gw.Program:
    """x [B, 3] -> tanh(first [5, 3]) -> second [2, 5]."""
    rng, b = np.random.default_rng(7), gw.Builder()
    first = b.linear(
        b.input("x", ("B", 3)), b.param("first.weight", rng.normal(size=(5, 3)).astype("f4")), name="first"
    )
    b.output(b.linear(b.tanh(first), b.param("second.weight", rng.normal(size=(2, 5)).astype("f4"))), "y")
    return b.build()


def run_of(p: gw.Program, opt: Optimizer, compiled: bool) -> Callable[[], Any]:
    """A training step of a program, eager or compiled."""
    x = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)

    def step(x: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        y = p(x=x)
        loss = (y * y).sum()
        loss.backward()
        opt.step()
        return loss

    call = gw.compile(step) if compiled else step
    return lambda: call(gw.tensor(x))


MAKERS = {
    "adamw": (lambda params: AdamW(params, 0.05), lambda params: torch.optim.AdamW(params, 0.05), ("m", "v")),
    "sgd": (
        lambda params: SGD(params, 0.02, momentum=0.9),
        lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
        ("momentum_buffer",),
    ),
}
TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_moments_follow_cut_grown_and_permuted_axes(name, compiled):
    """Surviving moments keep their bits, new ones are 0, and the next steps are those of a run sliced by hand."""
    ours_made, torch_made, _ = MAKERS[name]
    p = perceptron()
    opt = ours_made(p)
    step = run_of(p, opt, compiled)
    for _ in range(4):
        step()
    first, second = (q for q in p.parameters())
    held = {w: {n: v.numpy().copy() for n, v in opt.state_of(w).moments.items()} for w in (first, second)}
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([1, 3]))
    with p.edit("turn") as e:
        e.permute("first.neurons", [2, 0, 1])
    with p.edit("grow") as e:
        e.grow("first.neurons", 1)
    places = [4, 0, 2]
    for n, before in held[first].items():
        state = opt.state_of(first).moments[n].numpy()
        assert state[:3].tobytes() == before[places].tobytes()
        assert not state[3].any()
        assert opt.state_of(second).moments[n].numpy()[:, :3].tobytes() == before_columns(held[second][n], places)
    assert opt.state_of(first).steps.item() == 4
    hand = [torch.tensor(w.numpy().copy(), requires_grad=True) for w in (first, second)]
    other = torch_made(hand)
    for tensor, weight in zip(hand, (first, second), strict=True):
        moments = opt.state_of(weight).moments
        named = {TORCH_NAMES.get(n, n): torch.tensor(v.numpy().copy()) for n, v in moments.items()}
        other.state[tensor] = {"step": torch.tensor(4.0), **named} if name == "adamw" else {
            "momentum_buffer": next(iter(named.values()))}  # fmt: skip
    x = torch.tensor(np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32))
    for _ in range(3):
        step()
        other.zero_grad()
        ((torch.tanh(x @ hand[0].T) @ hand[1].T) ** 2).sum().backward()
        other.step()
    for weight, tensor in zip((first, second), hand, strict=True):
        np.testing.assert_allclose(weight.numpy(), tensor.detach().numpy(), rtol=2e-5, atol=1e-6)


def before_columns(moment: np.ndarray, places: list[int]) -> bytes:
    return np.ascontiguousarray(moment[:, places]).tobytes()


def test_undo_before_a_step_gives_the_moments_back_and_after_one_what_stayed():
    p = perceptron()
    opt = AdamW(p, 0.05)
    step = run_of(p, opt, compiled=False)
    for _ in range(3):
        step()
    first = p.parameters()[0]
    held = opt.state_of(first).moments["m"].numpy().copy()
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([0]))
    p.undo()
    assert opt.state_of(first).moments["m"].numpy().tobytes() == held.tobytes()
    p.redo()
    stayed = opt.state_of(first).moments["m"].numpy().copy()
    assert stayed.tobytes() == held[1:].tobytes()
    p.undo()
    back = opt.state_of(first).moments["m"].numpy()
    assert back[1:].tobytes() == held[1:].tobytes()
    assert not back[0].any()
    p.redo()
    assert opt.state_of(first).moments["m"].numpy().tobytes() == stayed.tobytes()


def test_a_parameter_that_left_and_came_back_has_its_moments():
    p = program()
    opt = AdamW(p, 0.1)
    with p.edit("add") as e:
        e.link("x", "sum", np.full((3, 3), 0.5, np.float32), name="new")
    p(x=np.ones((2, 3), np.float32)).sum().backward()
    opt.step()
    added = next(q for q in p.parameters() if q.name == "new.weight")
    held = opt.state_of(added).moments["m"].numpy().copy()
    p.undo()
    p.redo()
    (again,) = [q for q in p.parameters() if q.name == "new.weight"]
    assert opt.state_of(again).moments["m"].numpy().tobytes() == held.tobytes()


def test_a_shape_that_was_set_between_two_edits_starts_anew():
    p = perceptron()
    opt = AdamW(p, 0.05)
    run_of(p, opt, compiled=False)()
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([0]))
    with p.edit("set") as e:
        e.set_weight("first.weight", lambda w: np.concatenate([w, w[:2]]))
        e.set_weight("second.weight", lambda w: np.concatenate([w, w[:, :2]], axis=1))
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([0]))
    assert p.weights["first.weight"].shape == (5, 3)
    assert opt.state_of(p.parameters()[0]).steps.item() == 0


def test_a_master_follows_too_and_takes_new_rows_from_the_parameter():
    p = low(np.arange(6, dtype=np.float32).reshape(3, 2))
    opt = SGD([p], 0.001, momentum=0.9)
    p.grad = Tensor(from_numpy(np.ones((3, 2), np.float32)))
    opt.step()
    master = opt.state_of(p).master
    assert master is not None
    kept = master.numpy()[[1]].copy()
    after = low(np.concatenate([p.data.to_numpy("float32")[[1]], np.full((1, 2), 7.0, "f4")])).data
    p.reshape_to(after, {0: np.array([1, -1])})
    assert p.grad is None
    p.grad = Tensor(from_numpy(np.zeros((2, 2), np.float32)))
    opt.step()
    master = opt.state_of(p).master
    assert master is not None
    np.testing.assert_allclose(master.numpy(), np.concatenate([kept - 0.0009, [[7.0, 7.0]]]), rtol=1e-6)


def test_an_infinity_that_was_found_keeps_weights_moments_and_counts():
    params = ours()
    opt = AdamW(params, 0.1)
    give(params, values(1))
    opt.step()
    before = [v.numpy().tobytes() for v in opt.variables().values()] + [p.numpy().tobytes() for p in params]
    give(params, [v * np.inf for v in values(2)])
    opt.step(found_inf=Tensor(from_numpy(np.ones((), np.float32))))
    after = [v.numpy().tobytes() for v in opt.variables().values()] + [p.numpy().tobytes() for p in params]
    assert after == before


# -- averages ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [False, True])
def test_ema_update(compiled):
    targets, sources = ours(), [Parameter(from_numpy(v), name=f"s{i}") for i, v in enumerate(values(9))]
    before = [p.numpy().copy() for p in targets]
    run: Any = gw.compile(lambda: ema_update(targets, sources, 0.25)) if compiled else None
    run() if compiled else ema_update(targets, sources, 0.25)
    for t, old, s in zip(targets, before, sources, strict=True):
        np.testing.assert_allclose(t.numpy(), 0.75 * old + 0.25 * s.numpy(), rtol=1e-6)
    for tau in (-0.1, 1.1):
        with pytest.raises(UsageError, match="tau"):
            ema_update(targets, sources, tau)
    with pytest.raises(UsageError, match="different parameters"):
        ema_update(targets, sources[:1], 0.5)


def test_accumulated_micro_batches_are_one_batch():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("f4")
    w = Parameter(from_numpy(np.ones(3, np.float32)))
    loss = lambda x: ((gw.tensor(x) * w).sum(axis=1).tanh()).mean()  # noqa: E731
    whole = loss(x)
    whole.backward()
    one, w.grad = grad_of(w).numpy().copy(), None
    total = accumulate(loss, [x[:4], x[4:]])
    np.testing.assert_allclose(grad_of(w).numpy(), one, rtol=1e-6)
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    with pytest.raises(UsageError):
        accumulate(loss, [])
