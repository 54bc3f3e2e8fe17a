"""The base of all optimizers: parameter groups, state per parameter, and the step, eager or inside a plan.

A step calls the optimizer's op once per group, dtype and whether weights decay, on all parameters that have a gradient.
State is stored per parameter object, so it survives edits and undo, and is released with the object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, ClassVar, Protocol, TypedDict, runtime_checkable
from weakref import ref
from zlib import crc32

import numpy as np

from graphwright.array import CPU, DType, NDArray, Spec, float32, from_numpy
from graphwright.autograd import (
    Parameter,
    Tensor,
    Variable,
    active_recorder,
    as_tensor,
    changes,
    enable_grad,
    no_grad,
    scoped,
    stochastic_round,
    update,
)
from graphwright.autograd.variable import ShapeChange, remap_path
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.optim.exchange import Shards

LOW = ("master", "stochastic", "nearest")
_NOT_NEGATIVE = (
    "lr", "eps", "weight_decay", "momentum", "iterations", "lr_decay", "initial_accumulator_value", "momentum_decay",
)  # fmt: skip


_RATES = ("lr", "initial_lr", "params")
_RUN = 16
"""Mean number of parameters that one op of a trace updates."""
"""Entries of a saved group other than options."""


@runtime_checkable
class HasParameters(Protocol):
    """A module, program or model, whose parameters can be listed."""

    def parameters(self) -> Iterable[Parameter]:
        """Iterate over the trainable variables."""
        ...


Params = HasParameters | Iterable[Any]
"""Parameters, parameter groups, or an object with parameters."""


class ParamGroup:
    """Parameters that share a learning rate and options; the list is read from a module or program at every step.

    Attributes:
        lr: learning rate of the next step; changing it does not require a compiled step to be planned again.
        initial_lr: learning rate at construction, which schedules scale.
        options: all other options; they do not change.

    `group["lr"]`, `group["params"]`, `group["initial_lr"]` and options by name read as in torch; only `lr` is written.
    """

    def __init__(self, params: Params, lr: float, options: Mapping[str, Any], name: str) -> None:
        self.owner = params if isinstance(params, HasParameters) else list(params)
        self.options = dict(options)
        self.initial_lr = lr
        self.rate = Variable(_scalar(lr, "float64"), name=name)

    def parameters(self) -> list[Parameter]:
        """Return the list of parameters currently in the group."""
        return list(self.owner.parameters() if isinstance(self.owner, HasParameters) else self.owner)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.rate.item()

    @lr.setter
    def lr(self, value: float) -> None:
        if active_recorder.get() is not None or self.rate.data.device != CPU:
            self.rate.assign(Tensor(_scalar(value, "float64")))
            return
        rate = self.rate.own()  # a schedule sets it in every step
        rate.writable()
        rate.to_numpy()[...] = value

    def keys(self) -> list[str]:
        """Return the names that `group[name]` accepts."""
        return ["params", "lr", "initial_lr", *(n for n in self.options if n not in ("lr", "spares_vectors"))]

    def items(self) -> list[tuple[str, Any]]:
        """Return (name, value) of what `group[name]` accepts."""
        return [(name, self[name]) for name in self.keys()]  # this object is no dict

    def get(self, name: str, default: Any = None) -> Any:
        """Return `group[name]`, or the default for another name."""
        return dict(self.items()).get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if name == "params":
            return self.parameters()
        return getattr(self, name) if name in ("lr", "initial_lr") else self.options[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "lr":
            raise UsageError("this entry of a parameter group does not change", where=name, expected="lr",
                             fix="make another optimizer: options are constants of compiled steps")  # fmt: skip
        if not float(value) >= 0:
            raise UsageError("the option 'lr' is out of range", expected=">= 0", got=value)
        self.lr = float(value)


@dataclass(slots=True)
class ParamState:
    """Optimizer state of one parameter.

    Attributes:
        spec, lineage: when the state was made, the spec of the parameter and the record of its last change of shape.
        steps: number of updates, 0-d float32.
        moments: name -> moment, in float32 or wider.
        master: float32 weights of a 16-bit parameter, if the optimizer keeps them.
    """

    spec: Spec
    lineage: ShapeChange | None
    steps: Variable
    moments: dict[str, Variable]
    master: Variable | None

    def variables(self) -> dict[str, Variable]:
        """Return a dict from labels to all variables of the state: `steps`, the moments and `master` weights."""
        return {"steps": self.steps, **self.moments, **({} if self.master is None else {"master": self.master})}


class StatesByParameter(MutableMapping[Parameter, ParamState]):
    """Parameter -> its state, by identity and weakly: once no program and no undo has the parameter, its state goes."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[Parameter], ParamState]] = {}

    def __getitem__(self, p: Parameter) -> ParamState:
        if id(p) not in self._held:
            raise KeyError(p.name)
        return self._held[id(p)][1]

    def __setitem__(self, p: Parameter, state: ParamState) -> None:
        held, key = self._held, id(p)
        held[key] = ref(p, lambda _: held.pop(key, None)), state

    def __delitem__(self, p: Parameter) -> None:
        del self._held[id(p)]

    def __contains__(self, p: object) -> bool:
        return id(p) in self._held

    def __iter__(self) -> Iterator[Parameter]:
        return (p for r, _ in [*self._held.values()] if (p := r()) is not None)

    def __len__(self) -> int:
        return len(self._held)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatesByParameter:
        made = StatesByParameter()
        made.update((deepcopy(p, memo), deepcopy(state, memo)) for p, state in self.items())
        return made


