"""Looking at a model: figures against counts made another way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Made, edit_config, make

import graphwright as gw
from graphwright import experts
from graphwright.models import ConfigError, UnsupportedArchitecture, inspect_path
from graphwright.models.inspect import flops, kv_bytes_per_token, weight_bytes_per_token
from graphwright.ops import get


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_counts_equal_transformers(name: str, made: Callable[[str], Made]) -> None:
    look, theirs = gw.open(made(name).path).inspect(), made(name).model
    assert look.parameters == sum(p.numel() for p in theirs.parameters())
    assert look.nbytes == 4 * look.parameters
    assert look.dtypes == {"float32": look.nbytes}
    assert (look.family, look.layers, look.tied) == (name.split("-")[0], 3, name == "llama-tied")
    assert {t.key: t.shape for t in look.tensors} == {k: tuple(v.shape) for k, v in theirs.named_parameters()}


def test_flops_per_token_count_the_linear_layers(model: gw.Model) -> None:
    """Two per weight and token; norms, activations and attention add less than a tenth here."""
    p = model.program
    linear = 2 * sum(
        t.shape[0] * t.shape[1] for t in model.inspect().tensors if len(t.shape) == 2 and "embed" not in t.path
    )
    assert linear < model.inspect().flops_per_token < 1.1 * linear
    assert flops(p, {"B": 2, "T": 5}) > 10 * linear
    before = model.inspect().flops_per_token
    with p.edit("cut") as e:
        e.cut(p.in_edges("layers.1.out")[1])
    assert before - model.inspect().flops_per_token > 2 * 3 * 48 * 76


def test_casts_of_stored_weights_move_bytes_and_compute_nothing(tmp_path: Path) -> None:
    looks = []
    for dtype in ("float32", "bfloat16"):
        make(tmp_path / dtype, "llama", dtype=dtype)
        looks.append(gw.open(tmp_path / dtype))
    wide, low = (m.inspect().flops_per_token for m in looks)
    assert wide == low
    p = looks[1].program
    cast = p.node("layers.0.mlp.up.weight.cast")
    found = get("cast").cost([p.spec(v) for v in p.operands(cast)], [p.spec(cast)], {})
    assert (found.flops, found.read, found.write) == (0, p.spec(cast).size * 2, p.spec(cast).size * 4)


def test_kv_bytes_per_token_match_the_config(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    assert m.inspect().kv_bytes_per_token == 3 * 2 * (10 + 10) * 4
    assert kv_bytes_per_token(gw.open(made("llama").path, compute="bfloat16").program) == 3 * 2 * 20 * 2
    with m.program.edit("cut") as e:
        e.cut(m.program.in_edges("layers.1.mid")[1])
    assert m.inspect().kv_bytes_per_token == 2 * 2 * 20 * 4


def test_weight_bytes_are_counted_in_the_dtype_that_kernels_read(tmp_path: Path) -> None:
    make(tmp_path, "llama", dtype="bfloat16")
    m = gw.open(tmp_path)
    table = 97 * 48
    rest = m.inspect().parameters - table
    assert weight_bytes_per_token(m.program) == 4 * rest + 2 * 48  # one row of the table, in the file's dtype
    norms = 7 * 48  # vectors are widened once
    assert weight_bytes_per_token(m.program, narrow=True) == 2 * (rest - norms) + 4 * norms + 2 * 48
    low = gw.open(tmp_path, compute="bfloat16")
    assert weight_bytes_per_token(low.program) == 2 * rest + 2 * 48


def test_tree_folds_equal_layers(model: gw.Model) -> None:
    text = str(model.inspect())
    assert "0 .. 2 (3 equal, one shown)" in text
    assert "100.0 %" not in text
    with model.program.edit("prune") as e:
        for n in ("gate", "up"):
            e.set_weight(f"layers.1.mlp.{n}.weight", lambda w: w[:70])
        e.set_weight("layers.1.mlp.down.weight", lambda w: w[:, :70])
    text = str(model.inspect())
    assert "equal" not in text
    assert model.inspect().to_json()["layers"] == 3
    assert json.loads(json.dumps(model.inspect().to_json()))["tensors"][0]["dtype"] == "float32"


def test_unknown_class_still_lists_its_tensors(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    known = inspect_path(path)
    assert known.family == "llama"
    edit_config(path, architectures=["SomethingElse"])
    with pytest.raises(UnsupportedArchitecture):
        gw.open(path)
    look = inspect_path(path)
    assert look.family == "unknown class SomethingElse"
    assert (look.parameters, look.nbytes, look.dtypes) == (known.parameters, known.nbytes, known.dtypes)
    assert {t.key for t in look.tensors} == {t.key for t in known.tensors}
    assert all(word in str(look) for word in ("SomethingElse", "self_attn", "layers", "float32"))


def test_unknown_dtypes_are_shown_by_their_tag(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, architectures=["SomethingElse"])
    header = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [3, 5], "data_offsets": [0, 15]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(15))
    look = inspect_path(path / "model.safetensors")
    assert (look.dtypes, look.parameters) == ({"F8_E8M0": 15}, 15)


def test_inspecting_a_damaged_config_raises(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        inspect_path(path)


def test_inspecting_reads_no_weight(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    m.inspect()
    weight_bytes_per_token(m.program)
    stored = [m.program.weights.array(k).storage for k in m.keys.values()]
    assert not any(s.touched for s in stored)
    m.logits(np.array([1]))
    assert all(s.touched for s in stored)


def test_the_repr_of_an_inspection_shows_the_facts(made: Callable[[str], Made]) -> None:
    look = gw.open(made("llama").path).inspect()
    assert repr(look) == str(look) == look.text()


def test_a_mixture_shows_experts_active_parameters_and_twice_the_operations_of_one_expert():
    dense, model = gw.open("bundled"), gw.open("bundled")
    experts.upcycle(model, 4, 2)
    before, found = dense.inspect(), model.inspect()
    mlp = 3 * 192 * 512
    assert [(m.experts, m.k, m.parameters) for m in found.mixtures] == [(4, 2, 4 * mlp)] * 4
    assert found.parameters == before.parameters + 4 * (3 * mlp + 4 * 192)
    assert found.active_parameters == before.parameters + 4 * (mlp + 4 * 192)
    assert found.flops_per_token - before.flops_per_token == pytest.approx(4 * 2 * (mlp + 4 * 192), rel=0.01)
    assert "4 routed layers of 4 experts, 2 per token" in str(found)
    assert before.active_parameters == before.parameters
    assert not before.mixtures
