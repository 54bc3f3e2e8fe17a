"""Recurrent cells, and layers that unroll them over time: RNN, GRU and LSTM as in torch, and CfC.

A cell maps (input [B, I], state) to (output [B, H], state); in a stack, it reads the outputs of the cell below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from graphwright.autograd import Parameter, Tensor, scoped, stack, zeros
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import init
from graphwright.nn.functional import linear
from graphwright.nn.layers import Linear, Sequential, Tanh
from graphwright.nn.module import Module
from graphwright.ops import call


class Cell(Module):
    """Base of cells, which compute one step; weights [gates · H, I] and [gates · H, H], initially within ±1/√H."""

    gates: ClassVar[int] = 1

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, *, name: str = "", seed: int | None = None
    ) -> None:
        self.hidden_size = hidden_size
        rows = self.gates * hidden_size

        def drawn(label: str, *shape: int) -> Parameter:
            key = name and f"{name}cell.{label}"
            return Parameter(init.uniform(shape, key, bound=hidden_size**-0.5 if hidden_size else 0.0, seed=seed))

        self.weight_ih = drawn("weight_ih", rows, input_size)
        self.weight_hh = drawn("weight_hh", rows, hidden_size)
        self.bias_ih = drawn("bias_ih", rows) if bias else None
        self.bias_hh = drawn("bias_hh", rows) if bias else None

    def start(self, x: Tensor) -> Any:
        """Return the state before the first step for inputs [B, ...]: zeros."""
        return zeros(x.shape[0], self.hidden_size, dtype=x.dtype)

    def _pre(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, self.weight_ih, self.bias_ih), linear(h, self.weight_hh, self.bias_hh)

    def _gates(self, t: Tensor) -> list[Tensor]:
        size = self.hidden_size
        return [call("slice", t, axis=-1, start=k * size, size=size) for k in range(self.gates)]


class RNNCell(Cell):
    """h' = tanh(W x + b + U h + c), or relu instead of tanh (Elman 1990)."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        if nonlinearity not in ("tanh", "relu"):  # by name: the choices that torch offers
            raise UsageError("unknown nonlinearity", expected="tanh or relu", got=nonlinearity)
        super().__init__(input_size, hidden_size, bias, name=name, seed=seed)
        self.nonlinearity = nonlinearity

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [B, I] and state h [B, H] to output and new state, both h'."""
        a, b = self._pre(x, h)
        new = call(self.nonlinearity, a + b)
        return new, new


class GRUCell(Cell):
    """r, z = σ(W x + U h); n = tanh(W x + r ⊙ (U h)); h' = (1 - z) ⊙ n + z ⊙ h (Cho et al. 2014, torch's variant)."""

    gates = 3

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [B, I] and state h [B, H] to output and new state, both h'."""
        (ar, az, an), (br, bz, bn) = map(self._gates, self._pre(x, h))
        r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
        n = (an + r * bn).tanh()
        new = (1.0 - z) * n + z * h
        return new, new


class LSTMCell(Cell):
    """i, f, o = σ(W x + U h), g = tanh(..); c' = f ⊙ c + i ⊙ g; h' = o ⊙ tanh c' (Hochreiter and Schmidhuber 1997)."""

    gates = 4

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden and cell state: zeros [B, H]."""
        return super().start(x), super().start(x)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map x [B, I] and state (h, c) to output h' and new state (h', c')."""
        h, c = state
        a, b = self._pre(x, h)
        i, f, g, o = self._gates(a + b)
        new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
        return new_h, (new_h, new_c)


class Recurrent(Module):
    """A stack of cells, unrolled over the time axis; the first cell reads the input."""

    def __init__(self, cells: Sequence[Module]) -> None:
        self.cells: list[Any] = list(cells)

    def forward(self, x: Tensor, states: Sequence[Any] | None = None, *extra: Tensor) -> tuple[Tensor, list[Any]]:
        """Run all cells over all time steps. The traced nodes of step t are named `step.<t>.cells.<k>.<op>`.

        Args:
            x: [B, T, I], T >= 1.
            states: a list with the initial state of each cell; by default zeros.
            extra: [B, T] each, passed to the cells step by step as [B, 1]; for CfC the elapsed times.
        Returns: outputs of the last cell [B, T, H], and the states after the last step.
        Raises: ShapeError unless x has three axes and T >= 1.
        """
        if x.ndim != 3 or not x.shape[1]:
            raise ShapeError("recurrent input has the wrong shape", expected="[B, T, I], T >= 1", got=x.spec)
        held = [cell.start(x) for cell in self.cells] if states is None else list(states)
        outputs = []
        for t in range(x.shape[1]):
            with scoped(f"step.{t}"):
                step, more = x[:, t], [e[:, t : t + 1] for e in extra]
                for k, cell in enumerate(self.cells):
                    step, held[k] = cell(step, held[k], *more)
            outputs.append(step)
        return stack(outputs, 1), held


