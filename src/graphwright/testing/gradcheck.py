"""Check gradients by central differences in float64, or by a reference for each subset of the operands.

A check that passes has compared at least one number; it raises UsageError if there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from graphwright.array import NDArray, float64, from_numpy
from graphwright.autograd import Tensor, grad, tensor
from graphwright.autograd.apply import apply
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops import Op

Function = Callable[..., Any]


class GradientMismatch(GraphwrightError, AssertionError):
    """A gradient differs from its difference quotient or reference; `where` names the operand and the element."""


def all_masks(count: int) -> Iterator[tuple[bool, ...]]:
    """Iterate over the nonempty subsets of `count` operands, each as a tuple of `count` bools."""
    return (mask for mask in product((True, False), repeat=count) if any(mask))


def gradcheck(
    fn: Function, inputs: Sequence[Any], *, eps: float = 1e-6, rtol: float = 1e-5, atol: float = 1e-7, seed: int = 0,
    wrt: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Compare the gradient of Σ u·fn(inputs), u random, with central differences.

    Args:
        fn: takes tensors, returns a tensor or a tuple of them.
        inputs: numpy arrays or numbers; those of float64 are differentiated.
        eps: step, in units of max(1, |x|).
        rtol, atol: a gradient a matches a quotient n if |a - n| <= atol + rtol·max|n|.
        seed: seed of the upstream gradient u.
        wrt: indices of the inputs to differentiate; by default all float64 ones.
    Raises: GradientMismatch; UsageError if there is nothing to compare.
    """
    arrays = [np.array(x) for x in inputs]
    indices = [i for i, x in enumerate(arrays) if x.dtype == np.float64] if wrt is None else list(wrt)
    given = [Tensor(from_numpy(x.copy()), i in indices) for i, x in enumerate(arrays)]
    results = _tuple(fn(*given))
    kept = [i for i, o in enumerate(results) if o.requires_grad]
    outs = [results[i] for i in kept]
    if not indices or not outs or not sum(arrays[i].size for i in indices):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays) or "no inputs"
        raise UsageError("there is no gradient to check", where="gradcheck", got=got,
                         expected="a float64 input with elements, on which a result depends")  # fmt: skip
    rng = np.random.default_rng(seed)
    seeds = [rng.normal(size=o.shape) for o in outs]

    def value(changed: Sequence[np.ndarray]) -> float:
        results = _tuple(fn(*(Tensor(from_numpy(x)) for x in changed)))
        return sum(float((results[i].numpy() * s).sum()) for i, s in zip(kept, seeds, strict=True))

    found = grad(outs, [given[i] for i in indices], [tensor(s) for s in seeds], allow_unused=True)
    for index, result in zip(indices, found, strict=True):
        analytic = np.zeros_like(arrays[index]) if result is None else result.numpy()
        _compare(analytic, _quotients(value, arrays, index, eps), index, rtol, atol)


