"""Transactions: an edit that is open in `with program.edit("why") as e: ...` and is undone in one step.

Invariant: methods of a transaction change the program only through `do`, so that the edit can be rolled back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from graphwright.array import Spec, float32
from graphwright.array import dtype as as_dtype
from graphwright.array.spec import check_dims
from graphwright.autograd import Parameter, Variable
from graphwright.errors import ShapeError, UsageError, check_type
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.program.axes.resize import cut_units, grow, permute
from graphwright.program.editing import edits
from graphwright.program.editing.duplicate import duplicate
from graphwright.program.editing.gate_edits import gate, release, set_gate, ungate
from graphwright.program.editing.interrupts import defer_interrupts, start_listening, stop_listening
from graphwright.program.editing.journal import AUTHORS, caller
from graphwright.program.editing.replace import replace
from graphwright.program.editing.unfold import fold, unfold
from graphwright.program.errors import EditClosed, NotAJunction, PortTaken
from graphwright.program.gates import gates_edges, of_site
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import ASSIGN, CONST, INPUT, PARAM, PATTERN, SOURCES, STATE
from graphwright.program.op_graph import Ref, Value
from graphwright.program.patterns import PatternVariable, check_free
from graphwright.program.primitives import order_back_edges, restore_order, update_node
from graphwright.program.validate import check_outputs, check_ports, infer
from graphwright.program.weights import as_array

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, Relabelled
    from graphwright.patterns import Pattern
    from graphwright.program.editing.edits import Edit
    from graphwright.program.editing.journal import Entry
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection

_LONGEST = 1 << 16  # steps of a delay, each of which adds a state


class Transaction:
    """An open edit of a program, made by `Program.edit`. Its methods apply primitive edits.

    Attributes:
        why, author, tool, line: fields of the journal entry; line is file:line of the user's code.
        done: list of (primitive edit, its inverse, its journal record) of the primitive edits so far.
        warnings: texts about legal changes that are probably not intended.
        cone: nodes that spec inference visited at the end of the edit.
    """

    def __init__(self, program: Program, why: str, author: str, tool: str | None, check: bool, keep_undo: bool) -> None:
        if author not in AUTHORS:
            fix = "pass the name of a program as tool="
            raise UsageError("unknown author", expected=", ".join(AUTHORS), got=author, fix=fix)
        self._program, self.why, self.author, self.tool, self.check = program, why, author, tool, check
        self.keep_undo, self.valid_before = keep_undo, program.valid
        self.owner, self._left, self._listens = 0, False, False
        self.cone: set[NodeId] = set()
        self.line = caller()
        self.done: list[tuple[Edit, Edit, dict[str, Any]]] = []
        self.touched: dict[NodeId, None] = {}
        self.warnings: list[str] = []
        self.specs_before: dict[NodeId, tuple[Spec, ...]] = {}
        self.relabelled: list[Relabelled[NodeId]] = []
        self.back_edges_before: frozenset[EdgeId] = frozenset()
        self._savepoints: list[tuple[int, int, dict[NodeId, None], frozenset[EdgeId]]] = []

    @property
    def program(self) -> Program:
        """The edited program. Raises: EditClosed outside the with-block, and so do all methods, because they use it."""
        if self._program.history.open is not self:
            state, where = "closed" if self._left else "not open", f"{self._program.name}, edit {self.why!r}"
            fix = "open an edit by `with program.edit(...) as e:` and use e inside the block"
            raise EditClosed(f"this edit is {state}", where=where, fix=fix)
        return self._program

    def do(self, edit: Edit) -> None:
        """Apply one primitive edit. If its `check` raises an error, nothing is changed."""
        p = self.program
        check_type("edit", edit, edits.Edit, "a primitive edit, such as RemoveEdge(edge)", "use a verb: e.cut(edge)")
        edit.check(p)
        if keys := edit.replaced(p):
            p.history.collect_trained(self, keys)  # the inverse stores the present value, which the journal must know
        record, inverse = edit.to_json(p), edit.invert(p)
        with defer_interrupts():
            edit.apply(p)
            self.done.append((edit, inverse, record))
            for key in edit.written:
                p.history.note(p.weights[key])
            if isinstance(edit, edits.AddNode) and edit.variable is not None:
                p.history.note(edit.variable)
            for node in edit.touches(p):
                self.touched[node] = None

    # -- begin, commit, roll back ------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        try:
            with defer_interrupts():
                return self._enter()
        except KeyboardInterrupt as error:  # raised while the edit was opened: no with-block will close it
            if self.owner:
                self.__exit__(type(error), error, None)
            raise

    def _enter(self) -> Self:
        p = self._program
        outer, thread = p.history.open, threading.get_ident()
        if self.owner:
            fix = "open a new edit with program.edit(...)"
            raise UsageError("this edit was already used in a with-block", where=self.why, fix=fix)
        if outer is None or outer.owner != thread:
            p.history.begin(self)
            self.owner, self.valid_before, self.back_edges_before = thread, p.valid, frozenset(p.back_edges)
            self._listens = start_listening()
            return self
        assert isinstance(outer, type(self))
        self._check_within(outer)
        # nested: a savepoint of the outer transaction, after the values that were trained so far
        self.owner = thread
        p.history.collect_trained(outer)
        outer._savepoints.append((len(outer.done), len(outer.relabelled), dict(outer.touched), frozenset(p.back_edges)))
        return outer

    def _check_within(self, outer: Transaction) -> None:
        """Raise UsageError if this edit has an option that the edit around it, which commits both, does not have."""
        if weaker := [name for name in ("check", "keep_undo") if getattr(outer, name) and not getattr(self, name)]:
            where = f"{self._program.name}, edit {self.why!r} within {outer.why!r}"
            expected, got = (", ".join(f"{name}={value}" for name in weaker) for value in (True, False))
            fix = "pass the option to the outer edit, or open this edit after the outer one"
            what = "an edit within an edit is a savepoint and cannot have weaker options"
            raise UsageError(what, where=where, expected=expected, got=got, fix=fix)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = None
        try:
            with defer_interrupts():
                entry = self._leave(failed=kind is not None)
        except KeyboardInterrupt:
            if not self._left:  # raised before interrupts were deferred
                with defer_interrupts():
                    self._leave(failed=True)
            raise
        finally:
            if entry is not None:
                self._program.history.notify(entry)

    def _leave(self, failed: bool) -> Entry | None:
        p = self._program
        self._left = True
        current = p.history.open
        assert current is not None, "an edit is left once"
        if current is not self:
            count, labels, touched, back_edges = current._savepoints.pop()
            if failed:
                p.history.drop_trained()
                current._roll_back(count, labels, back_edges)
                current.touched = touched
            return None
        if self._listens:
            stop_listening()
        if failed:
            self._abort()
            return None
        try:
            self._validate()
            entry = p.history.write(self)
        except BaseException:
            self._abort()
            raise
        p.history.end(entry)
        return entry

    def _abort(self) -> None:
        self._program.history.drop_trained()  # inverses of in-place writes need the memory that the edit wrote
        self._roll_back(0, 0, self.back_edges_before)
        self._program.valid = self.valid_before
        self._program.history.end(None, failed=True)

    def _validate(self) -> None:
        """Check for cycles and empty ports, and infer changed specs. Raises: CycleError, PortEmpty, SpecMismatch."""
        p = self._program
        p.history.collect_trained(self)
        # an earlier edit may have broken any node: then all of them are checked
        alive = [n for n in (self.touched if self.valid_before else p.nodes()) if n in p.graph]
        edits.sort_weights(p, [edit for pair in self.done for edit in pair[:2]])
        try:
            order_back_edges(p)
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
            with suppress(UsageError):  # infer as far as possible
                infer(p, alive, self.specs_before)
        if p.valid:
            p.constraints.check(p)
        for node in alive:
            if p.is_junction(node) and not p.graph.in_degree(node):
                self.warnings.append(f"{p.path(node)} has no edges left, so its value is zero")

    def _roll_back(self, count: int, labels: int, back_edges: frozenset[EdgeId]) -> None:
        """Revert primitive edits after the first `count` and reorderings after the first `labels`; set `back_edges`."""
        p = self._program
        p.tombstones.mode = "roll back"
        undone = [edit for pair in self.done[count:] for edit in pair[:2]]
        while len(self.done) > count:
            inverse = self.done.pop()[1]
            inverse.apply(p)
            for key in inverse.written:
                p.history.note(p.weights[key])
        edits.sort_weights(p, undone)
        while len(self.relabelled) > labels:
            restore_order(p, self.relabelled.pop())
        p.back_edges.clear()
        p.back_edges |= back_edges
        p.tombstones.mode = "edit"
        for node, specs in self.specs_before.items():  # the rest of the edit is inferred again when it ends
            if node in p.graph:
                update_node(p, node, specs=specs)
        self.specs_before.clear()

    # -- nodes -------------------------------------------------------------------------------------------------------
    def spec(self, ref: Ref) -> Spec:
        """Return the spec of a value, with the changes of this edit so far."""
        p = self.program
        with defer_interrupts():
            infer(p, [n for n in self.touched if n in p.graph], self.specs_before, wanted=p.node(ref))
        return p.spec(ref)

    def add(self, op: str, *inputs: Ref, name: str | None = None, **attrs: Any) -> NodeId:
        """Add an op node that reads `inputs` in order; return its handle, which can be used at once.

        Args:
            op: name of an op, or `"junction"`.
            inputs: values, or nodes, which stand for their first result.
            name: dotted path; by default the module of the first input followed by the op's name.
            attrs: attributes of the op.
        Raises: UnknownOp, ShapeError, DTypeError, NameTaken, BadName.
        """
        p, row = self.program, get(op)
        operands = [p.value(i) for i in inputs]
        module = p.path(operands[0].node).rpartition(".")[0] if operands else ""
        label = name if name is not None else p.free_name(f"{module}.{row.name}" if module else row.name)
        for operand in operands:
            if operand.node in self.touched:
                self.spec(operand)
        return self.add_op(op, operands, attrs, label)

    def add_op(self, op: str, operands: Sequence[Value], attrs: Mapping[str, Any], name: str) -> NodeId:
        """Add an op node with the path `name` and its input edges. The specs of its operands must be up to date."""
        p, row = self.program, get(op)
        full = row.complete(attrs, name)
        specs = row.specs([p.spec(v) for v in operands], full, name)
        latest = max((v.node for v in operands), key=p.order_labels.key, default=None)
        node = self.add_node(op, full, name, specs, after=latest)
        for port, operand in enumerate(operands):
            self.add_edge(operand, node, port)
        return node

    def add_node(
        self, kind: str, attrs: Mapping[str, Any], name: str, specs: tuple[Spec, ...],
        variable: Variable | None = None, after: NodeId | None = None,
    ) -> NodeId:  # fmt: skip
        """Add a node of an op or kind, without edges, after `after` in the topological order; return its handle."""
        p = self.program
        self.do(edits.AddNode(p.graph.next_node(), kind, attrs, name, specs, p._seq, variable, after))
        return p.node(name)

    def add_edge(self, src: Value, dst: NodeId, port: int) -> EdgeId:
        """Add an edge from a value to a port of a node; return its handle."""
        check_type("src", src, Value, "a Value", "program.value(path)")
        check_type("dst", dst, NodeId, "a NodeId", "program.node(path)")
        edge = self.program.graph.next_edge()
        self.do(edits.AddEdge(edge, src, dst, port))
        return edge

    def input(self, name: str, shape: Sequence[int | str], dtype: object = float32) -> NodeId:
        """Add an input of the program. Each size in `shape` is an int, or a str as a named size."""
        return self.add_node(INPUT, {}, name, (Spec(check_dims(shape, name), as_dtype(dtype)),))

    def param(self, name: str, value: Any, *, key: str | None = None, trainable: bool = True) -> NodeId:
        """Add a trained tensor with its initial value. `key` is its checkpoint key, by default the node's name."""
        array = as_array(value)
        variable = Parameter(array, trainable and array.dtype.is_float, key or name)
        return self.add_node(PARAM, {"key": key or name, "trainable": trainable}, name, (array.spec,), variable)

    def const(self, name: str, value: Any) -> NodeId:
        """Add a const, a tensor that is not trained."""
        return self._stored(CONST, name, value)

    def state(self, name: str, value: Any) -> NodeId:
        """Add a loop-carried tensor with its initial value; `assign` sets its next value."""
        return self._stored(STATE, name, value)

    def pattern(self, name: str, pattern: Pattern, *, key: str | None = None) -> NodeId:
        """Add the table of an attention pattern, which belongs to the program from now on.

        Args:
            name: path of the node.
            pattern: the pattern; its later edits are entries of the program's journal.
            key: key in `program.patterns`, by default the name.
        Raises: UsageError if the pattern belongs to another program.
        """
        check_free(pattern, self.program, name)
        variable = PatternVariable(pattern, key or name)
        return self.add_node(PATTERN, {"key": key or name}, name, (variable.spec,), variable)

    def _stored(self, kind: str, name: str, value: Any) -> NodeId:
        array, key = as_array(value), self.program.weights.free_key(name)
        return self.add_node(kind, {"key": key}, name, (array.spec,), Variable(array, name=key))

    def assign(self, state: Ref, value: Ref) -> NodeId:
        """Set the value that a state (or param) will have in the next step."""
        p = self.program
        target, following = p.value(state), p.value(value)
        if p.assigns(target):
            fix = "rewire the second edge of this assign node"
            raise PortTaken("the state already has an assign node", where=p.path(target), fix=fix)
        node = self.add_node(ASSIGN, {}, p.free_name(f"{p.path(target)}.next"), ())
        self.add_edge(target, node, 0)
        self.add_edge(following, node, 1)
        return node

    def remove(self, ref: Ref | Selection | Sequence[Ref]) -> None:
        """Remove nodes and all their edges. Ops that read them must be rewired or removed in the same edit."""
        p = self.program
        for node in p.nodes_of(ref):
            for edge in (*p.out_edges(node), *p.in_edges(node)):
                if edge in p.graph:  # a self-loop or an edge between two removed nodes is gone already
                    reader = p.graph.target(edge)
                    self.do(edits.RemoveEdge(edge))
                    self.touched[reader] = None
            self.do(edits.RemoveNode(node))

    def set_attr(self, ref: Ref, **attrs: Any) -> None:
        """Change attributes of a node. Equal values are not recorded. Raises: UsageError if no attribute is given."""
        node = self.program.node(ref)
        before = self.program.attrs(node)
        after = {**before, **attrs}
        if not attrs:
            known = ", ".join(f"{name}={value!r}" for name, value in before.items())
            fix = "pass attributes by keyword: e.set_attr(node, name=value)"
            expected = f"some of {known}" if known else "a node that has attributes"
            raise UsageError("no attribute is given", where=self.program.path(node), expected=expected, fix=fix)
        if repr(encode_attrs(after)) != repr(encode_attrs(before)):
            self.do(edits.SetAttr(node, after))

    def rename(self, ref: Ref, name: str, *, key: str | None = None) -> None:
        """Rename a node; its checkpoint key does not change unless `key` is given."""
        node = self.program.node(ref)
        if key is None or name != self.program.path(node):
            self.do(edits.Rename(node, name))
        if key is not None:
            self.do(edits.SetAttr(node, {**self.program.attrs(node), "key": key}))

    def set_weight(self, ref: Ref, value: Any | Callable[[np.ndarray], Any], inplace: bool = False) -> None:
        """Set the value of a param, const or state. All nodes that share a tied weight see the new value.

        Args:
            ref: the node, its name, or its checkpoint key.
            value: the new array, or a function that computes it from the present value, which is a numpy array (low
                precision as float32). It is cast to the weight's dtype; a different shape changes the weight's spec.
            inplace: write into the existing memory, so that other references to it see the new values. Memory of a
                file, a fork or the journal is never written: the weight then gets new memory. Raises: ShapeError.
        """
        p = self.program
        key = ref if isinstance(ref, str) and p.weights.has_key(ref) else p.key(p.node(ref))
        kind = p.weights.array(key).dtype
        if callable(value):
            value = value(p.weights.array(key).to_numpy("float32" if kind.is_low else None).copy())
        self.do(edits.SetWeight(key, as_array(value, kind), inplace))

    def annotate(self, name: str, **facts: Any) -> None:
        """Add a note to the journal: facts about the node, weight or axis `name`. `blame(name)` finds the note."""
        self.do(edits.Annotation(name, facts))

    def set_outputs(self, **outputs: Ref) -> None:
        """Replace the outputs of the program by `name=value` keywords, in their order."""
        self.do(edits.SetOutputs(tuple((name, self.program.value(ref)) for name, ref in outputs.items())))

    # -- edges -------------------------------------------------------------------------------------------------------
    def connect(self, src: Ref, dst: Ref, port: int | None = None, *, delay: int = 0) -> EdgeId:
        """Add an edge into a junction, or into an empty port of an op; return its handle.

        Args:
            src: the value that the edge carries.
            dst: the junction (or op) that it enters.
            port: port of `dst`; by default the first empty port of an op, or the next port of a junction.
            delay: number of steps by which the value is delayed. Each step adds a state with initial value zero. Only
                a delayed edge may close a cycle.
        Raises: PortTaken, CycleError with the path.
        """
        p = self.program
        value, target = p.value(src), p.node(dst)
        if type(delay) is not int or not 0 <= delay <= _LONGEST:
            expected = f"an integer in 0..{_LONGEST}"
            raise UsageError("invalid delay", where=p.path(target), expected=expected, got=repr(delay))
        for _ in range(delay):
            spec = self.spec(value)
            if spec.symbolic:
                where = f"{p.path(value)} -> {p.path(target)}"
                raise ShapeError("the delayed value has a named size", where=where, expected="a static shape", got=spec)
            zero = as_array(np.zeros(spec.shape, np.float32), spec.dtype)
            held = self.state(p.free_name(f"{p.path(target)}.held"), zero)
            self.assign(held, value)
            value = Value(held)
        if port is None and p.is_junction(target):
            port = int(p.graph.node(target, "next_port"))
        elif port is None and p.op(target) in SOURCES:
            raise NotAJunction(f"edges cannot enter {p.op(target)} nodes: they have no operands", where=p.path(target))
        elif port is None:
            taken = {p.edge_port(e) for e in p.in_edges(target)}
            port = next(i for i in range(len(taken) + 1) if i not in taken)
            arity = 2 if p.op(target) == ASSIGN else get(p.op(target)).arity
            most = arity if isinstance(arity, int) else arity[1]
            if most is not None and port >= most:
                fix = "call e.rewire(edge, new_src), or e.insert(edge, 'junction') and connect to the junction"
                raise PortTaken("every input of this op is already connected", where=p.path(target), fix=fix)
        return self.add_edge(value, target, port)

    def cut(self, edge: EdgeId | str) -> None:
        """Remove an edge, given by handle or as `"a -> b"`. A port of an op must get a new edge in the same edit."""
        edge = self.program.edge(edge)
        src, dst = self.program.graph.endpoints(edge)
        self.do(edits.RemoveEdge(edge))
        self.touched[dst] = None
        p = self.program
        if not p.graph.out_degree(src) and of_site(p, src) is not None and not gates_edges(p, src):
            release(self, src)  # a gate is removed with its edge

    def rewire(self, edge: EdgeId | str, src: Ref) -> None:
        """Change the source of an edge. The edge keeps its handle and port. Raises: CycleError with the path."""
        self.do(edits.Rewire(self.program.edge(edge), self.program.value(src)))

    def insert(self, edge: EdgeId | str, op: str, *, name: str | None = None, **attrs: Any) -> NodeId:
        """Insert a one-operand op or a junction into an edge, which keeps its handle and now starts at the new node."""
        p = self.program
        edge = p.edge(edge)
        label = name if name is not None else p.free_name(f"{p.path(p.graph.target(edge))}.{op}")
        node = self.add(op, p.edge_value(edge), name=label, **attrs)
        self.rewire(edge, node)
        return node

    def link(self, src: Ref, junction: Ref, weight: Any, *, name: str | None = None) -> EdgeId:
        """Connect `src` to a junction through a matrix: add a param with value `weight` [out, in] and a linear op."""
        p = self.program
        target = p.node(junction)
        if not p.is_junction(target):
            fix = "insert a junction by e.insert(edge, 'junction')"
            raise NotAJunction("the target of a link is not a junction", where=p.path(target), fix=fix)
        base = name if name is not None else p.free_name(f"{p.path(target)}.link")
        label = p.free_name(f"{base}.weight")  # a renamed link leaves its weight
        matrix = self.param(label, weight, key=p.weights.free_key(label))
        return self.connect(self.add("linear", src, matrix, name=base), target)

    # -- subgraphs, units and gates ----------------------------------------------------------------------------------
    replace = replace
    duplicate = duplicate
    unfold = unfold
    fold = fold
    cut_units = cut_units
    grow = grow
    permute = permute
    gate = gate
    ungate = ungate
    set_gate = set_gate
