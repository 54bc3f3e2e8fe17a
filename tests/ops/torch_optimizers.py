"""Steps of optimizers as torch writes them: the oracle of the ops that end in `_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def columns(tensors: Sequence[torch.Tensor], width: int) -> list[list[torch.Tensor]]:
    """Operands as columns of one entry per parameter, in float64."""
    n = len(tensors) // width
    return [[t.double() for t in tensors[c * n : (c + 1) * n]] for c in range(width)]


def optimizer(moments: Callable[[dict], int], rule: Callable) -> Callable:
    """A step of all parameters from the rule for one: (lr, attrs, g, θ, moments..., steps made before) -> new ones."""

    def step(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
        grads, params, *rest = columns(ins[2:], moments(attrs) + 3)
        if ins[1]:
            return tuple(t.clone() for t in ins[2 + len(grads) :])
        sign = -1.0 if attrs["maximize"] else 1.0
        lr = ins[0].double()
        members = [rule(lr, attrs, sign * g, p, *r) for g, p, *r in zip(grads, params, *rest, strict=True)]
        news = [t for column in zip(*members, strict=True) for t in column]
        return tuple(t.to(old.dtype) for t, old in zip(news, ins[2 + len(grads) :], strict=True))

    return step


def adam(decoupled: bool) -> Callable:
    """Kingma and Ba 2015, algorithm 1, or Loshchilov and Hutter 2019, algorithm 2, line by line."""

    def rule(lr, attrs, g, p, m, v, *rest):
        *largest, t = rest
        decay, t = attrs["weight_decay"], t + 1
        if decoupled:
            p = p - lr * decay * p
        else:
            g = g + decay * p
        m = attrs["beta1"] * m + (1 - attrs["beta1"]) * g
        v = attrs["beta2"] * v + (1 - attrs["beta2"]) * g**2
        largest = [torch.maximum(x, v) for x in largest]
        below = ((largest or [v])[0] / (1 - attrs["beta2"] ** t)).sqrt() + attrs["eps"]
        return p - lr * m / (1 - attrs["beta1"] ** t) / below, m, v, *largest, t

    return optimizer(lambda a: 2 + a["amsgrad"], rule)


def sgd(lr, attrs, g, p, *rest):
    *b, t = rest
    g = g + attrs["weight_decay"] * p
    if not b:
        return p - lr * g, t + 1
    new = g if t == 0 else attrs["momentum"] * b[0] + (1 - attrs["dampening"]) * g
    return p - lr * (g + attrs["momentum"] * new if attrs["nesterov"] else new), new, t + 1


def rmsprop(lr, attrs, g, p, v, *rest):
    *rest, t = rest
    g = g + attrs["weight_decay"] * p
    v = attrs["alpha"] * v + (1 - attrs["alpha"]) * g * g
    mean = [attrs["alpha"] * rest[-1] + (1 - attrs["alpha"]) * g] if attrs["centered"] else []
    d = g / ((v - mean[0] ** 2 if mean else v).sqrt() + attrs["eps"])
    buffer = [attrs["momentum"] * rest[0] + d] if attrs["momentum"] else []
    return p - lr * (buffer or [d])[0], v, *buffer, *mean, t + 1


def lion(lr, attrs, g, p, m, t):
    """Chen et al. 2023, algorithm 2."""
    way = torch.sign(attrs["beta1"] * m + (1 - attrs["beta1"]) * g)
    return p - lr * (way + attrs["weight_decay"] * p), attrs["beta2"] * m + (1 - attrs["beta2"]) * g, t + 1


def muon(lr, attrs, g, p, b, t):
    """By the singular values: the quintic acts on each of them alone."""
    b = attrs["momentum"] * b + (1 - attrs["momentum"]) * g
    u, s, v = torch.linalg.svd(
        attrs["momentum"] * b + (1 - attrs["momentum"]) * g if attrs["nesterov"] else b, full_matrices=False
    )
    s = s / s.norm()
    for _ in range(attrs["iterations"]):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    r, c = p.shape
    scale = max(1, r / c) ** 0.5 if attrs["adjust"] == "original" else 0.2 * max(r, c) ** 0.5
    return (1 - lr * attrs["weight_decay"]) * p - lr * scale * (u * s) @ v, b, t + 1
