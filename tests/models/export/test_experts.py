"""Exports of models with routed layers: which level carries them, and what transformers then computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import edits
import numpy as np
import pytest
import torch
from checkpoints import MIXTURES, Made, edit_config, make, relative, some_ids
from safetensors.numpy import load_file
from transformers import Qwen3MoeForCausalLM

import graphwright as gw
from graphwright import experts
from graphwright.models import ExportLevelImpossible, VerificationFailed
from graphwright.models.export import hosts, verify
from seeds import some

IDS = some_ids((2, 19))
PROMPTS = [some_ids((n,), seed=n) for n in (9, 17)]
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch, warm_process: Any) -> None:
    monkeypatch.setattr(verify, "_start", warm_process)


def exported(m: gw.Model, out: Path, level: int) -> dict[str, Any]:
    """Export, let transformers compute it, and return the config."""
    receipt = m.export(out, prompts=PROMPTS, check="required", timed=False)
    assert (receipt.level, receipt.exact) == (level, True)
    assert receipt.check["greedy_equal"] == [32, 32]
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", some(FAMILIES, 2))
def test_fewer_experts_in_every_layer_are_a_config(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made(name).path)
    with m.edit("two experts less, narrower ones") as e:
        for layer in {u.name for u in m.program.axes().values() if u.kind == "experts"}:
            e.cut_units(m.program.axes()[layer].units([1, 4] if layer.startswith("layers.2") else [0, 2]))
        for path in [k for k in m.program.axes() if k.endswith(".neurons") and ".experts." in k]:
            e.cut_units(m.program.axes()[path].units(range(9)))
    config = exported(m, tmp_path / "out", 2)
    width = 76 if name in ("mixtral", "olmoe") else 28
    assert config["moe_intermediate_size" if width == 28 else "intermediate_size"] == width - 9
    fields = [f for f in ("num_experts", "num_local_experts") if f in config]
    assert fields == [f for f in ("num_experts", "num_local_experts") if f in m.config]
    assert config[fields[0]] == 3
    back = gw.open(tmp_path / "out")
    assert relative(back.logits(IDS), m.logits(IDS)) < 1e-6


@pytest.mark.deep
def test_uneven_layers_that_were_levelled_are_a_config(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("olmoe").path)
    use = experts.usage(m, IDS)
    with m.edit("one less, then level") as e:
        e.cut_units(m.program.axes()["layers.1.mlp.experts"].units([3]))
        experts.level(e, 3, use)
    assert [layer.size for layer in experts.routed_layers(m.program).values()] == [3] * 3
    assert (
        exported(m, tmp_path / "out", 2)["num_local_experts" if "num_local_experts" in m.config else "num_experts"] == 3
    )


@pytest.mark.parametrize("name", some(FAMILIES, 2))
def test_more_experts_in_every_layer_are_a_config(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Also where the file then has exactly the tensors of a larger class."""
    m = gw.open(made(name).path)
    with m.edit("clones") as e:
        for layer in experts.routed_layers(m.program):
            experts.clone(e, layer, 2)
    plan = m.export_plan()
    assert "6 experts instead of 5" in str(plan)
    assert "the class has 5 experts" in str(plan.at(3).reasons[0])
    config = exported(m, tmp_path / "out", 2)
    assert {config.get(n) for n in ("num_experts", "num_local_experts")} <= {6, None}
    back = gw.open(tmp_path / "out")
    assert relative(back.logits(IDS), m.logits(IDS)) < 1e-6
    with m.edit("one layer more") as e:
        experts.clone(e, "layers.2.mlp", 0)
    assert m.export_plan().level == 5


