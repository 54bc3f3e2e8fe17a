"""Opening: what fits, what does not, and that nothing is read before it is needed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FEATURES, Made, edit_config, make, some_ids
from safetensors.torch import load_file, save_file

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models import ConfigError, ModelNotFound, TensorMismatch, UnsupportedArchitecture, UnsupportedDType
from graphwright.models.architectures.registry import architectures
from graphwright.models.open import inspect_path
from graphwright.safetensors import HeaderError

IDS = some_ids((1, 9))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def touched(m: gw.Model) -> list[str]:
    """Keys whose bytes were asked for."""
    return [k for k in m.program.weights if m.program.weights.array(k).storage.touched]


def test_directory_and_file_open_equally(made: Callable[[str], Made]) -> None:
    path = made("llama").path
    a, b = gw.open(path), gw.open(str(path / "model.safetensors"))
    np.testing.assert_array_equal(a.logits(IDS), b.logits(IDS))


def test_opening_reads_no_weight_before_first_use(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    str(m.inspect())
    m.program.structure_hash()
    stored = set(m.keys.values())
    assert stored.isdisjoint(touched(m))
    m.logits(IDS)
    assert stored <= set(touched(m))


def test_missing_extra_and_transposed_are_listed_together(copy: Callable[[str], Path]) -> None:
    path = copy("llama")

    def damage(t: dict[str, torch.Tensor]) -> None:
        del t["model.norm.weight"]
        t["model.layers.0.self_attn.rotary"] = torch.zeros(3)
        t["model.layers.1.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"].T

    rewrite(path, damage)
    with pytest.raises(TensorMismatch) as caught:
        gw.open(path)
    error = caught.value
    assert error.missing == ["model.norm.weight"]
    assert error.unexpected == ["model.layers.0.self_attn.rotary"]
    assert len(error.misshapen) == 1
    assert "mlp x hidden" in error.misshapen[0]
    assert "[76, 48]" in error.misshapen[0]
    assert "[48, 76]" in error.misshapen[0]
    assert error.where == str(path)
    assert error.fix is not None
    assert all(text in str(error) for text in ("model.norm.weight", "rotary", "up_proj"))


def test_hundreds_of_findings_are_shortened(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, num_hidden_layers=60)
    with pytest.raises(TensorMismatch, match=r"\.\.\. \d+ more") as caught:
        gw.open(path)
    assert len(caught.value.missing) == 57 * 9


def test_derived_tensors_of_old_files_are_ignored(made: Callable[[str], Made], copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    rewrite(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}))
    np.testing.assert_array_equal(gw.open(path).logits(IDS), gw.open(made("llama").path).logits(IDS))


def test_a_checkpoint_with_the_class_of_another_family_is_refused(copy: Callable[[str], Path]) -> None:
    path = copy("qwen3")
    edit_config(path, architectures=["LlamaForCausalLM"], model_type="llama")
    with pytest.raises(TensorMismatch) as caught:
        gw.open(path)
    assert "model.layers.0.self_attn.q_norm.weight" in caught.value.unexpected


def test_a_config_of_many_layers_is_refused_without_listing_them_all(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, num_hidden_layers=10**5)
    with pytest.raises(TensorMismatch) as caught:
        gw.open(path)
    assert len(caught.value.missing) == 1001
    assert caught.value.unexpected == []


@pytest.mark.parametrize("change", ["without", "twice"])
def test_missing_and_doubled_key_prefixes_are_reported(
    change: str, made: Callable[[str], Made], copy: Callable[[str], Path]
) -> None:
    path = copy("llama")

    def rename(t: dict[str, torch.Tensor]) -> None:
        old = dict(t)
        t.clear()
        t.update({k.removeprefix("model.") if change == "without" else f"model.{k}": v for k, v in old.items()})

    rewrite(path, rename)
    m = gw.open(path)
    key = "layers.0.mlp.up_proj.weight" if change == "without" else "model.model.layers.0.mlp.up_proj.weight"
    assert m.program.key(m.program.node("layers.0.mlp.up.weight")) == key
    np.testing.assert_array_equal(m.logits(IDS), gw.open(made("llama").path).logits(IDS))


def test_a_tied_checkpoint_may_contain_the_head(made: Callable[[str], Made], copy: Callable[[str], Path]) -> None:
    path = copy("llama-tied")
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    np.testing.assert_array_equal(gw.open(path).logits(IDS), gw.open(made("llama-tied").path).logits(IDS))


def test_a_tied_checkpoint_with_another_head_is_reported(
    made: Callable[[str], Made], copy: Callable[[str], Path]
) -> None:
    path = copy("llama-tied")
    assert gw.open(path).validate().ok
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert gw.open(path).validate().ok
    rewrite(path, lambda t: t["lm_head.weight"][3:5].neg_())
    m = gw.open(path)
    (finding,) = m.validate().mismatches
    assert (finding.kind, finding.where) == ("tied_mismatch", "lm_head.weight")
    assert finding.got == "2 rows differ, the first is 3"
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        theirs = stock(torch.as_tensor(IDS)).logits.numpy()
    np.testing.assert_array_equal(m.logits(IDS), gw.open(made("llama-tied").path).logits(IDS))
    assert not np.allclose(m.logits(IDS), theirs, atol=1e-4)  # as the finding says
    edit_config(path, tie_word_embeddings=False)
    np.testing.assert_allclose(gw.open(path).logits(IDS), theirs, atol=1e-4)


def test_an_untied_checkpoint_without_a_head_is_refused(copy: Callable[[str], Path]) -> None:
    path = copy("llama-tied")
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(TensorMismatch) as caught:
        gw.open(path)
    assert caught.value.missing == ["lm_head.weight"]


def test_unknown_classes_name_similar_ones(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, architectures=["LlamaForCausalLN"])
    with pytest.raises(UnsupportedArchitecture) as caught:
        gw.open(path)
    assert caught.value.got == "LlamaForCausalLN"
    assert "LlamaForCausalLM" in str(caught.value.expected)
    assert caught.value.where == str(path / "config.json")
    assert "register" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("FNetForMaskedLM", None),
        ("FNetModel", None),
        ("T5ForConditionalGeneration", None),
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("MistralModel", "MistralForCausalLM"),
        ("Qwen3ForCausalLm", "Qwen3ForCausalLM"),
    ],
)
def test_only_misspelled_classes_get_a_suggestion(name: str, near: str | None, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, architectures=[name])
    with pytest.raises(UnsupportedArchitecture) as caught:
        gw.open(path)
    families = ", ".join(sorted({a.name for a in architectures().values()}))
    assert caught.value.expected == families if near is None else near in str(caught.value.expected).split(", ")
    assert near is None or caught.value.expected != families


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_unsupported_weight_dtypes_are_refused(kind: torch.dtype, copy: Callable[[str], Path]) -> None:
    path, key = copy("llama"), "model.layers.2.mlp.up_proj.weight"
    rewrite(path, lambda t: t.update({key: t[key].to(kind)}))
    with pytest.raises(UnsupportedDType) as caught:
        gw.open(path)
    assert caught.value.where == key
    assert caught.value.got in ("I8", "I64", "F8_E4M3")
    assert "BF16" in str(caught.value.expected)


def test_truncated_files_are_refused(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for kept in (len(whole) - 7, 3000):
        file.write_bytes(whole[:kept])
        with pytest.raises(HeaderError, match="truncated"):
            gw.open(path)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"compute": "int64"}, {"compute": "keep"}, {"dtype": "f33"}])
def test_unsupported_dtype_options_are_refused(options: dict[str, Any], made: Callable[[str], Made]) -> None:
    with pytest.raises(UsageError):
        gw.open(made("llama").path, **options)


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        gw.open(tmp_path / "nothing")
    assert caught.value.where == str(tmp_path / "nothing")
    assert "downloaded" in str(caught.value.fix)


def test_dtype_converts_the_weights_and_the_original(tmp_path: Path) -> None:
    family, fields = FEATURES["llama"]
    make(tmp_path, family, dtype="bfloat16", **fields)
    kept, wide = gw.open(tmp_path), gw.open(tmp_path, dtype="float32")
    assert wide.program.spec("layers.0.attn.q.weight").dtype is gw.float32
    np.testing.assert_array_equal(kept.logits(IDS), wide.logits(IDS))
    with wide.program.edit("cut") as e:
        e.cut(wide.program.in_edges("layers.1.out")[1])
    assert wide.original.hash() == gw.open(tmp_path, dtype="float32").program.hash() != wide.program.hash()


def test_changed_weights_leave_the_file_alone(made: Callable[[str], Made]) -> None:
    file = made("llama").path / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).digest()
    m = gw.open(made("llama").path)
    first = m.logits(IDS)
    with m.program.edit("set") as e:
        e.set_weight("layers.0.mlp.up.weight", lambda w: w * 2)
    for p in m.parameters():  # as an optimizer does
        p.assign(p * 0.5)
    assert not np.array_equal(m.logits(IDS), first)
    assert hashlib.sha256(file.read_bytes()).digest() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 1 << 28),
        ("head_dim", 1 << 63),
        ("rope_theta", 0),
        ("rope_theta", -5),
        ("rope_parameters", 0),
        ("sliding_window", 0),
        ("sliding_window", 1 << 63),
        ("eos_token_id", -5),
        ("eos_token_id", 2.5),
        ("eos_token_id", [1, "2"]),
        ("bos_token_id", [1]),
        ("pad_token_id", -2),
        ("architectures", 0),
    ],
)
def test_invalid_config_field_is_named(field: str, value: Any, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, **{field: value})
    start = perf_counter()
    with pytest.raises(ConfigError, match=field):
        gw.open(path)
    assert perf_counter() - start < 1  # a head_dim of 2^28 took 17 s for its RoPE frequencies


def test_end_ids_outside_the_vocabulary_are_noted(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, eos_token_id=1 << 20)
    assert "eos_token_id 1048576 is outside the vocabulary" in " ".join(gw.open(path).notes)


def test_auto_map_is_noted_and_not_run(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "evil.py").write_text("raise SystemExit('was run')")
    edit_config(path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert any("auto_map" in note for note in gw.open(path).notes)


_LOOK = """
import resource, sys
import graphwright as gw
assert not {"torch", "numba", "transformers", "tokenizers"} & set(sys.modules), "import graphwright"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
m = gw.open(sys.argv[1])
text = str(m.inspect())
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
assert "80 layers" in text and "bfloat16" in text, text
assert m.inspect().parameters == 70_553_706_496, m.inspect().parameters
assert not {"torch", "numba", "transformers", "tokenizers"} & set(sys.modules), "looking"
assert not any(m.program.weights.array(k).storage.touched for k in m.keys.values())
print(grown)
"""


def test_opening_a_70b_header_reads_no_payload(tmp_path: Path) -> None:
    """A sparse file with the header of Llama 3 70B; no page of its 141 GB of payload is there to be read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    from graphwright.models import architectures
    from graphwright.models.architectures.architecture import Config

    family = architectures()["llama"]
    header, at = {}, 0
    for _, key, shape, _ in family.weights(family.read(Config.read(tmp_path))):
        size = 2 * int(np.prod(shape))
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    done = subprocess.run([sys.executable, "-c", _LOOK, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 1 << 20


def test_opening_a_json_file_suggests_its_directory(made: Callable[[str], Made]) -> None:
    path = made("llama").path
    with pytest.raises(ModelNotFound) as caught:
        gw.open(path / "config.json")
    assert caught.value.fix == f"give its directory, {path}"


@pytest.mark.deep
def test_opening_generated_code_raises_with_the_fix(proved: Callable[[str], Any]) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"model\.save"):
        gw.open(proved("edited")[1])


def test_without_a_tokenizer_the_file_to_add_is_named(model: gw.Model) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        model.generate("text")


def test_notebooks_show_a_model_and_its_picture(model: gw.Model) -> None:
    assert "Model(llama" in model._repr_html_()
    assert "<svg" in model._repr_html_()


@pytest.mark.parametrize("path", [3, None, b"x", "a\0b"])
def test_invalid_path_types_are_refused(path):
    with pytest.raises(UsageError, match="path"):
        gw.open(path)


def test_a_path_named_bundled_is_reached_and_never_hidden(tmp_path, monkeypatch):
    inside = gw.open("bundled").program.hash()
    monkeypatch.chdir(tmp_path)
    model = gw.open("bundled")
    with model.program.edit("other") as e:
        e.set_weight(model.program.key(model.program.params()[0]), lambda w: 0 * w)
    model.save("bundled")
    for name in ("bundled", Path("./bundled")):
        with pytest.raises(UsageError, match="both a path here and the name") as caught:
            gw.open(name)
    assert "./bundled" in str(caught.value.fix)
    assert gw.open("./bundled").program.hash() == model.program.hash() != inside
    assert gw.open(tmp_path / "bundled").program.hash() == model.program.hash()


def test_files_and_pipes_are_refused_by_name(tmp_path: Path) -> None:
    note, pipe = tmp_path / "notes.txt", tmp_path / "pipe"
    note.write_text("text")
    os.mkfifo(pipe)
    for path, kind in ((note, "file"), (pipe, "pipe or device")):
        for call in (gw.open, inspect_path):
            with pytest.raises(ModelNotFound, match=f"this {kind} is not a model") as caught:
                call(path)
            assert caught.value.where == str(path)