class CommonOptions(TypedDict, total=False):
    """Arguments of optimizers by keyword; see `Optimizer`."""

    decay_matrices_only: bool
    low: str
    lazy: bool


class Optimizer:
    """Base of the optimizers. A subclass defines its op and the options and moments of the op.

    Args:
        params: parameters, groups `{"params": ..., "lr": ..., **options}`, both mixed, or a module, program or model,
            whose parameters are listed again at every step, so that those added by an edit are trained too.
        lr: learning rate, >= 0; setting `opt.lr` later scales the rates of all groups by the same factor.
        options: options of this optimizer with their values; a group may override them.
        decay_matrices_only: no weight decay for parameters with fewer than two axes, except in groups that set
            `weight_decay`.
        low: how 16-bit parameters are updated: `master` stores float32 weights in the state; `stochastic` rounds to
            bfloat16 at random with the right mean and stores no copy; `nearest` rounds and loses small updates. Each
            continues from the current value of a parameter that was set by an edit or undo.
        lazy: a step leaves a parameter whose gradient is zero everywhere as it is: weight, moments, master weights and
            its own number of steps, without weight decay too. So an expert that got no tokens does not move. It is what
            torch does for a parameter whose `grad` is None; a NaN is not zero.

    Attributes:
        moment_names: name of each moment, in the order of the op's operands -> the option that requires it, or None if
            it always exists.
        of_matrices: whether an update depends on the whole matrix, so that its parts cannot be updated apart.
        numbers: names of the moments that are one number per parameter, 0-d float64; the last of `moment_names`.
        state: parameter -> its state, after its first step; it ends with the parameter.
        extra_moments: names of additional moments in the state of every parameter, such as gradient sums.
        shards: how the states are divided among processes, or None.
        defaults: lr and options of groups that do not set their own.
    Raises: UsageError for an option out of range or unknown, a duplicate parameter, or no parameters.
    """

    op: ClassVar[str]
    moment_names: ClassVar[Mapping[str, str | None]]
    numbers: ClassVar[frozenset[str]] = frozenset()
    of_matrices: ClassVar[bool] = False

    def __init__(
        self, params: Params, lr: float, options: Mapping[str, Any], *, decay_matrices_only: bool = False,
        low: str = "master", lazy: bool = False,
    ) -> None:  # fmt: skip
        if low not in LOW:
            raise UsageError("unknown value of the option 'low'", expected=", ".join(LOW), got=low)
        self.low, self.lazy = low, lazy
        self.name = type(self).__name__.lower()
        self.decay_matrices_only = decay_matrices_only
        self.state = StatesByParameter()
        self.extra_moments: tuple[str, ...] = ()
        self.shards: Shards | None = None
        self.param_groups: list[ParamGroup] = []
        self._options = frozenset(options)
        self._never = Tensor(_scalar(0.0, "float32"))
        self.defaults = {"lr": lr, **options}
        given = [params] if isinstance(params, HasParameters) else list(params)
        plain = [p for p in given if not isinstance(p, Mapping)]
        if plain:
            owner = params if isinstance(params, HasParameters) else plain
            self._add_group(owner, lr, options, fallback=True)
        for group in (g for g in given if isinstance(g, Mapping)):
            self._add_given(group)
        if not self.param_groups:
            raise UsageError("the optimizer got no parameters", fix="pass parameters, groups, a module or a program")
        self.initial_lr = lr
        self._refuse_duplicates()

    def _refuse_duplicates(self) -> None:
        for p, times in Counter(self.parameters()).items():
            if times > 1:
                raise UsageError("duplicate parameter", where=p.name or None, got=f"{times} times",
                                 fix="list each parameter once; tied weights are one parameter")  # fmt: skip

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Train further parameters: `{"params": ..., **options}`. Raises: UsageError, as the constructor."""
        count = len(self.param_groups)
        self._add_given(param_group)
        try:
            self._refuse_duplicates()
        except UsageError:
            del self.param_groups[count:]
            raise
        changes.rise()

    def _add_given(self, group: Mapping[str, Any]) -> None:
        own = {k: v for k, v in group.items() if k not in ("params", "lr")}
        if "params" not in group:
            raise UsageError("a parameter group lacks the key 'params'", got=", ".join(group))
        members = [group["params"]] if isinstance(group["params"], Parameter) else group["params"]
        rate = float(group.get("lr", self.defaults["lr"]))
        if rate and not self.defaults["lr"]:
            raise UsageError("a group has lr > 0 but the optimizer's lr is 0", got=rate,
                             fix="give the optimizer an lr > 0")  # fmt: skip
        options = {name: value for name, value in self.defaults.items() if name != "lr"}
        self._add_group(members, rate, {**options, **own}, fallback="weight_decay" not in own)

    def _add_group(self, params: Any, lr: float, options: Mapping[str, Any], *, fallback: bool) -> None:
        unknown = options.keys() - self._options
        if unknown:
            known = ", ".join(("params", "lr", *sorted(self._options)))
            raise UsageError(f"unknown option of {type(self).__name__}", expected=known, got=", ".join(sorted(unknown)))
        full = {**options, "lr": lr}
        if not self.in_range(full):  # a subclass may override `in_range` alone
            name, expected = next(iter(self._out_of_range(full).items()), ("", None))
            what = f"the option {name!r} is out of range" if name else "an option is out of range"
            raise UsageError(what, where=type(self).__name__, expected=expected, got=full.get(name, full))
        index = len(self.param_groups)
        group = ParamGroup(params, lr, full, f"{self.name}.lr" if index == 0 else f"{self.name}.lr.{index}")
        group.options["spares_vectors"] = self.decay_matrices_only and fallback
        self.param_groups.append(group)

    @classmethod
    def in_range(cls, options: Mapping[str, Any]) -> bool:
        """Return True if the options, with lr, are valid; subclasses add their own conditions."""
        return not cls._out_of_range(options)

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        """Map each invalid option, or lr, to its valid range; subclasses add those of their own options."""
        wrong = {name: ">= 0" for name in _NOT_NEGATIVE if not options.get(name, 0) >= 0}
        betas = tuple(options.get("betas", (0.0, 0.0)))
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            wrong["betas"] = "two numbers in [0, 1)"
        return wrong

    def attrs(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of the op for a group's options."""
        attrs = {name: options[name] for name in self._options}
        if "betas" in attrs:
            attrs["beta1"], attrs["beta2"] = attrs.pop("betas")
        return attrs

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that the options require, in the order of the op's operands."""
        return tuple(name for name, option in self.moment_names.items() if option is None or options[option])

    # -- parameters and rates ----------------------------------------------------------------------------------------
    def parameters(self) -> Iterator[Parameter]:
        """Iterate over all trained parameters."""
        return (p for group in self.param_groups for p in group.parameters())

    @property
    def lr(self) -> float:
        """Learning rate of the first group; setting it scales the rates of all groups by the same factor."""
        return self.param_groups[0].lr

    @lr.setter
    def lr(self, value: float) -> None:
        base = self.param_groups[0].initial_lr
        for group in self.param_groups:
            group.lr = value * (group.initial_lr / base) if base else value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or with `set_to_none=False` set their entries to zero in place."""
        for p in self.parameters():
            zeros = None if set_to_none or p.grad is None else call("full_like", p.grad, value=0.0)
            if zeros is not None and p.grad is not None and isinstance(p.grad.data, NDArray):
                p.grad.data.copy_from(zeros.data)
            else:
                p.grad = zeros

    # -- the step ----------------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: function that computes the loss and its gradients, called first; its result is returned.
            found_inf: a 0-d float32; unless it is 0, no weight, moment or step count is changed (see GradScaler).
                With `lazy` the same holds for each parameter whose gradient is zero everywhere.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
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
                    attrs = attrs if decays else {**attrs, "weight_decay": 0.0}
                    for run in [members] if rounds else _runs(members):
                        (self._round if rounds else self._update)(group, run, attrs, found)
        return loss

    def _update(self, group: ParamGroup, members: list[Parameter], attrs: dict[str, Any], found: Tensor) -> None:
        states, rest = self._state_of_members(group, members)
        targets = [p if s.master is None else s.master for p, s in zip(members, states, strict=True)]
        grads = [p.grad.to(t.dtype) for p, t in zip(members, targets, strict=True) if p.grad is not None]
        values = [_present(p, s.master) for p, s in zip(members, states, strict=True)]
        found = self._flags(found, grads)
        update([*targets, *rest], self.op, group.rate, found, *grads, *values, *rest, **attrs)
        for p, s in zip(members, states, strict=True):
            if s.master is not None:
                p.assign(s.master.to(p.dtype))

    def _round(self, group: ParamGroup, members: list[Parameter], attrs: dict[str, Any], found: Tensor) -> None:
        """Update 16-bit parameters without master weights: compute in float32, then round."""
        _, rest = self._state_of_members(group, members)
        grads = [p.grad.to(float32) for p in members if p.grad is not None]
        found = self._flags(found, grads)
        results = call(self.op, group.rate, found, *grads, *(p.to(float32) for p in members), *rest, **attrs)
        for p, value in zip(members, results, strict=False):
            p.assign(stochastic_round(value) if self.low == "stochastic" else value.to(p.dtype))
        for variable, value in zip(rest, results[len(members) :], strict=True):
            variable.assign(value)

    def _flags(self, found: Tensor, grads: Sequence[Tensor]) -> Tensor:
        """Return the operand found_inf of the op: one number, or of a lazy optimizer one per parameter."""
        return call("zero_check", found, *grads) if self.lazy else found

    def _state_of_members(self, group: ParamGroup, members: list[Parameter]) -> tuple[list[ParamState], list[Variable]]:
        """Return the states of the parameters, and their moments and step counts in the order of the op's operands."""
        names = self.moments(group.options)
        states = [self.state_of(p, names) for p in members]
        return states, [s.moments[name] for name in names for s in states] + [s.steps for s in states]

    # -- state -------------------------------------------------------------------------------------------------------
    def state_of(self, p: Parameter, names: Sequence[str] | None = None) -> ParamState:
        """Return the state of a parameter, with the moments `names`, by default those that its group requires.

        The state is zero at first, and remapped after an edit of the parameter's axes.
        Entries that an edit preserves have the same moments, bit for bit; moments of new entries are 0, also of entries
        that an undo restores. After any other change of shape, as by setting the weight, all moments are 0 again.
        """
        found = self.state.get(p)
        if names is None:
            names = next((self.moments(g.options) for g in self.param_groups if p in set(g.parameters())), ())
        names = (*names, *self.extra_moments)
        if found is not None and found.lineage is p.lineage and found.spec == p.spec and found.steps.device == p.device:
            for label in set(names) - found.moments.keys():
                zeros = from_numpy(np.zeros(*self._form(p, label))).to(p.device)
                found.moments[label] = Variable(zeros, name=self._name(p, label))
            return found
        return self._new_state(p, names, found, None if found is None else moment_remap(found.spec, found.lineage, p))

    def _name(self, p: Parameter, label: str) -> str:
        return f"{self.name}.{p.name or 'param'}.{label}"

    def _form(self, p: Parameter, label: str) -> tuple[tuple[int, ...], Any]:
        """Return shape and numpy dtype of a moment of a parameter, or of its master weights."""
        return ((), np.float64) if label in self.numbers else (p.shape, wide(p.dtype).numpy)

    def _new_state(
        self, p: Parameter, names: Sequence[str], old: ParamState | None, remap: Callable[[Any], Any] | None
    ) -> ParamState:
        """Make a state for the parameter's present shape and dtype: the `old` state converted by `remap`, or zeros."""

        def variable(label: str, before: Variable | None, otherwise: Any) -> Variable:
            shape, kind = self._form(p, label)
            host = otherwise
            if before is not None and remap is not None:
                host = before.data.to_numpy().copy()
                host = host if label in self.numbers else remap(host)
            made = np.array(np.broadcast_to(host, shape), kind, order="C")
            return Variable(from_numpy(made).to(p.device), name=self._name(p, label))

        held = {} if old is None else old.moments
        moments = {label: variable(label, held.get(label), 0.0) for label in names}
        steps = 0.0 if old is None or remap is None else old.steps.data.item()
        master = None
        if p.dtype.is_low and self.low == "master":  # see _present
            assert isinstance(p.data, NDArray)
            master = variable("master", None if old is None else old.master, p.data.to_numpy("float32"))
        made = Variable(_scalar(steps, "float32").to(p.device), name=self._name(p, "steps"))
        state = self.state[p] = ParamState(p.spec, p.lineage, made, moments, master)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form: `state`, of each parameter by its number, and `param_groups`.

        Values of `state` are copies, tensors by the names of moments, `step` and `master`; a parameter without a state
        is left out. `save_state` writes whole trainings.
        """
        numbers = {p: i for i, p in enumerate(self.parameters())}
        state = {}
        for p, i in numbers.items():
            if p in self.state:
                held = self.state_of(p)
                values = {"step" if n == "steps" else n: v for n, v in held.variables().items()}
                state[i] = {name: v.detach().clone() for name, v in values.items()}
        groups = [
            {**{n: v for n, v in group.items() if n != "params"}, "params": [numbers[p] for p in group.parameters()]}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`: moments, step counts and learning rates; all is checked before.

        Raises: UsageError unless it is from the same class with equal options and parameters of equal shapes.
        """
        groups, states = state_dict["param_groups"], {int(i): s for i, s in state_dict["state"].items()}
        own = self.state_dict()["param_groups"]
        if [g["params"] for g in groups] != [g["params"] for g in own]:
            expected, got = ([len(g["params"]) for g in gs] for gs in (own, groups))
            raise UsageError("the state has other parameter groups", where=type(self).__name__, got=f"{got} parameters",
                             expected=f"{expected} parameters")  # fmt: skip
        fixed = lambda g: {n: tuple(v) if isinstance(v, list) else v for n, v in g.items() if n not in _RATES}  # noqa: E731
        for mine, given in zip(own, groups, strict=True):
            if fixed(given) != fixed(mine):
                what, fix = "the state is of an optimizer with other options", "make the optimizer with them"
                raise UsageError(what, where=type(self).__name__, expected=fixed(mine), got=fixed(given), fix=fix)
        members, found = list(self.parameters()), []
        for i, values in states.items():
            p = members[i] if i < len(members) else None
            held = {} if p is None else self._forms(p)
            given = {name: as_tensor(value) for name, value in values.items()}
            if p is None or {n: t.shape for n, t in given.items()} != held:
                got = {name: t.shape for name, t in given.items()}
                raise UsageError("the state of a parameter does not fit", where=f"{type(self).__name__}, parameter {i}",
                                 expected=held or f"{len(members)} parameters", got=got)  # fmt: skip
            found.append((p, given))
        for p in set(self.state) - {q for q, _ in found}:
            del self.state[p]
        for p, given in found:
            held = self.state_of(p)
            for name, value in given.items():
                target = {"step": held.steps, "master": held.master, **held.moments}[name]
                assert target is not None
                target.assign(value.to(dtype=target.dtype, device=target.device))
        for group, given in zip(self.param_groups, groups, strict=True):
            group.lr, group.initial_lr = given["lr"], given["initial_lr"]

    def _forms(self, p: Parameter) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what `state_dict` has of a parameter."""
        group = next(g for g in self.param_groups if p in set(g.parameters()))
        shapes = {name: self._form(p, name)[0] for name in (*self.moments(group.options), *self.extra_moments)}
        low = {"master": p.shape} if p.dtype.is_low and self.low == "master" else {}
        return {"step": (), **shapes, **low}

    def variables(self) -> dict[str, Variable]:
        """Return a dict from names to all variables that a resumed run needs."""
        result = {group.rate.name: group.rate for group in self.param_groups}
        for name, _, state in self.states():
            result.update({f"{name}.{label}": v for label, v in state.variables().items()})
        return result

    def states(self) -> Iterator[tuple[str, Parameter, ParamState]]:
        """Iterate over (name, parameter, state) of all trained parameters whose states this process has.

        A name is made of that of the parameter, and of a number if an earlier one has the same. So it depends on the
        present parameters alone, not on those that they replaced.
        """
        taken: set[str] = set()
        for group in self.param_groups:
            moments = self.moments(group.options)
            for p in group.parameters():
                wanted = f"{self.name}.{p.name or f'param{len(taken)}'}"
                name = next(n for n in chain([wanted], (f"{wanted}_{i}" for i in count(2))) if n not in taken)
                taken.add(name)
                if self.shards is None or self.shards.owns(p):
                    yield name, p, self.state_of(p, moments)


def _runs(members: list[Parameter]) -> list[list[Parameter]]:
    """Return the parameters that one op updates each: all of them, or in a trace runs of about `_RUN` in order of name.

    The names alone decide where a run begins, so an edit that adds or removes parameters changes the op of few others,
    and a parameter that replaces one of its name has its operand numbers.
    """
    if active_recorder.get() is None:
        return [members]
    runs: list[list[Parameter]] = []
    before = None
    for p in sorted(members, key=lambda p: p.name or ""):
        name = p.name or ""
        if not runs or (name != before and crc32(name.encode()) % _RUN == 0):
            runs.append([])
        runs[-1].append(p)
        before = name
    return runs


def wide(dtype: DType) -> DType:
    """Return the dtype in which a parameter is updated: float32 for 16-bit dtypes, else `dtype` itself."""
    return float32 if dtype.is_low else dtype


def moment_remap(spec: Spec, lineage: ShapeChange | None, p: Parameter) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return a function that remaps moments to the present shape of `p`; None if not only edits of axes changed it.

    Args:
        spec, lineage: when the moments were made, the spec of `p` and the record of its last change of shape.
    """
    remaps, shape = list(remap_path(lineage, p.lineage)), spec.sizes
    for step in remaps:
        if shape != step.before:
            return None
        shape = step.after

    def remap(moment: np.ndarray) -> np.ndarray:
        for step in remaps:
            moment = step.move(moment)
        return moment

    return remap if shape == p.shape else None


def _present(p: Parameter, master: Variable | None) -> Tensor:
    """Return the value to update: the master weights, except for entries of `p` that were set since the last step."""
    if master is None:
        return p
    same = call("eq", master.to(p.dtype), p)
    return call("where", same, master, p.to(master.dtype))


def _scalar(value: float, kind: str) -> NDArray:
    return from_numpy(np.asarray(value, kind))
