"""Descriptions of plans: text for a node, tables as JSON, differences between two plans, and profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import Spec
from graphwright.errors import UsageError
from graphwright.files import StrPath
from graphwright.graph import NodeId
from graphwright.ops import Cost, get
from graphwright.plan.chrome_trace import PLAN, Event, save_trace
from graphwright.plan.table import ARENA, Instr, Slot
from graphwright.program.cost import share_of_pairs
from graphwright.program.hashing import encode_attrs
from graphwright.report import Report, ShortTuple, listed

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.program.op_graph import Value


def explain(plan: Plan, ref: NodeId | Value | str) -> str:
    """Return a text on how a node was planned: its instructions, result specs and buffers, with the reasons."""
    node = plan.program.node(ref)
    path = plan.program.path(node)
    if path in plan.pruned:
        return f"{path}: pruned, no output and no write needs it"
    lines = [path]
    names = plan.program.result_names(node)
    for slot in plan.slots:
        if slot.value is not None and slot.value.node == node:
            port = slot.value.port
            name = names[port] if port < len(names) else port
            b = plan.buffers[slot.buffer]
            in_arena = b.kind in ARENA
            location = f"arena + {b.offset}" if in_arena else f"{b.kind} {b.key!r}"
            location += " on the host" if b.on_host else ""
            life = f", live {b.first}..{b.last}" if in_arena else ""
            lines.append(f"  result {name}: {slot.spec} in buffer {b.index} ({location}{life})")
    found = plan.of(node)
    for i in found:
        at = plan.instrs.index(i)
        choice = plan.choices[at]
        reason, runs = f" ({i.why})" if i.why else "", choice.executor + (f", {choice.why}" if choice.why else "")
        lines.append(f"  instr {at}: {i.op}{reason} on {runs}{_algorithm(plan, i)}")
        lines += [f"  operand {index}: {text}" for index, s in enumerate(i.ins) if (text := _folded_copy(plan, s))]
    made = [i for i in plan.folds.values() if i.node == node]
    lines += [f"  {text}" for i in made if (text := _folded_copy(plan, i.outs[0]))]
    if not found:
        fired = next((f for f in plan.rewrites if f.node == path), None)
        rewritten = "no instruction: a view" if fired is None else f"rewritten: {fired.rule}, replaced by {fired.into}"
        folded = any(not i.why for i in made)
        lines.append("  folded: computed once from frozen weights" if folded else f"  {rewritten}")
    if edit := last_edit(plan, path):
        lines.append(f"  edited: {edit}")
    return "\n".join(lines)


def _algorithm(plan: Plan, i: Instr) -> str:
    """Return the algorithm of an instruction and the reason for it, or "" for an op that has one."""
    if (ways := get(i.op).algorithms) is None:
        return ""
    name, why = ways.choose([plan.slots[s].spec for s in i.ins], i.attrs)
    return f", algorithm {name}: {why}"


def _folded_copy(plan: Plan, slot: int) -> str:
    """Return a description of the value in a slot if it is a row-major copy made once from frozen weights, else ""."""
    made = plan.folds.get(plan.slots[slot].buffer)
    if made is None or not made.why:
        return ""
    copy = plan.slots[made.outs[0]].spec
    return f"a row-major copy of {plan.path(made.node)!r}, {copy}, {copy.nbytes} bytes, made once from frozen weights"


def last_edit(plan: Plan, path: str) -> str:
    """Return the reason given for the last edit of the node at `path`; "" if it was never edited."""
    last = max(plan.program.blame(path), key=lambda entry: entry.seq, default=None)
    return "" if last is None else last.why


def _by_path(plan: Plan) -> dict[str, tuple[list[Slot], list[int]]]:
    """Map the path of each node to (slots of its results, indices of its instructions)."""
    found: dict[str, tuple[list[Slot], list[int]]] = {}
    for slot in plan.result_slots():
        assert slot.value is not None
        found.setdefault(plan.path(slot.value.node), ([], []))[0].append(slot)
    for i, instr in enumerate(plan.instrs):
        found.setdefault(plan.path(instr.node), ([], []))[1].append(i)
    return found


def nodes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Map the path of each node to a dict: its instructions, segments, results (slot, buffer, bytes) and last edit."""
    segment = [k for k, s in enumerate(plan.segments) for _ in range(s.start, s.stop)]
    found: dict[str, dict[str, Any]] = {}
    for path, (slots, instrs) in _by_path(plan).items():
        results = [
            {"port": s.value.port, "slot": s.index, "buffer": s.buffer, "bytes": s.spec.nbytes}
            for s in slots
            if s.value is not None
        ]
        segments = sorted({segment[i] for i in instrs})
        found[path] = {"instrs": instrs, "segments": segments, "results": results, "edit": last_edit(plan, path)}
    return found


