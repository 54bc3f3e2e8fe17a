"""Module: parameters and children by attribute, dotted names, and scopes that name what is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphwright.autograd import Parameter, Tensor, as_tensor, scoped
from graphwright.errors import UsageError


class Module:
    """A function with parameters. Subclasses set parameters and modules as attributes and define `forward`.

    Parameters are named by their dotted path from the module that `named_parameters` is asked of; the first module that
    lists a parameter gives it its name, which is its key in a traced program.
    """

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

    def children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of direct children; those in lists are `list.0`, ..., those in dicts `dict.key`."""
        return ((name, value) for name, value in self._members() if isinstance(value, Module))

    def _members(self) -> Iterator[tuple[str, Any]]:
        """Attributes and what lists, tuples and dicts among them hold, with dotted names."""
        stack = [(name, value) for name, value in vars(self).items()][::-1]
        while stack:
            name, value = stack.pop()
            if isinstance(value, list | tuple):
                stack += [(f"{name}.{i}", v) for i, v in enumerate(value)][::-1]
            elif isinstance(value, Mapping):
                stack += [(f"{name}.{k}", v) for k, v in value.items()][::-1]
            else:
                yield name, value

    def name_children(self) -> None:
        """Give parameters and children, from this module down, the names under which they appear in a trace."""
        for name, child in self.children():
            child.__dict__["_name"] = name
            child._name_scopes()
        for name, parameter in self.named_parameters():
            if not parameter.name:
                parameter.name = name

    def _name_scopes(self) -> None:
        for name, child in self.children():
            child.__dict__["_name"] = name
            child._name_scopes()

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """(dotted name, parameter), each parameter once."""
        seen: set[int] = set()
        for name, parameter in self._parameters(prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, value in self._members():
            if isinstance(value, Parameter):
                yield prefix + name, value
        for name, child in self.children():
            yield from child._parameters(f"{prefix}{name}.")

    def parameters(self) -> Iterator[Parameter]:
        """Parameters, each once."""
        self.name_children()
        return (p for _, p in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the values by name."""
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take values by name; all are checked before one is written.

        Raises: UsageError listing missing, unexpected and misshapen entries.
        """
        own = dict(self.named_parameters())
        wrong = [f"missing: {n}" for n in own.keys() - state.keys()]
        wrong += [f"unexpected: {n}" for n in state.keys() - own.keys()]
        wrong += [
            f"{n}: expected {own[n].spec}, got {t.spec}"
            for n in own.keys() & state.keys()
            if (t := as_tensor(state[n])).spec != own[n].spec
        ]
        if wrong:
            raise UsageError("the state does not fit:\n  " + "\n  ".join(sorted(wrong)), where=type(self).__name__)
        for name, parameter in own.items():
            parameter.assign(as_tensor(state[name]))
