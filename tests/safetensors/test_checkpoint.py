import json
import os
from pathlib import Path
from typing import Any

import pytest
from raw_files import entry, raw_file

from graphwright.safetensors import (
    INDEX_RULES,
    Checkpoint,
    CheckpointChanged,
    CheckpointNotFound,
    HeaderError,
    IndexFileError,
    UnknownKey,
    UnsafeFile,
)

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WEIGHT_MAP = {"a": TWO, "b": ONE, "c": TWO}


def write_index(folder: Path, weight_map: Any = WEIGHT_MAP, **more: Any) -> None:
    content = {"metadata": {"total_size": 6}, "weight_map": weight_map, **more}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """Two shards: b in the first; c, then a in the second."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ONE).write_bytes(raw_file({"b": entry()}, b"bB"))
    (home / TWO).write_bytes(raw_file({"a": entry(begin=2, end=4), "c": entry()}, b"cCaA"))
    write_index(home)
    return home


def test_keys_of_shards_are_listed_in_file_order(folder):
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.keys() == ("b", "c", "a")
        assert [bytes(checkpoint.bytes(key)) for key in "abc"] == [b"aA", b"bB", b"cC"]
        assert checkpoint.info("a").begin == 2
        assert checkpoint.file_of("c").path == folder / TWO
        assert [file.path.name for file in checkpoint.files] == [ONE, TWO]
        assert (checkpoint.nbytes, len(checkpoint), checkpoint.index) == (6, 3, folder / "model.safetensors.index.json")
        assert "a" in checkpoint
        assert "z" not in checkpoint


def test_a_file_an_index_and_a_directory_open_equally(folder, tmp_path):
    assert Checkpoint(folder / "model.safetensors.index.json").keys() == ("b", "c", "a")
    assert Checkpoint(str(folder / TWO)).keys() == ("c", "a")
    (tmp_path / "model.safetensors").write_bytes((folder / ONE).read_bytes())
    assert Checkpoint(tmp_path).keys() == Checkpoint(tmp_path / "model.safetensors").keys() == ("b",)
    (tmp_path / "weights.safetensors").write_bytes((folder / TWO).read_bytes())
    assert Checkpoint(tmp_path, stem="weights").keys() == ("c", "a")


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(folder):
    (folder / "model.safetensors").write_bytes(raw_file({"z": entry()}, b"zZ"))
    assert Checkpoint(folder).keys() == ("z",)


def refused(folder: Path) -> tuple[str, str | None]:
    with pytest.raises(IndexFileError, match=r"index\.json") as caught:
        Checkpoint(folder)
    return caught.value.rule, caught.value.key


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        "a\\b.safetensors",
        "a\0.safetensors",
        "config.json",
        "x" * 300 + ".safetensors",
    ],
)
def test_shard_names_with_paths_are_refused(folder, name):
    write_index(folder, {**WEIGHT_MAP, "a": name})
    assert refused(folder) == ("shard_name", name)


def test_links_that_leave_the_directory_are_refused(folder, tmp_path):
    (folder / TWO).rename(tmp_path / "elsewhere.safetensors")
    (folder / TWO).symlink_to(tmp_path / "elsewhere.safetensors")
    assert refused(folder) == ("outside", TWO)
    (folder / TWO).unlink()
    (tmp_path / "elsewhere.safetensors").rename(folder / "inside.safetensors")
    (folder / TWO).symlink_to("inside.safetensors")
    assert Checkpoint(folder).keys() == ("b", "c", "a")


def test_links_of_a_hub_cache_into_its_own_blobs_are_followed(folder, tmp_path):
    snapshot = tmp_path / "models--org--name/snapshots/0123"
    blobs = tmp_path / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(os.listdir(folder)):
        (folder / name).rename(blobs / f"{number:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    assert Checkpoint(snapshot).keys() == ("b", "c", "a")


def test_a_missing_shard_is_named(folder):
    (folder / ONE).unlink()
    assert refused(folder) == ("missing", ONE)


def test_a_key_in_two_shards_is_refused_also_when_the_index_names_one_of_them(folder):
    (folder / ONE).write_bytes(raw_file({"b": entry(), "a": entry(begin=2, end=4)}, b"bBaA"))
    assert refused(folder) == ("twice", "a")


def test_keys_missing_from_their_shard_are_named(folder):
    write_index(folder, {**WEIGHT_MAP, "d": ONE})
    assert refused(folder) == ("absent", "d")


def test_a_key_in_another_shard_than_in_the_index_is_refused(folder):
    write_index(folder, {**WEIGHT_MAP, "a": ONE})
    assert refused(folder) == ("absent", "a")


def test_keys_missing_from_the_index_are_named(folder):
    write_index(folder, {"a": TWO, "b": ONE})
    assert refused(folder) == ("unlisted", "c")


@pytest.mark.parametrize(
    ("text", "rule", "key"),
    [
        (b'{"weight_map":{"a":"x","a":"y"}}', "duplicate", "a"),
        (b'{"weight_map":' + b"[" * 9 + b"]" * 9 + b"}", "nesting", None),
        (b'{"weight_map"', "json", None),
        (b'{"weight_map":{"\xff":"x"}}', "utf8", None),
        (b"[]", "weight_map", None),
        (b"{}", "weight_map", None),
        (b'{"weight_map":{}}', "weight_map", None),
        (b'{"weight_map":{"a":1}}', "weight_map", "a"),
    ],
)
def test_invalid_index_files_raise_typed_errors(folder, text, rule, key):
    (folder / "model.safetensors.index.json").write_bytes(text)
    assert refused(folder) == (rule, key)


def test_an_index_of_more_than_100_megabytes_is_not_parsed(folder):
    os.truncate(folder / "model.safetensors.index.json", 100_000_001)
    assert refused(folder) == ("bytes", None)


def test_every_rule_of_the_index_has_a_test():
    above = {"duplicate", "nesting", "json", "utf8", "bytes", "weight_map", "shard_name", "outside", "missing"}
    assert set(INDEX_RULES) == above | {"twice", "absent", "unlisted", "containers"}  # containers bound headers only


def test_a_broken_shard_is_named_with_its_rule(folder):
    (folder / TWO).write_bytes(b"short")
    with pytest.raises(HeaderError, match=TWO) as caught:
        Checkpoint(folder)
    assert caught.value.rule == "length"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "epoch=1.ckpt"])
def test_a_directory_with_pickles_only_is_refused_with_the_conversion_command(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UnsafeFile, match=r"weights_only=True.*" + name.rsplit(".", 1)[0].replace("=", ".")):
        Checkpoint(tmp_path)
    with pytest.raises(UnsafeFile):
        Checkpoint(tmp_path / name)


def test_a_pickle_as_a_shard_is_refused(folder):
    write_index(folder, {**WEIGHT_MAP, "a": "pytorch_model.bin"})
    with pytest.raises(UnsafeFile):
        Checkpoint(folder)


def test_pickles_beside_a_checkpoint_are_ignored(folder):
    (folder / "optimizer.pt").write_bytes(b"anything")
    assert len(Checkpoint(folder)) == 3


def test_a_missing_checkpoint_names_the_expected_files(tmp_path):
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        Checkpoint(tmp_path / "none")


def test_an_unknown_key_and_a_changed_shard_are_typed_errors(folder):
    checkpoint = Checkpoint(folder)
    with pytest.raises(UnknownKey, match="nearest"):
        checkpoint.info("aa")
    os.utime(folder / TWO, ns=(0, 0))
    assert bytes(checkpoint.bytes("b")) == b"bB"
    with pytest.raises(CheckpointChanged, match=TWO):
        checkpoint.bytes("a")
