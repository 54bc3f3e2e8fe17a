"""Functions of functions under torch's names (`gw.func`): gradients, Jacobians, Hessians, products with them, vmap.

All run on the tape, forward products by two reverse passes, so they nest. Arguments and results may be tensors, or
dicts, lists and tuples of tensors. Results are on the tape if an argument that is differentiated requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphwright.autograd import engine
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.create import zeros_like
from graphwright.autograd.functions import stack
from graphwright.autograd.modes import enable_grad
from graphwright.autograd.nested import leaves_of, with_leaves
from graphwright.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

__all__ = ["grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp", "vjp", "vmap"]
_Argnums = int | tuple[int, ...]


class _Call:
    """One call of a function on arguments of which some are differentiated.

    Attributes:
        wanted: the arguments that are differentiated, as one tree.
        inputs: their tensors, new on the tape.
        result: what the function returned.
        outer: whether results of gradients must be on the tape.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], argnums: _Argnums, options: Any) -> None:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not numbers or not all(-len(args) <= n < len(args) for n in numbers):
            expected = f"indices of {len(args)} arguments"
            raise UsageError("argnums is out of range", where="gw.func", expected=expected, got=argnums)
        self.wanted = args[numbers[0]] if isinstance(argnums, int) else tuple(args[n] for n in numbers)
        given = leaves_of(self.wanted)
        self.outer = any(t.requires_grad for t in given)
        with enable_grad():
            self.inputs = [t.clone() if t.requires_grad else t.detach().requires_grad_() for t in given]
            tree = with_leaves(self.wanted, self.inputs)
            passed = list(args)
            for n, value in zip(numbers, (tree,) if isinstance(argnums, int) else tree, strict=True):
                passed[n] = value
            self.result = function(*passed, **options)

    def pulled(self, outputs: Sequence[Tensor], seeds: Sequence[Any] | None, keep: bool = False) -> list[Tensor]:
        """Return the gradients of the inputs, zeros for an input on which the outputs do not depend."""
        used = [i for i, t in enumerate(outputs) if t.requires_grad]
        if not used:
            return [zeros_like(t) for t in self.inputs]
        found = engine.grad(
            [outputs[i] for i in used], self.inputs, None if seeds is None else [seeds[i] for i in used],
            retain_graph=True if keep else None, create_graph=self.outer, allow_unused=True,
        )  # fmt: skip
        return [zeros_like(t) if g is None else g for t, g in zip(self.inputs, found, strict=True)]

    def detached(self, tree: Any) -> Any:
        """Return results of the function off the tape, unless an argument was on it."""
        return tree if self.outer else with_leaves(tree, [t.detach() for t in leaves_of(tree)])


def _number(value: Any, where: str) -> Tensor:
    if not isinstance(value, TensorBase) or value.ndim:
        got = value.spec if isinstance(value, TensorBase) else type(value).__name__
        raise ShapeError("the function did not return a number", where=where, expected="a 0-d tensor", got=got)
    return value  # pyright: ignore[reportReturnType]  # a Tensor


