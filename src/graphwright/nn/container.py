"""Containers: modules made of other modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphwright.autograd import Tensor
from graphwright.nn.module import Module
from graphwright.ops import call


class ModuleList(Module):
    """A list of modules; a plain list as an attribute works as well."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.items = list(modules)

    def _members(self) -> Iterator[tuple[str, Any]]:
        return ((str(i), m) for i, m in enumerate(self.items))

    def append(self, module: Module) -> None:
        """Append a module."""
        self.items.append(module)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Module:
        return self.items[index]

    def __iter__(self) -> Iterator[Module]:
        return iter(self.items)


class ModuleDict(Module):
    """A dict of modules; a plain dict as an attribute works as well."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self.items = dict(modules or {})

    def _members(self) -> Iterator[tuple[str, Any]]:
        return iter(self.items.items())

    def __setitem__(self, name: str, module: Module) -> None:
        self.items[name] = module

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, name: str) -> Module:
        return self.items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items)


class Sequential(ModuleList):
    """Modules applied one after another."""

    def __init__(self, *layers: Module) -> None:
        super().__init__(layers)

    def forward(self, x: Any) -> Any:
        """Apply all in order."""
        for layer in self.items:
            x = layer(x)
        return x


class Residual(Module):
    """x + inner(x); the sum is a junction, so edits can cut or add branches."""

    def __init__(self, inner: Module) -> None:
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """[...] to the same shape."""
        return call("junction", x, self.inner(x))


class Flatten(Module):
    """Merge axes `start` to `end` into one; by default all but the batch axis."""

    def __init__(self, start: int = 1, end: int = -1) -> None:
        self.start, self.end = start, end

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] to [B, product]."""
        return call("flatten", x, start=self.start % x.ndim, end=self.end % x.ndim)
