"""A routed layer beside torch's loops over experts, `grouped_mm`, einsum, transformers' block, and two dense products.

The routers have the same weights, so every form chooses the same experts; results are compared before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import nn

PARTS = ("training", "wide", "decode", "routing")
MODES = {"training": ("eager", "grouped_mm"), "decode": ("eager", "batched_mm", "grouped_mm")}
"""Modes of transformers; `batched_mm` copies the matrices of each pair, which takes 0.3 s and more for 1024 tokens."""
Call = Callable[[], Any]


def training(
    sizes: Sequence[int] = (8, 16, 64, 256, 512), ks: Sequence[int] = (2, 4), n: int = 1024, c: int = 256, i: int = 32
) -> Figure:
    """Forward and backward of one layer, over the number of experts."""
    figure = Figure(
        "Routed layer, forward and backward",
        f"{n} tokens, {c} -> {i} -> {c}, f32, gated SiLU, top-k of a softmax, gradients of all weights",
    )
    for experts in sizes:
        for k in ks:
            _add(figure, rounds(_backwards(experts, k, n, c, i), n=7), f"{experts} experts, k = {k}: ", "ms")
    return figure


def wide(experts: int = 64, n: int = 512, c: int = 256, i: int = 512) -> Figure:
    """Forward and backward with experts wider than the layer."""
    figure = Figure("Routed layer with wide experts", f"{n} tokens, {experts} experts {c} -> {i} -> {c}, k = 2, f32")
    add_rounds(figure, rounds(_backwards(experts, 2, n, c, i), n=7))
    return figure


def decode(experts: int = 64, k: int = 8, c: int = 256, i: int = 128) -> Figure:
    """One token at a time, without gradients."""
    figure = Figure("Routed layer, one token", f"{experts} experts {c} -> {i} -> {c}, k = {k}, f32, forward")
    x = np.random.default_rng(0).normal(size=(1, c)).astype("f4")
    layer, blocks = _layers(experts, k, c, i, MODES["decode"])
    compiled, given = gw.compile(layer.forward), gw.tensor(x)
    calls: dict[str, Call] = {"graphwright": lambda: compiled(given)}
    calls |= {name: lambda block=block: _without_gradients(block, x) for name, block in blocks.items()}
    expected = calls["graphwright"]().numpy()
    for call in list(calls.values())[1:]:
        np.testing.assert_allclose(call().numpy(), expected, rtol=1e-4, atol=1e-5)
    add_rounds(figure, rounds(calls, inner=20), "us")
    figure.notes.append(f"{4 * 3 * k * c * i:,} bytes of weights are read for a token")
    return figure


def _add(figure: Figure, taken: dict[str, list[float]], lead: str, unit: str) -> None:
    add_rounds(figure, {lead + name: samples for name, samples in taken.items()}, unit)


def _layers(experts: int, k: int, c: int, i: int, modes: Sequence[str]) -> tuple[nn.MoE, dict[str, Any]]:
    """Our layer, and transformers' block in each mode, with the same weights."""
    layer, blocks = nn.MoE(c, i, experts, k, seed=0), {}
    own = {name: torch.from_numpy(p.numpy().copy()) for name, p in layer.named_parameters()}
    stacked = {
        "gate.weight": next(own[name] for name in own if name.startswith("router")),
        "experts.gate_up_proj": torch.stack(
            [torch.cat([own[f"experts.{e}.gate.weight"], own[f"experts.{e}.up.weight"]]) for e in range(experts)]
        ),
        "experts.down_proj": torch.stack([own[f"experts.{e}.down.weight"] for e in range(experts)]),
    }
    for mode in modes:
        config = Qwen3MoeConfig(
            hidden_size=c, moe_intermediate_size=i, num_experts=experts, num_experts_per_tok=k, norm_topk_prob=True
        )
        config._experts_implementation = mode
        blocks[f"transformers, {mode}"] = Qwen3MoeSparseMoeBlock(config)
        blocks[f"transformers, {mode}"].load_state_dict(stacked)
    first = blocks[f"transformers, {modes[0]}"]
    blocks["torch, loop over parameters"] = Loop(first)
    blocks["torch, loop over unbind"] = Stacked(first, unbound)
    blocks["torch, grouped_mm"] = Stacked(first, grouped)
    if experts * c * 1024 * 4 <= EINSUM_BYTES:
        blocks["torch, einsum over all"] = Stacked(first, einsum)
    return layer, blocks


