"""Recovery on a written-out transformer block: what is recovered, and twins with one constant changed that are not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.models.importing.recover import Recovered, recover
from seeds import DEEP

HEADS, GROUPS, HEAD_DIM = 4, 2, 6
WIDTH = HEADS * HEAD_DIM


@dataclass(frozen=True)
class Options:
    """How a block is written; the values by default mean ops that exist."""

    norm: str = "rms"
    rope: str = "half"
    mask: str = "causal"
    gelu: str = "tanh"
    kind: torch.dtype = torch.float32


class Norm(torch.nn.Module):
    """A norm written out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = torch.nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps, mean = 1e-4, lambda t: t.mean(-1, keepdim=True)
        if self.how == "layer":
            centred = x - mean(x)
            return centred / torch.sqrt(mean(centred**2) + eps) * self.weight + self.bias
        if self.how == "eps outside":
            return x / (torch.sqrt(mean(x * x)) + eps) * self.weight
        if self.how == "cube":
            return x * torch.rsqrt(mean(x * x * x.abs()) + eps) * self.weight
        if self.how == "uncentred":
            return (x - mean(x)) * torch.rsqrt(mean(x * x) + eps) * self.weight
        if self.how == "power":
            return x * (mean(x.pow(2)) + eps).pow(-0.5) * self.weight
        unit = x * torch.rsqrt(mean(x.pow(2)) + eps)
        return unit * (1.0 + self.weight) if self.how == "offset" else self.weight * unit


def rotated(x: torch.Tensor, how: str) -> torch.Tensor:
    """Pairs (a, b) -> (-b, a) of a rotation."""
    if how == "interleaved":
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    if how == "mirrored":
        return torch.cat([b, -a], -1)
    return torch.cat([b, a] if how == "both positive" else [-b, a], -1)


class Block(torch.nn.Module):
    """Norm, rotary attention with grouped heads, and a GELU, all written out."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options, self.norm = options, Norm(options.norm)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD_DIM)
        self.out = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.inv_freq = torch.nn.Buffer(torch.tensor([1.0, 0.3, 0.05]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o, (batch, length, _) = self.options, x.shape
        sizes = [HEADS * HEAD_DIM, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM]
        q, k, v = (t.view(batch, length, -1, HEAD_DIM).transpose(1, 2) for t in self.qkv(self.norm(x)).split(sizes, -1))
        angle = torch.arange(length)[None, :, None].float() * self.inv_freq[: 2 if o.rope == "partial" else 3]
        wide = angle.repeat_interleave(2, -1) if o.rope == "interleaved" else torch.cat([angle, angle], -1)
        cos, sin = (t[:, None].to(x.dtype) for t in (wide.cos(), wide.sin()))
        if o.rope == "partial":
            q, k = (torch.cat([t[..., :4] * cos + rotated(t[..., :4], "half") * sin, t[..., 4:]], -1) for t in (q, k))
        else:
            q, k = (t * cos + rotated(t, o.rope) * sin for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(HEAD_DIM)
        seen = self.seen(length)
        if seen is not None:
            least = torch.full((), torch.finfo(x.dtype).min, dtype=x.dtype)
            scores = scores + torch.where(seen, torch.zeros((), dtype=x.dtype), least)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.gelu(mixed @ self.out)

    def seen(self, length: int) -> torch.Tensor | None:
        """Which keys a query sees."""
        ahead = torch.arange(length) - torch.arange(length)[:, None]
        return {
            "none": None, "causal": ahead <= 0, "window": (ahead <= 0) & (ahead > -3), "one ahead": ahead <= 1,
            "both sides": ahead.abs() < 3, "not the last": (ahead <= 0) & (ahead != -2),
            "far": (ahead <= 0) & (ahead > -100), "beyond 30": (ahead <= 0) | (ahead > 30),
        }[self.options.mask]  # fmt: skip

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU, or what looks like it."""
        how = self.options.gelu
        if how == "erf":
            return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
        factor = 0.0447 if how == "other cube" else 0.044715
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + factor * torch.pow(x, 3.0))))


