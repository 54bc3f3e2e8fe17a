"""Random numbers as ops: which ones is said by a key (seed and step, int64 [2]) and a stream, and by nothing else.

The stream is an attribute, fixed when the node is made. The key is an operand: a state that rises with each step. So a
mask is made again from 16 bytes wherever it is needed, and never kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.dtype import DType, bfloat16, float32, int64
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import floating

KEY = Spec((2,), int64)
_WHY = {"vjp": "no gradient flows to noise"}


def _keyed(key: Spec, stream: int) -> None:
    if key != KEY:
        raise DTypeError("the key is seed and step", expected=KEY, got=key)
    if not 0 <= stream < 2**32:
        raise UsageError("a stream is a number of 32 bits", expected="0..2³²-1", got=stream)


def key_sample(rng: np.random.Generator) -> np.ndarray:
    """A key whose seed uses all of its 64 bits."""
    return np.array([rng.integers(-(2**63), 2**63), rng.integers(0, 2**32)])


def _noise(name: str, doc: str) -> Any:
    def infer(key: Spec, stream: int, shape: tuple[int, ...], dtype: DType) -> Spec:
        _keyed(key, stream)
        return floating(Spec(tuple(shape), dtype))

    def sample(rng):
        attrs = {"stream": int(rng.integers(0, 2**32)), "shape": (3, int(rng.integers(1, 5))), "dtype": float32}
        return [key_sample(rng)], attrs

    cells = {"__doc__": doc, "arity": 1, "vjp": None, "why": _WHY, "traits": Traits(contiguous=(0,), fixed=(0,))}
    attrs = {"stream": ..., "shape": ..., "dtype": float32}
    return op(name)(type(name, (), {**cells, "attrs": attrs, "infer": infer, "sample": sample}))


_noise("uniform", "Uniform in [0, 1): the upper 24 bits of a word; 16-bit floats are never rounded up to 1.")
_noise("normal", "Standard normal, by Box and Muller on pairs of words.")
_noise("gumbel", "Standard Gumbel, -ln(-ln u).")


@op("randint")
class Randint:
    """Integers in low .. high - 1, int64, by the high half of a 64-bit product."""

    arity, vjp, why, traits = 1, None, _WHY, Traits(contiguous=(0,), fixed=(0,))
    attrs = {"stream": ..., "shape": ..., "low": 0, "high": ...}

    @staticmethod
    def infer(key, stream, shape, low, high):
        _keyed(key, stream)
        if not 0 < high - low <= 2**31:
            raise UsageError("a range of 1 to 2³¹ integers", expected="low < high", got=f"{low}..{high}")
        return Spec(tuple(shape), int64)

    @staticmethod
    def sample(rng):
        low = int(rng.integers(-5, 5))
        return [key_sample(rng)], {"stream": 3, "shape": (2, 5), "low": low, "high": low + int(rng.integers(1, 9))}


@op("bernoulli")
class Bernoulli:
    """1 with probability p, else 0, elementwise, in the dtype of p."""

    arity, vjp, why, attrs = 2, None, _WHY, {"stream": ...}
    traits = Traits(contiguous=(1,), fixed=(1,))

    @staticmethod
    def infer(p, key, stream):
        _keyed(key, stream)
        return floating(p)

    @staticmethod
    def sample(rng):
        return [rng.uniform(0, 1, (3, 4)), key_sample(rng)], {"stream": int(rng.integers(0, 2**32))}


@op("dropout")
class Dropout:
    """x / (1 - p) where a uniform number is at least p, else 0; and the key, from which the gradient makes the mask."""

    arity, attrs, saves = 2, {"p": ..., "stream": ...}, Saves(outputs=(1,))
    traits = Traits(contiguous=(1,), fixed=(1,), inplace=((0, 0),))

    @staticmethod
    def infer(x, key, p, stream):
        _keyed(key, stream)
        if not 0 <= p <= 1:
            raise UsageError("p is a probability", expected="0..1", got=p)
        return floating(x), key

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return call("dropout", g[0], outs[1], **attrs)[0], None

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(2 * outs[0].size, ins[0].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        p = float(rng.choice((0.0, 0.3, 0.8, 1.0)))
        return [rng.normal(size=(4, 5)), key_sample(rng)], {"p": p, "stream": int(rng.integers(0, 2**32))}


@op("stochastic_round")
class StochasticRound:
    """float32 as bfloat16: up or down at random, each in proportion to how near it is, so that the mean is x.

    What bfloat16 can hold, infinities and NaN stay as they are (Gupta et al. 2015, section 3).
    """

    arity, attrs = 2, {"stream": ...}
    vjp, why = None, {"vjp": "rounds updated weights, behind which no gradient is wanted"}
    traits = Traits(contiguous=(0, 1), fixed=(0, 1))

    @staticmethod
    def infer(x, key, stream):
        _keyed(key, stream)
        if x.dtype is not float32:
            raise DTypeError("rounds float32 at random", expected="float32", got=x)
        return Spec(x.shape, bfloat16)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4)).astype(np.float32), key_sample(rng)], {"stream": int(rng.integers(0, 2**32))}


@op("multinomial")
class Multinomial:
    """Places along the last axis, drawn with probabilities in proportion to the weights [..., K] -> [..., samples].

    Without replacement no place twice: then at least `samples` weights of a row are to be above 0.
    """

    arity, vjp, why = 2, None, _WHY
    attrs, traits = {"stream": ..., "samples": ..., "replacement": False}, Traits(contiguous=(0, 1), fixed=(0, 1))

    @staticmethod
    def infer(weights, key, stream, samples, replacement):
        _keyed(key, stream)
        count = floating(weights).shape[-1] if weights.shape else 0
        if isinstance(count, str) or not samples >= 0 or (samples > count and not (replacement and count)):
            raise ShapeError("fewer places than samples", expected=f"at most {count}", got=samples)
        return Spec((*weights.shape[:-1], samples), int64)

    @staticmethod
    def sample(rng):
        attrs = {"stream": 5, "samples": int(rng.integers(1, 4)), "replacement": bool(rng.random() < 0.5)}
        return [rng.uniform(0.1, 1, (2, 4)), key_sample(rng)], attrs
