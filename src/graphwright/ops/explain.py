"""Text that describes one op: formula, gradient, expansion, kernel, cost."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from textwrap import dedent, indent
from typing import Any

import numpy as np

from graphwright.array.dtype import dtype, float32
from graphwright.array.spec import Spec
from graphwright.errors import GraphwrightError
from graphwright.ops.registry import Op, get


def explain(op: str, *shapes: tuple[int, ...] | Spec, **attrs: Any) -> str:
    """Describe an op: formula, gradient, expansion and kernel; with shapes, also floating-point operations and bytes.

    Args:
        shapes: shapes of float32 operands, or specs. If only those of the first operands are given, the op's sample
            determines the others where it can: `explain("rms_norm", (4, 16, 64))`.
        attrs: attributes; missing ones without a default get the sample's values.
    Raises: UnknownOp; ShapeError, DTypeError, UsageError if the operands do not fit.
    """
    from graphwright.array.cpu import kernel_location  # torch, not needed to look at other fields

    row = get(op)
    kernel = "none: a view" if row.view is not None else kernel_location(row.name) or "none: the expansion runs"
    parts = [
        f"{row.name}({_operands(row)}){_results(row)}\n{indent(dedent('    ' + row.doc).strip(), '  ')}",
        f"gradient\n{_source(row.vjp) or '  none: ' + row.why.get('vjp', '')}",
        f"expansion\n{_source(row.expand) or '  a primitive'}",
        f"kernel\n  {kernel}",
    ]
    if shapes:
        parts.append(
            f"cost\n  {_cost(row, [s if isinstance(s, Spec) else Spec(tuple(s), float32) for s in shapes], attrs)}"
        )
    return "\n\n".join(parts).replace("FORMULAS.", "")  # a formula of array/formulas by its own name


def _operands(row: Op) -> str:
    low, high = row.arity if isinstance(row.arity, tuple) else (row.arity, row.arity)
    count = (
        f"{low} operand{'' if low == 1 else 's'}"
        if low == high
        else f"{low} to {'any' if high is None else high} operands"
    )
    names = [name if value is ... else f"{name}={value!r}" for name, value in row.attrs.items()]
    return ", ".join([count, *names])


def _results(row: Op) -> str:
    return f" -> {', '.join(row.results)}" if row.results else ""


def _source(function: Callable[..., Any] | None) -> str:
    """Return the source of the body of a function in an op's definition."""
    if function is None:
        return ""
    source = dedent(inspect.getsource(function))
    if function.__name__ == "<lambda>":
        body = next(node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda))
        return f"  return {ast.get_source_segment(source, body)}"
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.rstrip().endswith(":")) + 1
    return indent(dedent("\n".join(lines[start:])), "  ")


def _cost(row: Op, specs: Sequence[Spec], attrs: dict[str, Any]) -> str:
    low = row.arity[0] if isinstance(row.arity, tuple) else row.arity
    found = (list(specs), attrs) if len(specs) >= low else _completed(row, specs, attrs)
    if found is None:
        return "give the shapes of all operands"
    ins, given = found
    full = row.complete({**_needed(row, given), **given})
    outs = row.specs(ins, full)
    cost = row.cost(ins, outs, full)
    shown = f"{', '.join(map(repr, ins))} -> {', '.join(map(repr, outs))}"
    return f"{shown}: {cost.flops} FLOPs, {cost.read} bytes read, {cost.write} bytes written"


def _needed(row: Op, given: dict[str, Any]) -> dict[str, Any]:
    """Return values, from the op's test sample, for the required attributes that `given` lacks."""
    sampled = row.sample(np.random.default_rng(0))[1]
    return {name: sampled[name] for name, value in row.attrs.items() if value is ... and name not in given}


def _completed(row: Op, first: Sequence[Spec], attrs: dict[str, Any]) -> tuple[list[Spec], dict[str, Any]] | None:
    """Return (specs of all operands, attributes), given the specs of the `first` operands and some attributes.

    The others are those of a test sample, with sizes changed to match `first`. None if no sample matches.
    """
    for seed in range(20):
        arrays, sampled = row.sample(np.random.default_rng(seed))
        shapes = [np.shape(a) for a in arrays]
        pairs = [(a, b) for s, f in zip(shapes, first, strict=False) for a, b in zip(s, f.shape, strict=False)]
        sizes: dict[int, Any] = dict(pairs)
        fits = all(len(s) == len(f.shape) for s, f in zip(shapes, first, strict=False))
        if not fits or len(set(pairs)) > len(sizes) or not all(n in sizes or n == 1 for s in shapes for n in s):
            continue
        rest = [
            Spec(tuple(sizes.get(n, n) for n in a.shape), first[0].dtype if a.dtype.kind == "f" else dtype(a.dtype))
            for a in map(np.asarray, arrays[len(first) :])
        ]
        given = {**sampled, **attrs}
        try:
            row.specs([*first, *rest], row.complete(given))
        except GraphwrightError:
            continue
        return [*first, *rest], given
    return None
