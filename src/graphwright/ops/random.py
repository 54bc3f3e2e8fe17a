"""Random numbers as ops, determined by a key (seed and step, int64 [2]) and a stream alone.

The stream is an attribute, fixed when the node is created. The key is an operand: a state that advances with each step.
A dropout mask is therefore never stored, but recomputed from the 16 bytes of its key.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from graphwright.array.dtype import DType, bfloat16, float32, int64
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import rows as forms
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops.attributes import Attr, StaticSize
from graphwright.ops.axes import Atom, AxesUse, Dims
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import Random, Update, floating
from graphwright.settings import Range, Share

KEY = Spec((2,), int64)
_STREAM = Attr(Annotated[int, Range(0, 2**32 - 1, whole=True)])


def _keyed(key: Spec) -> None:
    if key != KEY:
        raise DTypeError("the key has the wrong spec", expected="int64 [2]: seed and step", got=key)


def key_sample(rng: np.random.Generator) -> np.ndarray:
    """Draw a key whose seed uses all of its 64 bits."""
    return np.array([rng.integers(-(2**63), 2**63), rng.integers(0, 2**32)])


def _redraws(u: AxesUse, key: Dims, over: Dims) -> None:
    """Freeze the key's size; state that dimensions `over` cannot lose a unit without changing the other numbers."""
    u.frozen(key[0], "is keyed by a seed and a step")
    for term in over:
        u.mixed(term, "draws different numbers for a different shape")


class _Shaped(Random):
    arity, traits = 1, Traits(contiguous=(0,), fixed=(0,), valueless=True)

    def axes(u: AxesUse) -> list[Dims]:
        u.sizes["shape"] = out = tuple(Atom(n) for n in u.shapes[0])
        _redraws(u, u.ins[0], out)
        return [out]


class _Masked(Random):
    """A random choice for each entry of operand 0; operand 1 is the key."""

    arity, traits = 2, Traits(contiguous=(1,), fixed=(1,))

    def axes(u: AxesUse) -> list[Dims]:
        _redraws(u, u.ins[1], u.ins[0])
        return [u.ins[0], u.ins[1]][: len(u.shapes)]


class _Noise(_Shaped):
    """Floating random numbers of a given shape."""

    attrs = {"stream": _STREAM, "shape": Attr(tuple[StaticSize, ...]), "dtype": Attr(DType, float32)}

    def infer(key: Spec, stream: int, shape: tuple[int, ...], dtype: DType) -> Spec:
        _keyed(key)
        return floating(Spec(tuple(shape), dtype))

    def sample(rng):
        attrs = {"stream": int(rng.integers(0, 2**32)), "shape": (3, int(rng.integers(1, 5))), "dtype": float32}
        return [key_sample(rng)], attrs


@op("uniform")
class Uniform(_Noise):
    """u ~ U[0, 1), from the upper 24 bits of a random 32-bit word; 16-bit floats are never rounded up to 1."""

    vm = forms.UNIFORM


@op("normal")
class Normal(_Noise):
    """z ~ N(0, 1), by the Box-Muller transform of pairs of random words."""


@op("gumbel")
class Gumbel(_Noise):
    """-ln(-ln u) for uniform u in (0, 1): a standard Gumbel number."""


@op("randint")
class Randint(_Shaped):
    """i ~ U{low, ..., high - 1}, int64: low + the high half of a random 32-bit word times (high - low)."""

    attrs = {"stream": _STREAM, "shape": Attr(tuple[StaticSize, ...]), "low": Attr(int, 0), "high": Attr(int)}

    def infer(key, stream, shape, low, high):
        _keyed(key)
        if not 0 < high - low <= 2**31:
            expected, got = "low < high <= low + 2**31", f"low {low}, high {high}"
            raise UsageError("the range of random integers is empty or too large", expected=expected, got=got)
        return Spec(tuple(shape), int64)

    def sample(rng):
        low = int(rng.integers(-5, 5))
        return [key_sample(rng)], {"stream": 3, "shape": (2, 5), "low": low, "high": low + int(rng.integers(1, 9))}


