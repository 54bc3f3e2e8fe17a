"""Calibration: windows on two sides, streamed layer by layer, with the moments of what was stored whole."""

from __future__ import annotations

import gc
import shutil

import numpy as np
import pytest
from prune_models import gpt2_like, images

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.errors import UsageError
from graphwright.models.errors import PromptError
from graphwright.models.tokenizer import need_tokenizer
from graphwright.surgery.calibration import Stream
from graphwright.surgery.pruning.prunable import prunable
from graphwright.surgery.pruning.restore import Gram, GramSum
from graphwright.surgery.pruning.scores import grams


@pytest.fixture(scope="module")
def llama():
    return gw.open(tiny_llama.directory("f32"))


IDS = tiny_llama.batch(5, 48)[0]


def test_windows_are_sampled_by_seed_and_held_out_ones_are_disjoint():
    ids = np.arange(4000) % 97
    one, same, other = (sg.Calibration(ids, 512, 64, seed=s) for s in (0, 0, 1))
    assert one.to_json() == same.to_json()
    assert one.to_json()["windows"] != other.to_json()["windows"]
    assert one.windows["ids"].shape == (8, 64)
    assert one.held["ids"].shape == (4, 64)
    rows = {r.tobytes() for r in one.windows["ids"]}
    assert not rows & {r.tobytes() for r in one.held["ids"]}


def test_repeated_windows_are_not_held_out():
    row = np.arange(16)
    with_copies = sg.Calibration(np.stack([row, row, row, row, row + 1, row + 2, row + 3, row + 4]), 64)
    learned = {r.tobytes() for r in with_copies.windows["ids"]}
    assert not learned & {r.tobytes() for r in with_copies.held["ids"]}
    with pytest.raises(sg.CalibrationLeak, match="also learning windows"):
        sg.Calibration(np.stack([row, row + 1]), 64, held_out=np.stack([row + 1]))
    with pytest.raises(sg.CalibrationLeak):
        with_copies.check_held_out({"ids": np.stack([row])})


def test_a_token_outside_the_vocabulary_is_refused_with_its_position(llama):
    ids = IDS.copy()
    ids[:, 7] = 999
    with pytest.raises(PromptError) as caught:
        sg.Calibration(ids).feeds(llama.program)
    assert "position 7" in str(caught.value)


@pytest.mark.parametrize("source", [np.zeros(0, np.int64), np.zeros((2, 3)), "text"])
def test_invalid_sources_are_refused(source):
    with pytest.raises(UsageError):
        sg.Calibration(source)


def test_moments_match_stored_activations(llama):
    p = llama.program
    cal = sg.Calibration(IDS, 2304)
    feeds = cal.feeds(p)
    stream = Stream(p, feeds)
    for axis in prunable(p, kinds=("neurons", "kv_groups")):
        stream.advance(axis.start)
        (end,) = axis.consumers
        (gram,) = grams([end], stream)
        stored = np.concatenate([p.run(f).value(end.x).to_numpy("float64").reshape(-1, gram.mean.size) for f in feeds])
        assert gram.rows == len(stored) == 2304
        expected = stored.T @ stored / len(stored)
        assert np.abs(gram.second - expected).max() <= 1e-6 * np.abs(expected).max()
        assert np.abs(gram.mean - stored.mean(0)).max() <= 1e-6 * np.abs(stored).max()


def test_streaming_matches_a_whole_run_with_constant_memory_per_layer():
    p = gpt2_like(layers=5)
    feeds = sg.Calibration(np.random.default_rng(0).integers(0, 29, (40, 16)), 320).feeds(p)
    stream, kept = Stream(p, feeds), []
    for axis in prunable(p, kinds=("neurons",)):
        stream.advance(axis.start)
        kept.append(sum(a.nbytes for live in stream.live for a in live.values()))
    assert len(set(kept)) == 1
    for got, f in zip(stream.outputs(), feeds, strict=True):
        np.testing.assert_array_equal(got, p.run(f)["logits"].to_numpy())


