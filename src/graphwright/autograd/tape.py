"""The tape: one node per differentiable operation, holding only what its vjp reads; hooks; a report of its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import PurePath
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

from graphwright.array import NDArray, Spec
from graphwright.autograd.recorder import Symbol, scope

if TYPE_CHECKING:
    from graphwright.autograd.function import FunctionRule
    from graphwright.autograd.tensor import Tensor
    from graphwright.ops import Op

    VjpRule = Op | FunctionRule

_sequence = count()
_PACKAGE = str(PurePath(__file__).parent.parent)


class TapeNode:
    """One operation on the tape.

    Attributes:
        op, attrs: the op, or the `FunctionRule` of a call of a user's Function, and its attributes.
        edges: per operand (node, result number) that made it, the leaf itself, or None if it needs no gradient.
        saved: values that the vjp reads as (index, value, storage version when saved), where indices count operands
            first, then results; None after they were freed.
        in_specs, out_specs: specs of operands and of results.
        path: name of the recorded node; empty outside traces.
        scope: path segments of the modules, steps and backwards inside which it ran.
        seq: creation number; backward runs from high to low.
        hooks: result number -> hooks to call with its full gradient.
        retained: weak references to result tensors whose gradient is stored in `grad`.
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
        "scope",
        "seq",
    )

    def __init__(
        self,
        op: VjpRule,
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
        self.scope = scope.get()
        keep = op.saves
        self.saved: Sequence[tuple[int, Any, int]] | None = ()
        if keep.inputs or keep.outputs or keep.every:
            count, unread = len(data), _unread(op, self.edges)
            self.saved = [
                *[_saved(i, data[i]) for i in keep.reads(count) if i != unread],
                *[_saved(count + i, outputs[i].data) for i in keep.outputs],
            ]
        self.hooks: dict[int, list[Hook]] | None = None
        self.retained: list[ref[Tensor]] | None = None
        self._called_at = _user_frame()

    def take(self, outputs: Sequence[Tensor]) -> None:
        """Make this the tape node of the floating results: set their `node`, `port` and `requires_grad`."""
        for port, out in enumerate(outputs):
            if out.data.dtype.is_float:
                out.node, out.port, out.requires_grad = self, port, True

    def free(self) -> None:
        """Release the saved values."""
        self.saved = None

    @property
    def line(self) -> str:
        """`file:line` of the user's code that ran the operation."""
        code, at = self._called_at
        found = (line for start, stop, line in code.co_lines() if start <= at < stop)
        return f"{code.co_filename}:{next(found, None) or code.co_firstlineno}"


def _unread(op: VjpRule, edges: Sequence[Any]) -> int | None:
    """Return the operand in which an op is linear if it alone needs a gradient, which does not depend on its value."""
    needed = [i for i, edge in enumerate(edges) if edge is not None]
    return needed[0] if len(needed) == 1 and needed[0] in op.traits.linear_in else None


def _saved(index: int, value: Any) -> tuple[int, Any, int]:
    return index, value, value.version if isinstance(value, NDArray) else 0


def _user_frame() -> tuple[CodeType, int]:
    """Return code and instruction offset of the innermost frame outside this package, for `TapeNode.line`."""
    frame: FrameType = sys._getframe(3)  # the caller of `apply`
    while _ours[(code := frame.f_code).co_filename] and (caller := frame.f_back) is not None:
        frame = caller
    return code, frame.f_lasti


class _PackageFiles(dict[str, bool]):
    """Cache: file name -> True if the file belongs to this package."""

    def __missing__(self, file: str) -> bool:
        self[file] = found = file.startswith(_PACKAGE)
        return found


_ours = _PackageFiles()


class Hook:
    """A function registered on a tensor, which backward calls with the tensor's full gradient."""

    __slots__ = ("_owner", "call")

    def __init__(self, call: Callable[[Tensor], Tensor | None], owner: list[Hook]) -> None:
        self.call, self._owner = call, owner
        owner.append(self)

    def remove(self) -> None:
        """Unregister the function; a second call does nothing."""
        if self in self._owner:
            self._owner.remove(self)


def reachable_nodes(roots: Iterable[Tensor]) -> set[TapeNode]:
    """Return every tape node that the roots depend on."""
    stack = [t.node for t in roots if t.node is not None]
    found = set(stack)
    while stack:
        for edge in stack.pop().edges:
            if isinstance(edge, tuple) and edge[0] not in found:
                found.add(edge[0])
                stack.append(edge[0])
    return found


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """Memory that one taped operation keeps alive for backward."""

    op: str  # its name
    line: str  # `file:line` at which it ran
    nbytes: int  # bytes of blocks that no earlier operation and no leaf holds


def memory(outputs: Tensor | Sequence[Tensor]) -> list[SavedMemory]:
    """Return the memory that backward from `outputs` keeps alive, per operation in the order in which they ran.

    >>> sum(m.nbytes for m in memory(loss))
    """
    seen: set[int] = set()
    result = []
    for node in sorted(reachable_nodes(outputs if isinstance(outputs, Sequence) else [outputs]), key=lambda n: n.seq):
        nbytes = 0
        leaves = {id(e.data.storage) for e in node.edges if hasattr(e, "data") and isinstance(e.data, NDArray)}
        for _, array, _ in node.saved or ():
            if isinstance(array, NDArray) and id(array.storage) not in seen | leaves:
                seen.add(id(array.storage))
                nbytes += array.storage.nbytes
        result.append(SavedMemory(node.op.name, node.line, nbytes))
    return result
