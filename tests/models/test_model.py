"""Running a model: ids and masks that do not fit, results that are not finite, and edits while it runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from checkpoints import Made, relative, some_ids

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.models import NonFinite, PromptError
from graphwright.models.metrics import non_finite
from graphwright.program import FeedError, ValueReleased

IDS = some_ids((2, 9))


@pytest.mark.parametrize(
    ("ids", "where", "expected"),
    [
        ([], None, None),
        (np.zeros((2, 0), int), None, None),
        ([[1, 2], [3]], None, "ids are integers [B, T] or [T]"),
        ([1.0, 2.0], None, None),
        (["a"], None, None),
        (np.zeros((1, 1, 1), int), None, None),
        ([[1, 2], [3, 97]], "row 1, position 1", "0..96"),
        ([-1], "row 0, position 0", "0..96"),
    ],
)
def test_invalid_ids_are_refused(ids: object, where: str | None, expected: str | None, model: gw.Model) -> None:
    with pytest.raises(PromptError) as caught:
        model.logits(ids)
    assert caught.value.where == where
    if where:
        assert caught.value.expected == expected


def test_ids_of_any_integer_dtype_are_accepted(model: gw.Model) -> None:
    whole = model.logits(IDS)
    for kind in (np.int8, np.uint16, np.int32, list):
        ids = IDS.tolist() if kind is list else IDS.astype(kind)
        np.testing.assert_array_equal(model.logits(ids), whole)


@pytest.mark.parametrize("mask", [[True] * 8, np.ones((2, 8)), np.ones((1, 9)), np.ones((3, 9)), np.ones(18)])
def test_masks_of_other_shapes_are_refused(mask: object, model: gw.Model) -> None:
    with pytest.raises(PromptError) as caught:
        model.logits(IDS, mask)
    assert caught.value.expected == [2, 9]


@pytest.mark.parametrize("mask", [["a", "b"], [float("nan"), 1], [2, 1], [[1], [1, 0]]])
def test_invalid_mask_values_are_refused(mask: object, model: gw.Model) -> None:
    with pytest.raises(PromptError):
        model.logits([1, 2], mask)


def test_mask_of_ones_changes_nothing(model: gw.Model) -> None:
    assert relative(model.logits(IDS, np.ones((2, 9))), model.logits(IDS)) < 1e-6
    assert relative(model.logits(IDS[0], np.ones(9)), model.logits(IDS[0])) < 1e-6


def test_masked_positions_may_have_any_id(made: Callable[[str], Made]) -> None:
    m = gw.open(made("mistral-window").path)
    mask = np.arange(9)[None] >= np.array([[4], [0]])
    other = np.where(mask, IDS, (IDS + 7) % 97)
    np.testing.assert_array_equal(m.logits(other, mask)[mask], m.logits(IDS, mask)[mask])


def test_masking_works_after_an_edit(model: gw.Model) -> None:
    mask = np.arange(9)[None] >= np.array([[4], [0]])
    before = model.logits(IDS, mask)
    with model.program.edit("cut") as e:
        e.cut(model.program.in_edges("layers.1.out")[1])
    after = model.logits(IDS, mask)
    assert not np.array_equal(before, after)
    assert relative(after[0, 4:], model.logits(IDS[:1, 4:])[0]) < 1e-5
    model.program.undo()
    np.testing.assert_array_equal(model.logits(IDS, mask), before)


def test_bidirectional_attention_is_masked_too(model: gw.Model) -> None:
    with model.program.edit("look ahead") as e:
        e.set_attr("layers.1.attn.sdpa", causal=False)
    mask = np.arange(9)[None] < np.array([[6], [9]])  # padded on the right
    assert relative(model.logits(IDS, mask)[0, :6], model.logits(IDS[:1, :6])[0]) < 1e-5


def test_the_vocabulary_size_follows_the_embedding(model: gw.Model) -> None:
    assert model.vocab == 97
    with model.program.edit("fewer tokens") as e:
        for name in ("embed.weight", "lm_head.weight"):
            e.set_weight(name, lambda w: w[:50])
    assert model.vocab == 50
    assert model.logits([[49]]).shape == (1, 1, 50)
    with pytest.raises(PromptError):
        model.logits([[50]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_non_finite_weights_are_named(bad: float, stored: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path, dtype=stored)

    def spoil(w: np.ndarray) -> np.ndarray:
        w[3, 5] = w[4, 1] = bad
        return w

    with m.program.edit("spoil") as e:
        e.set_weight("layers.1.attn.k.weight", spoil)
    with pytest.raises(NonFinite) as caught:
        m.logits(IDS)
    assert caught.value.where == "model.layers.1.self_attn.k_proj.weight"
    assert caught.value.got == "2 values, the first at (3, 5)"
    assert "nan_to_num" in str(caught.value.fix)
    assert non_finite(m.program) == [("model.layers.1.self_attn.k_proj.weight", 2, (3, 5))]


def test_the_first_overflowing_node_is_named(model: gw.Model) -> None:
    with model.program.edit("overflow") as e:
        e.set_weight("layers.1.mlp.up.weight", lambda w: np.full_like(w, 3e38))
    with pytest.raises(NonFinite) as caught:
        model.logits(IDS)
    assert caught.value.where == "layers.1.mlp.up"
    cache = model.new_cache(9, kind="static")
    with pytest.raises(NonFinite) as caught:
        model.prefill(cache, IDS[:1])
    assert caught.value.where == "layers.1.mlp.up"
    assert cache.length == 0


def test_original_is_the_program_as_opened(model: gw.Model) -> None:
    before = model.program.hash()
    with model.program.edit("change") as e:
        e.set_weight("norm.weight", lambda w: w * 2)
    assert model.original.hash() == before != model.program.hash()
    assert model.original is model.original
    assert "llama" in repr(model)
    assert "version 1" in repr(model)


def test_plans_equal_runs_bit_for_bit(made: Callable[[str], Made]) -> None:
    for name in ("qwen3", "rope-dynamic", "qwen2-windows"):
        m = gw.open(made(name).path)
        ids = some_ids((2, 25))
        run = m.program.run(ids=ids, positions=np.broadcast_to(np.arange(25), ids.shape).copy())
        np.testing.assert_array_equal(m.logits(ids, deterministic=True), run["logits"].to_numpy())
        np.testing.assert_allclose(m.logits(ids), run["logits"].to_numpy(), rtol=1e-5, atol=2e-5)


def test_ids_of_different_lengths_are_refused(model: gw.Model) -> None:
    with pytest.raises(PromptError, match="different lengths"):
        model.logits([[1, 2], [3]])


def test_outputs_other_than_token_scores_are_refused_by_name(model: gw.Model) -> None:
    with model.program.edit("another output") as e:
        e.set_outputs(logits="layers.0.attn.q_heads")
    with pytest.raises(ShapeError, match=r"layers\.0\.attn\.q_heads"):
        model.logits(IDS)


# -- text, runs, patches -----------------------------------------------------------------------------------------------
def test_a_text_and_its_bytes_give_the_same_logits(byte_model: gw.Model) -> None:
    ids = list(b"The following")
    wanted = byte_model.logits(ids)
    for found in (byte_model("The following"), byte_model(ids), byte_model.logits("The following")):
        assert found.shape == (13, 256)
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(byte_model("The following", [0, *[1] * 12]), byte_model.logits(ids, [0, *[1] * 12]))
    assert byte_model([ids]).shape == (1, 13, 256)
    cache = byte_model.new_cache(16).sequence()
    assert relative(byte_model.prefill(cache, "The following")[0], wanted[-1]) < 1e-5


def test_texts_that_cannot_be_encoded_are_refused(byte_model: gw.Model, model: gw.Model) -> None:
    for call in (byte_model, byte_model.run):
        with pytest.raises(PromptError, match="empty"):
            call("")
        with pytest.raises(PromptError):
            call(["one", "another"])
    with pytest.raises(UsageError, match="no tokenizer"):
        model("text")


def test_a_run_matches_torchs_hidden_states(made: Callable[[str], Made]) -> None:
    checkpoint = made("llama")
    with torch.no_grad():
        truth = checkpoint.model(torch.tensor(IDS), output_hidden_states=True)
    run = gw.open(checkpoint.path).run(IDS, keep=["layers.0.out", "model.norm.weight"])
    assert relative(np.asarray(run.value("layers.0.out")), truth.hidden_states[1].numpy()) < 1e-5
    assert relative(np.asarray(run["logits"]), truth.logits.numpy()) < 1e-5
    assert np.array_equal(run.value("norm.weight"), checkpoint.model.model.norm.weight.detach())
    with pytest.raises(ValueReleased):
        run.value("layers.1.out")


def test_a_patch_is_given_as_numpy_reads_it(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path, compute="bfloat16")
    plain = m.run(IDS)
    seen = np.asarray(plain.value("layers.1.out"))
    assert seen.dtype == np.float32
    same = m.run(IDS, keep="outputs", patch={"layers.1.out": seen})
    assert np.array_equal(np.asarray(same["logits"]), np.asarray(plain["logits"]))
    other = m.run(IDS, keep="outputs", patch={"layers.1.out": np.zeros(seen.shape)})
    assert not np.array_equal(np.asarray(other["logits"]), np.asarray(plain["logits"]))
    with pytest.raises(FeedError, match="patches do not match"):
        m.run(IDS, patch={"layers.1.out": seen[:, 1:]})


def test_edits_by_the_model_are_edits_of_its_program(model: gw.Model) -> None:
    p, before = model.program, model.program.hash()
    with model.edit("drop a branch", author="pass") as e:
        e.cut(p.in_edges(p.junctions()[0])[1])
    assert (p.journal[-1].why, p.journal[-1].author) == ("drop a branch", "pass")
    cut = p.hash()
    model.undo()
    assert p.hash() == before != cut
    model.redo()
    assert p.hash() == cut
    model.undo()
