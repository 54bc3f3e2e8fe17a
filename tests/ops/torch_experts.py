"""Mixtures of experts in torch: loops over tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

ACTS = {
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def dispatch(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    """Every (expert, token, flat index in the choice), in order; then zeros."""
    choice, found = ins[0].tolist(), []
    columns = ins[0].shape[1]
    for n, row in enumerate(choice):
        for j, value in enumerate(row):
            expert = (j if value else -1) if isinstance(value, bool) else value
            found += [(expert, n, n * columns + j)] if expert >= 0 else []
    found.sort()
    counts = [sum(e < limit for e, *_ in found) for limit in range(attrs["experts"] + 1)]
    padding = [0] * (ins[0].numel() - len(found))
    rows, pairs = ([entry[i] for entry in found] + padding for i in (1, 2))
    return torch.tensor(counts), torch.tensor(rows, dtype=torch.int64), torch.tensor(pairs, dtype=torch.int64)


def one_expert(x: torch.Tensor, group: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """f(x) of one token."""
    width = 2 if attrs["bias"] else 1
    made = [(group[i], group[i + 1] if attrs["bias"] else None) for i in range(0, len(group), width)]
    act = ACTS[attrs["act"]]
    if attrs["kind"] == "mlp":
        inner = act(F.linear(x, *made[0]))
    else:
        gate, up = F.linear(x, *made[0]), F.linear(x, *made[1])
        if attrs["kind"] == "oai":  # GptOssExperts of transformers
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        else:
            inner = act(gate) * up
    return F.linear(inner, *made[-1])


def expert_mlp(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Token by token."""
    x, offsets, rows, pairs, weights = ins[:5]
    width = (2 if attrs["kind"] == "mlp" else 3) * (2 if attrs["bias"] else 1)
    groups = [ins[i : i + width] for i in range(5, len(ins), width)]
    unused = sum(t.sum() * 0 for t in (x, weights, *ins[5:]))  # no expert's gradient is None
    total = [torch.zeros_like(row) + unused for row in x]
    for e, group in enumerate(groups):
        for r in range(int(offsets[e]), int(offsets[e + 1])):
            n = int(rows[r])
            total[n] = total[n] + weights.reshape(-1)[pairs[r]] * one_expert(x[n], group, attrs)
    return torch.stack(total)


