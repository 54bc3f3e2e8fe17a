"""Random graphs of operations in float64 against torch: values, masked gradients, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from values import grad_of

F, T = gw.nn.functional, torch.nn.functional
Rule = tuple[Callable[..., Any], Callable[..., Any]]


def both(**rules: Callable[..., Any]) -> dict[str, Rule]:
    """Code that reads the same in both libraries."""
    return {name: (rule, rule) for name, rule in rules.items()}


UNARY: dict[str, Rule] = {
    **both(
        neg=lambda x: -x,
        abs=lambda x: x.abs(),
        exp=lambda x: x.tanh().exp(),
        log=lambda x: (x.abs() + 0.5).log(),
        log1p=lambda x: x.abs().log1p(),
        expm1=lambda x: x.tanh().expm1(),
        sqrt=lambda x: (x * x + 0.3).sqrt(),
        rsqrt=lambda x: (x * x + 0.3).rsqrt(),
        reciprocal=lambda x: (x * x + 0.3).reciprocal(),
        sin=lambda x: x.sin(),
        cos=lambda x: x.cos(),
        sigmoid=lambda x: x.sigmoid(),
        erf=lambda x: x.erf(),
        relu=lambda x: x.relu(),
        clamp=lambda x: x.clamp(-0.5, 0.8),
        cube=lambda x: x**3,
        root=lambda x: (x * x + 0.1) ** 0.7,
        power_of_two=lambda x: 2.0 ** x.tanh(),
        quotient=lambda x: 1.5 / (x * x + 0.4),
        difference=lambda x: 2 - x,
        floor=lambda x: x.floor() * x,
        round=lambda x: x.round() + x,
        detach=lambda x: x.detach() * x,
        clone=lambda x: x.clone(),
        flatten=lambda x: x.flatten(),
        unsqueeze=lambda x: x.unsqueeze(-1),
        squeeze=lambda x: x.squeeze(),
        new_axes=lambda x: x[None, ..., None],
        expand=lambda x: x.expand(3, *x.shape),
        roll=lambda x: x.roll(2),
        tile=lambda x: x.tile(2),
        total=lambda x: x.sum(),
    ),
    "silu": (F.silu, T.silu),
    "gelu": (F.gelu, T.gelu),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), lambda x: T.gelu(x, approximate="tanh")),
    "softplus": (F.softplus, T.softplus),
    "logsigmoid": (F.logsigmoid, T.logsigmoid),
    "elu": (lambda x: F.elu(x, 0.7), lambda x: T.elu(x, 0.7)),
    "remainder": (lambda x: x % 0.7, lambda x: torch.remainder(x, 0.7)),
    "norm": (lambda x: x.norm(), lambda x: x.norm()),
    "masked": (lambda x: x.masked_fill(x > 0.3, 1.7), lambda x: x.masked_fill(x > 0.3, 1.7)),
    "stack": (lambda x: gw.stack([x, x * 2], -1), lambda x: torch.stack([x, x * 2], -1)),
}
AXIS: dict[str, Rule] = {
    **both(
        mean=lambda x: x.mean(0),
        amax=lambda x: x.amax(-1),
        amin=lambda x: x.amin(0),
        largest=lambda x: x.max(-1)[0],
        product=lambda x: x.tanh().prod(-1),
        cumsum=lambda x: x.cumsum(0),
        softmax=lambda x: x.softmax(-1),
        log_softmax=lambda x: x.log_softmax(0),
        logsumexp=lambda x: x.logsumexp(-1),
        flip=lambda x: x.flip(0),
        repeats=lambda x: x.repeat_interleave(2, -1),
        sort=lambda x: x.sort(-1)[0],
        topk=lambda x: x.topk(1, -1)[0],
        first=lambda x: x[0],
        last=lambda x: x[..., -1],
        gathered=lambda x: x[[0, -1, 0]],
        chunk=lambda x: x.chunk(2)[0],
        split=lambda x: x.split(1, -1)[-1],
        cube_norm=lambda x: x.norm(3, -1),
    ),
    "sum_kept": (lambda x: x.sum(-1, keepdims=True), lambda x: x.sum(-1, keepdim=True)),
    "variance": (lambda x: x.var(-1, correction=0), lambda x: x.var(-1, correction=0)),
    "backwards": (lambda x: x[::-1], lambda x: x.flip(0)),
    "pad": (lambda x: gw.pad(x, [(1, 2)]), lambda x: T.pad(x, (1, 2))),
    "layer_norm": (lambda x: F.layer_norm(x, (x.shape[-1],)), lambda x: T.layer_norm(x, (x.shape[-1],))),
    "rms_norm": (
        lambda x: F.rms_norm(x, (x.shape[-1],), gw.full((x.shape[-1],), 1.3, "float64"), 1e-6),
        lambda x: T.rms_norm(x, (x.shape[-1],), torch.full((x.shape[-1],), 1.3, dtype=x.dtype), 1e-6),
    ),
}
PLANE: dict[str, Rule] = {
    **both(tril=lambda x: x.tril(-1), triu=lambda x: x.triu(1), diagonal=lambda x: x.diagonal(0, 0, 1)),
    "turned": (lambda x: x.T, lambda x: x.permute(*reversed(range(x.dim())))),
}
BINARY: dict[str, Rule] = {
    **both(
        add=lambda x, y: x + y,
        sub=lambda x, y: x - y,
        mul=lambda x, y: x * y,
        div=lambda x, y: x / (y * y + 0.5),
        maximum=lambda x, y: x.maximum(y),
        minimum=lambda x, y: x.minimum(y),
        pow=lambda x, y: (x * x + 0.2) ** y.tanh(),
        matmul=lambda x, y: x @ y,
    ),
    "remainder": (lambda x, y: x % (y.abs() + 0.6), lambda x, y: torch.remainder(x, y.abs() + 0.6)),
    "where": (lambda x, y: gw.where(x > y, x, y * 0.5), lambda x, y: torch.where(x > y, x, y * 0.5)),
}
SHAPES = [(), (1,), (3,), (2, 3), (1, 3), (3, 1), (2, 1, 3), (3, 3), (2, 3, 3), (0, 3), (3, 0)]
MOST = 2000  # elements of a value


def choice(rng: np.random.Generator, rank: int) -> tuple[str, Rule]:
    rules = {**UNARY, **(AXIS if rank else {}), **(PLANE if rank > 1 else {})}
    name = list(rules)[rng.integers(len(rules))]
    return name, rules[name]


def grow(rng: np.random.Generator, ours: list[Any], theirs: list[Any]) -> list[str]:
    """Further values, the same on both sides; what torch refuses must be refused, and is left out."""
    log: list[str] = []
    for _ in range(rng.integers(2, 12)):
        if rng.random() < 0.6:
            picked = [int(rng.integers(len(ours)))]
            name, (mine, other) = choice(rng, ours[picked[0]].ndim)
        else:
            picked = [int(k) for k in rng.integers(len(ours), size=2)]
            name = list(BINARY)[rng.integers(len(BINARY))]
            mine, other = BINARY[name]
        try:
            truth = other(*(theirs[k] for k in picked))
        except (RuntimeError, IndexError):  # shapes that do not fit, or the extremum of nothing
            with pytest.raises(gw.GraphwrightError):
                mine(*(ours[k] for k in picked))
            continue
        if truth.numel() > MOST:
            continue
        log.append(f"{name}{picked}")
        found = mine(*(ours[k] for k in picked))
        assert found.shape == tuple(truth.shape), log
        np.testing.assert_allclose(found.numpy(), truth.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=str(log))
        ours.append(found)
        theirs.append(truth)
    return log


def weighed(values: list[Any], zero: Any) -> Any:
    """A scalar that every value has a part in."""
    return sum(((v * (0.1 + 0.01 * k)).sum() for k, v in enumerate(values)), zero)


@pytest.mark.filterwarnings("ignore:var")  # torch's, of nothing
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_graphs_match_torch(first: int) -> None:
    for seed in range(first, first + 50):
        rng = np.random.default_rng(seed)
        hosts = [rng.normal(size=SHAPES[rng.integers(len(SHAPES))]) for _ in range(rng.integers(1, 4))]
        mask = rng.random(len(hosts)) < 0.5
        mask[rng.integers(len(hosts))] = True
        leaves: list[Any] = [gw.tensor(h, requires_grad=bool(m)) for h, m in zip(hosts, mask, strict=True)]
        others: list[Any] = [torch.tensor(h, requires_grad=bool(m)) for h, m in zip(hosts, mask, strict=True)]
        ours, theirs = list(leaves), list(others)
        what = f"seed {seed}: {grow(rng, ours, theirs)}"
        mine, truth = weighed(ours, gw.tensor(0.0, "float64")), weighed(theirs, torch.zeros((), dtype=torch.float64))
        wanted: list[list[Any]] = [[v for v, m in zip(side, mask, strict=True) if m] for side in (leaves, others)]
        if not truth.isfinite():
            continue
        again = bool(rng.random() < 0.3)
        found: Any = gw.grad(mine, wanted[0], create_graph=again)
        right: Any = torch.autograd.grad(truth, wanted[1], create_graph=again)
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-7, atol=1e-8, err_msg=what)
        if again:
            second: list[Any] = [
                sum(((g * g).sum() for g in side), zero) for side, zero in ((found, gw.tensor(0.0)), (right, 0.0))
            ]
            if not second[1].requires_grad or not second[1].isfinite():
                continue
            twice = torch.autograd.grad(second[1], wanted[1], allow_unused=True)
            if not second[0].requires_grad:
                assert all(b is None or not b.any() for b in twice), what
                continue
            for a, b in zip(gw.grad(second[0], wanted[0], allow_unused=True), twice, strict=True):
                host = 0.0 if b is None else b.detach().numpy(force=True)
                if np.isfinite(host).all():
                    np.testing.assert_allclose(
                        0.0 if a is None else a.numpy(), host, rtol=1e-5, atol=1e-6, err_msg=what
                    )


# -- what random programs found ----------------------------------------------------------------------------------------
def test_the_mean_of_an_empty_tensor_has_an_empty_gradient() -> None:
    x = gw.tensor(np.zeros((3, 0)), requires_grad=True)
    x.mean(-1).sum().backward()
    assert grad_of(x).shape == (3, 0)


def test_a_number_is_read_in_the_given_dtype() -> None:
    assert gw.tensor(0.1, "float64").item() == 0.1
    assert gw.tensor([[0.1, 2]], dtype="float64").tolist() == [[0.1, 2.0]]
    for wrong in (["a"], [None], [[1], [1, 2]], object()):
        for kind in (None, "float64"):
            with pytest.raises(gw.GraphwrightError, match="not an array of numbers"):
                gw.tensor(wrong, kind)


def test_argmax_without_an_axis_indexes_the_flattened_array() -> None:
    host = np.random.default_rng(0).normal(size=(3, 4, 2))
    x, y = gw.tensor(host), torch.tensor(host)
    for name in ("argmax", "argmin"):
        assert getattr(x, name)().item() == getattr(y, name)().item()
        assert getattr(x, name)(1).tolist() == getattr(y, name)(1).tolist()
    assert gw.tensor(3.0).argmax().item() == 0


@pytest.mark.parametrize("kinds", [("int64", "uint8"), ("uint8", "int64"), ("int8", "uint8"), ("int64", "bool")])
def test_integer_division_keeps_signs(kinds: tuple[str, str]) -> None:
    for shapes in (((), (3,)), ((3,), ()), ((3,), (3,))):
        hosts = [np.full(s, v) for s, v in zip(shapes, (-2, 3) if kinds[0] != "uint8" else (3, -2), strict=True)]
        mine = [gw.tensor(h).to(k) for h, k in zip(hosts, kinds, strict=True)]
        other = [torch.tensor(h).to(getattr(torch, k)) for h, k in zip(hosts, kinds, strict=True)]
        found, truth = mine[0] / mine[1], other[0] / other[1]
        assert (found.dtype.name, found.tolist()) == ("float32", truth.tolist())
    assert (gw.tensor([4]).to("uint8") / -2).tolist() == [-2.0]


def test_integer_tensors_refuse_negative_powers() -> None:
    with pytest.raises(gw.GraphwrightError, match="negative power"):
        _ = gw.tensor([2, 3]) ** -1
    assert (gw.tensor([2.0]) ** -1).tolist() == [0.5]
