"""Generators: seed, step and the next stream; and the functions that draw from the running one.

Outside a trace streams are numbered in the order of the calls, and `next_step()` starts them anew. In a trace each op
gets its stream when it is recorded, the key is a state of the program, and every run ends with the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from weakref import WeakKeyDictionary

import numpy as np

from graphwright.array import CPU, Device, from_numpy, int64
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.create import lies, like, sizes, target
from graphwright.autograd.recorder import Recorder, active, scoped
from graphwright.autograd.tensor import Tensor
from graphwright.autograd.variable import HostVariable
from graphwright.errors import UsageError
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.array.layout import Shape


class _Traced:
    """A generator's part in one trace: the key of this step, that of the next if it was taken down, the next stream."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.stream = key, 0
        self.following: Tensor | None = None


class Generator:
    """A source of random numbers: the same seed, step and stream give the same ones, on every machine.

    Args:
        seed: 64 bits.
    """

    def __init__(self, seed: int = 0) -> None:
        self._key = HostVariable(from_numpy(np.zeros(2, np.int64)), name="rng")
        self._stream = 0
        self._traces: WeakKeyDictionary[Recorder, _Traced] = WeakKeyDictionary()
        self.manual_seed(seed)

    @property
    def seed(self) -> int:
        """The seed, 0 .. 2⁶⁴-1."""
        return int(self._key.data.to_numpy()[0]) % 2**64

    @property
    def step(self) -> int:
        """The step, 0 .. 2³²-1."""
        return int(self._key.data.to_numpy()[1])

    def manual_seed(self, seed: int) -> Generator:
        """Begin at step 0 and stream 0 of a seed; returns itself."""
        return self.set_state({"seed": seed, "step": 0, "stream": 0})

    def next_step(self) -> None:
        """Number streams from 0 again, in the next step; in a trace, for what is recorded after it."""
        recorder = active.get()
        if recorder is None:
            self.set_state({"seed": self.seed, "step": (self.step + 1) % 2**32, "stream": 0})
            return
        traced = self._traced(recorder)
        traced.key, traced.following, traced.stream = self._following(recorder, traced), None, 0

    def draw(self) -> tuple[Tensor, int]:
        """The key and the stream of the next op; the stream is used up."""
        recorder = active.get()
        if recorder is None:
            self._stream += 1
            return self._key, self._stream - 1
        traced = self._traced(recorder)
        self._following(recorder, traced)
        traced.stream += 1
        return traced.key, traced.stream - 1

    def _traced(self, recorder: Recorder) -> _Traced:
        if recorder not in self._traces:
            self._traces[recorder] = _Traced(Tensor(recorder.resolve(self._key)))
        return self._traces[recorder]

    def _following(self, recorder: Recorder, traced: _Traced) -> Tensor:
        """The key of the next step, which the run leaves behind."""
        if traced.following is None:
            with scoped("rng"):
                traced.following = traced.key + as_tensor(np.array([0, 1]))
            recorder.assign(self._key, traced.following)
        return traced.following

    def get_state(self) -> dict[str, int]:
        """Seed, step and next stream, as JSON can have them."""
        return {"seed": self.seed, "step": self.step, "stream": self._stream}

    def set_state(self, state: Mapping[str, int]) -> Generator:
        """Take the state that `get_state` gave; returns itself. Raises: UsageError with nothing changed."""
        try:
            seed, step, stream = (int(state[name]) for name in ("seed", "step", "stream"))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError("not the state of a generator", expected="seed, step, stream", got=state) from error
        if not (0 <= seed < 2**64 and 0 <= step < 2**32 and 0 <= stream < 2**32):
            raise UsageError("a seed has 64 bits, step and stream 32", expected="at least 0", got=dict(state))
        array = self._key.own()
        array.writable()
        array.to_numpy()[:] = np.array([seed, step], np.uint64).view(np.int64)  # by the host: `rng` loads no backend
        self._stream = stream
        return self

    state_dict, load_state_dict = get_state, set_state  # the names by which a training is saved


rng = Generator()
"""The running generator, which functions draw from by default."""


def manual_seed(seed: int) -> Generator:
    """Begin the running generator at step 0 of a seed. Raises: UsageError for one of more than 64 bits."""
    return rng.manual_seed(seed)


@contextmanager
def fork_rng(seed: int | None = None) -> Iterator[Generator]:
    """The running generator, perhaps with another seed, put back afterwards to where it was."""
    state = rng.get_state()
    try:
        yield rng if seed is None else rng.manual_seed(seed)
    finally:
        rng.set_state(state)


