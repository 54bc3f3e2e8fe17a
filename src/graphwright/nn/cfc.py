"""Closed-form continuous-time (CfC) cells and layers, which read the time before each step (Hasani et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.autograd import Parameter, Tensor, scoped, stack, zeros
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import initial
from graphwright.nn.containers import Sequential
from graphwright.nn.function_modules import Tanh
from graphwright.nn.layers import Linear
from graphwright.nn.module import Module
from graphwright.nn.recurrent import LSTMCell
from graphwright.ops import call

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
            self.w_tau = Parameter(initial.zeros(hidden_size))
            self.A = Parameter(initial.ones(hidden_size))
        else:
            self.ff2, self.time_a, self.time_b = (linear(width, hidden_size, n) for n in ("ff2", "time_a", "time_b"))
        self.memory = LSTMCell(input_size, hidden_size, name=name and f"{name}memory.", seed=seed) if mixed else None

    def start(self, x: Tensor) -> Any:
        """Return the state before the first step for inputs [B, ...]: zeros."""
        first = zeros(x.shape[0], self.hidden_size, dtype=x.dtype)
        return first if self.memory is None else (first, zeros(*first.shape, dtype=x.dtype))

    def forward(self, x: Tensor, state: Any, dt: Tensor) -> tuple[Tensor, Any]:
        """Map x [B, I], state and elapsed time [B, 1] to output h' [B, H] and the new state."""
        if self.memory is None:
            new = self._step(x, state, dt)
            return new, new
        h, c = self.memory(x, state)
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


class CfC(Module):
    """A stack of CfCCell layers, unrolled over the time axis: `cfc(x, states, dt)`, batch first."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, *, backbone_units: int = 128,
        backbone_layers: int = 1, variant: str = "default", mixed: bool = False, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        inner = [input_size] + [hidden_size] * (num_layers - 1)
        self.cells = [
            CfCCell(n, hidden_size, backbone_units, backbone_layers, variant, mixed, name=name and f"{name}{k}.",
                    seed=seed)
            for k, n in enumerate(inner)
        ]  # fmt: skip

    def forward(self, x: Tensor, states: Sequence[Any] | None, dt: Tensor) -> tuple[Tensor, list[Any]]:
        """Run all cells over all time steps. The traced nodes of step t are named `step.<t>.cells.<k>.<op>`.

        Args:
            x: [B, T, I], T >= 1.
            states: a list with the initial state of each cell; by default zeros.
            dt: elapsed times [B, T].
        Returns: outputs of the last cell [B, T, H], and the states after the last step.
        Raises: ShapeError unless x has three axes and T >= 1.
        """
        if x.ndim != 3 or not x.shape[1]:
            raise ShapeError("recurrent input has the wrong shape", expected="[B, T, I], T >= 1", got=x.spec)
        held = [cell.start(x) for cell in self.cells] if states is None else list(states)
        outputs = []
        for t in range(x.shape[1]):
            with scoped(f"step.{t}"):
                step = x[:, t]
                for k, cell in enumerate(self.cells):
                    step, held[k] = cell(step, held[k], dt[:, t : t + 1])
            outputs.append(step)
        return stack(outputs, 1), held
