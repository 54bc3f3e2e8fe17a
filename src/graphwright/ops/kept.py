"""Small arrays to which a kernel of many calls stays bound: copying operands in and results out beats binding again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphwright.array.backend import Backend, Call
from graphwright.array.device import CPU
from graphwright.array.ndarray import NDArray
from graphwright.array.spec import Spec
from graphwright.ops.registry import Attrs, Op

MOST_BYTES = 1 << 16
"""Of operands, results and scratch together; above it the copies cost what they save."""
FEWEST_CALLS = 4


class Bound(NamedTuple):
    """Calls that compute `outs` from `ins`."""

    calls: list[Call]
    ins: list[NDArray]
    outs: list[NDArray]


@dataclass(slots=True)
class Kept:
    """The bindings of one use of an op; one that runs is taken out, so that threads do not meet in it.

    Attributes:
        specs, scratch: of results, and of what the kernel wants beside them.
        bound: by the text of the attributes, as 0.0 and -0.0 are equal and differ.
    """

    row: Op
    kernels: Backend
    specs: Sequence[Spec]
    scratch: Sequence[Spec]
    bound: dict[tuple[str, ...], list[Bound]] = field(default_factory=dict)

    @staticmethod
    def worth(ins: Sequence[NDArray], specs: Sequence[Spec], scratch: Sequence[Spec], calls: int) -> bool:
        """Whether a use whose kernel is so many calls should be kept: its copied operands must lie as they do."""
        nbytes = sum(a.nbytes for a in ins) + sum(s.nbytes for s in (*specs, *scratch))
        alike = all(a.device is CPU and a.contiguous for a in ins)
        return calls >= FEWEST_CALLS and nbytes <= MOST_BYTES and alike

    def run(self, ins: Sequence[NDArray], attrs: Attrs) -> tuple[NDArray, ...]:
        """New results of an op."""
        pool = self.bound.setdefault(tuple(map(repr, attrs.values())), [])
        try:
            bound = pool.pop()
        except IndexError:
            bound = self._bind(ins, attrs)
        for own, given in zip(bound.ins, ins, strict=True):
            self.kernels.copy(own, given)
        for call in bound.calls:
            call()
        results = tuple([out.copy() for out in bound.outs])
        pool.append(bound)
        return results

    def _bind(self, ins: Sequence[NDArray], attrs: Attrs) -> Bound:
        own, outs, work = (
            [self.kernels.empty(s.sizes, s.dtype) for s in specs]
            for specs in ([a.spec for a in ins], self.specs, self.scratch)
        )
        return Bound(self.kernels.bind(self.row.name, outs, own, attrs, work), own, outs)
