"""Attributions: how much each entry of inputs and inner values contributes to a number that a network computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from graphwright.autograd import Tensor, as_tensor, grad, no_grad
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.graph import NodeId
from graphwright.nn.module import Module
from graphwright.program import Program, trace
from graphwright.program.derived.rewrite import feed_name, patched
from graphwright.program.op_graph import Ref, Value
from graphwright.program.weights import as_array
from graphwright.report import Report
from graphwright.settings import Range
from graphwright.surgery.errors import check_choices

Arrays = Mapping[str, np.ndarray]
"""Values by path."""
Target = int | str | Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, repr=False)
class Attributions(Report):
    """Attributions of the values of one call.

    Attributes:
        method: name of the method.
        values: path -> attribution of each entry, float64, in the shape of the value.
        difference: target at the values minus target at the baseline, [] or one per example.
        total: sum of all attributions.
        gap: |total - Σ difference|: 0 up to rounding and quadrature for integrated gradients (completeness).
    """

    method: str
    values: Mapping[str, np.ndarray]
    difference: np.ndarray
    total: float
    gap: float
    HIDDEN: ClassVar = ("values", "difference")
    FIGURES: ClassVar = ("sums",)

    @property
    def sums(self) -> dict[str, float]:
        """Sum of the attributions of each value, by path."""
        return {path: float(a.sum()) for path, a in self.values.items()}

    def __getitem__(self, path: str) -> np.ndarray:
        return self.values[path]


class _Function:
    """The target as a function of the attributed values, while the other inputs have their given values."""

    def __init__(self, p: Program, feeds: Mapping[str, Any], refs: Sequence[Ref], target: Target) -> None:
        self.paths = [p.path(p.value(r)) for r in refs]
        self.program, self.feeds, self.target = patched(p, [p.value(r) for r in refs]), feeds, target
        self.names = [feed_name(p, p.value(r)) for r in refs]

    def tensor(self, values: Sequence[Tensor]) -> Tensor:
        """Return the target, [] or [examples]. Raises: ShapeError for a target of another rank."""
        given = {name: x.to(self.program.spec(name).dtype) for name, x in zip(self.names, values, strict=True)}
        outputs = self.program(**self.feeds, **given)
        result = _picked(outputs, self.target)
        if not isinstance(result, Tensor) or result.ndim > 1:
            got = result.spec if isinstance(result, Tensor) else type(result).__name__
            raise ShapeError("the target is not one number per example", expected="a tensor [] or [examples]", got=got,
                             fix='target=lambda out: out["logits"][:, -1, 7]')  # fmt: skip
        return result

    def __call__(self, values: Arrays) -> np.ndarray:
        """Return the target, float64."""
        with no_grad():
            return self.tensor([as_tensor(values[path]) for path in self.paths]).numpy().astype(np.float64)

    def gradient(self, values: Arrays) -> dict[str, np.ndarray]:
        """Return the gradient of the target, summed over the examples, by each value."""
        leaves = [Tensor(as_tensor(values[path]).data, requires_grad=True) for path in self.paths]
        total = self.tensor(leaves).sum()
        found = grad([total], leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
        pairs = zip(self.paths, leaves, found, strict=True)
        return {path: np.zeros(x.shape) if g is None else g.numpy().astype(np.float64) for path, x, g in pairs}


def _picked(outputs: Mapping[str, Tensor], target: Target) -> Any:
    if callable(target):
        return target(outputs)
    if isinstance(target, str):
        if target not in outputs:
            raise UsageError("no output has this name", where=target, expected=", ".join(outputs))
        return outputs[target]
    if type(target) is int and len(outputs) == 1:
        (only,) = outputs.values()
        return only[..., target]
    raise UsageError("invalid target", expected="the index of an entry of the last axis of the only output, the name "
                     "of an output, or a function from the dict of outputs to a tensor", got=repr(target)[:80],
                     fix=f"outputs: {', '.join(outputs)}")  # fmt: skip


# -- methods -----------------------------------------------------------------------------------------------------------
def _integrated_gradients(f: _Function, x: Arrays, base: Arrays, steps: int) -> Arrays:
    """(x - x₀) · ∫₀¹ ∂f/∂x(x₀ + α(x - x₀)) dα, by Gauss-Legendre quadrature with `steps` points.

    Source: Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks", eq. 1.
    """
    total = {path: np.zeros(a.shape) for path, a in x.items()}
    for node, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        alpha = (node + 1) / 2
        between = {path: (base[path] + alpha * (a - base[path])).astype(a.dtype) for path, a in x.items()}
        for path, slope in f.gradient(between).items():
            total[path] += weight / 2 * slope
    return {path: (a - base[path]) * total[path] for path, a in x.items()}


def _gradient_x_input(f: _Function, x: Arrays, base: Arrays, steps: int) -> Arrays:
    """(x - x₀) · ∂f/∂x(x)."""
    slopes = f.gradient(x)
    return {path: (a - base[path]) * slopes[path] for path, a in x.items()}


def _occlusion(f: _Function, x: Arrays, base: Arrays, steps: int) -> Arrays:
    """f(x) - f(x with one entry at its baseline): one run per entry, or per entry of a row if rows are of examples."""
    here, found = f(x), {}
    for path, a in x.items():
        batched = _has_rows_of_examples(f, x, base, path, here)
        found[path] = np.zeros(a.shape)
        for index in np.ndindex(a.shape[1:] if batched else a.shape):
            at = (slice(None), *index) if batched else index
            other = a.copy()
            other[at] = base[path][at]
            effect = here - f({**x, path: other})
            found[path][at] = effect if batched else effect.sum()
    return found


def _has_rows_of_examples(f: _Function, x: Arrays, base: Arrays, path: str, here: np.ndarray) -> bool:
    """Return whether each row of a value changes the target `here` of one example only, as rows of a weight do not.

    Two different rows differ in a bit of their number, so one run per bit and side covers all pairs.
    """
    a, rows = x[path], np.arange(here.size)
    if not here.shape or a.shape[:1] != here.shape:
        return False
    for bit in range((here.size - 1).bit_length()):
        for side in (False, True):
            at, other = (rows >> bit & 1) == side, a.copy()
            other[at] = base[path][at]
            if not np.array_equal(f({**x, path: other})[~at], here[~at], equal_nan=True):
                return False
    return True


METHODS = {
    "integrated_gradients": _integrated_gradients,
    "gradient_x_input": _gradient_x_input,
    "occlusion": _occlusion,
}


# -- the call ----------------------------------------------------------------------------------------------------------
def attribute(
    network: Program | Module, inputs: Any, target: Target, *, of: Sequence[Ref] | Ref | None = None,
    method: str = "integrated_gradients", baseline: float | Mapping[str, Any] = 0.0, steps: int = 32,
) -> Attributions:  # fmt: skip
    """Attribute a number that a network computes to the entries of its inputs, or of inner values.

    Inner values are attributed by replacing them: the target is a function of the values `of`, while inputs and all
    other values that do not depend on them stay as they are.

    Args:
        network: a program, or a module, which is traced with the inputs.
        inputs: arrays or tensors by input name, one array, or a sequence of them in the order of the inputs.
        target: the number, or one per example: an index along the last axis of the only output, an output's name, or a
            function from the dict of outputs to a tensor [] or [examples].
        of: floating inputs, params or nodes, by path; by default all floating inputs.
        method: `integrated_gradients`, `gradient_x_input`, or `occlusion`, which needs a run per entry.
        baseline: the values that stand for absence: a number for all, or a dict with a number or array by path of `of`.
            Paths of inputs that are not in `of` give each inner value the value that it has on these inputs.
        steps: number of points of the quadrature, >= 1.
    Returns: Attributions; for integrated gradients they sum up to f(values) - f(baseline).
    Raises: UsageError for an unknown method, target or path; DTypeError for integers, such as token ids; ShapeError for
        a baseline or target of a wrong shape; FeedError for invalid inputs.
    """
    check_choices({"method": method}, {"method": METHODS})
    if type(steps) is not int or steps < 1:
        raise UsageError("invalid number of steps", expected="an integer >= 1", got=repr(steps))
    p, feeds = _program(network, inputs)
    if p.assigns():
        raise UsageError("each call of the network updates its states", where=p.name, expected="no assigned states",
                         fix="module.eval(), or program.eval()")  # fmt: skip
    refs: list[Ref]
    if of is None:
        refs = [n for n in p.inputs() if p.spec(n).dtype.is_float]
    else:
        refs = [of] if isinstance(of, str | Value | NodeId) else list(of)
    integers = [p.path(p.value(r)) for r in refs if not p.spec(r).dtype.is_float]
    if of is not None and not refs:
        raise UsageError("no values to attribute to were given", where="of", expected="at least one path", got=repr(of))
    if integers or not refs:
        what = "integers have no gradient" if integers else "the network has no floating inputs"
        raise DTypeError(what, where=", ".join(integers) or p.name, expected="floating values",
                         fix='attribute an inner value, such as the embeddings: of="embed"')  # fmt: skip
    f = _Function(p, feeds, refs, target)
    x = _values(p, feeds, f.paths, refs)
    base = _baseline(p, feeds, x, refs, baseline)
    values = METHODS[method](f, x, base, steps)
    difference = f(x) - f(base)
    total = float(sum(a.sum() for a in values.values()))
    return Attributions(method, values, difference, total, abs(total - float(difference.sum())))


def _program(network: Program | Module, inputs: Any) -> tuple[Program, dict[str, Any]]:
    """Return a program and its inputs by name."""
    if not isinstance(network, Program | Module):
        raise UsageError("cannot attribute the results of this object", expected="a Program or a Module",
                         got=type(network).__name__)  # fmt: skip
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if isinstance(network, Module):
        if isinstance(inputs, Mapping):
            raise UsageError("the inputs of a module have no names", expected="arrays in the order of its arguments")
        network = trace(network, *given)
    if isinstance(inputs, Mapping):
        return network, dict(inputs)
    names = network.input_names()
    if len(names) != len(given):
        expected = f"{len(names)}: {', '.join(names)}"
        raise UsageError("wrong number of inputs", where=network.name, expected=expected, got=len(given))
    return network, dict(zip(names, given, strict=True))


def _values(p: Program, feeds: Mapping[str, Any], paths: Sequence[str], refs: Sequence[Ref]) -> dict[str, np.ndarray]:
    """Run a program; return the values `refs` by path, as float32 or float64."""
    with p.run(feeds, keep="outputs", capture=[p.value(r) for r in refs]) as run:
        arrays = [run.value(p.value(r)) for r in refs]
    return {
        path: a.to_numpy("float32" if a.dtype.is_low else None).copy() for path, a in zip(paths, arrays, strict=True)
    }


def _baseline(
    p: Program, feeds: Mapping[str, Any], x: Arrays, refs: Sequence[Ref], given: float | Mapping[str, Any]
) -> dict[str, np.ndarray]:
    if not isinstance(given, Mapping):
        Range().check("baseline", given)
        return {path: np.full_like(a, given) for path, a in x.items()}
    others = {name: value for name, value in given.items() if name not in x}
    if unknown := [name for name in others if name not in p.input_names()]:
        raise UsageError("a baseline is given for an unknown value", got=", ".join(map(str, unknown)),
                         expected=", ".join(dict.fromkeys((*x, *p.input_names()))))  # fmt: skip
    start: dict[str, np.ndarray] = {path: np.zeros_like(a) for path, a in x.items()}
    if others:
        start = _values(p, {**feeds, **others}, list(x), refs)
    for path, value in given.items():
        if path in x:
            array = np.asarray(value if isinstance(value, int | float) else as_array(value).to_numpy(), x[path].dtype)
            if array.shape not in ((), x[path].shape):
                raise ShapeError("the baseline has another shape than the value", where=path, expected=x[path].shape,
                                 got=array.shape)  # fmt: skip
            start[path] = np.broadcast_to(array, x[path].shape).copy()
    return start
