"""Op -> the same mathematics in torch: the oracle of the op tests. Each function takes torch tensors and attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from random_oracle import RANDOM
from torch_blocks import BLOCKS
from torch_experts import (
    dispatch,
    expert_mlp,
    expert_mlp_backward,
    expert_probe,
    routed_attention,
    routed_attention_backward,
    routed_attention_cached,
    routed_entries,
)
from torch_gates import gate, gate_grad
from torch_optimizers import (
    adadelta,
    adagrad,
    adam,
    adamax,
    asgd,
    columns,
    lion,
    muon,
    nadam,
    optimizer,
    radam,
    rmsprop,
    rprop,
    sgd,
)
from torch_selected import sdpa_selected, sdpa_selected_backward, select_blocks
from torch_windows import WINDOWS

from graphwright.array.cpu.kernel import TORCH_DTYPE


def _unbroadcastable(name: str) -> Callable:
    return lambda ins, a: getattr(torch, name)(*ins)


def _reduce(name: str) -> Callable:
    return lambda ins, a: getattr(torch, name)(ins[0], list(a["axes"]), a["keepdims"]) if a["axes"] else ins[0].clone()


def alone(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """A collective in a world of one."""
    assert attrs["ranks"] == 1
    return ins[0].clone()


def bucket(ins: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    """Arrays one after another, in float32 or wider."""
    made = torch.cat([x.reshape(-1) for x in ins])
    return (made.float() if made.dtype.itemsize == 2 else made) * scale


def product(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    x = ins[0] if ins[0].dtype.is_floating_point else ins[0].long()
    axes = range(x.dim()) if attrs["axes"] is None else [a % x.dim() for a in attrs["axes"]]
    for axis in axes:
        x = x.prod(axis, keepdim=True)
    return x if attrs["keepdims"] or not axes else x.reshape([n for a, n in enumerate(ins[0].shape) if a not in axes])


def ordered(x: torch.Tensor, axis: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """By numpy's stable sort; for the other direction of the reversed values, whose ties are reversed again."""
    keys = x.detach().double().numpy()
    index = torch.from_numpy(np.argsort(-keys if descending else keys, axis, kind="stable"))
    return x.gather(axis, index), index


