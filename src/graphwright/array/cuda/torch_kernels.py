"""Kernels for GPUs by torch's functions, for ops whose kernel on the CPU reaches host memory or is made for a CPU.

They run on any device of torch. Tensors that they make while they run are torch's, which serves captured graphs from
memory of their own. None raises for an index out of range, as that would need the host: `kv_append_paged` writes
nothing for it, `sdpa_paged` gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.index import FlatIndices
from graphwright.array.cpu.kernel import KERNELS, Kernel, Tensors, copy_to_outputs, kernel
from graphwright.array.cpu.words import fill_words_by_torch, words_by_torch
from graphwright.array.formulas import gates, specialise
from graphwright.array.layout import Window, per_axis

TORCH: dict[str, Kernel] = {}
"""Op -> its kernel."""
_on_device: Any = partial(kernel, table=TORCH)

_ANSWERS = Needs(answers=True)
for _name in (
    "dispatch", "expert_mlp", "expert_mlp_backward", "expert_probe", "sdpa_selected", "sdpa_selected_backward",
    "routed_attention", "routed_attention_backward", "routed_entries", "routed_attention_cached",
    "grouped_matmul", "grouped_outer",
):  # fmt: skip
    # how many tokens an expert or a head has is read on the host, from operands that stay on the device
    TORCH[_name] = KERNELS[_name]._replace(needs=lambda ins, attrs: _ANSWERS)


# -- indices -----------------------------------------------------------------------------------------------------------
@_on_device("flip")
def flip(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    x = ins[0]
    axes = sorted({axis % max(x.dim(), 1) for axis in attrs["axes"]}) if x.dim() else []
    return lambda: outs[0].copy_(x.flip(axes))


@_on_device("index_put", KERNELS["index_put"].work)
def index_put(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Write values at flat indices; of several values for one entry the last is written."""
    x, values, *ids = ins
    at, full = FlatIndices(x.shape, ids, attrs["axis"], work), work[2 if len(ids) == 1 else 3 :]
    given, target = at.entries((*full, values)[0]), at.array(outs[0])

    def write() -> None:
        order = torch.arange(len(at.flat), device=x.device)
        last = torch.zeros(target.shape[at.axis], dtype=order.dtype, device=x.device)
        last.scatter_reduce_(0, at.flat, order, "amax")
        target.index_copy_(at.axis, at.flat, given.index_select(at.axis, last.index_select(0, at.flat)))

    return [*at.calls, *(partial(wide.copy_, values) for wide in full), *copy_to_outputs(outs, [x]), write]


