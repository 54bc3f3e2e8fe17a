"""Units that add nothing are found by the positions of zeros, and only those; the function stays."""

from __future__ import annotations

import numpy as np
import pytest
from prune_models import convolutional, gpt2_like, images, outputs

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg

IDS = tiny_llama.batch(3, 4)[0]
FEEDS = {"ids": IDS, "positions": np.broadcast_to(np.arange(64), IDS.shape).copy()}


def zeroed(w: np.ndarray, units, axis: int) -> np.ndarray:
    w = w.copy()
    w[(slice(None),) * axis + (list(units),)] = 0
    return w


@pytest.mark.parametrize("where", ["gate", "up", "down"])
def test_neurons_with_zero_weights_before_or_after_are_removed(where):
    p = gw.open(tiny_llama.directory("f32"), dtype="float64", compute="float64").program
    units = [0, 3, 4, 77, 127]
    with p.edit("zero") as e:
        e.set_weight(f"layers.0.mlp.{where}.weight", lambda w: zeroed(w, units, int(where == "down")))
    before = outputs(p, FEEDS)
    assert sg.remove_zeros(p) == {"layers.0.mlp.neurons": 5}
    assert p.weights["model.layers.0.mlp.up_proj.weight"].shape == (123, 64)
    np.testing.assert_allclose(outputs(p, FEEDS), before, rtol=0, atol=1e-12)
    p.undo()
    assert p.weights["model.layers.0.mlp.up_proj.weight"].shape == (128, 64)


def test_zero_padding_of_a_pruned_model_is_removed():
    p = gw.open(tiny_llama.directory("f32")).program
    cut = p.fork()
    cut.select("layers.1.mlp").neurons[::3].prune()
    cut.select("layers.0.attn").kv_groups[1].prune()
    with p.edit("as zeros") as e:
        for name in ("gate", "up"):
            e.set_weight(f"layers.1.mlp.{name}.weight", lambda w: zeroed(w, range(0, 128, 3), 0))
        e.set_weight("layers.1.mlp.down.weight", lambda w: zeroed(w, range(0, 128, 3), 1))
        e.set_weight("layers.0.attn.o.weight", lambda w: zeroed(w, range(32, 64), 1))
    before = outputs(p, FEEDS)
    sg.remove_zeros(p)
    assert {k: v.shape for k, v in p.weights.items()} == {k: v.shape for k, v in cut.weights.items()}
    np.testing.assert_allclose(outputs(p, FEEDS), before, rtol=0, atol=2e-5)


def test_units_with_a_bias_are_not_removed():
    """GELU of a bias is something: rows of zeros alone do not make an idle unit; with the bias zero they do."""
    p = gpt2_like()
    with p.edit("rows") as e:
        e.set_weight("h.0.mlp.fc.weight", lambda w: zeroed(w, [2, 9], 0))
        e.set_weight("h.0.mlp.fc.bias", lambda w: zeroed(w, [9], 0))
    assert sg.remove_zeros(p) == {"h.0.mlp.neurons": 1}
    assert p.weights["h.0.mlp.fc.bias"].shape == (63,)


def test_zero_channels_and_values_are_removed():
    p = convolutional()
    with p.edit("zero") as e:
        e.set_weight("second.weight", lambda w: zeroed(w, [1, 5], 1))
        e.set_weight("first.weight", lambda w: zeroed(w, [3], 0))
        e.set_weight("first.bias", lambda w: zeroed(w, [3], 0))
    before = outputs(p, images(5))
    assert sg.remove_zeros(p) == {"first.channels": 3}
    np.testing.assert_allclose(outputs(p, images(5)), before, rtol=0, atol=1e-6)


def test_unneeded_nodes_are_removed_and_an_empty_removal_makes_no_edit():
    p = gpt2_like()
    with p.edit("cut a branch") as e:
        e.cut("h.0.attn.o -> h.0.mid")
    before, edits = outputs(p, {"ids": IDS % 29}), len(p.journal)
    assert sg.remove_zeros(p)["nodes"] > 5
    assert "h.0.attn.o.weight" not in p.weights
    np.testing.assert_array_equal(outputs(p, {"ids": IDS % 29}), before)
    assert sg.remove_zeros(p) == {}
    assert len(p.journal) == edits + 1


def test_one_unit_of_a_zero_axis_stays():
    p = gpt2_like()
    with p.edit("nothing") as e:
        e.set_weight("h.1.mlp.proj.weight", lambda w: 0 * w)
    assert sg.remove_zeros(p, "h.1") == {"h.1.mlp.neurons": 63}
    assert p.spec("h.1.mlp.fc").shape[-1] == 1
