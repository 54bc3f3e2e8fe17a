"""A block of another checkpoint under the same names and keys: its bytes count, not those of the file opened first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import some_ids

import graphwright as gw
from graphwright.models import StaleCache

IDS = some_ids((9,))
BLOCK = "layers.1.mlp"


def transplant(model: gw.Model, donor: gw.Model) -> None:
    p, n = model.program, model.dims.hidden
    b = gw.Builder()
    b.output(b.tanh(b.input("x", ("B", "T", n)), name="stub"), "y")
    part = donor.program.extract(donor.program.select(f"{BLOCK}.*", kind="op"))
    with p.edit("room for the block") as e:
        ends = {"x": "layers.1.mid", "y": f"{BLOCK}.down"}
        e.replace(p.select(f"{BLOCK}.*", kind="op"), b.build(), ends)
        e.remove(p.select(BLOCK))
    with p.edit("the block of the donor") as e:
        e.replace(p.select("stub"), part)


@pytest.fixture
def pair(model: gw.Model, tmp_path: Path) -> tuple[gw.Model, gw.Model]:
    family, fields = checkpoints.FEATURES["llama"]
    checkpoints.make(tmp_path / "donor", family, seed=5, **fields)
    return model, gw.open(tmp_path / "donor")


def test_transplanted_weights_are_exported(pair: tuple[gw.Model, gw.Model], tmp_path: Path) -> None:
    model, donor = pair
    before, structure = model.logits(IDS), model.program.structure_hash()
    transplant(*pair)
    assert model.program.structure_hash() == structure
    model.export(tmp_path / "out", check="none", timed=False)
    out = gw.open(tmp_path / "out")
    for key in donor.program.weights:
        file: Any = (donor if ".1.mlp." in key or ".1.post_attention" in key else model).program.weights
        np.testing.assert_array_equal(out.program.weights[key].numpy(), file[key].numpy())
    assert np.array_equal(out.logits(IDS), model.logits(IDS))
    assert not np.array_equal(before, model.logits(IDS))


def test_transplanted_weights_make_a_cache_stale(pair: tuple[gw.Model, gw.Model]) -> None:
    model, _ = pair
    cache = model.new_cache(16, kind="static")
    model.prefill(cache, IDS)
    transplant(*pair)
    with pytest.raises(StaleCache) as caught:
        model.prefill(cache, [1])
    assert caught.value.layers == ("layers.2.attn.sdpa",)
    model.program.undo(2)
    cache.check()
