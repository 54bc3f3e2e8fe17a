"""The tape: one node per operation that a gradient may flow through, with what its vjp reads and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import PurePath
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from graphwright.array import NDArray, Spec
from graphwright.autograd.recorder import Symbol
from graphwright.ops import Saves

if TYPE_CHECKING:
    from graphwright.autograd.hooks import Hook
    from graphwright.autograd.tensor import Tensor

_sequence = count()
_PACKAGE = str(PurePath(__file__).parent.parent)


class Rule(Protocol):
    """What the tape asks of a row; `ops.Op` has it, and so has a user's Function."""

    @property
    def name(self) -> str:
        """Of the operation."""
        ...

    @property
    def saves(self) -> Saves:
        """What the vjp reads."""
        ...

    @property
    def vjp(self) -> Callable[..., tuple[Any, ...]] | None:
        """Gradients of the results -> gradients of the operands."""
        ...

    @property
    def why(self) -> Mapping[str, str]:
        """The reason if there is no vjp."""
        ...


Saved = tuple[int, Any, int]


class TapeNode:
    """What backward needs of one operation.

    Attributes:
        op, attrs: the row and its attributes.
        edges: per operand the (node, port) that made it, the leaf itself, or None if it wants no gradient.
        saved: what the vjp reads, as (place, value, storage version when it was saved): of operands, then, counted on,
            of results; None after they were freed.
        in_specs, out_specs: specs of operands and of results.
        path: name of the recorded node, while tracing.
        seq: creation number; backward runs from high to low.
        hooks: port -> what to call with its full gradient.
        retained: tensors made here whose gradient is kept.
    """

    __slots__ = (
        "__weakref__",
        "_called_at",
        "attrs",
        "edges",
        "hooks",
        "in_specs",
        "op",
        "out_specs",
        "path",
        "retained",
        "saved",
        "seq",
    )

    def __init__(
        self,
        op: Rule,
        attrs: Mapping[str, Any],
        inputs: Sequence[Tensor],
        data: Sequence[Any],
        outputs: Sequence[Tensor],
    ) -> None:
        self.op, self.attrs, self.seq = op, attrs, next(_sequence)
        self.edges: list[Any] = []
        self.in_specs: list[Spec] = []
        for t, d in zip(inputs, data, strict=True):
            self.edges.append(None if not t.requires_grad else t if t.node is None else (t.node, t.port))
            self.in_specs.append(d.spec)
        first = outputs[0].data
        self.out_specs: list[Spec] = [first.spec] if len(outputs) == 1 else [t.data.spec for t in outputs]
        self.path = first.recorder.path(first) if isinstance(first, Symbol) else ""
        keep = op.saves
        self.saved: Sequence[Saved] | None = ()
        if keep.inputs or keep.outputs:
            count = len(data)
            self.saved = [
                *[_saved(i, data[i]) for i in keep.inputs if i < count],
                *[_saved(count + i, outputs[i].data) for i in keep.outputs],
            ]
        self.hooks: dict[int, list[Hook]] | None = None
        self.retained: list[ref[Tensor]] | None = None
        self._called_at = _user_frame()

    def take(self, outputs: Sequence[Tensor]) -> None:
        """Put the floating results on the tape as made here."""
        for port, out in enumerate(outputs):
            if out.data.dtype.is_float:
                out.node, out.port, out.requires_grad = self, port, True

    def free(self) -> None:
        """Let go of the saved values."""
        self.saved = None

    @property
    def line(self) -> str:
        """`file:line` of the caller's code that ran the operation."""
        code, at = self._called_at
        found = (line for start, stop, line in code.co_lines() if start <= at < stop)
        return f"{code.co_filename}:{next(found, None) or code.co_firstlineno}"


def _saved(place: int, value: Any) -> Saved:
    return place, value, value.version if isinstance(value, NDArray) else 0


def _user_frame() -> tuple[CodeType, int]:
    """Code and place of the innermost frame outside this package; a line number is worked out when it is asked for."""
    frame: FrameType = sys._getframe(3)  # of who called `apply`
    while _ours[(code := frame.f_code).co_filename] and (caller := frame.f_back) is not None:
        frame = caller
    return code, frame.f_lasti


class _Ours(dict[str, bool]):
    """Whether a file is one of this package, remembered."""

    def __missing__(self, file: str) -> bool:
        self[file] = found = file.startswith(_PACKAGE)
        return found


_ours = _Ours()