def tables(plan: Plan) -> dict[str, Any]:
    """Return a plan's tables as JSON values, equal for equal plans: slots and buffers are numbered by first use."""
    slots, buffers = plan.slots, plan.buffers
    used = [s for i in plan.instrs for s in (*i.ins, *i.outs, *i.work)]
    used += [*plan.outputs.values(), *plan.watched.values(), *plan.input_slots]
    folds: dict[int, Instr] = {}
    for s in used:  # the loop appends the operands of folded values
        made = plan.buffer_layout.builder.tables.folds.get(slots[s].buffer)
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


@dataclass(frozen=True, slots=True, repr=False)
class PlanDiff(Report):
    """The differences from an older plan to a newer one, as sorted paths of nodes.

    Attributes:
        added, removed: nodes with instructions or views in the newer plan only, and in the older plan only.
        changed: nodes whose instructions, operands, specs or executor differ.
        moved: unchanged nodes whose results are at a different offset of the arena.
        arena: bytes of the arena before and after.
        dispatches: number of dispatches before and after.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    moved: tuple[str, ...]
    arena: tuple[int, int]
    dispatches: tuple[int, int]

    def __bool__(self) -> bool:
        """Return True if the plans run different instructions."""
        return bool(self.added or self.removed or self.changed)

    def _text(self) -> str:
        signs = (("+", self.added), ("-", self.removed), ("~", self.changed))
        lines = [line for sign, paths in signs for line in listed([f"{sign} {path}" for path in paths])]
        lines.append(f"{len(self.moved)} moved; arena {self.arena[0]:,} -> {self.arena[1]:,} bytes")
        return "\n".join(lines)


def compare(old: Plan, new: Plan) -> PlanDiff:
    """Compare two plans, of one program at two versions or of two programs."""
    before, after = _signatures(old), _signatures(new)
    there, here = _offsets(old), _offsets(new)
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
    """Map the path of each node to lists that are equal in two plans if the node runs the same instructions in both."""

    def row(instr: Instr) -> list[Any]:
        names = [[_name(plan, s) for s in slots] for slots in (instr.ins, instr.outs)]
        return [instr.op, encode_attrs(instr.attrs), *names]

    found: dict[str, list[Any]] = {}
    for path, (slots, instrs) in _by_path(plan).items():
        rows = [["view", str(s.spec), _name(plan, s.base)] for s in slots if s.base != s.index]
        rows += [[*row(plan.instrs[i]), plan.choices[i].executor, plan.instrs[i].why] for i in instrs]
        if rows:
            found[path] = rows
    for instr in plan.folding:
        if not instr.why:  # a copy is part of the names of its readers
            found.setdefault(plan.path(instr.node), []).append(["folded", *row(instr)])
    return found


def _name(plan: Plan, slot: int) -> str:
    """Return a name for a slot: the value that owns its memory, and the slot's spec, strides and offset."""
    row = plan.slots[slot]
    owner, packed = plan.slots[row.base].value, plan.buffer_layout.builder.tables.folds.get(row.buffer)
    if owner is not None:
        where = f"{plan.path(owner.node)}:{owner.port}"
    else:
        where = "a copy" if packed is None else f"a copy of {_name(plan, packed.ins[0])}"
    return f"{where} {row.spec} {row.layout.strides} {row.layout.offset}"


