"""A table of the modules of a network: types, output shapes, parameters and FLOPs, from a trace without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphwright.autograd import Tensor, as_tensor
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.ops import traits
from graphwright.program import Program, trace
from graphwright.program.cost import counted, ones, op_flops
from graphwright.program.kinds import PARAM
from graphwright.report import Report, bytes_text, flops_text, table

_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A module, or a group of nodes of a program.

    Attributes:
        path: dotted path; "" for the whole.
        type: class of the module; for a program the ops of the group.
        outputs: shapes of the results, of the first call.
        parameters: number of entries of its parameters and those of inner modules; a tied one counts at its first path.
        flops: floating-point operations of one run, those of inner modules included.
    """

    path: str
    type: str
    outputs: _Shapes
    parameters: int
    flops: int


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Report):
    """The modules of a network in order, each before its inner modules; figures of the whole are in the first row.

    Attributes:
        rows: a row per module.
        trained: number of entries of the parameters that are trained.
        nbytes: bytes of all parameters.
    """

    rows: tuple[SummaryRow, ...]
    trained: int
    nbytes: int

    @property
    def parameters(self) -> int:
        """Number of entries of all parameters."""
        return self.rows[0].parameters

    @property
    def flops(self) -> int:
        """Floating-point operations of one run."""
        return self.rows[0].flops

    def __str__(self) -> str:
        rows = [
            {"path": row.path or "(all)", "type": row.type, "output": _shapes_text(row.outputs) or None,
             "parameters": row.parameters, "FLOP": row.flops}
            for row in self.rows
        ]  # fmt: skip
        total = f"{self.parameters:,} parameters, {self.trained:,} of them trained, {bytes_text(self.nbytes)}"
        return f"{table(rows, list(rows[0]))}\n{total}; {flops_text(self.flops)} per run"


def summary(target: Module | Program, *inputs: Any, depth: int | None = None) -> Summary:
    """Summarise a module or a program for inputs, of which only shapes and dtypes matter; nothing is run.

    Args:
        target: a module, which is traced in its present mode; or a program, whose modules are the groups of its paths.
        inputs: arguments of the module; inputs of the program in order, which may be left out: named sizes are then 1.
        depth: levels of modules to list; by default all.
    Raises: UsageError for any other target, or inputs that do not fit; TraceError.

    >>> print(gw.summary(gw.nn.Sequential(gw.nn.Linear(4, 3), gw.nn.ReLU()), gw.rand(2, 4)))
    path   type        output  parameters  FLOP
    (all)  Sequential  2x3             15    54
    0      Linear      2x3             15    48
    1      ReLU        2x3              0     6
    15 parameters, 15 of them trained, 60 B; 54 FLOP per run
    """
    if isinstance(target, Module):
        program, types, outputs = _traced(target, inputs)
        variables = list(target.named_parameters())
        weights = [(name, v.numel(), v.data.nbytes, v.requires_grad) for name, v in variables]
        dims = ones(program)
    elif isinstance(target, Program):
        program, dims = target, _dims(target, inputs)
        types, outputs = _groups(program, dims)
        weights = [(program.path(n), s.size, s.nbytes, bool(program.attrs(n)["trainable"]))
                   for n in counted(program)[0] for s in (program.spec(n),)]  # fmt: skip
    else:
        expected = "Module or Program"
        raise UsageError("cannot summarise this", where="summary", expected=expected, got=type(target).__name__)
    sizes = _totals(((path, size) for path, size, _, _ in weights), types)
    flops = _totals(((program.path(n), op_flops(program, n, dims)) for n in counted(program)[1]), types)
    listed = (path for path in types if depth is None or not path or path.count(".") < depth)
    rows = (SummaryRow(path, types[path], outputs.get(path, ()), sizes[path], flops[path]) for path in listed)
    trained = sum(size for _, size, _, wanted in weights if wanted)
    return Summary(tuple(rows), trained, sum(nbytes for _, _, nbytes, _ in weights))


def _traced(module: Module, inputs: Sequence[Any]) -> tuple[Program, dict[str, str], dict[str, _Shapes]]:
    """Return the trace of a module, and types and shapes of results of its modules by path."""
    named, outputs, hooks = dict(module.named_modules()), dict[str, _Shapes](), []
    try:
        for path, inner in named.items():
            hooks.append(inner.register_forward_hook(
                lambda _, args, result, path=path: outputs.setdefault(path, tuple(_shapes(result))) and None
            ))  # fmt: skip
        program = trace(module, *inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return program, {path: type(inner).__name__ for path, inner in named.items()}, outputs


def _shapes(result: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(result, Tensor):
        yield result.shape
    elif isinstance(result, Mapping | tuple | list):
        for part in result.values() if isinstance(result, Mapping) else result:
            yield from _shapes(part)


def _dims(p: Program, inputs: Sequence[Any]) -> dict[str, int]:
    """Return the named sizes that the inputs bind. Raises: UsageError for inputs that do not fit."""
    dims, nodes = dict[str, int](), p.inputs()
    given = [tuple(as_tensor(x).shape) for x in inputs]
    if given and (
        len(given) != len(nodes) or not all(p.spec(n).match(s, dims) for n, s in zip(nodes, given, strict=True))
    ):
        expected = ", ".join(f"{p.path(n)} {p.spec(n)}" for n in nodes)
        raise UsageError("the inputs do not fit the program", where="summary", expected=expected, got=given)
    return ones(p) | dims


def _groups(p: Program, dims: Mapping[str, int]) -> tuple[dict[str, str], dict[str, _Shapes]]:
    """Return the ops, and the shapes that are read outside, of each group of paths and each op outside of groups."""
    inner = {part for n in p.nodes() for part in _prefixes(p.path(n))} - {p.path(n) for n in p.params()}
    groups: dict[str, list[Any]] = {"": []}
    for n in counted(p)[1]:
        if traits(p.op(n)).casts and all(p.op(source) == PARAM for source in p.producers(n)):
            continue  # a weight in another dtype
        path = p.path(n)
        above = [g for g in (*_prefixes(path), path) if g in inner]
        for group in ("", *(above or [path])):
            groups.setdefault(group, []).append(n)
    outputs, results = dict[str, _Shapes](), {v.node for v in p.outputs()}
    for group, nodes in groups.items():
        own = set(nodes)
        ends = [n for n in nodes if n in results or any(c not in own for c in p.consumers(n))]
        outputs[group] = tuple(s.bind(dict(dims)).sizes for n in ends for s in p.specs(n)[:1])
    ops = {group: dict.fromkeys(p.op(n) for n in nodes) for group, nodes in groups.items()}
    types = {g: ", ".join(names) if len(names) <= 3 else f"{len(names)} ops" for g, names in ops.items()}
    return types | {"": "Program"}, outputs


def _prefixes(path: str) -> Iterator[str]:
    at = path.find(".")
    while at >= 0:
        yield path[:at]
        at = path.find(".", at + 1)


def _totals(items: Iterable[tuple[str, int]], paths: Mapping[str, Any]) -> dict[str, int]:
    """Sum (path, number) over all modules that contain the path."""
    found = dict.fromkeys(paths, 0)
    for path, number in items:
        for group in ("", *_prefixes(path), path):
            if group in found:
                found[group] += number
    return found


def _shapes_text(shapes: _Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
