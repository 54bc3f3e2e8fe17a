"""What all optimizers share: groups of parameters, and carried state per parameter, eagerly and inside a plan.

An optimizer is a row of `ops/optimize.py`: a step is one call of it per group, dtype and decay, over all parameters
that have a gradient. State belongs to the parameter object, so it survives edits and undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from graphwright.array import DType, NDArray, Spec, float32, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, no_grad, scoped, stochastic_round, update
from graphwright.autograd.variable import ShapeChange, remap_path, remapped
from graphwright.errors import UsageError
from graphwright.ops import call

LOW = ("master", "stochastic", "nearest")


@runtime_checkable
class HasParameters(Protocol):
    """A module, program or model."""

    def parameters(self) -> Iterable[Parameter]:
        """Trainable variables."""
        ...


class ParamGroup:
    """Parameters that share a learning rate and options; `params` of a module or program are asked for at every step.

    Attributes:
        lr: learning rate of the next step; compiled steps see a new one without a new plan.
        initial_lr: that of the beginning, which schedules scale.
        options: everything else, fixed.
    """

    def __init__(
        self, params: HasParameters | Iterable[Parameter], lr: float, options: Mapping[str, Any], name: str
    ) -> None:
        self.owner = params if isinstance(params, HasParameters) else list(params)
        self.options = dict(options)
        self.initial_lr = lr
        self.rate = Variable(_scalar(lr, "float64"), name=name)

    def parameters(self) -> list[Parameter]:
        """The members as they are now."""
        return list(self.owner.parameters() if isinstance(self.owner, HasParameters) else self.owner)

    @property
    def lr(self) -> float:
        """See the class."""
        return self.rate.item()

    @lr.setter
    def lr(self, value: float) -> None:
        self.rate.assign(Tensor(_scalar(value, "float64")))


@dataclass(slots=True)
class State:
    """What is carried for one parameter.

    Attributes:
        name: what its variables are called by.
        spec, lineage: of the parameter when the state was made.
        steps: updates made, 0-d float32.
        moments: by name, in float32 or wider.
        master: float32 weights of a 16-bit parameter, if the optimizer keeps them.
    """

    name: str
    spec: Spec
    lineage: ShapeChange | None
    steps: Variable
    moments: dict[str, Variable]
    master: Variable | None

    def variables(self) -> Iterator[Variable]:
        """All of it."""
        yield self.steps
        yield from self.moments.values()
        if self.master is not None:
            yield self.master


class Optimizer:
    """Base of the optimizers: subclasses name their op, its options and its moments.

    Args:
        params: parameters, groups `{"params": ..., "lr": ..., **options}`, both mixed, or a module, program or model,
            whose parameters are asked for at every step, so that those an edit adds are trained too.
        lr: learning rate, >= 0; a group's own stands in the same ratio to it when `opt.lr` is set.
        decay_matrices_only: no weight decay for parameters of fewer than two axes, in groups that name none themselves.
        low: what becomes of digits that a 16-bit parameter has no room for: `master` keeps them in float32 weights of
            the state; `stochastic` rounds bfloat16 at random, so that they are there on average, and keeps nothing;
            `nearest` loses them.
        options: all there are, with the values of this optimizer; a group may have its own.

    Attributes:
        state: what is carried for each parameter that had a step.
        carried: names of further moments that the state of a parameter has, for others: sums of gradients.
    Raises: UsageError for an option out of range or unknown, a parameter given twice, or none at all.
    """

    op: ClassVar[str]

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float,
        *,
        decay_matrices_only: bool = False,
        low: str = "master",
        **options: Any,
    ) -> None:
        if low not in LOW:
            raise UsageError("no such way to keep 16-bit parameters", expected=", ".join(LOW), got=low)
        self.low = low
        self.name = type(self).__name__.lower()
        self.decay_matrices_only = decay_matrices_only
        self.state: dict[Parameter, State] = {}
        self.carried: tuple[str, ...] = ()
        self.param_groups: list[ParamGroup] = []
        self._taken: set[str] = set()
        self._options = frozenset(options)
        self._never = Tensor(_scalar(0.0, "float32"))
        given = [params] if isinstance(params, HasParameters) else list(params)
        plain = [p for p in given if not isinstance(p, Mapping)]
        if plain:
            owner = params if isinstance(params, HasParameters) else plain
            self._add_group(owner, lr, options, fallback=True)
        for group in given:
            if isinstance(group, Mapping):
                own = {k: v for k, v in group.items() if k not in ("params", "lr")}
                if "params" not in group:
                    raise UsageError("a group has params", got=", ".join(group))
                members = [group["params"]] if isinstance(group["params"], Parameter) else group["params"]
                rate = float(group.get("lr", lr))
                if rate and not lr:
                    raise UsageError("a group's lr keeps its ratio to the optimizer's, which is 0", got=rate)
                self._add_group(members, rate, {**options, **own}, fallback="weight_decay" not in own)
        if not self.param_groups:
            raise UsageError("there is nothing to train", fix="give parameters, groups, a module or a program")
        self.initial_lr = lr
        seen = list(self.parameters())
        if len(set(seen)) != len(seen):
            raise UsageError("a parameter is given twice", fix="list each once; tied weights are one parameter")

    def _add_group(self, params: Any, lr: float, options: Mapping[str, Any], *, fallback: bool) -> None:
        unknown = options.keys() - self._options
        if unknown:
            known = ", ".join(("params", "lr", *sorted(self._options)))
            raise UsageError(f"no option of {type(self).__name__}", expected=known, got=", ".join(sorted(unknown)))
        full = {**options, "lr": lr}
        if not self.in_range(full):
            raise UsageError("an option is out of range", where=type(self).__name__, got=full)
        index = len(self.param_groups)
        group = ParamGroup(params, lr, full, f"{self.name}.lr" if index == 0 else f"{self.name}.lr.{index}")
        group.options["spares_vectors"] = self.decay_matrices_only and fallback
        self.param_groups.append(group)

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Whether options, lr among them, are such that the op means something."""
        return options["lr"] >= 0 and options["weight_decay"] >= 0

    def attrs(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of the op for a group's options."""
        return {name: options[name] for name in self._options}

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the op's moments, in its order."""
        raise NotImplementedError

    # -- parameters and rates ----------------------------------------------------------------------------------------
    def parameters(self) -> Iterator[Parameter]:
        """Everything trained, as it is now."""
        return (p for group in self.param_groups for p in group.parameters())

    @property
    def lr(self) -> float:
        """Learning rate of the first group; setting it scales those of all groups alike."""
        return self.param_groups[0].lr

    @lr.setter
    def lr(self, value: float) -> None:
        base = self.param_groups[0].initial_lr
        for group in self.param_groups:
            group.lr = value * (group.initial_lr / base) if base else value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; with `set_to_none=False` those there are become zeros, in their own memory."""
        for p in self.parameters():
            if set_to_none or p.grad is None:
                p.grad = None
                continue
            zeros = call("full_like", p.grad, value=0.0)
            if isinstance(p.grad.data, NDArray):
                p.grad.data.copy_from(zeros.data)
            else:
                p.grad = zeros

    # -- the step ----------------------------------------------------------------------------------------------------
    def step(self, *, found_inf: Tensor | None = None) -> None:
        """One update of every parameter that has a gradient.

        Args:
            found_inf: 0-d float32; where it is not 0, weights, moments and counts keep their values (see GradScaler).
        """
        found = self._never if found_inf is None else found_inf
        with no_grad(), scoped(self.name):
            for group in self.param_groups:
                batches: dict[tuple[DType, bool, bool], list[Parameter]] = {}
                for p in group.parameters():
                    if p.grad is not None:
                        decays = p.ndim > 1 or not group.options["spares_vectors"]
                        rounds = p.dtype.is_low and self.low != "master"
                        batches.setdefault((wide(p.dtype), decays, rounds), []).append(p)
                for (_, decays, rounds), members in batches.items():
                    attrs = self.attrs(group.options)
                    take = self._round if rounds else self._update
                    take(group, members, attrs if decays else {**attrs, "weight_decay": 0.0}, found)

    def _update(self, group: ParamGroup, members: list[Parameter], attrs: dict[str, Any], found: Tensor) -> None:
        names = self.moments(group.options)
        states = [self.state_of(p, names) for p in members]
        targets = [p if s.master is None else s.master for p, s in zip(members, states, strict=True)]
        grads = [p.grad.to(t.dtype) for p, t in zip(members, targets, strict=True) if p.grad is not None]
        values = [_present(p, s.master) for p, s in zip(members, states, strict=True)]
        rest = [s.moments[name] for name in names for s in states] + [s.steps for s in states]
        update([*targets, *rest], self.op, group.rate, found, *grads, *values, *rest, **attrs)
        for p, s in zip(members, states, strict=True):
            if s.master is not None:
                p.assign(s.master.to(p.dtype))

    def _round(self, group: ParamGroup, members: list[Parameter], attrs: dict[str, Any], found: Tensor) -> None:
        """The step of 16-bit parameters without masters: made in float32, rounded at once."""
        names = self.moments(group.options)
        states = [self.state_of(p, names) for p in members]
        grads = [p.grad.to(float32) for p in members if p.grad is not None]
        rest = [s.moments[name] for name in names for s in states] + [s.steps for s in states]
        results = call(self.op, group.rate, found, *grads, *(p.to(float32) for p in members), *rest, **attrs)
        for p, value in zip(members, results, strict=False):
            p.assign(stochastic_round(value) if self.low == "stochastic" else value.to(p.dtype))
        for variable, value in zip(rest, results[len(members) :], strict=True):
            variable.assign(value)

    # -- state -------------------------------------------------------------------------------------------------------
    def state_of(self, p: Parameter, names: Sequence[str] | None = None) -> State:
        """State of a parameter: zero at first, and carried along where an edit of an axis gave it another shape.

        What stays keeps its moments bit for bit, in its new place; moments of new entries are 0, also of those that an
        undo brings back. A shape that came about otherwise (a weight that was set) begins anew.
        """
        found = self.state.get(p)
        if names is None:
            names = next((self.moments(g.options) for g in self.param_groups if p in set(g.parameters())), ())
        names = (*names, *self.carried)
        if found is not None and found.lineage is p.lineage and found.spec == p.spec and found.steps.device == p.device:
            for label in set(names) - found.moments.keys():
                found.moments[label] = _zeros(p, f"{found.name}.{label}")
            return found
        return self._new_state(p, names, found, None if found is None else carrier(found.spec, found.lineage, p))

    def _new_state(
        self, p: Parameter, names: Sequence[str], old: State | None, carry: Callable[[np.ndarray], np.ndarray] | None
    ) -> State:
        """A state in the parameter's shape and dtype: the old one carried over, or zeros."""
        kind, name = wide(p.dtype), self._fresh_name(p) if old is None else old.name

        def variable(label: str, before: Variable | None, otherwise: np.ndarray) -> Variable:
            keeps = before is not None and carry is not None
            host = carry(before.data.to_numpy().copy()) if keeps else otherwise  # pyright: ignore[reportOptionalCall,reportOptionalMemberAccess]
            return Variable(from_numpy(np.array(host, kind.numpy, order="C")).to(p.device), name=f"{name}.{label}")

        held = {} if old is None else old.moments
        moments = {label: variable(label, held.get(label), np.zeros(p.shape)) for label in names}
        steps = 0.0 if old is None or carry is None else old.steps.data.item()
        master = None
        if p.dtype.is_low and self.low == "master":  # where it does not round to it, a step takes the parameter's value
            assert isinstance(p.data, NDArray)
            master = variable("master", None if old is None else old.master, p.data.to_numpy("float32"))
        count = Variable(_scalar(steps, "float32").to(p.device), name=f"{name}.steps")
        made = State(name, p.spec, p.lineage, count, moments, master)
        self.state[p] = made
        return made

    def _fresh_name(self, p: Parameter) -> str:
        """What the state of a parameter is called; two parameters may have one name."""
        wanted = f"{self.name}.{p.name or f'param{len(self.state)}'}"
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name

    def variables(self) -> dict[str, Variable]:
        """Everything that a resumed run needs, by name."""
        result = {group.rate.name: group.rate for group in self.param_groups}
        for group in self.param_groups:
            names = self.moments(group.options)
            for p in group.parameters():
                result.update({v.name: v for v in self.state_of(p, names).variables()})
        return result


def wide(dtype: DType) -> DType:
    """The dtype in which a parameter of `dtype` is updated."""
    return float32 if dtype.is_low else dtype


def carrier(spec: Spec, lineage: ShapeChange | None, p: Parameter) -> Callable[[np.ndarray], np.ndarray] | None:
    """How moments get from the shape they were made in to the present one; None if no edits of axes lead there.

    Args:
        spec, lineage: of the parameter when the moments were made.
    """
    steps, shape = list(remap_path(lineage, p.lineage)), spec.sizes
    for before, places in steps:
        if shape != before:
            return None
        shape = tuple(len(places[i]) if i in places else n for i, n in enumerate(shape))

    def carry(moment: np.ndarray) -> np.ndarray:
        for _, places in steps:
            moment = remapped(moment, places)
        return moment

    return carry if shape == p.shape else None


def _zeros(p: Parameter, name: str) -> Variable:
    return Variable(from_numpy(np.zeros(p.shape, wide(p.dtype).numpy)).to(p.device), name=name)


def _present(p: Parameter, master: Variable | None) -> Tensor:
    """The value to step from: the master, but where it does not round to the parameter, that was set from outside."""
    if master is None:
        return p
    kept = call("eq", master.to(p.dtype), p)
    return call("where", kept, master, p.to(master.dtype))


def _scalar(value: float, kind: str) -> NDArray:
    return from_numpy(np.asarray(value, kind))