def _stacked(cell: Callable[..., Module], sizes: tuple[int, int, int], name: str, **options: Any) -> list[Module]:
    """Return a list of cells for sizes (input size, hidden size, number of layers); cell k is named `{name}{k}.`."""
    first, hidden, layers = sizes
    inner = [first] + [hidden] * (layers - 1)
    return [cell(size, hidden, name=name and f"{name}{k}.", **options) for k, size in enumerate(inner)]


class RNN(Recurrent):
    """A stack of RNNCell layers over x [B, T, I], batch first."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, *,
        nonlinearity: str = "tanh", name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        sizes = input_size, hidden_size, num_layers
        super().__init__(_stacked(RNNCell, sizes, name, bias=bias, nonlinearity=nonlinearity, seed=seed))


class _Gated(Recurrent):
    cell: ClassVar[type[Cell]]

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(_stacked(self.cell, (input_size, hidden_size, num_layers), name, bias=bias, seed=seed))


class GRU(_Gated):
    """A stack of GRUCell layers over x [B, T, I], batch first."""

    cell = GRUCell


class LSTM(_Gated):
    """A stack of LSTMCell layers over x [B, T, I], batch first; a state is (h, c)."""

    cell = LSTMCell


VARIANTS = ("default", "no_gate", "minimal")


class CfCCell(Module):
    """Closed-form continuous-time cell: b = backbone([x, h]), f₁ = tanh(W₁b + c₁), f₂ = tanh(W₂b + c₂),
    t = σ((W_a b + c_a)·Δt + (W_b b + c_b)), h' = f₁(1 - t) + f₂·t.

    Δt is the elapsed time of the step.

    Args:
        backbone_units, backbone_layers: size and number of the tanh layers on [x, h]; with 0 layers b = [x, h].
        variant: `default`: as above; `no_gate`: h' = f₁ + t·f₂; `minimal`: h' = A - A·e^(-Δt(abs(w_τ) + abs(f)))·f with
            f = W₁b + c₁ and parameters A and w_τ.
        mixed: whether an LSTM step computes h first; the state is then (h, c).
    """

    def __init__(
        self, input_size: int, hidden_size: int, backbone_units: int = 128, backbone_layers: int = 1,
        variant: str = "default", mixed: bool = False, *, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        if variant not in VARIANTS:
            raise UsageError("unknown variant of CfC", expected=", ".join(VARIANTS), got=variant)
        self.hidden_size, self.variant = hidden_size, variant

        def linear(inner: int, outer: int, label: str) -> Linear:
            return Linear(inner, outer, name=name and f"{name}{label}.", seed=seed)

        width, layers = input_size + hidden_size, []
        for k in range(backbone_layers):
            layers += [linear(width, backbone_units, f"backbone{k}"), Tanh()]
            width = backbone_units
        self.backbone = Sequential(*layers)
        self.ff1 = linear(width, hidden_size, "ff1")
        if variant == "minimal":
            self.w_tau = Parameter(init.zeros(hidden_size))
            self.A = Parameter(init.ones(hidden_size))
        else:
            self.ff2, self.time_a, self.time_b = (linear(width, hidden_size, n) for n in ("ff2", "time_a", "time_b"))
        self.memory = LSTMCell(input_size, hidden_size, name=name and f"{name}memory.", seed=seed) if mixed else None

    def start(self, x: Tensor) -> Any:
        """Return the state before the first step for inputs [B, ...]: zeros."""
        if self.memory is not None:
            return self.memory.start(x)
        return zeros(x.shape[0], self.hidden_size, dtype=x.dtype)

    def forward(self, x: Tensor, state: Any, dt: Tensor) -> tuple[Tensor, Any]:
        """Map x [B, I], state and elapsed time [B, 1] to output h' [B, H] and the new state."""
        if self.memory is None:
            new = self._step(x, state, dt)
            return new, new
        _, (h, c) = self.memory(x, state)
        new = self._step(x, h, dt)
        return new, (new, c)

    def _step(self, x: Tensor, h: Tensor, dt: Tensor) -> Tensor:
        b = self.backbone(call("concat", x, h, axis=-1))
        first = self.ff1(b)
        if self.variant == "minimal":
            return self.A - self.A * (-dt * (self.w_tau.abs() + first.abs())).exp() * first
        f1, f2 = first.tanh(), self.ff2(b).tanh()
        t = (self.time_a(b) * dt + self.time_b(b)).sigmoid()
        return f1 + t * f2 if self.variant == "no_gate" else f1 * (1.0 - t) + f2 * t


class CfC(Recurrent):
    """A stack of CfCCell layers: `cfc(x, states, dt)` with x [B, T, I] and elapsed times dt [B, T]."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, *, backbone_units: int = 128,
        backbone_layers: int = 1, variant: str = "default", mixed: bool = False, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        backbone = {"backbone_units": backbone_units, "backbone_layers": backbone_layers}
        sizes = input_size, hidden_size, num_layers
        super().__init__(_stacked(CfCCell, sizes, name, **backbone, variant=variant, mixed=mixed, seed=seed))
