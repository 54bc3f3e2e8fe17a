"""Modules that contain modules or parameters: lists, dicts, sequences and residual sums, with torch's methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from operator import index as as_index
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

from graphwright.array import changes
from graphwright.autograd import Parameter, Tensor, active_recorder
from graphwright.errors import IndexOutOfRange, UsageError
from graphwright.nn.module import Module
from graphwright.ops import call

_Part = TypeVar("_Part", Module, Parameter)


class _Container(Module, Generic[_Part]):
    """Base of modules whose parts have names and are attributes too; a trace is valid for the parts that it read."""

    _kind: ClassVar[type] = Module
    _held: dict[str, _Part]

    @property
    def _parts(self) -> dict[str, _Part]:
        recorder = active_recorder.get()
        if recorder is not None:
            recorder.assume(lambda: tuple(map(id, self._held.values())))
        return self._held

    def _replace(self, items: Iterable[tuple[Any, Any]]) -> None:
        """Replace all parts; all are checked before. Raises: UsageError for an invalid name or part."""
        self._held = dict(map(self._checked, items))
        changes.rise()

    def _checked(self, item: tuple[Any, Any]) -> tuple[str, _Part]:
        (name, part), where = item, type(self).__name__
        if not isinstance(name, str) or not name or "." in name or hasattr(type(self), name):
            expected = "text without dots, not the name of a method"
            raise UsageError("a part cannot have this name", where=where, expected=expected, got=repr(name))
        part = Parameter(part) if self._kind is Parameter and not isinstance(part, Module | Parameter) else part
        if not isinstance(part, self._kind):
            expected, got = self._kind.__name__, type(part).__name__
            raise UsageError("this cannot be a part", where=f"{where}[{name!r}]", expected=expected, got=got)
        return name, cast(_Part, part)

    def _members(self) -> Iterator[tuple[str, Any]]:
        return iter(self._held.items())

    def __getattr__(self, name: str) -> _Part:
        held = self.__dict__.get("_held", {})
        if name in held:
            return held[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or part {name!r}")

    def __len__(self) -> int:
        return len(self._parts)


# -- lists -------------------------------------------------------------------------------------------------------------
class _List(_Container[_Part]):
    """Base of lists, whose parts are named by their indices."""

    def __init__(self, parts: Iterable[Any] | None = None) -> None:
        self._replace(_numbered(parts or ()))

    def __iter__(self) -> Iterator[_Part]:
        return iter(self._parts.values())

    @overload
    def __getitem__(self, index: int) -> _Part: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        return type(self)([*self][index]) if isinstance(index, slice) else [*self][self._at(index)]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        parts = [*self]
        parts[self._at(index)] = value
        same = len(parts) == len(self)
        self._replace(zip(self._held, parts, strict=True) if same else _numbered(parts))

    def __delitem__(self, index: int | slice) -> None:
        parts = [*self]
        del parts[self._at(index)]
        self._replace(_numbered(parts))

    def __add__(self, other: Iterable[Any]) -> Self:
        return type(self)([*self, *other])

    def __iadd__(self, other: Iterable[Any]) -> Self:
        return self.extend(other)

    def _at(self, index: Any) -> Any:
        if isinstance(index, slice):
            return index
        at, count = as_index(index), len(self)
        if not -count <= at < count:
            expected = f"{-count} to {count - 1}"
            raise IndexOutOfRange("no part has this index", where=type(self).__name__, expected=expected, got=at)
        return at

    def append(self, part: Any) -> Self:
        """Append a part; return the list."""
        return self.extend([part])

    def extend(self, parts: Iterable[Any]) -> Self:
        """Append parts; return the list."""
        self._replace([*self._parts.items(), *_numbered(parts, len(self))])
        return self

    def insert(self, index: int, part: Any) -> Any:
        """Insert a part before an index, as a list does; the parts are renumbered."""
        parts = [*self]
        parts.insert(index, part)
        self._replace(_numbered(parts))

    def pop(self, index: int = -1) -> _Part:
        """Remove and return a part; the parts are renumbered. Raises: IndexOutOfRange."""
        part = self[index]
        del self[index]
        return part


def _numbered(parts: Iterable[Any], start: int = 0) -> list[tuple[str, Any]]:
    return [(str(i), part) for i, part in enumerate(parts, start)]


class ModuleList(_List[Module]):
    """A list of modules; an ordinary list as an attribute works as well."""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__(modules)


class ParameterList(_List[Parameter]):
    """A list of parameters; other tensors and arrays become parameters."""

    _kind = Parameter

    def __init__(self, values: Iterable[Any] | None = None) -> None:
        super().__init__(values)


class Sequential(_List[Module]):
    """Modules applied one after another, given in order, or as a dict from their names."""

    def __init__(self, *args: Module | Mapping[str, Module]) -> None:
        first = args[0] if len(args) == 1 else None
        self._replace(first.items() if isinstance(first, dict) else _numbered(args))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return type(self)(dict([*self._parts.items()][index]))
        return super().__getitem__(index)

    def __add__(self, other: Iterable[Any]) -> Self:
        return type(self)(*self, *other)

    def insert(self, index: int, part: Any) -> Self:
        """Insert a part before an index; the parts are renumbered. Return the sequence."""
        super().insert(index, part)
        return self

    def __mul__(self, times: int) -> Self:
        return type(self)(*[*self] * times)

    def __imul__(self, times: int) -> Self:
        return self.extend([*self] * (times - 1))

    def forward(self, x: Any) -> Any:
        """Apply all modules in order."""
        for module in self:
            x = module(x)
        return x


# -- dicts -------------------------------------------------------------------------------------------------------------
class _Dict(_Container[_Part], MutableMapping[str, _Part]):
    """Base of dicts, with all methods of a dict."""

    def __init__(self, parts: Any = None) -> None:
        self._replace(dict(parts or {}).items())

    def __getitem__(self, key: str) -> _Part:
        return self._parts[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        del self._held[key]
        changes.rise()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __eq__(self, other: object) -> bool:
        return self is other  # as modules are, not as mappings

    def __hash__(self) -> int:
        return id(self)

    def __or__(self, other: Mapping[str, Any]) -> Self:
        return type(self)({**self, **other})

    def __ior__(self, other: Mapping[str, Any]) -> Self:
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set parts from a mapping or from pairs, all or none."""
        self._replace({**self._held, **dict(*args, **kwargs)}.items())

    def popitem(self) -> tuple[str, _Part]:
        """Remove and return the last key and its part. Raises: KeyError for an empty dict."""
        key = next(reversed(self._held), "")
        return key, self.pop(key)

    def copy(self) -> Self:
        """Return a new dict with the same parts."""
        return type(self)(self)


class ModuleDict(_Dict[Module]):
    """A dict of modules; an ordinary dict as an attribute works as well."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] | None = None) -> None:
        super().__init__(modules)


class ParameterDict(_Dict[Parameter]):
    """A dict of parameters; other tensors and arrays become parameters."""

    _kind = Parameter

    def __init__(self, parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None) -> None:
        super().__init__(parameters)

    def fromkeys(self, keys: Iterable[str], default: Any = None) -> ParameterDict:
        """Return a dict with the same value at each key."""
        return ParameterDict(dict.fromkeys(keys, default))


# -- sums --------------------------------------------------------------------------------------------------------------
class Residual(Module):
    """x + inner(x); the sum is a junction, so edits can cut or add branches."""

    def __init__(self, inner: Module) -> None:
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return x + inner(x)."""
        return call("junction", x, self.inner(x))
