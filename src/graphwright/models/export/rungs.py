"""The export ladder: which rung can carry a model as it is now, whether exactly, and why no lower one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from graphwright.array import BY_TAG
from graphwright.errors import UsageError
from graphwright.models.codegen.source import check_emittable
from graphwright.models.errors import ExportLevelImpossible
from graphwright.models.export.dense import conform, multiplied
from graphwright.models.export.deviation import classified, template
from graphwright.models.export.hosts import find_host
from graphwright.models.export.template_reader import TRUNK, read
from graphwright.models.export.uniform import Uniform, fits
from graphwright.models.export.write import companion_files

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.models.export.deviation import Deviation
    from graphwright.models.export.hosts import Hosted
    from graphwright.models.export.uniform import Reason
    from graphwright.models.model import Model

RUNGS = {
    1: "same class, same shapes",
    2: "same class, other sizes",
    3: "same class, what was cut as zeros",
    4: "a class with sizes per layer",
    5: "generated modeling code",
}
PREFER = ("stock", "size")


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """What one rung would be.

    Attributes:
        rung: its number.
        possible: whether it can be asked for.
        exact: whether the files would hold the program's function, but for rounding in float32.
        reasons: why it is not possible or not exact: {reason, path, axis, field}, the last two where a size is why.
        files: what would be written.
        bytes: of the weights.
    """

    rung: int
    possible: bool
    exact: bool
    reasons: tuple[dict[str, str], ...] = ()
    files: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class ExportPlan:
    """Which rungs can carry a model.

    Attributes:
        rung: the one that `auto` takes: the lowest that is exact; None if there is none.
        prefer: `stock`, or `size`, which leaves rung 3 out.
        rungs: all five.
        deviations: what is not as the family's template has it.
    """

    rung: int | None
    prefer: str
    rungs: tuple[LevelPlan, ...]
    deviations: tuple[Deviation, ...]

    @property
    def possible(self) -> tuple[int, ...]:
        """Rungs that can be asked for."""
        return tuple(r.rung for r in self.rungs if r.possible)

    @property
    def bytes(self) -> int:
        """Of the weights that `auto` would write."""
        return self.rungs[(self.rung or 5) - 1].bytes

    @property
    def not_better(self) -> tuple[dict[str, Any], ...]:
        """Why no lower rung: {rung, reason, path}."""
        return self.why_not(self.rung)

    def why_not(self, rung: int | None) -> tuple[dict[str, Any], ...]:
        """For each rung below: its first reason, or what else kept it from being taken."""
        rows = []
        for r in self.rungs[: 5 if rung is None else rung - 1]:
            if r.reasons:
                first, *rest = r.reasons
                more = f", and {len(rest)} more" if rest else ""
                reason = f"{first['path']}: {first['reason']}{more}" if first["path"] else first["reason"] + more
                rows.append({"rung": r.rung, "reason": reason, "path": first["path"]})
            elif r.rung == 3 and self.prefer == "size":
                rows.append({"rung": 3, "reason": "size is preferred to the stock class", "path": ""})
            elif r.possible:
                rows.append({"rung": r.rung, "reason": f"possible, but rung {rung} was asked for", "path": ""})
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        from dataclasses import asdict

        facts = {"rung": self.rung, "prefer": self.prefer, "possible": list(self.possible), "bytes": self.bytes}
        rows = {"rungs": [asdict(r) for r in self.rungs], "deviations": [asdict(d) for d in self.deviations]}
        return {**facts, "not_better": list(self.not_better), **rows}

    def __repr__(self) -> str:
        lines = [f"rung {self.rung}: {RUNGS[self.rung]}" if self.rung else "no rung can carry this structure"]
        reasons: dict[str, list[str]] = {}
        for n in self.not_better:
            reasons.setdefault(n["reason"], []).append(str(n["rung"]))
        lines += [f"  not rung {', '.join(rungs)}: {reason}" for reason, rungs in reasons.items()]
        others = [r for r in self.rungs if r.possible and r.rung != self.rung]
        lines += [f"  rung {r.rung} {'exactly' if r.exact else 'inexactly'}: {r.bytes / 2**20:.2f} MiB" for r in others]
        lines += [f"  {d.path}: {d.kind}, {d.detail}" for d in self.deviations[:20]]
        lines += [f"  ... {len(self.deviations) - 20} more"] if len(self.deviations) > 20 else []
        return "\n".join([*lines, f"{self.bytes / 2**20:.2f} MiB of weights"])


class Ladder:
    """A model against its family's template, and what each rung makes of it; reads no payload until `conformed`."""

    def __init__(self, model: Model) -> None:
        self.model, self.reading = model, read(model, template(model))
        self.fits = fits(self.reading, model.config)
        self.deviations = classified(model, self.reading, self.fits)

    @cached_property
    def host(self) -> Hosted | list[Reason]:
        """The class of rung 4, or why there is none."""
        return find_host(self.model, self.reading)

    def conformed(self, rung: int) -> Model:
        """The model that rung 2 or 3 writes."""
        if rung == 2:
            assert isinstance(self.fits.uniform, Uniform)
            return conform(
                self.model, self.reading, self.fits.uniform.config, self.fits.uniform.dims, self.fits.uniform.layers
            )
        assert not isinstance(self.fits.dense, str)
        return conform(self.model, self.reading, *self.fits.dense)

    def plan(self, prefer: str = "stock") -> ExportPlan:
        """All rungs, and the one to take. Raises: UsageError for another preference."""
        if prefer not in PREFER:
            raise UsageError("unknown option", expected="prefer stock or size", got=prefer)
        rows = (self._first(), self._second(), self._third(), self._fourth(), self._fifth())
        taken = (r.rung for r in rows if r.possible and r.exact and not (r.rung == 3 and prefer == "size"))
        return ExportPlan(next(taken, None), prefer, rows, tuple(self.deviations))

    # -- the rungs ---------------------------------------------------------------------------------------------------
    def _first(self) -> LevelPlan:
        why = tuple(_row(d.path, f"{d.kind}, {d.detail}", d.axis, d.field) for d in self.deviations)
        size = sum(self.model.program.spec(n).nbytes for n in self.model.program.params())
        return LevelPlan(1, not why, not why, why, self._files(), size)

    def _second(self) -> LevelPlan:
        if not self.deviations:
            return LevelPlan(2, False, False)
        if isinstance(self.fits.uniform, list):
            return LevelPlan(2, False, False, tuple(_row(r.path, r.why, r.axis, r.field) for r in self.fits.uniform))
        exact = not self._rounded(self.fits.uniform.dims)
        return LevelPlan(2, True, exact, (), self._files(), self._bytes(self.fits.uniform.dims))

    def _third(self) -> LevelPlan:
        if not self.deviations:
            return LevelPlan(3, False, False)
        p, reading = self.model.program, self.reading
        why = [_row(p.path(n), text) for n, text in reading.unread.items()]
        kinds = ("op", "dtype")
        why += [_row(d.path, f"{d.kind}, {d.detail}") for d in self.deviations if d.kind in kinds and not why]
        for slot, text in self.fits.misfits:
            why.append(_row(reading.slots[slot].name if slot != TRUNK else "embed", text))
        if isinstance(self.fits.dense, str):
            why.append(_row("norm", self.fits.dense, "channels", self.model.arch.fields["eps"]))
        if why:
            return LevelPlan(3, False, False, tuple(why))
        rounded = tuple(_row(path, f"is computed, and {kind.name} rounds it")
                        for path, kind in self._rounded(self.model.dims))  # fmt: skip
        return LevelPlan(3, True, not rounded, rounded, self._files(), self._bytes(self.model.dims))

    def _fourth(self) -> LevelPlan:
        if not self.deviations:
            return LevelPlan(4, False, False)
        if isinstance(self.host, list):
            return LevelPlan(4, False, False, tuple(_row(r.path, r.why, r.axis, r.field) for r in self.host))
        return LevelPlan(4, True, True, (), self._files(), self._read_bytes())

    def _fifth(self) -> LevelPlan:
        try:
            check_emittable(self.model.program)
        except ExportLevelImpossible as error:
            return LevelPlan(5, False, False, (_row(str(error.where), f"{error.what}: {error.got}"),))
        code = ("configuration_<id>.py", "modeling_<id>.py")
        return LevelPlan(5, True, True, (), tuple(sorted((*self._files(), *code))), self._read_bytes())

    # -- sizes -------------------------------------------------------------------------------------------------------
    def _rounded(self, dims: Any) -> list[tuple[str, DType]]:
        """Weights that are computed and stored in 16 bits."""
        paths = multiplied(self.reading, dims)
        return [(path, kind) for path in paths if (kind := self._stored(path)).is_low]

    def _stored(self, path: str) -> DType:
        source, key = self.model.checkpoint, self.model.keys[path]
        found = BY_TAG.get(source.info(key).tag) if source is not None and key in source else None
        return found or self.reading.template.spec(path).dtype

    def _bytes(self, dims: Any) -> int:
        weights = self.model.arch.weights(dims)
        return sum(prod(shape) * self._stored(path).itemsize for path, _, shape, _ in weights)

    def _read_bytes(self) -> int:
        p = self.model.program
        read = p.reachable(p.outputs()) if self.deviations else set(p.params())
        return sum(p.spec(n).nbytes for n in p.params() if n in read)

    def _files(self) -> tuple[str, ...]:
        model = self.model
        companions = [f.name for f in companion_files(model.directory)] if model.opened else []
        weights, source = ["model.safetensors"], model.checkpoint
        if source is not None and source.index is not None:
            weights = [source.index.name, *(f.path.name for f in source.files)]
        return tuple(sorted({"config.json", "README.md", "receipt.json", *weights, *companions}))