def cumsum(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    axis = attrs["axis"]
    return ins[0].flip(axis).cumsum(axis).flip(axis) if attrs["reverse"] else ins[0].cumsum(axis)


def linear_scan(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    a, b = (t.movedim(attrs["axis"], 0) for t in ins)
    a, b = (a.flip(0), b.flip(0)) if attrs["reverse"] else (a, b)
    states = [b[0]] if len(b) else []
    for factor, summand in zip(a[1:], b[1:], strict=True):
        states.append(factor * states[-1] + summand)
    made = torch.stack(states) if states else b
    return (made.flip(0) if attrs["reverse"] else made).movedim(0, attrs["axis"])


def softmax(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Entries left out by a mask get a score that is far below all others; a row without any is multiplied by 0."""
    if len(ins) == 1:
        return torch.softmax(ins[0], attrs["axis"])
    weights = torch.exp(ins[0] - ins[0].detach().amax(attrs["axis"], True)) * ins[1]
    total = weights.sum(attrs["axis"], True)
    return weights / (total + (total == 0))


def visible(queries: int, keys: int, attrs: dict, extra: dict) -> torch.Tensor:
    """[B or 1, 1, Tq, Tk]: which keys a query reads, written out pair by pair."""
    start = int(extra["q_start"]) if "q_start" in extra else keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            at = start + i
            if attrs["causal"]:
                seen[i, j] = j <= at and (attrs["window"] is None or j > at - attrs["window"])
    seen = seen[None, None]
    return seen & extra["key_mask"][:, None, None, :] if "key_mask" in extra else seen


def sdpa(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Masked softmax written out; key heads repeated, not tiled; a query that sees nothing gives 0."""
    q, k, v = ins[:3]
    extra = dict(zip(attrs["optional"], ins[3:], strict=True))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = visible(q.shape[2], k.shape[2], attrs, extra)
    scores, cap = attrs["scale"] * q @ k.transpose(-1, -2), attrs.get("softcap")
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if "bias" in extra:
        bias = extra["bias"]
        seen = seen & (bias if bias.dtype == torch.bool else bias > float("-inf"))
        scores = scores if bias.dtype == torch.bool else scores + bias.masked_fill(~seen, 0.0)
    scores = scores.masked_fill(~seen, float("-inf"))
    dead = ~seen.any(-1, keepdim=True)
    if "sinks" in extra:
        sinks = extra["sinks"].to(scores).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1] @ v
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return weights @ v


def rope(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    x, cos, sin = ins
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if attrs["style"] == "interleaved":
        a, b = x[..., : 2 * half].unflatten(-1, (half, 2)).unbind(-1)
        if x.dtype == torch.float64:  # a pair is a complex number, rotated by one of size 1
            rotated = torch.view_as_real(torch.complex(a, b) * torch.complex(cos, sin))
        else:
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([rotated.flatten(-2), x[..., 2 * half :]], -1)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def rms_norm(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    x, w = ins
    wide = x if x.dtype == torch.float64 else x.float()
    unit = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + attrs["eps"])
    if attrs["cast_before_scale"]:
        return unit.to(x.dtype) * (1 + w if attrs["unit_offset"] else w)
    return (unit * (1 + w.to(unit.dtype) if attrs["unit_offset"] else w)).to(x.dtype)


def batch_norm(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Written out, as torch gives no gradient to the statistics."""
    x, *others = (t if t.dtype == torch.float64 else t.float() for t in ins)
    mean, var, *scale = (t.view(-1, *(1,) * (x.dim() - 2)) for t in others)
    y = (x - mean) / torch.sqrt(var + attrs["eps"])
    for change, s in zip((torch.mul, torch.add), scale, strict=False):
        y = change(y, s)
    return y.to(ins[0].dtype)


def batch_norm_train(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    """Torch's, and its rule for the running statistics written out: torch moves them in place, without a gradient."""
    x, mean, var, *scale = ins
    y = F.batch_norm(x, None, None, *scale, training=True, eps=attrs["eps"])
    axes = [a for a in range(x.dim()) if a != 1]
    wide = x if x.dtype == torch.float64 else x.float()
    batch = (wide.mean(axes), wide.var(axes, correction=1))
    m = attrs["momentum"]
    return y, *((1 - m) * old + m * new.to(old.dtype) for old, new in zip((mean, var), batch, strict=True))


def cross_entropy(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    scores, targets, *weight = ins
    scores = scores if scores.dtype == torch.float64 else scores.float()
    flat = scores.reshape(-1, scores.shape[-1])
    options = {"ignore_index": attrs["ignore_index"], "label_smoothing": attrs["smoothing"], "reduction": "none"}
    weights = weight[0].to(scores.dtype) if weight else None
    if weights is not None and weights.requires_grad:  # written out, as torch's has no gradient for them
        return _smoothed(scores, targets, weights, attrs), torch.logsumexp(scores, -1)
    loss = F.cross_entropy(flat, targets.reshape(-1), weights, **options)
    return loss.view(targets.shape), torch.logsumexp(scores, -1)


def _smoothed(scores: torch.Tensor, targets: torch.Tensor, w: torch.Tensor, attrs: dict) -> torch.Tensor:
    classes, s = scores.shape[-1], attrs["smoothing"]
    q = (1 - s) * w * F.one_hot(targets.clamp(min=0), classes) + s / classes * w
    return -(q * torch.log_softmax(scores, -1)).sum(-1) * (targets != attrs["ignore_index"])


def cross_entropy_backward(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    scores, targets, lse, g, *weight = ins
    classes, s = scores.shape[-1], attrs["smoothing"]
    w = weight[0].to(scores.dtype) if weight else torch.ones(classes, dtype=scores.dtype)
    onehot = F.one_hot(targets.clamp(min=0), classes).to(scores.dtype)
    q = (1 - s) * w * onehot + s / classes * w
    kept = targets != attrs["ignore_index"]
    return (g * kept).unsqueeze(-1) * (torch.exp(scores - lse.unsqueeze(-1)) * q.sum(-1, keepdim=True) - q)


def embedding_backward(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    g, ids = ins
    table = torch.zeros(attrs["rows"], g.shape[-1], dtype=g.dtype)
    return table.index_add(0, ids.reshape(-1), g.reshape(-1, g.shape[-1]))


def pad_slice(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    x, axis = ins[0], attrs["axis"] % ins[0].dim()
    indices = attrs["start"] + attrs["step"] * torch.arange(x.shape[axis])
    shape = list(x.shape)
    shape[axis] = attrs["size"]
    return torch.zeros(shape, dtype=x.dtype).index_add(axis, indices, x)


def window(x: torch.Tensor, attrs: dict) -> torch.Tensor:
    indices = attrs["start"] + attrs["step"] * torch.arange(attrs["size"])
    return x.index_select(attrs["axis"], indices)


def kv_append(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    cache, rows, start = ins[0].clone(), ins[1], int(ins[2])
    cache[:, :, start : start + rows.shape[2]] = rows
    return cache


def linear_int8(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    x, q, scales, *bias = ins
    w = torch.stack([q[:, i] * scales[:, i // attrs["group"]] for i in range(q.shape[1])], 1)
    return F.linear(x, w, *bias)


def kv_append_paged(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    pool, (rows, table, lengths) = ins[0].clone(), ins[1:]
    block = pool.shape[2]
    for b, length in enumerate(lengths.tolist()):
        for t in range(rows.shape[2] if length >= 0 else 0):
            pool[table[b, (length + t) // block], :, (length + t) % block] = rows[b, :, t]
    return pool


def sdpa_paged(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    q, k, v, table, lengths, *sinks = ins
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group, block = q.shape[1] // k.shape[1], k.shape[2]
    for b, length in enumerate(lengths.tolist()):
        for t in range(q.shape[2] if length >= 0 else 0):
            end = length + t + 1
            first = 0 if attrs["window"] is None else max(0, end - attrs["window"])
            rows = [(int(table[b, j // block]), j % block) for j in range(first, end)]
            for h in range(q.shape[1]):
                keys, values = (torch.stack([p[i, h // group, r] for i, r in rows]) for p in (k, v))
                scores, cap = attrs["scale"] * (keys @ q[b, h, t]), attrs["softcap"]
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                scores = torch.cat([scores, *(s[h : h + 1].to(scores) for s in sinks)])
                out[b, h, t] = torch.softmax(scores, 0)[: len(rows)] @ values
    return out


def runs(x: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of x, split at the offsets."""
    return x[: int(offsets[-1])].split(offsets.diff().tolist())


def ema(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    sources, targets = columns(ins[1:], 2)
    tau = ins[0].double()
    return tuple(((1 - tau) * t + tau * s).to(ins[1].dtype) for s, t in zip(sources, targets, strict=True))


def unscale_check(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    inverse, found, *grads = ins
    bad = any(not g.isfinite().all() for g in grads)
    return (torch.ones_like(found) if bad else found.clone(), *(g * inverse.to(g.dtype) for g in grads))


def zero_check(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    found, *grads = ins
    return torch.stack([found if found else (g.count_nonzero() == 0).to(found.dtype) for g in grads])


def rope_dynamic(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    positions, base = ins
    length, dim = int(positions.max()) + 1, 2 * len(base)
    if length <= attrs["original"]:
        return base
    s = attrs["factor"]
    theta = attrs["theta"] * (s * length / attrs["original"] - (s - 1)) ** (dim / (dim - 2))
    return torch.tensor([theta ** (-2 * i / dim) for i in range(len(base))], dtype=torch.float32)


def sdpa_backward(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    """From the given result, which need not be that of the operands: rowsum(g · out) is the softmax term."""
    *operands, out, g = ins
    q, k, v = (t.detach().double() for t in operands[:3])
    out, g, group = out.double(), g.double(), q.shape[1] // k.shape[1]
    eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    p = sdpa([q, k, eye, *operands[3:]], attrs)
    rep = lambda t: t.repeat_interleave(group, 1)  # noqa: E731  # a name for two uses
    ds = p * (g @ rep(v).transpose(-1, -2) - (g * out).sum(-1, keepdim=True))
    if attrs.get("softcap") is not None:  # the slope of c·tanh(s / c)
        ds = ds * (1 - torch.tanh(attrs["scale"] * q @ rep(k).transpose(-1, -2) / attrs["softcap"]) ** 2)
    folded = lambda t: t.unflatten(1, (k.shape[1], group)).sum(2)  # noqa: E731
    dq, dk = attrs["scale"] * ds @ rep(k), folded(attrs["scale"] * ds.transpose(-1, -2) @ q)
    return tuple(t.to(operands[0].dtype) for t in (dq, dk, folded(p.transpose(-1, -2) @ g)))


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.scale, None


SAME_NAME = (
    "neg abs sign floor ceil round exp expm1 log log1p sqrt rsqrt reciprocal sin cos tanh erf sigmoid relu "
    "add sub mul div floor_divide remainder pow minimum maximum eq ne lt le gt ge "
    "logical_and logical_or logical_xor logical_not isnan isinf isfinite where matmul "
    "tan asin acos atan sinh cosh asinh acosh atanh atan2 log2 log10 exp2 erfc erfinv lgamma digamma trunc fmod "
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
)
"""Ops that torch has under the same name."""


def put(x: torch.Tensor, ids: Sequence[torch.Tensor], attrs: dict, v: torch.Tensor, add: bool) -> torch.Tensor:
    """Torch's index_put, which knows leading axes only."""
    start, count = attrs["axis"] % x.dim(), len(ids)
    picked = torch.broadcast_shapes(*(i.shape for i in ids))
    v = v.expand(*x.shape[:start], *picked, *x.shape[start + count :])
    front = [t.movedim([*range(start, start + n)], [*range(n)]) for t, n in ((x, count), (v, len(picked)))]
    written = front[0].index_put(tuple(ids), front[1], accumulate=add)
    return written.movedim([*range(count)], [*range(start, start + count)])


def pad(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    widths = [n for pair in reversed(attrs["widths"]) for n in pair]
    value = attrs.get("value", 0.0) if attrs["mode"] == "constant" else None
    return F.pad(ins[0], widths, attrs["mode"], value)


def pad_backward(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """From torch's own gradient of its padding, differentiable itself."""
    shape = list(ins[0].shape)
    for axis, pair in enumerate(attrs["widths"]):
        shape[axis - len(attrs["widths"])] -= sum(pair)
    x = torch.zeros(shape, dtype=ins[0].dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(pad([x], attrs), x, ins[0], create_graph=True)[0]


TORCH: dict[str, Callable[[Sequence[torch.Tensor], dict], Any]] = {
    **{name: _unbroadcastable(name) for name in SAME_NAME.split()},
    "step": lambda ins, a: torch.heaviside(ins[0], torch.zeros((), dtype=ins[0].dtype)),
    "clamp": lambda ins, a: ins[0].clamp(a["low"], a["high"]),
    "silu": lambda ins, a: F.silu(ins[0]),
    "swiglu": lambda ins, a: F.silu(ins[0]) * ins[1],
    "leaky_relu": lambda ins, a: F.leaky_relu(ins[0], a["slope"]),
    "elu": lambda ins, a: F.elu(ins[0], a["alpha"]),
    "gelu": lambda ins, a: F.gelu(ins[0], approximate=a["approximate"]),
    "softplus": lambda ins, a: F.softplus(ins[0], threshold=700 if ins[0].dtype == torch.float64 else 80),
    "logsigmoid": lambda ins, a: F.logsigmoid(ins[0]),
    "sech": lambda ins, a: torch.cosh(ins[0]).reciprocal(),
    "recall": lambda ins, a: ins[0],
    **dict.fromkeys(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"], alone),
    **dict.fromkeys(["all_reduce_wait", "reduce_scatter_wait", "all_gather_wait"], alone),
    "recv": lambda ins, a: 0 * ins[0],
    "send": lambda ins, a: 0 * ins[0].sum(),
    "all_reduce_start": lambda ins, a: bucket(ins, a["scale"]),
    "reduce_scatter_start": lambda ins, a: (bucket(ins, a["scale"]),) * 2,
    "all_gather_start": lambda ins, a: torch.cat([x.reshape(-1) for x in ins]),
    "stop_gradient": lambda ins, a: ins[0].detach(),
    "scale_gradient": lambda ins, a: _ScaleGradient.apply(ins[0], a["scale"]),
    "assert_sizes": lambda ins, a: ins[0],
    "assert_finite": lambda ins, a: ins[0].clone(),
    "cast": lambda ins, a: ins[0].to(TORCH_DTYPE[a["dtype"]]),
    "copy": lambda ins, a: ins[0].clone(),
    "full_like": lambda ins, a: torch.full_like(ins[0], a["value"]),
    "junction": lambda ins, a: sum(ins[1:], ins[0]),
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "prod": product,
    "amax": _reduce("amax"),
    "amin": _reduce("amin"),
    "any": lambda ins, a: _reduce("any")([ins[0] != 0], a),
    "all": lambda ins, a: _reduce("all")([ins[0] != 0], a),
    "argmax": lambda ins, a: torch.argmax(ins[0], a["axis"]),
    "argmin": lambda ins, a: torch.argmin(ins[0], a["axis"]),
    "cumsum": cumsum,
    "linear_scan": linear_scan,
    "logsumexp": _reduce("logsumexp"),
    "reshape": lambda ins, a: ins[0].reshape(a["shape"]),
    "unflatten": lambda ins, a: ins[0].unflatten(a["axis"], a["sizes"]),
    "flatten": lambda ins, a: ins[0].flatten(a["start"], a["end"]),
    "permute": lambda ins, a: ins[0].permute(a["axes"]),
    "expand": lambda ins, a: ins[0].expand(a["shape"]),
    "slice": lambda ins, a: window(ins[0], a),
    "last": lambda ins, a: ins[0].narrow(a["axis"], ins[0].shape[a["axis"]] - 1, 1),
    "size": lambda ins, a: torch.tensor(ins[0].shape[a["axis"]]),
    "pad_slice": pad_slice,
    "stack": lambda ins, a: torch.stack(list(ins)),
    "concat": lambda ins, a: torch.cat(list(ins), a["axis"]),
    "linear": lambda ins, a: F.linear(*ins),
    "rms_norm": rms_norm,
    "layer_norm": lambda ins, a: F.layer_norm(ins[0], ins[0].shape[-a["rank"] :], *ins[1:], eps=a["eps"]),
    "group_norm": lambda ins, a: F.group_norm(ins[0], a["groups"], *ins[1:], eps=a["eps"]),
    "batch_norm": batch_norm,
    "batch_norm_train": batch_norm_train,
    "sort": lambda ins, a: ordered(ins[0], a["axis"], a["descending"]),
    "topk": lambda ins, a: tuple(t.narrow(a["axis"], 0, a["k"]) for t in ordered(ins[0], a["axis"], a["largest"])),
    "softmax": softmax,
    "log_softmax": lambda ins, a: torch.log_softmax(ins[0], a["axis"]),
    "bce": lambda ins, a: F.binary_cross_entropy(*torch.broadcast_tensors(*ins), reduction="none"),
    "bce_with_logits": lambda ins, a: F.binary_cross_entropy_with_logits(
        *torch.broadcast_tensors(*ins), reduction="none"
    ),
    "cross_entropy": cross_entropy,
    "cross_entropy_backward": cross_entropy_backward,
    "embedding": lambda ins, a: ins[0][ins[1]],
    "embedding_backward": embedding_backward,
    "rope_table": lambda ins, a: tuple(
        f(ins[0].unsqueeze(-1).float() * ins[1]) * a["scale"] for f in (torch.cos, torch.sin)
    ),
    "rope_dynamic": rope_dynamic,
    "rope_longer": lambda ins, a: ins[2] if int(ins[0].max()) + 1 > a["original"] else ins[1],
    "rope": rope,
    "sdpa": sdpa,
    "linear_int8": linear_int8,
    "solve": lambda ins, a: torch.linalg.solve(*(t.double() for t in ins)).to(ins[0].dtype),
    "kv_append_paged": kv_append_paged,
    "sdpa_paged": sdpa_paged,
    "sdpa_backward": sdpa_backward,
    "kv_append": kv_append,
    "grouped_matmul": lambda ins, a: torch.cat(
        [
            *(r @ w for r, w in zip(runs(ins[0], ins[2]), ins[1], strict=True)),
            torch.zeros(len(ins[0]) - int(ins[2][-1]), ins[1].shape[2], dtype=ins[0].dtype),
        ]
    ),
    "dispatch": dispatch,
    "expert_mlp": expert_mlp,
    "expert_mlp_backward": expert_mlp_backward,
    "expert_probe": expert_probe,
    "routed_attention": routed_attention,
    "routed_attention_backward": routed_attention_backward,
    "routed_attention_cached": routed_attention_cached,
    "routed_entries": routed_entries,
    "select_blocks": select_blocks,
    "sdpa_selected": sdpa_selected,
    "sdpa_selected_backward": sdpa_selected_backward,
    "grouped_outer": lambda ins, a: torch.stack(
        [x.T @ y for x, y in zip(runs(ins[0], ins[2]), runs(ins[1], ins[2]), strict=True)]
    ),
    "gate": gate,
    "gate_grad": gate_grad,
    "adam_step": adam(decoupled=False),
    "adamw_step": adam(decoupled=True),
    "sgd_step": optimizer(lambda a: 1 if a["momentum"] else 0, sgd),
    "lion_step": optimizer(lambda a: 1, lion),
    "muon_step": optimizer(lambda a: 1, muon),
    "rmsprop_step": optimizer(lambda a: 1 + bool(a["momentum"]) + a["centered"], rmsprop),
    "adagrad_step": optimizer(lambda a: 1, adagrad),
    "adadelta_step": optimizer(lambda a: 2, adadelta),
    "adamax_step": optimizer(lambda a: 2, adamax),
    "nadam_step": optimizer(lambda a: 3, nadam),
    "radam_step": optimizer(lambda a: 2, radam),
    "asgd_step": optimizer(lambda a: 2, asgd),
    "rprop_step": optimizer(lambda a: 2, rprop),
    "ema_step": ema,
    "unscale_check": unscale_check,
    "zero_check": zero_check,
    "gather": lambda ins, a: torch.gather(ins[0], a["axis"], ins[1]),
    "scatter_sum": lambda ins, a: torch.zeros(a["shape"], dtype=ins[0].dtype).scatter_add(a["axis"], ins[1], ins[0]),
    "scatter": lambda ins, a: ins[0].scatter(a["axis"], ins[1], ins[2]),
    "scatter_add": lambda ins, a: ins[0].scatter_add(a["axis"], ins[1], ins[2]),
    "index": lambda ins, a: ins[0][(*(slice(None),) * (a["axis"] % ins[0].dim()), *ins[1:])],
    "index_sum": lambda ins, a: put(torch.zeros(a["shape"], dtype=ins[0].dtype), ins[1:], a, ins[0], True),
    "index_put": lambda ins, a: put(ins[0], ins[2:], a, ins[1], False),
    "index_add": lambda ins, a: put(ins[0], ins[2:], a, ins[1], True),
    "index_fill": lambda ins, a: put(ins[0], ins[1:], a, torch.tensor(a["value"], dtype=ins[0].dtype), False),
    "one_hot": lambda ins, a: F.one_hot(ins[0], a["classes"]),
    "bincount": lambda ins, a: torch.bincount(ins[0].reshape(-1), minlength=a["length"]),
    "nonzero": lambda ins, a: torch.nonzero_static(ins[0], size=a["size"], fill_value=a["fill"]),
    "squeeze": lambda ins, a: ins[0].squeeze(a["axes"]),
    "unsqueeze": lambda ins, a: ins[0].reshape(np.expand_dims(np.empty(ins[0].shape), a["axes"]).shape),
    "diagonal": lambda ins, a: ins[0].diagonal(a["offset"], *a["axes"]),
    "flip": lambda ins, a: ins[0].flip(a["axes"]),
    "roll": lambda ins, a: ins[0].roll(a["shifts"], a["axes"]),
    "tile": lambda ins, a: ins[0].tile(a["repeats"]),
    "repeat_interleave": lambda ins, a: ins[0].repeat_interleave(a["repeats"], a["axis"]),
    "pad": pad,
    "pad_backward": pad_backward,
    "tril": lambda ins, a: ins[0].tril(a["diagonal"]),
    "triu": lambda ins, a: ins[0].triu(a["diagonal"]),
    "iota": lambda ins, a: torch.arange(ins[0].shape[a["axis"]]),
    **BLOCKS,
    **WINDOWS,
    **RANDOM,
}


def torch_values(name: str, inputs: Sequence[Any], attrs: dict) -> tuple[torch.Tensor, ...]:
    """Results of the reference on numpy operands."""
    result = TORCH[name]([torch.from_numpy(np.array(x)) for x in inputs], attrs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def torch_grads(
    name: str, inputs: Sequence[np.ndarray], attrs: dict, seeds: Sequence[np.ndarray], mask: Sequence[bool]
) -> list[np.ndarray | None]:
    """Gradients of the reference by torch autograd; None where the mask says so or nothing flows."""
    leaves = [torch.from_numpy(np.array(x)).requires_grad_(want) for x, want in zip(inputs, mask, strict=True)]
    result = TORCH[name](leaves, attrs)
    outs = [o for o in (result if isinstance(result, tuple | list) else (result,)) if o.dtype == torch.float64]
    wanted = [t for t in leaves if t.requires_grad]
    pairs = [(o, torch.from_numpy(np.array(s))) for o, s in zip(outs, seeds, strict=True) if o.requires_grad]
    if not pairs:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True))
    grads = [next(found) if want else None for want in mask]
    return [None if g is None else g.numpy() for g in grads]
