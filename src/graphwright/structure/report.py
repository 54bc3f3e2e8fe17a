"""What a step and a hardening did, as values that print and go to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.ops import traits
from graphwright.program.cost import size
from graphwright.program.draw.charts import HEIGHT, chart, legend, lines
from graphwright.program.draw.shapes import label
from graphwright.program.gates import RESERVED
from graphwright.program.kinds import PARAM

if TYPE_CHECKING:
    from graphwright.program import Entry, Program
    from graphwright.program.cost import ModelSize
    from graphwright.structure.elements import Element
    from graphwright.structure.protection import Kept


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of training.

    Attributes:
        step: its number, from 0.
        loss: task and penalties together.
        task: the task's loss.
        penalties: value by name.
        temperature: by group, in this step.
        open: elements whose decision probability is at least 1/2, after it.
        expected_cost: Σ cost · probability over Σ cost, after it.
        edits: names of elements that the policy cut.
        skipped: whether loss or gradients were not finite, so that nothing changed.
    """

    step: int
    loss: float
    task: float
    penalties: Mapping[str, float]
    temperature: Mapping[str, float]
    open: int
    expected_cost: float
    edits: tuple[str, ...] = ()
    skipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def ungated(p: Program) -> ModelSize:
    """What a program takes without its gates and their logits."""
    gates = {n for n in p.nodes() if traits(p.op(n)).gates or (p.op(n) == PARAM and p.key(n) in RESERVED)}
    return size(p, [n for n in p.nodes() if n not in gates])


@dataclass(frozen=True, slots=True, repr=False)
class Discretized:
    """What hardening did.

    Attributes:
        program: the hardened one.
        elements: as they were before.
        cut: names of the elements that were cut; those that went with something coarser are not among them.
        kept_back: what was to go and stays, with the reason.
        before, after: sizes without gates.
        loss_before: with gates in evaluation; None without a probe.
        loss_after: of the hardened program, before any further step.
        entry: of the journal.
    """

    program: Program = field(repr=False)
    elements: list[Element]
    cut: list[str]
    kept_back: list[Kept]
    before: ModelSize
    after: ModelSize
    loss_before: float | None
    loss_after: float | None
    entry: Entry

    @property
    def gap(self) -> float | None:
        """Hardening gap: loss after less loss before."""
        return None if self.loss_before is None or self.loss_after is None else self.loss_after - self.loss_before

    @property
    def num_pruned_edges(self) -> int:
        """Edges and options among what was cut."""
        gone = set(self.cut)
        return sum(e.name in gone and e.over in ("edges", "choice") for e in self.elements)

    def counts(self) -> dict[str, tuple[int, int]]:
        """What was gated -> how many elements there were, and how many stay."""
        gone, found = set(self.cut), {}
        for e in self.elements:
            there, stay = found.get(e.over, (0, 0))
            found[e.over] = there + 1, stay + (e.name not in gone)
        return found

    def to_json(self) -> dict[str, Any]:
        """Numbers and names."""
        return {
            "cut": self.cut,
            "kept_back": [asdict(k) for k in self.kept_back],
            "counts": {over: {"before": a, "after": b} for over, (a, b) in self.counts().items()},
            "num_pruned_edges": self.num_pruned_edges,
            "params": [self.before.params, self.after.params],
            "flops": [self.before.flops, self.after.flops],
            "loss": [self.loss_before, self.loss_after],
            "gap": self.gap,
            "entry": self.entry.seq,
        }

    def __str__(self) -> str:
        rows = [f"{over:<8} {a} -> {b}  ({100 * (a - b) / a:.0f} % cut)" for over, (a, b) in self.counts().items()]
        rows.append(f"params   {self.before.params} -> {self.after.params}")
        rows.append(f"flops    {self.before.flops} -> {self.after.flops}")
        if self.gap is not None:
            rows.append(f"loss     {self.loss_before:.6g} -> {self.loss_after:.6g}  (hardening gap {self.gap:+.3g})")
        rows += [f"kept     {k.name}: {k.reason}" for k in self.kept_back]
        return "\n".join(rows)

    __repr__ = __str__


_FEW = 64  # gates that get a line each


def probabilities(values: np.ndarray, names: Sequence[str], kept: Sequence[bool], last: int) -> str:
    """A line per element, blue if it was kept, red if it was cut; with many of them the mean probability per group.

    Args:
        values: float [rows, elements]; names: of the elements; kept: which of them stayed; last: step of the last row.
    """
    few = len(names) <= _FEW
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name.partition("[")[0], []).append(i)
    series: dict[str, tuple[Sequence[float], str]] = {}
    if few:
        for i, name in enumerate(names):
            series[name] = values[:, i].tolist(), "#0969da" if kept[i] else "#cf222e"
    else:
        for k, (group, members) in enumerate(groups.items()):
            series[group] = values[:, members].mean(1).tolist(), f"hsl({360 * k // len(groups)} 60% 45%)"
    what = "probability of each gate: blue was kept, red was cut" if few else "mean probability of the gates of an axis"
    shapes = [*lines(series, f"step {last}", y=(0.0, 1.0)), label(50, HEIGHT + 4, what)]
    if few:
        return chart(shapes, HEIGHT + 12)
    shapes += legend({name: colour for name, (_, colour) in series.items()}, HEIGHT + 22)
    return chart(shapes, HEIGHT + 12 + 18 * -(-len(groups) // 3))
