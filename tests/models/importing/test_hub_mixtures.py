"""`gw.open` of classes whose files have one tensor per expert, or fused matrices, where the class has other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hub_models import saved
from transformers import conversion_mapping
from transformers.core_model_loading import Interleave, WeightConverter

import graphwright as gw
from graphwright.models import TensorMismatch, UnsupportedArchitecture
from graphwright.models.architectures.architecture import Join
from graphwright.models.stacks import split
from graphwright.safetensors import Checkpoint, JoinedCheckpoint, TensorData, write_tensors

NAMES = ["glm4_moe", *(pytest.param(name, marks=pytest.mark.deep) for name in
                       ("deepseek_v3", "ernie4_5_moe", "hunyuan_moe", "lfm2_moe", "gpt_oss", "hrm_text"))]  # fmt: skip
STACK, EXPERT = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.{e}.{part}_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty cache of captured classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def glm(tmp_path: Path) -> tuple[Any, Path]:
    """(module, directory) of a small GLM-4 MoE in several files, whose second layer has four experts."""
    return saved("glm4_moe", tmp_path / "glm", max_shard_size="20KB"), tmp_path / "glm"


def logits(module: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(ids)).logits.numpy()


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5 * np.abs(expected).max())


IDS = np.array([[5, 6, 7, 8, 9, 3, 4], [9, 8, 3, 3, 5, 6, 7]])


@pytest.mark.parametrize("name", NAMES)
def test_outputs_match_and_the_files_come_back(name, tmp_path):
    module = saved(name, tmp_path / "in", max_shard_size="20KB")
    model = gw.open(tmp_path / "in", tokenizer=False)
    close(model(IDS), logits(module, IDS))
    assert not model.notes
    model.export(tmp_path / "out", check="none")
    files = sorted((tmp_path / "in").glob("*.safetensors*"))
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_experts_are_one_weight_that_is_read_when_it_is_used(glm):
    module, directory = glm
    model = gw.open(directory, tokenizer=False)
    weight = model.program.weights[STACK]
    assert weight.shape == (4, 32, 32)
    assert not weight.data.storage.touched
    np.testing.assert_array_equal(weight.data.to_numpy(), module.state_dict()[STACK].numpy())


def test_changed_experts_leave_as_tensors_of_their_own(glm, tmp_path):
    _, directory = glm
    model = gw.open(directory, tokenizer=False)
    before = Checkpoint(directory)

    def changed(w: np.ndarray) -> np.ndarray:
        w = np.array(w)
        w[2, 16:] += 1  # up of expert 2
        return w

    with model.program.edit("one expert") as e:
        e.set_weight(STACK, changed(model.program.weights[STACK].data.to_numpy()))
    model.export(tmp_path / "out", check="none")
    after = Checkpoint(tmp_path / "out")
    assert set(after) == set(before)
    assert [k for k in before if before.bytes(k) != after.bytes(k)] == [EXPERT.format(e=2, part="up")]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    close(model(IDS), logits(theirs, IDS))


@pytest.mark.deep
def test_fewer_neurons_of_experts(glm, tmp_path):
    _, directory = glm
    model = gw.open(directory, tokenizer=False)
    axis = model.program.axes()["model.layers.1.mlp.experts.neurons"]
    with model.program.edit("half") as e:
        e.cut_units(axis.units(range(0, axis.size, 2)))
    assert model.program.weights[STACK].shape == (4, 16, 32)
    model.export(tmp_path / "out", check="none")
    assert set(Checkpoint(tmp_path / "out")) == set(Checkpoint(directory))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    close(model(IDS), logits(theirs, IDS))
    again = gw.open(tmp_path / "out", tokenizer=False)
    close(again(IDS), np.asarray(model(IDS)))


@pytest.mark.deep
def test_fewer_experts_leave_in_the_class(glm, tmp_path):
    _, directory = glm
    model = gw.open(directory, tokenizer=False)
    with model.program.edit("one less") as e:
        e.cut_units(model.program.axes()["model.layers.1.mlp.experts"].units([1]))
    receipt = model.export(tmp_path / "out", check="none")
    assert receipt.level == 2
    assert EXPERT.format(e=3, part="up") not in Checkpoint(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.n_routed_experts == 3
    close(model(IDS), logits(theirs, IDS))


@pytest.mark.deep
def test_gpt_oss_generates_with_a_cache_and_leaves_as_code(tmp_path):
    module = saved("gpt_oss", tmp_path / "oss")
    model = gw.open(tmp_path / "oss", tokenizer=False)
    prompt = IDS[0]
    expected = module.generate(torch.from_numpy(prompt)[None], max_new_tokens=9, do_sample=False, eos_token_id=98)
    assert list(model.generate(prompt.tolist(), 9).ids) == expected[0, len(prompt) :].tolist()
    with model.program.edit("experts of one layer") as e:
        e.cut_units(model.program.axes()["model.layers.0.mlp.experts"].units([1]))
    receipt = model.export(tmp_path / "out")
    assert receipt.level == 5
    assert receipt.confirmed


@pytest.mark.deep
def test_a_missing_expert_is_named(tmp_path):
    module = saved("glm4_moe", tmp_path / "glm")
    gone = EXPERT.format(e=3, part="up")
    whole = Checkpoint(tmp_path / "glm")
    items = [TensorData(k, whole.info(k).tag, whole.info(k).shape, bytes(whole.bytes(k))) for k in whole if k != gone]
    write_tensors(tmp_path / "glm" / "model.safetensors", items)
    with pytest.raises(TensorMismatch) as caught:
        gw.open(tmp_path / "glm", tokenizer=False)
    assert STACK in str(caught.value)
    assert module is not None


def test_rows_in_another_order_are_refused(glm, monkeypatch):
    _, directory = glm
    known = conversion_mapping.get_checkpoint_conversion_mapping
    odd = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.other", [Interleave(dim=0)])
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping",
                        lambda name: [odd] if name == "glm4_moe" else known(name))  # fmt: skip
    from graphwright.models.importing.hub import file_form

    made = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig.from_pretrained(directory))
    module = made.get_submodule("model.layers.0.mlp.down_proj")
    module.register_parameter("other", torch.nn.Parameter(torch.zeros(32, 64)))
    del module.weight
    with pytest.raises(UnsupportedArchitecture, match="rearranges") as caught:
        file_form(made, ["model.layers.0.mlp.down_proj.weight"])
    assert "Interleave" in str(caught.value)


# -- views of checkpoints, without a class --------------------------------------------------------------------------
def parts(tmp_path: Path) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = {"1.up": (2, 3), "0.up": (2, 3), "other": (5,), "0.gate": (2, 3), "1.gate": (2, 3)}
    shapes |= {"q": (4, 3), "v": (1, 3)}
    values = {key: rng.normal(size=shape).astype("f4") for key, shape in shapes.items()}
    write_tensors(tmp_path / "model.safetensors", [TensorData(k, "F32", v.shape, v) for k, v in values.items()])
    return Checkpoint(tmp_path), values


JOINS = (Join("both", ("{e}.gate", "{e}.up")), Join("qv", ("q", "v")))


def joined(files: Checkpoint) -> JoinedCheckpoint:
    return JoinedCheckpoint(files, {"both": ((2, 4, 3), JOINS[0].keys(2)), "qv": ((5, 3), JOINS[1].keys(1))})


def test_joined_bytes_are_those_of_the_parts(tmp_path):
    files, values = parts(tmp_path)
    view = joined(files)
    expected = np.stack([np.concatenate([values[f"{e}.gate"], values[f"{e}.up"]]) for e in range(2)])
    assert list(view) == ["other", "both", "qv"]
    assert view.info("both").shape == expected.shape
    assert bytes(view.bytes("both")) == expected.tobytes() == b"".join(view.files[0].chunks("both"))
    assert bytes(view.bytes("qv")) == values["q"].tobytes() + values["v"].tobytes()
    assert bytes(view.bytes("other")) == values["other"].tobytes()


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_split_is_the_inverse_at_any_number_of_experts(tmp_path, experts):
    files, values = parts(tmp_path)
    view = joined(files)
    changed = np.arange(experts * 6 * 3, dtype="f4").reshape(experts, 6, 3)
    items = [TensorData.stored(view, "other"), TensorData("both", "F32", changed.shape, lambda: changed),
             TensorData.stored(view, "qv")]  # fmt: skip
    made = {item.key: item for item in split(items, JOINS, view)}
    for e in range(experts):
        for part, rows in (("gate", changed[e, :3]), ("up", changed[e, 3:])):
            item = made[f"{e}.{part}"]
            assert item.shape == (3, 3)
            assert b"".join(map(bytes, item.chunks())) == rows.tobytes()
    assert len(made) == 2 * experts + 3
    assert all(made[key].is_untouched(files.files[0]) for key in ("other", "q", "v"))
    assert values["q"].shape == made["q"].shape


def test_parts_of_unequal_sizes_that_changed_stay_one_tensor(tmp_path):
    files, _ = parts(tmp_path)
    smaller, equal = np.zeros((3, 3), "f4"), np.zeros((5, 3), "f4")
    (item,) = split([TensorData("qv", "F32", smaller.shape, smaller)], JOINS, joined(files))
    assert item.key == "qv"
    found = list(split([TensorData("qv", "F32", equal.shape, equal)], JOINS, joined(files)))
    assert [(i.key, i.shape) for i in found] == [("q", (4, 3)), ("v", (1, 3))]
