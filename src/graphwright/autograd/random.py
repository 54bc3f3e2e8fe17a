"""Generators: seed, step and the next stream; and the functions that draw from the running one.

Outside a trace streams are numbered in the order of the calls, and `next_step()` starts them anew. In a trace each op
gets its stream when it is recorded, the key is a state of the program, and every run ends with the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from graphwright.array import dtype as named
from graphwright.array import float32, from_numpy
from graphwright.autograd.apply import as_tensor
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


def _noise(name: str, shape: Shape, dtype: object, requires_grad: bool, generator: Generator | None) -> Tensor:
    key, stream = (generator or rng).draw()
    made = call(name, key, stream=stream, shape=shape, dtype=named(dtype))
    made.requires_grad = requires_grad
    return made


def rand(
    *shape: int, dtype: object = float32, requires_grad: bool = False, generator: Generator | None = None
) -> Tensor:
    """Uniform in [0, 1)."""
    return _noise("uniform", shape, dtype, requires_grad, generator)


def randn(
    *shape: int, dtype: object = float32, requires_grad: bool = False, generator: Generator | None = None
) -> Tensor:
    """Standard normal."""
    return _noise("normal", shape, dtype, requires_grad, generator)


def gumbel(*shape: int, dtype: object = float32, generator: Generator | None = None) -> Tensor:
    """Standard Gumbel: argmax(logits + gumbel) draws from softmax(logits)."""
    return _noise("gumbel", shape, dtype, False, generator)


def randint(low: int, high: int, shape: Shape, *, generator: Generator | None = None) -> Tensor:
    """Integers in low .. high - 1, int64. Raises: UsageError unless low < high ≤ low + 2³¹."""
    key, stream = (generator or rng).draw()
    return call("randint", key, stream=stream, shape=tuple(shape), low=low, high=high)


def rand_like(x: Tensor, **options: Any) -> Tensor:
    """Uniform in [0, 1), of the shape and dtype of another tensor."""
    return rand(*x.shape, **{"dtype": x.dtype, **options})


def randn_like(x: Tensor, **options: Any) -> Tensor:
    """Standard normal, of the shape and dtype of another tensor."""
    return randn(*x.shape, **{"dtype": x.dtype, **options})


def bernoulli(p: Tensor, *, generator: Generator | None = None) -> Tensor:
    """1 with probability p, else 0, elementwise; no gradient reaches p."""
    key, stream = (generator or rng).draw()
    return call("bernoulli", p, key, stream=stream)


def multinomial(
    weights: Tensor, samples: int, replacement: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Places along the last axis in proportion to the weights: [..., K] -> [..., samples], int64.

    Raises: ShapeError for more samples than places, unless they are put back.
    """
    key, stream = (generator or rng).draw()
    return call("multinomial", weights, key, stream=stream, samples=samples, replacement=replacement)


def dropout(x: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """X / (1 - p) where a uniform number is at least p, else 0; the gradient passes where x did, by the same mask.

    Raises: UsageError for a p that is no probability.
    """
    key, stream = (generator or rng).draw()
    return call("dropout", x, key, p=float(p), stream=stream)[0]
