"""What a plan says of itself in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphwright.plan.table import ARENA
from graphwright.program.hashing import encode_attrs

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.plan.plan import Plan
    from graphwright.plan.table import Instr
    from graphwright.program import Value


def explain(plan: Plan, ref: NodeId | Value | str) -> str:
    """What became of a node: instruction, slot, buffer, bytes and why."""
    node = plan.program.node(ref)
    path = plan.program.path(node)
    if path in plan.pruned:
        return f"{path}: pruned, no output and no write needs it"
    lines = [path]
    for slot in (s for s in plan.slots if s.value is not None and s.value.node == node):
        b = plan.buffers[slot.buffer]
        place = f"arena + {b.offset}" if b.kind in ARENA else f"{b.kind} {b.key!r}"
        place += " on the host" if b.on_host else ""
        life = f", live {b.first}..{b.last}" if b.kind in ARENA else ""
        lines.append(
            f"  result {slot.value.port if slot.value else 0}: {slot.spec} in buffer {b.index} ({place}{life})"
        )
    found = plan.of(node)
    for i in found:
        at = plan.instrs.index(i)
        choice = plan.choices[at]
        runs = choice.executor + (f", {choice.why}" if choice.why else "")
        lines.append(f"  instr {at}: {i.op}{' (' + i.why + ')' if i.why else ''} on {runs}")
        lines += [f"  operand {place}: {text}" for place, s in enumerate(i.ins) if (text := _packed(plan, s))]
    made = [i for i in plan.folds.values() if i.node == node]
    lines += [f"  {text}" for i in made if (text := _packed(plan, i.outs[0]))]
    if not found:
        fired = next((f for f in plan.rewrites if f.node == path), None)
        lines.append(
            "  folded: computed once from frozen weights"
            if any(not i.why for i in made)
            else f"  rewritten: {fired.rule}, {fired.into} stands for it"
            if fired is not None
            else "  no instruction: a view"
        )
    edit = last_edit(plan, path)
    if edit:
        lines.append(f"  edited: {edit}")
    return "\n".join(lines)


def _packed(plan: Plan, slot: int) -> str:
    """Where a slot shows a folded copy: of whose value."""
    slots = plan.slots
    made = plan.folds.get(slots[slot].buffer)
    if made is None or not made.why:
        return ""
    copy = slots[made.outs[0]].spec
    return f"a copy row by row of {plan.path(made.node)!r}, {copy}, {copy.nbytes} bytes, made once from frozen weights"


def last_edit(plan: Plan, path: str) -> str:
    """Why the node was last edited, or nothing."""
    last = max(plan.program.blame(path), key=lambda entry: entry.seq, default=None)
    return "" if last is None else last.why


def nodes(plan: Plan) -> dict[str, dict[str, Any]]:
    """What became of each node: its instructions, and per result buffer, bytes and segment."""
    segment = [k for k, s in enumerate(plan.segments) for _ in range(s.start, s.stop)]
    found: dict[str, dict[str, Any]] = {}

    def entry(name: str) -> dict[str, Any]:
        return found.setdefault(name, {"instrs": [], "segments": [], "results": [], "edit": last_edit(plan, name)})

    for slot in plan.shown():
        assert slot.value is not None
        row = {"port": slot.value.port, "slot": slot.index, "buffer": slot.buffer, "bytes": slot.spec.nbytes}
        entry(plan.path(slot.value.node))["results"].append(row)
    for i, instr in enumerate(plan.instrs):
        one = entry(plan.path(instr.node))
        one["instrs"].append(i)
        one["segments"] = sorted({*one["segments"], segment[i]})
    return found


def tables(plan: Plan) -> dict[str, Any]:
    """The tables, slots and buffers numbered as they are first used; no handle, address or time enters."""
    slots, buffers = plan.slots, plan.buffers
    used = [s for i in plan.instrs for s in (*i.ins, *i.outs, *i.work)]
    used += [*plan.outputs.values(), *plan.watched.values(), *plan.input_slots]
    folds: dict[int, Instr] = {}
    for s in used:  # which grows by what folded values are made of
        made = plan.arranged.ledger.folds.get(slots[s].buffer)
        if made is not None and made.outs[0] not in folds:
            folds[made.outs[0]] = made
            used += [*made.outs, *made.ins]
    slot = {s: n for n, s in enumerate(dict.fromkeys(used))}
    buffer = {b: n for n, b in enumerate(dict.fromkeys(slots[s].buffer for s in slot))}
    kept = [buffers[b] for b in buffer]

    def numbered(numbers: Iterable[int]) -> list[int]:
        return [slot[s] for s in numbers]

    def row(i: Instr) -> list[Any]:
        return [i.op, numbered(i.ins), numbered(i.outs), numbered(i.work), encode_attrs(i.attrs)]

    return {
        "options": [plan.options.freeze, plan.options.rewrites, plan.options.layout, list(plan.options.watch)],
        "device": str(plan.options.device),
        "segments": [list(s) for s in plan.segments],
        "inputs": {n: s.to_json() for n, s in plan.inputs.items()},
        "outputs": {name: slot[s] for name, s in plan.outputs.items()},
        "watched": {name: slot[s] for name, s in plan.watched.items()},
        "commit": plan.commit_start,
        "buffers": [[b.kind, b.nbytes, b.key, b.first, b.last, b.offset, b.on_host] for b in kept],
        "slots": [
            [buffer[s.buffer], s.dtype.name, list(s.layout.shape), list(s.layout.strides), s.layout.offset]
            for s in map(slots.__getitem__, slot)
        ],
        "instrs": list(map(row, plan.instrs)),
        "folds": list(map(row, folds.values())),
        "arena": plan.arena_bytes,
    }