def gradgradcheck(
    fn: Function, inputs: Sequence[Any], *, seed: int = 0, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Run `gradcheck` on the gradient of `fn`, as a function of the inputs and of the upstream gradient."""
    arrays = [np.array(x) for x in inputs]
    indices = [i for i, x in enumerate(arrays) if x.dtype == np.float64]
    probe = _tuple(fn(*(Tensor(from_numpy(x.copy()), i in indices) for i, x in enumerate(arrays))))
    kept = [i for i, o in enumerate(probe) if o.requires_grad]
    rng = np.random.default_rng(seed + 1)
    seeds = [rng.normal(size=probe[i].shape) for i in kept]

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        xs, us = list(tensors[: len(arrays)]), tensors[len(arrays) :]
        taped = any(t.requires_grad for t in tensors)  # for the quotient, evaluate the gradient without a tape
        for i in indices:
            if not xs[i].requires_grad:
                xs[i] = Tensor(xs[i].data, True)
        results, wanted = _tuple(fn(*xs)), [xs[i] for i in indices]
        found = grad([results[i] for i in kept], wanted, list(us), create_graph=taped, allow_unused=True)
        return tuple(g for g in found if g is not None)

    wrt = [*indices, *range(len(arrays), len(arrays) + len(seeds))]
    gradcheck(gradient, [*arrays, *seeds], rtol=rtol, atol=atol, seed=seed, wrt=wrt)


def check_masks(
    row: Op, inputs: Sequence[Any], attrs: Mapping[str, Any], reference: Function, *, rtol: float = 1e-9,
    atol: float = 1e-11, seed: int = 0,
) -> int:  # fmt: skip
    """Compare gradients of the op `row` with a reference, for each subset (mask) of operands; return the mask count.

    `reference` maps (inputs, upstream gradients, mask) to one numpy gradient per operand, or None where the mask is
    False. `attrs` has a value for each attribute. Raises: GradientMismatch; UsageError if no result is differentiable.
    """
    arrays = [np.array(x) for x in inputs]
    floats = [i for i, x in enumerate(arrays) if x.dtype.kind == "f"]
    rng = np.random.default_rng(seed)
    masks = 0
    for chosen in all_masks(len(floats)):
        mask = tuple(i in floats and chosen[floats.index(i)] for i in range(len(arrays)))
        given = [Tensor(from_numpy(x.copy()), want) for x, want in zip(arrays, mask, strict=True)]
        outs = [o for o in _tuple(apply(row, given, attrs)) if o.dtype is float64]
        if not any(o.requires_grad for o in outs):
            raise UsageError("no result of this op is differentiable", where=row.name)
        seeds = [rng.normal(size=o.shape) for o in outs]
        ours = grad(outs, [t for t in given if t.requires_grad], [tensor(s) for s in seeds], allow_unused=True)
        theirs = [g for g, want in zip(reference(arrays, seeds, mask), mask, strict=True) if want]
        for index, mine, other in zip([i for i, want in enumerate(mask) if want], ours, theirs, strict=True):
            if (mine is None) != (other is None):
                what = f"the {'op' if mine is None else 'reference'} has no gradient for this operand"
                raise GradientMismatch(what, where=f"{row.name}, operand {index}", expected="both or neither")
            if mine is not None:
                _compare(mine.numpy(), other, index, rtol, atol, f"{row.name}, mask {mask}, ")
        masks += 1
    return masks


def mutants(row: Op) -> Iterator[tuple[str, Op]]:
    """Yield (name of a bug, copy of the op with that bug in its vjp); a gradient check must find each."""
    vjp = row.vjp
    if vjp is None:
        raise UsageError("the op has no vjp to mutate", where=row.name)
    for bug, factor in {"sign flip": -1.0, "one per cent off": 1.01, "dropped": 0.0, "NaN": float("nan")}.items():

        def broken(*args: Any, factor: float = factor) -> tuple:
            return tuple(g if g is None else g * factor for g in vjp(*args))

        yield bug, replace(row, vjp=broken)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _quotients(
    value: Callable[[Sequence[np.ndarray]], float], arrays: Sequence[np.ndarray], operand: int, eps: float
) -> np.ndarray:
    result = np.empty_like(arrays[operand])
    for index in np.ndindex(result.shape):
        step = eps * max(1.0, abs(float(arrays[operand][index])))
        ends = []
        for sign in (1, -1):
            moved = [x.copy() if i == operand else x for i, x in enumerate(arrays)]
            moved[operand][index] += sign * step
            ends.append(value(moved))
        result[index] = (ends[0] - ends[1]) / (2 * step)
    return result


def _compare(
    ours: np.ndarray | NDArray, theirs: np.ndarray, operand: int, rtol: float, atol: float, where: str = ""
) -> None:
    mine, where = np.asarray(ours), f"{where}operand {operand}"
    if mine.shape != theirs.shape:
        raise GradientMismatch("a gradient has the wrong shape", where=where, expected=theirs.shape, got=mine.shape)
    scale = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0))
    off = ~(np.abs(mine - theirs) <= atol + rtol * scale)  # written so that NaN counts as wrong
    off &= ~((mine == theirs) | (np.isnan(mine) & np.isnan(theirs)))
    if off.any():
        index = tuple(int(i) for i in np.argwhere(off)[0])
        what = f"{int(off.sum())} of {off.size} entries of a gradient are wrong"
        raise GradientMismatch(what, where=f"{where}{[*index]}", expected=theirs[index], got=mine[index])