@pytest.mark.deep
@pytest.mark.parametrize("layers", [2, 5])
def test_only_the_moments_of_one_layer_are_in_memory(layers):
    p = gpt2_like(layers=layers)
    cal = sg.Calibration(np.random.default_rng(0).integers(0, 29, (40, 16)), 320)
    most = 0

    def look(_):
        nonlocal most
        most = max(most, sum(type(o) is Gram for o in gc.get_objects()))

    sg.prune(p, sg.Ratio(0.3), cal, recipe="units", timed=False, progress=look)
    assert most <= 2  # on learned and on held-out windows, of the layer before


def test_moments_are_cached_per_program(llama, monkeypatch):
    p = llama.program.fork()
    cal = sg.Calibration(IDS, 1024)
    made = []
    real = GramSum.moments
    monkeypatch.setattr(GramSum, "moments", lambda sums: made.append(1) or real(sums))
    name = "layers.1.mlp.neurons"
    first = sg.scores(p.axes()[name], cal, "obs")
    sg.scores(p.axes()[name], cal, "wanda")
    assert len(made) == 1
    with p.edit("another gate") as e:
        e.set_weight("layers.0.mlp.gate.weight", lambda w: 0.5 * w)
    assert not np.allclose(sg.scores(p.axes()[name], cal, "obs"), first)
    assert len(made) == 2


def test_calibration_accepts_samples_of_other_inputs():
    cal = sg.Calibration(images(40), 20)
    assert cal.windows["x"].shape == (20, 2, 9, 9)
    assert cal.held["x"].shape == (10, 2, 9, 9)
    with pytest.raises(UsageError, match="different numbers of samples"):
        sg.Calibration({"x": np.zeros((3, 2)), "z": np.zeros((4, 2))})


def test_texts_and_ragged_rows_are_joined_and_cut():
    tokenizer = need_tokenizer(gw.open("bundled"))
    texts = ["to be, or not to be, " * 20, "that is the question. " * 30]
    joined = sg.Calibration("".join(texts), 512, 64, tokenizer=tokenizer)
    rows = [tokenizer.encode(text) for text in texts]
    for source in (texts, rows, [np.array(row) for row in rows], gw.tensor(np.concatenate(rows))):
        assert sg.Calibration(source, 512, 64, tokenizer=tokenizer).to_json() == joined.to_json()
    whole = np.arange(128).reshape(8, 16)
    for source in (whole, whole.tolist(), gw.tensor(whole)):
        found = sg.Calibration(source, 999, 4)
        assert found.width == 16


@pytest.mark.parametrize("text", [None, "a text"])
def test_a_model_without_a_tokenizer_is_named_whether_or_not_a_text_was_given(text, tmp_path):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(gw.open("bundled").directory / file, tmp_path)
    with pytest.raises(UsageError, match=r"tmp.*: the model has no tokenizer"):
        sg.Calibration.of(gw.open(tmp_path), text)


def test_surgery_makes_calibration_data_from_texts_and_ids():
    text = "What a piece of work is a man, how noble in reason, how infinite in faculty! " * 30
    model, other = gw.open("bundled"), gw.open("bundled")
    found = model.prune(sg.Ratio(0.1), text, kinds=("neurons",), recipe="units")
    data = sg.Calibration(text, tokenizer=other.tokenizer)
    assert found.calibration == data.to_json()
    ids = np.array(need_tokenizer(model).encode(text))
    assert other.prune(sg.Ratio(0.1), ids, kinds=("neurons",), recipe="units").calibration == data.to_json()
    assert model.program.hash() == other.program.hash()
    rows = sg.compare(model, other, [text[:600], text[600:900]])
    assert rows.equal
    with pytest.raises(UsageError, match="without a tokenizer"):
        sg.prune(other.program, sg.Ratio(0.1), text)
