"""Fewer experts: cutting those with the least scores, and merging similar ones, measured on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError
from graphwright.experts.edits import merge
from graphwright.experts.routed import routed_layers
from graphwright.experts.scores import NEEDS_NO_DATA, SCORES, scored
from graphwright.experts.selection import COMPARABLE, check_left, least
from graphwright.experts.usage import measured
from graphwright.program.axes.units import Units
from graphwright.progress import ProgressCallback
from graphwright.report import Report
from graphwright.surgery.calibration import Calibration, CalibrationSource, MissingCalibration, calibration_of
from graphwright.surgery.errors import check_choices
from graphwright.surgery.matrices import program_of
from graphwright.surgery.measure import figures

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program

TOOL = "graphwright.experts"


@dataclass(frozen=True, slots=True, repr=False)
class FewerExperts(Report):
    """The experts that a program lost in one edit, and what that cost.

    Attributes:
        by: the score, or `similar output` for merging.
        gone: {layer: numbers of the experts that were cut or merged into others}, as they were before.
        experts: {layer: number of experts left}.
        before, after: figures on the held-out windows, as those of `surgery.measure.figures`; empty without data.
    """

    by: str
    gone: Mapping[str, Sequence[int]]
    experts: Mapping[str, int]
    before: Mapping[str, float]
    after: Mapping[str, float]
    FIGURES: ClassVar = ("count",)

    @property
    def count(self) -> int:
        """Number of experts that are gone."""
        return sum(map(len, self.gone.values()))

    def _text(self) -> str:
        left = sorted(set(self.experts.values()))
        kept = f"{left[0]}" if len(left) == 1 else f"{left[0]} to {left[-1]}"
        lines = [f"{self.count} experts gone by {self.by}; {kept} left per layer"]
        lines += [f"{name:<16}{self.before[name]:.6g} -> {self.after[name]:.6g}" for name in self.before]
        return "\n".join(lines)


@checked
def prune(
    model: Model | Program, share: float = 0.25, *, by: str = "effect", per_layer: bool = True, rounds: int = 1,
    data: CalibrationSource | None = None, seed: int = 0, progress: ProgressCallback | None = None,
) -> FewerExperts:  # fmt: skip
    """Cut the experts with the least scores, in one edit.

    Args:
        model: a model or program with routed layers.
        share: share of the experts to cut, in (0, 1).
        by: score, see `graphwright.experts.scores`.
        per_layer: whether every layer loses the same number; otherwise layers compete for experts.
        rounds: how often experts are scored again after a part of them was cut.
        data: learning windows for the scores and held-out ones to measure on: a `Calibration`, or its source; by
            default the bundled text, for a model with a tokenizer. Without any, only scores that need none work.
        seed: seed of random scores.
        progress: called as experts are scored.
    Raises: NotAMixture; TooFewExperts; MissingCalibration; UsageError for a share or number of rounds out of range.
    """
    check_choices({"by": by}, {"by": tuple(SCORES)})
    p = program_of(model)
    _check_share(share)
    if rounds < 1:
        raise UsageError("invalid number of rounds", where="rounds", expected=">= 1", got=rounds)
    calibration = _calibration(model, data, needed=by not in NEEDS_NO_DATA)
    feeds = [] if calibration is None else calibration.feeds(p)
    layers, draft = routed_layers(p), p.fork()
    left = {name: list(range(layer.size)) for name, layer in layers.items()}
    total = {name: int(layer.size * share + 1e-9) for name, layer in layers.items()}
    for i in range(rounds):
        part = {name: n * (i + 1) // rounds - n * i // rounds for name, n in total.items()}
        found = scored(draft, by, feeds, seed=seed, progress=progress)
        if per_layer:
            units = [least(draft, {name: found[name]}, n) for name, n in part.items() if n]
        else:
            units = [least(draft, found, sum(part.values()), per_layer=False, comparable=by in COMPARABLE)]
        for chosen in units:
            for name, layer in layers.items():
                ids = chosen.chosen.get(layer.axis.name, ())
                left[name] = [old for at, old in enumerate(left[name]) if at not in ids]
        with draft.edit("draft") as e:
            for chosen in units:
                e.cut_units(Units(draft, chosen.chosen, chosen.sizes))
    gone = {name: [n for n in range(layer.size) if n not in left[name]] for name, layer in layers.items()}
    cut = Units(
        p, {layers[n].axis.name: tuple(ids) for n, ids in gone.items()}, {x.axis.name: x.size for x in layers.values()}
    )
    return _measured(model, calibration, by, gone, lambda: _cut(p, cut, by, share))


def _cut(p: Program, units: Units, by: str, share: float) -> None:
    with p.edit(f"cut {units.count} experts by {by}", author="pass", tool=TOOL) as e:
        e.annotate("experts", by=by, share=share)
        if units.count:
            e.cut_units(units)


@checked
def merge_similar(
    model: Model | Program, share: float = 0.25, *, data: CalibrationSource | None = None, align: bool = True
) -> FewerExperts:
    """Merge experts whose mean results are close, until a share of them is gone, in one edit.

    Experts of a layer are clustered by average linkage of their mean results on the data (Chen et al. 2025, HC-SMoE),
    and each cluster is merged by `merge`, weighted by tokens.

    Args: as in `prune` and `merge`. Raises: as `prune`.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    p = program_of(model)
    _check_share(share)
    calibration = _calibration(model, data, needed=True)
    assert calibration is not None
    use, layers = measured(p, calibration.feeds(p)), routed_layers(p)
    clusters: dict[str, list[list[int]]] = {}
    for name, layer in layers.items():
        wanted = layer.size - int(layer.size * share + 1e-9)
        check_left(layer, wanted)
        tree = linkage(use[name].mean_output, "average") if layer.size > 1 else np.zeros((0, 4))
        labels = fcluster(tree, wanted, "maxclust") if layer.size > 1 else np.ones(1, int)
        clusters[name] = [np.flatnonzero(labels == k).tolist() for k in np.unique(labels)]
    gone = {name: [i for group in groups for i in group[1:]] for name, groups in clusters.items()}

    def apply() -> None:
        with p.edit("merge similar experts", author="pass", tool=TOOL) as e:
            for name, groups in clusters.items():
                left = list(range(layers[name].size))
                for group in (g for g in groups if len(g) > 1):
                    counts = use[name].count[group]
                    merge(e, name, [left.index(i) for i in group], share=counts, align=align)
                    left = [i for i in left if i not in group[1:]]

    return _measured(model, calibration, "similar output", gone, apply)


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise UsageError("invalid share of experts", where="share", expected="above 0 and below 1", got=share)


def _calibration(model: Model | Program, data: CalibrationSource | None, needed: bool) -> Calibration | None:
    if data is not None:
        return calibration_of(model, data)
    if getattr(model, "tokenizer", None) is not None:
        return Calibration.of(model)  # pyright: ignore[reportArgumentType]  # it has a tokenizer
    if needed:
        raise MissingCalibration("this needs data to measure on", where=program_of(model).name, fix="pass data=...")
    return None


def _measured(
    model: Model | Program, calibration: Calibration | None, by: str, gone: Mapping[str, Sequence[int]],
    apply: Callable[[], None],
) -> FewerExperts:  # fmt: skip
    """Apply an edit, and measure the program before and after it."""
    p, tokenizer = program_of(model), getattr(model, "tokenizer", None)
    reference = p.fork()

    def now() -> dict[str, float]:
        return {} if calibration is None else figures(p, calibration, reference, tokenizer)

    before = now()
    apply()
    left = {name: layer.size for name, layer in routed_layers(p).items()}
    return FewerExperts(by, gone, left, before, now())
