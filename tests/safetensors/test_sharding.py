import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphwright.errors import UsageError
from graphwright.files import DestinationExists, UnwritableTarget, atomic_directory, sha256_file
from graphwright.safetensors import (
    Checkpoint,
    CheckpointChanged,
    HeaderError,
    Stored,
    TensorData,
    parse_size,
    plan_shards,
    write_checkpoint,
    write_tensors,
)
from graphwright.testing.faults import check_atomic, inject

INDEX = "model.safetensors.index.json"


def tensor(key: str, size: int, fill: int = 1) -> TensorData:
    return TensorData(key, "U8", (size,), bytes([fill]) * size)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def digests(folder: Path) -> dict[str, str]:
    return {name: sha256_file(folder / name) for name in names(folder)}


def stored(checkpoint: Checkpoint, *keys: str) -> list[TensorData]:
    return [TensorData.stored(checkpoint, key) for key in keys or checkpoint]


@pytest.fixture
def source(tmp_path):
    """Five tensors in three shards: (a, b), (c), (d, e), with metadata and an index of their own."""
    folder = tmp_path / "source"
    items = [tensor("b", 6, 2), tensor("a", 4, 1), tensor("c", 30, 3), tensor("d", 5, 4), tensor("e", 5, 5)]
    write_checkpoint(folder, items, 10, {"made": "manually"})
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["note"] = "kept"
    (folder / INDEX).write_text(json.dumps(index))
    return Checkpoint(folder)