def _drawn(generator: Generator | None, device: Device) -> tuple[Tensor, int]:
    """Key and stream of the next op, the key on the device that draws."""
    key, stream = (generator or rng).draw()
    return (key if device == CPU else key.to(device)), stream


def _noise(name: str, shape: Shape, options: Mapping[str, Any]) -> Tensor:
    out = options.get("out")
    kind, there = target(shape, options.get("dtype"), options.get("device"), out)
    key, stream = _drawn(options.get("generator"), there)
    made = call(name, key, stream=stream, shape=shape, dtype=kind, out=out)
    if options.get("requires_grad"):
        made.requires_grad = True
    return made


class _Options(TypedDict, total=False):
    """What functions that draw an array take: as the factories of `autograd.create`, and a generator."""

    dtype: object
    requires_grad: bool
    generator: Generator | None
    device: Device | str | None
    out: Tensor | None


def rand(*shape: int | Sequence[int], **options: Unpack[_Options]) -> Tensor:
    """Uniform in [0, 1).

    Args:
        options: `dtype` (float32), `requires_grad`, `generator` (the running one), `device` (the CPU) and `out`.
    """
    return _noise("uniform", sizes(shape), options)


def randn(*shape: int | Sequence[int], **options: Unpack[_Options]) -> Tensor:
    """Standard normal; options as for `rand`."""
    return _noise("normal", sizes(shape), options)


def gumbel(*shape: int | Sequence[int], **options: Unpack[_Options]) -> Tensor:
    """Standard Gumbel: argmax(logits + gumbel) draws from softmax(logits). Options as for `rand`."""
    return _noise("gumbel", sizes(shape), options)


def randint(
    low: int,
    high: int,
    shape: Shape,
    *,
    dtype: object = None,
    generator: Generator | None = None,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Integers in low .. high - 1, int64 unless another dtype is said.

    Raises: UsageError unless low < high ≤ low + 2³¹.
    """
    kind, there = target(tuple(shape), int64 if dtype is None and out is None else dtype, device, out)
    key, stream = _drawn(generator, there)
    if out is not None and kind is int64:
        return call("randint", key, stream=stream, shape=tuple(shape), low=low, high=high, out=out)
    made = call("randint", key, stream=stream, shape=tuple(shape), low=low, high=high).to(kind)
    return made if out is None else out.copy_(made)


def rand_like(x: Tensor, dtype: object = None, **options: Any) -> Tensor:
    """Uniform in [0, 1), in the shape of another tensor, and in its dtype and on its device unless said."""
    return rand(*x.shape, **like(x, dtype, options))


def randn_like(x: Tensor, dtype: object = None, **options: Any) -> Tensor:
    """Standard normal, in the shape of another tensor, and in its dtype and on its device unless said."""
    return randn(*x.shape, **like(x, dtype, options))


def randint_like(x: Tensor, low: int, high: int, dtype: object = None, **options: Any) -> Tensor:
    """Integers in low .. high - 1, in the shape of another tensor, and in its dtype and on its device unless said."""
    return randint(low, high, x.shape, **like(x, dtype, options))


def bernoulli(p: Tensor, *, generator: Generator | None = None, out: Tensor | None = None) -> Tensor:
    """1 with probability p, else 0, elementwise; no gradient reaches p."""
    key, stream = _drawn(generator, lies(p))
    return call("bernoulli", p, key, stream=stream, out=out)


def stochastic_round(x: Tensor, *, generator: Generator | None = None) -> Tensor:
    """float32 as bfloat16, up or down at random so that the mean is x. Raises: DTypeError for another dtype."""
    key, stream = _drawn(generator, lies(x))
    return call("stochastic_round", x, key, stream=stream)


def multinomial(
    weights: Tensor, samples: int, replacement: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Places along the last axis in proportion to the weights: [..., K] -> [..., samples], int64.

    Raises: ShapeError for more samples than places, unless they are put back.
    """
    key, stream = _drawn(generator, lies(weights))
    return call("multinomial", weights, key, stream=stream, samples=samples, replacement=replacement)


def dropout(x: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """X / (1 - p) where a uniform number is at least p, else 0; the gradient passes where x did, by the same mask.

    Raises: UsageError for a p that is no probability.
    """
    key, stream = _drawn(generator, lies(x))
    return call("dropout", x, key, p=float(p), stream=stream)[0]
