"""The export ladder: which rung can carry a model as it is now, and why no lower one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.models.codegen.source import check_emittable
from graphwright.models.errors import RungImpossible
from graphwright.models.export.deviation import Deviation, deviations

if TYPE_CHECKING:
    from graphwright.models.model import Model

RUNGS = {
    1: "same class, same shapes",
    2: "same class, other sizes",
    3: "same class, what was cut as zeros",
    4: "a class with sizes per layer",
    5: "generated modeling code",
}


@dataclass(frozen=True, slots=True, repr=False)
class ExportPlan:
    """Which rungs can carry a model.

    Attributes:
        rung: the lowest possible one, or None.
        deviations: what is not as the family's template has it.
        not_better: why no lower rung: {rung, reason, path}.
        bytes: of the weights to be written.
        possible: all rungs that can be asked for.
    """

    rung: int | None
    deviations: tuple[Deviation, ...]
    not_better: tuple[dict[str, Any], ...]
    bytes: int
    possible: tuple[int, ...] = ()

    def __repr__(self) -> str:
        lines = [f"rung {self.rung}: {RUNGS[self.rung]}" if self.rung else "no rung can carry this structure"]
        reasons: dict[str, list[str]] = {}
        for n in self.not_better:
            reasons.setdefault(n["reason"], []).append(str(n["rung"]))
        lines += [f"  not rung {', '.join(rungs)}: {reason}" for reason, rungs in reasons.items()]
        lines += [f"  {d.path}: {d.kind}, {d.detail}" for d in self.deviations[:20]]
        lines += [f"  ... {len(self.deviations) - 20} more"] if len(self.deviations) > 20 else []
        return "\n".join([*lines, f"{self.bytes / 2**20:.2f} MiB of weights"])


def export_plan(model: Model) -> ExportPlan:
    """What an export would do; reads no payload, writes nothing."""
    found = deviations(model)
    p = model.program
    why: list[dict[str, Any]] = []
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        first = f"{found[0].path} {found[0].kind}: {found[0].detail}{more}"
        why.append({"rung": 1, "reason": first, "path": found[0].path})
        why += [{"rung": n, "reason": "not built in this version", "path": found[0].path} for n in (2, 3, 4)]
    try:
        check_emittable(p)
    except RungImpossible as error:
        why.append({"rung": 5, "reason": f"{error.what}: {error.got}", "path": str(error.where)})
    refused = {n["rung"] for n in why}
    possible = tuple(n for n in (1, 5) if n not in refused)
    read = p.reachable(p.outputs()) if found else set(p.params())
    size = sum(p.spec(n).nbytes for n in p.params() if n in read)
    rung = possible[0] if possible else None
    return ExportPlan(rung, tuple(found), tuple(n for n in why if rung is None or n["rung"] < rung), size, possible)


def choose_rung(plan: ExportPlan, rung: int | str) -> int:
    """The rung to export by: `auto` or one that was asked for. Raises: UsageError, RungImpossible."""
    if rung not in ("auto", 1, 2, 3, 4, 5, "1", "2", "3", "4", "5"):
        raise UsageError("unknown rung", expected="auto or 1 to 5", got=rung)
    wanted = plan.rung if rung == "auto" else int(rung)
    if wanted is not None and wanted in plan.possible:
        return wanted
    why = next((n["reason"] for n in plan.not_better if n["rung"] == (wanted or 5)), "not built in this version")
    raise RungImpossible(
        "no rung can carry this structure" if plan.rung is None else f"rung {rung} cannot carry this",
        where=plan.not_better[-1]["path"] if plan.not_better else None,
        got=why,
        expected=f"rung {' or '.join(map(str, plan.possible))}" if plan.possible else None,
        fix=f"rung='auto' takes rung {plan.rung}" if plan.rung else "model.save(DIR) keeps any structure",
    )