def _row(path: str, reason: str, axis: str = "", field: str = "") -> dict[str, str]:
    return {"path": path, "reason": reason, **({"axis": axis} if axis else {}), **({"field": field} if field else {})}


def export_plan(model: Model, prefer: str = "stock") -> ExportPlan:
    """What an export would do; reads no payload, writes nothing. Raises: UsageError for another preference."""
    return Ladder(model).plan(prefer)


def choose_level(plan: ExportPlan, rung: int | str) -> int:
    """The rung to export by: `auto` or one that was asked for. Raises: UsageError, ExportLevelImpossible."""
    if rung not in ("auto", 1, 2, 3, 4, 5, "1", "2", "3", "4", "5"):
        raise UsageError("unknown rung", expected="auto or 1 to 5", got=rung)
    wanted = plan.rung if rung == "auto" else int(rung)
    if wanted is not None and wanted in plan.possible:
        return wanted
    row = plan.rungs[(wanted or 5) - 1]
    first = row.reasons[0] if row.reasons else {"reason": "a lower rung carries this", "path": ""}
    raise ExportLevelImpossible(
        "no rung can carry this structure" if plan.rung is None else f"rung {rung} cannot carry this",
        where=first["path"] or None,
        got=first["reason"],
        expected=f"rung {' or '.join(map(str, plan.possible))}" if plan.possible else None,
        fix=f"rung='auto' takes rung {plan.rung}" if plan.rung else "model.save(DIR) keeps any structure",
    )
