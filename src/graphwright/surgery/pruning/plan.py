"""A plan of pruning: ordered steps, each one coupled group with what it costs and what it is predicted to lose.

A step holds names and values, no handles, so that it can be applied later, alone or with the others; weights that
changed meanwhile make it refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.program.axes.units import Units, runs
from graphwright.surgery.errors import StaleStep
from graphwright.surgery.pruning.modules import modules, remove_module

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.program import Program
    from graphwright.program.editing.transaction import Transaction
    from graphwright.surgery.pruning.report import PruneReport

TOOL = "graphwright.surgery.prune"


@dataclass(frozen=True, slots=True)
class Step:
    """One coupled group that goes.

    Attributes:
        what: `units` of an axis, or a `module`.
        name: of the axis, or of the edge that takes the module to the residual path.
        units: numbers of the units that go; none of a module.
        size: units before.
        weights: key -> value after, of products that were restored.
        digests: key -> digest, of every weight of the group, that it was planned for.
        shapes: key -> (shape before, shape after).
        params: parameters that go.
        error, plain: mean squared error of the product's output, relative, on calibration data, and what it would be
            without restoring; of a module the loss without and with it.
        held_out: the error on held-out windows.
        ridge: λ of the fit, in units of the mean diagonal; None where nothing was restored.
        quantiles: of the scores: 0, 25, 50, 75, 100 %.
        ragged: heads go in unequal number.
    """

    what: str
    name: str
    units: tuple[int, ...] = ()
    size: int = 0
    weights: Mapping[str, NDArray] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    params: int = 0
    error: float | None = None
    plain: float | None = None
    held_out: float | None = None
    ridge: float | None = None
    quantiles: tuple[float, ...] = ()
    ragged: bool = False

    def check(self, p: Program) -> None:
        """Raises: StaleStep if a weight of the group is not the one that it was planned for."""
        changed = [k for k, d in self.digests.items() if k not in p.weights or p.weights.digest(k) != d]
        if changed:
            raise StaleStep(
                "weights of this group changed since the plan was made",
                where=self.name,
                got=", ".join(changed[:4]),
                fix="plan again: prune(..., dry_run=True)",
            )

    def make(self, e: Transaction) -> None:
        """Apply inside an open edit. Raises: StaleStep."""
        p = e.program
        self.check(p)
        if self.what == "module":
            found = [m for m in modules(p) if m.name == self.name]
            if not found:
                raise StaleStep("there is no such module by now", where=self.name)
            remove_module(e, found[0])
            return
        e.cut_units(Units(p, {self.name: self.units}, {self.name: self.size}), ragged=self.ragged)
        for key, array in self.weights.items():
            e.set_weight(key, array)

    def apply(self, p: Program) -> None:
        """As an edit of its own. Raises: StaleStep."""
        with p.edit(f"prune {self}", author="pass", tool=TOOL) as e:
            self.make(e)

    def details(self) -> str:
        """Every weight that changes its shape, and the units that go."""
        lines = [str(self)]
        lines += [f"  {key}: {list(a)} => {list(b) if b else 'gone'}" for key, (a, b) in self.shapes.items()]
        return "\n".join([*lines, *([f"  units {runs(self.units)}"] if self.units else [])])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "what": self.what, "name": self.name, "units": runs(self.units), "of": self.size, "params": self.params,
            "error": self.error, "plain": self.plain, "held_out": self.held_out, "ridge": self.ridge,
            "restored": sorted(self.weights), "quantiles": list(self.quantiles),
            "shapes": {k: [list(a), list(b)] for k, (a, b) in self.shapes.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        if self.what == "module":
            loss = "" if self.plain is None or self.error is None else f", loss {self.plain:.4f} => {self.error:.4f}"
            return f"{self.name} cut, {self.params:,} parameters{loss}"
        of = f"{self.size} => {self.size - len(self.units)}"
        error = "" if self.error is None else f", relative error {self.error:.3e}"
        return f"{self.name} {of}, {self.params:,} parameters{error}"


@dataclass(frozen=True, slots=True, repr=False)
class PrunePlan:
    """Steps in the order in which they are applied.

    Attributes:
        program: what was planned for.
        steps: see `Step`.
        report: what was measured on the pruned program, which was made on a copy.
    """

    program: Program
    steps: tuple[Step, ...]
    report: PruneReport

    def apply(self, why: str | None = None) -> None:
        """All steps as one edit, none if there are none. Raises: StaleStep, and nothing is changed."""
        if self.steps:
            gone = sum(s.params for s in self.steps)
            with self.program.edit(why or f"prune {gone:,} parameters", author="pass", tool=TOOL) as e:
                for step in self.steps:
                    step.make(e)

    def details(self) -> str:
        """Every step with its weights and units."""
        return "\n".join(f"{i}. {step.details()}" for i, step in enumerate(self.steps))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return self.report.to_json()

    def __repr__(self) -> str:
        return "\n".join([f"{i}. {step}" for i, step in enumerate(self.steps)] or ["(nothing to prune)"])


def quantiles(scores: np.ndarray) -> tuple[float, ...]:
    """0, 25, 50, 75 and 100 % of some scores."""
    return tuple(float(q) for q in np.quantile(scores, [0, 0.25, 0.5, 0.75, 1])) if len(scores) else ()
