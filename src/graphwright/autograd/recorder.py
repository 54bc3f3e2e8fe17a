"""The protocol by which the tracer turns tensor code into a graph; autograd knows nothing else of the tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from graphwright.array import Spec

if TYPE_CHECKING:
    from graphwright.autograd.named_sizes import NamedSizes
    from graphwright.autograd.tensor import Tensor
    from graphwright.autograd.variable import Variable
    from graphwright.ops import Op


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Symbol:
    """A value that is known only in a run: its spec, a handle of the recorder, and symbols that share its memory."""

    spec: Spec
    handle: Any
    recorder: Recorder
    aliases: list[ref[Symbol]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes; named ones are `TracedSize`. Raises: UnboundDim in a recorder without named sizes."""
        named = self.recorder.named if self.spec.symbolic else None
        return self.spec.sizes if named is None else named.shape(self.spec.shape)

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self.spec.dtype

    def alias(self) -> Symbol:
        """Return a new symbol of the same value, for a tensor that shares memory with this symbol's tensor."""
        other = Symbol(self.spec, self.handle, self.recorder)
        mark_alias(other, self)
        return other


def mark_alias(view: Symbol, base: Symbol) -> None:
    """Record that two symbols share memory: `view` joins `base.aliases`, the list that all such symbols have."""
    if not base.aliases:
        base.aliases.append(ref(base))
    object.__setattr__(view, "aliases", base.aliases)
    base.aliases.append(ref(view))


class Recorder(Protocol):
    """Records operations instead of running them.

    Attributes:
        named: the named sizes of the trace, if it has any.
        stops: whether what is recorded may be differentiated later, as a program; it need not be then.
    """

    named: NamedSizes | None
    stops: bool

    def resolve(self, tensor: Tensor) -> Symbol:
        """Return the symbol of a tensor: a traced value, a variable's current value in the trace, or a constant."""
        ...

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Record an operation; return a symbol for each result."""
        ...

    def detached(self, symbol: Symbol) -> Symbol:
        """Return a symbol of the same value and memory through which no gradient flows."""
        ...

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Record that a variable holds `value` from this point of the trace on, and after the step."""

    def update(self, targets: Sequence[Variable], op: Op, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> None:
        """Record an operation whose results, one per variable, the variables hold from this point of the trace on."""

    def assume(self, fact: Callable[[], object]) -> None:
        """Record an assumption: the trace is valid only while `fact()` returns the value that it returns now."""

    def optional(self, tensors: Iterable[Tensor]) -> None:
        """Mark results that callers often ignore: the trace ends without their ops if nothing reads them."""

    def label(self, symbol: Symbol, name: str) -> None:
        """Rename the node of a symbol, an op's result, to `name` within the present scope."""

    def path(self, symbol: Symbol) -> str:
        """Return the name of a symbol's node in the graph."""
        ...

    def before_grad(self, leaf: Tensor) -> None:
        """Remember the `grad` of a leaf, which is about to be set, to restore it after the trace."""
        ...

    def before_write(self, constant: Tensor) -> None:
        """Remember the array of a constant, which becomes a traced value, to restore it if the tensor is not local."""


scope: ContextVar[tuple[str, ...]] = ContextVar("graphwright_scope", default=())
"""Path segments that prefix the names of recorded nodes; modules and backward extend it."""


class scoped:  # lower case, as it is used like a function; a class, as every module call enters one
    """Context manager: prefix the names of nodes recorded inside with further path segments."""

    __slots__ = ("segments", "token")

    def __init__(self, *segments: str) -> None:
        self.segments = segments

    def __enter__(self) -> None:
        self.token = scope.set((*scope.get(), *self.segments))

    def __exit__(self, *exc: object) -> None:
        scope.reset(self.token)


differentiating: ContextVar[bool] = ContextVar("graphwright_differentiating", default=False)
"""True while a backward pass is recorded: the forward values that it reads may be recomputed."""


active_recorder: ContextVar[Recorder | None] = ContextVar("graphwright_recorder", default=None)
"""The recorder of the running trace; None outside traces."""


def optional(tensors: Iterable[Tensor]) -> None:
    """Mark results that callers often ignore, so that a trace does not contain ops whose results nothing reads."""
    recorder = active_recorder.get()
    if recorder is not None:
        recorder.optional(t for t in tensors if t.symbolic)


def labelled(tensor: Tensor, name: str) -> Tensor:
    """Return an op's result; in a trace its node is called `name` within the present scope."""
    if isinstance(tensor.data, Symbol):
        tensor.data.recorder.label(tensor.data, name)
    return tensor
