"""Layers of torch with example inputs, and random networks made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def vector(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _attention() -> Example:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return _Only(layer, need_weights=False), (vector(2, 5, 8),)


class _Only(nn.Module):
    """Self-attention, or a recurrent layer, that returns its first result only."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options, self.recurrent = layer, options, isinstance(layer, nn.RNNBase)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0] if self.recurrent else self.layer(x, x, x, **self.options)[0]


LAYERS: dict[str, Callable[[], Example]] = {
    "Linear": lambda: (nn.Linear(8, 5), (vector(3, 8),)),
    "Linear-nobias": lambda: (nn.Linear(8, 5, bias=False), (vector(2, 3, 8),)),
    "Bilinear": lambda: (nn.Bilinear(4, 3, 5), (vector(2, 4), vector(2, 3))),
    "Embedding": lambda: (nn.Embedding(10, 6), (torch.randint(0, 10, (2, 5)),)),
    "Conv1d": lambda: (nn.Conv1d(4, 6, 3, padding=1), (vector(2, 4, 9),)),
    "Conv2d": lambda: (nn.Conv2d(4, 6, 3, stride=2), (vector(2, 4, 9, 8),)),
    "Conv2d-groups": lambda: (nn.Conv2d(4, 8, 3, groups=2, dilation=2), (vector(2, 4, 9, 8),)),
    "Conv2d-depthwise": lambda: (nn.Conv2d(4, 4, 3, groups=4, padding="same"), (vector(2, 4, 9, 8),)),
    "Conv3d": lambda: (nn.Conv3d(2, 3, 2), (vector(1, 2, 4, 5, 4),)),
    "ConvTranspose1d": lambda: (nn.ConvTranspose1d(4, 3, 3, stride=2), (vector(2, 4, 5),)),
    "ConvTranspose2d": lambda: (nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), (vector(2, 4, 5, 4),)),
    "BatchNorm1d": lambda: (nn.BatchNorm1d(4), (vector(3, 4),)),
    "BatchNorm2d": lambda: (nn.BatchNorm2d(4), (vector(3, 4, 5, 4),)),
    "LayerNorm": lambda: (nn.LayerNorm(6), (vector(2, 3, 6),)),
    "LayerNorm-2d": lambda: (nn.LayerNorm([3, 6]), (vector(2, 3, 6),)),
    "RMSNorm": lambda: (nn.RMSNorm(6), (vector(2, 3, 6),)),
    "GroupNorm": lambda: (nn.GroupNorm(2, 4), (vector(2, 4, 5),)),
    "InstanceNorm2d": lambda: (nn.InstanceNorm2d(4, affine=True), (vector(2, 4, 5, 5),)),
    "LocalResponseNorm": lambda: (nn.LocalResponseNorm(3), (vector(2, 4, 5, 5),)),
    "MaxPool1d": lambda: (nn.MaxPool1d(2), (vector(2, 4, 8),)),
    "MaxPool2d": lambda: (nn.MaxPool2d(3, 2, 1), (vector(2, 4, 8, 7),)),
    "AvgPool2d": lambda: (nn.AvgPool2d(2), (vector(2, 4, 8, 8),)),
    "AdaptiveAvgPool2d": lambda: (nn.AdaptiveAvgPool2d((2, 3)), (vector(2, 4, 8, 9),)),
    "AdaptiveAvgPool1d": lambda: (nn.AdaptiveAvgPool1d(1), (vector(2, 4, 8),)),
    "Upsample": lambda: (nn.Upsample(scale_factor=2, mode="nearest"), (vector(1, 2, 3, 4),)),
    "Upsample-bilinear": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), (vector(1, 2, 3, 4),)),
    "PixelShuffle": lambda: (nn.PixelShuffle(2), (vector(1, 8, 3, 4),)),
    "Unfold": lambda: (nn.Unfold(2), (vector(1, 2, 4, 5),)),
    "ZeroPad2d": lambda: (nn.ZeroPad2d(2), (vector(1, 2, 4, 5),)),
    "ReflectionPad2d": lambda: (nn.ReflectionPad2d(1), (vector(1, 2, 4, 5),)),
    "ReplicationPad1d": lambda: (nn.ReplicationPad1d(2), (vector(1, 2, 4),)),
    "Flatten": lambda: (nn.Flatten(), (vector(2, 3, 4),)),
    "Unflatten": lambda: (nn.Unflatten(1, (2, 3)), (vector(2, 6),)),
    "Dropout": lambda: (nn.Dropout(0.5), (vector(2, 6),)),
    "PReLU": lambda: (nn.PReLU(4), (vector(2, 4, 3),)),
    "GLU": lambda: (nn.GLU(), (vector(2, 6),)),
    "Softmax": lambda: (nn.Softmax(-1), (vector(2, 6),)),
    "LogSoftmax": lambda: (nn.LogSoftmax(1), (vector(2, 6),)),
    "MultiheadAttention": _attention,
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (vector(2, 5, 8),)),
    "TransformerDecoderLayer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=True), (vector(2, 5, 8), vector(2, 4, 8)),
    ),
    "LSTM": lambda: (_Only(nn.LSTM(4, 6, batch_first=True)), (vector(2, 3, 4),)),
    "GRU": lambda: (_Only(nn.GRU(4, 6, 2, batch_first=True)), (vector(2, 3, 4),)),
    "LSTM-both-ways": lambda: (
        _Only(nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True, proj_size=3)), (vector(2, 3, 4),)),
    "RNN": lambda: (_Only(nn.RNN(4, 6, nonlinearity="relu", bias=False)), (vector(3, 2, 4),)),
    "GRUCell": lambda: (nn.GRUCell(4, 6), (vector(2, 4), vector(2, 6))),
    "EmbeddingBag": lambda: (nn.EmbeddingBag(10, 6, padding_idx=1), (torch.randint(0, 4, (3, 5)),)),
    "EmbeddingBag-sum": lambda: (
        nn.EmbeddingBag(10, 6, mode="sum", include_last_offset=True),
        (torch.randint(0, 10, (7,)), torch.tensor([0, 3, 3, 7])),
    ),
    "EmbeddingBag-max": lambda: (
        nn.EmbeddingBag(10, 6, mode="max"), (torch.randint(0, 10, (7,)), torch.tensor([0, 3, 3]))),
    "Fold": lambda: (nn.Fold((4, 5), 2, padding=1), (vector(1, 8, 30),)),
    "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (vector(2, 4),)),
    **{
        name: lambda name=name: (getattr(nn, name)(), (vector(3, 5),))
        for name in ("ReLU", "ReLU6", "GELU", "SiLU", "Mish", "ELU", "SELU", "CELU", "Hardswish", "Hardsigmoid", "Tanh",
                     "Hardtanh", "Sigmoid", "LeakyReLU", "Softplus", "Softsign", "Softshrink", "Hardshrink",
                     "Tanhshrink", "LogSigmoid")
    },
}  # fmt: skip


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def random_network(seed: int) -> Example:
    """A random stack of layers on images, then on vectors, with residuals and in-place activations."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    channels, size = int(rng.integers(2, 5)) * 2, 8
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(int(rng.integers(2, 5))):
        kind = rng.integers(0, 8)
        if kind == 0:
            wide = int(rng.integers(2, 5)) * 2
            parts.append(nn.Conv2d(channels, wide, 3, padding=1, bias=bool(rng.integers(2))))
            channels = wide
        elif kind == 1:
            parts.append(nn.BatchNorm2d(channels))
        elif kind == 2:
            parts.append(nn.GroupNorm(2, channels))
        elif kind == 3:
            parts.append(Residual(nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True))))
        elif kind == 4 and size > 2:
            parts.append([nn.MaxPool2d(2), nn.AvgPool2d(2)][rng.integers(2)])
            size //= 2
        elif kind == 5:
            parts.append(nn.Conv2d(channels, channels, 3, padding=1, groups=channels))
        elif kind == 6:
            parts.append([nn.SiLU(inplace=True), nn.Hardswish(inplace=True), nn.GELU(), nn.Tanh()][rng.integers(4)])
        else:
            parts.append(nn.Dropout(0.2))
    width = int(rng.integers(2, 5)) * 4
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, width)]
    for _ in range(int(rng.integers(1, 3))):
        parts += [
            nn.LayerNorm(width),
            Residual(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))),
        ]
    parts.append(nn.Linear(width, 4))
    return nn.Sequential(*parts), (vector(2, 3, 8, 8),)
