"""`with program.edit("why") as e`: one transaction is one undo step. The verbs are lists of primitive edits.

Invariant: whatever a verb changes it changes through `do`, so that `Atomic` can take it back.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from graphwright.array import Spec, float32
from graphwright.array import dtype as as_dtype
from graphwright.autograd import Parameter, Variable
from graphwright.errors import ShapeError, UsageError
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.program.axes.resize import cut_units, grow, permute
from graphwright.program.editing.edits import (
    AddEdge,
    AddNode,
    Remark,
    RemoveEdge,
    RemoveNode,
    Rename,
    Rewire,
    SetAttr,
    SetOutputs,
    SetWeight,
    replaced,
    written,
)
from graphwright.program.editing.gate_edits import gate, release, set_states, ungate
from graphwright.program.editing.interrupts import held_back, keep_listening, listen_no_longer
from graphwright.program.editing.journal import AUTHORS
from graphwright.program.editing.replace import replace
from graphwright.program.editing.unfold import fold, unfold
from graphwright.program.errors import NotAJunction, PortTaken
from graphwright.program.gates import of_site
from graphwright.program.hashing import encode_attrs
from graphwright.program.infer import check_outputs, check_ports, infer
from graphwright.program.kinds import CONST, INPUT, PARAM, SOURCES, STATE, WRITE
from graphwright.program.op_graph import Value
from graphwright.program.weights import as_array

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, Relabelled
    from graphwright.program.axes.units import Units
    from graphwright.program.editing.edits import (
        Edit,
    )
    from graphwright.program.editing.journal import Entry
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection

_PACKAGE = str(Path(__file__).parents[2])


class Atomic:
    """An open edit of a program: what was done, and how it ends.

    Attributes:
        why, author, tool, line: what the journal entry will say; line is the user's file and line.
        done: the primitive edits made so far, each with its inverse and its JSON form.
        warnings: what is allowed but probably not meant.
        cone: nodes that inference looked at when the edit was left.
    """

    def __init__(self, program: Program, why: str, author: str, tool: str | None, check: bool, keep_undo: bool) -> None:
        if author not in AUTHORS:
            raise UsageError("no such author", expected=", ".join(AUTHORS), got=author, fix="name a program by tool=")
        self.program, self.why, self.author, self.tool, self.check = program, why, author, tool, check
        self.keep_undo, self.valid_before = keep_undo, program.valid
        self.owner, self._left, self._listens = 0, False, False
        self.cone: set[NodeId] = set()
        self.line = _caller()
        self.done: list[tuple[Edit, Edit, dict[str, Any]]] = []
        self.touched: dict[NodeId, None] = {}
        self.warnings: list[str] = []
        self.specs_before: dict[NodeId, tuple[Spec, ...]] = {}
        self.relabelled: list[Relabelled[NodeId]] = []
        self.loose_before: frozenset[EdgeId] = frozenset()
        self._savepoints: list[tuple[int, int, dict[NodeId, None], frozenset[EdgeId]]] = []

    def do(self, edit: Edit) -> None:
        """Make one primitive edit. Raises what its check raises, with nothing changed."""
        p = self.program
        edit.check(p)
        if keys := replaced(edit, p):
            p.history.collect_trained(self, keys)  # the inverse takes the value from before: it must be the journal's
        record, inverse = edit.to_json(p), edit.invert(p)
        with held_back():
            edit.apply(p)
            self.done.append((edit, inverse, record))
            for key in written(edit):
                p.history.note(p.weights[key])
            if isinstance(edit, AddNode) and edit.variable is not None:
                p.history.note(edit.variable)
            for node in edit.touches(p):
                self.touched[node] = None

    def __enter__(self) -> Self:
        try:
            with held_back():
                return self._enter()
        except KeyboardInterrupt as error:  # it came while the edit was opened: nobody else would close it
            if self.owner:
                self.__exit__(type(error), error, None)
            raise

    def _enter(self) -> Self:
        p = self.program
        outer, thread = p.history.open, threading.get_ident()
        if self.owner:
            raise UsageError("an edit is entered once", where=self.why, fix="open another with program.edit(...)")
        if outer is None or outer.owner != thread:
            p.history.begin(self)
            self.owner, self.valid_before, self.loose_before = thread, p.valid, frozenset(p.loose)
            self._listens = keep_listening()
            return self
        assert isinstance(outer, type(self))
        # nested: a savepoint of the outer transaction, what was trained so far before it
        self.owner = thread
        p.history.collect_trained(outer)
        outer._savepoints.append((len(outer.done), len(outer.relabelled), dict(outer.touched), frozenset(p.loose)))
        return outer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = None
        try:
            with held_back():
                entry = self._leave(failed=kind is not None)
        except KeyboardInterrupt:
            if not self._left:  # it came before it was held back
                with held_back():
                    self._leave(failed=True)
            raise
        finally:
            if entry is not None:
                self.program.history.tell(entry)

    def _leave(self, failed: bool) -> Entry | None:
        p = self.program
        self._left = True
        current = p.history.open
        assert current is not None, "an edit is left once"
        if current is not self:
            mark, labels, touched, loose = current._savepoints.pop()
            if failed:
                p.history.drop_trained()
                current._roll_back(mark, labels, loose)
                current.touched = touched
            return None
        if self._listens:
            listen_no_longer()
        if failed:
            self._give_up()
            return None
        try:
            self._settle()
            entry = p.history.write(self)
        except BaseException:
            self._give_up()
            raise
        p.history.end(entry)
        return entry

    def _give_up(self) -> None:
        self.program.history.drop_trained()  # what was set in place is put back where it was set
        self._roll_back(0, 0, self.loose_before)
        self.program.valid = self.valid_before
        self.program.history.end(None, failed=True)

    def _settle(self) -> None:
        """Check order and ports, and bring specs up to date. Raises: CycleError, PortEmpty, SpecMismatch."""
        p = self.program
        p.history.collect_trained(self)
        # what was broken before may be anywhere: then everything is looked at
        alive = [n for n in (self.touched if self.valid_before else p.nodes()) if n in p.graph]
        p.sort_weights([edit for pair in self.done for edit in pair[:2]])
        try:
            p.straighten()
            for node in alive:
                check_ports(p, node)
            self.cone = infer(p, alive, self.specs_before)
            fewer = (n in p.graph and len(p.specs(n)) < len(had) for n, had in self.specs_before.items())
            if not self.valid_before or any(fewer):
                check_outputs(p)
            p.valid = True
        except UsageError:
            if self.check:
                raise
            p.valid = False
            with suppress(UsageError):  # what can be inferred is
                infer(p, alive, self.specs_before)
        if p.valid:
            p.constraints.check(p)
        for node in alive:
            if p.is_junction(node) and not p.graph.in_degree(node):
                self.warnings.append(f"{p.path(node)} has no edge left and is zero")

    def _roll_back(self, mark: int, labels: int, loose: frozenset[EdgeId]) -> None:
        p = self.program
        p.graveyard.mode = "roll back"
        undone = [edit for pair in self.done[mark:] for edit in pair[:2]]
        while len(self.done) > mark:
            inverse = self.done.pop()[1]
            inverse.apply(p)
            for key in written(inverse):
                p.history.note(p.weights[key])
        p.sort_weights(undone)
        while len(self.relabelled) > labels:
            p.restore_order(self.relabelled.pop())
        p.loose.clear()
        p.loose |= loose
        p.graveyard.mode = "edit"
        for node, specs in self.specs_before.items():  # what is left of the edit is inferred again when it ends
            if node in p.graph:
                p.update_node(node, specs=specs)
        self.specs_before.clear()


def _caller() -> str | None:
    """file:line of the first frame outside this package and the standard library's contextlib."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or "contextlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


