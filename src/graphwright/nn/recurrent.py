"""Recurrent cells and layers as in torch: RNN, GRU and LSTM, of several layers, in one or both directions.

A kind of cell is a function of a = W x + b, h' = U h + c and the old state; cells and layers share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from graphwright.autograd import Parameter, Tensor, as_tensor, cat, scoped, stack, where, zeros
from graphwright.autograd.recorder import optional
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import functional, initial
from graphwright.nn.module import Module
from graphwright.nn.utils.rnn import PackedSequence, packed_steps, padded_steps
from graphwright.ops import call

_State = tuple[Tensor, ...]


# -- one step ----------------------------------------------------------------------------------------------------------
def _tanh(a: Tensor, b: Tensor, state: _State) -> _State:
    """h' = tanh(a + b) (Elman 1990)."""
    return ((a + b).tanh(),)


def _relu(a: Tensor, b: Tensor, state: _State) -> _State:
    return ((a + b).relu(),)


def _gru(a: Tensor, b: Tensor, state: _State) -> _State:
    """r, z = σ(a + b); n = tanh(a + r ⊙ b); h' = (1 - z) ⊙ n + z ⊙ h (Cho et al. 2014, torch's variant)."""
    (ar, az, an), (br, bz, bn) = _gates(a, 3), _gates(b, 3)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return ((1.0 - z) * n + z * state[0],)


def _lstm(a: Tensor, b: Tensor, state: _State) -> _State:
    """i, f, o = σ(a + b), g = tanh(..); c' = f ⊙ c + i ⊙ g; h' = o ⊙ tanh c' (Hochreiter and Schmidhuber 1997)."""
    i, f, g, o = _gates(a + b, 4)
    new = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * new.tanh(), new


def _gates(t: Tensor, count: int) -> list[Tensor]:
    size = t.shape[-1] // count
    return [call("slice", t, axis=-1, start=k * size, size=size) for k in range(count)]


class _Kind(NamedTuple):
    """A kind of cell: the number of its gates and of the tensors of its state, and its step."""

    gates: int
    states: int
    step: Callable[[Tensor, Tensor, _State], _State]


class _OfKind(Module):
    """Base of cells and layers: `kinds` has their kind for each nonlinearity that is an argument, else for ""."""

    kinds: ClassVar[Mapping[str, _Kind]] = {}
    nonlinearity: str = ""
    hidden_size: int

    @property
    def kind(self) -> _Kind:
        """The kind of the cells."""
        return self.kinds[self.nonlinearity]

    def reset_parameters(self) -> None:
        """Draw initial values again, from the default generator."""
        drawn = _Drawn(self.hidden_size, "", None)
        for p in self.parameters():
            initial.set_values(p, drawn("", *p.shape).data)

    def _choose(self, nonlinearity: str) -> None:
        if nonlinearity not in self.kinds:
            where, expected = type(self).__name__, " or ".join(self.kinds)
            raise UsageError("unknown nonlinearity", where=where, expected=expected, got=nonlinearity)
        self.nonlinearity = nonlinearity


_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def unrolled(
    kind: _Kind, x: Tensor, state: _State, weights: Mapping[str, Tensor | None], axis: int, back: bool = False,
    present: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, _State]:  # fmt: skip
    """Run a cell over the steps of x, from the last one if `back`; return its outputs and its last state.

    Args:
        weights: those of the cell, `weight_ih` to `weight_hr`; None or left out where it has none.
        axis: the axis of steps.
        present: for each step bools [B, 1], which keep the state where false; None for all.
    """
    whole = functional.linear(x, _given(weights["weight_ih"]), weights.get("bias_ih"))
    steps = list(range(x.shape[axis]))
    outputs: list[Any] = [None] * len(steps)
    for t in reversed(steps) if back else steps:
        with scoped(f"step.{t}"):
            b = functional.linear(state[0], _given(weights["weight_hh"]), weights.get("bias_hh"))
            new = kind.step(whole.select(axis, t), b, state)
            if (narrow := weights.get("weight_hr")) is not None:
                new = functional.linear(new[0], narrow), *new[1:]
            mask = None if present is None else present[t]
            state = new if mask is None else tuple(where(mask, n, s) for n, s in zip(new, state, strict=True))
        outputs[t] = state[0]
    return stack(outputs, axis), state


