"""Units of opened models: masked equals cut, in four families; generation runs on with heads in unequal number."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from axis_samples import agree, run
from graphwright.program import EmptyAxis, EmptySelection, FrozenAxis, RaggedUnit

FAMILIES = ["llama", "mistral-window", "qwen2", "qwen3", "llama-attention-bias", "llama-tied", "llama-one-group"]
IDS = np.random.default_rng(0).integers(0, 97, (2, 7))
FEEDS = {"ids": IDS, "positions": np.broadcast_to(np.arange(7), IDS.shape).copy()}


def opened(made, name: str, compute: str) -> gw.Program:
    return gw.open(made(name).path, dtype=compute, compute=compute).program


@pytest.mark.parametrize("name", FAMILIES)
def test_masked_and_cut_units_of_every_kind_are_equal_in_float64(made, name):
    p = opened(made, name, "float64")
    rng = np.random.default_rng(1)
    for group in list(p.axes().values()):
        if group.frozen or group.mixed or group.atoms == () or not group.name.startswith(("layers.1", "layers.head")):
            continue
        if len(group.atoms) > 1:  # all the heads of one key head
            units = group.units(range(int(group.atoms[1].size)))
        else:
            units = group.units(sorted(rng.choice(group.size, max(1, group.size // 3), replace=False).tolist()))
        agree(p, units, FEEDS, 1e-10)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_masked_and_cut_heads_and_neurons_are_equal_in_float32(made, name):
    p = opened(made, name, "float32")
    units = p.select("layers.1.attn").kv_groups[0] | p.select("layers.{0,2}.mlp").neurons[::3]
    agree(p, units, FEEDS, 1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-tied", "llama-eps"])
def test_residual_width_is_exact_for_zeroed_channels_with_the_norms_corrected(made, name):
    p = opened(made, name, "float64")
    gone = [0, 5, 17, 40]
    (axis,) = p.select("embed").channels.chosen
    writers = [f"layers.{i}.{part}.weight" for i in range(3) for part in ("attn.o", "mlp.down")]
    stays = ~np.isin(np.arange(48), gone)
    with p.edit("zero the channels where they are written") as e:
        e.set_weight("embed.weight", lambda w: w * stays)
        for path in writers:
            e.set_weight(path, lambda w: w * stays[:, None])
    expected = run(p, FEEDS)["logits"]
    with p.edit("cut them") as e:
        e.cut_units(p.axes()[axis].units(gone))
    assert p.spec("layers.1.out").shape[-1] == 44
    np.testing.assert_allclose(run(p, FEEDS)["logits"], expected, rtol=0, atol=1e-10)
    p.undo()
    with p.edit("cut them without the correction") as e:
        e.cut_units(p.axes()[axis].units(gone), correct=False)
    assert np.abs(run(p, FEEDS)["logits"] - expected).max() > 1e-4


def test_cutting_a_head_slices_q_k_v_and_o(made):
    """Six heads of 10 on two key heads: head 5 is rows 50..59 of q, columns 50..59 of o, and reads key head 1."""
    p = gw.open(made("llama").path).program
    found = p.axes()["layers.1.attn.heads"].slices(5)
    stem = "model.layers.1.self_attn."
    assert {k.removeprefix(stem): {d: i.tolist() for d, i in v.items()} for k, v in found.items()} == {
        "q_proj.weight": {0: list(range(50, 60))},
        "k_proj.weight": {0: list(range(10, 20))},
        "v_proj.weight": {0: list(range(10, 20))},
        "o_proj.weight": {1: list(range(50, 60))},
    }


def test_axis_groups_of_a_llama_match_a_manual_list(made):
    p = gw.open(made("llama").path).program
    found = p.axes()
    layer = [".attn.heads", ".attn.kv_groups", ".attn.queries", ".attn.head_dim", ".mlp.neurons"]
    assert set(found) == {
        "embed.vocabulary", "lm_head.units", "embed.channels", "layers.head_dim",
        *(f"layers.{i}{part}" for i in range(3) for part in layer),
    }  # fmt: skip
    weights = {g: sorted(str(m) for m in found[g].members if m.key) for g in found}
    assert weights["layers.2.mlp.neurons"] == [
        "layers.2.mlp.down.weight[1]", "layers.2.mlp.gate.weight[0]", "layers.2.mlp.up.weight[0]",
    ]  # fmt: skip
    assert weights["layers.0.attn.kv_groups"] == [
        "layers.0.attn.k.weight[0]", "layers.0.attn.o.weight[1]",
        "layers.0.attn.q.weight[0]", "layers.0.attn.v.weight[0]",
    ]  # fmt: skip
    assert len(weights["embed.channels"]) == 2 + 1 + 3 * 9  # embedding and head, last norm, 7 matrices and 2 norms each
    assert found["embed.vocabulary"].frozen == ("embed (embedding) reads it by index",)
    assert "output 'logits'" in found["lm_head.units"].frozen[0]
    assert found["embed.channels"].corrected
    assert not found["embed.channels"].exact


def test_a_single_query_head_is_ragged(made):
    p = opened(made, "llama", "float64")
    heads = p.select("layers.1.attn").heads
    with pytest.raises(RaggedUnit) as caught, p.edit("head 5") as e:
        e.cut_units(heads[5])
    assert "unit 1 of layers.1.attn.kv_groups" in str(caught.value)
    assert "ragged=True" in str(caught.value)
    agree(p, heads[5], FEEDS, 1e-10, ragged=True)
    with p.edit("the same one of each group") as e:
        e.cut_units(heads[[2, 5]])
    assert p.weights["model.layers.1.self_attn.q_proj.weight"].shape[0] == 40


def test_cutting_a_key_head_removes_the_ragged_heads_that_read_it(made):
    """Heads 0 and 4 of six are gone; then key head 0 goes, and heads 1 and 2 with it; undone, bit for bit."""
    p = opened(made, "llama", "float64")
    p.select("layers.1.attn").heads[[0, 4]].prune(ragged=True)
    (group,) = {g.name: g for g in p.axes().of("layers.1.attn.k.weight", 0) if g.size == 2}.values()
    assert {m.path for m in group.members if m.key} == {"layers.1.attn.k.weight", "layers.1.attn.v.weight"}
    before, table = p.hash(), "layers.1.attn.sdpa.key_head"
    assert p.weights[table].numpy().tolist() == [0, 0, 1, 1]
    masked = p.fork()
    masked.select("layers.1.attn").heads[[0, 1]].prune()  # those that read key head 0
    expected = run(masked, FEEDS)["logits"]
    group.units([0]).prune()
    assert p.weights[table].numpy().tolist() == [0, 0]
    assert p.weights["model.layers.1.self_attn.k_proj.weight"].shape[0] == 10
    np.testing.assert_allclose(run(p, FEEDS)["logits"], expected, rtol=0, atol=1e-12)
    p.undo()
    assert p.hash() == before
    with p.edit("key heads in another order") as e:
        e.permute(group.name, [1, 0])
    assert p.weights[table].numpy().tolist() == [1, 1, 0, 0]
    twin = opened(made, "llama", "float64")
    gw.replay(p, twin)
    assert twin.hash() == p.hash()


@pytest.mark.parametrize("ragged", [False, True])
def test_generation_works_with_unequal_numbers_of_heads(byte_path, ragged):
    m = gw.open(byte_path)
    units = m.select("layers.1.attn").heads[[0, 4]] if ragged else m.select("layers.1.attn").kv_groups[1]
    prompt = np.array([[65, 66, 67, 68]])
    with m.program.edit("cut") as e:
        e.cut_units(m.select("layers.0.mlp").neurons[:9] | units, ragged=ragged)
    made = m.generate(prompt, max_new_tokens=12, temperature=0.0)
    rows = np.asarray(made.ids if hasattr(made, "ids") else made)
    ids = prompt
    for _ in range(12):
        ids = np.concatenate([ids, m.logits(ids)[:, -1:].argmax(-1)], axis=1)
    assert rows.reshape(-1)[-12:].tolist() == ids[0, 4:].tolist()


def test_prune_equals_a_manual_edit(made):
    one, two = (opened(made, "llama", "float32") for _ in range(2))
    gone = one.select("layers.*.mlp").neurons.prune(keep=range(0, 76, 2))
    assert gone.count == 3 * 38
    with two.edit("manual") as e:
        for i in range(3):
            e.cut_units(two.axes()[f"layers.{i}.mlp.neurons"].units(range(1, 76, 2)))
    assert one.hash() == two.hash()
    with pytest.raises(EmptySelection):
        one.select("layers.*.mlp").experts.prune()


def test_growing_keeps_the_function(made):
    p = opened(made, "llama", "float64")
    expected = run(p, FEEDS)["logits"]
    for axis, init in [("layers.0.mlp.neurons", "zero_out"), ("layers.1.mlp.neurons", "duplicate"),
                       ("layers.1.attn.kv_groups", "zero_out"), ("layers.2.attn.kv_groups", "duplicate"),
                       ("embed.channels", "zero_out")]:  # fmt: skip
        before = p.axes()[axis].size
        with p.edit(f"grow {axis}") as e:
            e.grow(axis, 3, init)
        assert p.axes()[axis].size == before + 3
        np.testing.assert_allclose(run(p, FEEDS)["logits"], expected, rtol=0, atol=1e-10, err_msg=axis)
    p(**FEEDS)["logits"].sum().backward()
    grad = p.weights["model.layers.0.mlp.down_proj.weight"].grad
    assert grad is not None
    assert np.abs(grad.numpy()[:, -3:]).min() > 0


def test_removing_a_layer_keeps_the_residual_path(made):
    p = opened(made, "llama", "float64")
    before = p.hash()
    masked = p.fork()
    with masked.edit("mask") as e:
        for branch in ("layers.1.attn.o -> layers.1.mid", "layers.1.mlp.down -> layers.1.out"):
            e.cut(branch)
    expected = run(masked, FEEDS)["logits"]
    assert p.select("layers").layers.count == 3
    assert p.select("layers.{1,2}.attn.q").layers.names() == ["layers[1]", "layers[2]"]
    assert p.select("layers").layers[1].prune().names() == ["layers[1]"]
    np.testing.assert_allclose(run(p, FEEDS)["logits"], expected, rtol=0, atol=1e-12)
    assert not [k for k in p.weights if ".1." in k]
    assert p.select("layers.2.attn").layers.names() == ["layers[1]"]  # the second of the two that are left
    p.undo()
    assert p.hash() == before
    with pytest.raises(EmptyAxis):
        p.select("layers").layers.prune()
    with p.edit("no way around") as e:
        e.cut("layers.0.out -> layers.1.mid")
    with pytest.raises(FrozenAxis, match="residual"):
        p.select("layers.1").layers.prune()


def test_blame_finds_a_cut_by_key_and_by_path(made):
    p = opened(made, "llama", "float32")
    p.select("layers.1.mlp").neurons[3].prune(why="a neuron")
    for ref in ("model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up.weight"):
        assert [entry.why for entry in p.blame(ref)] == ["a neuron"]
    assert p.blame("model.layers.0.mlp.up_proj.weight") == p.blame("layers.1.mlp.up") == []
