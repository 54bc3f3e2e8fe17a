"""Generated functions of the public surface: Tensor methods and `nn.functional` functions.

One is generated for each op whose definition sets the field `method` or `functional`. The op's operands,
attributes and defaults give the signature; the first paragraph of its docstring is the documentation.
`scripts/write_stubs.py` writes the same signatures as `.pyi` files for type checkers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import cleandoc
from typing import Any

from graphwright.ops.attributes import annotation
from graphwright.ops.call import call
from graphwright.ops.registry import OPS, Op


def methods() -> dict[str, Callable[..., Any]]:
    """Return the functions that are methods of tensors too, by name: one for each op with the field `method`."""
    return {name: _compiled(row, name, row.operands) for name, row in _with("method")}


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of tensors by name, one for each op with the field `functional`."""
    return {name: _compiled(row, name, row.operands) for name, row in _with("functional")}


def _compiled(row: Op, name: str, operands: tuple[str, ...]) -> Callable[..., Any]:
    given = ", ".join([repr(row.name), *operands, *([_passed(row)] if row.attrs else [])])
    made = _run(f"def {name}({', '.join(operands)}{_defaults(row)}):\n    return call({given})", name, call=call)
    made.__doc__ = _doc(row)
    return made


def _run(source: str, name: str, **scope: Any) -> Callable[..., Any]:
    exec(compile(source, __file__, "exec"), scope)  # in this file, so that a tape names the user's line, not this
    return scope[name]


def _with(field: str) -> Iterator[tuple[str, Op]]:
    return ((name, row) for row in OPS.values() if (name := getattr(row, field)) is not None)


def _defaults(row: Op, types: bool = False) -> str:
    kinds = {name: f": {annotation(kind.kind)} = " if types else "=" for name, kind in row.schema.items()}
    return "".join(f", {name}{kinds[name]}{value!r}" for name, value in row.attrs.items())


def _passed(row: Op) -> str:
    return ", ".join(f"{name}={name}" for name in row.attrs)


def _doc(row: Op) -> str:
    return cleandoc(row.doc).split("\n\n")[0]


def function_stubs() -> str:
    """Return the signatures and docstrings of the generated functions, as lines of a module."""
    return _stubs("functional", lambda row: ", ".join(f"{o}: Tensor" for o in row.operands))


def _stubs(field: str, operands: Callable[[Op], str]) -> str:
    return "\n".join(
        f'def {name}({operands(row)}{_defaults(row, types=True)}) -> Tensor:\n    """{_doc(row)}"""'
        for name, row in _with(field)
    )
