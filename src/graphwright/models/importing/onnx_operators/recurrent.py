"""Recurrent layers, unrolled over the steps of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from graphwright.autograd import Tensor, as_tensor, stack, top, zeros
from graphwright.models.importing.onnx_operators.table import NotExpressible, fixed_sizes, operator, text
from graphwright.nn import functional

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State], State]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": top.sigmoid, "tanh": top.tanh, "relu": functional.relu, "softsign": functional.softsign,
    "softplus": functional.softplus,
}  # fmt: skip


def _layer(
    x: Tensor, states: Sequence[Tensor | None], hidden: int, direction: Any, layout: int, lengths: Tensor | None,
    cells: Callable[[int], Cell], outputs: int,
) -> Any:  # fmt: skip
    """Run a cell over the steps of a sequence, in one or both directions.

    Args:
        x: [T, B, I], or [B, T, I] for layout 1.
        states: initial states [directions, B, hidden], or None for zeros.
        cells: function that returns the cell of a direction. A cell maps the input of a step and the states to the
            next states, of which the first is its result.
    """
    x = x.transpose(0, 1) if layout else x
    (steps,) = fixed_sizes(x, (0,), "a recurrent layer")
    way = text(direction)
    reverse = [False, True] if way == "bidirectional" else [way == "reverse"]
    start = zeros(x.shape[1], hidden, dtype=x.dtype)
    results, ends = [], []
    for number, back in enumerate(reverse):
        cell = cells(number)
        now: State = tuple(
            start if s is None else (s.transpose(0, 1) if layout else s).select(0, number) for s in states
        )
        made: dict[int, Tensor] = {}
        for t in range(steps)[::-1] if back else range(steps):
            new = cell(x.select(0, t), now)
            if lengths is None:
                now, made[t] = new, new[0]
            else:  # steps after the end of a sequence change no state and give 0
                seen = (lengths > t).reshape(-1, 1)
                now = tuple(top.where(seen, n, o) for n, o in zip(new, now, strict=True))
                made[t] = top.where(seen, new[0], 0.0)
        results.append(stack([made[t] for t in range(steps)], 0))
        ends.append(now)
    whole = stack(results, 1)
    last = [stack([end[i] for end in ends], 0) for i in range(len(states))]
    if layout:
        whole, last = whole.permute(2, 0, 1, 3), [s.transpose(0, 1) for s in last]
    return (whole, *last)[:outputs] if outputs > 1 else whole


def _functions(
    activations: Any, defaults: Sequence[str], number: int, clip: float | None, alphas: Any, betas: Any
) -> list[Callable[[Tensor], Tensor]]:
    names = [text(n).lower() for n in activations] if activations else list(defaults) * (number + 1)
    chosen = names[number * len(defaults) : (number + 1) * len(defaults)]
    unknown = [n for n in chosen if n not in _ACTIVATIONS]
    if unknown or alphas or betas or len(chosen) < len(defaults):
        raise NotExpressible("activations of a recurrent layer", expected=", ".join(_ACTIVATIONS),
                             got=f"{', '.join(names)}{', with parameters' if alphas or betas else ''}")  # fmt: skip
    runs = [_ACTIVATIONS[n] for n in chosen]
    return runs if clip is None else [partial(_clipped, run, float(clip)) for run in runs]


def _clipped(run: Callable[[Tensor], Tensor], most: float, x: Tensor) -> Tensor:
    return run(x.clamp(-most, most))


def _weights(w: Tensor, r: Tensor, b: Tensor | None, number: int) -> tuple[Tensor, Tensor, Any, Any]:
    """Return the weights of a direction: those of inputs and states, and their biases."""
    rows, wi, wh = int(w.spec.sizes[1]), w.select(0, number), r.select(0, number)
    if b is None:
        return wi, wh, None, None
    both = b.select(0, number)
    return wi, wh, both.narrow(0, 0, rows), both.narrow(0, rows, rows)


@operator("RNN")
def rnn(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None, h: Tensor | None = None, *,
    activation_alpha: Any = None, activation_beta: Any = None, activations: Any = None, clip: float | None = None,
    direction: Any = "forward", hidden_size: int = 0, layout: int = 0, outputs: int,
) -> Any:  # fmt: skip
    """h' = f(W x + R h + b)."""

    def cells(number: int) -> Cell:
        wi, wh, bi, bh = _weights(w, r, b, number)
        (f,) = _functions(activations, ("tanh",), number, clip, activation_alpha, activation_beta)
        return lambda v, s: (f(functional.linear(v, wi, bi) + functional.linear(s[0], wh, bh)),)

    return _layer(x, (h,), int(r.spec.sizes[-1]), direction, layout, lengths, cells, outputs)


