"""Capture of a torch module: its graph by `torch.export`, with the operators that the table has."""

from __future__ import annotations

import inspect
import operator as python
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._subclasses import fake_tensor
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.fx.experimental import _config, symbolic_shapes
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from graphwright.errors import UsageError
from graphwright.models.errors import CaptureError
from graphwright.models.importing.in_place import without_writes
from graphwright.models.importing.operators import find, operator_name, recurrent
from graphwright.models.importing.sizes import Limit, Shape, named_sizes

shape_config: Any = _config
masked_layers: Any = transformer
GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
"""Operator of a block of code under `no_grad` or `enable_grad`."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured module.

    Attributes:
        exported: the graph, with the signature of its inputs and outputs.
        examples: the tensors of the inputs by name, in the order of the graph.
        sizes: for each input with named sizes its shape, in which sizes that torch fixed are numbers.
        fixed: named sizes that torch fixed, and limits of others: what they are, in words.
        limits: conditions on named sizes under which the graph is what the module computes.
        tensors: parameters, buffers and constants by their names in the graph's signature.
    """

    exported: ExportedProgram
    examples: dict[str, torch.Tensor]
    sizes: dict[str, Shape]
    fixed: dict[str, str]
    limits: tuple[Limit, ...]
    tensors: dict[str, torch.Tensor]


def capture(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, Shape], train: bool
) -> Captured:
    """Capture a module for example arguments; the module is left as it was.

    Raises: UsageError for sizes that do not fit the examples; CaptureError for code that has no graph.
    """
    given = {name: leaf for name, leaf in _argument_names(module, args, kwargs).items()
             if isinstance(leaf, torch.Tensor)}  # fmt: skip
    _check_sizes(sizes, given)
    args, kwargs = _without_ones(module, args, kwargs, sizes)
    kwargs = _in_order(module, kwargs)
    names = _argument_names(module, args, kwargs)
    with _in_mode(module, train), _quiet(), _masks_as_given():
        exported = _exported(module, args, kwargs, sizes)
    inputs = [s.arg for s in exported.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    found = {name: arg for (name, leaf), arg in zip(names.items(), inputs, strict=True)
             if isinstance(leaf, torch.Tensor)}  # fmt: skip
    examples = {name: leaf for name, leaf in names.items() if name in found}
    shapes, fixed, limits = named_sizes(exported, {name: arg.name for name, arg in found.items()}, sizes)
    kept = {limit for limit in limits if limit.decided and not limit.only_one}
    for name in {limit.only_one for limit in limits} - {""}:
        own = [limit for limit in limits if limit.only_one == name]
        with _in_mode(module, train), _quiet():
            if (
                any(limit.decided for limit in own)
                if train
                else not _holds_at_one(module, exported, args, kwargs, sizes, name)
            ):
                kept |= set(own)
    dropped = {f"{limit.text} (limit)" for limit in limits if limit not in kept}
    fixed = {text: how for text, how in fixed.items() if text not in dropped}
    limits = tuple(limit for limit in limits if limit in kept)
    tensors = {name: t for name, t in (*exported.state_dict.items(), *exported.constants.items())
               if isinstance(t, torch.Tensor)}  # fmt: skip
    return Captured(exported, examples, shapes, fixed, limits, tensors)


def _holds_at_one(
    module: torch.nn.Module, exported: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any],
    sizes: Mapping[str, Shape], name: str,
) -> bool:  # fmt: skip
    """Return whether the graph computes what the module does where a named size is 1, though its code branches there.

    Both run on the examples, cut to this size; on the meta device only shapes are compared. True also if the module
    fails for this size.
    """

    def cut(path: Any, leaf: Any) -> Any:
        for axis, n in enumerate(sizes.get(_label(path), ())):
            leaf = leaf.narrow(axis, 0, 1) if n == name else leaf
        return leaf

    labels = list(inspect.signature(module.forward).bind_partial(*args).arguments)
    cut_args = [pytree.tree_map_with_path(lambda path, leaf, label=label: cut((pytree.MappingKey(label), *path), leaf),
                                          arg) for label, arg in zip(labels, args, strict=False)]  # fmt: skip
    cut_kwargs = pytree.tree_map_with_path(cut, dict(kwargs))
    with torch.no_grad():
        try:
            expected = pytree.tree_leaves(module(*cut_args, **cut_kwargs))
        except Exception:  # the code is not meant for this size
            return True
        try:
            found = pytree.tree_leaves(exported.module(check_guards=False)(*cut_args, **cut_kwargs))
        except Exception:
            return False
    return len(expected) == len(found) and all(map(_equal, expected, found))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return a.device.type == "meta" or torch.allclose(a.double(), b.double(), 1e-4, 1e-5, equal_nan=True)