@_on_device("index_fill", KERNELS["index_fill"].work)
def index_fill(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    at = FlatIndices(ins[0].shape, ins[1:], attrs["axis"], work)
    fill = partial(at.array(outs[0]).index_fill_, at.axis, at.flat, attrs["value"])
    return [*at.calls, *copy_to_outputs(outs, ins[:1]), fill]


# -- attention ---------------------------------------------------------------------------------------------------------
@_on_device("rope_dynamic")
def rope_dynamic(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute the frequencies of dynamic RoPE from the largest position."""
    positions, base = ins
    dim, factor, original = 2 * base.shape[0], attrs["factor"], attrs["original"]
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim

    def run() -> None:
        length = (positions.max() + 1).double()
        stretched = attrs["theta"] * (factor * length / original - (factor - 1)).clamp(min=1e-9) ** (dim / (dim - 2))
        outs[0].copy_(torch.where(length <= original, base.double(), 1.0 / stretched**exponent))

    return run


@_on_device("rope_longer")
def rope_longer(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Copy operand `long` if the largest position is at least attribute `original`, else `short`."""
    positions, short, long = ins
    return lambda: outs[0].copy_(torch.where(positions.max() + 1 > attrs["original"], long, short))


@_on_device("sdpa")
def sdpa(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute attention by torch's fused kernels, which keep no scores in memory."""
    q, k, v = ins
    causal, grouped = attrs["causal"] and q.shape[2] > 1, q.shape[1] != k.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention
    facts = {"is_causal": causal, "scale": attrs["scale"], "enable_gqa": grouped}
    return lambda: outs[0].copy_(attend(q, k, v, **facts))


def _plain_attention(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    """Return "" for attention without a mask, or with a causal one of as many keys as queries."""
    if attrs["optional"] or attrs["softcap"] is not None or attrs["window"] is not None or 0 in ins[0].shape:
        return "torch's fused attention has no masks, windows, softcaps and sinks"
    square = ins[0].shape[2] == ins[1].shape[2] or ins[0].shape[2] == 1
    return "" if square or not attrs["causal"] else "torch counts causal masks from the first key"


TORCH["sdpa"] = TORCH["sdpa"]._replace(takes=_plain_attention)


@_on_device("kv_append_paged")
def kv_append_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Write new entries to the blocks of each sequence; nothing is written where a block is missing."""
    pool, rows, table, lengths = ins
    (blocks, _, block, _), count, out = pool.shape, rows.shape[2], outs[0]

    def write() -> None:
        flat, there = _slots(table, lengths, count, block, blocks)
        values = rows.transpose(1, 2).flatten(0, 1)  # [B·T, G, d]
        flat, there = flat.flatten(), there.flatten()
        own = torch.arange(len(flat), device=flat.device)
        some = torch.where(there, own, there.to(own.dtype).argmax())  # the others repeat what one of these writes
        page, inside = flat[some] // block, flat[some] % block
        new = torch.where(there[some].view(-1, 1, 1), values[some], out[page, :, inside])
        out.transpose(1, 2).index_put_((page, inside), new)

    return [*copy_to_outputs(outs, [pool]), write]


def _slots(
    table: torch.Tensor, lengths: torch.Tensor, count: int, block: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots [B, count] in a pool of the positions from `lengths` [B] on, and which of them exist."""
    positions = lengths.long().unsqueeze(1) + torch.arange(count, device=lengths.device)
    columns = positions.clamp(min=0) // block
    pages = table.long().gather(1, columns.clamp(max=table.shape[1] - 1))
    there = (lengths.unsqueeze(1) >= 0) & (columns < table.shape[1]) & (pages >= 0) & (pages < blocks)
    return pages.clamp(0, blocks - 1) * block + positions.clamp(min=0) % block, there


@_on_device("sdpa_paged")
def sdpa_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute attention over all blocks that the table can name; a sequence of negative length gives 0."""
    q, k, v, table, lengths, *sinks = ins
    (batch, heads, queries, deep), (blocks, groups, block, _) = q.shape, k.shape
    wide, room = torch.float64 if q.dtype == torch.float64 else torch.float32, table.shape[1] * block
    window, softcap = attrs["window"], attrs["softcap"]

    def run() -> None:
        pages = table.long().clamp(0, blocks - 1)
        keys, values = (
            t[pages].transpose(2, 3).reshape(batch, room, groups, t.shape[3]).transpose(1, 2).to(wide) for t in (k, v)
        )
        asked = (q.to(wide) * attrs["scale"]).view(batch, groups, -1, deep)
        scores = (asked @ keys.mT).view(batch, heads, queries, room)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        own = lengths.long().view(-1, 1) + torch.arange(queries, device=q.device)  # [B, T]
        at = torch.arange(room, device=q.device)
        seen = at <= own.unsqueeze(2)
        if window is not None:
            seen = seen & (at > (own - window).unsqueeze(2))
        exists = ((table >= 0) & (table < blocks)).repeat_interleave(block, 1).unsqueeze(1)
        lost = (seen & ~exists).any(2) | (own >= room)  # [B, T]
        scores = scores.masked_fill(~seen.unsqueeze(1), -inf)
        if sinks:
            sink = sinks[0].to(wide).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
            share = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            share = torch.softmax(scores, -1)
        share = torch.where(seen.unsqueeze(1), share, 0.0)
        mixed = (share.view(batch, groups, -1, room) @ values).view(batch, heads, queries, -1)
        idle = (lengths < 0).view(-1, 1, 1, 1)
        mixed = mixed.masked_fill(lost.view(batch, 1, queries, 1), torch.nan).masked_fill(idle, 0.0)
        outs[0].copy_(mixed)

    return run


# -- scans and samples -------------------------------------------------------------------------------------------------
@_on_device("linear_scan", widen=True)
def linear_scan(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Run the recurrence h = a·h + b in log₂ T passes over the axis, each of which doubles the steps that are joined.

    Source: Hillis and Steele 1986, "Data parallel algorithms".
    """
    axis, backwards = attrs["axis"] % ins[0].dim(), attrs["reverse"]

    def run() -> None:
        a, b = (t.movedim(axis, 0) for t in ins)
        if backwards:
            a, b = a.flip(0), b.flip(0)
        else:
            a, b = a.clone(), b.clone()
        step = 1
        while step < len(a):
            b = torch.cat([b[:step], torch.addcmul(b[step:], a[step:], b[:-step])])
            a = torch.cat([a[:step], a[step:] * a[:-step]])
            step *= 2
        outs[0].copy_((b.flip(0) if backwards else b).movedim(0, axis))

    return run


@_on_device("sample_token")
def sample_token(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Sample one token id per row of logits, by the rules of the CPU's kernel, in the order of its steps."""
    (ids, kept), (logits, rules, keys, seen) = outs, ins
    rows, tokens = logits.shape

    def run() -> None:
        repetition, presence, frequency, heat, top_p, min_p = rules.split(1, 1)
        seed, stream, step, top_k = keys.split(1, 1)
        index, count = seen[..., 0].long(), seen[..., 1]
        counts = ((index >= 0).long().cumprod(1) > 0) & (index < tokens)
        z = torch.cat([logits, logits.new_zeros(rows, 1)], 1)  # entries that do not count go to the last column
        at = torch.where(counts, index, tokens)
        own = z.gather(1, at)
        new = torch.where(own > 0, own / repetition, own * repetition)
        new = torch.where(count > 0, new - (presence + frequency * count.float()), new)
        z = z.scatter(1, at, new)[:, :tokens]
        z = torch.where(heat != 0, z / torch.where(heat != 0, heat, 1.0), z)
        best = z.amax(1, True)
        ranked, order = z.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(tokens, device=z.device)
        limited = (top_k > 0) & (top_k < tokens)
        ranked = ranked.masked_fill(limited & (rank >= top_k), -inf)
        shares = _shares(ranked, best)
        summed = shares.double().cumsum(1)
        reached = (summed / summed[:, -1:]).float() >= top_p
        before = torch.cat([reached.new_zeros(rows, 1), reached[:, :-1]], 1)
        ranked = ranked.masked_fill((top_p < 1) & before, -inf)
        ranked = ranked.masked_fill((min_p > 0) & (_shares(ranked, best) < min_p), -inf)
        chosen = torch.empty_like(z).scatter_(1, order, ranked)
        sampled = heat != 0
        chosen = torch.where(sampled & torch.isfinite(best), chosen, z)
        drawn = torch.empty(rows, tokens, dtype=torch.int64, device=z.device)
        fill_words_by_torch(drawn, torch.cat([seed, step], 1), stream.squeeze(1), 8)
        u = (drawn.double() + 0.5) * 2.0**-24
        noise = -torch.log(-torch.log(u)).float()
        found = torch.where(sampled, chosen + noise, chosen).argmax(1)
        valid = (torch.isfinite(best) & (step >= 0)).squeeze(1)
        ids.copy_(torch.where(valid, found, -1))
        kept.copy_(torch.where(step < 0, logits, chosen))

    return run


def _shares(z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of logits relative to that of the largest one; faint ones count as 0."""
    away = z - best
    return torch.where(away < -87.0, 0.0, away.exp())


# -- gates -------------------------------------------------------------------------------------------------------------
_sigmoids = {"sigmoid": torch.sigmoid, "sigmoid_slope": lambda z, p: p * (1 - p)}
_gates: Any = specialise(gates, {"absolute": torch.abs, "log": torch.log, "select": torch.where, **_sigmoids})
SOFT, OPEN, CLOSED, FROZEN, FREE = range(len(gates.STATES))
EVAL, TRAIN, AS_SOFT, AS_HARD, AS_OPEN = range(len(gates.MODES))
MARGIN = 1e-6
"""Noise is clipped to [MARGIN, 1 - MARGIN]."""


class _Gates:
    """The gates of one launch: what `loops.fill_gates` computes gate by gate, for all at once.

    Parts are rows of a matrix, so that the options of a choice are summed in their order.
    """

    def __init__(self, ins: Tensors, sizes: tuple[int, ...]) -> None:
        self.logits, self.table, self.temperature, self.run = ins
        most, start, rows = max(sizes, default=0), 0, []
        for size in sizes:
            rows.append([*range(start, start + size), *[-1] * (most - size)])
            start += size
        self.index = torch.tensor(rows, dtype=torch.int64).view(len(sizes), most)
        self.inside = self.index >= 0
        self.index = self.index.clamp(min=0)
        self.part = torch.tensor([p for p, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64)
        self.position = torch.tensor([i for size in sizes for i in range(size)], dtype=torch.int64)
        names = ("linear", "heated", "noisy", "rounded", "stretched", "one_of")
        self.facts = {name: torch.tensor(gates.by_code(name)) for name in names}

    def parts(self, values: torch.Tensor, other: float) -> torch.Tensor:
        """Return values [N] as a matrix [parts, most], with `other` where a part has no entry."""
        return torch.where(self.inside, values[self.index], other)

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a matrix [parts, most] as values [N]."""
        return rows[self.part, self.position]

    def fill(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return value, slope and factor of all gates, and note which are options."""
        kind, group, state, slot, generation, element, _ = self.table.unbind(1)
        seed, step, mode = self.run.unbind()
        is_ = {name: fact[kind] for name, fact in self.facts.items()}
        self.heat = self.temperature[group]
        first = torch.zeros_like(self.index[:, :1]).squeeze(1) if not self.index.shape[1] else self.index[:, 0]
        self.option = (is_["one_of"][first] & (mode != AS_OPEN))[self.part]
        self.training = mode == TRAIN
        z, t = self.logits, self.heat
        low = 0xFFFFFFFF
        word = words_by_torch(element & low, (slot + 0x80000000) & low, generation & low, step & low, seed)[0]
        noise = (((word >> 8).to(z.dtype) + 0.5) * 2.0**-24).clamp(MARGIN, 1.0 - MARGIN)
        closed = (state == CLOSED) | (state == FREE)
        value, slope, factor = self._single(is_, state, z, t, noise, mode)
        full = (state == OPEN) | (mode == AS_OPEN)
        value = torch.where(full, 1.0, value).masked_fill(closed, 0.0)
        slope = slope.masked_fill(full | closed, 0.0)
        factor = factor.masked_fill(full | closed, 0.0)
        option = self._options(z, t, noise, closed, mode)
        value, slope, factor = (
            torch.where(self.option, b, a) for a, b in zip((value, slope, factor), option, strict=True)
        )
        return value, slope, factor

    def _single(self, is_: Any, state: Any, z: Any, t: Any, noise: Any, mode: Any) -> tuple[Any, Any, Any]:
        noisy = self.training & is_["noisy"] & (state == SOFT)
        u = torch.where(noisy, noise, 0.5)
        how = torch.where((state == FROZEN) & self.training, EVAL, mode)
        training, hard = how == TRAIN, how == AS_HARD
        hot_value, hot_slope = _gates.soft(z, t)
        score, heat = _gates.logistic(z, u), torch.where(training, t, 1.0)
        cool_value, cool_slope = _gates.soft(score, heat)
        heated = is_["heated"]
        value, slope = torch.where(heated, hot_value, cool_value), torch.where(heated, hot_slope, cool_slope)
        factor = torch.where(heated, -z / t, torch.where(training, -(score / heat), 0.0))
        stretched = _gates.hard_concrete(value, slope)
        value, slope = (torch.where(is_["stretched"], b, a) for a, b in zip((value, slope), stretched, strict=True))
        above = torch.where(training & is_["noisy"], value > torch.where(heated, u, 0.5), z > 0)
        rounded = hard | (is_["rounded"] & (how != AS_SOFT))
        value = torch.where(rounded, above.to(value.dtype), value)
        value = torch.where(is_["linear"], torch.where(hard, _gates.thinned(z), z), value)
        slope, factor = torch.where(is_["linear"], 1.0, slope), torch.where(is_["linear"], 0.0, factor)
        return value, slope.masked_fill(state == FROZEN, 0.0), factor

    def _options(self, z: Any, t: Any, noise: Any, closed: Any, mode: Any) -> tuple[Any, Any, Any]:
        noisy = self.training & ~closed
        score = z + torch.where(noisy, _gates.gumbel(noise), 0.0)
        heat = torch.where(self.training, t[self.index[:, :1]][self.part].squeeze(-1), 1.0) if len(z) else t
        factor = torch.where(noisy, -score / heat, 0.0)
        rows = self.parts((score / heat).masked_fill(closed, -inf), -inf)
        top = rows.amax(1, True) if rows.shape[1] else rows
        powers = torch.where(rows > -inf, (rows - top).exp(), 0.0)
        total = powers.sum(1, True)
        share = torch.where(total > 0, powers / total, 0.0)
        best = (rows == top) & (rows > -inf)
        first = best & (best.long().cumsum(1) == 1)
        value = torch.where(mode == AS_HARD, first.to(share.dtype), share)
        return self.flat(value), self.flat(share), factor

    def pull_back(self, slope: torch.Tensor, factor: torch.Tensor, grads: torch.Tensor) -> tuple[Any, Any]:
        """Return dL/dz and dL/dT; call `fill` first."""
        mean = self.parts(grads * slope, 0.0).sum(1)[self.part]
        heat = torch.where(self.training, self.heat[self.index[:, 0]][self.part], 1.0) if len(grads) else grads
        found = torch.where(self.option, slope * (grads - mean) / heat, grads * slope)
        groups = torch.arange(len(self.temperature), device=grads.device)
        own = (self.table[:, 1].unsqueeze(0) == groups.unsqueeze(1)).to(found.dtype)
        return found, own @ (found * factor)


@_on_device("gate", widen=True)
def gate(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    made = _Gates(ins, attrs["sizes"])

    def run() -> None:
        values, _, _ = made.fill()
        for out, part in zip(outs, torch.split(values, list(attrs["sizes"])), strict=True):
            out.copy_(part)

    return run


@_on_device("gate_grad", widen=True)
def gate_grad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute the gradient of `gate` with the same noise; upstream gradients that are not given count as 0."""
    made, sizes = _Gates(ins[:4], attrs["sizes"]), attrs["sizes"]

    def run() -> None:
        _, slope, factor = made.fill()
        given = iter(ins[4:])
        parts = [
            next(given) if there else slope.new_zeros(size) for size, there in zip(sizes, attrs["given"], strict=True)
        ]
        grads = torch.cat(parts) if parts else slope.new_zeros(0)
        for out, found in zip(outs, made.pull_back(slope, factor, grads), strict=True):
            out.copy_(found)

    return run


# -- convolution -------------------------------------------------------------------------------------------------------
def _convolution(weight: torch.Size, attrs: Attrs) -> tuple[Any, ...]:
    """Return the arguments of `torch.convolution` after the operands, for `conv` or `conv_transpose`."""
    window = Window.of(weight[2:], attrs)
    rest = per_axis(attrs.get("output_padding", 0), len(window.kernel), "output_padding")
    return window.stride, window.padding, window.dilation, "output_padding" in attrs, rest, attrs["groups"]


def _conv(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Convolve by cuDNN, in the dtype of the operands and with its rules for TF32."""
    given, (x, w, *bias) = _convolution(ins[1].shape, attrs), ins
    return lambda: outs[0].copy_(torch.convolution(x, w, bias[0] if bias else None, *given))


_on_device("conv")(_conv)
_on_device("conv_transpose")(_conv)


@_on_device("conv_weight")
def conv_weight(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (x, g), out, given = ins, outs[0], _convolution(outs[0].shape, attrs)
    gradients = torch.ops.aten.convolution_backward  # of its third operand only the shape is read
    return lambda: out.copy_(gradients(g, x, out, None, *given, (False, True, False))[1])


# -- optimizers --------------------------------------------------------------------------------------------------------
def _columns(outs: Tensors, ins: Tensors, width: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the columns of the results (parameters, moments, step counts) and the gradients."""
    n = len(outs) // width
    return [list(outs[c * n : (c + 1) * n]) for c in range(width)], list(ins[2 : 2 + n])


def _skips(found: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return float32 numbers, one a parameter, that are 1 where its step is left out."""
    flags = (found != 0).float()
    return list(flags.unbind()) if flags.dim() else [flags] * count


def _adam(fused: Callable[..., Any]) -> Callable[[Tensors, Tensors, Attrs, Tensors], Any]:
    """Return the `bind` function for a fused Adam kernel, which reads `found_inf` and the rate on the device."""

    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Any:
        (params, m, v, *largest, steps), grads = _columns(outs, ins, 5 if attrs["amsgrad"] else 4)
        names = ("beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize")
        numbers, lr, found = {name: attrs[name] for name in names}, ins[0], ins[1]
        columns = [params, grads, m, v, largest[0] if largest else [], steps]

        def step() -> None:
            rate, skips = lr.float(), _skips(found, len(params))  # the kernel of CUDA reads a float32 rate
            together = [(columns, skips[0])] if not found.dim() else [
                ([column[i : i + 1] for column in columns], skip) for i, skip in enumerate(skips)
            ]  # fmt: skip
            for each, skip in together:
                torch.ops.aten._foreach_add_.Tensor(each[-1], 1.0 - skip)  # torch._foreach_add_ would read the number
                fused(*each, lr=rate, **numbers, found_inf=skip)

        return [*copy_to_outputs(outs, ins[len(ins) - len(outs) :]), step]

    return bind


TORCH["adam_step"] = Kernel(_adam(torch._fused_adam_), None, "torch")  # pyright: ignore[reportPrivateImportUsage]
TORCH["adamw_step"] = Kernel(_adam(torch._fused_adamw_), None, "torch")  # pyright: ignore[reportPrivateImportUsage]


@_on_device("sgd_step")
def sgd_step(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Any:
    """Update parameters by SGD; the first step of a parameter sets its momentum buffer to the gradient."""
    momentum, decay, dampening = attrs["momentum"], attrs["weight_decay"], attrs["dampening"]
    (params, *buffers, steps), grads = _columns(outs, ins, 3 if momentum else 2)
    lr, found = ins[0], ins[1]

    def step() -> None:
        for i, (p, g, count, skip) in enumerate(zip(params, grads, steps, _skips(found, len(params)), strict=True)):
            taken, wide = skip == 0, -g if attrs["maximize"] else g
            if decay:
                wide = torch.add(wide, p, alpha=decay)
            if momentum:
                kept = buffers[0][i]
                moved = torch.where(count == 0, wide, kept * momentum + wide * (1 - dampening))
                kept.copy_(torch.where(taken, moved, kept))
                wide = torch.add(wide, moved, alpha=momentum) if attrs["nesterov"] else moved
            p.copy_(torch.where(taken, p - lr.to(p.dtype) * wide, p))
            count.add_(1.0 - skip)

    return [*copy_to_outputs(outs, ins[len(ins) - len(outs) :]), step]
