"""The table of torch's names: which function a name stands for, and where users find it.

`@named` enters a function. Tensor methods (`op_methods.py`), functions of `gw.*` (`top.py`), their stubs and the page
docs/torch.md are made from this table. Functions that call one op come from op definitions (`ops.surface`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, Literal, NamedTuple, TypeVar

from graphwright.autograd.apply import TensorBase
from graphwright.autograd.modes import is_grad_enabled
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import surface

_Function = TypeVar("_Function", bound=Callable[..., Any])

METHOD, TOP = "Tensor", "gw"
"""Homes of a name: a method of Tensor, a function of the package."""


@dataclass(frozen=True, slots=True)
class Name:
    """One name: its function, its homes, whether Tensor has `name_` too, and how it differs from torch's.

    The form `name_` of a function that returns a view changes the shape of its tensor instead of the entries.
    """

    name: str
    function: Callable[..., Any]
    homes: tuple[str, ...] = (METHOD, TOP)
    in_place: bool | Literal["view"] = False
    differs: str = ""


NAMES: dict[str, Name] = {}


class Extremes(NamedTuple):
    """Values along an axis and their indices, as `torch.return_types` names them."""

    values: Any
    indices: Any


def named(
    homes: str = f"{METHOD} {TOP}", name: str = "", *, also: str = "", in_place: bool | Literal["view"] = False,
    scalars: bool = False, differs: str = "",
) -> Callable[[_Function], _Function]:  # fmt: skip
    """Enter a function in the table; parameters `dim` and `keepdim` are also accepted as `axis` and `keepdims`.

    Args:
        name: by default the function's own, without a trailing underscore, which avoids names of builtins.
        also: further names of the same function.
        in_place: whether Tensor gets a method `name_` that stores the result in the tensor; `view` if the result is
            a view.
        scalars: whether a 0-d tensor is taken as a vector of one entry, if an axis is given.
        differs: how behaviour differs from torch's, for the documentation.
    """

    def enter(function: _Function) -> _Function:
        made = with_synonyms(function, name or function.__name__.rstrip("_"), scalars)
        for one in (made.__name__, *also.split()):
            NAMES[one] = Name(one, made, tuple(homes.split()), in_place, differs)
        return made

    return enter


def methods() -> dict[str, Callable[..., Any]]:
    """Return the methods of Tensor by name, in-place forms included."""
    found = {name: row.function for name, row in NAMES.items() if METHOD in row.homes}
    forms = {True: _stored, "view": _reshaped}
    return found | {f"{name}_": forms[row.in_place](row.function, name) for name, row in NAMES.items() if row.in_place}


def add_methods(cls: type) -> None:
    """Give a class the methods entered since it was made, by modules that import it."""
    for name, function in methods().items():
        if not hasattr(cls, name):
            setattr(cls, name, function)


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of the package by name."""
    return {name: row.function for name, row in NAMES.items() if TOP in row.homes}


