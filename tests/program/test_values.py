"""`gw.save` and `gw.load` in torch's spelling: every value comes back, files hold no code, damage is found."""

from __future__ import annotations

from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import graphwright as gw
from graphwright.errors import GraphwrightError, UsageError
from graphwright.safetensors import UnsafeFile
from values import array_of


def same(a: Any, b: Any) -> bool:
    if isinstance(a, gw.Tensor):
        return isinstance(b, gw.Tensor) and a.spec == b.spec and array_of(a).tobytes() == array_of(b).tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and [*a] == [*b] and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (isnan(a) and isnan(b)))


VALUES = [
    3, "text", None, True, 2.5, inf, -inf, nan, [], {}, (), [1, [2, (3,)]], {"a": {1: "x", None: 2.0, (1, 2): []}},
    gw.arange(4), gw.zeros((0, 3)), gw.tensor(2.0, dtype=gw.bfloat16), [gw.ones(2).bool(), {"w": gw.ones(3).half()}],
    {"model": {"a.b": gw.ones(2)}, "model.a.b": gw.zeros(1)}, {"": gw.ones(1)}, ["tensor", "list"], ["dict"],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back(value: Any, tmp_path: Path) -> None:
    gw.save(value, tmp_path / "v.safetensors")
    assert same(value, gw.load(tmp_path / "v.safetensors"))


def test_a_checkpoint_of_a_training_comes_back(tmp_path: Path) -> None:
    net = gw.nn.Sequential(gw.nn.Linear(2, 3), gw.nn.BatchNorm1d(3))
    opt = gw.optim.Adam(net.parameters())
    schedule = gw.optim.lr_scheduler.StepLR(opt, 2)
    net(gw.randn(4, 2)).sum().backward()
    opt.step()
    schedule.step()
    saved = {"epoch": 3, "net": net.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}
    gw.save(saved, tmp_path / "run.safetensors")
    found = gw.load(tmp_path / "run.safetensors", map_location="cpu", weights_only=True)
    assert same(saved, found)
    net.load_state_dict(found["net"])
    opt.load_state_dict(found["opt"])
    schedule.load_state_dict(found["schedule"])


def test_a_state_dict_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    net = gw.nn.Linear(2, 3)
    gw.save(net.state_dict(), tmp_path / "net.safetensors")
    other = load_file(tmp_path / "net.safetensors")
    assert all(np.array_equal(other[n], v.numpy()) for n, v in net.state_dict().items())


def test_a_tensor_used_twice_is_written_once(tmp_path: Path) -> None:
    w = gw.ones(1000)
    gw.save([w, w], tmp_path / "two.safetensors")
    assert (tmp_path / "two.safetensors").stat().st_size < 8000
    a, b = gw.load(tmp_path / "two.safetensors")
    assert a is b


def test_other_values_are_refused_before_writing(tmp_path: Path) -> None:
    ring: list[Any] = []
    ring.append(ring)
    for value, text in (({"net": gw.nn.Linear(1, 1)}, "state_dict"), ([object()], "dicts, lists"), (ring, "deeply")):
        with pytest.raises(UsageError, match=text):
            gw.save(value, tmp_path / "v.safetensors")
    with pytest.raises(UnsafeFile):
        gw.save({}, tmp_path / "v.pt")
    assert not list(tmp_path.iterdir())


def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UnsafeFile, match="safetensors"):
        gw.load(tmp_path / "a.pt")
    gw.save([1, gw.ones(2)], tmp_path / "v.safetensors")
    data = (tmp_path / "v.safetensors").read_bytes()
    for old, new in ((b'\\"list\\"', b'\\"lisp\\"'), (b'\\"1\\"', b'\\"7\\"'), (b'\\"tensor\\"', b"[[],[],1]  ")):
        assert old in data
        (tmp_path / "w.safetensors").write_bytes(data.replace(old, new))
        with pytest.raises(GraphwrightError):
            gw.load(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(data[:-3])
    with pytest.raises(GraphwrightError):
        gw.load(tmp_path / "w.safetensors")


def test_a_program_is_loaded_from_its_directory(tmp_path: Path) -> None:
    p = gw.trace(gw.nn.Linear(2, 3), gw.ones(1, 2))
    p.save(tmp_path / "p")
    assert gw.load(tmp_path / "p").hash() == p.hash()
    with pytest.raises(UsageError, match=r"obj\.save"):
        gw.save(p, tmp_path / "q")
