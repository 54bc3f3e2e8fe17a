"""Optimizers against torch's, eager and compiled, per option; groups and masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from optim_parameters import low, values

import graphwright as gw
from graphwright import optim
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.errors import UsageError
from graphwright.optim import SGD, Adam, AdamW, RMSprop, accumulate, ema_update
from graphwright.testing.oracle import assert_close
from seeds import deep
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
OTHERS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"weight_decay": 0.1, "maximize": True}, {"lambd": 0.1, "alpha": 1.0, "t0": 20}],
    "Adadelta": [{"rho": 0.5, "lr": 0.1, "weight_decay": 0.1}, {"eps": 1e-2, "maximize": True}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}, {"weight_decay": 0.2, "maximize": True}],
    "Adamax": [{"betas": (0.5, 0.7), "weight_decay": 0.1}, {"eps": 1e-2, "maximize": True}],
    "NAdam": [
        {"betas": (0.5, 0.7), "weight_decay": 0.1, "momentum_decay": 0.3},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ],
    "RAdam": [
        {"betas": (0.5, 0.7), "weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ],
    "Rprop": [{"lr": 0.03, "etas": (0.3, 1.7)}, {"step_sizes": (1e-3, 0.1), "maximize": True}],
}
KINDS: dict[str, Any] = {n: getattr(optim, n) for n in ("Adam", "AdamW", "SGD", "RMSprop", *OTHERS)}

STEPS = deep(100, 40)
ROUNDED = {"ASGD": 3e-6, "NAdam": 3e-6, "RAdam": 3e-6}
"""Relative errors after all steps in float32, where torch computes in another order."""
OPTIONS = [
    *((kind, o) for kind, options in OTHERS.items() for o in ({}, *options)),
    *((kind, o) for kind in ("Adam", "AdamW") for o in ADAM),
    *(("SGD", o) for o in SGD_OPTIONS),
    *(("RMSprop", o) for o in RMSPROP),
]


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


@pytest.fixture
def width(request: pytest.FixtureRequest) -> Iterator[str]:
    """The dtype of weights, in which torch stores numbers like the rate of ASGD too."""
    torch.set_default_dtype(getattr(torch, request.param))
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("width", ["float32", "float64"], indirect=True)
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_many_steps_match_torch(kind, options, width):
    """The weights stay near 1: what is compared is relative to that, not to what cancels.

    The rate changes on the way, which is no matter of this step alone for ASGD and none at all for Rprop.
    """
    mine = [Parameter(from_numpy(v.astype(width)), name=f"p{i}") for i, v in enumerate(values(0))]
    reference = [torch.tensor(v.astype(width), requires_grad=True) for v in values(0)]
    a, b = KINDS[kind](mine, **options), getattr(torch.optim, kind)(reference, **options)
    for step in range(STEPS):
        if step == STEPS // 2:
            for group in (*a.param_groups, *b.param_groups):
                group["lr"] *= 0.5
        grads = [g.astype(width) for g in values(step + 1)]
        give(mine, grads)
        give(reference, grads)
        a.step()
        b.step()
    assert_equal(mine, reference, ROUNDED.get(kind, 1e-6) if width == "float32" else 1e-12)
    assert all(a.state_of(p).steps.item() == STEPS for p in mine)


MOMENTS = {
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "ASGD": ("ax", "eta"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Rprop": ("prev", "step_size"),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        *((kind, {"t0": 5} if kind == "ASGD" else {}) for kind in OTHERS),
    ],
)
def test_moments_match_torch(kind, options):
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
def test_defaults_match_torch(kind):
    group = getattr(torch.optim, kind)([torch.zeros(1)]).param_groups[0]
    own = KINDS[kind]([Parameter(from_numpy(np.zeros(1, "f4")))]).param_groups[0]
    assert own.lr == group["lr"]
    assert {n: group[n] for n in own.options if n in group} == {n: v for n, v in own.options.items() if n in group}


def test_a_parameter_without_gradient_is_skipped_and_counts_its_own_steps():
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


def test_groups_have_their_own_options_and_scale_together():
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
        (optim.Adadelta, {"rho": 1.1}),
        (optim.Adagrad, {"lr_decay": -0.1}),
        (optim.Adagrad, {"initial_accumulator_value": -0.1}),
        (optim.Adamax, {"betas": (0.9, 1.0)}),
        (optim.NAdam, {"momentum_decay": -1.0}),
        (optim.RAdam, {"eps": float("nan")}),
        (optim.ASGD, {"weight_decay": -1.0}),
        (optim.Rprop, {"etas": (0.5, 0.9)}),
        (optim.Rprop, {"etas": (0.5,)}),
        (optim.Rprop, {"step_sizes": (1.0, 0.5)}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(kind, options):
    with pytest.raises(UsageError, match="out of range"):
        kind(ours(), **options)


def test_duplicates_and_unknown_entries_are_refused():
    p, q, _ = ours()
    with pytest.raises(UsageError, match="duplicate"):
        AdamW([p, q, p])
    with pytest.raises(UsageError, match="duplicate"):
        AdamW([{"params": [p]}, {"params": [q, p]}])
    with pytest.raises(UsageError, match="momentum"):
        AdamW([{"params": [p], "momentum": 0.9}])
    with pytest.raises(UsageError, match="no parameters"):
        SGD([])
    with pytest.raises(UsageError, match="lacks"):
        SGD([{"lr": 0.1}])


@pytest.mark.parametrize("kind", [iter, lambda params: dict(enumerate(params)).values()])
def test_an_iterable_of_parameters_can_be_read_more_than_once(kind):
    params = ours()
    opt = AdamW(kind(params), 0.1)
    give(params, values(1))
    before = params[0].data.to_numpy().copy()
    opt.step()
    assert not np.array_equal(params[0].data.to_numpy(), before)


@pytest.mark.parametrize("compiled", [False, True])
def test_group_entries_read_and_write_as_in_torch(compiled: bool):
    w, t = Parameter(from_numpy(np.ones(3, "f4"))), torch.ones(3, requires_grad=True)
    mine, theirs = SGD([w], lr=0.1, momentum=0.9), torch.optim.SGD([t], lr=0.1, momentum=0.9)
    x = np.arange(3, dtype="f4")

    def step(x: Tensor) -> Tensor:
        mine.zero_grad()
        loss = (w * w * x).sum()
        loss.backward()
        mine.step()
        return loss

    run = gw.compile(step) if compiled else lambda x: step(gw.tensor(x))
    for rate in (0.1, 0.1, 0.02, 0.0):
        mine.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = rate
        run(x)
        theirs.zero_grad()
        (t * t * torch.from_numpy(x)).sum().backward()
        theirs.step()
        assert_close(w, t.detach(), rtol=1e-6, atol=1e-6)
    group = mine.param_groups[0]
    assert (group["lr"], group["momentum"], group["params"]) == (0.0, 0.9, [w])
    assert dict(group).keys() - {"initial_lr"} <= theirs.param_groups[0].keys()
    with pytest.raises(KeyError):
        group["beta"]
    with pytest.raises(UsageError, match="does not change"):
        group["momentum"] = 0.5
    with pytest.raises(UsageError, match="out of range"):
        group["lr"] = -1.0


def test_zero_grad_sets_gradients_to_none():
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
def test_masters_keep_small_updates():
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
def test_training_continues_from_a_parameter_value_set_by_the_user(compiled):
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
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_equals_eager_and_uses_a_changed_rate(kind):
    results = []
    for compiled in (False, True):
        params = ours()
        opt = KINDS[kind](params, 0.05, **({} if kind == "Rprop" else {"weight_decay": 0.1}))

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
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["AdamW", *OTHERS])
def test_found_inf_leaves_weights_moments_and_counts_unchanged(kind):
    params = ours()
    opt = KINDS[kind](params, 0.1)
    give(params, values(1))
    opt.step()
    before = [v.numpy().tobytes() for v in opt.variables().values()] + [p.numpy().tobytes() for p in params]
    give(params, [v * np.inf for v in values(2)])
    opt.step(found_inf=Tensor(from_numpy(np.ones((), np.float32))))
    after = [v.numpy().tobytes() for v in opt.variables().values()] + [p.numpy().tobytes() for p in params]
    assert after == before


# -- averages ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [False, True])
def test_ema_update_matches_its_formula(compiled):
    targets, sources = ours(), [Parameter(from_numpy(v), name=f"s{i}") for i, v in enumerate(values(9))]
    before = [p.numpy().copy() for p in targets]
    run: Any = gw.compile(lambda: ema_update(targets, sources, 0.25)) if compiled else None
    run() if compiled else ema_update(targets, sources, 0.25)
    for t, old, s in zip(targets, before, sources, strict=True):
        np.testing.assert_allclose(t.numpy(), 0.75 * old + 0.25 * s.numpy(), rtol=1e-6)
    for tau in (-0.1, 1.1):
        with pytest.raises(UsageError, match="tau"):
            ema_update(targets, sources, tau)
    with pytest.raises(UsageError, match="different numbers"):
        ema_update(targets, sources[:1], 0.5)


def test_accumulated_micro_batches_equal_one_batch():
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}])
def test_a_group_may_have_empty_parameters_only(kind: str, dtype: str, options: dict[str, Any]) -> None:
    if kind == "Rprop" and "weight_decay" in options:
        return
    p = Parameter(from_numpy(np.zeros((0, 3), dtype)), name="empty")
    opt = KINDS[kind]([p], lr=0.1, **options)
    for _ in range(2):
        p.grad = gw.zeros(0, 3, dtype=dtype)
        opt.step()
    assert opt.state_of(p).steps.item() == 2


def test_the_members_of_a_group_may_be_a_single_parameter() -> None:
    p, q = (Parameter(from_numpy(np.ones(2, "f4")), name=n) for n in "pq")
    opt = SGD([{"params": p, "lr": 0.5}, {"params": [q]}], lr=1.0)
    for t in (p, q):
        t.grad = gw.ones(2)
    opt.step()
    assert (p.tolist(), q.tolist()) == ([0.5, 0.5], [0.0, 0.0])
