"""Kernels of mixtures of experts: tokens are grouped by a stable counting sort, then multiplied expert by expert.

In float32 the VM's code runs where it is built (see `by_vm.py`), else ATen's kernels. The algorithm `sorted` gathers
tiles of the tokens of one expert, multiplies them and adds them to the results in slot; `gather` does so with few
tokens at once; `dense` multiplies all tokens by all experts, with weight 0 where an expert is not chosen. So scratch
does not grow with the number of experts, and the sum of a token is in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.by_vm import by_vm, work_of
from graphwright.array.cpu.kernel import Tensors, kernel, statistic
from graphwright.array.formulas.experts import (
    FIRST,
    LIMIT,
    SLOPE,
    Expert,
    algorithm_of,
    chunk_size,
    experts_of,
    group_width,
)
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import experts as forms

aten: Any = torch.ops.aten


@kernel("dispatch", lambda o, i, a: work_of(forms.DISPATCH, o, i, a), needs=Needs(allocates=True))
def dispatch(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (choice,), (offsets, rows, pairs), experts = ins, outs, attrs["experts"]
    columns = choice.shape[1]

    def out_of_range(found: int) -> None:
        raise IndexError(f"the id of an expert is out of range: expected -1 to {experts - 1}, got {found}")

    native = by_vm(forms.DISPATCH, outs, ins, attrs, work, lambda: out_of_range(int(choice.max())))

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


class _Scratch:
    """Scratch for one tile of tokens: views of flat buffers, as many rows and columns as a tile needs."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self.buffers = buffers

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        return self.buffers[name][: prod(shape)].view(shape)


class _Tile(NamedTuple):
    """Tokens of one expert: whether they are its first; their rows and pairs, or for `dense` a slice of all tokens."""

    expert: int
    first: bool
    rows: torch.Tensor
    pairs: torch.Tensor
    part: slice | None = None


class _Mixture:
    """What the kernels share: the experts, their tokens in tiles, and the hidden layer of one expert."""

    def __init__(self, ins: Tensors, attrs: Attrs, scratch: _Scratch) -> None:
        self.x, self.offsets, self.rows, self.pairs, weights = ins[:FIRST]
        self.weights, self.matrices = weights.view(-1), ins[FIRST:]
        self.attrs, self.kind, self.bias, self.width = attrs, attrs["kind"], attrs["bias"], group_width(attrs)
        self.act, self.slope = _FORWARD[attrs["act"]], _BACKWARD[attrs["act"]]
        algorithm = algorithm_of(self.x, self.rows, self.matrices, attrs).algorithm
        self.dense, self.scratch = algorithm == "dense", scratch
        low = self.x.element_size() == 2
        self.size = _tile_size(len(self.x), chunk_size(len(self.rows), low, algorithm), low)

    def check(self) -> list[int]:
        """Return the offsets as ints. Raises: IndexError if an operand of the dispatch is invalid."""
        return checked_runs(self.offsets, self.rows, self.pairs, len(self.x), len(self.weights))

    def tiles(self) -> Iterator[_Tile]:
        """Yield the tokens of the experts, expert by expert."""
        ends = self.check()
        if self.dense:
            self.spread(ends)
        for e, (a, b) in enumerate(pairwise(ends)):
            for at in range(0, len(self.x), self.size) if self.dense else ():
                yield _Tile(e, at == 0, self.rows[a:b], self.pairs[a:b], slice(at, at + self.size))
            for at in range(a, b, self.size) if not self.dense else ():
                stop = min(at + self.size, b)
                yield _Tile(e, at == a, self.rows[at:stop], self.pairs[at:stop])

    def spread(self, ends: Sequence[int]) -> None:
        """Set the weights [N, E] of all tokens and experts, 0 where an expert is not chosen."""
        each = torch.arange(len(ends) - 1, device=self.offsets.device).repeat_interleave(self.offsets.diff())
        index = self.rows[: ends[-1]] * (len(ends) - 1) + each
        self.shares = self.scratch("shares", len(self.x), len(ends) - 1).zero_()
        self.shares.view(-1)[index] = self.weights[self.pairs[: ends[-1]]]

    def gathered(self, t: torch.Tensor, tile: _Tile, name: str) -> torch.Tensor:
        """Return the rows of t that belong to the tokens of a tile, a copy in scratch `name`."""
        if tile.part is None:
            return torch.index_select(t, 0, tile.rows, out=self.scratch(name, len(tile.rows), t.shape[1]))
        return self.scratch(name, *t[tile.part].shape).copy_(t[tile.part])

    def share(self, tile: _Tile) -> torch.Tensor:
        """Return the weights of a tile's tokens [tokens, 1]."""
        if tile.part is not None:
            return self.shares[tile.part, tile.expert].unsqueeze(1)
        return torch.index_select(self.weights, 0, tile.pairs, out=self.scratch("w", len(tile.pairs))).unsqueeze(1)

    def add(self, total: torch.Tensor, tile: _Tile, made: torch.Tensor) -> None:
        """Add rows to those of a tile's tokens."""
        if tile.part is None:
            total.index_add_(0, tile.rows, made)
        else:
            total[tile.part] += made

    def mark(self, values: torch.Tensor, tile: _Tile, found: torch.Tensor) -> None:
        """Set the entries of `values`, one for each pair, of a tile's tokens."""
        if tile.part is None:
            values[tile.pairs] = found.to(values.dtype)
        else:
            inside = (tile.rows >= tile.part.start) & (tile.rows < tile.part.stop)
            values[tile.pairs[inside]] = found[tile.rows[inside] - tile.part.start].to(values.dtype)

    def expert(self, e: int) -> Expert:
        """Return the matrices and biases of one expert."""
        return experts_of(self.matrices[e * self.width : (e + 1) * self.width], self.attrs)[0]

    def inner(self, x: torch.Tensor, e: Expert) -> tuple[torch.Tensor, ...]:
        """Compute (gate or up product, up product, activation, hidden layer) of gathered tokens, in scratch."""
        shape = len(x), len(e.up)
        v = _linear(x, e.up, e.up_bias, self.scratch("v", *shape))
        a = v if e.gate is None else _linear(x, e.gate, e.gate_bias, self.scratch("a", *shape))
        s, h = self.scratch("s", *shape), self.scratch("h", *shape)
        if self.kind == "oai":
            low, high = torch.clamp_max(a, LIMIT, out=h), torch.clamp(v, -LIMIT, LIMIT, out=self.scratch("t", *shape))
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
            dv = torch.mul(t, s, out=self.scratch("h", *t.shape))
            return self.slope(t.mul_(v), a, s, out=t), dv
        inside, within = a <= LIMIT, v.abs() <= LIMIT
        low, high = a.clamp_(max=LIMIT), v.clamp_(-LIMIT, LIMIT)
        dv = torch.mul(t, low, out=self.scratch("h", *t.shape)).mul_(s).mul_(within)
        return t.mul_(high.add_(1)).mul_(s * (1 + SLOPE * low * (1 - s))).mul_(inside), dv


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