def imported(options: Options) -> tuple[gw.Program, Recovered]:
    """The program of a block, whose outputs and gradients are compared with torch's at two lengths."""
    torch.manual_seed(3)
    module = Block(options).to(options.kind).eval()
    p = gw.from_torch(module, (torch.randn(3, 7, WIDTH, dtype=options.kind),), sizes={"x": ("B", "T", WIDTH)},
                      recover=False)  # fmt: skip
    report = recover(p)
    for batch, length in ((3, 7), (2, 41)):
        x = torch.randn(batch, length, WIDTH, dtype=options.kind)
        expected = module(x)
        rtol = 1e-10 if options.kind is torch.float64 else 2e-4 if options.kind is torch.float32 else 0.1
        out = p(x=ours(x))["out"]
        close(out.to("float64").numpy(), expected.detach().double().numpy(), rtol)
        up = torch.randn_like(expected)
        grads = torch.autograd.grad(expected, list(module.parameters()), up, allow_unused=True)
        out.backward(ours(up))
        for (key, _), grad in zip(module.named_parameters(), grads, strict=True):
            if grad is not None:
                made: Any = p.weights[key].grad
                close(made.to("float64").numpy(), grad.double().numpy(), 5 * rtol)
                p.weights[key].grad = None
    return p, report


def ours(x: torch.Tensor) -> gw.Tensor:
    """A tensor of the same values and dtype."""
    return gw.tensor(x.double().numpy()).to(str(x.dtype).removeprefix("torch."))


def close(found: np.ndarray, theirs: np.ndarray, rtol: float) -> None:
    """Compare relative to the largest entry."""
    np.testing.assert_allclose(found, theirs, rtol=0, atol=rtol * max(np.abs(theirs).max(), 1e-3))


WHOLE = {"sdpa": 1, "mask": 1, "rope": 2, "linear": 1, "gelu": 1}
OF_ALL = [
    pytest.param(Options(), {"rms_norm": 1}, {"causal": True, "window": None}, marks=pytest.mark.deep),
    (Options(norm="offset", mask="window", rope="interleaved", kind=torch.float64), {"rms_norm": 1}, {"window": 3}),
    pytest.param(Options(norm="layer", mask="far", rope="partial", gelu="erf"), {"layer_norm": 1}, {"window": 100},
                 marks=pytest.mark.deep),
]  # fmt: skip


@pytest.mark.parametrize(("options", "norm", "attrs"), OF_ALL, ids=lambda x: getattr(x, "norm", None) or "")
def test_every_part_of_a_block_is_recovered(options, norm, attrs):
    p, report = imported(options)
    assert {kind: len(paths) for kind, paths in report.found.items()} == {**WHOLE, **norm}, str(report)
    assert not report.left
    attention = p.attrs(p.of_kind("sdpa")[0])
    assert attention["optional"] == ()
    assert attrs.items() <= attention.items()
    assert p.spec(p.operands(p.of_kind("sdpa")[0])[1]).shape[1] == GROUPS
    assert [p.path(n) for op in ("softmax", "tanh", "erf", "cos", "matmul", "where") for n in p.of_kind(op)] == []
    assert [p.path(n) for n in p.nodes() for s in p.specs(n) if s.shape.count("T") > 1] == []
    before = p.structure_hash()
    recover(p)
    assert p.structure_hash() == before  # nothing more is found


TWINS = [
    Options(norm="eps outside", mask="one ahead", gelu="other cube"),
    pytest.param(Options(norm="uncentred", rope="both positive", mask="both sides"), marks=pytest.mark.deep),
    Options(norm="cube", rope="mirrored", mask="not the last"),
    pytest.param(Options(mask="beyond 30"), marks=pytest.mark.deep),
]
"""Blocks in which constants are changed: none of these parts is an op, and each computes what torch does."""


@pytest.mark.parametrize(
    "options", TWINS if DEEP else TWINS[::2], ids=lambda o: f"{o.norm}, {o.rope}, {o.mask}, {o.gelu}"
)
def test_a_twin_with_changed_constants_computes_what_torch_does(options):
    p, report = imported(options)
    changed = {"rms_norm": options.norm != "rms", "rope": options.rope != "half", "gelu": options.gelu != "tanh"}
    for kind, other in changed.items():
        assert (kind in report.found) != other, str(report)
    assert p.attrs(p.of_kind("sdpa")[0])["optional"] == ("bias",)
    assert list(report.left["mask"]) == report.found["sdpa"] == ["sdpa"]
    assert "left mask: sdpa" in str(report)


