"""The `emit` field of an op's definition: the op as torch source text, for generated modeling code.

The field is a template or a function. The function maps the operands' source texts and the attributes to the text of
one expression (a tuple for several results), or to None if generated code cannot express this use of the op. Operand
texts are names, attributes, calls or subscripts, so they need no parentheses. Generated code reads a named size `B`
as `run.B`. An op with the field `torch_module` is written as a call of a module that holds its weights where their
keys allow it, and else as its text.

In a template, `{0}` is an operand, `{all}` all operands, `{name}` an attribute as a literal, `{name:sizes}` an
attribute as sizes without brackets: `"{0}.narrow({axis}, -1, 1)"`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf, isnan
from typing import Any

from graphwright.array.dtype import DType
from graphwright.array.sizes import renamed
from graphwright.array.spec import Spec

Emit = Callable[[Sequence[str], Mapping[str, Any]], str | None]


@dataclass(frozen=True, slots=True)
class TorchModule:
    """The field `torch_module` of an op's definition: the op as a call of a torch module in generated code.

    Attributes:
        name: class of the module, one of torch or of the generated file.
        args: function from the specs of the operands and the attributes to the arguments of the class; None for a use
            of the op that the class does not compute.
        weights: operand number -> name of the module's parameter; the call passes the other operands.
        grouped: whether the module holds the op's operand groups, such as the experts of a layer: it has a child for
            each group, with a linear layer for each of its matrices, named as their keys. `args` then returns the size
            of the operands, the widths of each group, and other arguments.
        run: whether the call also passes `run`, the sizes, masks and cache of the forward pass.
    """

    name: str
    args: Callable[[Sequence[Spec], Mapping[str, Any]], Sequence[Any] | None]
    weights: Mapping[int, str] = field(default_factory=dict)
    grouped: bool = False
    run: bool = False


def template(text: str) -> Emit:
    """Return the `emit` function that fills a template: `{0}` is an operand, `{all}` all, `{name}` an attribute."""

    def emit(ins: Sequence[str], attrs: Mapping[str, Any]) -> str:
        return text.format(*ins, all=", ".join(ins), **{name: _Literal(value) for name, value in attrs.items()})

    return emit


class Source(str):
    """Source text as an argument of a module; it is written without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Literal:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        return sizes(self.value) if spec == "sizes" else literal(self.value)


def literal(value: Any) -> str:
    """Format a value as source text; infinities and NaN, for which Python has no literal, as torch's constants."""
    if isinstance(value, float) and (isnan(value) or isinf(value)):
        return "torch.nan" if isnan(value) else f"{'-' if value < 0 else ''}torch.inf"
    if isinstance(value, DType):
        return f"torch.{value.name}"
    return repr(tuple(value) if isinstance(value, list) else value)


def sizes(shape: Sequence[Any]) -> str:
    """Format sizes as source text; a named size `B` becomes `run.B`."""
    return ", ".join(renamed(d, "run.") for d in shape)


def is_primary(text: str) -> bool:
    """Return True if a method call can be appended to this expression without parentheses."""
    return not isinstance(ast.parse(text, mode="eval").body, ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp)


def appends(emit: Emit, operands: int, attrs: Mapping[str, Any]) -> bool:
    """Return True if the op's source text is a method call or a subscript on the first of `operands` operands."""
    text = emit([f"x{i}" for i in range(operands)], attrs) if operands else None
    return text is not None and text.startswith(("x0.", "x0["))
