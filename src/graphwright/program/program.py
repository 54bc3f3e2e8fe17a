"""Program: a graph of ops with its weights and history. Every model is one: built, opened, traced or evolved.

Invariant: outside an open edit every port has an edge, every spec is what its op infers, and there is no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from graphwright.arguments import checked
from graphwright.autograd import Parameter, changes
from graphwright.errors import UsageError, check_type
from graphwright.graph import EdgeId, NodeId
from graphwright.program.axes.axes import axes
from graphwright.program.constraints import Constraints
from graphwright.program.derived.gradient import differentiate
from graphwright.program.derived.inference import inference
from graphwright.program.diff import diff
from graphwright.program.editing.history import History
from graphwright.program.editing.journal import Journal
from graphwright.program.editing.replace import expand, extract
from graphwright.program.editing.transaction import Transaction
from graphwright.program.exclusive import exclusive, exclusively
from graphwright.program.files.parameters import load_parameters, parameters_of, save_parameters
from graphwright.program.files.save import save
from graphwright.program.fork import at, fork
from graphwright.program.formula import formula
from graphwright.program.gates import gates
from graphwright.program.kinds import CONST, KINDS, PARAM, STATE
from graphwright.program.op_graph import OpGraph, Value
from graphwright.program.patterns import patterns
from graphwright.program.run import evaluate, run
from graphwright.program.selection import Filters, Selection
from graphwright.program.validate import validate
from graphwright.program.weights import Weights
from graphwright.signatures import keywords, late

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.autograd import Tensor, Variable
    from graphwright.patterns import Pattern
    from graphwright.program.axes.units import Units
    from graphwright.program.editing.journal import Entry
    from graphwright.report import Report


class Program(OpGraph):
    """A directed graph of ops and its weights, edited while it runs. `OpGraph` has the methods that read the graph.

    Attributes:
        graph: nodes and edges; read it freely, change it only through `edit`.
        weights: variables by checkpoint key or node path.
        history_bytes: limit in bytes of the arrays stored in memory for undo; older arrays go to a temporary file.
        undo_horizon: number of latest edits that can be undone; older entries keep their record, not their arrays. None
            for all edits. It takes effect at the next edit.
        version: increases with every committed edit.
        plan_version: increases with every committed edit except those that change only edges of patterns, which are
            data of a plan; a plan belongs to one plan version.
        derived: objects that upper layers cache with the program and can rebuild, such as plans.
        journal: every edit, undo and redo.
        valid: False while an edit with `check=False` left the program broken; `validate()` reports where.
        constraints: conditions on the program; every commit checks the enforced ones.
        checkpoints: subgraphs whose inner values the backward recomputes; see `checkpoint`.
        readonly: True for a past state returned by `at`; fork it to continue from there.
        imported: how the program was imported, from torch, transformers or ONNX; None for others.
        module_state: for a program of a torch module: key of its `state_dict()` -> key of the weight here, or the
            variable of a tensor that no node reads. `as_module` returns these keys; it is not saved.
        source: for a derived program, the program from which it was derived, and its version.
    """

    def __init__(self, name: str = "program") -> None:
        super().__init__()
        self.name = name
        self.weights = Weights(self)
        self._version = self._plan_version = 0
        self.journal = Journal()
        self.history_bytes = 4 << 30
        self.undo_horizon: int | None = None
        self.valid = True
        self.readonly = False
        self.derived: dict[str, Any] = {}
        self.imported: Report | None = None
        self.module_state: Mapping[str, str | Variable] = {}
        self.source: tuple[Program, int] | None = None
        self.constraints = Constraints()
        self.checkpoints: tuple[frozenset[NodeId], ...] = ()
        self.history = History(self)
        self.graph.describe = self.history.describe

    def empty(self, name: str) -> Self:
        """Return a new program without nodes, for modules that cannot import this class."""
        return type(self)(name)

    @property
    def version(self) -> int:
        """The number of committed edits, undos and redos; a fork continues the count of its program."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._plan_version += value - self._version
        self._version = value
        changes.rise()

    @property
    def plan_version(self) -> int:
        """The number of committed edits that plans and derived programs must follow: all but those of patterns."""
        return self._plan_version

    def count_pattern_edit(self) -> None:
        """Increment `version` alone, after an edit that changed only edges of patterns."""
        self._version += 1
        changes.rise()

    def plan_again(self) -> None:
        """Let plans and derived programs be made again, as after an edit."""
        self._plan_version += 1
        changes.rise()

    # -- inspection --------------------------------------------------------------------------------------------------
    axes = exclusively(axes)
    gates = exclusively(gates)
    validate = exclusively(validate)
    diff = exclusively(diff)

    @overload
    def select(self, pattern: str = "**", *, units: None = None, **filters: Unpack[Filters]) -> Selection: ...
    @overload
    def select(self, pattern: str = "**", *, units: str, **filters: Unpack[Filters]) -> Units: ...
    @keywords(Selection.of)
    def select(self, pattern: str = "**", *, units: str | None = None, **filters: Unpack[Filters]) -> Selection | Units:
        """Select nodes by path pattern and filters, see `Selection.of`.

        With `units` (`heads`, `neurons`, ...), return the units of this kind that the selected nodes produce.
        """
        with exclusive(self):
            selection = Selection.of(self, pattern, **filters)
            return selection if units is None else selection.units(units)

    def constants(self) -> dict[str, NDArray]:
        """Return the arrays of all params and consts by checkpoint key, in topological order."""
        stored = [n for n in self.order() if self.op(n) in (PARAM, CONST)]
        return {key: self.weights.array(key) for key in dict.fromkeys(self.key(n) for n in stored)}

    def parameters(self) -> Iterator[Parameter]:
        """Iterate over the trainable variables for an optimizer, in creation order; a tied variable occurs once."""
        attrs = map(self.attrs, self.params())
        found = (self.weights[each["key"]] for each in attrs if each.get("trainable", True))
        return iter(dict.fromkeys(v for v in found if isinstance(v, Parameter)))

    def named_parameters(self) -> Iterator[tuple[str, Variable]]:
        """Iterate over (checkpoint key, variable) of all params, trained or frozen, in topological order.

        A tied param occurs once. Unlike `weights`, this leaves out states, and consts such as the frequencies of RoPE.
        """
        return iter(parameters_of(self).items())

    @property
    def patterns(self) -> dict[str, Pattern]:
        """Map key to attention pattern, of the patterns that nodes read; edits of a pattern are in the journal."""
        return patterns(self)

    def variables(self) -> dict[str, Variable]:
        """Map checkpoint key to variable for all params and states, as saved with the state of a training run."""
        nodes = (n for n in self.nodes() if self.op(n) in (PARAM, STATE))
        return {key: self.weights[key] for key in dict.fromkeys(map(self.key, nodes))}

    def hash(self) -> str:
        """Return the sha256 of the structure and the bytes of all weights; equal programs have equal hashes."""
        with exclusive(self):
            return self._structure.full(self.weights)

    def state_hash(self) -> str:
        """Return a hash like `hash`; a weight not yet read from its file contributes its reference, not its bytes."""
        with exclusive(self):
            return self._structure.full(self.weights, mapped_by_reference=True)

    # -- other programs and files ------------------------------------------------------------------------------------
    fork = exclusively(fork)
    at = exclusively(at)
    extract = exclusively(extract)
    eval = exclusively(inference)
    formula = exclusively(formula)
    save = save
    save_parameters = save_parameters
    load_parameters = load_parameters

    @late
    def to_onnx(self):
        """Write an ONNX file in which named sizes stay variable; see `graphwright.models.onnx.save_onnx`."""
        from graphwright.models.onnx import save_onnx

        return save_onnx

    # -- drawing -----------------------------------------------------------------------------------------------------
    @late
    def to_dot(self):
        """Draw the program as Graphviz DOT; see `graphwright.program.draw.to_dot`."""
        from graphwright.program.draw import to_dot

        return to_dot

    @late
    def to_svg(self):
        """Draw the program as SVG; see `graphwright.program.draw.to_svg`."""
        from graphwright.program.draw import to_svg

        return to_svg

    @late
    def to_html(self):
        """Draw the program as an HTML page whose groups open and close; see `graphwright.program.draw.to_html`."""
        from graphwright.program.draw import to_html

        return to_html

    def _repr_html_(self) -> str:
        from graphwright.program.draw import notebook

        return notebook(self)

    # -- running -----------------------------------------------------------------------------------------------------
    grad = exclusively(differentiate)

    run = exclusively(run)

    def __call__(self, **feeds: Any) -> dict[str, Tensor]:
        """Run on tensors, differentiable and traceable; returns the outputs by name."""
        return evaluate(self, feeds)

    def checkpoint(self, selection: Selection | Sequence[NodeId | str] | None) -> None:
        """Mark a subgraph for gradient checkpointing: backward recomputes its inner values instead of storing them.

        Results and gradients are bit-equal; a step needs less memory and runs each inner op once more. The mark holds
        for `grad`, `run.grad` and steps compiled with `gw.compile`; it is not an edit and is not saved.

        Args:
            selection: op nodes; None removes all marks.
        Raises: UsageError for nodes that are not ops or are already marked.
        """
        nodes = frozenset(() if selection is None else self.nodes_of(selection))
        marked = frozenset[NodeId]().union(*self.checkpoints)
        wrong = sorted(self.path(n) for n in nodes if n in marked or self.op(n) in KINDS)
        if wrong or (selection is not None and not nodes):
            raise UsageError("these nodes cannot be a gradient checkpoint", where=self.name,
                             got=", ".join(wrong[:5]) or "an empty selection",
                             expected="op nodes that no other checkpoint contains",
                             fix="checkpoint(None) removes all checkpoints")  # fmt: skip
        self.checkpoints = () if selection is None else (*self.checkpoints, nodes)
        self.derived.pop("gradients", None)
        changes.rise()

    @late
    def compile(self):
        """Plan the program for the shapes of `inputs`; see `graphwright.plan.compile_program`."""
        from graphwright.plan.compile import compile_program

        return compile_program

    @late
    def as_module(self):
        """Wrap the program as a `torch.nn.Module` over the same weights; see `graphwright.nn.as_module`."""
        from graphwright.nn.as_module import as_module

        return as_module

    # -- editing -----------------------------------------------------------------------------------------------------
    expand = expand

    @checked
    def edit(
        self, why: str, *, author: str = "human", tool: str | None = None, check: bool = True, keep_undo: bool = True
    ) -> Transaction:
        """Open an edit: `with program.edit("drop a branch") as e: ...` is one undo step.

        An edit opened within an edit is a savepoint of the outer one: the outer edit's journal entry, checks and undo
        step cover both, so that `check=False` or `keep_undo=False` must be passed to the outer edit.

        Args:
            why: reason, for the journal.
            author: `human`, `gate`, `evolution`, `pass` or `lifecycle`.
            tool: name of the program that edits, if one does.
            check: False admits a broken state, even a cycle, so that it can be repaired; `valid` is False until then.
            keep_undo: False stores nothing for undo, so `undo` cannot go past this edit.
        Raises: on entry UsageError if the outer edit checks or keeps undo and this one does not; on exit PortEmpty,
            SpecMismatch or CycleError; after any error the program is as before, bit for bit.
        """
        return Transaction(self, why, author, tool, check, keep_undo)

    def undo(self, n: int = 1) -> None:
        """Undo the last `n` edits: structure and weight bytes. Raises: NotUndoable; then nothing is undone."""
        self.history.walk(n, back=True)

    def redo(self, n: int = 1) -> None:
        """Redo the last `n` undone edits. Raises: NotUndoable; then nothing is redone."""
        self.history.walk(n, back=False)

    def mark(self, name: str) -> None:
        """Name the present state for `rollback`."""
        self.history.mark(name)

    def rollback(self, name: str) -> int:
        """Undo all entries after the mark `name`; return the number of undone entries."""
        return self.history.rollback(name)

    def blame(self, ref: NodeId | Value | EdgeId | str) -> list[Entry]:
        """Return the journal entries that created or changed a node, edge, path or checkpoint key, even if deleted."""
        if isinstance(ref, str):
            return self.history.blame(self._names.get(ref), ref)
        check_type("ref", ref, (NodeId, Value, EdgeId), "a handle, a Value, a path or a checkpoint key")
        return self.history.blame(ref.node if isinstance(ref, Value) else ref, None)

    def on_edit(self, listener: Callable[[Entry], object]) -> Callable[[], None]:
        """Call `listener(entry)` after each commit, undo and redo; returns a function that unregisters the listener.

        `entry.edits` lists the primitive edits, `entry.cone` the nodes that spec inference visited. An exception in the
        listener does not affect the commit; it goes to the logger `graphwright.program`.
        """
        self.history.listeners.append(listener)
        return lambda: self.history.listeners.remove(listener)

    def __repr__(self) -> str:
        counts = f"{len(self)} nodes, {self.graph.edge_count} edges, {len(self.params())} params"
        return f"Program({self.name!r}, {counts}, version {self.version})"
