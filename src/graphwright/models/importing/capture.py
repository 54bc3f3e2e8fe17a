"""Capture of a torch module: its graph by `torch.export`, with the operators that the table has."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from graphwright.errors import UsageError
from graphwright.models.errors import CaptureError
from graphwright.models.importing.operators import find

Shape = Sequence[int | str | None]


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured module.

    Attributes:
        exported: the graph, with the signature of its inputs and outputs.
        examples: the tensors of the inputs by name, in the order of the graph.
        sizes: for each input with named sizes its shape, in which sizes that torch fixed are numbers.
        fixed: named sizes that torch fixed, and limits of others: what they are, in words.
        tensors: parameters, buffers and constants by their names in the graph's signature.
        training: whether the module was captured in training mode.
    """

    exported: ExportedProgram
    examples: dict[str, torch.Tensor]
    sizes: dict[str, Shape]
    fixed: dict[str, str]
    tensors: dict[str, torch.Tensor]
    training: bool


def capture(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, Shape], train: bool
) -> Captured:
    """Capture a module for example arguments; the module is left as it was.

    Raises: UsageError for sizes that do not fit the examples; CaptureError for code that has no graph.
    """
    names = _argument_names(module, args, kwargs)
    given = {name: leaf for name, leaf in names.items() if isinstance(leaf, torch.Tensor)}
    _check_sizes(sizes, given)
    dynamic = pytree.tree_map_with_path(
        lambda path, leaf: _dynamic(sizes.get(_label(path)), leaf), _by_name(module, args, kwargs)
    )
    with _in_mode(module, train), _quiet():
        try:
            exported = torch.export.export(
                module, tuple(args), dict(kwargs), dynamic_shapes=dynamic or None, strict=False
            )
            exported = exported.run_decompositions(_decompositions())
        except Exception as error:
            raise _capture_error(module, error) from error
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    inputs = [s.arg for s in exported.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    examples, shapes, fixed = {}, {}, dict[str, str]()
    symbols: dict[Any, str] = {}
    for (name, leaf), arg in zip(names.items(), inputs, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        examples[name] = leaf
        if name not in sizes:
            continue
        found: list[int | str | None] = []
        for wanted, have in zip(sizes[name], placeholders[arg.name].meta["val"].shape, strict=True):
            if not isinstance(wanted, str):
                found.append(wanted)
            elif isinstance(have, int):
                fixed[wanted] = f"{have}, by the module's code"
                found.append(have)
            else:
                symbol = have.node.expr
                first = symbols.setdefault(symbol, wanted)
                if first != wanted:
                    fixed[wanted] = f"{first}, by the module's code"
                found.append(first)
                fixed |= _limits(first, exported.range_constraints.get(symbol))
        shapes[name] = tuple(n if not isinstance(n, str) or n not in fixed or not fixed[n][0].isdigit()
                             else int(fixed[n].split(",")[0]) for n in found)  # fmt: skip
    tensors = {name: t for name, t in (*exported.state_dict.items(), *exported.constants.items())
               if isinstance(t, torch.Tensor)}  # fmt: skip
    return Captured(exported, examples, shapes, fixed, tensors, train)


def _limits(name: str, bounds: Any) -> dict[str, str]:
    """Return the limits of a size that the module's code sets; torch's own lower limit of 2 is none."""
    if bounds is None:
        return {}
    low, high = bounds.lower, bounds.upper
    text = [f"at least {low}"] if low > 2 else []
    text += [f"at most {high}"] if getattr(high, "is_Integer", False) and high < 2**31 else []
    return {f"{name} (limit)": " and ".join(text)} if text else {}


# -- arguments ---------------------------------------------------------------------------------------------------------
def _by_name(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the module's parameters."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    found: dict[str, Any] = {}
    kinds = inspect.signature(module.forward).parameters
    for name, value in bound.items():
        if kinds[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def _argument_names(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the arguments by name: `x`, or `x.0` and `x.key` for those inside of tuples and dicts."""
    try:
        leaves = pytree.tree_flatten_with_path(_by_name(module, args, kwargs))[0]
    except TypeError as error:
        raise UsageError("the arguments do not fit the module's forward", got=str(error)) from error
    return {_label(path): leaf for path, leaf in leaves}


def _label(path: Any) -> str:
    parts = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path)
    return ".".join(map(str, parts))


def _check_sizes(sizes: Mapping[str, Shape], given: Mapping[str, torch.Tensor]) -> None:
    for name, shape in sizes.items():
        if name not in given:
            raise UsageError("sizes are given for an unknown input", where="sizes", expected=", ".join(given), got=name)
        have = tuple(given[name].shape)
        if len(shape) != len(have) or any(isinstance(n, int) and n != m for n, m in zip(shape, have, strict=True)):
            raise UsageError("the sizes of an input do not match its example", where=f"sizes[{name!r}]",
                             expected=f"as many as {have}", got=tuple(shape))  # fmt: skip


def _dynamic(shape: Shape | None, leaf: Any) -> Any:
    if shape is None or not isinstance(leaf, torch.Tensor):
        return None
    return {axis: Dim.AUTO for axis, n in enumerate(shape) if isinstance(n, str)} or None


# -- torch -------------------------------------------------------------------------------------------------------------
@cache
def _kept() -> frozenset[Any]:
    return frozenset(op for op in default_decompositions() if find(*_name(op)) is not None)


def _decompositions() -> Any:
    """Return torch's decompositions, without those of operators that the table has."""
    table = default_decompositions()
    for op in _kept():
        table.pop(op, None)
    return table


def _name(op: Any) -> tuple[str, str]:
    """Return an operator's name, without `aten::`, and its overload."""
    return op._schema.name.partition("::")[2], op._overloadname


@contextmanager
def _in_mode(module: torch.nn.Module, train: bool) -> Iterator[None]:
    """Context manager: put a module and its parts in training or evaluation mode; on exit, each in its own again."""
    before = [(m, m.training) for m in module.modules()]
    module.train(train)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: without the warnings of torch's exporter, which name its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _capture_error(module: torch.nn.Module, error: Exception) -> CaptureError:
    """Return torch's error in short: its first sentence, and the line of the module's code."""
    text = re.split(r"\n\s*\n|For more information|To fix", str(error))[0].strip().replace("\n", " ")
    return CaptureError("the module has no graph: its code depends on values, or uses what torch cannot export",
                        where=_user_line(error, module), got=f"{type(error).__name__}: {text[:300]}",
                        fix="give other arguments or fewer names in sizes=, or wrap the module in one that "
                            "computes that part by tensor operations")  # fmt: skip


def _user_line(error: BaseException, module: torch.nn.Module) -> str:
    """Return the innermost line outside of torch that an error passed through, else the module's class."""
    found, trace = type(module).__name__, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "graphwright" not in file and not file.startswith("<"):
            found = f"{file.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    users = [(f, n) for f, n in text if "/torch/" not in f]
    return f"{users[-1][0].rpartition('/')[2]}:{users[-1][1]}" if users else found