@pytest.mark.deep
def test_half_precision_is_recovered_within_its_rounding():
    p, report = imported(Options(kind=torch.bfloat16))
    assert {"sdpa", "mask", "linear", "rope"} <= set(report.found), str(report)
    assert p.spec(p.of_kind("sdpa")[0]).dtype.name == "bfloat16"


class Filled(torch.nn.Module):
    """Attention whose hidden scores are replaced by a number, by a mask in a buffer."""

    seen: torch.Tensor

    def __init__(self, fill: float, diagonal: int = 0) -> None:
        super().__init__()
        self.qkv, self.fill = torch.nn.Linear(WIDTH, 3 * WIDTH), fill
        self.register_buffer("seen", torch.ones(32, 32).tril(diagonal).view(1, 1, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2) for t in self.qkv(x).split(WIDTH, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(HEAD_DIM))
        weights = scores.masked_fill(self.seen[:, :, :length, :length] == 0, self.fill).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)


@pytest.mark.parametrize(
    ("fill", "diagonal", "found"), [(-math.inf, 0, "causal"), (-math.inf, 1, "bias"), (-2.0, 0, None)]
)
def test_scores_replaced_by_minus_infinity_are_a_mask(fill, diagonal, found):
    torch.manual_seed(0)
    module = Filled(fill, diagonal).eval()
    p = gw.from_torch(module, (torch.randn(2, 7, WIDTH),), sizes={"x": ("B", "T", WIDTH)})
    x = torch.randn(3, 11, WIDTH)
    np.testing.assert_allclose(p(x=x.numpy())["out"].numpy(), module(x).detach().numpy(), atol=1e-6)
    attention = p.of_kind("sdpa")
    if found is None:
        assert not attention
        return
    (node,) = attention
    attrs = p.attrs(node)
    assert (attrs["causal"], attrs["optional"]) == ((True, ()) if found == "causal" else (False, ("bias",)))


class Windowed(torch.nn.Module):
    """Attention to the last keys: by a stored mask for a largest length, or by one that is made for each length."""

    stored: torch.Tensor

    def __init__(self, window: int, how: str, longest: int = 0) -> None:
        super().__init__()
        self.qkv, self.window, self.how = torch.nn.Linear(WIDTH, 3 * WIDTH), window, how
        self.register_buffer("stored", torch.ones(longest, longest, dtype=torch.bool).tril().triu(1 - window))

    def mask(self, length: int) -> torch.Tensor:
        if self.how == "stored":
            return self.stored[:length, :length]
        lower = torch.ones(length, length, dtype=torch.bool).tril()
        if self.how == "difference":
            return lower & ~lower.tril(-self.window)
        return lower.triu(1 - self.window)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2) for t in self.qkv(x).split(WIDTH, 2))
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(length))
        return made.transpose(1, 2).reshape(batch, length, WIDTH)


@pytest.mark.parametrize(
    ("how", "longest", "window"),
    [("stored", 100, 80), ("stored", 50, 40), ("stored", 12, None), ("stored", 20, 15), ("diagonal", 0, 80),
     ("difference", 0, 90)],
)  # fmt: skip
def test_windows_longer_than_the_example_are_recovered(how, longest, window):
    module = Windowed(window or longest, how, longest).eval()
    p = gw.from_torch(module, (torch.randn(2, 5, WIDTH),), sizes={"x": ("B", "T", WIDTH)})
    (node,) = p.of_kind("sdpa")
    assert (p.attrs(node)["causal"], p.attrs(node)["window"]) == (True, window)
    x = torch.randn(1, longest or 120, WIDTH)
    np.testing.assert_allclose(p(x=x.numpy())["out"].numpy(), module(x).detach().numpy(), atol=1e-6)


