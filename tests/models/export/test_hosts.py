"""Rung 4: a class with sizes per layer is used only if all its shapes are those of the program."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from edits import cut_mlp
from safetensors.torch import load_file

import graphwright as gw
from graphwright.models import ExportLevelImpossible
from graphwright.models.export import hosts
from graphwright.models.export.hosts import Host, add_host


class Config:
    """What a host's config class is told."""

    def __init__(self, **fields):
        self.fields = fields


class Uneven(torch.nn.Module):
    """A llama whose MLPs are as wide as a list says; it must never hold memory."""

    def __init__(self, config):
        super().__init__()
        f = config.fields
        hidden, heads, kv, dim = f["hidden_size"], f["heads"], f["kv_heads"], f["head_dim"]
        shapes = {"norm": (hidden,), "lm_head": (f["vocab_size"], hidden), "embed": (f["vocab_size"], hidden)}
        for i, mlp in enumerate(f["mlp_widths"]):
            shapes |= {f"layers.{i}.attn.{n}": s for n, s in {
                "norm": (hidden,), "q": (heads * dim, hidden), "k": (kv * dim, hidden),
                "v": (kv * dim, hidden), "o": (hidden, heads * dim)}.items()}  # fmt: skip
            shapes |= {
                f"layers.{i}.mlp.{n}": s
                for n, s in {
                    "norm": (hidden,),
                    "gate": (mlp, hidden),
                    "up": (mlp, hidden),
                    "down": (hidden, mlp),
                }.items()
            }
        for path, shape in shapes.items():
            weight = torch.empty(shape)
            assert weight.is_meta
            self.register_parameter(path.replace(".", "_"), torch.nn.Parameter(weight))


def fields(config, layers):
    names = {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"], "head_dim": config["head_dim"]}
    first = layers[0]
    return {**names, "heads": first["heads"], "kv_heads": first["kv_heads"], "mlp_widths": [n["mlp"] for n in layers]}


@pytest.fixture
def host(monkeypatch):
    module = types.ModuleType("a_host_of_the_test")
    module.Config, module.Uneven = Config, Uneven  # pyright: ignore[reportAttributeAccessIssue]  # a module made here
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hosts, "HOSTS", [])

    def enter(config=fields, versions=("5.0", None)):
        classes = ("a_host_of_the_test:Config", "a_host_of_the_test:Uneven")
        key = lambda path: path.removesuffix(".weight").replace(".", "_")  # noqa: E731  # as it is named above
        return add_host(Host("llama", classes, versions, config, key))

    return enter


def uneven(made):
    m = gw.open(made("llama").path)
    for i, n in enumerate((4, 30, 11)):
        m.select(f"layers.{i}.mlp").neurons[:n].prune()
    return m


def test_the_table_is_empty_and_says_how_far_was_looked(made):
    assert hosts.HOSTS == []
    (reason,) = uneven(made).export_plan().rungs[3].reasons
    assert "no class with sizes per layer for llama" in reason["reason"]
    assert hosts.LAST_LOOKED_AT in reason["reason"]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_classes_of_transformers_refuse_sizes_per_layer(family):
    """The day one does not, it belongs into the table."""
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, per_layer_config={0: {"intermediate_size": 4}})
    with pytest.raises(RuntimeError, match="intermediate_size"), torch.device("meta"):
        getattr(transformers, f"{family}ForCausalLM")(config)


def test_a_host_whose_shapes_fit_is_used_where_size_counts(made, tmp_path, host):
    host()
    m = uneven(made)
    assert (m.export_plan().rung, m.export_plan(prefer="size").rung) == (3, 4)
    receipt = m.export(tmp_path / "out", prefer="size", check="none", prompts=[[1, 2]])
    assert receipt.rung == 4
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["mlp_widths"] == [72, 46, 65]
    assert config["architectures"] == ["Uneven"]
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert len(tensors) == 3 + 3 * 9
    up = m.program.weights["model.layers.1.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(tensors["layers_1_mlp_up"].numpy(), up)


def test_a_host_of_other_shapes_is_refused_with_the_list(made, tmp_path, host):
    host(config=lambda config, layers: {**fields(config, layers), "mlp_widths": [72, 46, 64]})
    m = uneven(made)
    row = m.export_plan().rungs[3]
    assert not row.possible
    assert [r["path"] for r in row.reasons] == [f"layers_2_mlp_{n}" for n in ("gate", "up", "down")]
    assert "[64, 48] instead of [65, 48]" in row.reasons[0]["reason"]
    with pytest.raises(ExportLevelImpossible):
        m.export(tmp_path / "out", rung=4, check="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("versions", [("99.0", None), ("4.0", "5.0")])
def test_a_host_of_another_version_is_not_built(made, host, versions):
    host(versions=versions)
    (reason,) = uneven(made).export_plan().rungs[3].reasons
    assert "is for transformers" in reason["reason"]


def test_a_host_has_no_place_for_a_branch_that_is_gone(made, host):
    host()
    m = uneven(made)
    cut_mlp(m, 1)
    assert 4 not in m.export_plan().possible