def _stored(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the method that overwrites its tensor with a function's result."""

    def store(self: Any, *args: Any, **options: Any) -> Any:
        return overwritten(self, function, *args, **options)

    store.__name__, store.__qualname__ = f"{name}_", f"Tensor.{name}_"
    store.__doc__ = f"Run `{name}`, write the result to this tensor, and return it."
    return store


def overwritten(x: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Write the result of a function of `x` into x, and return x. Raises: DTypeError for floats in a tensor of ints."""
    # while taping, the function reads a copy: its gradient must not see the new values
    source = x.clone() if x.requires_grad and is_grad_enabled() else x
    made = function(source, *args, **options)
    if made.dtype.is_float and not x.dtype.is_float:
        what = "an in-place operation would store floats in a tensor that is not floating"
        raise DTypeError(what, expected=x.dtype, got=made.dtype)
    return x.copy_(made)


def _reshaped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the method that replaces its tensor by a view of it."""

    def reshape(self: Any, *args: Any, **options: Any) -> Any:
        made = function(self, *args, **options)
        if self.is_variable or (self.requires_grad and self.is_leaf and is_grad_enabled()):
            raise UsageError("an in-place change of shape of a leaf", where=f"{name}_", fix=f"use {name}()")
        self.data, self.node, self.port, self.requires_grad = made.data, made.node, made.port, made.requires_grad
        return self

    reshape.__name__, reshape.__qualname__ = f"{name}_", f"Tensor.{name}_"
    reshape.__doc__ = f"Make this tensor the view that `{name}` returns, and return it."
    return reshape


# -- synonyms of parameters --------------------------------------------------------------------------------------------
class _Unset:
    def __repr__(self) -> str:
        return "..."


UNSET: Any = _Unset()
SYNONYMS = {"dim": "axis", "keepdim": "keepdims"}
"""Torch's name of a parameter -> numpy's, accepted as well."""


def with_synonyms(function: _Function, name: str, scalars: bool = False) -> _Function:
    """Return the function under a name; each parameter of `SYNONYMS` may be given by either of its names.

    With `scalars`, 0-d tensors become vectors before the call if there is an axis, and the results 0-d after it.
    """
    function.__name__ = function.__qualname__ = name
    declared = signature(function)
    twins = {p: SYNONYMS[p] for p in declared.parameters if p in SYNONYMS}
    if not twins:
        return function
    scope: dict[str, Any] = {"inner": function, "unset": UNSET, "resolved": resolved, "lacking": lacking}
    head, passed, checks, starred, optional = [], [], [], False, False
    for p in declared.parameters.values():
        if p.kind is Parameter.KEYWORD_ONLY and not starred:
            head.append("*")
            starred = True
        default = p.default
        required = default is Parameter.empty
        if p.name in twins:
            scope[f"default_{p.name}"] = default
            given, missing = twins[p.name], f" or {p.name} is unset" if required else ""
            arguments = f"'{name}', '{p.name}', {p.name}, {given}, default_{p.name}"
            checks.append(f"    if {given} is not unset{missing}:\n        {p.name} = resolved({arguments})\n")
            optional |= required
        elif required and optional:  # it follows a parameter that may be given by its synonym
            checks.append(f"    if {p.name} is unset:\n        raise lacking('{name}', '{p.name}')\n")
        if required and optional:
            default = UNSET
        if default is Parameter.empty:
            head.append(p.name)
        else:
            scope[f"_{p.name}"] = default
            head.append(f"{p.name}=_{p.name}")
        passed.append(f"{p.name}={p.name}" if p.kind is Parameter.KEYWORD_ONLY else p.name)
    head += [*(() if starred else ("*",)), *(f"{given}=unset" for given in twins.values())]
    if scalars:
        scope["lifted"] = lifted
        operand = next(iter(declared.parameters))
        lift = f"return lifted(inner, {', '.join(passed)})"
        checks.append(f"    if isinstance(dim, int) and not getattr({operand}, 'shape', True):\n        {lift}\n")
    source = f"def {name}({', '.join(head)}):\n{''.join(checks)}    return inner({', '.join(passed)})"
    exec(compile(source, __file__, "exec"), scope)  # in this file, so that a tape names the user's line, not this
    made = scope[name]
    made.__doc__, made.__module__, made.__signature__ = function.__doc__, function.__module__, declared
    return made


def lifted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function with its 0-d tensors as vectors of one entry; return vectors of one entry as 0-d tensors."""
    lined = [a.unsqueeze(0) if isinstance(a, TensorBase) and not a.shape else a for a in args]  # pyright: ignore[reportAttributeAccessIssue]  # a Tensor
    made = function(*lined, **options)
    if isinstance(made, tuple):
        return type(made)(*(t.squeeze(0) if t.shape == (1,) else t for t in made))
    return made.squeeze(0) if made.shape == (1,) else made


def lacking(where: str, name: str) -> UsageError:
    """Return the error for a call without a required parameter."""
    return UsageError("a parameter is missing", where=where, expected=name)


def resolved(where: str, name: str, given: Any, twin: Any, default: Any) -> Any:
    """Return the value of a parameter with two names. Raises: UsageError if both are given, or none is."""
    if twin is UNSET:
        raise lacking(where, name)
    if given is not UNSET and given is not default:
        both = f"{name} and {SYNONYMS[name]}"
        raise UsageError("two names of one parameter are given", where=where, expected=f"{name} alone", got=both)
    return twin


def stub(name: str, function: Callable[..., Any], method: bool) -> str:
    """Return the line of a stub: the signature with the synonyms, and the documentation."""
    declared = signature(function)
    parts, starred, first, optional = [], False, True, False
    for p in declared.parameters.values():
        if p.kind is Parameter.VAR_POSITIONAL:
            parts.append(f"*{p.name}: Any")
            starred = True
            continue
        if p.kind is Parameter.VAR_KEYWORD:
            parts.append(f"**{p.name}: Any")
            continue
        if p.kind is Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        if first and method:
            parts.append("self")
        else:
            optional |= p.name in SYNONYMS or p.default is not Parameter.empty
            value = " = ..." if optional else ""
            parts.append(f"{p.name}: Any{value}")
        first = False
    if twins := [SYNONYMS[p] for p in declared.parameters if p in SYNONYMS]:
        parts += [*(() if starred else ("*",)), *(f"{given}: Any = ..." for given in twins)]
    return f'def {name}({", ".join(parts)}) -> {_returned(declared)}:\n    """{function.__doc__}"""'


def _returned(declared: Signature) -> str:
    text: str = declared.return_annotation
    known = {"Tensor", "bool", "int", "Extremes", "tuple[Tensor, ...]", "tuple[Tensor, Tensor]", "None"}
    return {"bool": "builtins.bool", "int": "builtins.int"}.get(text, text) if text in known else "Any"


def _enter_ops(table: Mapping[str, Callable[..., Any]]) -> None:
    for name, function in table.items():
        function.__annotations__["return"] = "Tensor"
        NAMES[name] = Name(name, function, in_place=not name.startswith("is"))


_enter_ops(surface.methods())
