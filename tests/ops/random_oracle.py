"""The random ops by numpy, from the words of `array.random`, whose Philox the published vectors prove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from choosing import chosen, gumbel
from graphwright.array import random
from graphwright.array.cpu.kernel import TORCH_DTYPE

Tensors = Sequence[torch.Tensor]


def source(key: torch.Tensor, a: dict) -> dict[str, int]:
    return {"seed": int(key[0]) % 2**64, "step": int(key[1]), "stream": a["stream"]}


def noise(make: Callable[..., np.ndarray]) -> Callable[[Tensors, dict], torch.Tensor]:
    def drawn(ins: Tensors, a: dict) -> torch.Tensor:
        numbers = make(prod(a["shape"]), **source(ins[0], a)).reshape(a["shape"])
        return torch.from_numpy(numbers).to(TORCH_DTYPE[a["dtype"]])

    return drawn


def randint(ins: Tensors, a: dict) -> torch.Tensor:
    numbers = random.integers(a["low"], a["high"], prod(a["shape"]), **source(ins[0], a))
    return torch.from_numpy(numbers.reshape(a["shape"]))


def uniform(shape: tuple[int, ...], key: torch.Tensor, a: dict) -> torch.Tensor:
    return torch.from_numpy(random.uniform(prod(shape), **source(key, a)).astype(np.float64).reshape(shape))


def bernoulli(ins: Tensors, a: dict) -> torch.Tensor:
    p, key = ins
    return (uniform(tuple(p.shape), key, a) < p.double()).to(p.dtype)


def dropout(ins: Tensors, a: dict) -> tuple[torch.Tensor, torch.Tensor]:
    x, key = ins
    kept = uniform(tuple(x.shape), key, a) >= a["p"]
    scaled = x / (1 - a["p"]) if a["p"] < 1 else x
    return torch.where(kept, scaled, torch.zeros((), dtype=x.dtype)), key.clone()


def stochastic_round(ins: Tensors, a: dict) -> torch.Tensor:
    """The nearer of the two neighbours in bfloat16 as often as it is near: by distances, in float64."""
    x, key = ins[0].double().numpy(), ins[1]
    bits = ins[0].numpy().view(np.uint32)
    inner, outer = (((bits & 0xFFFF0000) + np.uint32(n)).view(np.float32).astype(np.float64) for n in (0, 2**16))
    u = (random.bits(x.size, **source(key, a)) >> np.uint32(16)).reshape(x.shape) * 2.0**-16
    taken = np.where(u >= 1 - (x - inner) / (outer - inner), outer, inner)
    return torch.from_numpy(taken).to(torch.bfloat16)


def multinomial(ins: Tensors, a: dict) -> torch.Tensor:
    """With replacement where a number falls among the cumulated weights, else the first in an exponential race."""
    weights, key = ins[0].double().numpy(), ins[1]
    rows = weights.reshape(-1, weights.shape[-1])
    if a["replacement"]:
        u = uniform((len(rows), a["samples"]), key, a).numpy()
        found = [np.searchsorted(w.cumsum(), n * w.sum(), side="right") for w, n in zip(rows, u, strict=True)]
    else:
        words = random.bits(rows.size, **source(key, a)) >> np.uint32(8)
        waiting = -np.log((words + 0.5) * 2.0**-24).reshape(rows.shape) / rows
        found = [np.argsort(w)[: a["samples"]] for w in waiting]
    return torch.from_numpy(np.array(found).reshape(*weights.shape[:-1], a["samples"]))


def sample_token(ins: Tensors, a: dict) -> tuple[torch.Tensor, ...]:
    rows = [chosen(*operands) for operands in zip(*(t.numpy() for t in ins), strict=True)]
    return torch.tensor([token for token, _ in rows]), torch.from_numpy(np.stack([kept for _, kept in rows]))


RANDOM: dict[str, Callable[[Tensors, dict], Any]] = {
    "uniform": noise(random.uniform),
    "normal": noise(random.normal),
    "gumbel": noise(gumbel),
    "randint": randint,
    "bernoulli": bernoulli,
    "dropout": dropout,
    "multinomial": multinomial,
    "sample_token": sample_token,
    "stochastic_round": stochastic_round,
}
