"""Plan: the tables of one program for given input shapes. Immutable and shareable; memory belongs to a Workspace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from hashlib import blake2b
from json import dumps
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import CPU, NDArray
from graphwright.errors import ComputeError, UsageError
from graphwright.graph import NodeId
from graphwright.plan.decoded import Decoded
from graphwright.plan.looking.describe import explain, nodes, tables
from graphwright.plan.planning.executor import CAPTURE, VM
from graphwright.plan.planning.rewrites import BY_VALUE
from graphwright.plan.table import Schedule
from graphwright.program import Program, Value

if TYPE_CHECKING:
    from graphwright.autograd import Variable
    from graphwright.plan.looking.compare import PlanDiff
    from graphwright.plan.looking.profile import Profile
    from graphwright.plan.planning.regions import Region
    from graphwright.plan.running.bound import Bound
    from graphwright.plan.running.override import Kernel, Override


class StalePlan(ComputeError):
    """What this plan relied on is not so any more: a constant that a rewrite looked at, or the shape of a weight."""


class Part(NamedTuple):
    """Instructions `start..stop - 1` of a plan, to run by themselves."""

    plan: Plan
    start: int
    stop: int


class Plan(Decoded):
    """Rows, slots, buffers and layout, read as `Decoded` says; here what runs them and what compares them."""

    # -- running -----------------------------------------------------------------------------------------------------
    def __call__(self, feeds: Mapping[str, Any] | None = None, *, lease: bool = False, **named: Any) -> dict[str, Any]:
        """Run in the plan's own workspace; see `Workspace.run`."""
        return self.workspace().run({**(feeds or {}), **named}, lease=lease)

    def workspace(self) -> Any:
        """Memory to run in, made at the first call, with an arena that plans share which do not run at the same time.

        Others for other threads are made with `Workspace(plan)`. It goes over to the plan patched from this one.
        Raises: StalePlan once the plan was closed.
        """
        if "closed" in self._lazy:
            raise StalePlan("this plan was closed", where=self.program.name, fix="program.compile(...) again")
        if "workspace" not in self._lazy:
            self._lazy["workspace"] = self.new_workspace(shared=True)
        return self._lazy["workspace"]

    def close(self) -> None:
        """Give the memory back; until then the plan runs as planned, whatever becomes of the program."""
        self._lazy["closed"] = True
        self._lazy.pop("workspace", None)

    def hand_over(self, after: Plan) -> Plan:
        """Let the plan patched from this one have the workspace, if there is one that is not running; returns it."""
        space = self._lazy.get("workspace")
        if space is not None and space.adopt(after):
            after._lazy["workspace"] = self._lazy.pop("workspace")
        return after

    def new_workspace(self, variables: Mapping[str, Variable] | None = None, *, shared: bool = False) -> Any:
        """Other memory to run in, of the kind that the plan's executor asks for; see `Workspace`."""
        from graphwright.plan.running.capture import CaptureWorkspace
        from graphwright.plan.running.workspace import Workspace

        poison = self.options.poison
        if self._captures:
            return CaptureWorkspace(self, variables, poison=poison)  # graphs hold addresses: an arena of its own
        return Workspace(self, variables, poison=poison, shared=shared)

    def bind(self) -> Bound:
        """Inputs as memory to write to and outputs as memory to read, of their own: a run is one call; see `Bound`."""
        from graphwright.plan.running.bound import Bound

        return Bound(self.new_workspace())

    @property
    def _captures(self) -> bool:
        return self.options.device != CPU and self.options.executor in ("auto", CAPTURE)

    def __getitem__(self, part: slice) -> Part:
        """`plan[i:j]`, for `Workspace.run`. Raises: UsageError for bounds outside or another step."""
        n = len(self.instrs)
        bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else ("no slice",)
        if all(bound is None or isinstance(bound, int) for bound in bounds):
            start, stop = 0 if part.start is None else part.start, n if part.stop is None else part.stop
            if part.step in (None, 1) and 0 <= start <= stop <= n:
                return Part(self, start, stop)
        raise UsageError(
            "no such part",
            where=self.program.name,
            expected=f"plan[i:j], 0 <= i <= j <= {n}",
            got=repr(part),
            fix="plan.instrs[i] is one instruction",
        )

    @property
    def overrides(self) -> list[Override]:
        """What stands for instructions now, the innermost last."""
        return self._lazy.setdefault("overrides", [])

    def override(self, fn: Kernel, segment: int | None = None) -> AbstractContextManager[Override]:
        """Inside the block a function runs the plan, or one segment of it; see `graphwright.plan.running.override`.

        Raises: UsageError for no such segment, or what cannot be called.
        """
        from graphwright.plan.running.override import override

        return override(self, fn, segment)

    def check_override(self, feeds: Mapping[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Run with and without what is overridden, on copies of the variables, and compare outputs and states.

        Raises: OverrideMismatch naming each that differs; UsageError if nothing is overridden; as `Workspace.run`.
        """
        from graphwright.plan.running.override import check

        check(self, feeds, rtol, atol)

    def regions(self) -> tuple[Region, ...]:
        """What graphs of the device would hold, and per other instruction why not; see `plan.planning.regions`."""
        if "regions" not in self._lazy:
            from graphwright.plan.planning.regions import regions

            self._lazy["regions"] = regions(self)
        return self._lazy["regions"]

    # -- how long it is of use ---------------------------------------------------------------------------------------
    @property
    def latest(self) -> bool:
        """True for the plan that was made last of its ledger, which the next one can be patched from."""
        return self.arranged.turn == self.arranged.ledger.turn

    @property
    def fresh(self) -> bool:
        """True while the program has the version that was planned, and the constants that rewrites relied on."""
        if self.program.version != self.version or _edited_source(self.program):
            return False
        return self.guarded_fresh

    @property
    def guarded_fresh(self) -> bool:
        """True while the constants that rewrites relied on are what they were."""
        known = self.arranged.ledger.program.weights
        return not self.guards or all(
            k in known and known.array(k) is array and array.storage.version == v
            for k, (array, v) in self.guards.items()
        )

    @property
    def guarded(self) -> list[tuple[NDArray, int]]:
        """The constants that rewrites relied on, with the versions of their memory."""
        return list(self.guards.values())

    def check_fresh(self) -> None:
        """Raises: StalePlan if a constant that a rewrite relied on was changed; an edit may have taken it away."""
        planned = self.arranged.variables
        if changed := [
            k
            for k, (array, v) in self.guards.items()
            if k in planned and (planned[k].data is not array or array.storage.version != v)
        ]:
            raise StalePlan(
                "a constant that this plan relied on was changed",
                where=self.program.name,
                got=", ".join(changed),
                fix="program.compile(...) again; gw.compile(program) does it by itself",
            )

    def check_variables(self, own: Mapping[str, Variable]) -> None:
        """Raises: UsageError for another variable in the place of a constant whose value is part of the plan."""
        planned, ledger = self.arranged.variables, self.arranged.ledger
        other = [k for k in self.guards if k in own and k in planned and own[k] is not planned[k]]
        used = {firing.node for firing in self.rewrites if firing.rule in BY_VALUE} if other else set()
        read = {s for row in self.arranged.rows.values() if row.path in used for s in row.reads} if used else set()
        relied = {ledger.buffers[ledger.slots[s].buffer][2] for s in read}
        if wrong := [k for k in other if k in relied]:
            raise UsageError(
                "a rewrite relied on the value of a constant, and another variable is given for it",
                where=f"{self.program.name}: {', '.join(wrong)}",
                expected="the program's own variable",
                got=", ".join(f"another {own[k].spec}" for k in wrong),
                fix='program.compile(..., rewrites="none"), or variables without it',
            )

    # -- looking in --------------------------------------------------------------------------------------------------
    @property
    def schedule(self) -> Schedule:
        """Groups (on a device captured regions), and instructions as dispatches.

        A run of the VM is one, a captured region too, and each other instruction.
        """
        total, groups = len(self.instrs), self.groups
        calls = sum(1 if s.kind == VM else s.stop - s.start for s in self.segments)
        if self._captures:
            groups = tuple(r.instrs for r in self.regions() if r.kind == CAPTURE)
            calls = total - sum(map(len, groups)) + len(groups)
        return Schedule(groups, sum(map(len, groups)) / total if total else 0.0, calls)

    def compact(self) -> Plan:
        """A plan of the program as it is now, of the same inputs and options, made from nothing."""
        from graphwright.plan.planning.planner import make_plan

        o = self.options
        wanted = tuple(name for name in self.outputs if name in self.program.output_names())
        return make_plan(
            self.program,
            self.inputs,
            wanted,
            freeze=o.freeze,
            rewrites=o.rewrites,
            layout=o.layout,
            watch=o.watch,
            executor=o.executor,
            device=o.device,
            remat=o.remat,
            poison=o.poison,
        )

    @property
    def hash(self) -> str:
        """BLAKE2b of rows, slots and layout in canonical numbering; equal for equal programs and shapes."""
        if "hash" not in self._lazy:
            self._lazy["hash"] = blake2b(dumps(tables(self), sort_keys=True).encode(), digest_size=16).hexdigest()
        return self._lazy["hash"]

    def explain(self, ref: NodeId | Value | str) -> str:
        """What became of a node: instruction, slot, buffer, bytes and why."""
        return explain(self, ref)

    def profile(self, feeds: Mapping[str, Any], n: int = 5) -> Profile:
        """Seconds, operations and bytes per instruction and per path; see `graphwright.plan.looking.profile`."""
        from graphwright.plan.looking.profile import profile

        return profile(self, feeds, n)

    def diff(self, old: Plan) -> PlanDiff:
        """What changed from another plan to this one; see `graphwright.plan.looking.compare`."""
        from graphwright.plan.looking.compare import compare

        return compare(old, self)

    def to_json(self) -> dict[str, Any]:
        """The tables by position, and by path what became of each node; as JSON can have it."""
        return {"schema": 1, "hash": self.hash, "version": self.version, **tables(self), "nodes": nodes(self)}

    def __repr__(self) -> str:
        copies = sum(1 for i in self.instrs if i.why)
        return (
            f"Plan({self.program.name!r} v{self.version}: {len(self.instrs)} instructions ({copies} copies), "
            f"arena {self.arena_bytes / 2**20:.2f} MiB, planned in {self.ms:.1f} ms)"
        )


def _edited_source(p: Program) -> tuple[Program, int] | None:
    """What a derived program was made of, at any remove, if that was edited since; with the version it had."""
    while p.source is not None:
        if p.source[0].version != p.source[1]:
            return p.source
        p = p.source[0]
    return None