def expert_mlp_backward(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    """The gradients that torch computes."""
    attrs = dict(attrs)
    wanted = attrs.pop("wanted")
    operands = [t if t.requires_grad or not t.is_floating_point() else t.detach().requires_grad_() for t in ins[1:]]
    out = expert_mlp(operands, attrs)
    found = torch.autograd.grad(
        out, [operands[i] for i in wanted], ins[0], create_graph=True, allow_unused=True, materialize_grads=True
    )
    return tuple(found)


def expert_probe(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """For each pair the norm of the gradient of ⟨g, f(x)⟩ with respect to the expert's weights, by autograd."""
    x, g, offsets, rows, pairs = ins[:5]
    width = (2 if attrs["kind"] == "mlp" else 3) * (2 if attrs["bias"] else 1)
    surprise, gain = (torch.zeros(len(rows), dtype=x.dtype) for _ in range(2))
    for e, start in enumerate(range(5, len(ins), width)):
        group = [t.detach().requires_grad_() for t in ins[start : start + width]]
        for r in range(int(offsets[e]), int(offsets[e + 1])):
            n = int(rows[r])
            given = (g[n] * one_expert(x[n], group, attrs)).sum()
            grads = torch.autograd.grad(given, group)
            total: Any = sum((t**2).sum() for t in grads)
            surprise[pairs[r]] = torch.sqrt(total)
            gain[pairs[r]] = -given.detach()
    return surprise, gain


def rotated_by(t: torch.Tensor, positions: torch.Tensor, theta: float | None) -> torch.Tensor:
    """t [B, T, d] as a + ib for pairs of entries half an axis apart, times e^(i·angle)."""
    half = t.shape[-1] // 2
    angle = positions[..., None] * (theta or 1.0) ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (f(angle if theta else angle * 0).to(t.dtype) for f in (torch.cos, torch.sin))
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def routed_attention(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Head by head, each a dense masked attention of all tokens."""
    x, offsets, rows, pairs, weights, positions = ins[:6]
    batch, time, width = x.shape

    def rotated(t: torch.Tensor) -> torch.Tensor:
        return rotated_by(t, positions, attrs["theta"])

    total = sum(t.sum() * 0 for t in (x, weights, *ins[6:])) + torch.zeros(batch * time, width, dtype=x.dtype)
    for e, start in enumerate(range(6, len(ins), 4)):
        q, k, v, o = ins[start : start + 4]
        run = slice(int(offsets[e]), int(offsets[e + 1]))
        uses = torch.zeros(batch * time, dtype=torch.bool)
        uses[rows[run]] = True
        own = uses.view(batch, time)
        seen = own[:, None, :] & own[:, :, None] & torch.ones(time, time, dtype=torch.bool).tril()
        blank = ~seen.any(-1, keepdim=True)
        mask = seen | blank  # rows that see nothing are dropped below
        heads = [F.linear(x, m) for m in (q, k, v)]
        made = F.scaled_dot_product_attention(rotated(heads[0]), rotated(heads[1]), heads[2], attn_mask=mask)
        made = F.linear(made.masked_fill(blank, 0.0), o).reshape(batch * time, width)
        total = total.index_add(0, rows[run], weights.reshape(-1)[pairs[run]].unsqueeze(1) * made[rows[run]])
    return total.reshape(x.shape)


def routed_attention_backward(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    """The gradients that torch computes."""
    operands = [t if t.requires_grad or not t.is_floating_point() else t.detach().requires_grad_() for t in ins[1:]]
    out = routed_attention(operands, attrs)
    wanted = [operands[i] for i in attrs["wanted"]]
    return torch.autograd.grad(out, wanted, ins[0], create_graph=True, allow_unused=True, materialize_grads=True)


def routed_entries(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads on all tokens, then zeros where a head lacks the token."""
    x, offsets, rows, _, positions = ins[:5]
    uses = torch.zeros(x.shape[0] * x.shape[1], len(ins[5::2]), dtype=x.dtype)
    for e in range(uses.shape[1]):
        uses[rows[int(offsets[e]) : int(offsets[e + 1])], e] = 1
    uses = uses.view(*x.shape[:2], -1)
    keys = [
        rotated_by(F.linear(x, m), positions, attrs["theta"]) * uses[..., e : e + 1] for e, m in enumerate(ins[5::2])
    ]
    values = [F.linear(x, m) * uses[..., e : e + 1] for e, m in enumerate(ins[6::2])]
    return torch.cat([*keys, uses], -1)[:, None], torch.cat(values, -1)[:, None]


def routed_attention_cached(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Query by query, over the entries of its sequence up to its own that the head has."""
    x, offsets, rows, pairs, weights, positions, keys, values, table, lengths = ins[:10]
    out, block = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)), keys.shape[2]
    first, second, flags = 0, 0, keys.shape[3] - len(ins[10::2])
    for e, (q, o) in enumerate(zip(ins[10::2], ins[11::2], strict=True)):
        queries = rotated_by(F.linear(x, q), positions, attrs["theta"])
        for r in range(int(offsets[e]), int(offsets[e + 1])):
            b, t = divmod(int(rows[r]), x.shape[1])
            if lengths[b] < 0:
                continue
            seen = [(int(table[b, j // block]), j % block) for j in range(int(lengths[b]) + t + 1)]
            seen = [(page, at) for page, at in seen if keys[page, 0, at, flags + e] == 1]
            k = torch.stack([keys[page, 0, at, first : first + len(q)] for page, at in seen])
            v = torch.stack([values[page, 0, at, second : second + o.shape[1]] for page, at in seen])
            mixed = torch.softmax(k @ queries[b, t] / len(q) ** 0.5, 0) @ v
            out[b, t] += weights.reshape(-1)[pairs[r]] * (o @ mixed)
        first, second = first + len(q), second + o.shape[1]
    return out.to(x.dtype)
