"""Recomputation of the figures of a pruning from the journal."""

from __future__ import annotations

from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.program.axes.resize import ResizeAxis
from graphwright.program.editing.edits import RemoveEdge, RemoveNode, SetWeight
from graphwright.program.errors import NotUndoable
from graphwright.surgery.calibration import Stream
from graphwright.surgery.measure import figures, loss, scores_tokens
from graphwright.surgery.pruning.plan import TOOL, PruneStep
from graphwright.surgery.pruning.prunable import prunable_axis
from graphwright.surgery.pruning.restore import ProductCut
from graphwright.surgery.pruning.scores import grams

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.program.editing.journal import Entry
    from graphwright.surgery.calibration import Calibration


def optimise_report(
    program: Program, calibration: Calibration, seq: int | None = None, *, tokenizer: Any = None
) -> dict[str, Any]:
    """Compute the figures of a pruning again; equal to `PruneReport.figures()` at the time.

    Args:
        program: with the entry in its journal, and its undo record.
        calibration: the same data.
        seq: of the entry; by default the last pruning that was not undone.
        tokenizer: as given then: that of the model.
    Returns: {before, after, layers, calibration, journal}; a layer's errors are on the outputs of the pruned ones
        before it.
    Raises: UsageError if there is no such entry; NotUndoable if its undo record was not kept.
    """
    made = [e for e in program.history.undoable if e.tool == TOOL and (seq is None or e.seq == seq)]
    if not made:
        raise UsageError("the journal has no pruning in effect", where=program.name,
                         got=None if seq is None else f"entry {seq}")  # fmt: skip
    entry = made[-1]
    before, after = program.at(entry.seq - 1), program.at(entry.seq)
    return {
        "before": figures(before, calibration, before, tokenizer),
        "after": figures(after, calibration, before, tokenizer),
        "layers": _layers(before.fork(), _steps(before.fork(), entry), calibration),
        "calibration": calibration.to_json(),
        "journal": entry.hash,
    }


def _steps(p: Program, entry: Entry) -> list[PruneStep]:
    """Cuts in order, with the weights that were set after each."""
    if entry.undo is None:
        raise NotUndoable("the undo record of this entry was not kept", where=f"entry {entry.seq}")
    found: list[dict[str, Any]] = []
    for edit in entry.undo.forward:
        if isinstance(edit, ResizeAxis):
            (axis,) = edit.axes
            removed = tuple(map(int, np.delete(np.arange(axis.of), axis.old)))
            found.append({"what": "units", "name": axis.axis, "units": removed, "size": axis.of, "weights": {}})
        elif isinstance(edit, SetWeight):
            found[-1]["weights"][edit.key] = edit.array
        elif isinstance(edit, RemoveEdge) and not (found and found[-1].get("open")):
            found.append({"what": "module", "name": p.path(edit.edge), "open": True})
        elif not isinstance(edit, RemoveEdge | RemoveNode):
            raise UsageError("cuts of unequal heads cannot be recomputed from the journal", where=f"entry {entry.seq}")
        if not isinstance(edit, RemoveEdge | RemoveNode) and found:
            found[-1].pop("open", None)
    return [PruneStep(**{k: v for k, v in f.items() if k != "open"}) for f in found]


def _layers(p: Program, steps: list[PruneStep], calibration: Calibration) -> list[dict[str, Any]]:
    """Apply the steps again, and measure each."""
    feeds, held = calibration.feeds(p), calibration.feeds(p, held=True)
    reference = None if scores_tokens(p) else list(Stream(p, feeds).outputs())
    learn, check, rows = Stream(p, feeds), Stream(p, held), []
    for step in steps:
        sizes = {k: v.shape for k, v in p.weights.items()}
        row: dict[str, Any] = {"what": step.what, "name": step.name}
        if step.what == "module":
            plain = loss(Stream(p, feeds), reference)
            step.apply(p)
            row |= {"error": loss(Stream(p, feeds), reference), "plain": plain, "held_out": None}
        else:
            axis = prunable_axis(p.axes()[step.name])
            assert axis is not None
            keep = np.ones(axis.size, bool)
            keep[list(step.units)] = False
            for stream in (learn, check):
                stream.advance(axis.start)
            moments = [grams(p, axis.consumers, stream) for stream in (learn, check)]
            cuts = [ProductCut.of(p, c, keep) for c in axis.consumers]
            plain = fmean(c.plain(g) for c, g in zip(cuts, moments[0], strict=True))
            step.apply(p)
            inside, outside = (fmean(c.error(p, g) for c, g in zip(cuts, side, strict=True)) for side in moments)
            row |= {"error": inside, "plain": plain, "held_out": outside}
        shapes = {k: (s, p.weights.array(k).shape if k in p.weights else ()) for k, s in sizes.items()}
        changed = {k: [list(a), list(b)] for k, (a, b) in shapes.items() if a != b}
        params = sum(prod(a) - (prod(b) if b else 0) for a, b in changed.values())
        rows.append(row | {"units": step.to_json()["units"], "of": step.size, "params": params,
                           "restored": sorted(step.weights), "shapes": changed})  # fmt: skip
    return rows
