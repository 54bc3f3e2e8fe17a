"""The tolerance of an export's check: the program's own rounding error, measured in float64."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.models.errors import VerificationFailed
from graphwright.models.export import export as exporting
from graphwright.models.export.examples import IDS
from graphwright.models.export.rounding import FACTOR, rounding_tolerance
from graphwright.models.export.verify import LoaderOutput, compare

ROWS = [{IDS: np.arange(40, 60)}, {IDS: np.array([84, 104, 101])}]


def logits(model):
    return [{"logits": model.logits(row[IDS])} for row in ROWS]


def test_rounding_is_explained_and_a_changed_weight_is_not():
    model = gw.open("bundled")
    found = logits(model)
    tolerance = rounding_tolerance(model, ROWS, found)
    assert 0 < tolerance < 1e-5
    p = model.program
    nodes = [p.run({"ids": r[IDS][None], "positions": np.arange(len(r[IDS]))[None]})["logits"][0] for r in ROWS]
    other = [{"logits": np.asarray(n) * (1 + np.float32(tolerance / FACTOR))} for n in nodes]  # the same, but rounding
    here = LoaderOutput(found, [], {})
    assert compare(here, LoaderOutput(other, [], {}), tolerance)["max_rel"] > 0
    key = p.key(p.node("layers.1.mlp.up.weight"))
    with p.edit("one weight is wrong") as e:
        e.set_weight(key, lambda w: w * 1.01)
    with pytest.raises(VerificationFailed):
        compare(here, LoaderOutput(logits(model), [], {}), tolerance)


def test_difference_above_any_rounding_is_not_taken_for_one():
    model = gw.open("bundled")
    wrong = [{"logits": row["logits"] * 1.01} for row in logits(model)]
    assert rounding_tolerance(model, ROWS, wrong) == 0.0


def test_exports_are_checked_by_the_measured_tolerance_where_the_fixed_one_is_exceeded(monkeypatch, tmp_path):
    model, given = gw.open("bundled"), []

    def there(folder, rows, **options):
        found = exporting.compute_here(model, rows)
        moved = [{"logits": row["logits"] * np.float32(1 + factor)} for row in found.outputs]
        facts = {"missing_keys": [], "unexpected_keys": [], "class": "x", "transformers": "x", "threads": 1}
        return LoaderOutput(moved, found.greedy, facts)

    monkeypatch.setattr(exporting, "compute_there", there)
    monkeypatch.setattr(exporting, "rounding_tolerance", lambda *a: given.append(a) or 4e-5)
    factor = 3e-5
    receipt = model.export(tmp_path / "near", timed=False)
    assert (receipt.check["export_error"]["tol"], len(given)) == (4e-5, 1)
    factor = 5e-5
    with pytest.raises(VerificationFailed, match="differ from the program's"):
        model.export(tmp_path / "far", timed=False)
    factor = 0.0
    given.clear()
    model.export(tmp_path / "same", timed=False)
    assert not given