# -- gradients ---------------------------------------------------------------------------------------------------------
def grad_and_value(func: Callable[..., Any], argnums: _Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that returns (gradients, value), with `has_aux` (gradients, (value, aux)); see `grad`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _Call(func, args, argnums, kwargs)
        value, aux = call.result if has_aux else (call.result, None)
        found = with_leaves(call.wanted, call.pulled([_number(value, "gw.func.grad")], None))
        value = call.detached(value)
        return found, (value, call.detached(aux)) if has_aux else value

    return run


def grad(func: Callable[..., Any], argnums: _Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that returns the gradients of a function whose result is a number.

    Args:
        argnums: the arguments to differentiate: an index, or several for a tuple of gradients.
        has_aux: the function returns (value, aux), and its gradient (gradients, aux).
    Raises: ShapeError for another result; UsageError for argnums out of range.

    >>> grad(lambda x: (x**3).sum())(gw.tensor([2.0]))
    Tensor([12.])
    """
    both = grad_and_value(func, argnums, has_aux)

    def run(*args: Any, **kwargs: Any) -> Any:
        found, rest = both(*args, **kwargs)
        return (found, rest[1]) if has_aux else found

    return run


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the result of a function and a function of cotangents v that returns vᵀJ for each argument, as a tuple.

    With `has_aux`, the function returns (result, aux), and this (result, product, aux).
    """
    call = _Call(func, primals, tuple(range(len(primals))), {})
    result, aux = call.result if has_aux else (call.result, None)

    def product(*cotangents: Any) -> Any:
        seeds = leaves_of(cotangents)
        outputs = leaves_of(result)
        if [t.shape for t in seeds] != [t.shape for t in outputs]:
            expected, got = ([t.shape for t in ts] for ts in (outputs, seeds))
            raise ShapeError("cotangents do not fit the result", where="gw.func.vjp", expected=expected, got=got)
        return with_leaves(call.wanted, call.pulled(outputs, seeds, keep=True))

    return (call.detached(result), product, *((call.detached(aux),) if has_aux else ()))


def jvp(func: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Return the result of a function and J·tangents, computed as the gradient of vᵀJ with respect to v.

    Raises: ShapeError for tangents of other shapes; NotDifferentiable for an op without a second derivative.
    """
    given = tuple(primals)
    if [t.shape for t in leaves_of(given)] != [t.shape for t in leaves_of(tuple(tangents))]:
        raise ShapeError("tangents do not fit the arguments", where="gw.func.jvp")
    call = _Call(func, given, tuple(range(len(given))), {})
    outputs = leaves_of(call.result)
    found = _forward(call, outputs, leaves_of(tuple(tangents)))
    return call.detached(call.result), with_leaves(call.result, found)


def _forward(call: _Call, outputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """Return J·tangents for each output."""
    with enable_grad():
        used = [t for t in outputs if t.requires_grad]
        seeds = [zeros_like(t).requires_grad_() for t in used]
        pulled = engine.grad(used, call.inputs, seeds, create_graph=True, allow_unused=True) if used else ()
        pairs = [(g, v) for g, v in zip(pulled, tangents, strict=False) if g is not None and g.requires_grad]
    found: Sequence[Any] = [None] * len(seeds)
    if pairs:
        gs, vs = zip(*pairs, strict=True)
        found = engine.grad(gs, seeds, vs, retain_graph=True, create_graph=call.outer, allow_unused=True)
    by_id = {id(t): g for t, g in zip(used, found, strict=True) if g is not None}
    return [by_id[id(t)] if id(t) in by_id else zeros_like(t) for t in outputs]


# -- matrices of derivatives -------------------------------------------------------------------------------------------
def jacrev(func: Callable[..., Any], argnums: _Argnums = 0) -> Callable[..., Any]:
    """Return a function that returns the Jacobian [*result, *argument], by one backward per entry of the result.

    For several results or arguments, the tree of results has trees of arguments as leaves.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _Call(func, args, argnums, kwargs)
        blocks = []
        for output in leaves_of(call.result):
            rows = [call.pulled([entry], None, keep=True) for entry in output.reshape(-1)]
            sizes = [(*output.shape, *t.shape) for t in call.inputs]
            columns = zip(*rows, strict=True) if rows else ([] for _ in sizes)
            parts = [
                stack(list(column)).reshape(*size) if rows else as_tensor(0.0).to(output.dtype).expand(*size)
                for column, size in zip(columns, sizes, strict=True)
            ]
            blocks.append(with_leaves(call.wanted, parts))
        return with_leaves(call.result, blocks)

    return run


def jacfwd(func: Callable[..., Any], argnums: _Argnums = 0) -> Callable[..., Any]:
    """Return a function that returns the Jacobian, as `jacrev`, by one forward product per entry of the arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _Call(func, args, argnums, kwargs)
        outputs = leaves_of(call.result)
        parts: list[list[Any]] = [[] for _ in outputs]
        for i, t in enumerate(call.inputs):
            columns = []
            for k in range(t.numel()):
                tangents = [zeros_like(s) for s in call.inputs]
                tangents[i].reshape(-1)[k] = 1.0
                columns.append(_forward(call, outputs, tangents))
            for n, output in enumerate(outputs):
                made = (
                    stack([c[n] for c in columns], -1) if columns else zeros_like(output).unsqueeze(-1).narrow(-1, 0, 0)
                )
                parts[n].append(made.reshape(*output.shape, *t.shape))
        return with_leaves(call.result, [with_leaves(call.wanted, blocks) for blocks in parts])

    return run


def hessian(func: Callable[..., Any], argnums: _Argnums = 0) -> Callable[..., Any]:
    """Return a function that returns the second derivatives [*result, *argument, *argument]."""
    return jacrev(jacrev(func, argnums), argnums)


# -- batches -----------------------------------------------------------------------------------------------------------
def vmap(func: Callable[..., Any], in_dims: Any = 0, out_dims: int = 0) -> Callable[..., Any]:
    """Return a function that runs on each entry along an axis of its arguments, and stacks the results.

    It is a loop: correct for every function, and as slow as one.

    Args:
        in_dims: the axis of each argument, None for an argument that all runs share; one number for all.
        out_dims: the axis of the results.
    Raises: UsageError for no axis, other counts, or axes of different sizes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        dims = (in_dims,) * len(args) if in_dims is None or isinstance(in_dims, int) else tuple(in_dims)
        if len(dims) != len(args):
            raise UsageError("in_dims does not fit the arguments", where="vmap", expected=len(args), got=len(dims))
        sizes = {t.shape[d] for a, d in zip(args, dims, strict=True) if d is not None for t in leaves_of(a)}
        if len(sizes) != 1:
            raise UsageError("the axes differ in size", where="vmap", expected="one size", got=sorted(sizes))
        results = []
        for i in range(sizes.pop()):
            row = [
                a if d is None else with_leaves(a, [t.select(d, i) for t in leaves_of(a)])
                for a, d in zip(args, dims, strict=True)
            ]
            results.append(func(*row, **kwargs))
        if not results:
            raise UsageError("an empty axis has no results", where="vmap", expected="1 or more entries")
        columns = zip(*(leaves_of(r) for r in results), strict=True)
        return with_leaves(results[0], [stack(list(column), out_dims) for column in columns])

    return run