def _exported(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, Shape]
) -> ExportedProgram:
    """Export a module, and decompose the operators that have no row.

    The first try treats sizes as unknown also where torch would assume that they are not 0 or 1, so that a branch of
    the module's code on a size of 1 becomes a condition; the second one is torch's own way.
    Raises: CaptureError.
    """
    dynamic = pytree.tree_map_with_path(
        lambda path, leaf: _dynamic(sizes.get(_label(path)), leaf), _by_name(module, args, kwargs)
    )
    errors: list[Exception] = []
    for oblivious in (True, False):
        try:
            with shape_config.patch(backed_size_oblivious=oblivious):
                made = torch.export.export(
                    module, tuple(args), dict(kwargs), dynamic_shapes=dynamic or None, strict=False
                )
                if steps := _steps(made, _argument_names(module, args, kwargs), sizes):
                    sizes = {k: [None if n in steps else n for n in shape] for k, shape in sizes.items()}
                    return _exported(module, args, kwargs, sizes)
                _detach(made)
                return made if without_writes(made) else _decomposed(made)
        except Exception as error:
            errors.append(error)
    raise _capture_error(module, errors[-1]) from errors[-1]


def _steps(exported: ExportedProgram, leaves: Mapping[str, Any], sizes: Mapping[str, Shape]) -> set[str]:
    """Return the named sizes over whose steps recurrent layers are unrolled."""
    symbols = set[Any]()
    for node in exported.graph.nodes:
        at = recurrent.BATCH_FIRST.get(".".join(operator_name(node.target))) if node.op == "call_function" else None
        if at is not None:
            size = node.args[0].meta["val"].shape[1 if node.args[at] else 0]
            symbols |= size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
    inputs = [s.arg.name for s in exported.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    shapes = {n.name: getattr(n.meta.get("val"), "shape", ()) for n in exported.graph.nodes if n.op == "placeholder"}
    found = set[str]()
    for name, arg in zip(leaves, inputs, strict=True):
        for n, size in zip(sizes.get(name, ()), shapes[arg], strict=False):
            if isinstance(n, str) and isinstance(size, torch.SymInt) and size.node.expr.free_symbols & symbols:
                found.add(n)
    return found


def _detach(exported: ExportedProgram) -> None:
    """Detach what `no_grad` blocks return, since a decomposition drops the blocks; not what no gradient reaches."""
    graph, signature = exported.graph_module.graph, exported.graph_signature
    trained = {s.arg.name for s in signature.input_specs if s.kind in (InputKind.PARAMETER, InputKind.USER_INPUT)}
    reached: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        value = node.meta.get("val")
        whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
        if (node.name in trained if node.op == "placeholder" else reached & set(node.all_input_nodes)) and not whole:
            reached.add(node)
        block = node.args[0] if node.target is python.getitem else None
        if node not in reached or block is None or block.target is not GRAD_MODE or block.args[0]:
            continue
        with graph.inserting_after(node):
            made = graph.call_function(torch.ops.aten.detach.default, (node,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made, lambda user, made=made: user is not made)
        signature.replace_all_uses(node.name, made.name)
        reached.discard(node)
    exported.graph_module.recompile()


def _decomposed(exported: ExportedProgram) -> ExportedProgram:
    """Decompose a graph: by torch's table first, then each operator without a row by its own decomposition, if any."""
    exported, tried = exported.run_decompositions(_decompositions()), set[Any]()
    while True:
        unknown = {n.target for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)
                   for n in part.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}  # fmt: skip
        unknown = {op for op in unknown - tried if find(*operator_name(op)) is None}
        own = {op: rule for op, rule in get_decompositions(list(unknown)).items() if op in unknown}
        if not own:
            _drop_checks(exported.graph_module)
            return exported
        tried |= unknown
        exported = exported.run_decompositions(own)


def _drop_checks(graph_module: torch.fx.GraphModule) -> None:
    """Remove checks of numbers, and what only they read: the specs of the program repeat them."""
    for part in graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in list(part.graph.nodes):
                if node.op == "call_function" and operator_name(node.target)[0] in _CHECKS:
                    part.graph.erase_node(node)
            part.graph.eliminate_dead_code()
            part.recompile()


_CHECKS = {"_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}


# -- arguments ---------------------------------------------------------------------------------------------------------
def _by_name(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the module's parameters."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
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


def _in_order(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return named arguments in the order of the parameters, as `_argument_names` has them; others come last."""
    order = {name: i for i, name in enumerate(inspect.signature(module.forward).parameters)}
    return dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))


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


def _without_ones(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, Shape]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with other examples for named sizes of 0 and 1: entries repeated to distinct primes.

    torch would fix these sizes, and take the branches of the code that are for them alone.
    """
    leaves = _argument_names(module, args, kwargs)
    have = {n: leaves[name].shape[axis] for name, shape in sizes.items() for axis, n in enumerate(shape)
            if isinstance(n, str)}  # fmt: skip
    primes = (p for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37) if p not in have.values())
    wanted = {n: next(primes, 41) for n, size in have.items() if size < 2}

    def larger(path: Any, leaf: Any) -> Any:
        for axis, n in enumerate(sizes.get(_label(path), ())):
            if n in wanted and isinstance(leaf, torch.Tensor):
                if leaf.shape[axis] == 0:
                    leaf = leaf.new_zeros((*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :]))
                leaf = leaf.repeat_interleave(wanted[n], axis)
        return leaf

    if not wanted:
        return args, kwargs
    changed = pytree.tree_map_with_path(larger, _by_name(module, args, kwargs))
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        bound.arguments[name] = changed.get(name, {k: changed[k] for k in value} if isinstance(value, dict) else value)
    return bound.args, bound.kwargs


def _dynamic(shape: Shape | None, leaf: Any) -> Any:
    if shape is None or not isinstance(leaf, torch.Tensor):
        return None
    return {axis: Dim.AUTO for axis, n in enumerate(shape) if isinstance(n, str)} or None


# -- torch -------------------------------------------------------------------------------------------------------------
@cache
def _kept() -> frozenset[Any]:
    return frozenset(op for op in default_decompositions() if find(*operator_name(op)) is not None)


def _decompositions() -> Any:
    """Return torch's decompositions, without those of operators that the table has."""
    table = default_decompositions()
    for op in _kept():
        table.pop(op, None)
    return table


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
    """Context manager: without the warnings of torch's exporter, its log, and its prints of graphs that it gave up."""
    logs = [fake_tensor.log, symbolic_shapes.log]
    before = [log.disabled for log in logs]
    try:
        for log in logs:
            log.disabled = True
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


@contextmanager
def _masks_as_given() -> Iterator[None]:
    """Context manager: torch's transformer layers use a mask as it is, and do not look whether it is the causal one.

    A graph cannot branch on values; which mask it is, recovery finds.
    """
    before = masked_layers._detect_is_causal_mask
    masked_layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        masked_layers._detect_is_causal_mask = before


def _capture_error(module: torch.nn.Module, error: Exception) -> CaptureError:
    """Return torch's error in short: its first sentence, and the line of the module's code."""
    text = re.split(r"\n\s*\n|For more information|To fix", str(error))[0].strip().replace("\n", " ")
    return CaptureError("the module has no graph: its code depends on values, or uses what torch cannot export",
                        where=_user_line(error, module), got=f"{type(error).__name__}: {text[:300]}",
                        fix="give other arguments or fewer names in sizes=, or wrap the module in one that "
                            "computes that part by tensor operations")  # fmt: skip


_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
"""Starts of the paths of files that are not the user's: torch's and those of this package."""


def _user_line(error: BaseException, module: torch.nn.Module) -> str:
    """Return the innermost line outside of torch that an error passed through, else the module's class."""
    found, trace = type(module).__name__, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_FOREIGN):
            found = f"{file.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    users = [(f, n) for f, n in text if not f.startswith(_FOREIGN)]
    return f"{users[-1][0].rpartition('/')[2]}:{users[-1][1]}" if users else found
