"""Recurrent layers, unrolled over the steps of a sequence, their cells, and linear recurrences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.autograd import Tensor, scoped, top
from graphwright.models.importing.operators.shapes import pad
from graphwright.models.importing.operators.table import operator
from graphwright.nn import functional
from graphwright.nn.recurrent import CELLS, unrolled
from graphwright.ops import call

BATCH_FIRST = {f"{name}.input": 8 for name in CELLS}
"""Recurrent layers, and the number of the argument that says whether batches are the first axis."""


def _layers(name: str) -> Any:
    kind = CELLS[name]

    def run(
        x: Tensor, state: Any, params: Sequence[Tensor], biases: bool, layers: int, dropout: float, train: bool,
        both_ways: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the outputs and the states after the last step of each layer and direction."""
        first: tuple[Tensor, ...] = tuple(state) if kind.states > 1 else (state,)
        ways = 1 + both_ways
        narrow = kind.states > 1 and first[0].shape[-1] != first[-1].shape[-1]
        labels = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if biases else ()), *(("weight_hr",) * narrow))
        ends = []
        for layer in range(layers):
            made = []
            for back in range(ways):
                at = len(ends)
                own = dict(zip(labels, params[at * len(labels) : (at + 1) * len(labels)], strict=True))
                with scoped(f"l{layer}{'_reverse' * back}"):
                    start = tuple(s.select(0, at) for s in first)
                    out, last = unrolled(kind, x, start, own, int(batch_first), bool(back))
                made.append(out)
                ends.append(last)
            x = made[0] if ways == 1 else top.cat(made, dim=-1)
            if layer < layers - 1 and train and dropout:
                x = functional.dropout(x, dropout, True)
        return x, *(top.stack([end[i] for end in ends]) for i in range(kind.states))

    return run


def _cell(name: str) -> Any:
    kind = CELLS[name]

    def run(
        x: Tensor, state: Any, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the next state."""
        now: tuple[Tensor, ...] = tuple(state) if kind.states > 1 else (state,)
        new = kind.step(functional.linear(x, w, b), functional.linear(now[0], u, c), now)
        return new if kind.states > 1 else new[0]

    return run


for _name in CELLS:
    operator(f"{_name}.input")(_layers(_name))
    operator(f"{_name}_cell")(_cell(_name))


@operator("graphwright::linear_scan")
def linear_scan(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """h = a·h + b along an axis, from 0."""
    return call("linear_scan", a, b, axis=axis)


@operator("graphwright::chunk_scan")
def chunk_scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """y = h·c for h = exp(decay)·h + x·bᵀ along axis 1, by products within chunks and a scan over them.

    x: [B, T, H, P], decay: [B, T, H], b and c: [B, T, H, N].
    Source: Dao and Gu 2024, "Transformers are SSMs", section 6.
    """
    batch, steps, heads, width = x.shape
    count = (steps + chunk - 1) // chunk

    def chunks(t: Tensor) -> Tensor:  # [B, H, chunks, steps of a chunk, ...]
        whole = pad(t, (*(0, 0) * (t.ndim - 2), 0, count * chunk - steps))
        return whole.reshape((batch, count, chunk, *t.shape[2:])).movedim(3, 1)

    x, decay, b, c = chunks(x), chunks(decay), chunks(b), chunks(c)
    between = decay.unsqueeze(-1).expand((*decay.shape, chunk)).tril(-1).cumsum(-2).exp().tril()
    within = (c @ b.transpose(-1, -2) * between) @ x
    added = (b * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ x  # to the state by a chunk
    kept = decay.sum(-1).exp().unsqueeze(-1).unsqueeze(-1).expand(added.shape)
    states = call("linear_scan", kept, added, axis=2)
    zero = call("full_like", call("slice", states, axis=2, start=0, size=1), value=0.0)
    earlier = top.cat([zero, call("slice", states, axis=2, start=0, size=count - 1)], dim=2)
    out = within + c * decay.cumsum(-1).exp().unsqueeze(-1) @ earlier
    return call("slice", out.movedim(1, 3).reshape((batch, count * chunk, heads, width)), axis=1, start=0, size=steps)
