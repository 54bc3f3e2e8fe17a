"""Threshold routers in a program: the named values of each, and the weights of its experts."""

from __future__ import annotations

from dataclasses import dataclass

from graphwright.experts.routed import NotAMixture
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.program import Program, Value
from graphwright.program.axes.solve_axes import origin
from graphwright.program.kinds import KINDS

VALUES = (
    "directions",
    "prototypes",
    "cosine",
    "thresholds",
    "logits",
    "scores",
    "margin",
    "hits",
    "unrouted",
    "mask",
    "weights",
)
"""Names, below the path of its router, of the values that `nn.ThresholdRouter` computes."""


@dataclass(frozen=True, slots=True)
class RouterNodes:
    """A threshold router of a program.

    Attributes:
        program: the program.
        path: of the router, such as `layers.3.mlp.router`.
    """

    program: Program
    path: str

    def name(self, value: str) -> str:
        """Return the path of the node of one of `VALUES`."""
        return f"{self.path}.{value}" if self.path else value

    def value(self, value: str) -> Value:
        """Return one of `VALUES`. Raises: UnknownNode if an edit removed or renamed it."""
        return self.program.value(self.name(value))

    @property
    def mixture(self) -> NodeId:
        """The node that runs the experts: it has the tokens as operand 0, and the experts' weights as operand groups.

        Raises: NotAMixture if no such node reads the choice.
        """
        p = self.program
        for dispatched in p.consumers(self.value("mask").node):
            for node in p.consumers(dispatched):
                if p.op(node) not in KINDS and get(p.op(node)).groups is not None:
                    return node
        raise NotAMixture("no node runs experts by the choice of this router", where=self.name("mask"))

    @property
    def alive(self) -> str:
        """Key of the weight bool [E] that says which experts are alive."""
        return self._keys(self.value("margin"))[0]

    @property
    def eta(self) -> str:
        """Key of the parameter η [], whose exponential is the slope of the weights."""
        return self._keys(self.program.operands(self.value("logits").node)[1])[0]

    @property
    def thresholds(self) -> tuple[str, ...]:
        """Keys of the thresholds [] of the experts, in order."""
        return self._keys(self.value("thresholds"))

    @property
    def prototypes(self) -> tuple[str, ...]:
        """Keys of the prototypes [C] of the experts, in order."""
        return self._keys(self.value("prototypes"))

    def _keys(self, value: Value) -> tuple[str, ...]:
        p = self.program
        weights = (origin(p, operand) for operand in p.operands(value.node))
        return tuple(p.key(weight) for weight in weights if weight is not None)


def threshold_routers(program: Program) -> list[RouterNodes]:
    """Return the threshold routers of a program, in topological order of their cosines."""
    paths = {program.path(node) for node in program.nodes()}
    found = []
    for path in (p for p in map(program.path, program.order()) if p == "cosine" or p.endswith(".cosine")):
        made = RouterNodes(program, path.rpartition(".")[0])
        found += [made] if {made.name(value) for value in VALUES} <= paths else []
    return found
