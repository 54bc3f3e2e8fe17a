"""Families with routed layers: parity with transformers, keys of files, and what the config may say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from checkpoints import MIXTURES, Made, edit_config, relative, some_ids
from safetensors.numpy import load_file, save_file

import graphwright as gw
from graphwright.models import ConfigError, TensorMismatch, architectures
from graphwright.models.open import config_from
from safetensors import safe_open

IDS = some_ids((2, 37))
PADDED = np.stack([np.arange(37) >= 9, np.ones(37, bool)])
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


@pytest.fixture(params=MIXTURES)
def checkpoint(request: pytest.FixtureRequest, made: Callable[[str], Made]) -> Made:
    return made(request.param)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_logits_equal_transformers(checkpoint: Made, experts: str) -> None:
    checkpoint.model.set_experts_implementation(experts)
    try:
        assert relative(gw.open(checkpoint.path).logits(IDS), checkpoint.logits(IDS)) < 5e-6
    finally:
        checkpoint.model.set_experts_implementation("eager")


def test_padded_logits_equal_transformers(checkpoint: Made) -> None:
    ours, theirs = gw.open(checkpoint.path).logits(IDS, PADDED), checkpoint.logits(IDS, PADDED)
    assert relative(ours[PADDED], theirs[PADDED]) < 5e-6


def test_cached_generation_equals_transformers_and_the_program_without_a_cache(checkpoint: Made) -> None:
    m, prompt, steps = gw.open(checkpoint.path), IDS[0, :7], 24
    ids = m.generate(prompt, steps).ids
    assert ids == checkpoint.greedy(prompt, steps)
    cache = m.new_cache(64, 1, kind="static")
    rows = [m.prefill(cache, prompt)[0], *(m.prefill(cache, [i])[0] for i in ids)]
    whole = m.logits([*prompt, *ids])
    assert relative(np.stack(rows), whole[len(prompt) - 1 :]) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_checkpoints_are_widened_exactly(name: str, tmp_path: Path) -> None:
    family, fields = MIXTURES[name]
    c = checkpoints.make(tmp_path, family, dtype="bfloat16", **fields)
    m = gw.open(tmp_path)
    assert {m.program.spec(n).dtype.name for n in m.program.params()} == {"bfloat16"}
    assert relative(m.logits(IDS), c.logits(IDS)) < 5e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_activations_route_in_float32(name: str, made: Callable[[str], Made]) -> None:
    """Weights of experts stay float32 in Mixtral and are rounded in the others, as in their classes."""
    p = gw.open(made(name).path, compute="bfloat16").program
    kinds = {n: p.spec(f"layers.2.mlp.{n}").dtype.name for n in ("router", "logits", "scores", "experts")}
    assert kinds == {"router": "bfloat16", "logits": "float32", "scores": "float32", "experts": "bfloat16"}
    weights = p.operands(p.node("layers.2.mlp.experts"))[4]
    assert p.spec(weights).dtype.name == ("float32" if name == "mixtral" else "bfloat16")


def test_bfloat16_logits_match_within_rounding(made: Callable[[str], Made]) -> None:
    """Where a rounded score chooses another expert the logits differ, so most positions are compared."""
    c = made("qwen3_moe-bias")
    ours, theirs = gw.open(c.path, compute="bfloat16").logits(IDS), c.logits(IDS)
    assert np.quantile(np.abs(ours - theirs).max(-1) / np.abs(theirs).max(), 0.7) < 3e-2


def test_params_are_the_tensors_of_the_file_and_round_trip(checkpoint: Made, tmp_path: Path) -> None:
    m = gw.open(checkpoint.path)
    with safe_open(checkpoint.path / "model.safetensors", "np") as file:
        assert {m.program.key(n) for n in m.program.params()} == set(file.keys())
    assert not any(m.program.weights.array(k).storage.touched for k in m.keys.values())
    receipt = m.export(tmp_path / "out", check="none", timed=False)
    assert receipt.level == 1
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint.path / name).read_bytes()


def test_node_names(made: Callable[[str], Made]) -> None:
    p = gw.open(made("qwen2_moe").path).program
    here = [p.path(n).removeprefix("layers.2.mlp.") for n in p.order() if p.path(n).startswith("layers.2.mlp.")]
    ops = [n for n in here if not n.endswith(".weight")]
    assert ops == [
        *("norm", "tokens", "router", "scores", "chosen", "dispatch", "experts", "mixed"),
        *("shared.gate", "shared.act", "shared.up", "shared.mul", "shared.down", "shared_gate", "shared_open"),
        *("shared_scaled", "sum"),
    ]
    assert {n for n in here if n.endswith(".weight")} == {
        *("norm.weight", "router.weight", "shared_gate.weight"),
        *(f"shared.{n}.weight" for n in ("gate", "up", "down")),
        *(f"experts.{e}.{n}.weight" for e in range(5) for n in ("gate", "up", "down")),
    }
    assert "layers.1.mlp.down" in {p.path(n) for n in p.nodes()}  # a dense layer
    mixtral = gw.open(made("mixtral").path).program
    assert p.is_junction(p.node("layers.2.mlp.sum"))
    assert mixtral.path(mixtral.operands(mixtral.node("layers.0.mlp.weights"))[1]) == "layers.0.mlp.total"


# -- files with the experts of a layer in one tensor -------------------------------------------------------------------
@pytest.fixture(params=FAMILIES)
def stacked(request: pytest.FixtureRequest, made: Callable[[str], Made], tmp_path: Path) -> Made:
    """A checkpoint with the names that transformers has in memory."""
    c = made(request.param)
    c.model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    return Made(tmp_path / "stacked", c.model)


def test_stacked_experts_are_params_of_their_own_and_byte_ranges_of_the_file(
    stacked: Made, made: Callable[[str], Made], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    m, separate = gw.open(stacked.path), gw.open(made(request.node.callspec.params["stacked"]).path)
    whole = load_file(stacked.path / "model.safetensors")["model.layers.2.mlp.experts.gate_up_proj"]
    assert m.keys == separate.keys
    assert not any(m.program.weights.array(k).storage.touched for k in m.keys.values())
    assert np.array_equal(m.logits(IDS), separate.logits(IDS))
    up = m.program.weights.array(m.keys["layers.2.mlp.experts.3.up.weight"]).to_numpy()
    assert np.array_equal(up, whole[3, len(up) :])
    assert m.inspect().nbytes == separate.inspect().nbytes
    assert m.export(tmp_path / "out", check="none", timed=False).level == 1
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (stacked.path / name).read_bytes()


def test_an_edited_expert_is_written_back_into_its_stack(stacked: Made, tmp_path: Path) -> None:
    m = gw.open(stacked.path)
    key = m.keys["layers.2.mlp.experts.3.up.weight"]
    with m.edit("another expert") as e:
        e.set_weight(key, lambda w: 2 * w)
    m.export(tmp_path / "out", check="none", timed=False)
    before, after = (load_file(p / "model.safetensors") for p in (stacked.path, tmp_path / "out"))
    assert before.keys() == after.keys()
    name, half = "model.layers.2.mlp.experts.gate_up_proj", m.program.weights.array(key).shape[0]
    before[name][3, half:] *= 2
    assert all(np.array_equal(before[k], after[k]) for k in before)


def test_a_directory_of_shards_keeps_its_stacks_apart(made: Callable[[str], Made], tmp_path: Path) -> None:
    c = made("qwen2_moe")
    c.model.save_pretrained(tmp_path / "shards", save_original_format=False, max_shard_size="60KB")
    m = gw.open(tmp_path / "shards")
    assert np.array_equal(m.logits(IDS), gw.open(c.path).logits(IDS))
    m.export(tmp_path / "out", check="none", timed=False)
    for file in sorted((tmp_path / "shards").glob("model*")):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


GATE_UP, DOWN = (f"model.layers.2.mlp.experts.{n}_proj" for n in ("gate_up", "down"))


@pytest.mark.parametrize(
    ("change", "missing", "unexpected", "misshapen"),
    [
        (lambda t: t.update({GATE_UP: t[GATE_UP][:, :-1].copy()}), 10, 1, 0),  # no two halves
        (lambda t: t.update({GATE_UP: t[GATE_UP][:, :-2].copy()}), 0, 0, 10),
        (lambda t: t.update({DOWN: t[DOWN][:4].copy()}), 1, 0, 0),
        (lambda t: t.update({DOWN: np.concatenate([t[DOWN], t[DOWN][:1]])}), 0, 1, 0),
        (lambda t: t.update({f"{DOWN[:-9]}0.down_proj.weight": t[DOWN][0].copy()}), 4, 1, 0),  # twice
    ],
)  # fmt: skip
def test_stacks_that_do_not_fit_are_listed_with_all_findings(
    change: Any, missing: int, unexpected: int, misshapen: int, made: Callable[[str], Made], tmp_path: Path
) -> None:
    made("qwen3_moe").model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(TensorMismatch) as caught:
        gw.open(rewritten(tmp_path, change))
    found = caught.value
    assert [len(x) for x in (found.missing, found.unexpected, found.misshapen)] == [missing, unexpected, misshapen]


def smaller(c: Made, gone: int) -> Any:
    """The model of transformers without one expert of each routed layer."""
    config = c.model.config
    twin = type(c.model)(type(config)(**{**config.to_dict(), "num_experts": 4, "num_local_experts": 4})).eval()
    state = {}
    for key, value in c.model.state_dict().items():
        routed = ".experts." in key or (key.endswith("gate.weight") and value.shape[0] == 5)
        state[key] = value[[i for i in range(5) if i != gone]] if routed else value
    twin.load_state_dict(state)
    twin.set_attn_implementation("eager")
    return twin


@pytest.mark.parametrize("name", FAMILIES)
def test_cut_expert_equals_a_class_without_its_row_and_matrices(name: str, made: Callable[[str], Made]) -> None:
    c = made(name)
    m = gw.open(c.path)
    before = m.program.hash()
    with m.program.edit("one expert less") as e:
        e.cut_units(m.select("layers.*.mlp").experts[[1]])
    with torch.no_grad():
        assert relative(m.logits(IDS), smaller(c, 1)(torch.tensor(IDS)).logits.numpy()) < 1e-5
    assert "layers.2.mlp.experts.1.up.weight" not in {m.program.path(n) for n in m.program.params()}
    m.program.undo()
    assert m.program.hash() == before


def test_experts_are_axes_with_neurons_of_their_own(made: Callable[[str], Made]) -> None:
    m = gw.open(made("qwen3_moe").path)
    found = m.program.axes()
    assert found["layers.1.mlp.experts"].size == 5
    assert "layers.0.mlp.experts" not in found
    assert [found[f"layers.1.mlp.experts.{e}.neurons"].size for e in range(5)] == [28] * 5
    with m.program.edit("a narrow expert") as e:
        e.cut_units(found["layers.1.mlp.experts.3.neurons"].units(range(9)))
    assert m.program.spec("layers.1.mlp.experts.3.up.weight").sizes == (19, 48)
    assert m.select("layers.*.mlp").experts.count == 10


# -- the config --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_of_the_number_of_experts_are_read_and_kept(
    name: str, copy: Callable[[str], Path], made: Callable[[str], Made]
) -> None:
    for spelling, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        path = copy(name)
        edit_config(path, remove=("num_experts", "num_local_experts"), **{spelling: 5})
        m, out = gw.open(path), path.with_name(f"{name}-{spelling}")
        assert np.array_equal(m.logits(IDS), gw.open(made(name).path).logits(IDS))
        m.export(out, check="none", timed=False)
        assert (out / "config.json").read_bytes() == (path / "config.json").read_bytes()
        edit_config(path, remove=(), **{spelling: 5, other: 6})
        with pytest.raises(ConfigError, match="num_experts"):
            gw.open(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_group", 4), ("topk_group", 2), ("routed_scaling_factor", 2.5), ("scoring_func", "sigmoid"),
     ("topk_method", "noaux_tc"), ("use_routing_bias", True), ("e_score_correction_bias_router", 0.1),
     ("n_shared_experts", 1), ("num_experts_per_tok", 6), ("num_experts_per_tok", 0), ("num_experts", "5"),
     ("mlp_only_layers", 3), ("decoder_sparse_step", 0), ("norm_topk_prob", 1), ("moe_intermediate_size", -1)],
)  # fmt: skip
def test_unknown_routers_and_invalid_fields_are_refused_by_name(
    field: str, value: Any, copy: Callable[[str], Path]
) -> None:
    path = copy("qwen3_moe")
    edit_config(path, remove=("num_local_experts",), **{"num_experts": 5, field: value})
    with pytest.raises(ConfigError, match=field):
        gw.open(path)


def test_neutral_fields_of_other_routers_are_accepted(copy: Callable[[str], Path]) -> None:
    path = copy("qwen3_moe")
    edit_config(path, routed_scaling_factor=1.0, n_group=1, scoring_func="softmax", n_shared_experts=None)
    assert gw.open(path).dims.experts == 5


def test_noise_of_training_is_noted(copy: Callable[[str], Path]) -> None:
    path = copy("mixtral")
    edit_config(path, router_jitter_noise=0.1)
    assert any("router_jitter_noise" in note for note in gw.open(path).notes)


def test_missing_and_misshapen_experts_are_listed_together(copy: Callable[[str], Path]) -> None:
    path = copy("mixtral")
    edit_config(path, num_local_experts=6, num_experts_per_tok=2)
    with pytest.raises(TensorMismatch) as caught:
        gw.open(path)
    assert len(caught.value.missing) == 3 * 3
    assert len(caught.value.misshapen) == 3  # the routers have five rows
    assert "experts" in caught.value.misshapen[0]


def test_absent_fields_have_the_defaults_of_the_class() -> None:
    for name in FAMILIES:
        cls = f"{checkpoints.CLASSES[name]}"
        theirs = getattr(transformers, f"{cls}Config")()
        sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers")
        widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        fields = {k: getattr(theirs, k) for k in (*sizes, *widths) if hasattr(theirs, k)}
        dims = architectures()[name].read(config_from({"architectures": [f"{cls}ForCausalLM"], **fields}))
        assert (dims.experts, dims.chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert (dims.eps, dims.kv_heads) == (theirs.rms_norm_eps, theirs.num_key_value_heads)
        assert dims.rope.theta == theirs.rope_parameters["rope_theta"]
        assert dims.positions == theirs.max_position_embeddings
        assert dims.expert_width == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
