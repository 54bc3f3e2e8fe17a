"""Params in one file: every dtype, all or none, everything that does not fit in one error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import graphwright as gw
from graphwright.array import bfloat16, from_numpy
from graphwright.autograd import tensor
from graphwright.files import UnreadableFile
from graphwright.program import Builder, ParameterMismatch, Program
from graphwright.safetensors import CheckpointError


def build(seed: int = 0, *, wide: int = 3, extra: bool = False) -> Program:
    rng = np.random.default_rng(seed)
    b = Builder("net")
    x = b.input("x", (2, 4))
    w = b.param("fc.w", rng.normal(size=(wide, 4)).astype("f4"))
    half = b.param("half", tensor(rng.normal(size=(wide,)).astype("f4")).to(bfloat16).data)
    b.param("count", rng.integers(0, 9, (2,)), trainable=False)
    double = b.param("double", rng.normal(size=()))
    h = b.add(b.linear(x, w), b.cast(half, dtype="float32"))
    if extra:
        h = b.mul(h, b.param("extra", np.float32(2.0)))
    b.output(b.mul(h, b.cast(double, dtype="float32")), "y")
    return b.build()


def bits(p: Program) -> dict[str, bytes]:
    return {key: v.data.tobytes() for key, v in p.weights.items()}


def test_all_dtypes_round_trip(tmp_path: Path) -> None:
    p, q = build(0), build(1)
    p.save_parameters(tmp_path / "w.safetensors")
    assert bits(p) != bits(q)
    assert q.load_parameters(tmp_path / "w.safetensors") == ([], [])
    assert bits(p) == bits(q)
    assert p.run(x=np.ones((2, 4), np.float32))["y"].tobytes() == q.run(x=np.ones((2, 4), np.float32))["y"].tobytes()


def test_safetensors_reads_and_writes_the_same_file(tmp_path: Path) -> None:
    b = Builder()
    b.output(b.neg(b.param("w", np.arange(6, dtype=np.float32).reshape(2, 3))), "y")
    p = b.build()
    p.save_parameters(tmp_path / "w.safetensors")
    assert np.array_equal(load_file(tmp_path / "w.safetensors")["w"], p.weights["w"].data.to_numpy())
    save_file({"w": np.full((2, 3), 7, np.float32)}, tmp_path / "other.safetensors")
    p.load_parameters(tmp_path / "other.safetensors")
    assert p.weights["w"].data.to_numpy().min() == 7


def test_all_mismatches_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    build(1, wide=5, extra=True).save_parameters(path)
    p = build()
    before = bits(p)
    with pytest.raises(ParameterMismatch) as caught:
        p.load_parameters(path)
    for text in ("fc.w: expected f32[3, 4], got F32[5, 4]", "half: expected", "extra: not a param"):
        assert text in str(caught.value)
    assert bits(p) == before
    with pytest.raises(ParameterMismatch, match=r"fc\.w"):
        p.load_parameters(path, strict=False)  # a shape is never let through
    q = build(0, extra=True)
    build(1).save_parameters(path)
    with pytest.raises(ParameterMismatch, match="extra: missing"):
        q.load_parameters(path)
    assert q.load_parameters(path, strict=False) == (["extra"], [])
    assert q.weights["extra"].data.item() == 2.0
    assert q.weights["fc.w"].data.tobytes() == build(1).weights["fc.w"].data.tobytes()


@pytest.mark.parametrize("damage", ["short", "header", "none"])
def test_a_damaged_file_changes_nothing(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    p = build(1)
    p.save_parameters(path)
    whole = path.read_bytes()
    if damage == "none":
        path.unlink()
    else:
        path.write_bytes(whole[:-3] if damage == "short" else b"\xff" * 8 + whole[8:])
    q = build(0)
    before = bits(q)
    with pytest.raises((CheckpointError, UnreadableFile)):
        q.load_parameters(path)
    assert bits(q) == before


def test_loading_parameters_leaves_forks_and_undo_entries_unchanged(tmp_path: Path) -> None:
    p = build()
    build(1).save_parameters(tmp_path / "w.safetensors")
    twin, before = p.fork(), bits(p)
    p.load_parameters(tmp_path / "w.safetensors")
    assert bits(twin) == before != bits(p)
    array = from_numpy(np.zeros((3, 4), np.float32))
    with p.edit("zero") as e:
        e.set_weight("fc.w", array)
    p.undo()
    assert p.weights["fc.w"].data.tobytes() == build(1).weights["fc.w"].data.tobytes()


def test_named_parameters_have_params_only() -> None:
    p = gw.open("bundled").program
    found = dict(p.named_parameters())
    assert "rope.frequencies" in p.weights
    assert found.keys() == p.weights.keys() - {"rope.frequencies"}
    assert all(found[key] is p.weights[key] for key in found)
    assert sum(v.numel() for v in found.values()) == gw.open("bundled").inspect().parameters
