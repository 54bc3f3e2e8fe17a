"""AdamW against torch's, eager and compiled, per option; groups, masters, edits of what it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import bfloat16, empty, from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.errors import UsageError
from graphwright.optim import AdamW
from values import grad_of

SHAPES = [(5, 3), (3,), (2, 1, 4)]
STEPS = 50
OPTIONS = [
    {},
    {"lr": 0.03},
    {"betas": (0.5, 0.7)},
    {"betas": (0.0, 0.0)},
    {"eps": 1e-2},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "lr": 0.1},
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torch(options):
    mine, reference = ours(), theirs()
    a, b = AdamW(mine, **options), torch.optim.AdamW(reference, **options)
    for step in range(STEPS):
        give(mine, values(step + 1))
        give(reference, values(step + 1))
        a.step()
        b.step()
    assert_equal(mine, reference)
    for p, q in zip(mine, reference, strict=True):
        np.testing.assert_allclose(a.moments(p).v.data.to_numpy(), b.state[q]["exp_avg_sq"].numpy(), rtol=1e-5)
        assert a.moments(p).steps.item() == b.state[q]["step"].item() == STEPS


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
    "options",
    [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"betas": (0.9,)}, {"eps": -1.0}, {"weight_decay": -1}],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(UsageError, match="out of range"):
        AdamW(ours(), **options)


def test_duplicates_and_unknown_entries_are_refused():
    p, q, _ = ours()
    with pytest.raises(UsageError, match="twice"):
        AdamW([p, q, p])
    with pytest.raises(UsageError, match="twice"):
        AdamW([{"params": [p]}, {"params": [q, p]}])
    with pytest.raises(UsageError, match="momentum"):
        AdamW([{"params": [p], "momentum": 0.9}])


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
    for step in range(STEPS):
        g = np.random.default_rng(step).normal(1, 0.1, (4, 4)).astype(np.float32)
        give([twin], [g])
        p.grad = Tensor(from_numpy(g))
        a.step()
        b.step()
    master = b.moments(p).master
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
    assert opt.moments(added).steps.item() == 1
    p.undo()
    step()
    assert [q.name for q, _ in opt.groups()] == ["w"]


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
    assert opt.moments(q).m.shape == (2, 3)
    assert opt.moments(q).steps.item() == 1


def test_two_parameters_of_one_name_keep_their_states_apart():
    params = [Parameter(from_numpy(v), name="same") for v in values(0)]
    opt = AdamW(params)
    assert len(opt.variables()) == 1 + 3 * 3
