"""Arguments checked against the annotations of their function, so that a wrong type is named before any work.

`checked` is the decorator, `matches` the rule for one value, `words` the text of an annotation in an error. Annotations
are evaluated at the first call; a name that is imported for type checkers only is imported if no base class of the
value has this name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from graphwright.errors import UsageError, shown

T = TypeVar("T", bound=Callable[..., Any])
_CONSTRUCTORS = ("__init__", "__call__")


def checked(target: T) -> T:
    """Check the arguments of each call against the annotations: a decorator for functions, and for all of a class.

    Of a class it checks the constructor, calls of an instance and the public methods. Options that arrive as
    `**options` are left to the settings class which they are for. A call raises UsageError for the first argument that
    does not match; annotations that cannot be checked match anything.
    """
    if not isinstance(target, type):
        return cast(T, _checked(target))
    for name, member in [*vars(target).items()]:
        if inspect.isfunction(member) and (name[0] != "_" or name in _CONSTRUCTORS):
            setattr(target, name, _checked(member))
    return cast(T, target)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    names: list[str] = []
    hints: dict[str, Any] = {}
    passed: dict[str, set[type]] = {}

    def check(name: str, value: Any) -> None:
        hint = hints.get(name, Any)
        if not matches(value, hint):
            raise wrong(name, value, hint)
        if hint is Any or any(_by_type(part) and matches(value, part) for part in _parts(hint)):
            passed.setdefault(name, set()).add(type(value))

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not names:
            _read(function, names, hints)
        for name, value in zip(names, args, strict=False):
            if type(value) not in passed.get(name, ()):
                check(name, value)
        for name, value in named.items():
            if type(value) not in passed.get(name, ()):
                check(name, value)
        return function(*args, **named)

    return call


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _by_type(hint: Any) -> bool:
    """Return whether the type of a value decides if it matches."""
    return isinstance(hint, type) and get_origin(hint) is None and hint not in _ARRAYS


def _read(function: Callable[..., Any], names: list[str], hints: dict[str, Any]) -> None:
    """Fill in the names of positional parameters, and the annotations of parameters that can be checked."""
    parameters = [*inspect.signature(function, follow_wrapped=True).parameters.values()]
    written, home = inspect.unwrap(function).__annotations__, inspect.unwrap(function).__globals__
    for p in parameters:
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name in written:
            hints[p.name] = evaluated(written[p.name], home)
    names += [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)] or [""]


def wrong(name: str, value: object, hint: Any) -> UsageError:
    """Return a UsageError for an argument that does not match its annotation."""
    ranges = [m for part in (hint, *get_args(hint)) for m in getattr(part, "__metadata__", ())]
    what = "is out of range" if ranges and isinstance(value, Real) else "has another type"
    return UsageError(f"the argument {what}", where=name, expected=words(hint), got=shown(value))


def matches(value: Any, hint: Any) -> bool:
    """Return whether a value matches an evaluated annotation.

    True and False are no numbers. A text is no list of texts. Tuples may be given as lists, and lists as arrays. Items
    of lists and dicts are checked, those of other iterables are not.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in _ARRAYS and isinstance(value, list | tuple):
        return _each_matches(value, args[0])
    if origin in (Union, UnionType):
        return any(matches(value, part) for part in args)
    if origin is Annotated:
        sets = (m for m in hint.__metadata__ if hasattr(type(m), "__contains__"))
        return matches(value, args[0]) and all(value in m for m in sets)
    if origin is Literal:
        return any(type(value) is type(a) and value == a for a in args)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    kind = origin or hint
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's, which settings do not import
    if kind is Callable:
        return callable(value)
    if kind is tuple:
        if not isinstance(value, list | tuple) or not args:
            return isinstance(value, list | tuple)
        if args[1:] == (...,):
            return _each_matches(value, args[0])
        return len(value) == len(args) and all(map(matches, value, args))
    if not isinstance(kind, type):
        return True
    try:
        fits = isinstance(value, kind) or (kind in _ARRAYS and _is_list(value, args))
    except TypeError:  # a protocol
        return True
    if issubclass(kind, Mapping):
        return fits and (not args or all(matches(k, args[0]) and matches(v, args[1]) for k, v in value.items()))
    if issubclass(kind, Iterable) and kind.__module__ in ("collections.abc", "builtins") and kind is not str:
        fits = fits and not isinstance(value, str | bytes)
        if hasattr(value, "__array__") and kind.__module__ == "collections.abc":
            return _is_list(value, args)
        return fits and (not isinstance(value, list | tuple) or not args or _each_matches(value, args[0]))
    return fits


