"""Random numbers: generators of seed, step and stream, and the functions that sample from one.

Outside a trace, streams are numbered in the order of calls, and `next_step()` restarts their numbering. In a trace each
op gets its stream when it is recorded, the key is a state of the program, and every run advances to the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from graphwright.array import CPU, Device, broadcast_shapes, finfo, from_numpy, int64
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.create import device_of, full_like, like, renamed, target
from graphwright.autograd.names import METHOD, named
from graphwright.autograd.recorder import Recorder, active_recorder, scoped
from graphwright.autograd.shapes import ints
from graphwright.autograd.tensor import Tensor
from graphwright.autograd.variable import HostVariable, Variable
from graphwright.errors import UsageError
from graphwright.ops import call


@dataclass(slots=True)
class _TracedKey:
    """The state of a generator in one trace."""

    key: Tensor  # of the current step
    following: Tensor | None = None  # the key of the next step, once recorded
    stream: int = 0  # number of the next stream


class Generator:
    """A source of random numbers, which seed, step and stream determine on every machine.

    Args:
        seed: 0 .. 2⁶⁴-1.
    """

    def __init__(self, seed: int = 0) -> None:
        self._key: Variable = HostVariable(from_numpy(np.zeros(2, np.int64)), name="rng")
        self._stream = 0
        self._traces: WeakKeyDictionary[Recorder, _TracedKey] = WeakKeyDictionary()
        self.manual_seed(seed)

    @property
    def seed(self) -> int:
        """The seed, 0 .. 2⁶⁴-1."""
        return int(self._key.data.to_numpy()[0]) % 2**64

    @property
    def step(self) -> int:
        """The step, 0 .. 2³²-1."""
        return int(self._key.data.to_numpy()[1])

    @property
    def key(self) -> Variable:
        """The variable with seed and step, int64 [2]; a program that was traced with random ops has it as a state.

        Setting it makes the generator use another one, such as that of a program that was loaded, so that runs of the
        program and eager code advance the same steps.
        """
        return self._key

    @key.setter
    def key(self, variable: Variable) -> None:
        if variable.data.spec != self._key.data.spec:
            expected, got = self._key.data.spec, variable.data.spec
            raise UsageError("the variable is not the key of a generator", expected=expected, got=got)
        self._key = variable

    def manual_seed(self, seed: int) -> Generator:
        """Restart at step 0 and stream 0 of a seed; return the generator itself."""
        return self.load_state_dict({"seed": seed, "step": 0, "stream": 0})

    def next_step(self) -> None:
        """Advance to stream 0 of the next step; in a trace, this affects the operations recorded afterwards."""
        recorder = active_recorder.get()
        if recorder is None:
            self.load_state_dict({"seed": self.seed, "step": (self.step + 1) % 2**32, "stream": 0})
            return
        traced = self._traced(recorder)
        traced.key, traced.following, traced.stream = self._following(recorder, traced), None, 0

    def draw(self) -> tuple[Tensor, int]:
        """Return the key (int64 [2]: seed and step) and the stream of the next random op; advance the stream."""
        recorder = active_recorder.get()
        if recorder is None:
            self._stream += 1
            return self._key, self._stream - 1
        traced = self._traced(recorder)
        self._following(recorder, traced)
        traced.stream += 1
        return traced.key, traced.stream - 1

    def _traced(self, recorder: Recorder) -> _TracedKey:
        if recorder not in self._traces:
            self._traces[recorder] = _TracedKey(Tensor(recorder.resolve(self._key)))
        return self._traces[recorder]

    def _following(self, recorder: Recorder, traced: _TracedKey) -> Tensor:
        """Return the traced key of the next step; each run of the program ends by assigning it to the generator."""
        if traced.following is None:
            with scoped("rng"):
                traced.following = traced.key + as_tensor(np.array([0, 1]))
            recorder.assign(self._key, traced.following)
        return traced.following

    def state_dict(self) -> dict[str, int]:
        """Return a dict of seed, step and next stream, as JSON values."""
        return {"seed": self.seed, "step": self.step, "stream": self._stream}

    def load_state_dict(self, state: Mapping[str, int]) -> Generator:
        """Restore a result of `state_dict`; return the generator itself. Raises: UsageError for an invalid state."""
        try:
            seed, step, stream = (int(state[name]) for name in ("seed", "step", "stream"))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError("invalid state of a generator", expected="ints seed, step, stream", got=state) from error
        if not (0 <= seed < 2**64 and 0 <= step < 2**32 and 0 <= stream < 2**32):
            expected = "seed in 0..2^64-1, step and stream in 0..2^32-1"
            raise UsageError("a value of the generator state is out of range", expected=expected, got=dict(state))
        array = self._key.own()
        array.writable()
        array.to_numpy()[:] = np.array([seed, step], np.uint64).view(np.int64)  # in numpy: `rng` loads no backend
        self._stream = stream
        return self


rng = Generator()
"""The default generator."""


def manual_seed(seed: int) -> Generator:
    """Restart the default generator at step 0 of a seed. Raises: UsageError for a seed of more than 64 bits."""
    return rng.manual_seed(seed)


@contextmanager
def fork_rng(seed: int | None = None) -> Iterator[Generator]:
    """Context manager: restore the state of the default generator on exit; with a `seed`, reseed it first."""
    state = rng.state_dict()
    try:
        yield rng if seed is None else rng.manual_seed(seed)
    finally:
        rng.load_state_dict(state)


def _drawn(generator: Generator | None, device: Device) -> tuple[Tensor, int]:
    """Return the key, copied to the sampling device, and the stream of the next random op."""
    key, stream = (generator or rng).draw()
    return (key if device == CPU else key.to(device)), stream


def _sampler(name: str, op: str, doc: str):  # the type is inferred: Callable would lose the keywords
    """Make a function like `rand` that samples a tensor by one op; `doc` starts its docstring."""

    def sample(
        *shape: int | Sequence[int], size: Sequence[int] | None = None, dtype: object = None,
        requires_grad: bool = False, generator: Generator | None = None, device: Device | str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        given = ints(shape if size is None else size)
        kind, there = target(given, dtype, device, out)
        key, stream = _drawn(generator, there)
        made = call(op, key, stream=stream, shape=given, dtype=kind, out=out)
        if requires_grad:
            made.requires_grad = True
        return made

    return renamed(sample, name, f"{doc} float32 by default, from the default generator unless one is given.")


rand = _sampler("rand", "uniform", "Sample uniformly from [0, 1).")
randn = _sampler("randn", "normal", "Sample the standard normal distribution.")
gumbel = _sampler(
    "gumbel", "gumbel", "Sample the Gumbel distribution: argmax(logits + gumbel) samples softmax(logits)."
)


def randint(
    low: int = 0, high: Any = None, size: Any = None, *, dtype: object = None, generator: Generator | None = None,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample integers from low .. high - 1, int64 by default. Raises: UsageError unless low < high ≤ low + 2³¹."""
    if size is None:  # randint(high, size)
        low, high, size = 0, low, high
    shape = ints((size,))
    kind, there = target(shape, int64 if dtype is None and out is None else dtype, device, out)
    key, stream = _drawn(generator, there)
    if out is not None and kind is int64:
        return call("randint", key, stream=stream, shape=shape, low=low, high=high, out=out)
    made = call("randint", key, stream=stream, shape=shape, low=low, high=high).to(kind)
    return made if out is None else out.copy_(made)


