"""Convolution, pooling and resampling in torch: the part of the oracle that knows spatial axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensors = Sequence[torch.Tensor]


def per_axis(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def named(name: str, rank: int) -> Callable[..., Any]:
    return getattr(F, name.format(rank))


def conv(ins: Tensors, a: dict) -> torch.Tensor:
    return named("conv{}d", ins[0].dim() - 2)(*ins, **a)


def conv_transpose(ins: Tensors, a: dict) -> torch.Tensor:
    return named("conv_transpose{}d", ins[0].dim() - 2)(*ins, **a)


def conv_weight(ins: Tensors, a: dict) -> torch.Tensor:
    """The gradient of torch's convolution, differentiable itself."""
    x, g = ins
    rest = {k: v for k, v in a.items() if k != "kernel"}
    w = torch.zeros(g.shape[1], x.shape[1] // a["groups"], *a["kernel"], dtype=x.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(conv([x, w], rest), w, g, create_graph=True)[0]


def planes(x: torch.Tensor, a: dict, *names: str) -> tuple[torch.Tensor, dict]:
    """x [N, C, L] as [N, C, 1, L], with the attributes of a plane."""
    rank = x.dim() - 2
    pairs = {k: per_axis(a[k], rank) for k in names}
    if rank == 2:
        return x, pairs
    return x.unsqueeze(2), {k: ((0 if k == "padding" else 1), *v) for k, v in pairs.items()}


def unfold(ins: Tensors, a: dict) -> torch.Tensor:
    x, pairs = planes(ins[0], a, "kernel", "stride", "padding", "dilation")
    return F.unfold(x, pairs.pop("kernel"), **pairs)


def fold(ins: Tensors, a: dict) -> torch.Tensor:
    names = ("kernel", "sizes", "stride", "padding", "dilation")
    _, pairs = planes(torch.zeros(1, 1, *a["sizes"]), a, *names)
    out = F.fold(ins[0], pairs.pop("sizes"), pairs.pop("kernel"), **pairs)
    return out if len(a["sizes"]) == 2 else out.squeeze(2)


def max_pool(ins: Tensors, a: dict) -> tuple[torch.Tensor, ...]:
    rest = {k: v for k, v in a.items() if k != "kernel"}
    return named("max_pool{}d", len(a["kernel"]))(ins[0], a["kernel"], **rest, return_indices=True)


def avg_pool(ins: Tensors, a: dict) -> torch.Tensor:
    rest = {k: v for k, v in a.items() if k not in ("kernel", "sizes")}
    return named("avg_pool{}d", len(a["kernel"]))(ins[0], a["kernel"], **rest)


def adaptive_avg_pool(ins: Tensors, a: dict) -> torch.Tensor:
    return named("adaptive_avg_pool{}d", len(a["sizes"]))(ins[0], a["sizes"])


def interpolate(ins: Tensors, a: dict) -> torch.Tensor:
    mode = {"nearest": "nearest", "linear": ("linear", "bilinear")[len(a["sizes"]) - 1]}[a["mode"]]
    return F.interpolate(ins[0], a["sizes"], mode=mode, align_corners=a["align_corners"] or None)


def transposed(forward: Callable[[Tensors, dict], torch.Tensor]) -> Callable[[Tensors, dict], torch.Tensor]:
    """The transpose of a linear op, from torch's own gradient of it; differentiable itself."""

    def backward(ins: Tensors, a: dict) -> torch.Tensor:
        g, sizes = ins[0], a["sizes"]
        x = torch.zeros(*g.shape[: g.dim() - len(sizes)], *sizes, dtype=g.dtype, requires_grad=True)
        with torch.enable_grad():
            return torch.autograd.grad(forward([x], {**a, "sizes": g.shape[2:]}), x, g, create_graph=True)[0]

    return backward


WINDOWS: dict[str, Callable[[Tensors, dict], Any]] = {
    "conv": conv,
    "conv_transpose": conv_transpose,
    "conv_weight": conv_weight,
    "unfold": unfold,
    "fold": fold,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "avg_pool_backward": transposed(avg_pool),
    "adaptive_avg_pool": adaptive_avg_pool,
    "adaptive_avg_pool_backward": transposed(adaptive_avg_pool),
    "interpolate": interpolate,
    "interpolate_backward": transposed(interpolate),
}
