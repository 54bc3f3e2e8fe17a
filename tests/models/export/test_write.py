"""What leaves unedited leaves byte for byte; after an edit exactly the edited tensors differ."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import graphwright as gw
import safetensors
from graphwright.array import dtype, from_numpy
from graphwright.models import ExportError
from graphwright.models.export.write import companion_files, rounded, tensor_items, write_model
from graphwright.models.open import config_from, create
from graphwright.safetensors import Checkpoint

FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 14},
}
STORED = {"float32": "float32", "bfloat16": "bfloat16", "sharded": "float32"}
COMPANIONS = {
    "tokenizer.json": b'{"not": "parsed"}',
    "chat_template.jinja": b"{{ x }}\r\n",
    "LICENSE": b"\xff\xfe bytes",
    "special_tokens_map.json": b"{ }",
    "tokenizer.model": b"\x00\x01",
}


@pytest.fixture(scope="module", params=[(f, s) for f in FAMILIES for s in STORED], ids="-".join)
def source(request, tmp_path_factory) -> Path:
    family, stored = request.param
    directory = tmp_path_factory.mktemp(f"{family}-{stored}")
    shard = "60KB" if stored == "sharded" else "5GB"
    checkpoints.make(directory, family, dtype=STORED[stored], shard=shard, **FAMILIES[family])
    for name, content in COMPANIONS.items():
        (directory / name).write_bytes(content)
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


def payloads(directory: Path) -> dict[str, bytes]:
    with Checkpoint(directory) as c:
        return {key: bytes(c.bytes(key)) for key in c}


def written(m, directory: Path, **options) -> Path:
    directory.mkdir()
    write_model(m, directory, **options)
    return directory


def test_an_unedited_model_is_written_byte_for_byte(source, tmp_path):
    m = gw.open(source, tokenizer=False)
    assert files(written(m, tmp_path / "out")) == files(source)


def test_one_edited_weight_changes_one_tensor_and_one_file(source, tmp_path):
    m = gw.open(source, tokenizer=False)
    key = "model.layers.1.mlp.up_proj.weight"
    with m.program.edit("scale") as e:
        e.set_weight(key, lambda w: w * 2)
    out = written(m, tmp_path / "out")
    before, after = payloads(source), payloads(out)
    assert [k for k in before if before[k] != after[k]] == [key]
    assert list(before) == list(after)
    assert sum(a != b for a, b in zip(files(source).values(), files(out).values(), strict=True)) == 1
    expected = load_file(Checkpoint(source).file_of(key).path)[key] * 2
    assert torch.equal(load_file(Checkpoint(out).file_of(key).path)[key], expected)


def test_an_undone_edit_leaves_no_trace_in_the_files(source, tmp_path):
    m = gw.open(source, tokenizer=False)
    with m.program.edit("scale") as e:
        e.set_weight("model.norm.weight", lambda w: w * 2)
    m.program.undo()
    assert files(written(m, tmp_path / "out")) == files(source)


@pytest.fixture
def odd_bits(made, tmp_path) -> Path:
    """A bf16 file with NaN payloads, infinities and negative zeros, and a tensor that no node reads."""
    directory = tmp_path / "odd"
    checkpoints.make(directory, "llama", dtype="bfloat16")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    bits = tensors["model.norm.weight"].view(torch.int16)
    bits[:6] = torch.tensor([0x7F81, -0x7F, 0x7FC0, 0x7F80, -0x8000, 0x0001], dtype=torch.int16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.tensor([1.0, 0.1])
    save_file(tensors, file, metadata={"format": "pt", "note": "kept"})
    return directory


def test_nan_payloads_and_negative_zeros_are_preserved(odd_bits, tmp_path):
    m = gw.open(odd_bits)
    assert files(written(m, tmp_path / "a")) == files(odd_bits)
    with m.program.edit("touch the same file") as e:
        e.set_weight("model.embed_tokens.weight", lambda w: w + 1)
    out = written(m, tmp_path / "b")
    before, after = payloads(odd_bits), payloads(out)
    assert [k for k in before if before[k] != after[k]] == ["model.embed_tokens.weight"]
    with safetensors.safe_open(out / "model.safetensors", "pt") as f:
        assert f.metadata()["note"] == "kept"


def test_a_tied_copy_of_the_head_is_written_like_the_embedding(tmp_path):
    directory = tmp_path / "tied"
    checkpoints.make(directory, "llama", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    m = gw.open(directory)
    assert files(written(m, tmp_path / "same")) == files(directory)
    with m.program.edit("embedding") as e:
        e.set_weight("model.embed_tokens.weight", lambda w: w * 1.25)
    for name, options in {"edited": {}, "low": {"dtype": "bfloat16"}}.items():
        found = load_file(written(m, tmp_path / name, **options) / "model.safetensors")
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "edited", attn_implementation="eager")
    ids = checkpoints.some_ids((1, 7))
    assert checkpoints.relative(theirs(torch.tensor(ids)).logits.detach().numpy(), m.logits(ids)) < 2e-5


def test_swapped_keys_keep_their_own_bytes(made, tmp_path):
    m = gw.open(made("llama").path)
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    p = m.program
    with p.edit("swap two keys") as e:
        for path, key in (
            ("layers.0.mlp.up.weight", "for.now"),
            ("layers.1.mlp.up.weight", first),
            ("layers.0.mlp.up.weight", second),
        ):
            e.set_attr(path, key=key)
    before, after = payloads(made("llama").path), payloads(written(m, tmp_path / "out"))
    assert (after[first], after[second]) == (before[second], before[first])
    assert {k: v for k, v in after.items() if k not in (first, second)} == {
        k: v for k, v in before.items() if k not in (first, second)
    }


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_rounding_matches_torch(made, tmp_path, target):
    m = gw.open(made("llama").path)
    found = load_file(written(m, tmp_path / "out", dtype=target) / "model.safetensors")
    for key, tensor in load_file(made("llama").path / "model.safetensors").items():
        assert torch.equal(found[key], tensor.to(getattr(torch, target)))


@pytest.mark.parametrize(("value", "fits"), [(65504.0, True), (65519.0, True), (65520.0, False), (-131008.0, False)])
def test_overflow_of_float16_is_refused_naming_the_key(value, fits):
    array = from_numpy(np.array([1.0, value, np.inf, np.nan], np.float32))
    if fits:
        assert abs(rounded("a.key", array, dtype("float16")).to_numpy()[1]) == 65504
    else:
        with pytest.raises(ExportError, match=r"a\.key") as error:
            rounded("a.key", array, dtype("float16"))
        assert error.value.got == value


def test_float64_that_overflows_float32_is_refused():
    with pytest.raises(ExportError):
        rounded("k", from_numpy(np.array([1e300])), dtype("float32"))


def test_models_of_many_shards_are_written(made, tmp_path):
    m = gw.open(checkpoints.make(tmp_path / "in", "llama").path)
    assert m.checkpoint is not None
    m.checkpoint.close()
    fresh = create(m.config)
    out = written(fresh, tmp_path / "out", max_shard_size="50KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays(fresh))
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 4
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    ids = checkpoints.some_ids((1, 7))
    assert checkpoints.relative(theirs(torch.tensor(ids)).logits.detach().numpy(), fresh.logits(ids)) < 2e-5


def _files(folder):
    checkpoint = gw.open(folder).checkpoint
    assert checkpoint is not None
    return [f.path.name for f in checkpoint.files]


def test_a_requested_shard_size_makes_new_shards(made, tmp_path):
    """One file becomes many, and many one; by default they stay as they were."""
    source = made("llama")
    m = gw.open(source.path)
    many = written(m, tmp_path / "many", max_shard_size="50KB")
    again = gw.open(many)
    assert again.checkpoint is not None
    assert len(again.checkpoint.files) > 4
    assert all(sum(i.nbytes for i in f.infos) <= 50_000 or len(f.infos) == 1 for f in again.checkpoint.files)
    assert _files(written(again, tmp_path / "same")) == [f.path.name for f in again.checkpoint.files]
    planned = set(again.export_plan().levels[0].files) - {"README.md", "receipt.json"}
    assert planned == {f.name for f in (tmp_path / "same").iterdir()}
    one = written(again, tmp_path / "one", max_shard_size="1GB")
    assert _files(one) == ["model.safetensors"]
    assert gw.open(one).program.hash() == m.program.hash()


def arrays(m):
    return [m.program.weights.array(m.program.key(n)) for n in m.program.params()]


def test_a_created_model_copies_no_file_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").write_text("of another thing")
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **checkpoints.SIZES, "vocab_size": 256}
    out = written(create(config_from(fields)), tmp_path / "out")
    assert sorted(f.name for f in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    ids = transformers.AutoTokenizer.from_pretrained(out)("héllo").input_ids
    assert ids == list("héllo".encode())


def test_companion_files_exclude_weights_and_directories(tmp_path):
    for name in ("tokenizer.json", "vocab.safetensors", "pytorch_model.bin", "notes.txt", "LICENSE.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "tokenizer_dir").mkdir()
    assert [f.name for f in companion_files(tmp_path)] == ["LICENSE.txt", "tokenizer.json"]


def test_tensors_can_be_limited_to_some_keys(made):
    m = gw.open(made("llama").path)
    assert [t.key for t in tensor_items(m, only={"model.norm.weight"})] == ["model.norm.weight"]