def _sampler_like(name: str, sampler: Callable[..., Tensor]):  # the type is inferred
    def sample_like(
        x: Tensor, dtype: object = None, *, requires_grad: bool = False, generator: Generator | None = None,
        device: Device | str | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        kind, there = like(x, dtype, device, out)
        return sampler(*x.shape, dtype=kind, requires_grad=requires_grad, generator=generator, device=there, out=out)

    doc = f"Call `{sampler.__name__}` with the shape of `x` and, unless given, its dtype and device."
    return renamed(sample_like, name, doc)


rand_like = _sampler_like("rand_like", rand)
randn_like = _sampler_like("randn_like", randn)


def randint_like(
    input: Tensor, low: int, high: int | None = None, dtype: object = None, *, generator: Generator | None = None,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Call `randint` with the shape of `input` and, unless given, its dtype and device; one number is `high`."""
    kind, there = like(input, dtype, device, out)
    low, high = (0, low) if high is None else (low, high)
    return randint(low, high, input.shape, dtype=kind, generator=generator, device=there, out=out)


@named()
def bernoulli(
    input: Tensor, p: float | None = None, *, generator: Generator | None = None, out: Tensor | None = None
) -> Tensor:
    """Sample 1 with the probabilities in `input`, else 0; with the number p, sample by it in the shape of `input`.

    Raises: UsageError for a p, or outside traces an input on the CPU, that is not a probability.
    """
    known = input if not input.symbolic and device_of(input) == CPU else as_tensor(0.0)
    if not (((known >= 0) & (known <= 1)).all().item() if p is None else 0 <= p <= 1):
        raise UsageError("p is not a probability", where="bernoulli", expected="0 to 1", got=p)
    chances = input if p is None else full_like(input, p)
    key, stream = _drawn(generator, device_of(input))
    return call("bernoulli", chances, key, stream=stream, out=out)


def normal(
    mean: Any = 0.0, std: Any = 1.0, size: Sequence[int] | None = None, *, dtype: object = None,
    generator: Generator | None = None, device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """Sample normal distributions: mean and standard deviation are numbers, with `size`, or tensors, which broadcast.

    Raises: UsageError for numbers without a size, or a negative deviation, ShapeError.
    """
    if not isinstance(std, TensorBase):
        _positive("normal", "std", std, least=0.0)
    elif not std.symbolic and std.device == CPU and bool((as_tensor(std) < 0).any().item()):
        raise UsageError("a standard deviation is negative", where="normal", expected=">= 0")
    if size is None:
        given = [t.shape for t in (mean, std) if isinstance(t, TensorBase)]
        if not given:
            raise UsageError("normal got numbers but no size", fix="pass size=(...), or tensors")
        size = broadcast_shapes(*given)
    return randn(*size, dtype=dtype, generator=generator, device=device) * std + mean


def randperm(
    n: int, *, dtype: object = None, generator: Generator | None = None, device: Device | str | None = None
) -> Tensor:
    """Sample a permutation of 0 .. n - 1, int64 by default."""
    made = rand(n, dtype="float64", generator=generator, device=device).argsort()
    return made if dtype is None else made.to(dtype)


def stochastic_round(x: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Round float32 to bfloat16, up or down at random so that the mean is x. Raises: DTypeError for any other dtype."""
    key, stream = _drawn(generator, device_of(x))
    return call("stochastic_round", x, key, stream=stream)


@named()
def multinomial(
    input: Tensor, num_samples: int, replacement: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Sample indices of the last axis in proportion to the input: [..., K] -> [..., num_samples], int64.

    Raises: ShapeError for more samples than K without replacement; outside traces UsageError for invalid weights.
    """
    if not input.symbolic:
        weights = input.detach().numpy("float64")
        if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.sum(-1).all():
            expected = "finite numbers >= 0, not all 0 in a row"
            raise UsageError("the input has no weights of a distribution", where="multinomial", expected=expected)
    key, stream = _drawn(generator, device_of(input))
    return call("multinomial", input, key, stream=stream, samples=num_samples, replacement=replacement)


def dropout(x: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """x / (1 - p) with probability 1 - p, else 0; the gradient uses the same mask.

    Raises: UsageError for a p outside [0, 1].
    """
    key, stream = _drawn(generator, device_of(x))
    return call("dropout", x, key, p=float(p), stream=stream)[0]


# -- methods that fill a tensor ----------------------------------------------------------------------------------------
@named(METHOD, "uniform_")
def uniform_(input: Tensor, from_: float = 0.0, to: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Fill with samples of the uniform distribution over [from, to). Raises: UsageError."""
    _positive("uniform_", "to - from", to - from_, least=0.0)
    return input.copy_(_samples(input, rand, generator) * (to - from_) + from_)


@named(METHOD, "normal_")
def normal_(input: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Fill with samples of a normal distribution. Raises: UsageError."""
    _positive("normal_", "std", std, least=0.0)
    return input.copy_(_samples(input, randn, generator) * std + mean)


@named(METHOD, "log_normal_")
def log_normal_(input: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Generator | None = None) -> Tensor:
    """Fill with samples whose logarithms are normal. Raises: UsageError."""
    _positive("log_normal_", "std", std)
    return input.copy_((_samples(input, randn, generator) * std + mean).exp())


@named(METHOD, "exponential_")
def exponential_(input: Tensor, lambd: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Fill with samples of the exponential distribution of rate `lambd`. Raises: UsageError."""
    _positive("exponential_", "lambd", lambd)
    return input.copy_((-_samples(input, rand, generator)).log1p() / -lambd)


@named(METHOD, "cauchy_")
def cauchy_(input: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Fill with samples of the Cauchy distribution. Raises: UsageError."""
    _positive("cauchy_", "sigma", sigma)
    return input.copy_(((_samples(input, rand, generator) - 0.5) * np.pi).tan() * sigma + median)


@named(METHOD, "geometric_")
def geometric_(input: Tensor, p: float, *, generator: Generator | None = None) -> Tensor:
    """Fill with the number of trials until the first success of probability p, at least 1. Raises: UsageError."""
    if not 0 < p < 1:
        raise UsageError("p is not a probability", where="geometric_", expected="0 < p < 1", got=p)
    least = finfo("float64").tiny
    draws = rand(*input.shape, dtype="float64", generator=generator, device=device_of(input))
    return input.copy_(((1.0 - draws).clamp(min=least).log() / np.log1p(-p)).ceil().clamp(min=1.0))


@named(METHOD, "bernoulli_")
def bernoulli_(input: Tensor, p: Any = 0.5, *, generator: Generator | None = None) -> Tensor:
    """Fill with 1 with probability p, a number or a tensor, else 0. Raises: UsageError for a p outside [0, 1]."""
    if isinstance(p, TensorBase):
        return input.copy_(bernoulli(as_tensor(p), generator=generator).expand(*input.shape))
    if not 0 <= p <= 1:
        raise UsageError("p is not a probability", where="bernoulli_", expected="0 to 1", got=p)
    return input.copy_(_samples(input, rand, generator) < p)


@named(METHOD, "random_")
def random_(
    input: Tensor, from_: int | None = None, to: int | None = None, *, generator: Generator | None = None
) -> Tensor:
    """Fill with integers from .. to - 1; one number is the end, of numbers from 0.

    Without numbers, all integers from 0 that the dtype stores exactly, below 2³¹. Raises: UsageError for no integers.
    """
    if to is None and from_ is None:
        digits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "bool": 1}
        name = input.dtype.name
        to = min(2 ** digits[name] if name in digits else int(np.iinfo(input.dtype.numpy).max) + 1, 2**31)
    elif to is None:
        from_, to = 0, from_
    from_ = from_ or 0
    return input.copy_(randint(from_, to, input.shape, generator=generator, device=device_of(input)))


def _samples(x: Tensor, sampler: Callable[..., Tensor], generator: Generator | None) -> Tensor:
    kind = x.dtype if x.dtype.is_float and not x.dtype.is_low else "float32"
    return sampler(*x.shape, dtype=kind, generator=generator, device=device_of(x))


def _positive(where: str, name: str, value: float, least: float | None = None) -> None:
    if not (value > 0 if least is None else value >= least):
        expected = "> 0" if least is None else f">= {least:g}"
        raise UsageError(f"{name} is out of range", where=where, expected=expected, got=value)
