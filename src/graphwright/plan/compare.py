"""What changed from one plan to another: by path, which nodes run otherwise, and which only lie elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.plan.table import ARENA
from graphwright.program.hashing import encode_attrs

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """From an older plan to a newer one, by path of nodes, sorted.

    Attributes:
        added, removed: nodes that only one of the plans runs or shows.
        changed: nodes whose instructions, operands, specs or executor differ.
        moved: nodes that are the same otherwise, at another place in the arena.
        arena: bytes before and after.
        dispatches: before and after.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    moved: tuple[str, ...]
    arena: tuple[int, int]
    dispatches: tuple[int, int]

    def __bool__(self) -> bool:
        """False if the plans run the same."""
        return bool(self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, Any]:
        """As JSON can have it."""
        lists = {name: list(getattr(self, name)) for name in ("added", "removed", "changed", "moved")}
        return {**lists, "arena": list(self.arena), "dispatches": list(self.dispatches)}

    def __str__(self) -> str:
        signs = (("+", self.added), ("-", self.removed), ("~", self.changed))
        lines = [f"{sign} {path}" for sign, paths in signs for path in paths]
        lines.append(f"{len(self.moved)} moved; arena {self.arena[0]:,} -> {self.arena[1]:,} bytes")
        return "\n".join(lines)


def compare(old: Plan, new: Plan) -> PlanDiff:
    """The differences between two plans, of one program at two versions or of two programs."""
    before, after = _signatures(old), _signatures(new)
    there, here = _places(old), _places(new)
    both = before.keys() & after.keys()
    changed = {path for path in both if before[path] != after[path]}
    return PlanDiff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=tuple(sorted(changed)),
        moved=tuple(sorted(path for path in both - changed if there.get(path) != here.get(path))),
        arena=(old.arena_bytes, new.arena_bytes),
        dispatches=(old.schedule.dispatches, new.schedule.dispatches),
    )


def _signatures(plan: Plan) -> dict[str, list[Any]]:
    """Per node what it runs and on what, by names; no position, buffer or address enters."""
    found: dict[str, list[Any]] = {}
    path = plan.path

    def names(slots: tuple[int, ...]) -> list[str]:
        return [_name(plan, s) for s in slots]

    for slot in plan.shown():
        if slot.value is not None and slot.base != slot.index:
            found.setdefault(path(slot.value.node), []).append(["view", str(slot.spec), _name(plan, slot.base)])
    for instr, choice in zip(plan.instrs, plan.choices, strict=True):
        row = [instr.op, encode_attrs(instr.attrs), names(instr.ins), names(instr.outs), choice.executor, instr.why]
        found.setdefault(path(instr.node), []).append(row)
    for instr in plan.folding():
        if not instr.why:  # a copy shows in the names of who reads it
            row = ["folded", instr.op, encode_attrs(instr.attrs), names(instr.ins), names(instr.outs)]
            found.setdefault(path(instr.node), []).append(row)
    return found


def _name(plan: Plan, slot: int) -> str:
    """What a slot shows: whose memory, with spec, strides and offset."""
    row = plan.slots[slot]
    owner, packed = plan.slots[row.base].value, plan.arranged.ledger.folds.get(row.buffer)
    where = (
        f"{plan.path(owner.node)}:{owner.port}"
        if owner is not None
        else "a copy"
        if packed is None
        else f"a copy of {_name(plan, packed.ins[0])}"
    )
    return f"{where} {row.spec} {row.layout.strides} {row.layout.offset}"


def _places(plan: Plan) -> dict[str, list[int]]:
    """Offsets in the arena of a node's results."""
    found: dict[str, list[int]] = {}
    for slot in plan.shown():
        buffer = plan.buffers[slot.buffer]
        if slot.value is not None and buffer.kind in ARENA:
            found.setdefault(plan.path(slot.value.node), []).append(buffer.offset)
    return found
