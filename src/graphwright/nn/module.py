"""Module: parameters, buffers and children by attribute, dotted names, and scopes that name what is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from graphwright.array import Device, NDArray, empty, names_device
from graphwright.array import dtype as named
from graphwright.autograd import Parameter, Tensor, Variable, active_recorder, as_tensor, changes, scoped, training
from graphwright.errors import DTypeError, UsageError
from graphwright.files import blake2b_128

_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of attributes that hold no module."""


class Buffer(Variable):
    """A value that a module carries and nobody trains; `persistent` ones are part of its state."""

    __slots__ = ("persistent",)

    def __init__(self, data: NDArray, persistent: bool = True, name: str = "") -> None:
        super().__init__(data, False, name)
        self.persistent = persistent


class Module:
    """A function with parameters. Subclasses set parameters and modules as attributes and define `forward`.

    Parameters and buffers are named by their dotted path from the module that is asked; the first module that lists one
    gives it its name, which is its key in a traced program. Lists, tuples and dicts of them are looked into.

    Attributes:
        training: whether layers that differ (dropout, batch norm) train; `gw.mode` overrides it.
    """

    @property
    def training(self) -> bool:
        """See the class."""
        return self.__dict__.get("_training", True)

    @training.setter
    def training(self, value: bool) -> None:
        self.__dict__["_training"] = value
        changes.rise()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` in the scope of the module's name."""
        name = self.__dict__.get("_name")
        if name:
            with scoped(name):
                return self.forward(*args, **kwargs)
        self.name_children()
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    # -- what is in it -----------------------------------------------------------------------------------------------
    def children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of direct children; those in lists are `list.0`, ..., those in dicts `dict.key`."""
        return ((name, value) for name, value in self._members() if isinstance(value, Module))

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once."""
        seen: set[int] = set()
        stack: list[Module] = [self]
        while stack:
            module = stack.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                stack += [child for _, child in module.children()][::-1]

    def _members(self) -> Iterator[tuple[str, Any]]:
        """Modules and variables among the attributes, and in lists, tuples and dicts there, with dotted names."""
        stack = [item for item in vars(self).items() if type(item[1]) not in _PLAIN][::-1]
        while stack:
            name, value = stack.pop()
            if isinstance(value, (Module, Variable)):
                yield name, value
            elif isinstance(value, (list, tuple)):
                stack += [(f"{name}.{i}", v) for i, v in enumerate(value)][::-1]
            elif isinstance(value, Mapping):
                stack += [(f"{name}.{k}", v) for k, v in value.items()][::-1]

    def name_children(self) -> None:
        """Give variables and children, from this module down, the names under which they appear in a trace."""
        for name, variable in self._variables("", naming=True):
            if not variable.name:
                variable.name = name

    def _variables(self, prefix: str, naming: bool = False) -> Iterator[tuple[str, Parameter | Buffer]]:
        """(dotted name, parameter or buffer), a shared one under each of its names; children get theirs on the way."""
        children: list[tuple[str, Module]] = []
        for name, value in self._members():
            if isinstance(value, Module):
                children.append((name, value))
            elif isinstance(value, (Parameter, Buffer)):
                yield prefix + name, value
        for name, child in children:
            if naming:
                child.__dict__["_name"] = name
            yield from child._variables(f"{prefix}{name}.", naming)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """(dotted name, parameter), each parameter once."""
        seen: set[int] = set()
        for name, value in self._variables(prefix):
            if isinstance(value, Parameter) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def parameters(self) -> Iterator[Parameter]:
        """Parameters, each once."""
        found: dict[int, Parameter] = {}
        for name, value in self._variables("", naming=True):
            if not value.name:
                value.name = name
            if isinstance(value, Parameter):
                found[id(value)] = value
        return iter(found.values())

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
        """(dotted name, buffer), each buffer once."""
        seen: set[int] = set()
        for name, value in self._variables(prefix):
            if isinstance(value, Buffer) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def variables(self) -> dict[str, Variable]:
        """Everything that is saved: parameters and persistent buffers by name, a tied one under each of its names."""
        return {n: v for n, v in self._variables("") if isinstance(v, Parameter) or v.persistent}

    def structure_hash(self) -> str:
        """BLAKE2b over names, ties and specs of what is saved: where it is equal, a saved state fits."""
        own = self.variables()
        first: dict[int, str] = {}
        rows = [f"{name} {first.setdefault(id(v), name)} {v.spec}" for name, v in own.items()]
        return blake2b_128("\n".join(rows).encode())

    # -- modes and dtypes --------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Self:
        """Let this module and all below it train, or not; gradients flow either way."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    @property
    def trains(self) -> bool:
        """Whether the layer trains in this call: by `gw.mode`, or by its own flag. A compiled call notes the flag."""
        recorder = active_recorder.get()
        if recorder is not None:
            recorder.assume(lambda: self.training)
        return bool(training(self.training))

    def requires_grad_(self, wanted: bool = True) -> Self:
        """Let all parameters be trained, or freeze them."""
        for p in self.parameters():
            p.requires_grad = wanted
        return self

    def to(self, to: object) -> Self:
        """Convert floating parameters and buffers to a dtype, or bring all to a device (a Device or `"sim:1"`).

        In place: the objects stay, so do ties and the optimizers of them; optimizer state follows at the next step.
        Raises: DTypeError for a dtype that is not floating; DeviceUnavailable.
        """
        if names_device(to):
            for _, variable in self._variables(""):
                variable.data = variable.data.to(Device.parse(to))
                variable.grad = None if variable.grad is None else variable.grad.to(to)
            return self
        kind = named(to)
        if not kind.is_float:
            raise DTypeError("modules are of floating dtypes", got=kind)
        for _, variable in self._variables(""):
            old = variable.data
            if old.dtype.is_float and old.dtype is not kind:
                variable.data = empty(old.shape, kind, old.device).copy_from(old)
                variable.shared = False
                if variable.grad is not None:
                    variable.grad = variable.grad.to(variable.grad_dtype)
        return self

    # -- state -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Tensor]:
        """Copies of parameters and persistent buffers by name, each once."""
        seen: set[int] = set()
        return {
            name: v.detach().clone() for name, v in self.variables().items() if not (id(v) in seen or seen.add(id(v)))
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Take values by name; all are checked before one is written. A tied one is taken by any of its names.

        Args:
            strict: whether missing and unexpected names are errors; other shapes and dtypes always are.
        Returns: names that are missing, and that were not expected.
        Raises: UsageError listing all missing, unexpected and misshapen entries.
        """
        own = self.variables()
        names: dict[int, list[str]] = {}
        for name, variable in own.items():
            names.setdefault(id(variable), []).append(name)
        found = [(own[known[0]], next((n for n in known if n in state), None), known[0]) for known in names.values()]
        missing = sorted(first for _, name, first in found if name is None)
        unexpected = sorted(state.keys() - own.keys())
        values = [(v, name, as_tensor(state[name])) for v, name, _ in found if name is not None]
        wrong = [f"missing: {n}" for n in missing if strict] + [f"unexpected: {n}" for n in unexpected if strict]
        wrong += sorted(f"{n}: expected {v.spec}, got {t.spec}" for v, n, t in values if t.spec != v.spec)
        if wrong:
            raise UsageError("the state does not fit:\n  " + "\n  ".join(wrong), where=type(self).__name__)
        for variable, _, value in values:
            variable.assign(value)
        return missing, unexpected
