"""Verifying finds whatever was changed after the export, names it, and says when it could not look."""

from __future__ import annotations

import hashlib
import json
import random
import shutil

import numpy as np
import pytest
from receipts import rewrite

import graphwright as gw
from graphwright.models.errors import VerificationFailed
from graphwright.models.export import verify as verifying
from graphwright.models.export.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def exported(proved, tmp_path):
    """A copy of a proved export that a test may damage, by name."""

    def get(name="edited"):
        return shutil.copytree(proved(name)[1], tmp_path / name)

    return get


@pytest.fixture
def unloaded(monkeypatch):
    """Any attempt to load wrong files fails the test."""

    def never(*_, **__):
        raise AssertionError("files that differ from the receipt are not loaded, let alone run")

    monkeypatch.setattr(verifying, "compute_there", never)


@pytest.mark.parametrize("name", ["copy", "pruned", "edited"])
def test_an_untouched_export_passes(proved, name):
    m, folder, _ = proved(name)
    found = verify(folder, against=m.directory, trust_code=name == "edited")
    assert found.problems == found.unchecked == []
    assert found.exit_code == 0
    assert any(line.startswith("probe") for line in found.checked)
    assert "source model.safetensors: sha256" in found.checked


def test_flipped_bits_of_the_weights_are_reported_with_file_and_key(exported, unloaded):
    folder = exported()
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(data[:8], "little")
    entries = {k: v["data_offsets"] for k, v in json.loads(data[8:header]).items() if k != "__metadata__"}
    for _ in range(12):
        at, bit = int(rng.integers(header, len(data))), 1 << int(rng.integers(8))
        data[at] ^= bit
        file.write_bytes(data)
        data[at] ^= bit
        key = next(k for k, (a, b) in entries.items() if a <= at - header < b)
        found = verify(folder)
        changed = "model.safetensors: changed since the receipt was written"
        assert found.problems == [changed, f"tensor {key}: other bytes"]
        assert found.exit_code == 1


def edit_config(folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "rms_norm_eps": 0.1}))
    return "config.json: changed"


def edit_code(folder):
    file = next(folder.glob("modeling*"))
    file.write_text(file.read_text() + "\n")
    return f"{file.name}: changed"


def delete_code(folder):
    file = next(folder.glob("configuration*"))
    file.unlink()
    return f"{file.name}: missing"


def add_a_file(folder):
    (folder / "adapter_config.json").write_text("{}")
    return "adapter_config.json: not in the receipt"


def delete_the_receipt(folder):
    (folder / "receipt.json").unlink()
    return "has no receipt"


def edit_the_receipt(folder):
    text = (folder / "receipt.json").read_text()
    (folder / "receipt.json").write_text(text.replace('"confirmed": true', '"confirmed": false'))
    return "changed after it was written"


def cut_the_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-3])
    return "model.safetensors: changed"


@pytest.mark.parametrize(
    "damage", [edit_config, edit_code, delete_code, add_a_file, delete_the_receipt, edit_the_receipt, cut_the_weights]
)
def test_damage_is_reported(exported, unloaded, damage):
    folder = exported()
    words = damage(folder)
    found = verify(folder)
    assert found.exit_code == 1
    assert any(words in line for line in found.problems), found.problems


def plant_code(folder, mark):
    """Code that leaves a mark when it is run, in a directory whose receipt was forged to match."""
    file = next(folder.glob("modeling*"))
    file.write_text(f"open({str(mark)!r}, 'w').close()\n" + file.read_text())
    row = {"name": file.name, "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    rewrite(
        folder,
        lambda d: d["result"].update(files=[row if f["name"] == row["name"] else f for f in d["result"]["files"]]),
    )


def test_code_is_run_only_when_trusted(exported, tmp_path):
    folder, mark = exported(), tmp_path / "ran"
    plant_code(folder, mark)
    found = verify(folder)
    assert not mark.exists()
    assert found.problems == []
    assert found.exit_code == 3
    (line,) = found.unchecked
    assert all(word in line for word in ("modeling_", "configuration_", "--trust-code", "trust_code=True"))
    assert verify(folder, trust_code=True).exit_code == 0
    assert mark.exists()