@op("bernoulli")
class Bernoulli(_Masked):
    """1 with probability p else 0, elementwise, in the dtype of p."""

    attrs, vm = {"stream": _STREAM}, forms.BERNOULLI
    sample = lambda rng: ([rng.uniform(0, 1, (3, 4)), key_sample(rng)], {"stream": int(rng.integers(0, 2**32))})

    def infer(p, key, stream):
        _keyed(key)
        return floating(p)


@op("dropout")
class Dropout(_Masked):
    """x / (1 - p) if u ≥ p else 0, u uniform, elementwise; and the key, from which the gradient recomputes the mask."""

    attrs, saves, vm = {"p": Attr(Share), "stream": _STREAM}, Saves(outputs=(1,)), forms.DROPOUT
    results = ("kept", "key")
    traits = Traits(inplace=((0, 0),), passes=((1, 1),), training_only=True)
    vjp = lambda g, ins, outs, attrs, needs: (call("dropout", g[0], outs[1], **attrs)[0],)
    cost = lambda ins, outs, attrs: Cost(2 * outs[0].size, ins[0].nbytes, outs[0].nbytes)

    def infer(x, key, p, stream):
        _keyed(key)
        return floating(x), key

    def sample(rng):
        p = float(rng.choice((0.0, 0.3, 0.8, 1.0)))
        return [rng.normal(size=(4, 5)), key_sample(rng)], {"p": p, "stream": int(rng.integers(0, 2**32))}


@op("stochastic_round")
class StochasticRound(Random):
    """x rounded to bfloat16, up or down at random such that the expected value is x, elementwise.

    Values that bfloat16 can represent, infinities and NaN are unchanged (Gupta et al. 2015, section 3).
    """

    arity, attrs, traits = 2, {"stream": _STREAM}, Traits(contiguous=(0, 1), fixed=(0, 1))
    why = {"vjp": "it rounds updated weights, through which no gradient flows", "axes": Update.why["axes"]}

    def infer(x, key, stream):
        _keyed(key)
        if x.dtype is not float32:
            raise DTypeError("the operand of stochastic_round is not float32", expected="float32", got=x)
        return Spec(x.shape, bfloat16)

    def sample(rng):
        return [rng.normal(size=(3, 4)).astype(np.float32), key_sample(rng)], {"stream": int(rng.integers(0, 2**32))}


@op("multinomial")
class Multinomial(Random):
    """Indices along the last axis, drawn in proportion to the weights: [..., K] -> [..., samples].

    Without replacement no index is drawn twice; at least `samples` weights of a row must then be above 0.
    """

    arity, attrs = 2, {"stream": _STREAM, "samples": Attr(StaticSize), "replacement": Attr(bool, False)}
    traits = Traits(contiguous=(0, 1), fixed=(0, 1))

    def infer(weights, key, stream, samples, replacement):
        _keyed(key)
        count = floating(weights).shape[-1] if weights.shape else 0
        if isinstance(count, str):
            raise ShapeError("the number of weights is a named size", expected="[..., K] with a static K", got=weights)
        if samples > count and not (replacement and count):
            raise ShapeError("invalid number of samples", expected=f"at most {count}", got=samples)
        return Spec((*weights.shape[:-1], samples), int64)

    def sample(rng):
        attrs = {"stream": 5, "samples": int(rng.integers(1, 4)), "replacement": bool(rng.random() < 0.5)}
        return [rng.uniform(0.1, 1, (2, 4)), key_sample(rng)], attrs

    def axes(u: AxesUse):
        x = u.ins[0]
        _redraws(u, u.ins[1], x)
        u.result_ranges[0] = x[-1]
        return [(*x[:-1], u.fresh(u.attrs["samples"], "draws a fixed number of samples"))]
