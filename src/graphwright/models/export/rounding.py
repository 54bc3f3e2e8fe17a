"""How far rounding moves a program's outputs: its results in float32 beside those in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float32, float64
from graphwright.errors import GraphwrightError
from graphwright.models.export.examples import IDS, Example
from graphwright.models.importing.recover.regions import Regions
from graphwright.ops.call import as_dtype
from graphwright.program.kinds import CONST, SOURCES
from graphwright.program.op_graph import Value
from graphwright.program.run import check_feeds

if TYPE_CHECKING:
    from graphwright.models.model import Model

LARGEST = 1e-3
"""Largest rounding error, relative to the largest entry of an output, that is taken for one."""
FACTOR = 4.0
"""How many times the program's own rounding error that of the files may be: both sum in orders of their own."""


def rounding_tolerance(model: Model, rows: Sequence[Example], outputs: Sequence[Mapping[str, np.ndarray]]) -> float:
    """Return the relative difference from a program's outputs that rounding in float32 explains.

    It is `FACTOR` times the largest difference of the outputs from those of the same program computed in float64; 0 if
    the program is not in float32, if it cannot be computed so, or if that difference is above `LARGEST`.
    """
    if model.compute != "float32":
        return 0.0
    worst = 0.0
    for row, found in zip(rows, outputs, strict=True):
        try:
            exact = _in_float64(model, row, list(found))
        except GraphwrightError:
            return 0.0
        for name, value in found.items():
            wanted = exact[name].reshape(value.shape)
            if value.size and wanted.dtype.kind == "f":
                worst = max(worst, float(np.abs(value - wanted).max()) / max(float(np.abs(wanted).max()), 1e-30))
    return FACTOR * worst if worst <= LARGEST else 0.0


def _in_float64(model: Model, row: Example, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Run a program on an example in float64 where it computes in float32; return these outputs."""
    p = model.program
    feeds: dict[str, Any] = dict(row)
    if IDS in row and IDS not in p.input_names():
        feeds = {"ids": np.asarray(row[IDS])[None]}
        feeds |= {"positions": np.arange(len(row[IDS]))[None]} if "positions" in p.input_names() else {}
    checked, sizes = check_feeds(p, feeds)
    given = {Value(p.node(name)): _wide(tensor.data) for name, tensor in checked.items()}
    for node in (n for kind in SOURCES if kind != CONST for n in p.of_kind(kind)):
        if Value(node) not in given:
            given[Value(node)] = _wide(p.weights.array(p.key(node)))
    at = dict(zip(p.output_names(), p.outputs(), strict=True))
    made = Regions(p).compute([at[name] for name in names], given, sizes, wide=True)
    return {name: array.to_numpy() for name, array in zip(names, made, strict=True)}


def _wide(array: Any) -> Any:
    return as_dtype(array, float64) if array.dtype is float32 else array
