"""Types of op attributes: an annotation and a default per attribute, compiled into a check of values.

An annotation is `bool`, `int` (64 bits), `float`, `str`, `DType`, None, a `Literal` of strings, a `tuple[...]`, a union
of these, or `Annotated[kind, limit]`, where valid values are `in` the limit: a `settings.Range`, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from graphwright.array.dtype import DType, dtype
from graphwright.array.sizes import Size, is_dim_text
from graphwright.errors import UsageError
from graphwright.settings import Range

_INT64 = 1 << 63
_WORDS = {bool: "True or False", int: "an int of 64 bits", float: "a float", str: "a string", DType: "a dtype",
          NoneType: "None"}  # fmt: skip


class _DimText:
    def __contains__(self, value: object) -> bool:
        return is_dim_text(value)

    def __str__(self) -> str:
        return "the name of a size"


StaticSize = Annotated[int, Range(0, _INT64 - 1, whole=True)]
NamedSize = Annotated[str, _DimText()]
Dimension = StaticSize | NamedSize
Shape = tuple[Dimension, ...]
AxisList = tuple[int, ...]
PerAxis = int | tuple[int, ...]
"""One int for all axes, or one per axis."""


@dataclass(frozen=True, slots=True)
class Attr:
    """An attribute of an op: the annotation of its values, and its default; `...` marks a required attribute.

    An attribute that an op got after programs were saved is `added`: hashes leave it out if it has its default, and
    files may lack it.
    """

    kind: Any
    default: Any = ...
    added: bool = False

    def fits(self, value: Any) -> bool:
        """Return True if a value has exactly the annotated type: no int for a float, no bool for an int."""
        return _compiled(self.kind)(value)

    def normal(self, value: Any, what: str, where: str | None) -> Any:
        """Convert a value: numpy scalars, ints for floats, lists, names of dtypes. Raises: UsageError, DTypeError."""
        found = _converted(self.kind, value)
        if not self.fits(found):
            raise self.error(value, what, where)
        return found

    def error(self, value: Any, what: str, where: str | None) -> UsageError:
        """Return the error for a value that does not fit; `what` names the attribute."""
        return UsageError(f"{what} has an invalid value", where=where, expected=words(self.kind), got=repr(value)[:120])


def all_fit(schema: Mapping[str, Attr]) -> Callable[..., bool]:
    """Return a function that takes all attributes as keywords and tells whether each `fits`."""
    checks = " and ".join(_condition(kind.kind, name) for name, kind in schema.items())
    return _lambda(", ".join(schema), checks or "True")


def names_sizes(kind: Any) -> bool:
    """Return True if values of an annotation may be sizes computed from names, alone or in tuples."""
    return (get_origin(kind) is Annotated and isinstance(get_args(kind)[1], _DimText)) or any(
        map(names_sizes, get_args(kind))
    )


@cache
def _compiled(kind: Any) -> Callable[[Any], bool]:
    return _lambda("v", _condition(kind, "v"))


def _lambda(arguments: str, text: str) -> Callable[..., bool]:
    return eval(f"lambda {arguments}: {text}", {"inf": inf, "is_dim_text": is_dim_text, "DType": DType})


def _condition(kind: Any, v: str) -> str:
    """Return source text that tests whether the value named `v` fits an annotation.

    Raises: UsageError for an annotation that is not supported.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return f"({' or '.join(_condition(part, v) for part in args)})"
    if origin is Literal:
        return f"(type({v}) is str and {v} in {args!r})"
    if origin is Annotated and isinstance(limit := args[1], Range):
        least, most = (-_INT64 - 1, _INT64) if args[0] is int else (-inf, inf)  # outside of the values
        low, high = max(limit.low, least), min(limit.high, most)
        lower, upper = "<" if limit.above or low == least else "<=", "<" if high == most else "<="
        return f"(type({v}) is {args[0].__name__} and {low!r} {lower} {v} {upper} {high!r})"
    if origin is Annotated:
        return f"is_dim_text({v})"
    if origin is tuple and args[-1] is ...:
        inner = f"{v}_"
        return f"(type({v}) is tuple and all([{_condition(args[0], inner)} for {inner} in {v}]))"
    if origin is tuple:
        parts = [_condition(part, f"{v}[{i}]") for i, part in enumerate(args)]
        return f"(type({v}) is tuple and len({v}) == {len(args)} and {' and '.join(parts)})"
    if kind not in _WORDS:
        raise UsageError("unsupported annotation of an attribute", got=kind)
    if kind in (bool, NoneType):
        return "(" + " or ".join(f"{v} is {one}" for one in ((True, False) if kind is bool else (None,))) + ")"
    return f"(type({v}) is {kind.__name__}{f' and {-_INT64} <= {v} < {_INT64}' if kind is int else ''})"


def words(kind: Any) -> str:
    """Describe the values of an annotation."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(words, args))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is Annotated:
        return ", ".join(map(str, kind.__metadata__))
    if origin is tuple and args[-1] is ...:
        return f"a tuple, each entry {words(args[0])}"
    return f"a tuple of ({', '.join(map(words, args))})" if origin is tuple else _WORDS[kind]


def annotation(kind: Any) -> str:
    """Return the source text of an annotation, without limits."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(annotation, args)))
    if origin is Annotated:
        return annotation(args[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is tuple:
        return f"tuple[{', '.join('...' if a is ... else annotation(a) for a in args)}]"
    return "None" if kind is NoneType else kind.__name__


def _converted(kind: Any, value: Any) -> Any:
    """Convert a value to an annotation if possible, else return it unchanged. Raises: DTypeError."""
    if _compiled(kind)(value):
        return value
    if isinstance(value, Size):
        return value.dim if _compiled(kind)(value.dim) else _converted(kind, value.__index__())
    if isinstance(value, np.generic):
        return _converted(kind, value.item())
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        found = (_converted(part, value) for part in args)
        return next((v for v in found if _compiled(kind)(v)), value)
    if origin is Annotated:
        return _converted(args[0], value)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1] is ... else args
        return tuple(map(_converted, kinds, value)) if len(kinds) == len(value) else value
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < _INT64:
        return float(value)
    if kind in (int, float, str) and isinstance(value, kind) and not isinstance(value, bool):
        return kind(value)
    return dtype(value) if kind is DType else value