@pytest.mark.parametrize("name", some(FAMILIES, 2))
def test_unequal_experts_are_code_and_the_reasons_say_why(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    m = gw.open(made(name).path)
    with m.edit("one expert less in one layer, and a narrow one") as e:
        e.cut_units(m.program.axes()["layers.2.mlp.experts"].units([1]))
        e.cut_units(m.program.axes()["layers.2.mlp.experts.3.neurons"].units(range(9)))
    plan = m.export_plan()
    assert plan.level == 5
    assert "4 experts where layer" in str(plan.at(2).reasons[0])
    assert "no expert is always last" in " ".join(map(str, plan.at(3).reasons))
    with pytest.raises(ExportLevelImpossible, match="cannot carry"):
        m.export(tmp_path / "no", level=3)
    config = exported(m, tmp_path / "out", 5)
    routed = m.dims.routed
    count = config["num_experts" if "num_experts" in m.config else "num_local_experts"]
    assert count == [5 * routed[0], 5 * routed[1], 4]
    width = 76 if name in ("mixtral", "olmoe") else 28
    sizes = config["moe_intermediate_size" if width == 28 else "intermediate_size"]
    assert sizes == [width * routed[0], width * routed[1], [width, width, width - 9, width]]
    code = next((tmp_path / "out").glob("modeling_*.py")).read_text()
    assert f"(Experts, 48, {{0: {width}, 2: {width}, 3: {width - 9}, 4: {width}}}" in " ".join(code.split())
    assert ("get_parameter" in code, "one_hot(values" in code, "dispatch(indices, 4)" in code) == (False, False, True)


@pytest.mark.parametrize("name", some(FAMILIES, 2))
def test_stacked_experts_leave_stacked_or_as_code(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    made(name).model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    m = gw.open(tmp_path / "stacked")
    with m.edit("an expert less") as e:
        for layer in experts.routed_layers(m.program).values():
            e.cut_units(layer.axis.units([1]))
    exported(m, tmp_path / "out", 2)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.2.mlp.experts.down_proj"].shape[0] == 4
    assert not [k for k in written if "experts.0" in k]
    assert relative(gw.open(tmp_path / "out").logits(IDS), m.logits(IDS)) < 1e-6
    m.undo()
    with m.edit("a skip, no weight touched") as e:
        e.connect("layers.0.out", "layers.2.out")
    exported(m, tmp_path / "code", 5)


@pytest.mark.deep
def test_rows_that_transformers_default_refuses_are_warned_of_with_the_way_out(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """grouped_mm needs multiples of 16 bytes; the code of the card loads and runs the files."""
    m, ids = gw.open(made("qwen3_moe").path), torch.tensor(IDS)
    for gone, warned in ((4, False), (9, True)):
        with m.edit("narrower experts") as e:
            for path in [k for k in m.program.axes() if k.endswith(".neurons") and ".experts." in k]:
                e.cut_units(m.program.axes()[path].units(range(gone)))
        out = tmp_path / f"out{gone}"
        receipt = m.export(out, check="none", timed=False)
        assert any("experts_implementation" in w for w in receipt.warnings) == warned
        code = (out / "README.md").read_text()
        assert ('experts_implementation="eager"' in code) == warned
        theirs = Qwen3MoeForCausalLM.from_pretrained(out, dtype="auto")
        with pytest.raises(RuntimeError, match="16 bytes") if warned else nullcontext():
            theirs(ids)
        m.undo()
    options: dict[str, Any] = {"experts_implementation": "eager"} if warned else {}
    with torch.no_grad():
        theirs = Qwen3MoeForCausalLM.from_pretrained(out, **options)
        assert relative(gw.open(out).logits(IDS), theirs(ids).logits.numpy()) < 1e-5


def test_narrow_experts_alone_are_zeros(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("qwen3_moe").path)
    with m.edit("narrow experts") as e:
        e.cut_units(m.program.axes()["layers.2.mlp.experts.3.neurons"].units(range(9)))
        e.cut_units(m.program.axes()["layers.1.mlp.experts.0.neurons"].units([5, 7]))
    exported(m, tmp_path / "out", 3)
    weight = gw.open(tmp_path / "out").program.weights.array("model.layers.2.mlp.experts.3.up_proj.weight").to_numpy()
    assert ((weight == 0).all(1) == (np.arange(28) < 9)).all()


@pytest.mark.deep
def test_layers_without_experts_move_with_their_numbers(made: Callable[[str], Made], tmp_path: Path) -> None:
    for name, dense in (("qwen2_moe", [0]), ("qwen3_moe", [])):
        m = gw.open(made(name).path)
        with m.edit("no first layer") as e:
            e.cut_units(m.select("layers").layers[[0]])
        config = exported(m, tmp_path / name, 2)
        assert config["mlp_only_layers"] == dense
    m = gw.open(made("qwen2_moe-step").path)  # layers 1 and 3 are routed
    with m.edit("no first layer") as e:
        e.cut_units(m.select("layers").layers[[0]])
    config = exported(m, tmp_path / "step", 2)
    assert (config["mlp_only_layers"], config["decoder_sparse_step"]) == ([1], 1)


def alone(m: gw.Model, layer: str) -> None:
    """Leave one expert in a layer."""
    with m.edit("one expert") as e:
        experts.set_k(e, layer, 1)
        e.cut_units(m.program.axes()[f"{layer}.experts"].units([0, 1, 2, 4]))


def test_a_layer_left_with_one_expert_is_a_dense_one(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Its width is that of the dense layers, or there are none."""
    family, fields = MIXTURES["qwen3_moe"]
    as_wide = make(tmp_path / "as_wide", family, **{**fields, "intermediate_size": 28})
    for path, dense in ((as_wide.path, [0, 2]), (made("qwen3_moe-bias").path, [2])):
        m = gw.open(path)
        alone(m, "layers.2.mlp")
        config = exported(m, tmp_path / f"out{len(dense)}", 2)
        assert (config["mlp_only_layers"], config["intermediate_size"]) == (dense, 28)
        assert 5 in (config.get("num_experts"), config.get("num_local_experts"))
        back = gw.open(tmp_path / f"out{len(dense)}")
        assert back.dims.routed == tuple(i not in dense for i in range(3))
        assert relative(back.logits(IDS), m.logits(IDS)) < 1e-6
        m.undo()
        assert m.export_plan().level == 1
    alone(m, "layers.0.mlp")
    with m.edit("fewer experts elsewhere") as e:
        for layer in ("layers.1.mlp", "layers.2.mlp"):
            e.cut_units(m.program.axes()[f"{layer}.experts"].units([0]))
    config = exported(m, tmp_path / "less", 2)
    assert (config["mlp_only_layers"], config["num_local_experts"]) == ([0], 4)


@pytest.mark.deep
def test_a_layer_with_one_expert_that_no_dense_layer_holds_is_code(made: Callable[[str], Made], tmp_path: Path) -> None:
    for name, why in (
        ("qwen3_moe", "28 neurons where layer 0 has 76"),
        ("qwen2_moe", "1 experts where layer 0 has 5"),  # and a shared one
        ("mixtral", "1 experts where layer 0 has 5"),
    ):
        m = gw.open(made(name).path)
        alone(m, "layers.2.mlp")
        assert (m.export_plan().level, why in " ".join(map(str, m.export_plan().at(2).reasons))) == (5, True), name
    family, fields = MIXTURES["qwen2_moe"]
    c = make(tmp_path / "as_wide", family, **{**fields, "intermediate_size": 28})
    m = gw.open(c.path)
    alone(m, "layers.2.mlp")
    with m.edit("no shared expert") as e:
        e.cut("layers.2.mlp.shared_scaled -> layers.2.mlp.sum")
    assert exported(m, tmp_path / "out", 2)["mlp_only_layers"] == [1, 2]


def test_a_shared_expert_that_was_cut_is_zeros(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("qwen2_moe").path)
    with m.edit("no shared expert") as e:
        e.cut("layers.2.mlp.shared_scaled -> layers.2.mlp.sum")
    assert "lacks this part" in str(m.export_plan().at(2).reasons[0])
    exported(m, tmp_path / "out", 3)


def test_heads_under_a_norm_of_all_heads_cannot_be_zeros(made: Callable[[str], Made]) -> None:
    m = gw.open(made("olmoe").path)
    with m.edit(
        "a head less",
    ) as e:
        e.cut_units(m.select("layers.1.attn").heads[[0]], ragged=True, correct=False)
    assert "normalises 5 heads" in " ".join(map(str, m.export_plan().at(3).reasons))
    assert m.export_plan().level == 5


def test_another_number_of_experts_per_token_is_a_config(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = gw.open(made("olmoe").path)
    with m.edit("two experts per token") as e:
        for layer in range(3):
            e.set_attr(f"layers.{layer}.mlp.chosen", k=2)
    assert exported(m, tmp_path / "out", 2)["num_experts_per_tok"] == 2
    m.program.undo()
    with m.edit("two experts per token in one layer") as e:
        e.set_attr("layers.1.mlp.chosen", k=2)
    assert m.export_plan().level == 5


# -- hosts -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "layers", "host"),
    [
        ("llama", (0, 1, 2), "MixtralForCausalLM"),
        ("mistral-window", (0, 1, 2), "MixtralForCausalLM"),
        ("qwen2-windows", (0, 2), "Qwen2MoeForCausalLM"),
        ("qwen3", (1, 2), "Qwen3MoeForCausalLM"),
    ],
)
def test_a_dense_model_with_experts_leaves_as_the_class_of_its_host(
    name: str, layers: tuple[int, ...], host: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    m = gw.open(made(name).path)
    edits.route(m, layers)
    config = exported(m, tmp_path / "out", 4)
    assert config["architectures"] == [host]
    back = gw.open(tmp_path / "out")
    assert relative(back.logits(IDS), m.logits(IDS)) < 1e-6
    assert "mlp_bias" not in config
    if name == "qwen2-windows":  # the class has a shared expert: one neuron, and zeros
        assert config["shared_expert_intermediate_size"] == 1
        down = back.program.weights.array("model.layers.2.mlp.shared_expert.down_proj.weight").to_numpy()
        assert down.shape == (48, 1)
        assert not down.any()


def test_fields_with_another_default_in_the_host_are_written(
    copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy("llama")
    edit_config(path, remove=("rope_parameters",))  # 10000 in Llama, 1000000 in Mixtral
    m = gw.open(path)
    edits.route(m, range(3))
    assert exported(m, tmp_path / "out", 4)["rope_theta"] == 10000
    monkeypatch.setattr(hosts, "_rotary", lambda model: {})
    assert m.export_plan().level == 5  # the rotation differs
    edit_config(tmp_path / "out", remove=("rope_theta",))
    rows = [{"input_ids": np.asarray(PROMPTS[0])}]
    there = verify.compute_there(tmp_path / "out", rows)
    with pytest.raises(VerificationFailed, match="logits"):
        verify.compare(verify.compute_here(m, rows), there, 1e-5)


@pytest.mark.parametrize(("name", "layers", "why"), [
    ("llama", (0, 2), "layer 1 is dense, which no config of this family can say"),
    ("llama-attention-bias", (0, 1, 2), "reads 3 values instead of 2"),
])  # fmt: skip
def test_hosts_refuse_what_their_class_lacks(
    name: str, layers: tuple[int, ...], why: str, made: Callable[[str], Made]
) -> None:
    m = gw.open(made(name).path)
    edits.route(m, layers)
    plan = m.export_plan()
    assert plan.level == 5
    assert why in " ".join(map(str, plan.at(4).reasons))


def test_a_model_without_experts_has_no_host(made: Callable[[str], Made]) -> None:
    plan = gw.open(made("llama").path).export_plan()
    assert (plan.at(4).possible, plan.at(4).reasons) == (False, ())
