"""The autograd tape of a tensor as a program: to draw it, search it, or run it on other inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray, Spec
from graphwright.autograd import Parameter, Tensor, Variable
from graphwright.errors import UsageError
from graphwright.program.builder import new_program
from graphwright.program.kinds import CONST, INPUT, PARAM
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_source, insert_edge, insert_node, set_outputs
from graphwright.program.residual_sums import join_residuals
from graphwright.program.weights import add_weight, constant_variable, kind_of

if TYPE_CHECKING:
    from graphwright.program.program import Program

STEPS = 3  # least number of uses of one parameter for which the tape is a loop over steps; a tied weight has two uses


def tape(*tensors: Tensor, name: str = "tape") -> Program:
    """Return the graph through which gradients of eager tensors flow: `gw.tape(loss).to_svg("loss.svg")`.

    Parameters become params and other variables states; they share memory with the originals. An op is named after the
    module that ran it, or outside modules after that of the parameter that it reads. Of the other operands, scalars
    that the tape saved become consts; the rest become inputs, because their values were not saved. The ops of a loop
    over time that has no steps of its own (those of recurrent layers have) are named `step.0.<op>`, `step.1.<op>`, ...,
    so that pictures fold the loop; the step of an op is the number of earlier uses of its parameters. Outputs are
    `out`, `out_1`, ... Residual sums are junctions, as in `gw.trace`.
    Raises: UsageError for a tensor without a tape, or inside a trace.
    """
    for t in tensors:
        if not isinstance(t, Tensor) or t.node is None or not isinstance(t.data, NDArray):
            raise UsageError("the tensor has no tape: it was not computed from a tensor that requires a gradient",
                             got=repr(t)[:80], fix="gw.trace(fn, *examples) records any tensor code")  # fmt: skip
    nodes = sorted(_ancestors([t.node for t in tensors]), key=lambda node: node.seq)
    made = _TapeProgram(name, _steps(nodes))
    for node in nodes:
        made.add(node)
    set_outputs(made.program, {f"out_{i}" if i else "out": made.values[t.node, t.port] for i, t in enumerate(tensors)})
    join_residuals(made.program)
    return made.program


def _ancestors(roots: Sequence[Any]) -> set[Any]:
    """Return the tape nodes on which the roots depend, and the roots."""
    stack, seen = list(roots), set(roots)
    while stack:
        for edge in stack.pop().edges:
            if isinstance(edge, tuple) and edge[0] not in seen:
                seen.add(edge[0])
                stack.append(edge[0])
    return seen


def _steps(nodes: Sequence[Any]) -> dict[Any, int]:
    """Map each tape node to its step in a loop over time; empty if no parameter is used often enough for a loop.

    The step of a node is the number of earlier uses of its parameters, but not less than the steps of its operands.
    """
    uses: Counter[int] = Counter()
    step: dict[Any, int] = {}
    for node in nodes:
        if _in_step(node):
            step[node] = 0
            continue
        own = {id(edge) for edge in node.edges if isinstance(edge, Parameter)}
        before = [step[edge[0]] for edge in node.edges if isinstance(edge, tuple)]
        step[node] = max([0, *before, *(uses[leaf] for leaf in own)])
        uses.update(own)
    return step if max(uses.values(), default=0) >= STEPS else {}


def _in_step(node: Any) -> bool:
    """Return True if an op ran in a numbered step of a layer."""
    return any(segment.startswith("step.") for segment in node.scope)


class _TapeProgram:
    """The program built from a tape; `values` maps (tape node, result number), or the id of a leaf, to its value."""

    def __init__(self, name: str, steps: Mapping[Any, int]) -> None:
        self.program = new_program(name)
        self.values: dict[Any, Value] = {}
        self._steps = steps
        self._leaves: list[Tensor] = []  # kept alive, so that no id is reused

    def add(self, node: Any) -> None:
        """Add a node for a tape node; the nodes of its operands must already be in the program."""
        p = self.program
        step = f"step.{self._steps[node]}." if self._steps and not _in_step(node) else ""
        prefix = step + "".join(f"{segment}." for segment in node.scope)
        operands = [self._operand(node, number, edge, prefix) for number, edge in enumerate(node.edges)]
        owners = [edge.name for edge in node.edges if isinstance(edge, Parameter) and "." in edge.name]
        module = f"{owners[0].rpartition('.')[0]}." if owners and not node.scope else ""
        name = p.free_name(prefix + module + node.op.name)
        made = insert_node(p, node.op.name, node.attrs, name, tuple(node.out_specs))
        for port, value in enumerate(operands):
            insert_edge(p, value, made, port)
        for port in range(len(node.out_specs)):
            self.values[node, port] = Value(made, port)

    def _operand(self, node: Any, number: int, edge: Any, prefix: str) -> Value:
        if isinstance(edge, tuple):
            return self.values[edge]
        if edge is None:
            saved = next((value for at, value, _ in node.saved or () if at == number), None)
            if isinstance(saved, NDArray) and not saved.shape:
                return self._stored(CONST, f"{prefix}scalar", constant_variable(saved, "scalar"))
            return self._source(INPUT, f"{prefix}input", node.in_specs[number], {})
        if id(edge) not in self.values:
            self._leaves.append(edge)
            if isinstance(edge, Variable):
                kind = kind_of(edge)
                self.values[id(edge)] = self._stored(kind, edge.name or kind, edge)
            else:
                self.values[id(edge)] = self._source(INPUT, edge.name or "leaf", edge.spec, {})
        return self.values[id(edge)]

    def _source(self, kind: str, name: str, spec: Spec, attrs: dict[str, Any]) -> Value:
        return Value(add_source(self.program, kind, self.program.free_name(name), spec, attrs))

    def _stored(self, kind: str, name: str, variable: Variable) -> Value:
        name = self.program.free_name(name)
        add_weight(self.program.weights, name, variable)
        attrs: dict[str, Any] = {"key": name, "trainable": True} if kind == PARAM else {"key": name}
        return self._source(kind, name, variable.spec, attrs)