@operator("GRU")
def gru(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None, h: Tensor | None = None, *,
    activation_alpha: Any = None, activation_beta: Any = None, activations: Any = None, clip: float | None = None,
    direction: Any = "forward", hidden_size: int = 0, layout: int = 0, linear_before_reset: int = 0, outputs: int,
) -> Any:  # fmt: skip
    """Gated recurrent units (Cho et al. 2014); gates in the order update, reset, hidden."""
    size = int(r.spec.sizes[-1])

    def cells(number: int) -> Cell:
        wi, wh, bi, bh = _weights(w, r, b, number)
        f, g = _functions(activations, ("sigmoid", "tanh"), number, clip, activation_alpha, activation_beta)
        gates, hidden = wh.narrow(0, 0, 2 * size), wh.narrow(0, 2 * size, size)
        gates_b = None if bh is None else bh.narrow(0, 0, 2 * size)
        hidden_b = None if bh is None else bh.narrow(0, 2 * size, size)

        def cell(v: Tensor, s: State) -> State:
            own = functional.linear(v, wi, bi)
            z, q = f(own.narrow(1, 0, 2 * size) + functional.linear(s[0], gates, gates_b)).split(size, 1)
            here = own.narrow(1, 2 * size, size)
            if linear_before_reset:
                new = g(here + q * functional.linear(s[0], hidden, hidden_b))
            else:
                new = g(here + functional.linear(q * s[0], hidden, hidden_b))
            return ((1.0 - z) * new + z * s[0],)

        return cell

    return _layer(x, (h,), size, direction, layout, lengths, cells, outputs)


@operator("LSTM")
def lstm(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None, h: Tensor | None = None,
    c: Tensor | None = None, peepholes: Tensor | None = None, *, activation_alpha: Any = None,
    activation_beta: Any = None, activations: Any = None, clip: float | None = None, direction: Any = "forward",
    hidden_size: int = 0, input_forget: int = 0, layout: int = 0, outputs: int,
) -> Any:  # fmt: skip
    """Long short-term memory; gates in the order input, output, forget, cell (Hochreiter and Schmidhuber 1997)."""
    size = int(r.spec.sizes[-1])

    def cells(number: int) -> Cell:
        wi, wh, bi, bh = _weights(w, r, b, number)
        f, g, k = _functions(activations, ("sigmoid", "tanh", "tanh"), number, clip, activation_alpha, activation_beta)
        looks = (as_tensor(0.0),) * 3 if peepholes is None else peepholes.select(0, number).split(size, 0)

        def cell(v: Tensor, s: State) -> State:
            i, o, forget, new = (functional.linear(v, wi, bi) + functional.linear(s[0], wh, bh)).split(size, 1)
            if peepholes is not None:
                i, forget = i + looks[0] * s[1], forget + looks[2] * s[1]
            i = f(i)
            forget = 1.0 - i if input_forget else f(forget)
            memory = forget * s[1] + i * g(new)
            o = o if peepholes is None else o + looks[1] * memory
            return f(o) * k(memory), memory

        return cell

    return _layer(x, (h, c), size, direction, layout, lengths, cells, outputs)
