"""Variables and parameters: leaves whose value changes while they stay who they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import DType, NDArray, changes, float32
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.recorder import active
from graphwright.autograd.tensor import Tensor
from graphwright.errors import AliasError, ShapeError
from graphwright.ops import compute, get

if TYPE_CHECKING:
    import numpy as np

Step = tuple[tuple[int, ...], dict[int, np.ndarray]]
"""The shape before, and axis -> for each place after it the one it had, or -1 for a new one."""


class Lineage:
    """A shape that an edit gave a variable.

    Attributes:
        before: the shape that it came from; None for the first one.
        sizes: the shape before, as numbers.
        places: axis -> for each new place the old one, or -1 for one that is new; axes left out are as they were.
    """

    __slots__ = ("before", "places", "sizes")

    def __init__(self, before: Lineage | None, sizes: tuple[int, ...], places: Mapping[int, np.ndarray]) -> None:
        self.before, self.sizes, self.places = before, sizes, dict(places)

    def there(self) -> Step:
        """From the shape before to this one."""
        return self.sizes, self.places

    def back(self) -> Step:
        """From this shape to the one before: for each old place the new one, or -1 for what was removed."""
        after = tuple(len(self.places[i]) if i in self.places else n for i, n in enumerate(self.sizes))
        return after, {axis: inverse(places, self.sizes[axis]) for axis, places in self.places.items()}


def inverse(places: np.ndarray, size: int) -> np.ndarray:
    """For each of `size` old places the new one, or -1; of several the first."""
    found = np.full(size, -1, np.int64)
    kept = np.flatnonzero(places >= 0)[::-1]
    found[places[kept]] = kept
    return found


def path(old: Lineage | None, new: Lineage | None) -> Iterator[Step]:
    """Steps that lead from one shape of a variable to another."""
    above = list(_up(new))
    step = old
    while step is not None and step not in above:
        yield step.back()
        step = step.before
    for link in reversed(above[: above.index(step)]):
        assert link is not None
        yield link.there()


def moved(host: np.ndarray, places: Mapping[int, np.ndarray]) -> np.ndarray:
    """An array with its entries at other places, new ones zero."""
    for axis, old in places.items():
        host = np.take(host, np.maximum(old, 0), axis) if host.shape[axis] else np.zeros_like(
            host, shape=(*host.shape[:axis], len(old), *host.shape[axis + 1 :]))  # fmt: skip
        host[(slice(None),) * axis + (old < 0,)] = 0
    return host


def _up(step: Lineage | None) -> Iterator[Lineage | None]:
    while step is not None:
        yield step
        step = step.before
    yield None


_BINDING = frozenset({"data", "shared", "requires_grad"})
"""What a plan relies on to stay as it is."""


class Variable(Tensor):
    """A leaf that keeps its identity while its value changes: state of a model or an optimizer.

    Tracing turns it into a `param` or `state` node; assigning to it becomes a write at the end of the step. Its array
    is copied before the first write if it maps a file or `shared` says that somebody else holds it.

    Args:
        data: an NDArray, which it holds; of a tensor, numpy array or number a copy.
    """

    __slots__ = ("lineage", "shared")
    data: NDArray  # never a symbol
    carried: ClassVar[bool] = True

    def __init__(self, data: Any, requires_grad: bool = False, name: str = "") -> None:
        super().__init__(data if isinstance(data, NDArray) else held(data), requires_grad, name)
        self.shared = False
        self.lineage: Lineage | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _BINDING:
            changes.rise()

    def own(self) -> NDArray:
        """The array, made private and writable first if it is not."""
        if self.shared or self.data.storage.readonly or not self.data.contiguous:
            self.data, self.shared = self.data.copy(), False
        return self.data

    def reshape_to(self, data: NDArray, places: Mapping[int, np.ndarray], *, back: bool = False) -> None:
        """Take an array of another shape whose entries come from the places given; a gradient is forgotten.

        Args:
            data: the values.
            places: axis -> old place of each new one, -1 for a new one.
            back: this takes the last change of shape back.
        """
        here = self.lineage
        if back and here is not None and here.sizes == data.shape:
            self.lineage = here.before
        else:
            self.lineage = Lineage(here, self.data.shape, places)
        self.data, self.shared, self.grad = data, True, None

    def assign(self, value: Tensor) -> None:
        """Take the value of a tensor of the same spec. Raises: ShapeError."""
        if value.spec != self.spec:
            raise ShapeError("a variable keeps its spec", where=self.name or None, expected=self.spec, got=value.spec)
        recorder = active.get()
        if recorder is not None:
            recorder.assign(self, value)
        else:
            assert isinstance(value.data, NDArray)
            self.own().copy_from(value.data)


class HostVariable(Variable):
    """A variable that stays on the host whatever computes with it, as eager code there reads it too: a generator's key.

    A plan on another device sends its value there in each step.
    """

    __slots__ = ()


class Parameter(Variable):
    """A variable that is trained; the gradient of a 16-bit one is summed and kept in float32."""

    __slots__ = ()

    def __init__(self, data: Any, requires_grad: bool = True, name: str = "") -> None:
        super().__init__(data, requires_grad, name)

    @property
    def grad_dtype(self) -> DType:
        """As above: in 8 bits of significand, a sum of 300 ones is 256."""
        return float32 if self.data.dtype.is_low else self.data.dtype


def share(variables: Iterable[Variable], shared: bool) -> None:
    """Set `shared` of many variables, counted as one change."""
    for variable in variables:
        object.__setattr__(variable, "shared", shared)
    changes.rise()


def held(value: Any) -> NDArray:
    """The array of a value, with memory of its own. Raises: TraceError for a traced tensor."""
    given = as_tensor(value)
    return given._array("a variable").copy()


def update(targets: Sequence[Variable], name: str, *operands: Tensor, **attrs: Any) -> None:
    """Run an op whose results replace the values of variables, in place where it can; keeps no tape.

    Args:
        targets: one variable per result of the op, in order.
        name: an op; results that its `inplace` trait pairs with an operand are written over it.
    """
    row = get(name)
    full = row.complete(attrs)
    recorder = active.get()
    if recorder is not None:
        for target, symbol in zip(
            targets, recorder.record(row, [recorder.resolve(o) for o in operands], full), strict=True
        ):
            recorder.assign(target, Tensor(symbol))
        return
    outs = [target.own() for target in targets]
    arrays = [o._array(f"an update by {name}") for o in operands]
    try:
        compute(row, arrays, full, outs)
    except AliasError:  # an op that reads an operand after it wrote the result: made aside, then copied
        for out, result in zip(outs, compute(row, arrays, full), strict=True):
            out.copy_from(result)
