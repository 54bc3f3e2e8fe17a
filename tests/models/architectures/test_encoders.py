"""Templates of encoders beside their classes of transformers: outputs, units, files, configs, and imports."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoders import SAMPLES, Saved, feeds_of, make, saved
from safetensors.numpy import load_file, save_file

import graphwright as gw
from axis_samples import agree
from graphwright.models import ConfigError, TensorMismatch, architectures
from graphwright.models.architectures.architecture import Config
from graphwright.models.export.write import write_model
from graphwright.models.importing.hub import imported
from graphwright.models.open import config_from
from graphwright.program.errors import EmptyAxis
from graphwright.safetensors import Checkpoint

ALL = list(SAMPLES)
SOME = [pytest.param(name, marks=[pytest.mark.deep] if sample.deep else []) for name, sample in SAMPLES.items()]


def opened(name: str, **options: Any) -> gw.Model:
    return gw.open(saved(name).path, tokenizer=False, **options)


def close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], rtol: float) -> None:
    """Compare outputs: ‖ours - theirs‖ / ‖theirs‖ of each."""
    for name, found in ours.items():
        assert found.shape == theirs[name].shape
        assert np.linalg.norm(found - theirs[name]) < rtol * np.linalg.norm(theirs[name]), name


@pytest.mark.parametrize("name", ALL)
def test_outputs_have_the_names_and_values_of_transformers(name: str) -> None:
    c, m = saved(name), opened(name)
    assert m.arch.imported is None
    wide = opened(name, dtype="float64", compute="float64")
    for batch, length in ((2, 9), (1, 13)):
        feeds = feeds_of(c.sample, m.program.input_names(), batch, length)
        theirs = c.outputs(feeds)
        assert set(m.program.output_names()) == theirs.keys()
        close(m(**feeds), theirs, 1e-6)
        exact = {n: a.astype("f8") if a.dtype.kind == "f" else a for n, a in feeds.items()}
        close(wide(**exact), c.outputs(exact, torch.float64), c.sample.exact)


@pytest.mark.parametrize("name", SOME)
def test_low_precision_is_near_float32(name: str) -> None:
    m, low = opened(name), opened(name, dtype="bfloat16", compute="bfloat16")
    feeds = feeds_of(saved(name).sample, m.program.input_names())
    close({n: np.asarray(a, "f4") for n, a in low(**feeds).items()}, m(**feeds), 0.2)


@pytest.mark.parametrize("name", [n for n in ALL if not SAMPLES[n].images])
def test_absent_inputs_are_a_mask_of_ones_and_types_of_zeros(name: str) -> None:
    c, m = saved(name), opened(name)
    ids = feeds_of(c.sample, ("input_ids",))
    close(m(**ids), c.outputs(ids), 1e-6)
    close(m(ids["input_ids"]), c.outputs(ids), 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_an_unchanged_model_is_written_back_byte_by_byte(name: str, tmp_path: Path) -> None:
    m = opened(name)
    assert not any(m.program.weights.array(k).storage.touched for k in m.keys.values())
    write_model(m, tmp_path)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (saved(name).path / file).read_bytes()
    stored = load_file(tmp_path / "model.safetensors")
    read = {key: t for key, t in stored.items() if not key.endswith("mask_token")}
    assert m.inspect().parameters == sum(t.size for t in read.values())


@pytest.mark.parametrize("name", SOME)
def test_masked_and_cut_units_of_every_kind_are_equal(name: str) -> None:
    m = opened(name, dtype="float64", compute="float64")
    p, kinds = m.program, set()
    feeds = feeds_of(saved(name).sample, p.input_names())
    feeds = {n: a.astype("f8") if a.dtype.kind == "f" else a for n, a in feeds.items()}
    for group in list(p.axes().values()):
        if group.frozen or group.mixed or group.atoms == () or ".0." in group.name:
            continue
        several = range(int(group.atoms[1].size)) if len(group.atoms) > 1 else [0, group.size // 2]
        agree(p, group.units(several if group.size > 2 else [1]), feeds, 1e-10)
        kinds |= set(group.kinds)
    assert kinds >= {"neurons", "heads"}


@pytest.mark.parametrize("name", SOME)
def test_pruned_heads_and_neurons_are_kept_by_a_saved_model(name: str, tmp_path: Path) -> None:
    m = opened(name)
    feeds = feeds_of(saved(name).sample, m.program.input_names())
    before = m(**feeds)
    m.select("**.attn").heads[[1]].prune()
    m.select("**.mlp").neurons[3:8].prune()
    after = m(**feeds)
    assert not np.allclose(next(iter(after.values())), next(iter(before.values())), atol=1e-3)
    m.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved", tokenizer=False)
    assert again.task == m.task
    close(again(**feeds), after, 1e-7)
    m.undo(2)
    for found, expected in zip(m(**feeds).values(), before.values(), strict=True):
        np.testing.assert_array_equal(found, expected)


def units(p: gw.Program) -> dict[str, int]:
    """Number of units of all axes that a cut may change, by kind."""
    found: dict[str, int] = {}
    for group in p.axes().values():
        if not group.frozen and group.kind in ("heads", "kv_groups", "neurons", "channels"):
            found[group.kind] = found.get(group.kind, 0) + group.size
    return found


@pytest.mark.parametrize("name", ["BertForMaskedLM", "AlbertForMaskedLM", "ViTForImageClassification"])
def test_a_removed_layer_is_the_class_without_it(name: str) -> None:
    """A layer whose result is a norm of the residual stream passes its input on, as one that is left out."""
    c, m = saved(name), opened(name)
    feeds = feeds_of(c.sample, m.program.input_names())
    module = copy.deepcopy(c.module)
    module.config.num_hidden_layers = 1
    for part in list(module.modules()):
        if isinstance(part, torch.nn.ModuleList) and len(part) == 2:
            del part[0]
    m.select("layers").layers[[0]].prune()
    assert "layers.0.out" not in {m.program.path(n) for n in m.program.nodes()}
    close(m(**feeds), dataclasses.replace(c, module=module).outputs(feeds), 1e-6)
    with pytest.raises(EmptyAxis):
        m.select("layers").layers.prune()


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "AlbertForMaskedLM", "ModernBertForMaskedLM", "ViTForImageClassification"]
)
def test_less_channels_and_heads_are_a_smaller_config(name: str, tmp_path: Path) -> None:
    """The cut weights, in the files of a class of these sizes, compute what the program computes."""
    m = opened(name)
    feeds = feeds_of(saved(name).sample, m.program.input_names())
    m.select("**.attn").heads[[1]].prune()
    (axis,) = (g for g in m.program.axes().values() if "channels" in g.kinds and g.size == 24)
    with m.edit("narrow") as e:
        e.cut_units(axis.units([0, 3, 5, 6, 9, 11, 17, 20]))
    config = {**m.config, "hidden_size": 16, "num_attention_heads": 2}
    write_model(m, tmp_path, config=json.dumps(config).encode())
    kind: Any = getattr(transformers, SAMPLES[name].model)
    module, facts = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    close(m(**feeds), dataclasses.replace(saved(name), module=module.eval()).outputs(feeds), 1e-6)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM", "CLIPVisionModel"])
@pytest.mark.parametrize(("units", "level"), [("neurons", 2), ("heads", 3)])
def test_pruned_units_leave_for_the_class(name: str, units: str, level: int, tmp_path: Path) -> None:
    m = opened(name)
    if units == "neurons":
        m.select("**.mlp").neurons[3:8].prune()
    else:
        m.select("layers.1.attn").heads[[1]].prune()
    assert m.export(tmp_path / "out", check="none", timed=False).level == level
    kind: Any = getattr(transformers, SAMPLES[name].model)
    written = dataclasses.replace(saved(name), module=kind.from_pretrained(tmp_path / "out").eval())
    feeds = feeds_of(written.sample, m.program.input_names())
    close(m(**feeds), written.outputs(feeds), 1e-6)


def test_the_layers_of_albert_share_their_heads() -> None:
    m = opened("AlbertForMaskedLM")
    p = m.program
    assert p.select("**.attn").heads.count == 3
    assert p.select("**.mlp").neurons.count == 20
    assert len([n for n in p.nodes() if p.op(n) == "sdpa"]) == 2
    p.select("shared.attn").heads[[2]].prune()
    assert [p.spec(f"layers.{i}.attn.q").shape[-1] for i in (0, 1)] == [16, 16]


PLAIN = {"SiglipVisionModel": {"heads": 3, "neurons": 24}}
"""Units of what the import leaves as plain ops: the attention of the pooler, and the entries of its query."""


CAPTURED = ("BertForMaskedLM", "ViTForImageClassification")
"""Classes that an ordinary run captures."""
SPLIT = "Dinov2, gated"
"""Its files have gate and up in one tensor, which transformers splits; such files are not imported."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in CAPTURED else pytest.mark.deep) for n in ALL if n != SPLIT]
)
def test_the_template_and_the_import_of_a_class_are_one_function(name: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    c, m = saved(name), opened(name)
    config, files = Config.read(c.path), tuple(Checkpoint(c.path / "model.safetensors"))
    other = gw.open(c.path, tokenizer=False, arch=imported(config, "float32", files))
    assert other.arch.imported is not None
    assert (m.task, m.program.output_names()) == (other.task, other.program.output_names())
    assert set(other.program.input_names()) == set(m.program.input_names()) - {"token_type_ids"}
    feeds = feeds_of(c.sample, other.program.input_names())
    close(m(**feeds), other(**feeds), 1e-6)
    plain = PLAIN.get(name, {})
    assert units(m.program) == {kind: n + plain.get(kind, 0) for kind, n in units(other.program).items()}


def test_opening_imports_neither_torch_nor_transformers() -> None:
    paths = [str(saved(name).path) for name in ALL if not SAMPLES[name].deep]
    code = f"""
import sys, graphwright as gw
print([gw.open(path, tokenizer=False).task for path in {paths!r}])
print(sorted(m for m in ("torch", "transformers") if m in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- configs -----------------------------------------------------------------------------------------------------------
SIZES = {
    "vocab": ["vocab_size"], "hidden": ["hidden_size"], "layers": ["num_hidden_layers"],
    "heads": ["num_attention_heads"], "mlp": ["intermediate_size", "hidden_dim"],
    "positions": ["max_position_embeddings"], "types": ["type_vocab_size"], "width": ["embedding_size"],
    "eps": ["layer_norm_eps", "norm_eps"], "activation": ["hidden_act", "hidden_activation", "activation"],
    "pad": ["pad_token_id"], "image_height": ["image_size"], "patch_width": ["patch_size"],
    "channels": ["num_channels"], "q_bias": ["qkv_bias", "attention_bias"], "projected": ["projection_dim"],
    "pooled": ["pooler_output_size"], "norm_bias": ["norm_bias"], "decoder_bias": ["decoder_bias"],
    "pooler": ["vision_use_head"], "gated": ["use_swiglu_ffn"],
}  # fmt: skip
"""Dimension -> its names in configs."""
STEMS = {SAMPLES[name].config: name for name in ALL}


@pytest.mark.parametrize("config", STEMS)
def test_absent_fields_have_the_defaults_of_the_class(config: str) -> None:
    theirs: Any = getattr(transformers, config)()
    name = SAMPLES[STEMS[config]].model
    dims: Any = architectures()[name].read(config_from({"architectures": [name]}))
    compared = set()
    for ours, fields in SIZES.items():
        for field in fields:
            if hasattr(theirs, field) and getattr(dims, ours, None) is not None:
                assert getattr(dims, ours) == getattr(theirs, field), field
                compared.add(ours)
    assert compared >= {"hidden", "layers", "heads", "activation"}
    if hasattr(theirs, "layer_types"):
        assert [w is None for w in dims.windows] == [kind == "full_attention" for kind in theirs.layer_types]
        assert dims.windows[1] == theirs.sliding_window
        thetas = [theirs.rope_parameters[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")]
        assert [dims.rope.theta, dims.local_rope.theta] == thetas
    assert dims.labels == theirs.num_labels


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("BertModel", "position_embedding_type", "relative_key"), ("BertModel", "is_decoder", True),
        ("BertModel", "add_cross_attention", True), ("BertModel", "num_attention_heads", 5),
        ("BertModel", "hidden_act", "mish"), ("BertModel", "layer_norm_eps", 0), ("BertModel", "id2label", []),
        ("RobertaForSequenceClassification", "pad_token_id", -1), ("AlbertForMaskedLM", "num_hidden_groups", 2),
        ("AlbertForMaskedLM", "inner_group_num", 3), ("DistilBertForTokenClassification", "n_heads", 7),
        ("DistilBertForTokenClassification", "activation", "prelu"), ("ModernBertModel", "classifier_pooling", "max"),
        ("ModernBertModel", "rope_scaling", {"rope_type": "linear"}), ("ModernBertModel", "layer_types", ["full"]),
        ("ModernBertModel", "local_attention", 0), ("ViTForImageClassification", "patch_size", 15),
        ("ViTForImageClassification", "image_size", [3, "x"]), ("ViTForImageClassification", "qkv_bias", 1),
        ("Dinov2Model", "image_size", [14, 16]), ("Dinov2Model", "mlp_ratio", 0),
        ("CLIPVisionModelWithProjection", "projection_dim", 0), ("SiglipVisionModel", "vision_use_head", "no"),
    ],
)  # fmt: skip
def test_fields_that_are_not_supported_are_refused_by_name(name: str, field: str, value: Any, tmp_path: Path) -> None:
    edit_config(copied(name, tmp_path), **{field: value})
    with pytest.raises(ConfigError, match=field):
        gw.open(tmp_path / name, tokenizer=False)


# -- files -------------------------------------------------------------------------------------------------------------
def copied(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(saved(name).path, directory / name))


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def renamed(path: Path, change: Any, **more: np.ndarray) -> None:
    """Change the keys of a checkpoint, and add tensors."""
    tensors = load_file(path / "model.safetensors")
    made = {change(key): t for key, t in tensors.items()}
    save_file({**made, **{k.replace("__", "."): t for k, t in more.items()}}, path / "model.safetensors",
              {"format": "pt"})  # fmt: skip


def old_norms(key: str) -> str:
    return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def check_file(name: str, path: Path, expected: Saved) -> gw.Model:
    """Open a changed file: the outputs are as before, and it is written back byte by byte."""
    m = gw.open(path, tokenizer=False)
    feeds = feeds_of(expected.sample, m.program.input_names())
    close(m(**feeds), expected.outputs(feeds), 1e-6)
    out = path.with_name("out")
    out.mkdir()
    write_model(m, out)
    assert (out / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    return m


def test_old_names_of_norms_are_read_and_kept(tmp_path: Path) -> None:
    path = copied("BertForMaskedLM", tmp_path)
    renamed(path, old_norms)
    m = check_file("BertForMaskedLM", path, saved("BertForMaskedLM"))
    assert m.keys["embed.norm.weight"].endswith("gamma")


def test_a_file_of_pretraining_has_tensors_that_other_classes_ignore(tmp_path: Path) -> None:
    """As bert-base-uncased has: the pooler, the second head, copies of tied tensors, and positions."""
    c = saved("BertForMaskedLM")
    stored = load_file(c.path / "model.safetensors")
    path = copied("BertForMaskedLM", tmp_path)
    more = {"bert__pooler__dense__weight": np.ones((24, 24), "f4"),
            "cls__seq_relationship__weight": np.ones((2, 24), "f4"),
            "cls__predictions__decoder__weight": stored["bert.embeddings.word_embeddings.weight"],
            "cls__predictions__decoder__bias": stored["cls.predictions.bias"],
            "bert__embeddings__position_ids": np.arange(17)[None]}  # fmt: skip
    renamed(path, lambda key: key, **more)
    check_file("BertForMaskedLM", path, c)
    save_file({**load_file(path / "model.safetensors"), "bert.other.weight": np.ones(3, "f4")},
              path / "model.safetensors", {"format": "pt"})  # fmt: skip
    with pytest.raises(TensorMismatch, match=r"unexpected: bert\.other\.weight"):
        gw.open(path, tokenizer=False)


def test_the_base_model_opens_a_file_with_and_without_its_prefix(tmp_path: Path) -> None:
    c = saved("BertModel")
    assert not any(key.startswith("bert.") for key in load_file(c.path / "model.safetensors"))
    path = copied("BertModel", tmp_path)
    renamed(path, lambda key: f"bert.{key}")
    check_file("BertModel", path, c)


def test_a_config_without_classes_stands_for_the_base_model(tmp_path: Path) -> None:
    path = copied("BertModel", tmp_path)
    edit_config(path, architectures=None)
    assert gw.open(path, tokenizer=False).program.output_names() == ("last_hidden_state", "pooler_output")


def test_an_untied_head_has_a_matrix_and_a_bias_of_its_own(tmp_path: Path) -> None:
    c = make(tmp_path / "untied", SAMPLES["BertForMaskedLM"], tie_word_embeddings=False)
    m = check_file("BertForMaskedLM", c.path, c)
    assert m.keys["lm_head.bias"] == "cls.predictions.decoder.bias"


def test_copies_of_tied_weights_follow_them_into_an_export(tmp_path: Path) -> None:
    """transformers unties weights of which a file has two different ones."""
    path = copied("BertForMaskedLM", tmp_path)
    stored = load_file(path / "model.safetensors")
    renamed(path, lambda key: key, cls__predictions__decoder__bias=stored["cls.predictions.bias"],
            cls__predictions__decoder__weight=stored["bert.embeddings.word_embeddings.weight"])  # fmt: skip
    m = gw.open(path, tokenizer=False)
    with m.edit("another embedding and bias") as e:
        e.set_weight("embed.weight", lambda w: 1.5 * w)
        e.set_weight("lm_head.bias", lambda w: w + 1)
    m.export(tmp_path / "out", check="none", timed=False)
    module = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    written = dataclasses.replace(saved("BertForMaskedLM"), module=module)
    feeds = feeds_of(written.sample, m.program.input_names())
    close(m(**feeds), written.outputs(feeds), 1e-6)
