"""Reports on a training step and on hardening, and a chart of gate probabilities over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.ops import traits
from graphwright.program import Entry, Program
from graphwright.program.cost import ModelSize, size
from graphwright.program.draw.shapes import COLOURS, HEIGHT, chart, label, legend, lines
from graphwright.program.gates import RESERVED
from graphwright.program.kinds import PARAM
from graphwright.report import Report, plain
from graphwright.structure.elements import Element
from graphwright.structure.policy import ProtectedElement


@dataclass(frozen=True, slots=True, repr=False)
class StepReport(Report):
    """Report on one training step.

    Attributes:
        step: index of the step, from 0.
        loss: task plus penalties; task: loss of the task; penalties: dict from names to values.
        temperature: dict from groups of gates to their temperatures in this step.
        open: number of elements with a decision probability >= 1/2, after the step.
        expected_cost: Σ cost · open probability / Σ cost, after the step.
        edits: names of the elements that the policy cut after the step.
        skipped: True if loss or gradients were not finite, so that nothing changed.
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


def ungated(p: Program) -> ModelSize:
    """Return the size of a program without its gates and their logits."""
    gates = {n for n in p.nodes() if traits(p.op(n)).gates or (p.op(n) == PARAM and p.key(n) in RESERVED)}
    return size(p, [n for n in p.nodes() if n not in gates])


@dataclass(frozen=True, slots=True, repr=False)
class Discretized(Report):
    """Report on hardening.

    Attributes:
        program, entry: the hardened program, and its journal entry of the hardening.
        elements: all elements before hardening.
        cut: names of the elements that were cut; elements removed together with a larger one are not listed.
        kept_back: proposed cuts that were rejected, with the reason.
        before, after: sizes of the program without gates, before and after.
        loss_before: loss with gates in evaluation mode; loss_after: loss of the hardened program; None without a probe.
    """

    program: Program
    elements: list[Element]
    cut: list[str]
    kept_back: list[ProtectedElement]
    before: ModelSize
    after: ModelSize
    loss_before: float | None
    loss_after: float | None
    entry: Entry

    @property
    def gap(self) -> float | None:
        """The hardening gap: the loss after minus the loss before; None without a probe."""
        return None if self.loss_before is None or self.loss_after is None else self.loss_after - self.loss_before

    @property
    def num_pruned_edges(self) -> int:
        """The number of edges and options that were cut, edges of patterns included."""
        gone = set(self.cut)
        return sum(e.name in gone and e.over in ("edges", "choice", "pattern") for e in self.elements)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Map each kind of element to the number before and after hardening; only direct cuts are counted."""
        gone, found = set(self.cut), {}
        for e in self.elements:
            there, stay = found.get(e.over, (0, 0))
            found[e.over] = there + 1, stay + (e.name not in gone)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serialisable dict."""
        before, after = self.before, self.after
        return {"cut": self.cut, "kept_back": plain(self.kept_back),
                "counts": {over: {"before": a, "after": b} for over, (a, b) in self.counts().items()},
                "num_pruned_edges": self.num_pruned_edges,
                **{name: [getattr(before, name), getattr(after, name)] for name in ("params", "flops")},
                "loss": [self.loss_before, self.loss_after], "gap": self.gap, "entry": self.entry.seq}  # fmt: skip

    def _text(self) -> str:
        rows = [f"{over:<8} {a} -> {b}  ({100 * (a - b) / a:.0f} % cut)" for over, (a, b) in self.counts().items()]
        rows.append(f"params   {self.before.params:,} -> {self.after.params:,}")
        rows.append(f"flops    {self.before.flops:,} -> {self.after.flops:,}")
        if self.gap is not None:
            rows.append(f"loss     {self.loss_before:.6g} with gates -> {self.loss_after:.6g} without"
                        f"  (hardening gap {self.gap:+.3g})")  # fmt: skip
        rows += [f"kept     {k.name}: {k.reason}" for k in self.kept_back]
        return "\n".join(rows)


_FEW = 64  # gates with a line each


def probabilities(values: np.ndarray, names: Sequence[str], kept: Sequence[bool], last: int) -> str:
    """Draw probabilities over training as SVG: a line per element, blue if it was kept, red if it was cut.

    With more than 64 elements the chart has one line per axis instead, which shows the mean probability.

    Args:
        values: probabilities, float [steps, elements].
        names: names of the elements; kept: whether each was kept.
        last: the step of the last row of `values`.
    """
    few, groups = len(names) <= _FEW, dict[str, list[int]]()
    for i, name in enumerate(names):
        groups.setdefault(name if few else name.partition("[")[0], []).append(i)
    colours = {group: COLOURS[k % len(COLOURS)] for k, group in enumerate(groups)}
    if few:
        colours = {name: "#0969da" if stays else "#cf222e" for name, stays in zip(names, kept, strict=True)}
    what = "probability of each gate (blue: kept, red: cut)" if few else "mean probability of the gates of an axis"
    series = {group: (values[:, mine].mean(1).tolist(), colours[group]) for group, mine in groups.items()}
    shapes = [*lines(series, f"step {last}", y=(0.0, 1.0)), label(50, HEIGHT + 4, what)]
    if few:
        return chart(shapes, HEIGHT + 12)
    return chart([*shapes, *legend(colours, HEIGHT + 22)], HEIGHT + 12 + 18 * -(-len(groups) // 3))
