"""Depth up-scaling: duplicated blocks export as the original class with more layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import UNUSUAL, Made, some_ids
from transformers import AutoModelForCausalLM

import graphwright as gw
from graphwright.safetensors import Checkpoint

pytestmark = pytest.mark.usefixtures("warm")  # how a clean process starts is tested in test_verify.py
LAYERS = 5
IDS = some_ids((2, 23), seed=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], Made]:
    """Family -> a checkpoint of five layers."""
    found: dict[str, Made] = {}

    def get(family: str) -> Made:
        if family not in found:
            path = tmp_path_factory.mktemp(family)
            found[family] = checkpoints.make(path, family, num_hidden_layers=LAYERS, **UNUSUAL[family])
        return found[family]

    return get


def deeper(reference: Any, order: list[int]) -> np.ndarray:
    """Logits of transformers' model with its layers in this order, repeated ones as deep copies."""
    model: Any = copy.deepcopy(reference)
    layers = [copy.deepcopy(model.model.layers[i]) for i in order]
    for at, layer in enumerate(layers):
        layer.self_attn.layer_idx = at
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = len(order)
    types = getattr(model.config, "layer_types", None)
    if types is not None:
        model.config.layer_types = [types[i] for i in order]
    with torch.no_grad():
        return model(torch.tensor(IDS), use_cache=False).logits.numpy()


def reloaded(path: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.numpy()


QUICK = ("llama",)


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.deep) for f in UNUSUAL])
def test_repeated_blocks_export_as_the_class_with_more_layers(
    family: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    m = gw.open(made(family).path)
    before = m.program.hash()
    with m.program.edit("deeper") as e:
        e.duplicate("layers.1")
        e.duplicate("layers.2")  # the copy
        e.duplicate("layers.5")
    order = [0, 1, 1, 1, 2, 3, 3, 4]
    wanted = deeper(made(family).model, order)
    assert np.allclose(m.logits(IDS), wanted, atol=2e-4)
    receipt = m.export(tmp_path / "out", check="required", timed=False)
    assert (receipt.level, receipt.exact, receipt.confirmed) == (2, True, True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 8
    if family == "qwen2":
        assert config["layer_types"] == [*["full_attention"] * 5, *["sliding_attention"] * 3]
    assert np.allclose(reloaded(tmp_path / "out"), wanted, atol=2e-4)
    again = gw.open(tmp_path / "out")
    assert (again.dims.layers, np.array_equal(again.logits(IDS), m.logits(IDS))) == (8, True)
    source, out = Checkpoint(made(family).path), Checkpoint(tmp_path / "out")
    for new, old in enumerate(order):  # unchanged blocks keep their bytes
        key = "model.layers.{}.mlp.up_proj.weight"
        assert bytes(out.bytes(key.format(new))) == bytes(source.bytes(key.format(old)))
    m.save(tmp_path / "saved")
    saved = gw.open(tmp_path / "saved")
    assert saved.export_plan().level == 2
    assert np.array_equal(saved.logits(IDS), m.logits(IDS))
    for each in (m, saved):
        each.program.undo()
        assert each.program.hash() == before
        assert each.export_plan().level in (1, None)


def test_blocks_can_be_repeated_and_removed(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("qwen2").path)
    m.select("layers").layers[[0, 4]].prune()
    with m.program.edit("deeper") as e:
        e.duplicate("layers.3")  # takes the free number
        e.duplicate("layers.1")
    m.select("layers.*.mlp").neurons[:12].prune()
    plan = m.export_plan()
    assert plan.level == 2
    assert plan.levels[2].possible is False
    m.export(tmp_path / "out", check="required", timed=False)
    assert np.allclose(reloaded(tmp_path / "out"), m.logits(IDS), atol=2e-4)


def test_the_plan_names_the_added_layers_and_only_levels_2_and_5_carry_them(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    with m.program.edit("deeper") as e:
        e.duplicate("layers.0")
    plan = m.export_plan()
    assert [(d.path, d.kind, d.field, d.levels) for d in plan.deviations] == [
        (path, "added", "num_hidden_layers", (2, 5)) for path in ("layers.5.mid", "layers.5.out")
    ]
    assert plan.possible == (2, 5)
    assert "the class has 5 layers" in str(plan.levels[2].reasons[0])
    with m.program.edit("a width of one layer") as e:
        e.cut_units(m.program.axes()["layers.2.mlp.neurons"].units([0, 1]))
    assert m.export_plan().level == 5


def test_widths_by_layer_follow_in_generated_code(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("llama").path)
    m.select("layers.1.mlp").neurons[:6].prune()
    with m.program.edit("deeper") as e:
        e.duplicate("layers.1")
    receipt = m.export(tmp_path / "out", check="required", timed=False)
    assert receipt.level == 5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["intermediate_size"] == [76, 70, 70, 76, 76, 76]
    assert config["num_hidden_layers"] == 6


def test_windows_of_single_layers_are_layer_types(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("qwen2").path)
    with m.program.edit("one more window") as e:
        e.set_attr("layers.1.attn.sdpa", window=6)
    plan = m.export_plan()
    assert (plan.level, plan.levels[2].possible) == (2, False)
    m.export(tmp_path / "out", check="required", timed=False)
    types = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert [t.partition("_")[0] for t in types] == ["full", "sliding", "full", "sliding", "sliding"]
    assert np.allclose(reloaded(tmp_path / "out"), m.logits(IDS), atol=2e-4)
    with m.program.edit("another size") as e:
        e.set_attr("layers.1.attn.sdpa", window=7)
    plan = m.export_plan()
    assert plan.level == 5
    assert "layers.1.attn: no config of this family gives this layer the window 7" in str(plan.levels[1].reasons[0])
    llama = gw.open(made("llama").path)
    with llama.program.edit("a window") as e:
        e.set_attr("layers.1.attn.sdpa", window=7)
    assert llama.export_plan().level == 5


def test_the_hashes_of_the_journal_tell_which_block_was_repeated(made: Callable[[str], Made]) -> None:
    found = []
    for block in (1, 2):
        m = gw.open(made("llama").path)
        with m.program.edit("deeper") as e:
            e.duplicate(f"layers.{block}")
        found.append((m.structure_hash(), m.program.journal[-1].after))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
