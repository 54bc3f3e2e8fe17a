"""The protocol by which a layer above turns tensor code into a graph. Autograd knows nothing behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from graphwright.array import Spec
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor
    from graphwright.autograd.variable import Variable
    from graphwright.ops import Op


class TraceError(UsageError):
    """Traced code asked for a number that only a run can know."""


class TraceMutation(TraceError):
    """Traced code would write over memory, and something else shows it."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Symbol:
    """A value that a recorder will give a run: its spec, the recorder's own handle, and the views it is one of."""

    spec: Spec
    handle: Any
    recorder: Recorder
    family: list[ref[Symbol]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape; tracing works on numbers."""
        return self.spec.sizes

    @property
    def dtype(self) -> Any:
        """DType."""
        return self.spec.dtype

    def alias(self) -> Symbol:
        """The same value for another tensor."""
        other = Symbol(self.spec, self.handle, self.recorder)
        share(other, self)
        return other


def share(view: Symbol, base: Symbol) -> None:
    """Note that two symbols show the same memory."""
    if not base.family:
        base.family.append(ref(base))
    object.__setattr__(view, "family", base.family)
    base.family.append(ref(view))


class Recorder(Protocol):
    """Takes down operations instead of running them."""

    def resolve(self, tensor: Tensor) -> Symbol:
        """The symbol of a tensor: a traced value, a variable's value at this point, or a constant."""
        ...

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Take down one operation."""
        ...

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Take down that a variable holds `value` from here on, and after the step."""
        ...

    def rely(self, fact: Callable[[], object]) -> None:
        """Take down that what is recorded holds while `fact()` gives what it gives now."""
        ...

    def path(self, symbol: Symbol) -> str:
        """The name under which a symbol's node stands in the graph."""
        ...

    def received(self, leaf: Tensor) -> None:
        """Told before a leaf's gradient is set, so that tracing leaves no trace on it."""
        ...


scope: ContextVar[tuple[str, ...]] = ContextVar("graphwright_scope", default=())
"""Path segments under which recorded nodes are named; modules and backward extend it."""


class scoped:  # reads as a function; a class, as each call of a module enters one
    """Name what is recorded inside under further path segments."""

    __slots__ = ("segments", "token")

    def __init__(self, *segments: str) -> None:
        self.segments = segments

    def __enter__(self) -> None:
        self.token = scope.set((*scope.get(), *self.segments))

    def __exit__(self, *exc: object) -> None:
        scope.reset(self.token)


differentiating: ContextVar[bool] = ContextVar("graphwright_differentiating", default=False)
"""True while a vjp is recorded: what it reads of the forward may be computed again."""


class vjp_of(scoped):
    """Record a vjp under the path of its operation."""

    __slots__ = ("inside",)

    def __init__(self, path: str) -> None:
        super().__init__("grad", path)

    def __enter__(self) -> None:
        self.inside = differentiating.set(True)
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__()
        differentiating.reset(self.inside)


active: ContextVar[Recorder | None] = ContextVar("graphwright_recorder", default=None)
