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
        skipped = ins[1].bool().expand(len(params)).tolist()
        sign = -1.0 if attrs["maximize"] else 1.0
        lr = ins[0].double()
        members = [
            (p, *r) if skip else rule(lr, attrs, sign * g, p, *r)
            for skip, g, p, *r in zip(skipped, grads, params, *rest, strict=True)
        ]
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


def _decayed(attrs, lr, g, p):
    if attrs.get("decoupled_weight_decay"):
        return g, p - lr * attrs["weight_decay"] * p
    return g + attrs["weight_decay"] * p, p


def adagrad(lr, attrs, g, p, s, t):
    g, p = _decayed(attrs, lr, g, p)
    s = s + g * g
    rate = lr / (1 + t * attrs["lr_decay"])
    return p - rate * g / ((s + attrs["initial_accumulator_value"]).sqrt() + attrs["eps"]), s, t + 1


def adadelta(lr, attrs, g, p, v, a, t):
    g, p = _decayed(attrs, lr, g, p)
    v = attrs["rho"] * v + (1 - attrs["rho"]) * g * g
    d = ((a + attrs["eps"]) / (v + attrs["eps"])).sqrt() * g
    return p - lr * d, v, attrs["rho"] * a + (1 - attrs["rho"]) * d * d, t + 1


def adamax(lr, attrs, g, p, m, u, t):
    g, p = _decayed(attrs, lr, g, p)
    m = attrs["beta1"] * m + (1 - attrs["beta1"]) * g
    u = torch.maximum(attrs["beta2"] * u, g.abs() + attrs["eps"])
    return p - lr / (1 - attrs["beta1"] ** (t + 1)) * m / u, m, u, t + 1


def _means(attrs, g, m, v):
    return attrs["beta1"] * m + (1 - attrs["beta1"]) * g, attrs["beta2"] * v + (1 - attrs["beta2"]) * g * g


def nadam(lr, attrs, g, p, m, v, product, t):
    """Dozat 2016, algorithm 2, with the schedule of its section 3."""
    g, p = _decayed(attrs, lr, g, p)
    t = t + 1
    m, v = _means(attrs, g, m, v)
    now, then = (attrs["beta1"] * (1 - 0.5 * 0.96 ** (k * attrs["momentum_decay"])) for k in (t, t + 1))
    product = now if t == 1 else product * now
    ahead = (1 - now) / (1 - product) * g + then / (1 - product * then) * m
    return p - lr * ahead / ((v / (1 - attrs["beta2"] ** t)).sqrt() + attrs["eps"]), m, v, product, t


def radam(lr, attrs, g, p, m, v, t):
    """Liu et al. 2020, algorithm 2."""
    g, p = _decayed(attrs, lr, g, p)
    t, beta2 = t + 1, attrs["beta2"]
    m, v = _means(attrs, g, m, v)
    long = 2 / (1 - beta2) - 1
    rho, step = long - 2 * t * beta2**t / (1 - beta2**t), lr * m / (1 - attrs["beta1"] ** t)
    if rho > 5:
        step = step * (1 - beta2**t) ** 0.5 / (v.sqrt() + attrs["eps"])
        step = step * ((rho - 4) * (rho - 2) * long / ((long - 4) * (long - 2) * rho)) ** 0.5
    return p - step, m, v, t


def asgd(lr, attrs, g, p, a, eta, t):
    g, p = _decayed(attrs, lr, g, p)
    eta = lr if t == 0 else eta
    p = p - eta * (attrs["lambd"] * p + g)
    a = a + (p - a) / max(1, t - attrs["t0"])
    return p, a, lr / (1 + attrs["lambd"] * lr * (t + 1)) ** attrs["alpha"], t + 1


def rprop(lr, attrs, g, p, before, size, t):
    size = torch.where(size == 0, lr, size)
    changed, kept = g * before < 0, g * before > 0
    size = torch.where(changed, attrs["down"] * size, torch.where(kept, attrs["up"] * size, size))
    size = size.clamp(attrs["smallest"], attrs["largest"])
    g = torch.where(changed, 0.0, g)
    return p - size * g.sign(), g, size, t + 1