class Sunk(torch.nn.Module):
    """Causal attention with a score of each head that is one more key, in the words of gpt-oss, and a rotation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv = how, torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[2])[:, None] * 0.3 ** torch.arange(HEAD_DIM // 2)
        cos, sin = angle.cos()[None, None], angle.sin()[None, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2) for t in self.qkv(x).split(WIDTH, 2))
        scores = self.rotate(q) @ self.rotate(k).transpose(-2, -1) * 0.4
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, length, -1)
        both = torch.cat([scores + torch.where(ahead, -math.inf, 0.0), sinks], -1)
        both = both - both.max(-1, keepdim=True).values
        weights = both.softmax(-1)
        if self.how == "kept":  # the last key, not the sink, is dropped
            weights = weights[..., 1:]
        elif self.how == "twice":
            weights = torch.cat([scores, 2 * sinks * sinks.exp()], -1).softmax(-1)[..., :-1]
        else:
            weights = weights[..., :-1]
        return (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)


@pytest.mark.parametrize(("how", "found"), [("gpt-oss", True), ("kept", False), ("twice", False)])
def test_a_sink_that_is_dropped_after_the_softmax_is_an_operand(how, found):
    torch.manual_seed(0)
    module = Sunk(how).eval()
    p = gw.from_torch(module, (torch.randn(2, 7, WIDTH),), sizes={"x": ("B", "T", WIDTH)})
    x = torch.randn(3, 11, WIDTH)
    np.testing.assert_allclose(p(x=x.numpy())["out"].numpy(), module(x).detach().numpy(), atol=2e-6)
    assert len(p.of_kind("rope")) == 2
    assert len(p.of_kind("sdpa")) == found
    for node in p.of_kind("sdpa"):
        attrs = p.attrs(node)
        assert (attrs["causal"], attrs["window"], attrs["optional"]) == (True, None, ("sinks",))
        assert p.path(p.operands(node)[3]) == "sinks"
        assert p.select("**", units="heads").count == HEADS


class Sorted(torch.nn.Module):
    """Experts as transformers computes them: ids sorted and counted, products of groups of rows."""

    def __init__(self, count: str) -> None:
        super().__init__()
        self.count, self.router = count, torch.nn.Linear(WIDTH, 5, bias=False)
        self.up = torch.nn.Parameter(torch.randn(5, WIDTH, 8) * 0.2)
        self.down = torch.nn.Parameter(torch.randn(5, 4, WIDTH) * 0.2)
        self.bias = torch.nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, ids = self.router(x).topk(2)
        ordered, order = ids.reshape(-1).sort(stable=True)
        numbers = torch.arange(5) if self.count == "experts" else torch.arange(5).flip(0)
        ends = (ordered == numbers[:, None]).sum(1).cumsum(0).to(torch.int32)
        rows = x[order // 2]
        hidden = torch.ops.transformers.grouped_mm_fallback(rows, self.up, ends) + self.bias[ordered]
        hidden = hidden[..., ::2] * torch.sigmoid(hidden[..., 1::2])
        made = torch.ops.transformers.grouped_mm_fallback(hidden, self.down, ends)
        made = made * values.softmax(-1).reshape(-1)[order, None]
        return made[order.argsort()].view(x.shape[0], 2, WIDTH).sum(1)


@pytest.mark.parametrize("count", ["experts", "backwards"])
def test_sorted_and_counted_ids_of_experts_are_a_dispatch(count):
    import transformers.integrations.moe  # its operators

    assert transformers.integrations.moe is not None
    torch.manual_seed(0)
    module = Sorted(count).eval()
    p = gw.from_torch(module, (torch.randn(7, WIDTH),), sizes={"x": ("N", WIDTH)})
    x = np.random.default_rng(0).normal(size=(11, WIDTH)).astype("f4")
    np.testing.assert_allclose(p(x=x)["out"].numpy(), module(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
    assert len(p.of_kind("dispatch")) == (count == "experts")
    if count != "experts":
        return
    experts, neurons = (next(g for name, g in ((n, p.axes()[n]) for n in p.axes().names.values()) if g.size == size)
                        for size in (5, 4))  # fmt: skip
    masked = Sorted(count).eval()
    masked.load_state_dict(module.state_dict())
    with p.edit("one expert less") as e, torch.no_grad():
        e.cut_units(experts.units([3]))
        hidden = torch.nn.functional.pad(torch.zeros(1), (0, 4), value=0.0)
        masked.router.bias = torch.nn.Parameter(hidden)
        masked.router.bias[3] = -1e9
    np.testing.assert_allclose(p(x=x)["out"].numpy(), masked(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
    with p.edit("one neuron less") as e, torch.no_grad():
        e.cut_units(neurons.units([1]))
        masked.down[:, 1] = 0
    assert p.weights["up"].shape == (4, WIDTH, 6)
    np.testing.assert_allclose(p(x=x)["out"].numpy(), masked(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
