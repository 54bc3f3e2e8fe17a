"""AdamW on variables: moments are carried state, so the same lines run eagerly and inside a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from graphwright.array import NDArray, float32, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, no_grad, scoped, update
from graphwright.errors import UsageError


class HasParameters(Protocol):
    """A module, program or model."""

    def parameters(self) -> Iterable[Parameter]:
        """Trainable variables."""
        ...


@dataclass(slots=True)
class Moments:
    """State of one parameter: first and second moment, and float32 master weights if it is stored in 16 bits."""

    m: Variable
    v: Variable
    master: Variable | None


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2); defaults as in torch.

    Args:
        params: parameters, groups `{"params": [...], "weight_decay": ...}`, or a module, program or model, whose
            parameters are asked for at every step, so that those an edit adds are trained too.
        lr: learning rate; assign `opt.lr = x` to change it, compiled steps see it without a new plan.
        betas, eps: of the moments.
        weight_decay: λ; with `decay_matrices_only` zero for parameters of fewer than two axes.
    State is keyed by the parameter object and survives edits and undo.
    """

    def __init__(
        self,
        params: HasParameters | Sequence[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decay_matrices_only: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise UsageError(
                "a hyperparameter is out of range",
                expected="lr, eps, weight_decay >= 0, betas in [0, 1)",
                got=f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}",
            )
        self.owner = params
        self.betas, self.eps, self.weight_decay, self.decay_matrices_only = (
            betas,
            eps,
            weight_decay,
            decay_matrices_only,
        )
        self._lr = Variable(_scalar(lr), name="adamw.lr")
        self.steps = Variable(_scalar(0.0), name="adamw.steps")
        self.state: dict[Parameter, Moments] = {}
        self._check_once()

    def _check_once(self) -> None:
        seen = [p for p, _ in self.groups()]
        if len(set(seen)) != len(seen):
            raise UsageError(
                "a parameter is given twice", fix="list each parameter once; tied weights are one parameter"
            )

    def groups(self) -> list[tuple[Parameter, float]]:
        """(parameter, weight decay) of everything trained."""
        if isinstance(self.owner, Sequence):
            items: Iterable[Any] = self.owner
        else:
            items = self.owner.parameters()
        result: list[tuple[Parameter, float]] = []
        for item in items:
            if isinstance(item, Mapping):
                result += [(p, float(item.get("weight_decay", self.weight_decay))) for p in item["params"]]
            else:
                decays = len(item.shape) > 1 or not self.decay_matrices_only
                result.append((item, self.weight_decay if decays else 0.0))
        return result

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._lr.item()

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr.assign(Tensor(_scalar(value)))

    def zero_grad(self) -> None:
        """Forget gradients."""
        for p, _ in self.groups():
            p.grad = None

    def moments(self, p: Parameter) -> Moments:
        """State of a parameter, zero at first."""
        found = self.state.get(p)
        if found is None:
            name = p.name or f"param{len(self.state)}"
            zero = [
                Variable(_zeros(p.shape, float32 if p.dtype.is_low else p.dtype), name=f"adamw.{name}.{k}")
                for k in "mv"
            ]
            master = None
            if p.dtype.is_low:
                assert isinstance(p.data, NDArray)
                master = Variable(from_numpy(p.data.to_numpy("float32").copy()), name=f"adamw.{name}.master")
            found = self.state[p] = Moments(zero[0], zero[1], master)
        return found

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        with no_grad(), scoped("adamw"):
            self.steps.assign(self.steps + 1.0)
            for p, decay in self.groups():
                if p.grad is None:
                    continue
                state = self.moments(p)
                target = p if state.master is None else state.master
                grad = p.grad.to(target.dtype)
                update(
                    [target, state.m, state.v],
                    "adamw",
                    target,
                    grad,
                    state.m,
                    state.v,
                    self.steps,
                    self._lr,
                    beta1=self.betas[0],
                    beta2=self.betas[1],
                    eps=self.eps,
                    weight_decay=decay,
                )
                if state.master is not None:
                    p.assign(state.master.to(p.dtype))

    def variables(self) -> dict[str, Variable]:
        """Everything that a resumed run needs, by name."""
        result = {v.name: v for v in (self._lr, self.steps)}
        for p, _ in self.groups():
            state = self.moments(p)
            result.update({v.name: v for v in (state.m, state.v, state.master) if v is not None})
        return result


def _scalar(value: float) -> NDArray:
    return from_numpy(np.asarray(value, np.float32))


def _zeros(shape: tuple[int, ...], kind: Any) -> NDArray:
    return from_numpy(np.zeros(shape, kind.numpy))
