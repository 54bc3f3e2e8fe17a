"""Resizing the vocabulary is an edit; its export is the original class with another `vocab_size`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import Made, some_ids
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import graphwright as gw
from graphwright.errors import OutOfMemory, UsageError
from graphwright.models.errors import TokenizerMismatch
from graphwright.program import FrozenAxis
from graphwright.safetensors import Checkpoint
from seeds import some

pytestmark = pytest.mark.usefixtures("warm")  # how a clean process starts is tested in test_verify.py
IDS = some_ids((2, 9))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def stock(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of transformers' own class, float32."""
    loaded: tuple = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportAssignmentType]  # a pair, as asked
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loaded[1].values())
    with torch.no_grad():
        return loaded[0].eval()(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("n", some([130, 60], 2))
def test_a_resized_vocabulary_exports_in_the_original_class(
    family: str, n: int, made: Callable[[str], Made], tmp_path: Path
) -> None:
    m = gw.open(made(family).path)
    ids, before, old = IDS % min(n, 97), m.program.hash(), made(family).logits(IDS % min(n, 97))
    m.resize_vocab(n)
    assert (m.vocab, m.dims.vocab, m.config["vocab_size"]) == (n, n, 97)
    assert len(m.program.journal) == 1
    logits = m.logits(ids)
    assert logits.shape == (2, 9, n)
    assert np.allclose(logits[..., :97], old[..., :n], atol=1e-4)
    if n > 97:
        assert np.allclose(logits[..., 97:], old.mean(-1, keepdims=True), atol=1e-4)  # the head is linear
        assert m.generate([129], 3).ids
    receipt = m.export(tmp_path / "out", check="required", timed=False)
    assert (receipt.level, receipt.exact, receipt.confirmed) == (2, True, True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == n
    assert np.allclose(stock(tmp_path / "out", ids), logits, atol=1e-4)
    assert np.array_equal(gw.open(tmp_path / "out").logits(ids), logits)
    m.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    assert (again.dims.vocab, again.export_plan().level) == (n, 2)
    assert np.array_equal(again.logits(ids), logits)
    for each in (m, again):
        each.program.undo()
        assert (each.program.hash(), each.dims.vocab) == (before, 97)
        each.program.redo()
        assert np.array_equal(each.logits(ids), logits)


def test_new_rows_are_the_mean_or_drawn_from_the_old_rows_or_zero(made: Callable[[str], Made]) -> None:
    rows = {}
    for init in ("mean", "normal", "zero"):
        m = gw.open(made("llama").path)
        m.resize_vocab(97 + 3000, init=init)
        for key in (EMBEDDING, HEAD):
            rows[init, key] = m.program.weights[key].data.to_numpy()
    for key in (EMBEDDING, HEAD):
        old = rows["mean", key][:97]
        assert np.allclose(rows["mean", key][97:], old.mean(0), atol=1e-6)
        drawn = rows["normal", key][97:]
        assert np.abs(drawn.mean(0) - old.mean(0)).max() < 0.1 * old.std()
        assert np.allclose(drawn.std(0), old.std(0), rtol=0.1)
        assert not rows["zero", key][97:].any()
    assert not np.array_equal(rows["normal", HEAD][97:], rows["normal", EMBEDDING][97:])


def test_ids_with_a_token_are_only_removed_on_request(byte_path: Path, tmp_path: Path) -> None:
    m = gw.open(byte_path)
    m.resize_vocab(300)
    with pytest.raises(TokenizerMismatch, match="ids 200 to 255") as caught:
        m.resize_vocab(200)
    assert caught.value.fix == "pass drop_tokens=True"
    assert m.vocab == 300
    m.resize_vocab(256)
    m.resize_vocab(200, drop_tokens=True)
    receipt = m.export(tmp_path / "out", check="required", timed=False)
    assert any("tokenizer" in w for w in receipt.warnings)
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert gw.open(tmp_path / "out").tokenizer is None
    m.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    again.program.undo(2)
    assert again.tokenizer is not None
    assert again.tokenizer.size == again.vocab - 44


def test_a_tokenizer_with_more_ids_is_taken_up(byte_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(byte_path, path)
    table = json.loads((path / "tokenizer.json").read_text())
    table["added_tokens"].append({**table["added_tokens"][0], "id": 256, "content": "<new>"})
    (path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(TokenizerMismatch) as caught:
        gw.open(path)
    assert "model.resize_vocab(257)" in str(caught.value.fix)
    m = gw.open(path, tokenizer=False)
    m.resize_vocab(257)
    m.export(tmp_path / "out", check="none", timed=False)
    m.save(tmp_path / "saved")
    for name in ("out", "saved"):
        again = gw.open(tmp_path / name)
        assert again.tokenizer is not None
        assert again.tokenizer.encode("a<new>")[-1] == 256
        assert again.logits([256]).shape == (1, 257)


@pytest.mark.deep
def test_special_ids_without_a_row_leave_the_config(tmp_path: Path) -> None:
    checkpoints.make(tmp_path / "m", "llama", pad_token_id=96, eos_token_id=[3, 95], bos_token_id=1)
    m = gw.open(tmp_path / "m")
    with pytest.raises(TokenizerMismatch, match="ids 90 to 95"):
        m.resize_vocab(90)
    m.resize_vocab(90, drop_tokens=True)
    m.export(tmp_path / "out", check="required", timed=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("pad", "eos", "bos")] == [None, [3], 1]


def test_a_stored_copy_of_a_tied_head_follows(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy("llama-tied")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, HEAD: tensors[EMBEDDING]}, path / "model.safetensors", {"format": "pt"})
    m = gw.open(path)
    m.resize_vocab(120)
    receipt = m.export(tmp_path / "out", check="required", timed=False)
    assert any("drift was not measured" in w for w in receipt.warnings)
    out = Checkpoint(tmp_path / "out")
    assert out.info(HEAD).shape == (120, 48)
    assert bytes(out.bytes(HEAD)) == bytes(out.bytes(EMBEDDING))


def test_the_plan_names_the_axis_and_the_field(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    m.resize_vocab(120)
    plan = m.export_plan()
    found = {(d.path, d.axis, d.field, d.levels) for d in plan.deviations}
    assert found == {(f"{name}.weight", "vocabulary", "vocab_size", (2, 5)) for name in ("embed", "lm_head")}
    assert plan.possible == (2, 5)
    assert "120 along vocab, but the class has 97" in str(plan.levels[2].reasons[0])


def test_resizing_can_be_replayed_and_is_part_of_an_outer_edit(made: Callable[[str], Made]) -> None:
    m, twin = (gw.open(made("llama").path) for _ in range(2))
    with m.program.edit("wider") as e:
        m.resize_vocab(120, init="normal")
        e.set_weight("norm.weight", lambda w: 2 * w)
    assert len(m.program.journal) == 1
    gw.program.replay(m.program.journal, twin.program, payloads={})
    assert twin.dims.vocab == 120
    assert twin.program.hash() == m.program.hash()


def test_a_vocabulary_that_cannot_be_resized_is_refused(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    wrong: tuple[Any, ...] = (0, -1, 2.0, True)
    for n in wrong:
        with pytest.raises(UsageError, match="n: the argument"):
            m.resize_vocab(n)
    with pytest.raises(OutOfMemory, match="MiB"):
        m.resize_vocab(2**31)
    with pytest.raises(UsageError, match="init: the argument"):
        m.resize_vocab(100, init="random")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="seed"):
        m.resize_vocab(100, init="normal", seed="a")  # pyright: ignore[reportArgumentType]
    m.quantize()
    with pytest.raises(UsageError, match="quantised"):
        m.resize_vocab(100)
    m.resize_vocab(90)
    assert m.logits(IDS % 90).shape[-1] == 90
    m.program.undo(2)
    with m.program.edit("ids reach a second op") as e:
        e.set_outputs(logits=e.add("concat", "lm_head", "lm_head", axis=-1))
    with pytest.raises(FrozenAxis, match="not an axis of their own"):
        m.resize_vocab(100)


def test_grow_names_the_verb_for_vocabularies(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    with pytest.raises(FrozenAxis, match="resize_vocab"), m.program.edit("grow") as e:
        e.grow("embed.vocabulary", 3)
