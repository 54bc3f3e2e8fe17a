"""The figures of a pruning, made again from the journal, which says what was done, and the programs around it."""

from __future__ import annotations

from math import prod
from statistics import fmean
from typing import Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.program.axes.resize import ResizeAxis
from graphwright.program.editing.edits import RemoveEdge, RemoveNode, SetWeight
from graphwright.program.editing.journal import Entry
from graphwright.program.errors import NotUndoable
from graphwright.surgery.calibration import Calibration, Stream
from graphwright.surgery.measure import facts, loss, speaks
from graphwright.surgery.pruning.plan import TOOL, Step
from graphwright.surgery.pruning.prunable import of_group
from graphwright.surgery.pruning.restore import Change
from graphwright.surgery.pruning.statistics import grams


def optimise_report(
    program: Program, calibration: Calibration, seq: int | None = None, *, tokenizer: Any = None
) -> dict[str, Any]:
    """What `PruneReport.figures()` gave when the entry was made.

    Args:
        program: with the entry in its journal, and its undo kept.
        calibration: the same data.
        seq: of the entry; by default the last pruning in force.
        tokenizer: as it was given then: that of the model.
    Returns: {before, after, layers, calibration, journal}; a layer's errors are on what the pruned ones before it give.
    Raises: UsageError if there is no such entry; NotUndoable if what would undo it was not kept.
    """
    made = [e for e in program.history.undoable if e.tool == TOOL and (seq is None or e.seq == seq)]
    if not made:
        raise UsageError("no pruning is in force", where=program.name, got=None if seq is None else f"entry {seq}")
    entry = made[-1]
    before, after = program.at(entry.seq - 1), program.at(entry.seq)
    return {
        "before": facts(before, calibration, before, tokenizer),
        "after": facts(after, calibration, before, tokenizer),
        "layers": _layers(before.fork(), _steps(before.fork(), entry), calibration),
        "calibration": calibration.to_json(),
        "journal": entry.hash,
    }


def _steps(p: Program, entry: Entry) -> list[Step]:
    """What was cut, in order, and the weights that were set after each cut."""
    if entry.undo is None:
        raise NotUndoable("what would undo this entry was not kept", where=f"entry {entry.seq}")
    found: list[dict[str, Any]] = []
    for edit in entry.undo.forward:
        if isinstance(edit, ResizeAxis):
            (axis,) = edit.axes
            gone = tuple(map(int, np.delete(np.arange(axis.of), axis.places)))
            found.append({"what": "units", "name": axis.axis, "units": gone, "size": axis.of, "weights": {}})
        elif isinstance(edit, SetWeight):
            found[-1]["weights"][edit.key] = edit.array
        elif isinstance(edit, RemoveEdge) and not (found and found[-1].get("open")):
            found.append({"what": "module", "name": p.path(edit.edge), "open": True})
        elif not isinstance(edit, RemoveEdge | RemoveNode):
            raise UsageError("heads in unequal number cannot be told from the journal", where=f"entry {entry.seq}")
        if not isinstance(edit, RemoveEdge | RemoveNode) and found:
            found[-1].pop("open", None)
    return [Step(**{k: v for k, v in f.items() if k != "open"}) for f in found]


def _layers(p: Program, steps: list[Step], calibration: Calibration) -> list[dict[str, Any]]:
    """The steps once more, each measured."""
    feeds, held = calibration.feeds(p), calibration.feeds(p, held=True)
    reference = None if speaks(p) else list(Stream(p, feeds).outputs())
    learn, check, rows = Stream(p, feeds), Stream(p, held), []
    for step in steps:
        sizes = {k: v.shape for k, v in p.weights.items()}
        row: dict[str, Any] = {"what": step.what, "name": step.name}
        if step.what == "module":
            plain = loss(Stream(p, feeds), reference)
            step.apply(p)
            row |= {"error": loss(Stream(p, feeds), reference), "plain": plain, "held_out": None}
        else:
            axis = of_group(p.axes()[step.name])
            assert axis is not None
            keep = np.ones(axis.size, bool)
            keep[list(step.units)] = False
            for stream in (learn, check):
                stream.advance(axis.start)
            moments = [grams(p, axis.consumers, stream) for stream in (learn, check)]
            changes = [Change.of(p, c, keep) for c in axis.consumers]
            plain = fmean(c.plain(g) for c, g in zip(changes, moments[0], strict=True))
            step.apply(p)
            inside, outside = (fmean(c.error(p, g) for c, g in zip(changes, side, strict=True)) for side in moments)
            row |= {"error": inside, "plain": plain, "held_out": outside}
        shapes = {k: (s, p.weights.array(k).shape if k in p.weights else ()) for k, s in sizes.items()}
        changed = {k: [list(a), list(b)] for k, (a, b) in shapes.items() if a != b}
        params = sum(prod(a) - (prod(b) if b else 0) for a, b in changed.values())
        rows.append(row | {"units": step.to_json()["units"], "of": step.size, "params": params,
                           "restored": sorted(step.weights), "shapes": changed})  # fmt: skip
    return rows
