"""Programs divided among ranks compute what the whole one does; undo brings it back, with the values of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import divided_on_ranks
import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import graphwright as gw
from graphwright.distributed.tensor_parallel import shares_of
from run_ranks import end_ranks, run_ranks


def check(found: list[dict[str, Any]], ranks: int, state: Path) -> None:
    for facts in found:
        whole = facts["bundled"]
        assert whole["far"] < 1e-4  # of logits up to 20: 5e-6 of them
        assert whole["planned"] < 1e-4
        assert whole["same"]
        assert len(set(whole["hashes"])) == 1
        assert whole["divided"][0] == whole["divided"][1]
        assert whole["doubled"]
        assert whole["drawn"] == found[0]["bundled"]["drawn"]
        assert all(text.startswith("InputsDiffer") and "rank 1: ids: i64[1, 1" in text for text in whole["differ"])
        assert 1 / ranks < whole["share"] < 1 / ranks + 0.25
        named = {name: facts[name] for name in ("pruned", "mixture")}
        for name, one in (*facts["modules"].items(), *named.items()):
            assert one["far"] < 2e-6, name
            assert one["same"], name
            assert all(len(units) == ranks and min(units) > 0 for units in one["axes"].values()), name
        assert sorted(map(sum, facts["modules"]["grouped"]["axes"].values())) == [10]
        assert [sum(units) for units in facts["modules"]["groups"]["axes"].values()] == [3]
        assert {sum(units) for units in facts["modules"]["slopes"]["axes"].values()} == {4}  # heads, not their 3 values
        text = "whole on every rank: 2.neurons: 2.weight depends on pairs of units, of 2.neurons and 0.neurons"
        assert text in facts["modules"]["chain"]["text"]
        assert "whole on every rank" not in facts["pruned"]["text"]
        experts = [f"layers.3.mlp.experts.{i}.neurons" for i in range(3)]
        assert [sum(facts["mixture"]["axes"][name]) for name in experts] == [512, 505, 512]
        assert facts["mixture"]["few"] == [name for name in facts["mixture"]["axes"] if name not in experts]
        assert facts["refused"]["ranks"].startswith("WrongWorld")
        assert facts["refused"]["none"].startswith("WrongWorld")
        assert "ranks=None" in facts["refused"]["none"]
        assert facts["refused"]["nothing"].startswith("UsageError")
        parts = {"again": "already", "alone": "data_parallel(step)", "matrices": "Muon", "export": "gathered"}
        for name, text in parts.items():
            assert facts["refused"][name].startswith("UsageError"), name
            assert text in facts["refused"][name]
        assert "w depends on pairs of units" in facts["refused"]["pairs"]
        assert "a[0] has other entries" in facts["refused"]["beside"]
        assert "norm (rms_norm) divides by" in facts["refused"]["normed"]
        assert facts["refused"]["written"] == "[]"
        assert facts["refused"]["gathered"] == "True, 0 entries"
        assert "cannot be edited" in facts["refused"]["inside"]
        assert "edited after it was divided" in facts["refused"]["later"]
        assert facts["refused"]["hash"] == "True"
        differ = {name: facts["refused"][name] for name in ("weights", "eager", "planned", "adopted")}
        assert all(text.startswith("ProgramsDiffer") for text in differ.values()), differ
        assert "rank 1: weight 0.bias" in differ["weights"]
        assert "rank 1: structure" in differ["eager"]
        assert "rank 1: tensor_parallel with ranks=2" in facts["refused"]["arguments"]
    alone, together = divided_on_ranks.trained(4, 0.5, divide=False), [facts["trained"] for facts in found]
    assert all(one == together[0] for one in together)  # replicas have equal bits
    np.testing.assert_allclose(together[0]["losses"], alone["losses"], rtol=1e-5)
    for key, values in alone["few"].items():
        np.testing.assert_allclose(together[0]["few"][key], values, atol=1e-6)
    alone, again = divided_on_ranks.Training(False, "AdamW"), divided_on_ranks.Training(False, "AdamW")
    wanted = {"before": alone.run(0, 3), "after": alone.run(3, 5)}
    again.load(str(state))  # what ranks saved, one process loads
    for facts in found:
        losses = facts["resumed"]
        assert losses["resumed"] == losses["after"]
        np.testing.assert_allclose(losses["before"] + losses["after"], wanted["before"] + wanted["after"], rtol=1e-5)
        np.testing.assert_allclose(losses["undone"], wanted["after"], rtol=1e-5)
    np.testing.assert_allclose(again.run(3, 5), wanted["after"], rtol=1e-5)
    assert len({str(facts["bundled"]["journal"]) for facts in found}) == 1  # the same record on all ranks
    assert len({facts["bundled"]["divided"][0] for facts in found}) == ranks  # of different weights


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_divided_program_is_the_whole_one(ranks: int, tmp_path: Path) -> None:
    check(run_ranks(ranks, divided_on_ranks.everything, str(tmp_path)), ranks, tmp_path / "state")


@pytest.mark.deep
def test_copies_of_a_divided_model_train_as_one_model_on_the_whole_batch(tmp_path: Path) -> None:
    found = run_ranks(4, divided_on_ranks.copies, str(tmp_path / "state"))
    assert [facts["world"] for facts in found] == [[2, 0, 0, 2], [2, 1, 0, 2], [2, 0, 1, 2], [2, 1, 1, 2]]
    assert [facts["items"] for facts in found] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
    alone, again = (divided_on_ranks.Training(False, "AdamW", clip=0.5) for _ in range(2))
    wanted = alone.run(0, 5)
    again.load(str(tmp_path / "state"))
    np.testing.assert_allclose(again.run(3, 5), wanted[3:], rtol=1e-5)
    for facts, twin in zip(found, found[2:] + found[:2], strict=True):
        np.testing.assert_allclose(facts["losses"], wanted, rtol=1e-5)
        assert facts["losses"] == found[0]["losses"]
        assert facts["sums"] == twin["sums"]  # of the same part, on the other copy
        assert facts["batches"].startswith("InputsDiffer")
        assert facts["three"].startswith("WrongWorld")
        assert "3 of 4 ranks, divided into copies of 2" in facts["three"]
        assert facts["four"].startswith("WrongWorld")


@pytest.mark.deep
def test_a_rank_of_a_copy_that_is_killed_is_named_by_all_others() -> None:
    *others, killed = end_ranks(4, divided_on_ranks.killed_in_a_copy, 2, timeout=10.0)
    assert killed.code == -9
    for process in others:
        assert process.value.startswith("RankLost"), process.text
        assert "3 did not reach a collective" in process.value  # or others too, which wait in another group


def test_shares_are_all_units_and_differ_by_one() -> None:
    for units, ranks in ((6, 3), (7, 3), (5, 5), (512, 3)):
        found = shares_of(units, ranks)
        assert sum(found) == units
        assert max(found) - min(found) <= 1
        assert len(found) == ranks


def test_one_rank_divides_nothing() -> None:
    p = gw.open("bundled").program
    before = p.hash()
    with p.edit("divide") as e:
        division = gw.distributed.tensor_parallel(e, p.select("layers.*"))
    assert (division.axes, p.hash(), gw.distributed.is_divided(p)) == ({}, before, False)


@pytest.mark.deep
def test_all_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(2, divided_on_ranks.saved, str(tmp_path))
    assert first["again"].startswith("DestinationExists")
    assert second["again"].startswith("SaveFailed")
    for facts in (first, second):
        assert "rank 1: no space left" in facts["failed"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)
    ours, before = gw.open(tmp_path / "out").program.weights, gw.open("bundled").program.weights
    assert list(ours) == list(before)
    for key in ours:
        factor = 2 if key in divided_on_ranks.DOUBLED else 1
        a, b = (w.array(key).to_numpy("float32") for w in (ours, before))
        np.testing.assert_array_equal(a, factor * b, err_msg=key)


@pytest.mark.deep
def test_a_rank_killed_while_saving_leaves_nothing(tmp_path: Path) -> None:
    lead, killed = end_ranks(2, divided_on_ranks.killed, str(tmp_path), timeout=4.0)
    assert killed.code == -9
    assert "RankLost" in lead.text
    assert "rank 1 did not reach a collective" in lead.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
@pytest.mark.linux
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_its_part_of_the_file(tmp_path: Path, ranks: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 6144}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 12}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").stat().st_size
    for read, mapped, copied in run_ranks(ranks, divided_on_ranks.loaded, str(tmp_path)):
        assert abs(mapped - whole * 0.66 / ranks) < 0.05 * whole  # rows: projections into heads and neurons
        assert abs(copied - whole * 0.33 / ranks) < 0.05 * whole  # columns
        assert read < whole * (0.66 / ranks + 0.33) + 0.2 * whole  # columns are read by pages, and pages in groups