@pytest.mark.parametrize("checked", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}])
def test_a_forged_receipt_cannot_cause_code_to_run(exported, tmp_path, checked):
    folder, mark = exported(), tmp_path / "ran"
    plant_code(folder, mark)
    rewrite(folder, lambda d: d.update(level=1, check=checked))
    assert verify(folder).exit_code == 1
    assert not mark.exists()


def test_swapped_shards_are_found(made, tmp_path, unloaded):
    m = gw.open(made("llama").path)
    with m.program.edit("so that they are written again") as e:
        e.set_weight("model.norm.weight", lambda w: w + 1)
    m.export(tmp_path / "out", check="none", timed=False, max_shard_size="60KB", prompts=[[1, 2]])
    first, second = sorted((tmp_path / "out").glob("model-*"))[:2]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert sum("changed since" in line for line in verify(tmp_path / "out").problems) == 2


def test_a_changed_source_is_reported(exported, copy, unloaded):
    source = copy("llama-attention-bias")
    edit_config(source)
    found = verify(exported(), against=source)
    assert found.problems == ["source config.json: differs from the exported file"]


def test_a_failed_probe_is_reported(exported, monkeypatch):
    folder = exported("copy")
    rewrite(folder, lambda d: d["probe"]["greedy"].__setitem__(0, 5))
    honest = verifying.compute_there
    known = []

    def once(*args, **kwargs):
        if not known:
            known.append(honest(*args, **kwargs))
        return known[0]

    monkeypatch.setattr(verifying, "compute_there", once)
    assert verify(folder).problems[0].startswith("probe: greedy tokens")
    rewrite(folder, lambda d: d["probe"]["top5"][0].__setitem__(1, 99.0))
    assert verify(folder).problems[0].startswith("probe: logit of token")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["result"].pop("files"),
        lambda d: d["result"].update(files=[{"x": 1}]),
        lambda d: d["probe"].update(top5=3),
        lambda d: d["result"].update(tensors=[1]),
    ],
)
def test_a_forged_receipt_is_reported_not_raised(exported, unloaded, change):
    folder = exported()
    rewrite(folder, change)
    assert verify(folder).exit_code == 1


def test_receipt_paths_outside_the_directory_are_reported(exported, unloaded):
    folder = exported()
    rewrite(folder, lambda d: d["result"]["files"][0].update(name="../copy.txt"))
    assert "'../copy.txt': not a plain file name" in verify(folder).problems


def test_without_transformers_files_are_checked_and_the_rest_is_reported_unchecked(exported, monkeypatch):
    monkeypatch.setattr(verifying, "transformers_installed", lambda: False)
    found = verify(exported())
    assert found.problems == []
    assert found.exit_code == 3
    assert "not installed" in found.unchecked[0]


def test_a_missing_directory_has_no_receipt(tmp_path):
    assert verify(tmp_path / "nowhere").exit_code == 1


def test_a_receipt_with_any_wrong_value_is_reported_not_raised(exported, monkeypatch):
    def fails(*args, **kwargs):
        raise VerificationFailed("not loaded")

    folder, rng = exported("copy"), random.Random(0)
    monkeypatch.setattr(verifying, "compute_there", fails)
    text = (folder / "receipt.json").read_text("utf-8")
    paths = [p for p in leaves(json.loads(text)) if p and p[0] != "sha256"]
    values = ["x", 1.5, -1, 2**63, 10**30, 1e308, True, None, [], [0], ["x"], {}, [[0]], "../x", "a\0b"]
    for _ in range(150):
        (folder / "receipt.json").write_text(text, "utf-8")
        path, value = rng.choice(paths), rng.choice(values)
        rewrite(folder, lambda d, path=path, value=value: put(d, path, value))
        found = verify(folder)
        assert found.exit_code != 0
        assert str(found)


def leaves(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, one in inner for leaf in leaves(one, (*path, key)))]


def put(data, path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value
