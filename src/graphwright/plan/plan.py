"""Plan: the tables of one program for given input shapes. Immutable and shareable; memory belongs to a Workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from time import perf_counter
from typing import Any

from graphwright.array import Spec
from graphwright.errors import ComputeError, UsageError
from graphwright.graph import NodeId
from graphwright.plan.layout import lower_bound, place
from graphwright.plan.lower import Lowering
from graphwright.plan.table import ARENA, Buffer, Instr, Slot
from graphwright.program import FeedError, Program, Value
from graphwright.program.hashing import encode_attrs
from graphwright.program.validate import refuse_broken


class StalePlan(ComputeError):
    """The program was edited since this plan was made."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows, slots, buffers and layout; see `graphwright.plan.table` for what they are.

    Attributes:
        program, version: what the plan is of; it refuses to run once the program has another version.
        inputs: specs of the inputs, all sizes known.
        outputs: name -> slot.
        instrs, slots, buffers: the rows.
        folds: node -> slots of values computed once from frozen weights.
        pruned: paths of nodes that nothing needs.
        commits: path of a write -> why its value is copied at the end instead of updated in place.
        arena_bytes: size of the arena.
        ms: milliseconds that planning took.
    """

    program: Program
    version: int
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, int]
    instrs: tuple[Instr, ...]
    slots: tuple[Slot, ...]
    buffers: tuple[Buffer, ...]
    folds: Mapping[NodeId, tuple[int, ...]]
    pruned: tuple[str, ...]
    commits: Mapping[str, str]
    arena_bytes: int
    ms: float
    _lazy: dict[str, Any] = field(default_factory=dict, repr=False)

    def __call__(self, feeds: Mapping[str, Any] | None = None, *, lease: bool = False, **named: Any) -> dict[str, Any]:
        """Run in the plan's own workspace; see `Workspace.run`."""
        return self.workspace().run({**(feeds or {}), **named}, lease=lease)

    def workspace(self) -> Any:
        """Memory to run in, made at the first call; others for other threads are made with `Workspace(plan)`."""
        if "workspace" not in self._lazy:
            from graphwright.plan.workspace import Workspace

            self._lazy["workspace"] = Workspace(self)
        return self._lazy["workspace"]

    def check_fresh(self) -> None:
        """Raises: StalePlan if the program was edited since."""
        if self.program.version != self.version:
            raise StalePlan("the program was edited after this plan was made", where=self.program.name,
                            expected=f"version {self.version}", got=f"version {self.program.version}",
                            fix="program.compile(...) again; gw.compile(program) does it by itself")  # fmt: skip

    @property
    def lower_bound(self) -> int:
        """Bytes live at the fullest instruction; no arena can be smaller."""
        return lower_bound(self.buffers, len(self.instrs))

    @property
    def hash(self) -> str:
        """BLAKE2b of rows, slots and layout in canonical numbering; equal for equal programs and shapes."""
        if "hash" not in self._lazy:
            self._lazy["hash"] = blake2b(dumps(self.to_json(), sort_keys=True).encode(), digest_size=16).hexdigest()
        return self._lazy["hash"]

    def of(self, ref: NodeId | Value | str) -> tuple[Instr, ...]:
        """Instructions that run a node; none for a view, a source or a folded value."""
        node = self.program.node(ref)
        return tuple(i for i in self.instrs if i.node == node)

    def explain(self, ref: NodeId | Value | str) -> str:
        """What became of a node: instruction, slot, buffer, bytes and why."""
        node = self.program.node(ref)
        path = self.program.path(node)
        if path in self.pruned:
            return f"{path}: pruned, no output and no write needs it"
        lines = [path]
        for slot in (s for s in self.slots if s.value is not None and s.value.node == node):
            b = self.buffers[slot.buffer]
            place = f"arena + {b.offset}" if b.kind in ARENA else f"{b.kind} {b.key!r}"
            life = f", live {b.first}..{b.last}" if b.kind in ARENA else ""
            lines.append(f"  result {slot.value.port if slot.value else 0}: {slot.spec} in buffer {b.index} ({place}{life})")
        found = self.of(node)
        for i in found:
            lines.append(f"  instr {self.instrs.index(i)}: {i.op}{' (' + i.why + ')' if i.why else ''}")
        if not found:
            lines.append("  folded: computed once from frozen weights" if node in self.folds else "  no instruction: a view")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The tables by position; no handle, address or time enters."""
        number = {b.index: n for n, b in enumerate(sorted({s.buffer: self.buffers[s.buffer] for s in self.slots}.values(),
                                                          key=lambda b: b.index))}  # fmt: skip
        return {
            "inputs": {n: s.to_json() for n, s in self.inputs.items()},
            "outputs": dict(self.outputs),
            "buffers": [[b.kind, b.nbytes, b.key, b.first, b.last, b.offset] for b in self.buffers if b.index in number],
            "slots": [[number[s.buffer], s.dtype.name, list(s.layout.shape), list(s.layout.strides), s.layout.offset]
                      for s in self.slots],
            "instrs": [[i.op, list(i.ins), list(i.outs), list(i.work), encode_attrs(i.attrs)] for i in self.instrs],
            "arena": self.arena_bytes,
        }  # fmt: skip

    def __repr__(self) -> str:
        copies = sum(1 for i in self.instrs if i.why)
        return (f"Plan({self.program.name!r} v{self.version}: {len(self.instrs)} instructions ({copies} copies), "
                f"arena {self.arena_bytes / 2**20:.2f} MiB, planned in {self.ms:.1f} ms)")  # fmt: skip


def make_plan(p: Program, inputs: Mapping[str, Spec], outputs: Sequence[str] | None = None, *, freeze: bool = False) -> Plan:
    """Plan a program for input specs.

    Args:
        inputs: a spec per declared input, all sizes numbers.
        outputs: names of the outputs wanted; all by default.
        freeze: weights will not change under this plan's feet: casts of them are made once (per weight version).
    Raises: InvalidProgram, FeedError listing every input that does not fit.
    """
    started = perf_counter()
    refuse_broken(p)
    dims: dict[str, int] = {}
    wrong = [f"{name}: not an input" for name in inputs.keys() - {p.path(n) for n in p.inputs()}]
    for node in p.inputs():
        name, spec = p.path(node), p.spec(node)
        given = inputs.get(name)
        if given is None:
            wrong.append(f"{name}: missing, expected {spec}")
        elif given.dtype is not spec.dtype or not spec.match(given.shape, dims):  # type: ignore[arg-type]  # sizes known
            wrong.append(f"{name}: expected {spec.bind(dims)}, got {given}")
    if wrong:
        raise FeedError("inputs do not fit:\n  " + "\n  ".join(wrong), where=p.name)
    wanted = {name: p.output(name) for name in (p.output_names() if outputs is None else outputs)}
    if not wanted and not p.writes():
        raise UsageError("the program has no output and writes nothing", where=p.name)
    rows = Lowering(p, dims, wanted, freeze)
    arena = place(rows.buffers, len(rows.instrs))
    return Plan(
        program=p, version=p.version, inputs=dict(inputs), outputs=rows.outputs, instrs=tuple(rows.instrs),
        slots=tuple(rows.slots), buffers=tuple(rows.buffers), folds=rows.folds,
        pruned=tuple(p.path(n) for n in rows.pruned), commits={p.path(n): why for n, why in rows.commits.items()},
        arena_bytes=arena, ms=(perf_counter() - started) * 1e3,
    )  # fmt: skip
