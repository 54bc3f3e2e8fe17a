"""Lazy optimizers: a parameter whose gradient is zero everywhere is not stepped, as one of torch without a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from optim_parameters import low, values

import graphwright as gw
from graphwright import amp, optim
from graphwright.array import from_numpy
from graphwright.array.cpu import tensor_allocations
from graphwright.autograd import Parameter, Tensor
from graphwright.optim import StateError

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{n: (getattr(optim, n), {}) for n in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")},
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True}),
    "SGD": (optim.SGD, {"weight_decay": 0.1}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Lion": (optim.Lion, {"weight_decay": 0.1}),
}
EXPERTS, WIDTH = 8, 6


def drawn(step: int) -> list[np.ndarray]:
    """Gradients of three parameters; from step to step others are zero."""
    return [g * (k % 3 != step % 3 and (step + k) % 5 != 0) for k, g in enumerate(values(step + 1))]


def bits(opt: Any, p: Parameter) -> list[bytes]:
    return [v.data.tobytes() for v in (p, *opt.state_of(p).variables().values())]


@pytest.mark.parametrize("kind", ["SGD momentum", "Adam", "AdamW"])
def test_fifty_steps_equal_those_of_torch_without_these_gradients(kind: str) -> None:
    make, options = KINDS[kind]
    ours = [Parameter(from_numpy(v), name=f"p{i}") for i, v in enumerate(values(0))]
    theirs = [torch.tensor(v, requires_grad=True) for v in values(0)]
    a = make(ours, lr=0.02, lazy=True, **options)
    b = getattr(torch.optim, kind.split()[0])(theirs, lr=0.02, **options)
    for step in range(50):
        before = [bits(a, p) for p in ours]
        for p, q, g in zip(ours, theirs, drawn(step), strict=True):
            p.grad, q.grad = gw.tensor(g), torch.from_numpy(g) if g.any() else None
        a.step()
        b.step()
        for p, old, g in zip(ours, before, drawn(step), strict=True):
            assert (bits(a, p) == old) == (not g.any())
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=1e-6, atol=1e-6)
        assert a.state_of(p).steps.item() == b.state[q].get("step", a.state_of(p).steps.item())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_steps_as_without_these_gradients(kind: str, dtype: str) -> None:
    make, options = KINDS[kind]
    runs = []
    for lazy in (True, False):
        params = [Parameter(from_numpy(v.astype(dtype)), name=f"p{i}") for i, v in enumerate(values(0))]
        opt = make(params, lr=0.02, lazy=lazy, **options)
        for step in range(8):
            for p, g in zip(params, drawn(step), strict=True):
                p.grad = gw.tensor(g.astype(dtype)) if lazy or g.any() else None
            opt.step()
        runs.append([bits(opt, p) for p in params])
    assert runs[0] == runs[1]


def test_muon_skips_matrices() -> None:
    params = [Parameter(from_numpy(np.eye(3, dtype="f4")), name=n) for n in "ab"]
    opt = optim.Muon(params, lr=0.1, lazy=True)
    for p, scale in zip(params, (0.0, 1.0), strict=True):
        p.grad = gw.tensor(np.full((3, 3), scale, "f4"))
    opt.step()
    moved = [not np.array_equal(p.numpy(), np.eye(3)) for p in params]
    assert (moved, [opt.state_of(p).steps.item() for p in params]) == ([False, True], [0, 1])


@pytest.mark.parametrize("way", ["master", "stochastic", "nearest"])
def test_parameters_of_16_bits_keep_their_bits(way: str) -> None:
    rng = np.random.default_rng(0)
    params = [low(rng.normal(size=(4, 3)).astype("f4")) for _ in range(2)]
    opt = optim.AdamW(params, lr=0.1, weight_decay=0.5, low=way, lazy=True)
    for step in range(6):
        before = [bits(opt, p) for p in params]
        for k, p in enumerate(params):
            p.grad = gw.tensor(rng.normal(size=(4, 3)).astype("f4") * (k == step % 2)).to("bfloat16")
        opt.step()
        assert [bits(opt, p) == old for p, old in zip(params, before, strict=True)] == [step % 2 != 0, step % 2 != 1]


def test_a_gradient_of_nan_is_not_zero() -> None:
    p = Parameter(from_numpy(np.ones(3, "f4")))
    opt = optim.SGD([p], lr=0.1, lazy=True)
    p.grad = gw.tensor(np.array([0.0, np.nan, -0.0], "f4"))
    opt.step()
    assert np.isnan(p.numpy()).tolist() == [False, True, False]


# -- in a plan ---------------------------------------------------------------------------------------------------------
def mixture(experts: int = EXPERTS, stacked: bool = False) -> gw.Program:
    """Σ over experts of share · linear(x); an expert of share 0 has a gradient of zeros."""
    rng, b = np.random.default_rng(0), gw.Builder("mixture")
    x, share = b.input("x", (5, WIDTH)), b.input("share", (experts, 1, 1))
    start = rng.normal(size=(experts, WIDTH, WIDTH)).astype("f4")
    if stacked:
        made = b.matmul(x, b.param("experts", start))
    else:
        parts = [b.matmul(x, b.param(f"experts.{k}", w)) for k, w in enumerate(start)]
        made = b.concat(*(b.reshape(part, shape=(1, 5, WIDTH)) for part in parts), axis=0)
    y = b.sum(b.mul(made, share), axes=(0,))
    b.output(b.mean(b.mul(y, y), axes=(0, 1)), "loss")
    return b.build()


def feeds(step: int, active: int, experts: int = EXPERTS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    share = np.zeros((experts, 1, 1), "f4")
    share[rng.permutation(experts)[:active]] = 0.5
    return {"x": rng.normal(size=(5, WIDTH)).astype("f4"), "share": share}


def trained(p: gw.Program, opt: Any, **options: Any) -> Any:
    return gw.compile_step(p, "loss", opt, {"x": (5, WIDTH), "share": (len(feeds(0, 1)["share"]), 1, 1)}, **options)


@pytest.mark.parametrize("executor", ["aten", "vm"])
def test_only_the_bytes_of_active_experts_change(executor: str) -> None:
    p = mixture()
    opt = optim.AdamW(p, lr=0.01, lazy=True)
    step = trained(p, opt, executor=executor)
    step(feeds(0, EXPERTS))
    for k, active in enumerate((4, 2, 1, 8, 3), 1):
        before, given = [bits(opt, w) for w in p.parameters()], feeds(k, active)
        step(given)
        changed = [bits(opt, w) != old for w, old in zip(p.parameters(), before, strict=True)]
        assert changed == (given["share"].ravel() != 0).tolist()
    assert 0 < min(opt.state_of(w).steps.item() for w in p.parameters()) < 6


def test_a_lazy_step_allocates_nothing() -> None:
    p = mixture()
    step = trained(p, optim.AdamW(p, lr=0.01, lazy=True), executor="aten")
    step(feeds(0, 3))
    arrays = [gw.tensor(feeds(1, 3)[name]).data for name in step.program.input_names()]
    space = step.plan.executable()
    assert tensor_allocations(lambda: space.step(arrays)) == []


def test_a_stacked_parameter_moves_as_a_whole() -> None:
    p = mixture(stacked=True)
    opt = optim.AdamW(p, lr=0.01, lazy=True)
    step = trained(p, opt)
    step(feeds(0, EXPERTS))
    (w,) = p.parameters()
    before = w.numpy().copy()
    step(feeds(1, 1))
    assert all(np.abs(w.numpy() - before).max(axis=(1, 2)) > 0)


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_scaling_and_clipping_go_on_working(scaled: bool) -> None:
    """An expert is stepped if one of the batches of a step used it, and none is where a gradient is not finite."""
    p = mixture()
    opt = optim.AdamW(p, lr=0.01, lazy=True)
    scaler = amp.GradScaler(2.0**10) if scaled else None
    step = trained(p, opt, accumulate=2, clip=0.1, scaler=scaler, deterministic=True)
    for k in range(6):
        before, first, second = [bits(opt, w) for w in p.parameters()], feeds(2 * k, 2), feeds(2 * k + 1, 2)
        if scaled and k == 3:
            second["x"][0, 0] = np.inf
        used = (first["share"] + second["share"]).ravel() != 0
        step(first)
        step(second)
        moved = [bits(opt, w)[0] != old[0] for w, old in zip(p.parameters(), before, strict=True)]
        assert moved == (used & (not (scaled and k == 3))).tolist()


def test_compiled_steps_equal_eager_ones() -> None:
    runs: list[list[bytes]] = []
    for compiled in (False, True):
        p = mixture()
        opt = optim.Adam(p, lr=0.01, weight_decay=0.1, lazy=True)

        def eager(given: dict[str, Any], p: gw.Program = p, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = p(**given)["loss"]
            loss.backward()
            opt.step()
            return loss

        step = trained(p, opt, deterministic=True) if compiled else eager
        losses = [step(feeds(k, 3)).numpy().tobytes() for k in range(10)]
        runs.append([*losses, *(b for w in p.parameters() for b in bits(opt, w))])
    assert runs[0] == runs[1]


def test_a_saved_training_is_resumed_with_the_same_choice(tmp_path: Any) -> None:
    p = mixture()
    opt = optim.AdamW(p, lazy=True)
    step = trained(p, opt)
    step(feeds(0, 3))
    gw.save_state(tmp_path / "state", p, opt, compiled=step)
    other = mixture()
    eager = optim.AdamW(other)
    with pytest.raises(StateError, match="lazy of the step: expected True, got False"):
        gw.load_state(tmp_path / "state", other, eager, compiled=trained(other, eager))
    again = optim.AdamW(other, lazy=True)
    gw.load_state(tmp_path / "state", other, again, compiled=trained(other, again))
    assert [bits(again, w) for w in other.parameters()] == [bits(opt, w) for w in p.parameters()]
