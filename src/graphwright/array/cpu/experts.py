"""Kernels of mixtures of experts: tokens are grouped by a stable counting sort, then multiplied expert by expert.

In float32 the VM's loops run (see `native_experts.py`) where they are built, else ATen's kernels.
For each expert, tiles of its tokens are gathered, multiplied and added to the results in slot. So scratch does not
grow with the number of experts, and the sum of a token is in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu import native_experts
from graphwright.array.cpu.kernel import Tensors, kernel, statistic
from graphwright.array.dtype import float32, int64
from graphwright.array.formulas.experts import FIRST, LIMIT, SLOPE, Expert, experts_of, group_width
from graphwright.array.spec import Spec
from graphwright.array.vm.code import SCRATCH, Code

aten: Any = torch.ops.aten
TILE = 512
"""Tokens of one expert that are multiplied at once."""


@kernel("dispatch", needs=Needs(allocates=True))
def dispatch(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (choice,), (offsets, rows, pairs), experts = ins, outs, attrs["experts"]
    columns = choice.shape[1]

    def out_of_range(found: int) -> None:
        raise IndexError(f"the id of an expert is out of range: expected -1 to {experts - 1}, got {found}")

    native = native_experts.dispatch(outs, choice, experts, lambda: out_of_range(int(choice.max())))

    def run() -> None:
        if choice.dtype is torch.bool:
            found = choice.t().nonzero()
            expert, row = found[:, 0], found[:, 1]
            pair = row * columns + expert
        else:
            flat = choice.reshape(-1)
            expert, pair = flat.sort(stable=True)
            first = int((expert < 0).sum())
            expert, pair = expert[first:], pair[first:]
            if len(expert) and int(expert[-1]) >= experts:
                out_of_range(int(expert[-1]))
            row = pair.div(columns, rounding_mode="floor")
        count = len(expert)
        offsets[:1].zero_()
        torch.cumsum(torch.bincount(expert, minlength=experts), 0, out=offsets[1:])
        for out, values in ((rows, row), (pairs, pair)):
            out[:count] = values
            out[count:].zero_()

    return native or run


def checked_runs(
    offsets: torch.Tensor, rows: torch.Tensor, pairs: torch.Tensor, tokens: int, weights: int
) -> list[int]:
    """Return the offsets as ints. Raises: IndexError unless they ascend from 0, and rows and pairs are in range."""
    ends: list[int] = offsets.tolist()
    if ends[0] != 0 or ends[-1] > len(rows) or any(a > b for a, b in pairwise(ends)):
        raise IndexError(f"invalid offsets of experts: expected 0 rising to at most {len(rows)}, got {ends[:20]}")
    for name, ids, limit in (("row", rows, tokens), ("pair", pairs, weights)):
        used = ids[: ends[-1]]
        if len(used) and not 0 <= int(used.min()) <= int(used.max()) < limit:
            raise IndexError(
                f"the {name} of a token is out of range: expected 0 to {limit - 1}, got {used.tolist()[:20]}"
            )
    return ends


_FORWARD: Mapping[str, Callable[..., Any]] = {
    "silu": aten.silu.out,
    "relu": lambda x, out: torch.clamp_min(x, 0, out=out),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": partial(aten.gelu.out, approximate="none"),
    "gelu_tanh": partial(aten.gelu.out, approximate="tanh"),
}
"""Value of `act` -> f(x, out=)."""
_BACKWARD: Mapping[str, Callable[..., Any]] = {
    "silu": lambda g, x, y, out: aten.silu_backward.grad_input(g, x, grad_input=out),
    "relu": lambda g, x, y, out: aten.threshold_backward.grad_input(g, x, 0, grad_input=out),
    "tanh": lambda g, x, y, out: aten.tanh_backward.grad_input(g, y, grad_input=out),
    "sigmoid": lambda g, x, y, out: aten.sigmoid_backward.grad_input(g, y, grad_input=out),
    "gelu": lambda g, x, y, out: aten.gelu_backward.grad_input(g, x, approximate="none", grad_input=out),
    "gelu_tanh": lambda g, x, y, out: aten.gelu_backward.grad_input(g, x, approximate="tanh", grad_input=out),
}
"""Value of `act` -> f(g, x, y, out=) with y = act(x): the gradient of x."""


class _Tile:
    """Scratch for one tile of tokens: views of flat buffers, as many rows and columns as a tile needs."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self.buffers = buffers

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        return self.buffers[name][: prod(shape)].view(shape)