def _given(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight


_RNN = {"tanh": _Kind(1, 1, _tanh), "relu": _Kind(1, 1, _relu)}  # by name: the choices that torch offers
_GRU, _LSTM = {"": _Kind(3, 1, _gru)}, {"": _Kind(4, 2, _lstm)}
CELLS = {"rnn_tanh": _RNN["tanh"], "rnn_relu": _RNN["relu"], "gru": _GRU[""], "lstm": _LSTM[""]}
"""The kinds of cells by the names of torch's operators."""


# -- cells -------------------------------------------------------------------------------------------------------------
class _Cell(_OfKind):
    """Base of cells; weights [gates · H, I] and [gates · H, H], initially uniform within ±1/√H, as in torch."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, *, name: str = "", seed: int | None = None
    ) -> None:
        self.input_size, self.hidden_size = input_size, hidden_size
        drawn = _Drawn(hidden_size, name and f"{name}cell.", seed)
        rows = self.kind.gates * hidden_size
        self.weight_ih, self.weight_hh = drawn("weight_ih", rows, input_size), drawn("weight_hh", rows, hidden_size)
        self.bias_ih = drawn("bias_ih", rows) if bias else None
        self.bias_hh = drawn("bias_hh", rows) if bias else None

    @property
    def bias(self) -> bool:
        """Whether there are biases."""
        return self.bias_ih is not None

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """Compute one step.

        Args:
            x: [B, input_size], or without B.
            hx: the state h [B, hidden_size], of an LSTM (h, c); by default zeros.
        Returns: the new state, which is also the output.
        Raises: ShapeError for other shapes.
        """
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size:
            expected = f"[B, {self.input_size}] or [{self.input_size}]"
            raise ShapeError("the input of the cell has a wrong shape", where=type(self).__name__, expected=expected,
                             got=x.spec)  # fmt: skip
        shapes = [(*x.shape[:-1], self.hidden_size)] * self.kind.states
        state = _zeros(x, shapes) if hx is None else _state(self, hx, shapes)
        a = functional.linear(x, self.weight_ih, self.bias_ih)
        new = self.kind.step(a, functional.linear(state[0], self.weight_hh, self.bias_hh), state)
        return new if self.kind.states > 1 else new[0]


class RNNCell(_Cell):
    """h' = tanh(W x + b + U h + c), or relu instead of tanh (Elman 1990)."""

    kinds = _RNN

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        self._choose(nonlinearity)
        super().__init__(input_size, hidden_size, bias, name=name, seed=seed)


class GRUCell(_Cell):
    """r, z = σ(W x + U h); n = tanh(W x + r ⊙ (U h)); h' = (1 - z) ⊙ n + z ⊙ h (Cho et al. 2014, torch's variant)."""

    kinds = _GRU


class LSTMCell(_Cell):
    """i, f, o = σ(W x + U h), g = tanh(..); c' = f ⊙ c + i ⊙ g; h' = o ⊙ tanh c' (Hochreiter and Schmidhuber 1997)."""

    kinds = _LSTM


class _Drawn:
    """Makes parameters with initial values within ±1/√H."""

    def __init__(self, hidden_size: int, name: str, seed: int | None) -> None:
        self.bound, self.name, self.seed = hidden_size**-0.5 if hidden_size else 0.0, name, seed

    def __call__(self, label: str, *shape: int) -> Parameter:
        return Parameter(initial.uniform(shape, self.name and self.name + label, bound=self.bound, seed=self.seed))


def _state(module: Module, hx: Any, shapes: Sequence[tuple[int, ...]]) -> _State:
    """Return a given initial state as a tuple. Raises: ShapeError for other shapes."""
    given = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    if [t.shape for t in given] != list(shapes):
        expected, got = " and ".join(map(str, shapes)), " and ".join(str(t.spec) for t in given)
        raise ShapeError("the initial state has a wrong shape", where=type(module).__name__, expected=expected, got=got)
    return given


def _zeros(x: Tensor, shapes: Sequence[tuple[int, ...]]) -> _State:
    return tuple(zeros(*shape, dtype=x.dtype) for shape in shapes)


# -- layers ------------------------------------------------------------------------------------------------------------
class _Recurrent(_OfKind):
    """Base of recurrent layers, with torch's arguments and names of parameters.

    Args:
        num_layers: number of layers; each reads the outputs of the one below.
        batch_first: x is [B, T, input_size] instead of [T, B, input_size].
        dropout: dropout of the outputs of all layers but the last.
        bidirectional: each layer also runs from the last step to the first; outputs are joined.
        proj_size: of an LSTM, size of a linear map of h; 0 for none.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, *, proj_size: int = 0, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        where = type(self).__name__
        if min(input_size, hidden_size, num_layers) < 1:
            got = f"{input_size}, {hidden_size}, {num_layers}"
            raise UsageError("invalid sizes", where=where, expected="input, hidden size, layers >= 1", got=got)
        if not 0 <= dropout <= 1:
            raise UsageError("dropout is not a probability", where=where, expected="0 to 1", got=dropout)
        if not 0 <= proj_size < hidden_size:
            raise UsageError("invalid proj_size", where=where, expected=f"0 to {hidden_size - 1}", got=proj_size)
        self.input_size, self.hidden_size, self.num_layers, self.bias = input_size, hidden_size, num_layers, bias
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        self.proj_size = proj_size
        rows, size = self.kind.gates * hidden_size, proj_size or hidden_size
        drawn = _Drawn(hidden_size, name, seed)
        for layer in range(num_layers):
            for end in self._ends(layer):
                inner = size * (1 + bidirectional) if layer else input_size
                shapes = {"weight_ih": (rows, inner), "weight_hh": (rows, size)}
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
                shapes |= {"weight_hr": (proj_size, hidden_size)} if proj_size else {}
                for label, shape in shapes.items():
                    setattr(self, f"{label}_{end}", drawn(f"{label}_{end}", *shape))

    @property
    def mode(self) -> str:
        """Torch's name of the kind: `LSTM`, `GRU`, `RNN_TANH` or `RNN_RELU`."""
        return "_".join(filter(None, (type(self).__name__, self.nonlinearity.upper())))

    @property
    def all_weights(self) -> list[list[Parameter]]:
        """The parameters of each layer and direction."""
        return [
            [p for name, p in self.named_parameters(recurse=False) if name.endswith(f"_{end}")]
            for layer in range(self.num_layers)
            for end in self._ends(layer)
        ]

    def flatten_parameters(self) -> None:
        """Do nothing: torch joins the parameters in memory here for its GPU kernels."""

    def _ends(self, layer: int) -> list[str]:
        return [f"l{layer}", *([f"l{layer}_reverse"] if self.bidirectional else [])]

    def forward(self, x: Any, hx: Any = None) -> tuple[Any, Any]:
        """Run all layers over all time steps. The traced nodes of step t are named `l<layer>.step.<t>.<op>`.

        Args:
            x: [T, B, input_size], T >= 1; with `batch_first` [B, T, input_size]; or [T, input_size]; or packed.
            hx: the initial state h [layers · directions, B, H], of an LSTM (h, c); by default zeros.
        Returns: outputs [T, B, H · directions], or as x; and the state after the last step, in the form of `hx`.
        Raises: ShapeError for other shapes.
        """
        if isinstance(x, PackedSequence):
            return self._packed(x, hx)
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size or not x.shape[self.batch_first and x.ndim == 3]:
            expected = f"[{'B, T' if self.batch_first else 'T, B'}, {self.input_size}], T >= 1"
            raise ShapeError("recurrent input has the wrong shape", where=type(self).__name__, expected=expected,
                             got=x.spec)  # fmt: skip
        if x.ndim == 2:
            return self._without_batch(x, hx)
        return self._layers(x, hx, int(self.batch_first))

    def _packed(self, x: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        """Run on padded sequences, whose states stay as they are after their ends."""
        sizes, order, back = x.lengths(), x.sorted_indices, x.unsorted_indices
        each = lambda f, t: tuple(map(f, t)) if isinstance(t, tuple | list) else f(t)  # noqa: E731
        given = hx if hx is None or order is None else each(lambda t: t.index_select(1, order), hx)
        total = int(sizes[0])
        present = [as_tensor(t < sizes.reshape(-1, 1)) if t >= sizes[-1] else None for t in range(total)]
        out, states = self._layers(padded_steps(x, total), given, 0, present)
        states = states if back is None else each(lambda t: t.index_select(1, back), states)
        return x.with_data(packed_steps(out, sizes, None).data), states

    def _layers(
        self, x: Tensor, hx: Any, axis: int, present: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor, Any]:
        """Run all layers over an axis of steps; `present` has for each step bools [B, 1], or None for all."""
        batch, count = x.shape[1 - axis], self.num_layers * (1 + self.bidirectional)
        shapes = [(batch, self.proj_size or self.hidden_size), (batch, self.hidden_size)][: self.kind.states]
        given, ends = None if hx is None else _state(self, hx, [(count, *shape) for shape in shapes]), list[_State]()
        for layer in range(self.num_layers):
            made = []
            for end in self._ends(layer):
                # zeros for each layer, as one array would tie the units of all layers
                first = _zeros(x, shapes) if given is None else tuple(t[len(ends)] for t in given)
                with scoped(end):
                    own = {label: getattr(self, f"{label}_{end}", None) for label in _WEIGHTS}
                    found, last = unrolled(self.kind, x, first, own, axis, end.endswith("reverse"), present)
                made.append(found)
                ends.append(last)
            x = made[0] if len(made) == 1 else cat(made, -1)
            if layer < self.num_layers - 1:
                x = functional.dropout(x, self.dropout, self.trains)
        states: _State = tuple(stack(list(parts)) for parts in zip(*ends, strict=True))
        optional(states)
        return x, states if self.kind.states > 1 else states[0]

    def _without_batch(self, x: Tensor, hx: Any) -> tuple[Tensor, Any]:
        each = lambda f, t: tuple(map(f, t)) if isinstance(t, tuple | list) else f(t)  # noqa: E731
        axis = int(not self.batch_first)
        given = hx if hx is None else each(lambda t: t.unsqueeze(1), hx)
        out, states = self.forward(x.unsqueeze(axis), given)
        states = each(lambda t: t.squeeze(1), states)
        optional(states if isinstance(states, tuple) else (states,))
        return out.squeeze(axis), states


class RNN(_Recurrent):
    """Layers of h' = tanh(W x + b + U h + c), or relu instead of tanh (Elman 1990)."""

    kinds = _RNN

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        self._choose(nonlinearity)
        rest = num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(input_size, hidden_size, *rest, name=name, seed=seed)


class GRU(_Recurrent):
    """Layers of `GRUCell`."""

    kinds = _GRU

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, *, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        rest = num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(input_size, hidden_size, *rest, name=name, seed=seed)


class LSTM(_Recurrent):
    """Layers of `LSTMCell`; a state is (h, c)."""

    kinds = _LSTM

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        rest = num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(input_size, hidden_size, *rest, proj_size=proj_size, name=name, seed=seed)