def _offsets(plan: Plan) -> dict[str, list[int]]:
    """Map the path of each node to the arena offsets of its results."""
    rows = {path: [plan.buffers[s.buffer] for s in slots] for path, (slots, _) in _by_path(plan).items()}
    return {path: at for path, some in rows.items() if (at := [b.offset for b in some if b.kind in ARENA])}


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of one instruction: median seconds of its runs; operations and bytes (`cost`) of one; specs."""

    index: int
    path: str
    op: str
    executor: str
    seconds: float
    cost: Cost
    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]


class Profile(NamedTuple):
    """Timings of all instructions, each run by itself, and the median seconds `wall` of a whole run."""

    timings: tuple[Timing, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """The sum over all instructions; more than `wall` if a whole run executes several of them in one call."""
        return sum(t.seconds for t in self.timings)

    def by_path(self, depth: int = 2) -> dict[str, tuple[float, int, int]]:
        """Sum the timings by the first `depth` parts of paths: prefix -> (seconds, FLOPs, bytes), slowest first."""
        found: dict[str, tuple[float, int, int]] = {}
        for t in self.timings:
            key = ".".join(t.path.split(".")[:depth])
            seconds, flops, moved = found.get(key, (0.0, 0, 0))
            found[key] = (seconds + t.seconds, flops + t.cost.flops, moved + t.cost.read + t.cost.write)
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def text(self, most: int = 20) -> str:
        """Return a table of the `most` slowest instructions."""
        lines = [f"{'us':>10} {'share':>6} {'GFLOP/s':>8} {'GB/s':>6}  executor  op and node"]
        for t in sorted(self.timings, key=lambda t: -t.seconds)[:most]:
            per = max(t.seconds, 1e-9) * 1e9
            share = t.seconds / self.seconds if self.seconds else 0.0
            rates = f"{t.cost.flops / per:8.1f} {(t.cost.read + t.cost.write) / per:6.1f}"
            lines.append(f"{1e6 * t.seconds:10.1f} {share:6.1%} {rates}  {t.executor:<8}  {t.op} {t.path}")
        rest = len(self.timings) - most
        more = f", {rest} more instructions" if rest > 0 else ""
        lines.append(f"{1e6 * self.seconds:10.1f} instructions, {1e6 * self.wall:.1f} as dispatched{more}")
        return "\n".join(lines)

    def save(self, path: StrPath) -> None:
        """Write the instructions one after the other as a Chrome trace."""
        events, start = list[Event](), 0
        for t in self.timings:
            took = round(1e9 * t.seconds)
            events.append(Event(t.op, PLAN, start, took, 0, path=t.path, ins=t.ins, outs=t.outs, flops=t.cost.flops,
                                nbytes=t.cost.read + t.cost.write))  # fmt: skip
            start += took
        save_trace(path, events)

    def __str__(self) -> str:
        return self.text()


def profile(plan: Plan, feeds: Mapping[str, Any], n: int = 5) -> Profile:
    """Time `n` whole runs of a plan and `n` runs of each instruction by itself; each run advances loop-carried state.

    Raises: UsageError if n < 1; the errors of `Executable.run`.
    """
    if n < 1:
        raise UsageError("the number of runs is less than 1", where=plan.program.name, expected="n >= 1", got=n,
                         fix="n=5")  # fmt: skip
    space = plan.new_executable()
    walls, taken = [], [[0.0] * n for _ in plan.instrs]
    space.run(feeds)  # the first run binds kernels
    for _ in range(n):
        began = perf_counter()
        space.run(feeds)
        walls.append(perf_counter() - began)
    for k in range(n):
        space.feed(feeds)
        for i, seconds in enumerate(taken):
            part = plan[i : i + 1]
            began = perf_counter()
            space.run(part)
            seconds[k] = perf_counter() - began
    timings = []
    for i, (instr, choice) in enumerate(zip(plan.instrs, plan.choices, strict=True)):
        ins, outs = ([plan.slots[s].spec for s in slots] for slots in (instr.ins, instr.outs))
        cost, p = get(instr.op).cost(ins, outs, instr.attrs), plan.program
        if p.op(instr.node) == instr.op:
            cost = replace(cost, flops=round(cost.flops * share_of_pairs(p, instr.node, ins)))
        path = p.path(instr.node)
        timings.append(Timing(i, path, instr.op, choice.executor, median(taken[i]), cost, tuple(ins), tuple(outs)))
    return Profile(ShortTuple(timings), median(walls))
