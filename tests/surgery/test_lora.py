"""Low-rank branches: nothing changes at the start, merged is branched, and what was added is gone."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.program import EmptySelection


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_branches_keep_the_function_and_merge_into_the_matrices(dtype: str) -> None:
    model = gw.open(tiny_llama.directory("f32"), dtype=dtype)
    p, ids = model.program, tiny_llama.batch(0, 2)[0]
    before, start, structure = model.logits(ids), p.hash(), p.structure_hash()
    made = sg.lora(p, "layers.*.{attn.q,mlp.down}", 3)
    assert len(made) == 8
    assert {p.spec(path).dtype.name for path in made} == {dtype}
    assert p.is_junction(p.node("layers.0.attn.q.lora.sum"))
    assert "layers.0.mlp.down.lora -> layers.0.out" in [p.path(e) for e in p.in_edges("layers.0.out")]
    assert np.array_equal(model.logits(ids), before)
    rng = np.random.default_rng(0)
    with p.edit("trained") as e:
        for path in made:
            e.set_weight(path, lambda w: w + 0.05 * rng.standard_normal(w.shape))
    branched = model.logits(ids)
    assert np.abs(branched - before).max() > 0.01
    assert sg.merge_lora(p, "layers.1.**") == ["layers.1.attn.q.weight", "layers.1.mlp.down.weight"]
    assert len(sg.merge_lora(p)) == 2
    bound = 1e-6 if dtype == "float32" else 2e-2
    assert np.linalg.norm(model.logits(ids) - branched) <= bound * np.linalg.norm(branched)
    assert p.structure_hash() == structure
    with pytest.raises(EmptySelection):
        sg.merge_lora(p)
    p.undo(4)
    assert p.hash() == start


def test_a_branch_on_the_output_is_merged_and_invalid_calls_are_refused() -> None:
    w = np.random.default_rng(0).standard_normal((3, 4))

    def built() -> gw.Program:
        b = gw.Builder("one")
        b.output(b.linear(b.input("x", ("B", 4), "float64"), b.param("fc.weight", w), name="fc"), "y")
        return b.build()

    p, x = built(), np.ones((2, 4))
    plain = p(x=x)["y"].numpy()
    assert np.abs(plain - x @ w.T).max() <= 1e-12
    sg.lora(p, "fc", 2, seed=5)
    assert np.array_equal(p(x=x)["y"].numpy(), plain)
    with p.edit("trained") as e:
        e.set_weight("fc.lora.outer.weight", np.ones((3, 2)))
    a = p.weights["fc.lora.inner.weight"].data.to_numpy()
    branched = x @ w.T + x @ a.T @ np.ones((2, 3))
    assert np.abs(p(x=x)["y"].numpy() - branched).max() <= 1e-12
    with pytest.raises(EmptySelection):
        sg.densify(p)
    sg.merge_lora(p)
    assert np.abs(p(x=x)["y"].numpy() - branched).max() <= 1e-12
    assert p.path(p.output("y")) == "fc"
    q = built()
    sg.lora(q, "fc", 2, seed=6)
    assert not np.array_equal(q.weights["fc.lora.inner.weight"].data.to_numpy(), a)
    with pytest.raises(ValueError, match="rank"):
        sg.lora(q, "fc", 0)
    with pytest.raises(ValueError, match="one linear map"):
        sg.lora(gw.open("bundled").program, "lm_head", 2)
