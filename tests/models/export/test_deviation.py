"""The template of a family against the program: what deviates, where, and that renaming does not."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import FEATURES
from edits import EDITS, cut_attention, edge, insert, narrow, remove_layer, scale_weight, skip

import graphwright as gw
from graphwright.models.export.ladder import Ladder
from graphwright.models.export.template_match import Deviation


def deviations(model: gw.Model) -> list[Deviation]:
    return list(Ladder(model).deviations)


@pytest.mark.parametrize("feature", FEATURES)
def test_an_unedited_model_has_no_deviations(made, feature):
    path = made(feature).path
    for model in (gw.open(path), gw.open(path, compute="bfloat16"), gw.open(path, dtype="bfloat16")):
        assert deviations(model) == []


def test_changed_weights_are_no_deviation(made):
    m = gw.open(made("llama").path)
    scale_weight(m, "model.norm.weight")
    assert deviations(m) == []


@pytest.mark.parametrize("pattern", ["**", "layers.1.*", "layers.*.mlp.*", "layers.2.out"])
def test_renaming_is_no_deviation(made, pattern):
    m = gw.open(made("qwen3-bias").path)
    p = m.program
    with p.edit("rename") as e:
        for i, node in enumerate(p.select(pattern).nodes):
            if p.op(node) != "input":
                e.rename(node, f"renamed.{i}")
    assert deviations(m) == []


def test_renaming_does_not_hide_other_deviations(made):
    m = gw.open(made("llama").path)
    p = m.program
    cut_attention(m, 1)
    with p.edit("rename") as e:
        e.rename("layers.1.mlp.act", "a.new.name")
    assert [(d.path, d.kind) for d in deviations(m)] == [("layers.1.mid", "rewired")]


@pytest.mark.parametrize("name", EDITS)
def test_every_structural_edit_deviates_where_it_was_made(made, name):
    m = gw.open(made("llama").path)
    layer = 0 if name in ("skip", "link") else 1
    EDITS[name](m, layer)
    found = deviations(m)
    assert found
    cuts = {"cut_attention": {3, 5}, "cut_mlp": {3, 5}, "narrow": {3, 5}, "remove_layer": {2, 3, 5}}
    assert set.intersection(*(set(d.levels) for d in found)) == cuts.get(name, {5})
    module = "layers.2" if layer == 0 else "layers.1"
    assert any(d.path.startswith(module) for d in found), found
    m.program.undo()
    assert deviations(m) == []


def test_deviations_have_their_kinds(made):
    m = gw.open(made("llama").path)
    p = m.program
    insert(m, 0)
    narrow(m, 1)
    skip(m, 0)
    with p.edit("attrs and op") as e:
        e.set_attr("layers.2.attn.sdpa", scale=0.5)
        e.rewire(edge(p, "layers.2.mlp.gate", "layers.2.mlp.act"), "layers.2.mlp.up")
        e.set_weight("rope.frequencies", lambda f: f * 2)
    kinds = {(d.path, d.kind) for d in deviations(m)}
    assert kinds == {
        ("layers.0.out", "rewired"),
        ("layers.0.out.tanh", "added"),
        ("layers.1.mlp.gate.weight", "size"),
        ("layers.1.mlp.up.weight", "size"),
        ("layers.1.mlp.down.weight", "size"),
        ("layers.2.out", "rewired"),
        ("layers.2.attn.sdpa", "attrs"),
        ("layers.2.mlp.act", "rewired"),
        ("rope.frequencies", "attrs"),
    }
    details = {d.path: d.detail for d in deviations(m)}
    assert details["layers.2.attn.sdpa"].startswith("scale 0.5 instead of 0.316")
    narrowed = "f32[69, 48] instead of f32[76, 48] (neurons, intermediate_size)"
    assert details["layers.1.mlp.gate.weight"] == narrowed


def test_a_removed_layer_lists_removed_and_rewired_nodes(made):
    m = gw.open(made("llama").path)
    remove_layer(m, 1)
    found = deviations(m)
    assert all(d.path.startswith("layers.1.") for d in found if d.kind == "removed")
    assert {d.path for d in found if d.kind == "rewired"} == {"layers.2.attn.norm", "layers.2.mid"}


def test_a_new_output_is_a_deviation(made):
    m = gw.open(made("llama").path)
    p = m.program
    with p.edit("softcap") as e:
        e.set_outputs(logits=e.add("tanh", "lm_head", name="capped"))
    assert [(d.path, d.kind) for d in deviations(m)] == [("capped", "added"), ("outputs", "rewired")]


def test_unread_nodes_are_no_deviation(made):
    m = gw.open(made("llama").path)
    with m.program.edit("without readers") as e:
        e.add("tanh", e.param("spare", np.ones(3, np.float32)), name="dead")
    assert {d.path for d in deviations(m)} <= {"spare"}


@pytest.mark.parametrize("ports", [(1,), (2,), (1, 2)])
def test_permuted_key_heads_are_not_reported_as_a_head_table(made, ports):
    m = gw.open(made("llama").path)
    p = m.program
    (attention, *_) = (n for n in p.order() if p.op(n) == "sdpa")
    with p.edit("reverse the key heads") as e:
        table = e.const("reversed", np.arange(p.spec(p.operands(attention)[1]).shape[1])[::-1].copy())
        for port in ports:
            old = p.in_edges(attention)[port]
            e.rewire(old, e.add("index", p.edge_value(old), table, name=f"reversed.{port}", axis=1))
    assert m.export_plan().level == 5