Ref = NodeId | Value | str


class Transaction(Atomic):
    """An open edit of a program; made by `Program.edit`. Its verbs are made of primitive edits."""

    # -- looking, inside the edit ------------------------------------------------------------------------------------
    def spec(self, ref: Ref) -> Spec:
        """Spec of a value, changes of this edit included."""
        p = self.program
        with held_back():
            infer(p, [n for n in self.touched if n in p.graph], self.specs_before, wanted=p.node(ref))
        return p.spec(ref)

    # -- nodes -------------------------------------------------------------------------------------------------------
    def add(self, op: str, *inputs: Ref, name: str | None = None, **attrs: Any) -> NodeId:
        """Add an op reading `inputs` in order; returns its handle, usable at once.

        Args:
            op: name of an op, `"junction"` included.
            inputs: nodes (their first result), values or names.
            name: dotted path; by default the first input's module with the op's name behind.
            attrs: attributes of the op.
        Raises: UnknownOp, ShapeError, DTypeError, NameTaken, BadName.
        """
        p = self.program
        row = get(op)
        operands = [p.value(i) for i in inputs]
        label = name if name is not None else p.free_name(self._default_name(op, operands))
        full = row.complete(attrs, label)
        for operand in operands:
            if operand.node in self.touched:
                self.spec(operand)
        specs = row.specs([p.spec(v) for v in operands], full, label)
        latest = max((v.node for v in operands), key=p.order_labels.key, default=None)
        node = self._node(op, full, label, specs, after=latest)
        for port, operand in enumerate(operands):
            self._edge(operand, node, port)
        return node

    def _default_name(self, op: str, operands: Sequence[Value]) -> str:
        if not operands:
            return op
        module = self.program.path(operands[0]).rpartition(".")[0]
        return f"{module}.{op}" if module else op

    def _node(
        self,
        kind: str,
        attrs: Mapping[str, Any],
        name: str,
        specs: tuple[Spec, ...],
        variable: Variable | None = None,
        after: NodeId | None = None,
    ) -> NodeId:
        p = self.program
        self.do(AddNode(p.graph.next_node(), kind, attrs, name, specs, p._seq, variable, after))
        return p.node(name)

    def _edge(self, src: Value, dst: NodeId, port: int) -> EdgeId:
        edge = self.program.graph.next_edge()
        self.do(AddEdge(edge, src, dst, port))
        return edge

    def input(self, name: str, shape: Sequence[int | str], dtype: object = float32) -> NodeId:
        """Add an input; sizes may be names."""
        known = isinstance(shape, list | tuple) and all(
            isinstance(d, str) if type(d) is not int else d >= 0 for d in shape
        )
        if not known:
            raise ShapeError("a shape is a tuple of sizes and names", where=name, got=repr(shape))
        return self._node(INPUT, {}, name, (Spec(tuple(shape), as_dtype(dtype)),))

    def param(self, name: str, value: Any, *, key: str | None = None, trainable: bool = True) -> NodeId:
        """Add a trained tensor with its first value; `key` is its name in a checkpoint, the node's name by default."""
        array = as_array(value)
        variable = Parameter(array, trainable and array.dtype.is_float, key or name)
        return self._node(PARAM, {"key": key or name, "trainable": trainable}, name, (array.spec,), variable)

    def const(self, name: str, value: Any) -> NodeId:
        """Add a fixed tensor."""
        array = as_array(value)
        key = self._free_key(name)
        return self._node(CONST, {"key": key}, name, (array.spec,), Variable(array, name=key))

    def state(self, name: str, value: Any) -> NodeId:
        """Add a tensor that is carried from step to step, with its first value."""
        array = as_array(value)
        key = self._free_key(name)
        return self._node(STATE, {"key": key}, name, (array.spec,), Variable(array, name=key))

    def _free_key(self, wanted: str) -> str:
        """`wanted`, or with a number behind: a renamed node keeps its key, so a free name may be a taken key."""
        n, key = 1, wanted
        while key in self.program.weights:
            n, key = n + 1, f"{wanted}_{n + 1}"
        return key

    def carry(self, src: Ref, state: Ref) -> NodeId:
        """Let a state (or param) have the value of `src` in the next step."""
        p = self.program
        target, value = p.value(state), p.value(src)
        if any(p.op(n) == WRITE for n in p.consumers(target)):
            raise PortTaken(
                "this state is written already", where=p.path(target), fix="e.rewire the write's second edge"
            )
        node = self._node(WRITE, {}, p.free_name(f"{p.path(target)}.next"), ())
        self._edge(target, node, 0)
        self._edge(value, node, 1)
        return node

    def remove(self, ref: Ref | Selection | Sequence[Ref]) -> None:
        """Remove nodes with all their edges; what read them must be rewired or removed in the same edit."""
        p = self.program
        for node in p.nodes_of(ref):
            for edge in (*p.out_edges(node), *p.in_edges(node)):
                if edge in p.graph:  # a self-loop or an edge between two removed nodes went with the first
                    reader = p.graph.target(edge)
                    self.do(RemoveEdge(edge))
                    self.touched[reader] = None
            self.do(RemoveNode(node))

    def set_attr(self, ref: Ref, **attrs: Any) -> None:
        """Change attributes of a node; those that are as they were make no edit. Raises: UsageError without any."""
        node = self.program.node(ref)
        before = self.program.attrs(node)
        after = {**before, **attrs}
        if not attrs:
            known = ", ".join(f"{name}={value!r}" for name, value in before.items())
            raise UsageError(
                "no attribute is given",
                where=self.program.path(node),
                expected=f"some of {known}" if known else "a node that has attributes",
                fix="e.set_attr(node, name=value)",
            )
        if repr(encode_attrs(after)) != repr(encode_attrs(before)):
            self.do(SetAttr(node, after))

    def rename(self, ref: Ref, name: str, *, key: str | None = None) -> None:
        """Give a node another name; its checkpoint key stays, unless another `key` is given."""
        node = self.program.node(ref)
        if key is None or name != self.program.path(node):
            self.do(Rename(node, name))
        if key is not None:
            self.do(SetAttr(node, {**self.program.attrs(node), "key": key}))

    def set_weight(self, ref: Ref, value: Any | Callable[[np.ndarray], Any], inplace: bool = False) -> None:
        """Put another value under a param's key; all readers of tied weights see it.

        Args:
            ref: the param node, its name, or its checkpoint key.
            value: an array, or a function of the present value as float32 (or wider) numpy array. It is stored in the
                param's dtype; another shape changes the param's spec.
            inplace: write into the memory that is there, so that whoever looks at it sees the new values; memory of a
                file, a fork or the journal is left alone, and the weight gets its own. Raises: ShapeError.
        """
        p = self.program
        key = ref if isinstance(ref, str) and ref in p.weights else p.key(p.node(ref))
        kind = p.weights.array(key).dtype
        if callable(value):
            value = value(p.weights.array(key).to_numpy("float32" if kind.is_low else None).copy())
        self.do(SetWeight(key, as_array(value, kind), inplace))

    def remark(self, name: str, **facts: Any) -> None:
        """Say in the journal why something is done to what `name` names: `blame(name)` finds it. Nothing is changed."""
        self.do(Remark(name, facts))

    def set_outputs(self, **outputs: Ref) -> None:
        """Declare the program's results."""
        self.do(SetOutputs(tuple((name, self.program.value(ref)) for name, ref in outputs.items())))

    # -- edges -------------------------------------------------------------------------------------------------------
    def connect(self, src: Ref, dst: Ref, port: int | None = None, *, delay: int = 0) -> EdgeId:
        """Add an edge into a junction, or into an empty port; returns its handle.

        Args:
            src: what the edge carries.
            dst: the junction (or op) it enters.
            port: of an op; a junction takes the next one.
            delay: steps by which the edge's value lags behind, through that many states that start at zero; a cycle
                may be closed by a delayed edge only.
        Raises: PortTaken, CycleError with the path.
        """
        p = self.program
        value, target = p.value(src), p.node(dst)
        if type(delay) is not int or delay < 0:
            raise UsageError(
                "a delay is a number of steps", where=p.path(target), expected="an integer from 0 on", got=repr(delay)
            )
        for _ in range(delay):
            spec = self.spec(value)
            if spec.symbolic:
                raise ShapeError(
                    "a delay keeps a value from step to step, and its size is not known",
                    where=f"{p.path(value)} -> {p.path(target)}",
                    got=spec,
                )
            zero = as_array(np.zeros(spec.shape, np.float32), spec.dtype)
            held = self.state(p.free_name(f"{p.path(target)}.held"), zero)
            self.carry(value, held)
            value = Value(held)
        if port is None and p.is_junction(target):
            port = int(p.graph.node(target, "next_port"))
        elif port is None and p.op(target) in SOURCES:
            raise NotAJunction("a source reads nothing", where=p.path(target), got=p.op(target))
        elif port is None:
            taken = {p.edge_port(e) for e in p.in_edges(target)}
            port = next(i for i in range(len(taken) + 1) if i not in taken)
            arity = 2 if p.op(target) == WRITE else get(p.op(target)).arity
            most = arity if isinstance(arity, int) else arity[1]
            if most is not None and port >= most:
                raise PortTaken(
                    "all ports of the op have their edge",
                    where=p.path(target),
                    fix="e.rewire(edge, new_src), or e.insert(edge, 'junction') and connect there",
                )
        return self._edge(value, target, port)

    def cut(self, edge: EdgeId | str) -> None:
        """Remove an edge into a junction; a port's edge only if the port is filled again in the same edit.

        Args:
            edge: its handle, or its ends: `"layers.1.mlp.down -> layers.1.out"`.
        """
        edge = self.program.edge(edge)
        src, dst = self.program.graph.endpoints(edge)
        self.do(RemoveEdge(edge))
        self.touched[dst] = None
        if not self.program.graph.out_degree(src) and of_site(self.program, src) is not None:
            release(self, src)  # a gate goes with its edge

    def rewire(self, edge: EdgeId | str, src: Ref) -> None:
        """Let an edge start at another value; handle and port stay. Raises: CycleError with the path."""
        self.do(Rewire(self.program.edge(edge), self.program.value(src)))

    def insert(self, edge: EdgeId | str, op: str, *, name: str | None = None, **attrs: Any) -> NodeId:
        """Put a one-operand op (or a junction) on an edge; the edge keeps handle and port, and leaves the new node."""
        p = self.program
        edge = p.edge(edge)
        source = p.edge_value(edge)
        if name is None:
            name = p.free_name(f"{p.path(p.graph.target(edge))}.{op}")
        node = self.add(op, source, name=name, **attrs)
        self.rewire(edge, node)
        return node

    def link(self, src: Ref, junction: Ref, weight: Any, *, name: str | None = None) -> EdgeId:
        """Connect through a matrix: adds param `weight` [out, in], a linear op, and the edge into the junction."""
        p = self.program
        target = p.node(junction)
        if not p.is_junction(target):
            raise NotAJunction("a link ends in a junction", where=p.path(target), fix="e.insert(edge, 'junction')")
        base = name if name is not None else p.free_name(f"{p.path(target)}.link")
        matrix = self.param(f"{base}.weight", weight)
        return self.connect(self.add("linear", src, matrix, name=base), target)

    def replace(
        self,
        selection: Selection | Sequence[NodeId],
        subprogram: Program,
        match: Mapping[str, Ref] | None = None,
    ) -> dict[str, NodeId]:
        """Put another program where a selection is; see `graphwright.program.editing.replace`."""
        return replace(self, self.program.nodes_of(selection), subprogram, match)

    # -- units -------------------------------------------------------------------------------------------------------
    def cut_units(self, units: Units, *, ragged: bool = False, correct: bool = True, allow_io: bool = False) -> None:
        """Remove units of some axes from every weight along them; other weights and all other places keep their bits.

        Args:
            units: `program.axes()["layers.1.attn.heads"].units([3])`, or `program.select("layers.1.attn").heads[3]`.
            ragged: let key heads have query heads in unequal number: a table then says which key head each one reads.
            correct: keep RMSNorms over a cut axis exact where the units that go are zero.
            allow_io: also where inputs or outputs of the program change their size.
        Raises: EmptySelection, FrozenAxis with the reason, RaggedUnit, EmptyAxis for the last unit, StaleSelection if
            an axis has another size by now.
        """
        cut_units(self, units, ragged=ragged, correct=correct, allow_io=allow_io)

    def grow(self, axis: str, n: int, init: str = "zero_out", *, seed: int = 0, allow_io: bool = False) -> None:
        """Add `n` units at the end of an axis; the function stays the same.

        Args:
            axis: name in `program.axes()`.
            init: "zero_out": new rows random, what reads them 0; where a norm runs over the axis new rows are 0 and
                what reads them random. "duplicate": copies of random units, which share what reads them by random
                parts, from a quarter to three quarters.
            seed: of the random numbers.
            allow_io: also where inputs or outputs of the program change their size.
        Raises: FrozenAxis, UsageError where no weight reads the axis alone.
        """
        grow(self, axis, n, init, seed, allow_io)

    def permute(self, axis: str, order: Sequence[int], *, allow_io: bool = False) -> None:
        """Put the units of an axis in another order: new unit i is the old `order[i]`. The function stays the same.

        With `allow_io` also where inputs or outputs of the program change their order: these then are permuted.

        Raises: FrozenAxis, UsageError if `order` is none.
        """
        permute(self, axis, order, allow_io)

    # -- gates -------------------------------------------------------------------------------------------------------
    @overload
    def gate(self, target: EdgeId | Ref, kind: str = ..., *, init: Any = ..., group: str | None = ...,
             cost: Any = ...) -> NodeId: ...  # fmt: skip

    @overload
    def gate(self, target: Any, kind: str = ..., *, init: Any = ..., group: str | None = ...,
             cost: Any = ...) -> Any: ...  # fmt: skip

    def gate(
        self,
        target: Any,
        kind: str = "hard_concrete",
        *,
        init: Any = None,
        group: str | None = None,
        cost: str | float | Sequence[float] = "params",
    ) -> NodeId | tuple[NodeId, ...]:
        """Multiply messages, units, layers or a node's result by a trained gate.

        Args:
            target: an edge into a junction (handle, or its ends); a node; units of whole axes; layers; or several
                edges or nodes, each with a gate of its own, for a `choice` with one gate among them.
            kind: see `graphwright.array.formulas.gates.KINDS`.
            init: logits, a number or one per element; by default those of the kind.
            group: name of the temperature it shares; by default `hard_concrete` at 2/3 for that kind, else `default`.
            cost: what an open element costs: "params" that go with it, "one", or whole numbers.
        Returns: the handle, which is the node that multiplies; several for units and for several targets.
        Raises: GateNotAllowed for an edge into a port, NotZeroPreserving for an axis on which zero is not removal,
            DeadGate for logits that are not finite, StaleHandle, UnknownEdge.
        """
        return gate(self, target, kind, init, group, cost)

    def ungate(self, handle: NodeId) -> None:
        """Take a gate out, as if it were 1; its slot is given out again. Raises: StaleHandle, UnknownGate."""
        ungate(self, handle)

    def set_gate(self, handle: NodeId, state: str, elements: Any = None) -> None:
        """Hold a gate, or some of its elements: `open` at 1, `closed` at 0, `frozen` as it is; `soft` trains it."""
        set_states(self, handle, state, elements)

    def unfold(self, ref: Ref, axis: str, units: int | None = None) -> NodeId:
        """Write an op as one op per unit of an axis, summed by a junction; the same function, by the same weights.

        Cutting the edge of unit h into the junction leaves that unit out, as a mask would. A bias is added behind
        the sum.

        Args:
            axis: of `linear` "in" (split by heads, an o-projection sums its heads) or "out"; of `matmul` "in", "rows",
                "columns" or "heads"; of `sdpa` "heads".
            units: into how many parts; by default as many as a `flatten` before the axis or an `unflatten` behind it
                says, else one per entry.
        Returns: the node that now has the op's name and readers. Raises: UsageError for another op or axis, ShapeError.
        """
        return unfold(self, self.program.node(ref), axis, units)

    def fold(self, ref: Ref) -> NodeId:
        """Put the op back that `unfold` split; the program's hash is what it was.

        Args:
            ref: the node that has the op's name.
        Raises: UsageError if a unit was cut or changed, or is read elsewhere.
        """
        return fold(self, self.program.node(ref))
