"""AdamW on variables: moments are carried state, so the same lines run eagerly and inside a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from graphwright.array import NDArray, float32, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, no_grad, scoped, update
from graphwright.errors import UsageError
from graphwright.ops import call


@runtime_checkable
class HasParameters(Protocol):
    """A module, program or model."""

    def parameters(self) -> Iterable[Parameter]:
        """Trainable variables."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """What holds for some parameters; `scale` is their learning rate over the optimizer's."""

    weight_decay: float
    betas: tuple[float, float]
    eps: float
    scale: float = 1.0


@dataclass(slots=True)
class Moments:
    """State of one parameter: updates made, first and second moment, and float32 master weights of 16-bit ones."""

    steps: Variable
    m: Variable
    v: Variable
    master: Variable | None


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2); defaults as in torch.

    Args:
        params: parameters, groups `{"params": [...], "lr": ..., "betas": ..., "eps": ..., "weight_decay": ...}`, or a
            module, program or model, whose parameters are asked for at every step, so that those an edit adds are
            trained too.
        lr: learning rate; assign `opt.lr = x` to change it, compiled steps see it without a new plan. A group's own lr
            keeps its ratio to it.
        betas, eps: of the moments.
        weight_decay: λ; with `decay_matrices_only` zero for parameters of fewer than two axes.
        decay_matrices_only: see weight_decay; a group's own weight_decay holds for all of it.
    State is keyed by the parameter object and survives edits and undo; of a parameter with another shape it starts
    anew. A 16-bit parameter that was changed from outside, by an edit or undo, is trained on from its new value.
    """

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decay_matrices_only: bool = False,
    ) -> None:
        _check(lr, Group(weight_decay, betas, eps))
        self.owner = params if isinstance(params, HasParameters | Sequence) else list(params)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.decay_matrices_only = decay_matrices_only
        self._base = lr
        self._lr = Variable(_scalar(lr), name="adamw.lr")
        self.state: dict[Parameter, Moments] = {}
        seen = [p for p, _ in self.groups()]
        if len(set(seen)) != len(seen):
            raise UsageError("a parameter is given twice", fix="list each once; tied weights are one parameter")

    def groups(self) -> list[tuple[Parameter, Group]]:
        """Everything trained, each with what holds for it. Raises: UsageError for a group with unknown entries."""
        items = self.owner.parameters() if isinstance(self.owner, HasParameters) else self.owner
        result: list[tuple[Parameter, Group]] = []
        for item in items:
            if isinstance(item, Mapping):
                group = self._group(item)
                members = [item["params"]] if isinstance(item["params"], Parameter) else item["params"]
                result += [(p, group) for p in members]
            else:
                decays = len(item.shape) > 1 or not self.decay_matrices_only
                result.append((item, Group(self.weight_decay if decays else 0.0, self.betas, self.eps)))
        return result

    def _group(self, given: Mapping[str, Any]) -> Group:
        known = {"params", "lr", "betas", "eps", "weight_decay"}
        if "params" not in given or given.keys() - known:
            raise UsageError("a group has params and perhaps lr, betas, eps, weight_decay", got=", ".join(given))
        lr = float(given.get("lr", self._base))
        if lr and not self._base:
            raise UsageError("a group's lr keeps its ratio to the optimizer's, which is 0", got=lr)
        group = Group(
            float(given.get("weight_decay", self.weight_decay)),
            tuple(given.get("betas", self.betas)),
            float(given.get("eps", self.eps)),
            lr / self._base if self._base else 1.0,
        )
        _check(lr, group)
        return group

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._lr.item()

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr.assign(Tensor(_scalar(value)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; with `set_to_none=False` those there are become zeros, in their own memory."""
        for p, _ in self.groups():
            if set_to_none or p.grad is None:
                p.grad = None
                continue
            zeros = call("full_like", p.grad, value=0.0)
            if isinstance(p.grad.data, NDArray):
                p.grad.data.copy_from(zeros.data)
            else:
                p.grad = zeros

    def moments(self, p: Parameter) -> Moments:
        """State of a parameter, zero at first and after a change of its shape."""
        found = self.state.get(p)
        if found is None or found.m.shape != p.shape:
            name = self._name(p)
            kind = float32 if p.dtype.is_low else p.dtype
            m, v = (Variable(_zeros(p.shape, kind), name=f"{name}.{k}") for k in "mv")
            master = None
            if p.dtype.is_low:
                assert isinstance(p.data, NDArray)
                master = Variable(from_numpy(p.data.to_numpy("float32").copy()), name=f"{name}.master")
            found = self.state[p] = Moments(Variable(_scalar(0.0), name=f"{name}.steps"), m, v, master)
        return found

    def _name(self, p: Parameter) -> str:
        """What the state of a parameter is called; two parameters may have one name."""
        taken = {state.m.name for q, state in self.state.items() if q is not p}
        wanted = f"adamw.{p.name or f'param{len(self.state)}'}"
        name, count = wanted, 1
        while f"{name}.m" in taken:
            count += 1
            name = f"{wanted}_{count}"
        return name

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        with no_grad(), scoped("adamw"):
            rates: dict[float, Tensor] = {1.0: self._lr}
            for p, group in self.groups():
                if p.grad is None:
                    continue
                state = self.moments(p)
                if group.scale not in rates:
                    rates[group.scale] = self._lr * group.scale
                target = p if state.master is None else state.master
                value: Tensor = target
                if state.master is not None:  # what rounds to another value was changed from outside
                    kept = call("eq", state.master.to(p.dtype), p)
                    value = call("where", kept, state.master, p.to(state.master.dtype))
                state.steps.assign(state.steps + 1.0)
                operands = (value, p.grad.to(target.dtype), state.m, state.v, state.steps, rates[group.scale])
                update(
                    [target, state.m, state.v],
                    "adamw",
                    *operands,
                    beta1=group.betas[0],
                    beta2=group.betas[1],
                    eps=group.eps,
                    weight_decay=group.weight_decay,
                )
                if state.master is not None:
                    p.assign(state.master.to(p.dtype))

    def variables(self) -> dict[str, Variable]:
        """Everything that a resumed run needs, by name."""
        result = {self._lr.name: self._lr}
        for p, _ in self.groups():
            state = self.moments(p)
            held = (state.steps, state.m, state.v, state.master)
            result.update({v.name: v for v in held if v is not None})
        return result


def _check(lr: float, group: Group) -> None:
    numbers = (lr, group.eps, group.weight_decay)
    if not all(n >= 0 for n in numbers) or len(group.betas) != 2 or not all(0 <= b < 1 for b in group.betas):
        raise UsageError(
            "a hyperparameter is out of range",
            expected="lr, eps, weight_decay >= 0, betas in [0, 1)",
            got=f"lr={lr}, {group}",
        )


def _scalar(value: float) -> NDArray:
    return from_numpy(np.asarray(value, np.float32))


def _zeros(shape: tuple[int, ...], kind: Any) -> NDArray:
    return from_numpy(np.zeros(shape, kind.numpy))