def test_shards_are_filled_in_order_and_larger_tensors_have_their_own(source):
    groups = [[info.key for info in file.infos] for file in source.files]
    assert groups == [["b", "a"], ["c"], ["d", "e"]]
    assert [file.path.name for file in source.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((source.path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 50 == source.nbytes
    assert index["weight_map"] == {key: source.file_of(key).path.name for key in source}


@given(sizes=st.lists(st.integers(0, 12), max_size=12), limit=st.integers(1, 20))
def test_shards_stay_within_the_limit_and_are_filled_greedily(sizes, limit):
    items = [tensor(str(i), size) for i, size in enumerate(sizes)]
    shards = plan_shards(items, limit, {})
    assert [item for shard in shards for item in shard.items] == items
    for before, after in pairwise(shards):
        assert before.nbytes + after.items[0].size > limit
    for shard in shards:
        assert shard.nbytes <= limit or len([item for item in shard.items if item.size]) == 1


def test_one_shard_is_one_file_without_an_index(tmp_path):
    written = write_checkpoint(tmp_path / "out", [tensor("a", 3), tensor("b", 3)], 6)
    assert written == (tmp_path / "out/model.safetensors",)
    assert names(tmp_path / "out") == ["model.safetensors"]
    write_checkpoint(tmp_path / "other", [], stem="weights")
    assert Checkpoint(tmp_path / "other", stem="weights").keys() == ()


def test_an_unedited_checkpoint_is_written_as_identical_files_and_index(source, tmp_path):
    write_checkpoint(tmp_path / "out", stored(source), 7, plan=source)
    assert digests(tmp_path / "out") == digests(source.path)


def test_an_unedited_file_of_another_writer_is_written_identically(tmp_path):
    tensors = {"w": torch.randn(3, 5, dtype=torch.bfloat16), "f": torch.tensor([float("nan"), -0.0])}
    (tmp_path / "in").mkdir()
    safetensors.torch.save_file(tensors, tmp_path / "in/model.safetensors")  # no format in its metadata
    source = Checkpoint(tmp_path / "in")
    write_checkpoint(tmp_path / "out", stored(source, "w", "f"), plan=source)
    assert digests(tmp_path / "out") == digests(tmp_path / "in")


def test_an_edit_of_one_tensor_changes_its_bytes_and_no_others(source, tmp_path):
    edited = [tensor("a", 4, 9) if item.key == "a" else item for item in stored(source)]
    write_checkpoint(tmp_path / "out", reversed(edited), plan=source)
    old, new = digests(source.path), digests(tmp_path / "out")
    assert [name for name in new if new[name] != old.get(name)] == ["model-00001-of-00003.safetensors"]
    before, after = ((f / "model-00001-of-00003.safetensors").read_bytes() for f in (source.path, tmp_path / "out"))
    assert len(before) == len(after)
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == list(
        range(len(before) - 4, len(before))
    )
    assert Checkpoint(tmp_path / "out").files[0].metadata == {"made": "manually", "format": "pt"}


def test_tensors_with_a_new_key_tag_or_shape_count_as_changed(source, tmp_path):
    renamed = TensorData.stored(source, "d", "e"), TensorData.stored(source, "e", "d")
    write_checkpoint(tmp_path / "out", [*stored(source, "b", "a", "c"), *renamed], plan=source)
    out = Checkpoint(tmp_path / "out")
    assert (bytes(out.bytes("d")), bytes(out.bytes("e"))) == (b"\5" * 5, b"\4" * 5)
    as_int8 = TensorData("c", "I8", (30,), source.bytes("c"))
    write_checkpoint(tmp_path / "int8", [as_int8, *stored(source, "a", "b", "d", "e")], plan=source)
    assert Checkpoint(tmp_path / "int8").info("c").tag == "I8"
    reshaped = TensorData("c", "U8", (5, 6), Stored(source.file_of("c"), "c"))
    write_checkpoint(tmp_path / "reshaped", [reshaped, *stored(source, "a", "b", "d", "e")], plan=source)
    assert Checkpoint(tmp_path / "reshaped").info("c").shape == (5, 6)


def test_empty_shards_are_dropped_and_the_others_renumbered(source, tmp_path):
    write_checkpoint(tmp_path / "out", stored(source, "a", "b", "d", "e"), plan=source)
    assert names(tmp_path / "out") == [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), INDEX]
    old, new = digests(source.path), digests(tmp_path / "out")
    assert new["model-00002-of-00002.safetensors"] == old["model-00003-of-00003.safetensors"]
    assert json.loads((tmp_path / "out" / INDEX).read_text())["metadata"] == {"total_size": 20}
    assert Checkpoint(tmp_path / "out").keys() == ("b", "a", "d", "e")


def test_new_keys_are_added_to_the_last_shard_and_then_to_new_ones(source, tmp_path):
    write_checkpoint(tmp_path / "out", [*stored(source), tensor("f", 2), tensor("g", 9)], 12, plan=source)
    groups = [[info.key for info in file.infos] for file in Checkpoint(tmp_path / "out").files]
    assert groups == [["b", "a"], ["c"], ["d", "e", "f"], ["g"]]
    assert sha256_file(tmp_path / "out/model-00002-of-00004.safetensors") == sha256_file(source.files[1].path)


def test_new_metadata_rewrites_every_shard_and_equal_metadata_none(source, tmp_path):
    write_checkpoint(tmp_path / "same", stored(source), metadata={"made": "manually"}, plan=source)
    assert digests(tmp_path / "same") == digests(source.path)
    write_checkpoint(tmp_path / "new", stored(source), metadata={"made": "again"}, plan=source)
    assert {file.metadata["made"] for file in Checkpoint(tmp_path / "new").files} == {"again"}


def test_transformers_loads_sharded_checkpoints(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    state = model.state_dict()
    config.save_pretrained(tmp_path)
    arrays = {key: np.ascontiguousarray(value.numpy()) for key, value in state.items()}
    items = [TensorData(key, "F32", array.shape, array) for key, array in arrays.items()]
    assert len(write_checkpoint(tmp_path, items, "4KB")) > 3
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, state[key])


def test_directories_with_a_checkpoint_and_the_source_are_refused(source, tmp_path):
    before = digests(source.path)
    with pytest.raises(DestinationExists):
        write_checkpoint(source.path, stored(source), plan=source)
    (tmp_path / "file").touch()
    with pytest.raises(DestinationExists):
        write_checkpoint(tmp_path / "file", [])
    assert digests(source.path) == before


def test_the_source_can_be_replaced_through_a_temporary_directory(source):
    edited = [tensor("a", 4, 9) if item.key == "a" else item for item in stored(source)]
    with atomic_directory(source.path, overwrite=True) as fresh:
        write_checkpoint(fresh, edited, plan=source)
    assert bytes(Checkpoint(source.path).bytes("a")) == b"\x09" * 4


@pytest.mark.parametrize("at", [1, 9, 17, 25])
def test_a_failure_leaves_no_file(source, tmp_path, at):
    with inject(tmp_path / "out", "ENOSPC", at), pytest.raises(UnwritableTarget):
        write_checkpoint(tmp_path / "out", stored(source), 5)
    assert names(tmp_path / "out") == []


def test_a_source_that_changed_stops_the_copy_and_leaves_no_file(source, tmp_path):
    os.utime(source.files[1].path, ns=(0, 0))
    with pytest.raises(CheckpointChanged):
        write_checkpoint(tmp_path / "out", stored(source), plan=source)
    assert names(tmp_path / "out") == []


def test_checkpoints_are_written_atomically_in_an_atomic_directory(tmp_path):
    def before(folder: Path) -> None:
        (folder / "out").mkdir()
        write_tensors(folder / "out/model.safetensors", [tensor("a", 3)])

    def save(folder: Path) -> None:
        with atomic_directory(folder / "out", overwrite=True) as fresh:
            write_checkpoint(fresh, [tensor("a", 3, 7), tensor("b", 4, 8)], 4)

    assert check_atomic(tmp_path, before, save, seeds=1).faults > 100


def test_duplicate_keys_are_refused_even_in_different_shards(tmp_path):
    with pytest.raises(HeaderError) as caught:
        write_checkpoint(tmp_path / "out", [tensor("a", 9), tensor("b", 9), tensor("a", 9)], 9)
    assert (caught.value.rule, caught.value.key) == ("duplicate", "a")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1MB", 10**6), ("2GiB", 2**31), ("1.5 kb", 1500), (7, 7), ("9B", 9)]
)
def test_sizes_are_decimal_except_for_binary_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "-1GB", "GB", "5 XB", 0, -3, "0MB", 1.5, None])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(UsageError, match="invalid shard size"):
        parse_size(text)
