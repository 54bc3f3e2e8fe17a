"""Quantising is an edit: values within half a step, undone to the byte, the same on every executor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Made, relative, some_ids
from hypothesis import given, settings
from hypothesis import strategies as st

import graphwright as gw
from graphwright.array.vm.code import GROUP
from graphwright.errors import UsageError
from graphwright.models.quantize import quantised

IDS = some_ids((2, 9))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 99))
def test_each_quantised_weight_is_within_half_a_step(rows: int, columns: int, seed: int) -> None:
    w = np.random.default_rng(seed).standard_t(2, size=(rows, columns)).astype("f4")
    w[0, : columns // 2] = 0
    q, scales = quantised(w)
    steps = np.repeat(scales, GROUP, axis=1)[:, :columns]
    assert q.shape == w.shape
    assert scales.shape == (rows, -(-columns // GROUP))
    assert (np.abs(q * steps - w) <= steps * 0.5001).all()
    assert np.array_equal(q[w == 0], np.zeros((w == 0).sum()))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_a_quantised_model_runs_and_quantisation_can_be_undone(family: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(family).path)
    before, bits = m.logits(IDS), m.program.hash()
    cache = m.new_cache(20, kind="static")
    m.prefill(cache, IDS[:1])
    entry = m.quantize()
    assert entry is m.program.journal[-1]
    assert "quantise" in entry.why
    assert not [n for n in m.program.select("**", op="linear")]
    with pytest.raises(gw.models.StaleCache):
        cache.step(IDS[:1, :1])
    after = m.logits(IDS)  # widened on ATen
    assert 1e-4 < relative(after, before) < 0.05
    m.reprefill(cache)
    token, whole = m.prefill(cache, IDS[:1, :1])[0], m.logits([*IDS[0], IDS[0, 0]])[-1]
    assert relative(token, whole) < 2e-4  # in its stored dtype, on the VM, which rounds the activations of a few rows
    assert relative(token, whole) < relative(after, before) / 20
    twin = gw.open(made(family).path)
    p = twin.program
    with p.edit("the same values in floats") as e:
        for node in p.select("**", op="linear"):
            source = p.operands(node)[1].node
            w = p.weights.array(p.key(source)).to_numpy("float32")
            q, scales = quantised(w)
            if len(p.consumers(source)) == 1:
                e.set_weight(source, q * np.repeat(scales, GROUP, axis=1)[:, : w.shape[1]])
    if family != "llama-tied":  # there the table itself would change
        assert relative(after, twin.logits(IDS)) < 1e-5
    m.program.undo()
    assert m.program.hash() == bits
    assert np.array_equal(m.logits(IDS), before)


def test_a_part_of_a_model_can_be_quantised_and_saved(tmp_path: Path, made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    m.quantize(where="layers.*.mlp.*")
    kinds = {m.program.path(n) for n in m.program.select("**", op="linear_int8")}
    assert kinds == {f"layers.{i}.mlp.{w}" for i in range(3) for w in ("gate", "up", "down")}
    m.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    assert np.array_equal(again.logits(IDS), m.logits(IDS))
    assert again.generate(IDS[0], 5).ids == m.generate(IDS[0], 5).ids
    assert m.export_plan().level is None
    with pytest.raises(UsageError, match="no linear"):
        m.quantize(where="layers.*.mlp.*")


def test_unsupported_dtypes_and_models_are_refused(made: Callable[[str], Made]) -> None:
    with pytest.raises(UsageError, match="int8"):
        gw.open(made("llama").path).quantize("int3")
    with pytest.raises(UsageError, match="float32"):
        gw.open(made("llama").path, compute="bfloat16").quantize()
    m = gw.open(made("llama").path)
    with m.program.edit("break") as e:
        e.set_weight("layers.0.mlp.up.weight", lambda w: w * np.nan)
    with pytest.raises(UsageError, match="finite"):
        m.quantize()
    assert len(m.program.journal) == 1
