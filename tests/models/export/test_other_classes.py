"""Models of classes without a decoder template leave for transformers, at a level that is proved by running them."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest

import graphwright as gw
from graphwright.models.export.verify import verify
from graphwright.models.generation.recomputed import RecomputedGeneration
from seeds import some

pytest.importorskip("transformers")
from hub_models import MODELS, saved


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A user's cache for all tests, so that each class is captured once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def opened(tmp_path, monkeypatch, cache):
    """A function that opens a small model of a class."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)

    def get(name: str) -> gw.models.Model:
        saved(name, tmp_path / name)
        return gw.open(tmp_path / name, tokenizer=False)

    return get


def prune(m: gw.models.Model, kind: str, part: slice, count: int | None = 1) -> None:
    """Cut these units of the first `count` axes of a kind."""
    axes = [g for g in m.program.axes().values() if kind in g.kinds and not g.frozen and not g.mixed]
    with m.edit(f"fewer {kind}") as e:
        for group in axes[:count]:
            e.cut_units(group.units(range(group.size)[part]))


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param("electra", "heads", marks=pytest.mark.deep), ("resnet", "channels")]
)
def test_removed_units_are_zeros_of_the_same_class(opened, tmp_path, name, kind):
    m = opened(name)
    prune(m, kind, slice(1, 3))
    assert m.export_plan().level == 3
    receipt = m.export(tmp_path / "out", timed=False)
    assert receipt.confirmed
    assert receipt.exact
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / name / "config.json").read_bytes()
    assert receipt.cost["nonzero_parameters"]["after"] < receipt.cost["parameters"]["after"]
    if name == "electra":
        assert verify(tmp_path / "out", tmp_path / name).exit_code == 0
        again = gw.open(tmp_path / "out", tokenizer=False)
        ids = np.array([[5, 6, 7]])
        assert np.allclose(again(input_ids=ids)["logits"], m(input_ids=ids)["logits"], atol=1e-5)


def test_an_unedited_model_keeps_its_bytes(opened, tmp_path):
    m = opened("resnet")  # whose running statistics are buffers
    m.export(tmp_path / "out", check="none", timed=False)
    one, other = (tmp_path / d / "model.safetensors" for d in ("resnet", "out"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.deep
def test_the_field_of_the_config_that_counts_neurons_is_found(opened, tmp_path):
    m = opened("electra")
    prune(m, "neurons", slice(0, None, 4), None)
    receipt = m.export(tmp_path / "out", check="none", timed=False)
    assert receipt.level == 2
    assert json.loads((tmp_path / "out/config.json").read_text())["intermediate_size"] == 48


@pytest.mark.parametrize("name", some(["deit", "electra"], 2))
def test_a_layer_less_is_another_number_of_layers(opened, tmp_path, name):
    m = opened(name)  # the one normalises before a branch, the other after the addition
    m.program.select("**").layers[[0]].prune()
    receipt = m.export(tmp_path / "out", check="none", timed=False)
    assert receipt.level == 2
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_hidden_layers"] == 1


@pytest.mark.deep
def test_a_block_less_of_a_stage(opened, tmp_path, monkeypatch):
    config, made, fields = MODELS["resnet"]
    fields = fields | {"depths": [2, 1, 2], "hidden_sizes": [8, 16, 16]}
    monkeypatch.setitem(MODELS, "resnet", (config, made, fields))
    m = opened("resnet")
    m.program.select("resnet.encoder.stages.2.**").layers[[1]].prune()
    receipt = m.export(tmp_path / "out", timed=False)  # checked: statistics that no node reads leave with their block
    assert receipt.level == 2
    assert json.loads((tmp_path / "out/config.json").read_text())["depths"] == [2, 1, 1]


@pytest.mark.deep
def test_a_narrower_model_with_fewer_heads_of_the_same_width(opened, tmp_path):
    m = opened("deit")
    prune(m, "heads", slice(0, 1), None)
    width = next(g for g in m.program.axes().values() if g.size == 32)
    width.units(range(8)).prune()
    receipt = m.export(tmp_path / "out", check="none", timed=False)
    assert receipt.level == 2
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"]) == (24, 3)  # no shape depends on the heads alone


def test_uneven_neurons_have_no_field(opened):
    m = opened("electra")
    prune(m, "neurons", slice(0, 1), 1)
    plan = m.export_plan()
    assert plan.possible[0] == 3
    assert "no fields of the config" in plan.not_better[1]["reason"]


def test_a_removed_branch_is_a_branch_of_zeros(opened, tmp_path):
    m = opened("electra")
    junction = next(n for n in m.program.nodes() if m.program.is_junction(n))
    branch = m.program.operands(junction)[0]
    with m.edit("without the first attention") as e:
        e.cut(f"{m.program.path(branch)} -> {m.program.path(junction)}")
    receipt = m.export(tmp_path / "out", check="none", timed=False)
    assert receipt.level == 3
    assert (
        not gw.open(tmp_path / "out")
        .program.weights["electra.encoder.layer.0.attention.output.dense.bias"]
        .numpy()
        .any()
    )


def test_zeros_for_other_units_are_refused(opened, monkeypatch):
    from graphwright.models.export import other_classes

    m = opened("deit")
    prune(m, "neurons", slice(0, 8))
    assert m.export_plan().level == 3
    monkeypatch.setattr(other_classes, "lineage", lambda v, axis: np.arange(v.shape[axis]) + (axis == 1))
    reason = m.export_plan().levels[2].reasons[0]
    assert "with zeros for what was removed, the class computes another logits" in str(reason)


@pytest.mark.deep
def test_any_structure_leaves_as_generated_code(opened, tmp_path):
    m = opened("resnet")  # whose running statistics are in the files, not in the code
    prune(m, "channels", slice(0, 1))
    p = m.program
    first = next(n for n in p.nodes() if p.op(n) == "relu")
    with m.edit("another activation") as e:
        e.insert(p.out_edges(first)[0], "tanh")
    assert m.export_plan().level == 5
    receipt = m.export(tmp_path / "out", timed=False)
    assert receipt.confirmed
    assert receipt.check["made_by"] == "AutoModel"


@pytest.mark.parametrize("name", ["bloom", "opt"])  # one counts positions itself, the other is cached
def test_greedy_tokens_are_those_of_transformers(opened, tmp_path, name):
    import torch

    m, ids = opened(name), torch.tensor([[5, 6, 7, 8, 9]])
    module = saved(name, tmp_path / "again")
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = module.generate(ids, **given)
    with pytest.warns(RecomputedGeneration) if name == "bloom" else nullcontext():
        found = m.generate(ids[0].numpy(), 8)
    assert found.ids == wanted[0, 5:].tolist()
