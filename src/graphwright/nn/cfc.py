"""Closed-form continuous-time networks: recurrent cells to which the time between two inputs is an operand.

Source: Hasani et al. 2022, "Closed-form continuous-time neural networks", equations 10 and 2 (minimal).
"""

from __future__ import annotations

from typing import Any

from graphwright.autograd import Parameter, Tensor, zeros
from graphwright.errors import UsageError
from graphwright.nn import init
from graphwright.nn.activation import Tanh
from graphwright.nn.container import Sequential
from graphwright.nn.linear import Linear
from graphwright.nn.module import Module
from graphwright.nn.recurrent import LSTMCell, Recurrent
from graphwright.ops import call

VARIANTS = ("default", "no_gate", "minimal")


class CfCCell(Module):
    """One step of elapsed time Δt: b = backbone([x, h]), f₁ = tanh(W₁b + c₁), f₂ = tanh(W₂b + c₂),
    t = σ((W_a b + c_a)·Δt + (W_b b + c_b)), h' = f₁(1 - t) + f₂·t.

    At Δt = 0, t = σ(W_b b + c_b); with Δt it goes to 1 where W_a b + c_a > 0, to 0 where it is negative.

    Args:
        backbone_units, backbone_layers: of the tanh layers on [x, h]; none leaves [x, h] as it is.
        variant: `no_gate`: h' = f₁ + t·f₂; `minimal`: f = W₁b + c₁ and h' = A - A·e^(-Δt(abs(w_τ) + abs(f)))·f.
        mixed: an LSTM step first, whose output is h; the state then is (h, c).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        backbone_units: int = 128,
        backbone_layers: int = 1,
        variant: str = "default",
        mixed: bool = False,
        *,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise UsageError("unknown variant", expected=", ".join(VARIANTS), got=variant)
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
        """The state before the first step, for inputs [B, ...]."""
        if self.memory is not None:
            return self.memory.start(x)
        return zeros(x.shape[0], self.hidden_size, dtype=x.dtype)

    def forward(self, x: Tensor, state: Any, dt: Tensor) -> tuple[Tensor, Any]:
        """[B, I], the state, and elapsed time [B, 1] to h' [B, H] and the new state."""
        if self.memory is not None:
            _, (h, c) = self.memory(x, state)
            new = self._step(x, h, dt)
            return new, (new, c)
        new = self._step(x, state, dt)
        return new, new

    def _step(self, x: Tensor, h: Tensor, dt: Tensor) -> Tensor:
        b = self.backbone(call("concat", x, h, axis=-1))
        first = self.ff1(b)
        if self.variant == "minimal":
            return self.A - self.A * (-dt * (self.w_tau.abs() + first.abs())).exp() * first
        f1, f2 = first.tanh(), self.ff2(b).tanh()
        t = (self.time_a(b) * dt + self.time_b(b)).sigmoid()
        return f1 + t * f2 if self.variant == "no_gate" else f1 * (1.0 - t) + f2 * t


class CfC(Recurrent):
    """Layers of CfCCell: `cfc(x, states, dt)` with x [B, T, I] and elapsed times dt [B, T]."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        name: str = "",
        seed: int | None = None,
        **options: Any,
    ) -> None:
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        super().__init__(
            [CfCCell(s, hidden_size, name=name and f"{name}{k}.", seed=seed, **options) for k, s in enumerate(sizes)]
        )
