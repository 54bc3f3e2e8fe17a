"""Small torch modules with the structures of vision networks: shuffles, gates, dense joins, windows, scaled layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def conv(ins: int, outs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Convolution, batch norm with statistics that are not trivial, and an activation in place."""
    norm: Any = nn.BatchNorm2d(outs)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.add_(torch.rand(outs))
    made = [nn.Conv2d(ins, outs, kernel, stride, kernel // 2, groups=groups, bias=False), norm]
    return nn.Sequential(*made, *([nn.ReLU6(inplace=True)] if act else []))


class Residual(nn.Module):
    """Two convolutions and a sum in place, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(8, 6), conv(6, 8, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.two(self.one(x))
        out += x
        return functional.relu(out, inplace=True)


class Inverted(nn.Module):
    """Wide depthwise convolution between narrow ones, its channels gated by their mean (squeeze and excitation)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.depth, self.down = conv(8, 12, 1), conv(12, 12, groups=12), conv(12, 8, 1, act=False)
        self.squeeze, self.excite = nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(self.up(x))
        gate = functional.silu(self.squeeze(functional.adaptive_avg_pool2d(y, 1)), inplace=True)
        return x + self.down(y * functional.hardsigmoid(self.excite(gate), inplace=True))


class ResponseNorm(nn.Module):
    """Wide neurons scaled by their share of the mean over all of them, as in ConvNeXt V2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.up(x.permute(0, 2, 3, 1)))
        size = y.norm(p=2, dim=(1, 2), keepdim=True)
        share = size / (size.mean(dim=-1, keepdim=True) + 1e-6)
        y = y + torch.addcmul(self.bias, self.weight, y * share)
        return x + self.down(y).permute(0, 3, 1, 2)


class Shuffled(nn.Module):
    """Half of the channels pass, half are convolved, then both are shuffled, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv(4, 6, 1), conv(6, 6, groups=6, act=False), conv(6, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed, given = x.chunk(2, dim=1)
        y = torch.cat((passed, self.branch(given)), dim=1)
        batch, channels, height, width = y.shape
        return y.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


class Dense(nn.Module):
    """Layers that read the outputs of all layers before, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(8 + 4 * i, 4) for i in range(3))
        self.join = conv(20, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.join(torch.cat(found, 1))


class Grouped(nn.Module):
    """A convolution in groups between two of width 1, as in ResNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(8, 12, 1), conv(12, 12, groups=3), conv(12, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Scaled(nn.Module):
    """A depthwise convolution, layer norm over channels last, two linear layers and a scale, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.down, self.scale = nn.Linear(8, 12), nn.Linear(12, 8), nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(functional.gelu(self.up(y))).permute(0, 3, 1, 2)


class Windows(nn.Module):
    """Attention in shifted windows of 2 × 2 with a bias of relative positions and a mask, as in Swin."""

    index: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(9, 2))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("index", (apart[..., 0] * 3 + apart[..., 1]).view(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        y = torch.roll(self.norm(x.permute(0, 2, 3, 1)), (-1, -1), (1, 2))
        y = y.view(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, channels)
        qkv = self.qkv(y).reshape(y.size(0), 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] * 4**-0.5) @ qkv[1].transpose(-2, -1)
        scores = scores + self.table[self.index].view(4, 4, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        marks = x.new_zeros((height, width))
        for i, rows in enumerate(((0, -2), (-2, -1), (-1, None))):
            for j, columns in enumerate(((0, -2), (-2, -1), (-1, None))):
                marks[rows[0] : rows[1], columns[0] : columns[1]] = i * 3 + j
        marks = marks.view(height // 2, 2, width // 2, 2).permute(0, 2, 1, 3).reshape(-1, 4)
        apart = marks.unsqueeze(1) - marks.unsqueeze(2)
        mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
        scores = scores.view(-1, mask.size(0), 2, 4, 4) + mask.unsqueeze(1).unsqueeze(0)
        y = (scores.view(-1, 2, 4, 4).softmax(-1) @ qkv[2]).transpose(1, 2).reshape(-1, 4, channels)
        y = self.out(y).view(batch, height // 2, width // 2, 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(batch, height, width, channels), (1, 1), (1, 2))
        return x + y.permute(0, 3, 1, 2)


class Patches(nn.Module):
    """Tokens with a class token and learnt positions, and attention by `nn.MultiheadAttention`, as in ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.offsets = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1) + self.offsets
        z = self.norm(y)
        y = y + self.attention(z, z, z, need_weights=False)[0]
        y = y + self.down(functional.gelu(self.up(y)))
        return y[:, 1:].transpose(1, 2).reshape(x.shape)


class Network(nn.Module):
    """A first convolution, a block, and a classifier after dropout in place."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.block, self.drop, self.head = conv(3, 8), block, nn.Dropout(0.2, True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(self.stem(x))
        return self.head(self.drop(torch.flatten(functional.adaptive_avg_pool2d(y, (1, 1)), 1)))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    block.__name__.lower(): block
    for block in (Residual, Inverted, ResponseNorm, Shuffled, Dense, Grouped, Scaled, Windows, Patches)
}
