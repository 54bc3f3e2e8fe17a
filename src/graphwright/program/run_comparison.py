"""What ranks compare before each run of a program with collectives, so that a difference is an error on all of them.

A group of ranks compares its collectives in their order; the ranks of a divided model also compare their inputs and the
structure of their programs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.array.spec import Spec
from graphwright.array.world import described, group_of, world
from graphwright.ops import traits
from graphwright.program.axes.divide import common_structure, is_divided
from graphwright.program.weights import array_digest

if TYPE_CHECKING:
    from graphwright.autograd import Tensor
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


class RunComparison:
    """What a program or plan has in common on all ranks.

    Args:
        p: the program.
        nodes: (op, specs of operands, specs of results, attributes), in the order of execution.

    Attributes:
        structure: hash of the structure of a divided program, "" for others, of which collectives alone must agree.
        calls: (number of ranks, group) -> its collectives, as texts.
    """

    def __init__(self, p: Program, nodes: Iterable[tuple[str, list[Spec], list[Spec], Mapping[str, Any]]]) -> None:
        self.name, self.calls = p.name, dict[tuple[int, str], list[str]]()
        self.structure = f"structure {common_structure(p)}" if is_divided(p) else ""
        for op, ins, outs, attrs in nodes:
            row = traits(op)
            if not row.collective or row.waits:
                continue
            among = self.calls.setdefault((attrs["ranks"], attrs["group"]), [])
            if not row.point_to_point:  # which differ by rank, and are compared when they run
                among.append(described(op, outs[:1] if row.starts else ins, attrs))

    @contextmanager
    def before(self, inputs: Mapping[str, NDArray]) -> Iterator[None]:
        """Compare with the other ranks before a run, which is the block.

        Raises: WrongWorld, ProgramsDiffer, InputsDiffer, CollectivesDiffer, RankLost.
        """
        self._compare(inputs)
        group = world().group if self.calls else None
        with nullcontext() if group is None else group.running():
            yield

    def _compare(self, inputs: Mapping[str, NDArray]) -> None:
        for (ranks, group), calls in self.calls.items():
            if (others := group_of(ranks, group)) is None:
                continue
            fed, programs = list[str](), list[str]()
            if group == "model":
                fed = [f"{k}: {x.spec} {array_digest(x)[:12]}" for k, x in inputs.items()]
                programs = [self.structure] if self.structure else []
            if fed or calls or programs:
                label = f"the start of {self.name}"
                others.compare("the start", programs=programs, inputs=fed, calls=calls, label=label)


def compared(
    p: Program, nodes: Collection[NodeId], dims: Mapping[str, int], inputs: Mapping[str, Tensor]
) -> AbstractContextManager[None]:  # fmt: skip
    """Return `RunComparison.before` a run of nodes of a program one by one, with numbers for named sizes."""
    if world().group is None or not (found := {*p.of_traits(collective=True)}.intersection(nodes)):
        return nullcontext()
    ordered = [n for n in p.order() if n in found]
    bound = {n: ([p.spec(v).bind(dims) for v in p.operands(n)], [s.bind(dims) for s in p.specs(n)]) for n in ordered}
    arrays: dict[str, Any] = {name: x.data for name, x in inputs.items()}
    return RunComparison(p, ((p.op(n), *bound[n], p.attrs(n)) for n in ordered)).before(arrays)