class _Mixture:
    """What forward and backward share: the experts, runs of tokens in tiles, and the hidden layer of one expert."""

    def __init__(self, ins: Tensors, attrs: Attrs, tile: _Tile, size: int) -> None:
        self.x, self.offsets, self.rows, self.pairs, weights = ins[:FIRST]
        self.weights, self.matrices = weights.view(-1), ins[FIRST:]
        self.attrs, self.kind, self.bias, self.width = attrs, attrs["kind"], attrs["bias"], group_width(attrs)
        self.act, self.slope = _FORWARD[attrs["act"]], _BACKWARD[attrs["act"]]
        self.tile, self.size = tile, size

    def check(self) -> list[int]:
        """Return the offsets as ints. Raises: IndexError if an operand of the dispatch is invalid."""
        return checked_runs(self.offsets, self.rows, self.pairs, len(self.x), len(self.weights))

    def tiles(self) -> Iterator[tuple[int, bool, torch.Tensor, torch.Tensor]]:
        """Yield (expert, whether this is its first tile, rows of the tokens, their pairs), expert by expert."""
        for e, (a, b) in enumerate(pairwise(self.check())):
            for at in range(a, b, self.size):
                stop = min(at + self.size, b)
                yield e, at == a, self.rows[at:stop], self.pairs[at:stop]

    def expert(self, e: int) -> Expert:
        """Return the matrices and biases of one expert."""
        return experts_of(self.matrices[e * self.width : (e + 1) * self.width], self.attrs)[0]

    def inner(self, x: torch.Tensor, e: Expert) -> tuple[torch.Tensor, ...]:
        """Compute (gate or up product, up product, activation, hidden layer) of gathered tokens, in scratch."""
        shape = len(x), len(e.up)
        v = _linear(x, e.up, e.up_bias, self.tile("v", *shape))
        a = v if e.gate is None else _linear(x, e.gate, e.gate_bias, self.tile("a", *shape))
        s, h = self.tile("s", *shape), self.tile("h", *shape)
        if self.kind == "oai":
            low, high = torch.clamp_max(a, LIMIT, out=h), torch.clamp(v, -LIMIT, LIMIT, out=self.tile("t", *shape))
            torch.sigmoid(torch.mul(low, SLOPE, out=s), out=s)
            h.mul_(s).addcmul_(h, high)
        elif e.gate is None:
            self.act(a, out=h)
            s = h
        else:
            torch.mul(self.act(a, out=s), v, out=h)
        return a, v, s, h

    def inner_backward(self, t: torch.Tensor, a: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> tuple[Any, Any]:
        """Return the gradients of a (None without a gate) and v from that of the hidden layer; t, a, v, s are lost."""
        if self.kind == "mlp":
            return None, self.slope(t, a, s, out=t)
        if self.kind == "gated":
            dv = torch.mul(t, s, out=self.tile("h", *t.shape))
            return self.slope(t.mul_(v), a, s, out=t), dv
        inside, within = a <= LIMIT, v.abs() <= LIMIT
        low, high = a.clamp_(max=LIMIT), v.clamp_(-LIMIT, LIMIT)
        dv = torch.mul(t, low, out=self.tile("h", *t.shape)).mul_(s).mul_(within)
        return t.mul_(high.add_(1)).mul_(s * (1 + SLOPE * low * (1 - s))).mul_(inside), dv


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def _tile_size(tokens: int, low: bool) -> int:
    """Return the most tokens of a tile: all of them in 16 bits, in which gradients of tiles are not added up."""
    return max(tokens if low else min(tokens, TILE), 1)


def _sizes(ins: Sequence[Spec], attrs: Attrs) -> tuple[int, int, int, int]:
    """Return tokens N, width C, the largest I, and the tokens of a tile; `ins`: operands of `expert_mlp`."""
    n, c = ins[0].sizes
    widest = max(e.up.sizes[0] for e in experts_of(ins[FIRST:], attrs))
    return n, c, widest, _tile_size(n, ins[0].dtype.is_low)


def _work(ins: Sequence[Spec], attrs: Attrs, names: Sequence[str]) -> list[Spec]:
    """Return the scratch `names`: rows of tokens (x, g, o), hidden rows (a, v, s, h, t), weights (w), wide sums.

    "scratch" is that of the VM's loops.
    """
    n, c, inner, tile = _sizes(ins, attrs)
    kind, wide = ins[0].dtype, statistic(ins[0].dtype)
    shapes = {**dict.fromkeys("xgo", (tile * c, kind)), **dict.fromkeys("avsht", (tile * inner, kind))}
    shapes |= {"w": (tile, ins[4].dtype), "wide": (tile * max(c, inner), wide), "sum": (n * c, wide)}
    shapes["scratch"] = (SCRATCH // 8 if kind is float32 else 0, int64)
    return [Spec((shapes[name][0],), shapes[name][1]) for name in names]


_FORWARD_WORK = ("x", "o", "a", "v", "s", "h", "t", "w", "wide", "sum", "scratch")
_BACKWARD_WORK = ("x", "g", "o", "a", "v", "s", "h", "t", "w", "wide", "sum", "scratch")


@kernel("expert_mlp", lambda o, i, a: _work(i, a, _FORWARD_WORK), needs=Needs(reads=(1, 2, 3)))
def expert_mlp(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    tile = _Tile(dict(zip(_FORWARD_WORK, work, strict=True)))
    x, out = ins[0], outs[0]
    mixture = _Mixture(ins, attrs, tile, _tile_size(len(x), x.element_size() == 2))
    native = native_experts.mixture(ins, attrs, mixture.size, tile.buffers, out, mixture.check)
    if native is not None:
        return native
    total = out if out.dtype == tile.buffers["sum"].dtype else tile("sum", *x.shape)

    def run() -> None:
        total.zero_()
        for number, _, rows, pairs in mixture.tiles():
            e, shape = mixture.expert(number), (len(rows), x.shape[1])
            given = torch.index_select(x, 0, rows, out=tile("x", *shape))
            *_, h = mixture.inner(given, e)
            made = _linear(h, e.down, e.down_bias, tile("o", *shape))
            share = torch.index_select(mixture.weights, 0, pairs, out=tile("w", len(rows)))
            wide = tile("wide", *shape).copy_(made).mul_(share.unsqueeze(1))
            total.index_add_(0, rows, wide)
        if total is not out:
            out.copy_(total)

    return run


@kernel("expert_mlp_backward", lambda o, i, a: _work(i[1:], a, _BACKWARD_WORK), needs=Needs(reads=(2, 3, 4)))
def expert_mlp_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    tile = _Tile(dict(zip(_BACKWARD_WORK, work, strict=True)))
    g, x = ins[0], ins[1]
    found = dict(zip(attrs["wanted"], outs, strict=True))
    mixture = _Mixture(ins[1:], attrs, tile, _tile_size(len(x), x.element_size() == 2))
    dx, dweights = found.get(0), found.get(4)
    native = native_experts.mixture(
        ins[1:], attrs, mixture.size, tile.buffers, dx, mixture.check, g, found, Code.EXPERTS_BACKWARD
    )
    if native is not None:
        return native
    total = dx if dx is None or dx.dtype == tile.buffers["sum"].dtype else tile("sum", *x.shape)
    shares = None if dweights is None else dweights.view(-1)

    def add(slot: int, first: bool, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add leftᵀ · right to the gradient of a matrix, and the column sums of left to that of its bias."""
        if (out := found.get(slot)) is not None:
            if first:
                torch.mm(left.t(), right, out=out)
            else:
                torch.addmm(out, left.t(), right, out=out)
        if mixture.bias and (out := found.get(slot + 1)) is not None:
            if first:
                torch.sum(left, 0, out=out)
            else:
                out.add_(left.sum(0))

    def run() -> None:
        for out in (total, shares):
            if out is not None:
                out.zero_()
        seen: set[int] = set()
        for number, first, rows, pairs in mixture.tiles():
            seen.add(number)
            e, shape = mixture.expert(number), (len(rows), x.shape[1])
            given = torch.index_select(x, 0, rows, out=tile("x", *shape))
            back = torch.index_select(g, 0, rows, out=tile("g", *shape))
            a, v, s, h = mixture.inner(given, e)
            t = torch.mm(back, e.down, out=tile("t", *h.shape))
            share = torch.index_select(mixture.weights, 0, pairs, out=tile("w", len(rows))).unsqueeze(1)
            if shares is not None:
                slope = tile("wide", *h.shape).copy_(h).mul_(t).sum(1)
                if e.down_bias is not None:
                    slope += tile("wide", *shape).copy_(back).mul_(e.down_bias).sum(1)
                shares[pairs] = slope.to(shares.dtype)
            start, step = FIRST + number * mixture.width, 2 if mixture.bias else 1
            slots = [start + i * step for i in range(mixture.width // step)]
            add(slots[-1], first, back.mul_(share), h)
            da, dv = mixture.inner_backward(t.mul_(share), a, v, s)
            add(slots[-2], first, dv, given)
            if da is not None:
                add(slots[0], first, da, given)
            if total is not None:
                made = torch.mm(dv, e.up, out=tile("o", *shape))
                if da is not None:
                    made = torch.addmm(made, da, e.gate, out=made)
                total.index_add_(0, rows, tile("wide", *shape).copy_(made))
        for slot, out in found.items():
            if slot >= FIRST and (slot - FIRST) // mixture.width not in seen:
                out.zero_()
        if dx is not None and total is not None and total is not dx:
            dx.copy_(total)

    return run


_PROBE_WORK = ("x", "g", "a", "v", "s", "h", "t", "o", "wide", "scratch")


def _probe_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, _, *runs = ins
    return _work([x, *runs[:3], outs[0], *runs[3:]], attrs, _PROBE_WORK)


@kernel("expert_probe", _probe_work, needs=Needs(reads=(2, 3, 4)))
def expert_probe(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    tile = _Tile(dict(zip(_PROBE_WORK, work, strict=True)))
    (x, g), (surprise, gain), bias = ins[:2], outs, 1.0 if attrs["bias"] else 0.0
    operands = [x, *ins[2:5], surprise, *ins[5:]]
    mixture = _Mixture(operands, attrs, tile, _tile_size(len(x), x.element_size() == 2))
    native = native_experts.mixture(
        operands, attrs, mixture.size, tile.buffers, gain, mixture.check, g, op=Code.EXPERT_PROBE
    )
    if native is not None:
        return native

    def square(rows: torch.Tensor) -> torch.Tensor:
        return tile("wide", *rows.shape).copy_(rows).square_().sum(1)

    def run() -> None:
        surprise.zero_()
        gain.zero_()
        for number, _, rows, pairs in mixture.tiles():
            e, shape = mixture.expert(number), (len(rows), x.shape[1])
            given = torch.index_select(x, 0, rows, out=tile("x", *shape))
            back = torch.index_select(g, 0, rows, out=tile("g", *shape))
            a, v, s, h = mixture.inner(given, e)
            made = _linear(h, e.down, e.down_bias, tile("o", *shape))
            gain[pairs] = -tile("wide", *shape).copy_(made).mul_(back).sum(1)
            first = square(back) * (square(h) + bias)
            da, dv = mixture.inner_backward(torch.mm(back, e.down, out=tile("t", *h.shape)), a, v, s)
            slopes = square(dv) if da is None else square(da) + square(dv)
            surprise[pairs] = (first + (square(given) + bias) * slopes).sqrt_()

    return run
