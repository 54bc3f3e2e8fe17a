"""Code of real models whose lowering needs care: writes by indices, pads and slices by sizes, mixed dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import graphwright as gw
from graphwright.models.errors import CaptureError, UnsupportedOperator


class Code(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def same(module: nn.Module, program: gw.Program, *inputs: torch.Tensor) -> None:
    want = module(*inputs)
    feeds = {n: gw.tensor(x.numpy()) for n, x in zip(program.input_names(), inputs, strict=True)}
    got = program(**feeds)["out"]
    assert str(want.dtype).removeprefix("torch.") == got.dtype.name
    np.testing.assert_allclose(got.numpy("float32"), want.detach().float().numpy(), 1e-5, 1e-6)


def written(x: torch.Tensor, index: Any, value: Any, accumulate: bool = False) -> torch.Tensor:
    y = x.clone()
    y[index] = y[index] + value if accumulate else value
    return y


IDS, ROWS = torch.tensor([2, 0]), torch.tensor([[1], [0]])
WRITES = {
    "second axis": lambda x: written(x, (slice(None), IDS), 7.0),
    "second axis, a row each": lambda x: written(x, (slice(None), IDS), x[:, :2] * 2),
    "last axis": lambda x: written(x, (..., IDS), x[..., :2] + 1),
    "two inner axes": lambda x: written(x, (slice(None), ROWS, IDS), 5.0),
    "outer axes": lambda x: written(x, (IDS, slice(None), IDS), x[:2, :, 0] * 3),
    "a mask and a number": lambda x: written(x, x > 0.5, -1.0),
    "a mask of rows": lambda x: written(x, x[:, 0, 0] > 0.0, 4.0),
    "a mask of inner axes": lambda x: written(x, (slice(None), x[0] > 0.0), 4.0),
    "added": lambda x: torch.ops.aten.index_put(x, [None, torch.tensor([1, 1])], x[:, :2], True),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_by_indices_match_torch(name):
    torch.manual_seed(0)
    module, x = Code(WRITES[name]), torch.randn(3, 3, 4)
    same(module, gw.from_torch(module, (x,)), x)


def padded(x: torch.Tensor) -> torch.Tensor:
    y = functional.pad(x, (0, 0, 1, (4 - x.shape[1] % 4) % 4), value=2.0)
    return y * 2


def window(x: torch.Tensor) -> torch.Tensor:
    """Slice a table by a tensor that is made of a size, as DeBERTa does."""
    n: Any = torch.tensor(min(x.shape[1], 8))
    table = torch.arange(48.0).view(16, 3)
    return table[8 - n : 8 + n].sum() + x.clamp(0, n * 2 - 1)


def counted(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], 0, -1.0)[:, None] * x


SIZES = {"pad by a size": padded, "slice by a size in a tensor": window, "count down in floats": counted}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_that_follow_from_sizes_stay_named(name):
    module = Code(SIZES[name])
    program = gw.from_torch(module, (torch.randn(2, 7, 3),), sizes={"x": ("B", "T", 3)})
    assert program.spec(program.inputs()[0]).shape == ("B", "T", 3)
    for length in (7, 3, 5):
        same(module, program, torch.randn(3, length, 3))


def test_a_number_that_follows_from_values_is_refused():
    module = Code(lambda x: torch.arange(48.0)[: x.to(torch.int64).sum()].sum() + x)
    with pytest.raises((UnsupportedOperator, CaptureError)):
        gw.from_torch(module, (torch.ones(3),))


class TwoConvolutions(nn.Module):
    """Sizes of strided convolutions, which torch joins: ((H+3)//4+1)//2 is (H+7)//8."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 7, 4, 3), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(pixels))
        batch, channels, height, width = y.shape
        return y.flatten(2).transpose(1, 2).transpose(1, 2).reshape(batch, channels, height, width)


def test_nested_floors_of_sizes_and_inputs_by_name():
    module = TwoConvolutions().eval()
    shape = {"pixels": ("B", 3, "H", "W")}
    program = gw.from_torch(module, (), {"pixels": torch.randn(2, 3, 32, 48)}, sizes=shape)
    for size in ((3, 3, 64, 40), (1, 3, 33, 57)):
        same(module, program, torch.randn(size))


class MixedAttention(nn.Module):
    """Queries and keys in float32, values and result in bfloat16, as ModernBERT computes with rotary embeddings."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q.float() * 0.5).to(q.dtype) @ k.float().to(k.dtype).transpose(-1, -2)
        return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def test_attention_of_two_dtypes_is_captured():
    module = MixedAttention()
    q, k, v = (torch.randn(2, 4, 5, 8).to(torch.bfloat16) for _ in range(3))
    program = gw.from_torch(module, (q, k, v))
    feeds = [gw.tensor(x.float().numpy()).to(gw.bfloat16) for x in (q, k, v)]
    got = program(**dict(zip(program.input_names(), feeds, strict=True)))["out"].numpy("float32")
    assert np.abs(got - module(q, k, v).float().numpy()).max() < 0.03


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(x.shape[1] + 1, 2)


def test_an_error_of_torch_names_the_line_of_the_module():
    with pytest.raises(CaptureError) as caught:
        gw.from_torch(Failing(), (torch.ones(2, 3),))
    first = Failing.forward.__code__.co_firstlineno
    assert caught.value.where == f"test_lowering_details.py:{first + 1}"


def windows(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention within windows, which are an axis of their own."""
    q = x.unflatten(-1, (2, 3)).movedim(-2, 2)
    return functional.scaled_dot_product_attention(q, q * 2, q + 1, mask).movedim(2, -2).flatten(-2)


BIASES = [None, (5, 5), (2, 5, 5), (4, 1, 5, 5), (1, 4, 2, 5, 5), (2, 1, 1, 5, 5)]


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_attention_over_five_axes_matches_torch(bias):
    torch.manual_seed(0)
    x, mask = torch.randn(2, 4, 5, 6), None if bias is None else torch.randn(bias)
    module = Code(lambda x: windows(x, mask))
    p = gw.from_torch(module, (x,))
    same(module, p, x)


WHOLE = {
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x + 1).softmax(-1),
    "expand_as": lambda x: x.mean(-1, keepdim=True).expand_as(x) * x,
    "dtypes": lambda x: x.to(torch.float64).to(x.dtype).type_as(x.double()).to("cpu").to(x),
    "a mask filled in place": lambda x: torch.zeros_like(x).masked_fill_(x > 0, -2.0) + x,
    "instance norm": lambda x: functional.instance_norm(x),
    "bilinear": lambda x: functional.interpolate(x[None], scale_factor=2, mode="bilinear"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_graphs_of_operators_with_rows_are_captured_once(name, monkeypatch):
    monkeypatch.setattr("graphwright.models.importing.capture._decomposed", None)
    torch.manual_seed(0)
    module, x = Code(WHOLE[name]), torch.randn(2, 3, 4)
    same(module, gw.from_torch(module, (x,), sizes={"x": ("B", 3, 4)}), x)


def test_attention_written_with_einsum_has_heads():
    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = projection(x).reshape(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) * 0.7).softmax(-1)
        return out(torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).reshape(x.shape))

    torch.manual_seed(0)
    projection, out = nn.Linear(8, 24), nn.Linear(8, 8)
    module, x = Code(attend), torch.randn(2, 5, 8)
    module.add_module("projection", projection)
    module.add_module("out", out)
    p = gw.from_torch(module, (x,), sizes={"x": ("B", "T", 8)})
    assert [g.size for g in p.axes().values() if "heads" in g.kinds] == [4]


VALUES = torch.tensor([float("inf"), float("nan"), -float("inf"), 0.0, 3e38, 3.0])
EXACT = {
    "all of bytes": lambda x: torch.all(x.to(torch.uint8), dim=1),
    "any of bytes": lambda x: torch.any(x.to(torch.uint8)),
    "mean squared error in bfloat16": lambda x: functional.mse_loss(x.bfloat16(), x.bfloat16() + 1),
    "hypot of special values": lambda x: torch.hypot(VALUES.unsqueeze(1), VALUES) + x.sum() * 0,
}


@pytest.mark.parametrize("name", EXACT)
def test_dtypes_and_special_values_are_torchs(name):
    module, x = Code(EXACT[name]), torch.tensor([[0.0, 2.0], [1.0, 3.0]])
    same(module, gw.from_torch(module, (x,)), x)