def _is_list(value: Any, args: Sequence[Any]) -> bool:
    """Return whether an array can be read as a list of items that match."""
    rows = hasattr(value, "__array__") and getattr(value, "shape", ())
    return bool(rows) and (not args or not rows[0] or matches(value[0], args[0]))


def _each_matches(values: Sequence[Any], hint: Any) -> bool:
    if set(map(type, values)) <= {part for part in _parts(hint) if _by_type(part)}:  # a long list of ids or texts
        return True
    return all(matches(value, hint) for value in values)


_NUMBERS: dict[Any, type] = {int: Integral, float: Real}
_ARRAYS = (Sequence, Iterable)
_WORDS: dict[Any, str] = {
    Any: "anything", NoneType: "None", str: "a text", bool: "True or False", int: "a whole number", float: "a number",
    Callable: "a function", PathLike: "a path", tuple: "a tuple", list: "a list",
}  # fmt: skip


def words(hint: Any) -> str:
    """Return what an evaluated annotation allows, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(words, args)))
    if origin is Annotated:
        return " and ".join(str(m) for m in hint.__metadata__ if hasattr(type(m), "__contains__")) or words(args[0])
    if origin is Literal:
        return ", ".join(map(str, args))
    kind = origin or hint
    if kind is tuple and args and args[1:] != (...,):
        return f"({', '.join(map(words, args))})"
    if kind in _WORDS and (kind not in (tuple, list) or not args):
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Iterable) and kind.__module__ in ("collections.abc", "builtins"):
        plain = [words(a).removeprefix("a ").removeprefix("an ") for a in args if a is not ...]
        if issubclass(kind, Mapping):
            return f"a dict from {plain[0]} to {plain[1]}" if len(plain) == 2 else "a dict"
        return f"a list of: {plain[0]}" if plain and plain[0] != "anything" else "a list"
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


# -- names that are imported for type checkers only --------------------------------------------------------------------
class _Later(type):
    """Metaclass of the classes that stand for a name which the module `module` imports for type checkers only."""

    module = ""

    def __getitem__(cls, _: Any) -> _Later:
        return cls

    def __instancecheck__(cls, value: object) -> bool:
        return any(base.__name__ == cls.__name__ for base in type(value).__mro__) or matches(value, cls.meaning())

    def meaning(cls) -> Any:
        """Import what the name stands for; Any if the module does not import it."""
        module = sys.modules[cls.module]
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == cls.__name__:
                        return getattr(import_module(node.module), alias.name, Any)
        return Any


class _Names(dict[str, Any]):
    """Names of annotations that the module `home` does not have when it runs."""

    def __init__(self, home: Mapping[str, Any]) -> None:
        super().__init__()
        self.home = home

    def __missing__(self, name: str) -> Any:
        if name in self.home or hasattr(builtins, name):
            raise KeyError(name)
        return _Later(name, (), {"module": self.home["__name__"]})


def evaluated(written: Any, home: dict[str, Any]) -> Any:
    """Evaluate an annotation of a module with the globals `home`; Any if that is impossible."""
    if not isinstance(written, str):
        return NoneType if written is None else written
    try:
        hint = eval(written, home, _Names(home))
    except (NameError, TypeError, AttributeError, SyntaxError):
        return Any
    return NoneType if hint is None else hint