_NAMES = ("x", "g", "o", "a", "v", "s", "h", "t", "w", "wide", "sum", "shares")


def _work(ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return scratch: rows of tokens (x, g, o), hidden rows (a, v, s, h, t), weights (w, shares), wide sums.

    `ins`: the operands of `expert_mlp`.
    """
    (n, c), experts = ins[0].sizes, experts_of(ins[FIRST:], attrs)
    inner, low = max(e.up.sizes[0] for e in experts), ins[0].dtype.is_low
    algorithm = algorithm_of(ins[0], ins[2], ins[FIRST:], attrs).algorithm
    tile = _tile_size(n, chunk_size(ins[2].sizes[0], low, algorithm), low)
    kind, wide = ins[0].dtype, statistic(ins[0].dtype)
    shapes = {**dict.fromkeys("xgo", (tile * c, kind)), **dict.fromkeys("avsht", (tile * inner, kind))}
    shapes |= {"w": (tile, ins[4].dtype), "wide": (tile * max(c, inner), wide), "sum": (n * c if low else 0, wide)}
    shapes["shares"] = (n * len(experts) if algorithm == "dense" else 0, ins[4].dtype)
    return [Spec((shapes[name][0],), shapes[name][1]) for name in _NAMES]


def _tile_size(tokens: int, chunk: int, low: bool) -> int:
    return max(tokens if low else min(tokens, chunk), 1)


def _split(work: Tensors) -> tuple[_Scratch, Tensors]:
    """Return the scratch of ATen's kernels and that of the VM."""
    return _Scratch(dict(zip(_NAMES, work, strict=False))), work[len(_NAMES) :]


@kernel("expert_mlp", lambda o, i, a: [*_work(i, a), *work_of(forms.EXPERTS, o, i, a)], needs=Needs(reads=(1, 2, 3)))
def expert_mlp(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    scratch, own = _split(work)
    x, out, mixture = ins[0], outs[0], _Mixture(ins, attrs, scratch)
    if (native := by_vm(forms.EXPERTS, outs, ins, attrs, own, mixture.check)) is not None:
        return native
    total = out if out.dtype == scratch.buffers["sum"].dtype else scratch("sum", *x.shape)

    def run() -> None:
        total.zero_()
        for tile in mixture.tiles():
            e, given = mixture.expert(tile.expert), mixture.gathered(x, tile, "x")
            *_, h = mixture.inner(given, e)
            made = _linear(h, e.down, e.down_bias, scratch("o", *given.shape))
            mixture.add(total, tile, scratch("wide", *given.shape).copy_(made).mul_(mixture.share(tile)))
        if total is not out:
            out.copy_(total)

    return run


@kernel(
    "expert_mlp_backward", lambda o, i, a: [*_work(i[1:], a), *work_of(forms.EXPERTS_BACKWARD, o, i, a)],
    needs=Needs(reads=(2, 3, 4)),
)  # fmt: skip
def expert_mlp_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    scratch, own = _split(work)
    g, x = ins[0], ins[1]
    found, mixture = dict(zip(attrs["wanted"], outs, strict=True)), _Mixture(ins[1:], attrs, scratch)
    if (native := by_vm(forms.EXPERTS_BACKWARD, outs, ins, attrs, own, mixture.check)) is not None:
        return native
    dx, dweights = found.get(0), found.get(4)
    total = dx if dx is None or dx.dtype == scratch.buffers["sum"].dtype else scratch("sum", *x.shape)
    slopes = None if dweights is None else dweights.view(-1)

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
        for out in (total, slopes):
            if out is not None:
                out.zero_()
        seen: set[int] = set()
        for tile in mixture.tiles():
            seen.add(tile.expert)
            e, given, back = mixture.expert(tile.expert), mixture.gathered(x, tile, "x"), mixture.gathered(g, tile, "g")
            a, v, s, h = mixture.inner(given, e)
            t = torch.mm(back, e.down, out=scratch("t", *h.shape))
            share = mixture.share(tile)
            if slopes is not None:
                slope = scratch("wide", *h.shape).copy_(h).mul_(t).sum(1)
                if e.down_bias is not None:
                    slope += scratch("wide", *given.shape).copy_(back).mul_(e.down_bias).sum(1)
                mixture.mark(slopes, tile, slope)
            start, step = FIRST + tile.expert * mixture.width, 2 if mixture.bias else 1
            slots = [start + i * step for i in range(mixture.width // step)]
            add(slots[-1], tile.first, back.mul_(share), h)
            da, dv = mixture.inner_backward(t.mul_(share), a, v, s)
            add(slots[-2], tile.first, dv, given)
            if da is not None:
                add(slots[0], tile.first, da, given)
            if total is not None:
                made = torch.mm(dv, e.up, out=scratch("o", *given.shape))
                if da is not None:
                    made = torch.addmm(made, da, e.gate, out=made)
                mixture.add(total, tile, scratch("wide", *given.shape).copy_(made))
        for slot, out in found.items():
            if slot >= FIRST and (slot - FIRST) // mixture.width not in seen:
                out.zero_()
        if dx is not None and total is not None and total is not dx:
            dx.copy_(total)

    return run


def _probe_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, _, *runs = ins
    return [*_work([x, *runs[:3], outs[0], *runs[3:]], attrs), *work_of(forms.EXPERT_PROBE, outs, ins, attrs)]


@kernel("expert_probe", _probe_work, needs=Needs(reads=(2, 3, 4)))
def expert_probe(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    scratch, own = _split(work)
    (x, g), (surprise, gain), bias = ins[:2], outs, 1.0 if attrs["bias"] else 0.0
    mixture = _Mixture([x, *ins[2:5], surprise, *ins[5:]], attrs, scratch)
    if (native := by_vm(forms.EXPERT_PROBE, outs, ins, attrs, own, mixture.check)) is not None:
        return native

    def square(rows: torch.Tensor) -> torch.Tensor:
        return scratch("wide", *rows.shape).copy_(rows).square_().sum(1)

    def run() -> None:
        surprise.zero_()
        gain.zero_()
        for tile in mixture.tiles():
            e, given, back = mixture.expert(tile.expert), mixture.gathered(x, tile, "x"), mixture.gathered(g, tile, "g")
            a, v, s, h = mixture.inner(given, e)
            made = _linear(h, e.down, e.down_bias, scratch("o", *given.shape))
            mixture.mark(gain, tile, -scratch("wide", *given.shape).copy_(made).mul_(back).sum(1))
            first = square(back) * (square(h) + bias)
            da, dv = mixture.inner_backward(torch.mm(back, e.down, out=scratch("t", *h.shape)), a, v, s)
            slopes = square(dv) if da is None else square(da) + square(dv)
            mixture.mark(surprise, tile, (first + (square(given) + bias) * slopes).sqrt_())

    return run
