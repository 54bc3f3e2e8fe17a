"""What differs between two model directories is what the journal says was edited."""

from __future__ import annotations

import checkpoints
import numpy as np
from edits import edge

import graphwright as gw
from graphwright.cli.export import folded
from graphwright.models.open import compare_models


def test_a_model_and_itself_are_identical(made):
    found = compare_models(made("llama").path, made("llama").path)
    assert found.identical
    assert found.to_json()["program"]["identical"]


def test_the_difference_matches_the_journal(made):
    path = made("llama").path
    m = gw.open(path)
    p = m.program
    with p.edit("three edits") as e:
        e.cut(edge(p, "layers.1.mlp.down", "layers.1.out"))
        e.connect("layers.0.out", "layers.2.mid")
        e.set_weight("model.norm.weight", lambda w: w * 3)
    made_edits = [r["edit"] for r in p.journal[-1].edits]
    assert made_edits == ["RemoveEdge", "AddEdge", "SetWeight"]
    found = compare_models(path, m).program
    assert found.edges_removed == ("layers.1.mlp.down.0 -> layers.1.out.*",)
    assert found.edges_added == ("layers.0.out.0 -> layers.2.mid.*",)
    assert [w.key for w in found.weights] == ["model.norm.weight"]
    assert (found.added, found.removed, found.missing, found.extra) == ((), (), (), ())


def test_weight_differences_of_an_export_match_numpy(made, tmp_path):
    path = made("llama").path
    m = gw.open(path)
    key = "model.layers.0.mlp.up_proj.weight"
    with m.program.edit("noise") as e:
        e.set_weight(key, lambda w: w + np.random.default_rng(0).normal(0, 0.1, w.shape))
    m.export(tmp_path / "out", check="none", timed=False, prompts=[[1, 2]])
    found = compare_models(path, tmp_path / "out")
    a, b = (x.program.weights.array(key).to_numpy().astype(np.float64).ravel() for x in (gw.open(path), m))
    (w,) = found.program.weights
    assert w.max_abs is not None
    assert w.relative is not None
    assert w.cosine is not None
    np.testing.assert_allclose(w.max_abs, np.abs(a - b).max())
    np.testing.assert_allclose(w.relative, np.linalg.norm(a - b) / np.linalg.norm(a))
    np.testing.assert_allclose(w.cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert found.config == {}


def test_resized_weights_are_listed_by_axis(made, tmp_path):
    m = gw.open(made("llama").path)
    m.select("layers.1.mlp").neurons[:6].prune()
    m.select("layers.*.attn").kv_groups[0].prune()
    m.save(tmp_path / "saved")
    found = compare_models(made("llama").path, tmp_path / "saved").program
    heads = {f"layers.{i}.attn.heads": (6, 3) for i in range(3)}
    assert found.resized == {**heads, "layers.1.mlp.neurons": (76, 70)}
    assert "~ axis layers.1.mlp.neurons: 76 -> 70" in str(found)


def test_ten_largest_differences_are_printed_and_all_returned(made):
    m = gw.open(made("llama").path)
    keys = sorted(m.program.weights)[:14]
    with m.program.edit("all") as e:
        for k, key in enumerate(k for k in keys if k.endswith("weight")):
            e.set_weight(key, lambda w, k=k: w * (1.5 + k))
    found = compare_models(made("llama").path, m).program
    lines = [line for line in str(found).splitlines() if line.startswith("~ weight")]
    assert len(lines) == 10 < len(found.weights) == len(found.to_json()["weights"])
    worst = max(found.weights, key=lambda w: w.relative or 0)
    assert lines[0].startswith(f"~ weight {worst.key}")


def test_differing_config_fields_are_listed_except_bookkeeping(copy, made):
    other = copy("llama")
    checkpoints.edit_config(other, remove=("use_cache",), rms_norm_eps=0.1, transformers_version="0", new=None)
    found = compare_models(made("llama").path, other)
    assert found.config == {"rms_norm_eps": [1e-06, 0.1], "use_cache": [True, None]}
    assert not found.identical


def test_models_without_a_common_tensor_are_different(made):
    found = compare_models(made("llama").path, "bundled")
    assert not found.identical
    assert not any(w.max_abs == 0 for w in found.program.weights)
    other = compare_models(made("llama").path, gw.open(made("qwen3").path))
    assert "layers.0.attn.q_norm" in other.program.added


def test_logits_on_a_text_are_compared():
    m = gw.open("bundled")
    same = compare_models("bundled", m, text="The value")
    assert same.logits == {"max_abs_dlogits": 0.0, "mean_kl_nats": 0.0, "top1_agreement": 1.0}
    with m.program.edit("cut") as e:
        e.cut(edge(m.program, "layers.1.mlp.down", "layers.1.out"))
    found = compare_models("bundled", m, text="The value")
    assert found.logits["max_abs_dlogits"] > 0.1
    assert found.to_json()["logits"] == found.logits


def test_equal_changes_of_several_layers_share_a_line(made):
    p = gw.open(made("llama").path).program
    q = p.fork()
    with q.edit("tanh") as e:
        for i in (0, 1, 2):
            e.insert(f"layers.{i}.mlp.down -> layers.{i}.out", "tanh", name=f"layers.{i}.bent")
        e.set_attr("layers.1.attn.sdpa", window=4)
    mid, out = "layers.{0-2}.mid", "layers.{0-2}.out"
    lines = folded(str(q.diff(p)).splitlines())
    assert lines == [
        "+ layers.{0-2}.bent",
        f"~ {out}: operands ['{mid}', 'layers.{{0-2}}.mlp.down'] -> ['{mid}', 'layers.{{0-2}}.bent']",
        "~ layers.1.attn.sdpa: attrs.window None -> 4",
        "+ edge layers.{0-2}.mlp.down.0 -> layers.{0-2}.bent.0",
        "+ edge layers.{0-2}.bent.0 -> layers.{0-2}.out.*",
        "- edge layers.{0-2}.mlp.down.0 -> layers.{0-2}.out.*",
    ]
    assert folded(["a layers.0.x", "layers.0.x layers.1.y", "a layers.2.x"]) == [
        "a layers.{0 2}.x",
        "layers.0.x layers.1.y",
    ]
