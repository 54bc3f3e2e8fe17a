"""Program: a graph of op nodes and its weights. The one representation of a model, built, imported, traced or evolved.

Invariant: outside an open edit every port has its edge, every spec is the one its op infers, and there is no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from graphwright.autograd import Parameter, changes
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program.constraints import Constraints
from graphwright.program.errors import FeedError
from graphwright.program.hashing import StructureHash
from graphwright.program.kinds import CONST, KINDS, PARAM, STATE, STORED
from graphwright.program.op_graph import Editable, Value
from graphwright.program.weights import Weights
from graphwright.verbs import verb

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Unpack

    from graphwright.array import NDArray
    from graphwright.autograd import Variable
    from graphwright.files import StrPath
    from graphwright.graph import EdgeId
    from graphwright.program.axes.axes import Axes
    from graphwright.program.axes.units import Units
    from graphwright.program.diff import ProgramDiff
    from graphwright.program.draw import NodeNote, PictureOptions
    from graphwright.program.editing.journal import Entry, Journal
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.gates import Gates
    from graphwright.program.run import Run
    from graphwright.program.selection import Selection
    from graphwright.program.validate import AssemblyReport


class Program(Editable):
    """A directed graph of operations that is edited while it runs. How it is read is said by `Structure`.

    Attributes:
        graph: nodes and edges; read it freely, change it through `edit` only.
        weights: variables by checkpoint key.
        history_bytes: of arrays that undo keeps in memory; beyond it the oldest lie in a temporary file, none is lost.
        version: rises with every committed edit; a plan belongs to one version.
        derived: what layers above keep with the program and can make again (plans); it goes with it.
        journal: every edit that was made, undone and redone.
        valid: False while an edit with `check=False` left it broken; `validate()` says where.
        constraints: conditions that go with it; enforced ones are checked at every commit.
        checkpoints: subgraphs whose inner values gradients compute again; see `checkpoint`.
        readonly: True for a past state given by `at`; fork it to go on from there.
        source: for a program derived from another by rewriting: that one and the version it had.
    """

    def __init__(self, name: str = "program") -> None:
        from graphwright.program.editing.history import History
        from graphwright.program.editing.journal import Journal

        super().__init__()
        self.name = name
        self.weights = Weights()
        self.version = 0
        self.journal: Journal = Journal()
        self.history_bytes = 4 << 30
        self.valid = True
        self.readonly = False
        self.derived: dict[str, Any] = {}
        self.source: tuple[Program, int] | None = None
        self.constraints = Constraints()
        self.checkpoints: tuple[frozenset[NodeId], ...] = ()
        self._structure = StructureHash(self)
        self.history = History(self)
        self.graph.describe = self.history.describe

    @property
    def version(self) -> int:
        """Rises with every edit."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        changes.rise()

    # -- looking -----------------------------------------------------------------------------------------------------
    def constants(self) -> dict[str, NDArray]:
        """The arrays of all params and consts by checkpoint key, each once, in order of their nodes."""
        stored = [n for n in self.order() if self.op(n) in (PARAM, CONST)]
        return {key: self.weights.array(key) for key in dict.fromkeys(self.key(n) for n in stored)}

    @overload
    def select(self, pattern: str = "**", *, units: None = None, **filters: Any) -> Selection: ...

    @overload
    def select(self, pattern: str = "**", *, units: str, **filters: Any) -> Units: ...

    def select(self, pattern: str = "**", *, units: str | None = None, **filters: Any) -> Selection | Units:
        """Nodes by path pattern and filters; with `units`, the heads, neurons, ... that they make; see `Selection`."""
        from graphwright.program.selection import Selection

        selection = Selection.of(self, pattern, **filters)
        return selection if units is None else selection.units(units)

    def axes(self) -> Axes:
        """Dimensions that are resized together, by name; see `program.axes`."""
        from graphwright.program.axes.axes import axes

        return axes(self)

    def gates(self) -> Gates:
        """Its gates by handle; see `program.gates`."""
        from graphwright.program.gates import gates

        return gates(self)

    def hash(self) -> str:
        """sha256 over structure and the bytes of all weights; equal programs have equal hashes."""
        return self._structure.full()

    def state_hash(self) -> str:
        """As `hash`, with weights that lie untouched in an opened file, and slices of them, by reference."""
        return self._structure.full(mapped_by_reference=True)

    # -- beside others -----------------------------------------------------------------------------------------------
    def fork(self, name: str | None = None) -> Program:
        """A program of its own that starts as this one is and shares weights until written; see `program.fork`."""
        from graphwright.program.fork import fork

        return fork(self, name)

    def at(self, ref: str | int) -> Program:
        """A past state as a read-only program: of a mark, or after a journal entry; see `program.fork`."""
        from graphwright.program.fork import at

        return at(self, ref)

    def diff(self, other: Program) -> ProgramDiff:
        """What changed from `other` to this program; see `program.diff`."""
        from graphwright.program.diff import diff

        if not isinstance(other, Program):
            raise UsageError("a program is compared with a program", got=repr(other)[:80])
        return diff(self, other)

    def validate(self) -> AssemblyReport:
        """Check everything against everything else and report all that does not fit; see `program.validate`."""
        from graphwright.program.validate import validate

        return validate(self)

    def extract(self, selection: Selection | Sequence[NodeId]) -> Program:
        """A selection as a program that shares weights; see `program.replace`."""
        from graphwright.program.editing.replace import extract

        return extract(self, self.nodes_of(selection))

    def save(
        self,
        directory: StrPath,
        history: Literal["full", "edits", "none"] = "full",
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        companions: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Save into a directory that appears whole or not at all; see `program.save`."""
        from graphwright.program.files.save import save

        return save(self, directory, history, overwrite, max_shard_size, companions)

    def to_onnx(self, path: StrPath, *, overwrite: bool = False, opset: int = 20, cache: bool = False) -> Path:
        """Write an ONNX file, named sizes left open; see `graphwright.models.onnx.save_onnx`."""
        return verb("to_onnx")(self, path, overwrite=overwrite, opset=opset, cache=cache)

    def save_parameters(self, path: StrPath) -> None:
        """Write the params to a safetensors file; see `program.parameters`."""
        from graphwright.program.files.parameters import save_parameters

        save_parameters(self, path)

    def load_parameters(self, path: StrPath, strict: bool = True) -> tuple[list[str], list[str]]:
        """Take the values of params from a safetensors file, all or none; see `program.parameters`."""
        from graphwright.program.files.parameters import load_parameters

        return load_parameters(self, path, strict)

    # -- drawing -----------------------------------------------------------------------------------------------------
    def to_dot(
        self,
        path: StrPath | None = None,
        *,
        color: str | Mapping[Any, float | NodeNote] | None = "family",
        scale: str = "linear",
        **options: Unpack[PictureOptions],
    ) -> str:
        """Draw the program as Graphviz DOT and write it to `path` if given; see `graphwright.program.draw.to_dot`."""
        from graphwright.program.draw import to_dot, written

        return written(to_dot(self, color, scale, **options), path)

    def to_svg(
        self,
        path: StrPath | None = None,
        *,
        overlay: Mapping[Any, float | NodeNote] | None = None,
        scale: str = "linear",
        **options: Unpack[PictureOptions],
    ) -> str:
        """Draw the program as SVG and write it to `path` if given; see `graphwright.program.draw.to_svg`."""
        from graphwright.program.draw import to_svg, written

        return written(to_svg(self, overlay, scale, **options), path)

    def to_html(
        self,
        path: StrPath | None = None,
        *,
        overlay: Mapping[Any, float | NodeNote] | None = None,
        scale: str = "linear",
        **options: Unpack[PictureOptions],
    ) -> str:
        """Draw the program as an HTML page whose groups open and close; see `graphwright.program.draw.to_html`."""
        from graphwright.program.draw import to_html, written

        return written(to_html(self, overlay, scale, **options), path)

    def _repr_html_(self) -> str:
        from graphwright.program.draw import notebook

        return notebook(self)

    # -- running -----------------------------------------------------------------------------------------------------
    def run(
        self,
        feeds: Mapping[str, Any] | None = None,
        *,
        keep: str | Sequence[Any] = "all",
        capture: Any = (),
        patch: Mapping[Any, Any] | None = None,
        state: Mapping[str, Variable] | None = None,
        **named: Any,
    ) -> Run:
        """Run node by node, so that every value can be read; see `graphwright.program.run.run`."""
        from graphwright.program.run import run

        if not isinstance(feeds, Mapping | None):
            raise FeedError("inputs come by name", where=self.name, expected=self.input_names(), got=repr(feeds)[:80])
        return run(self, {**(feeds or {}), **named}, keep=keep, capture=capture, patch=patch, state=state)

    def __call__(self, **feeds: Any) -> Any:
        """Run on tensors, differentiable and traceable; one tensor, or a dict if there are several outputs."""
        from graphwright.program.run import evaluate

        results = evaluate(self, feeds)
        return next(iter(results.values())) if len(results) == 1 else results

    def parameters(self) -> list[Parameter]:
        """The trainable variables, in order of creation, tied ones once: what an optimizer takes."""
        found = (self.weights[self.key(n)] for n in self.params() if self.attrs(n).get("trainable", True))
        return list(dict.fromkeys(v for v in found if isinstance(v, Parameter)))

    def variables(self) -> dict[str, Variable]:
        """Params and states by key: what a saved training holds."""
        nodes = (n for n in self.nodes() if self.op(n) in (PARAM, STATE))
        return {key: self.weights[key] for key in dict.fromkeys(map(self.key, nodes))}

    def grad(
        self,
        outputs: Any,
        wrt: Sequence[Any],
        sizes: Mapping[str, int] | None = None,
        *,
        seeded: bool = False,
        mode: Literal["full", "one_step"] = "full",
        steps: int = 1,
    ) -> Program:
        """The program of d Σ outputs / d wrt; see `graphwright.program.derived.gradient`."""
        from graphwright.program.derived.gradient import differentiate

        return differentiate(self, outputs, wrt, sizes or {}, seeded=seeded, mode=mode, steps=steps)

    def checkpoint(self, selection: Selection | Sequence[NodeId | str] | None) -> None:
        """Mark a subgraph: gradients compute its inner values again from what it reads, instead of keeping them.

        Results and gradients keep their bits; the memory of a step falls, each inner operation runs once more. It
        holds for `grad`, `run.grad` and steps compiled with `gw.compile`; it is no edit, and is not saved.

        Args:
            selection: op nodes; None takes all marks back.
        Raises: UsageError for no op node, or for one that is marked already.
        """
        nodes = frozenset(() if selection is None else self.nodes_of(selection))
        marked = frozenset[NodeId]().union(*self.checkpoints)
        wrong = sorted(self.path(n) for n in nodes if n in marked or self.op(n) in KINDS)
        if wrong or (selection is not None and not nodes):
            raise UsageError(
                "a checkpoint is made of op nodes that no other one has",
                where=self.name,
                got=", ".join(wrong[:5]) or "an empty selection",
                fix="checkpoint(None) takes all marks back",
            )
        self.checkpoints = () if selection is None else (*self.checkpoints, nodes)
        self.derived.pop("gradients", None)
        changes.rise()

    def compile(self, *args: Any, **options: Any) -> Any:
        """A plan for given input shapes; see `graphwright.plan.compile`."""
        return verb("compile_program")(self, *args, **options)

    # -- editing -----------------------------------------------------------------------------------------------------
    def edit(
        self, why: str, *, author: str = "human", tool: str | None = None, check: bool = True, keep_undo: bool = True
    ) -> Transaction:
        """Open an edit: `with program.edit("drop a branch") as e: ...` is one undo step.

        Args:
            why: what the journal says.
            author: `human`, `gate`, `evolution` or `pass`.
            tool: name of the program that edits, if one does.
            check: False admits a broken state, a cycle too (`program.valid` is False then), so that it can be repaired.
            keep_undo: False keeps nothing to undo it with: `undo` stops there.
        Raises: on exit PortEmpty, SpecMismatch or CycleError; with any error the program is as before, bit for bit.
        """
        from graphwright.program.editing.transaction import Transaction

        return Transaction(self, why, author, tool, check, keep_undo)

    def expand(self, nodes: Iterable[NodeId], why: str = "expand fused ops") -> list[NodeId]:
        """Replace fused ops by primitives that compute the same, in one edit; see `program.editing.expand`."""
        from graphwright.program.editing.replace import expand

        return expand(self, nodes, why)

    def undo(self, n: int = 1) -> None:
        """Take back the last `n` edits: structure and weight bytes. Raises: NotUndoable, and nothing is undone."""
        self.history.walk(n, back=True)

    def redo(self, n: int = 1) -> None:
        """Make the last `n` undone edits again. Raises: NotUndoable, and nothing is redone."""
        self.history.walk(n, back=False)

    def mark(self, name: str) -> None:
        """Name the present state for `rollback`."""
        self.history.mark(name)

    def rollback(self, name: str) -> int:
        """Undo to a mark; returns the number of entries undone."""
        return self.history.rollback(name)

    def blame(self, ref: NodeId | Value | EdgeId | str) -> list[Entry]:
        """Journal entries that made or changed a node, an edge, a path or a checkpoint key; also of deleted ones."""
        if isinstance(ref, str):
            return self.history.blame(self._names.get(ref), ref)
        return self.history.blame(ref.node if isinstance(ref, Value) else ref, None)

    def on_edit(self, listener: Callable[[Entry], object]) -> Callable[[], None]:
        """Call `listener(entry)` after each commit, undo and redo; returns the call that stops it.

        `entry.edits` is what was done, `entry.cone` the nodes that inference looked at. The commit stands whatever the
        listener does: its exception is logged by `graphwright.program`.
        """
        self.history.listeners.append(listener)
        return lambda: self.history.listeners.remove(listener)

    def __repr__(self) -> str:
        return (
            f"Program({self.name!r}, {len(self)} nodes, {self.graph.edge_count} edges, "
            f"{len(self.params())} params, version {self.version})"
        )

    def sort_weights(self, edits: Sequence[object]) -> None:
        """After edits that put nodes in or out: list the weights by creation of the first node that stands for each."""
        if not any(getattr(edit, "op", None) in STORED for edit in edits):
            return
        ranks: dict[str, int] = {}
        for node in (n for kind in STORED for n in self.of_kind(kind)):
            ranks[self.key(node)] = min(ranks.get(self.key(node), self.seq(node)), self.seq(node))
        self.weights.sort(ranks)