class Loop(torch.nn.Module):
    """The block as a loop over experts whose matrices are parameters of their own."""

    def __init__(self, block: Qwen3MoeSparseMoeBlock) -> None:
        super().__init__()
        self.gate = block.gate
        experts: Any = block.experts
        stacks = experts.gate_up_proj, experts.down_proj
        self.up, self.down = (torch.nn.ParameterList(w.detach().clone() for w in stack) for stack in stacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        _, weights, chosen = self.gate(tokens)
        total = torch.zeros_like(tokens)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, at = torch.where(chosen == e)
            a, v = torch.nn.functional.linear(tokens[rows], up).chunk(2, dim=-1)
            made = torch.nn.functional.linear(torch.nn.functional.silu(a) * v, down)
            total.index_add_(0, rows, made * weights[rows, at, None])
        return total.view_as(x)


EINSUM_BYTES = 1 << 26
"""The most bytes of [N, E, C] for which the einsum is timed."""
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Stacked(torch.nn.Module):
    """The block with stacked matrices [E, 2I, C] and [E, C, I], mixed by a function of tokens, ids and weights."""

    def __init__(self, block: Any, mix: Mix) -> None:
        super().__init__()
        self.gate, self.mix, experts = block.gate, mix, block.experts
        self.up, self.down = (torch.nn.Parameter(w.detach().clone()) for w in (experts.gate_up_proj, experts.down_proj))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        _, weights, chosen = self.gate(tokens)
        return self.mix(tokens, chosen, weights, self.up, self.down).view_as(x)


def _gated(both: torch.Tensor) -> torch.Tensor:
    a, v = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(a) * v


def unbound(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Loop over experts; each stack is taken apart once, so that its gradient is put together once."""
    total = torch.zeros_like(x)
    for e, (one, other) in enumerate(zip(up.unbind(), down.unbind(), strict=True)):
        rows, at = torch.where(chosen == e)
        made = torch.nn.functional.linear(_gated(torch.nn.functional.linear(x[rows], one)), other)
        total.index_add_(0, rows, made * weights[rows, at, None])
    return total


def grouped(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sort the pairs by expert and multiply them by `grouped_mm`."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=len(up)).cumsum(0).to(torch.int32)
    rows = order // chosen.shape[1]
    hidden = _gated(torch.nn.functional.grouped_mm(x[rows], up.transpose(1, 2), offs=ends))
    made = torch.nn.functional.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    return torch.zeros_like(x).index_add(0, rows, made * weights.flatten()[order, None])


def einsum(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Run every expert on every token, which takes memory for [N, E, C]."""
    made = torch.einsum("nei,eci->nec", _gated(torch.einsum("nc,eic->nei", x, up)), down)
    shares = torch.zeros(len(x), len(up)).scatter_add(1, chosen, weights)
    return torch.einsum("nec,ne->nc", made, shares)


def routing(n: int = 1024, c: int = 256, i: int = 32, experts: int = 64, k: int = 2) -> Figure:
    """What choosing costs beside the experts themselves, forward: by top-k, and by thresholds that let k of E pass."""
    figure = Figure("Cost of routing", f"{n} tokens, {experts} experts {c} -> {i} -> {c}, k = {k}, f32, forward")
    x = np.random.default_rng(0).normal(size=(n, c)).astype("f4")
    cosines = NormalDist(0, c**-0.5).inv_cdf(1 - k / experts)  # the quantile of those of random directions
    for name in ("top-k", "thresholds"):
        router = nn.TopKRouter(c, experts, k, seed=0) if name == "top-k" else nn.ThresholdRouter(c, experts, k)
        layer = nn.MoE(c, i, experts, router=router, seed=0)
        with gw.no_grad():
            for path, p in layer.named_parameters():
                if path.endswith("threshold"):
                    p.fill_(float(np.arctanh(cosines)))
        p = gw.trace(layer, x)
        timings = p.compile({p.path(p.inputs()[0]): x}).profile({p.path(p.inputs()[0]): x}, n=31).timings
        for part, of in (("router", [t for t in timings if t.op != "expert_mlp"]), ("experts", timings)):
            some = [t for t in of if part == "router" or t.op == "expert_mlp"]
            flops = sum(t.cost.flops for t in some)
            figure.add(f"{name}: {part}", 1e6 * sum(t.seconds for t in some), "us", f"{flops / 1e6:.1f} MFLOP at most")
    return figure


def _without_gradients(block: torch.nn.Module, x: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return block(torch.from_numpy(x)[None])[0]


def _backwards(experts: int, k: int, n: int, c: int, i: int) -> dict[str, Call]:
    """Calls that compute the loss Σ y·g and all gradients; each returns the loss and the gradient of the router."""
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(n, c)).astype("f4") for _ in range(2))
    layer, blocks = _layers(experts, k, c, i, MODES["training"])
    names = [name for name, _ in layer.named_parameters()]
    router = 1 + next(at for at, name in enumerate(names) if name.startswith("router"))

    @gw.compile
    def step(x: gw.Tensor, g: gw.Tensor) -> tuple[Any, ...]:
        for p in layer.parameters():
            p.grad = None
        loss = (layer(x) * g).sum()
        loss.backward()
        return loss, *(p.grad for p in layer.parameters())

    def ours() -> tuple[float, np.ndarray]:
        found = step(x, g)
        return found[0].item(), found[router].numpy()

    def peer(block: torch.nn.Module, weight: torch.Tensor) -> tuple[float, np.ndarray]:
        block.zero_grad()
        loss = (block(torch.from_numpy(x)[None])[0] * torch.from_numpy(g)).sum()
        loss.backward()
        assert weight.grad is not None
        return loss.item(), weight.grad.numpy()

    calls: dict[str, Call] = {"graphwright": ours}
    calls |= {name: lambda block=block: peer(block, block.gate.weight) for name, block in blocks.items()}
    expected, slopes = ours()
    for call in list(calls.values())[1:]:
        loss, found = call()
        assert abs(loss - expected) < 1e-3 * (1 + abs(expected)), (loss, expected)
        np.testing.assert_allclose(found, slopes, rtol=1e-3, atol=1e-3 * np.abs(slopes).max())
    return {**calls, "torch, two dense products": _dense(x, g, experts * i)}


def _dense(x: np.ndarray, g: np.ndarray, width: int) -> Call:
    """An MLP of two matrices that has as many hidden units as all experts together."""
    up, down = torch.nn.Linear(x.shape[1], width, bias=False), torch.nn.Linear(width, x.shape[1], bias=False)

    def run() -> None:
        up.zero_grad()
        down.zero_grad()
        (down(torch.nn.functional.silu(up(torch.from_numpy(x)))) * torch.from_numpy(g)).sum().backward()

    return run
