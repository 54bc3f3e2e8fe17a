"""An export appears whole and checked by another loader, or not at all; figures of two kinds are never mixed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from edits import EDITS, narrow, scale_weight, skip
from safetensors.torch import load_file, save_file

import graphwright as gw
from graphwright.errors import GraphwrightError, MissingExtra, UsageError
from graphwright.files import DestinationExists
from graphwright.models import ExportError, ExportLevelImpossible, VerificationFailed
from graphwright.models.export import export as exporting
from graphwright.models.export import verify as clean
from graphwright.models.export.examples import check_prompts
from graphwright.models.export.export import ExportOptions
from graphwright.models.export.ladder import LEVELS
from graphwright.models.export.verify import LoaderOutput, compare, compute_there

PROMPTS = [[1, 2, 3, 4, 5]]
START = clean._start
pytestmark = pytest.mark.usefixtures("warm")


def read(m) -> set[str]:
    """Keys of weights whose bytes in the file were looked at."""
    arrays = {key: m.program.weights.array(key) for key in m.program.weights}
    return {key for key, a in arrays.items() if a.storage.readonly and a.storage.touched}


def unconfirmed(m, directory, **options):
    return m.export(directory, check="none", prompts=PROMPTS, timed=False, **options)


# -- levels ------------------------------------------------------------------------------------------------------------
def test_a_changed_weight_keeps_the_class_and_the_config(made, tmp_path):
    m = gw.open(made("llama").path)
    scale_weight(m, "model.norm.weight")
    receipt = unconfirmed(m, tmp_path / "out")
    assert receipt.level == 1
    assert (tmp_path / "out/config.json").read_bytes() == (made("llama").path / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["insert", "insert_stray", "replace_mlp", "parallel"])
def test_an_added_structure_is_exported_as_code_with_reasons(made, name):
    m = gw.open(made("llama").path)
    EDITS[name](m, 1)
    before = read(m)
    plan = m.export_plan()
    assert read(m) == before
    assert (plan.level, plan.possible) == (5, (5,))
    assert [n["level"] for n in plan.not_better] == [1, 2, 3]
    assert plan.not_better[0]["path"] == plan.deviations[0].path
    assert "layers.1" in str(plan) == repr(plan)
    assert all("layers.1" in r.reasons[0].path or r.reasons[0].path == "gelu" for r in plan.levels[1:3])


@pytest.mark.parametrize("level", [1, "1", "same_class", 2, 3])
def test_a_level_that_cannot_carry_the_structure_raises(made, tmp_path, level):
    m = gw.open(made("llama").path)
    skip(m, 0)
    with pytest.raises(ExportLevelImpossible, match="expected level 5"):
        unconfirmed(m, tmp_path / "out", level=level)
    assert not (tmp_path / "out").exists()


def test_a_higher_level_can_be_requested(made, tmp_path):
    receipt = unconfirmed(gw.open(made("llama").path), tmp_path / "out", level=5)
    assert receipt.options["level"] == 5
    kept = {f.name for f in fields(ExportOptions)} - {"prompts", "text", "predicted"}
    assert receipt.options.keys() == kept
    assert receipt.not_better == [
        {"level": 1, "name": "same_class", "reason": "possible, but level 5 was requested", "path": ""}
    ]


@pytest.mark.parametrize(
    "options",
    [{"level": 6}, {"check": "maybe"}, {"prefer": "nice"}, {"dtype": "int64"}, {"prompts": []}, {"prompts": ["text"]}],
)
def test_wrong_options_are_refused_before_anything_is_written(made, tmp_path, options: Any):
    given: dict[str, Any] = {"check": "none", "prompts": PROMPTS, **options}
    with pytest.raises(UsageError):
        gw.open(made("llama").path).export(tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


# -- targets -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["{source}", "{source}/../{name}", "{source}/.."])
def test_the_source_is_never_written_to(copy, where):
    source = copy("llama")
    before = {f.name: f.read_bytes() for f in source.iterdir()}
    target = where.format(source=source, name=source.name)
    for overwrite in (False, True):
        with pytest.raises(ExportError, match="source"):
            unconfirmed(gw.open(source), target, overwrite=overwrite)
    assert {f.name: f.read_bytes() for f in source.iterdir()} == before


def test_a_saved_model_is_not_exported_onto_itself(made, tmp_path):
    gw.open(made("llama").path).save(tmp_path / "saved")
    with pytest.raises(ExportError, match="source"):
        unconfirmed(gw.open(tmp_path / "saved"), tmp_path / "saved", overwrite=True)


def test_an_existing_target_is_replaced_only_with_overwrite(made, tmp_path):
    m = gw.open(made("llama").path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(DestinationExists):
        unconfirmed(m, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["mine.txt"]
    unconfirmed(m, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out/mine.txt").exists()


def test_an_unwritable_target_is_named(made):
    with pytest.raises(GraphwrightError, match="/proc/nowhere"):
        unconfirmed(gw.open(made("llama").path), "/proc/nowhere/out")


# -- values that are not finite ---------------------------------------------------------------------------------------
def test_nan_caused_by_an_edit_is_refused_and_nan_of_the_source_written(copy, tmp_path):
    source = copy("llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    m = gw.open(source)
    receipt = unconfirmed(m, tmp_path / "a")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert any("model.norm.weight" in w for w in receipt.warnings)
    assert not receipt.confirmed
    assert receipt.probe == {}
    m.save(tmp_path / "saved")
    unconfirmed(gw.open(tmp_path / "saved"), tmp_path / "again")
    shutil.rmtree(tmp_path / "saved")
    shutil.rmtree(tmp_path / "again")
    scale_weight(m, "model.norm.weight")  # the NaN of the source is still the source's
    unconfirmed(m, tmp_path / "b")
    with m.program.edit("one more") as e:
        e.set_weight("model.norm.weight", lambda w: np.where(np.arange(len(w)) == 5, np.inf, w))
    with pytest.raises(ExportError, match=r"model\.norm\.weight") as error:
        unconfirmed(m, tmp_path / "c")
    assert error.value.got == "2 values, the first at (3,); the file has 1"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a", "b", "llama"]


@pytest.mark.deep
def test_drift_is_not_measured_if_an_edit_removes_nan_of_the_source(copy, tmp_path):
    source = copy("llama-tied")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    m = gw.open(source)
    with m.program.edit("repair") as e:
        e.set_weight("model.norm.weight", np.nan_to_num)
    receipt = m.export(tmp_path / "out", prompts=PROMPTS)
    assert receipt.confirmed
    assert receipt.drift == {}
    assert receipt.warnings == [
        "drift was not measured: model.norm.weight of the source has 1 values, the first at (3,)"
    ]


def test_a_saved_model_exports_with_its_source_and_drift(made, tmp_path):
    """Figures as of the model that was not saved in between."""
    m = gw.open(made("llama").path)
    narrow(m, 1)
    skip(m, 0)
    m.save(tmp_path / "saved")
    direct, later = unconfirmed(m, tmp_path / "a"), unconfirmed(gw.open(tmp_path / "saved"), tmp_path / "b")
    assert later.drift == direct.drift
    assert later.drift["max_abs_dlogits"] > 0
    assert later.source["program_hash"] == direct.source["program_hash"]
    for figure in ("parameters", "bytes", "flops_per_token", "kv_bytes_per_token"):
        assert later.cost[figure] == direct.cost[figure]
    assert {f["name"] for f in later.source["files"]} == {f.name for f in (tmp_path / "saved").iterdir()}
    m.save(tmp_path / "short", history="edits")
    forgotten = unconfirmed(gw.open(tmp_path / "short"), tmp_path / "c")
    assert forgotten.drift == {}
    assert "before" not in forgotten.cost["parameters"]


def test_overflow_of_a_dtype_is_refused_naming_the_key(made, tmp_path):
    m = gw.open(made("llama").path)
    with m.program.edit("large") as e:
        e.set_weight("model.norm.weight", lambda w: np.where(np.arange(len(w)) == 2, 65504 * 2, w))
    with pytest.raises(ExportError, match=r"float16\s+where +model\.norm\.weight|model\.norm\.weight"):
        unconfirmed(m, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []


# -- proof -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["copy", "pruned", "edited"])
def test_transformers_confirms_the_written_files(proved, name):
    receipt = proved(name)[2]
    assert receipt.confirmed
    assert receipt.check["export_error"]["max_rel"] <= 1e-5
    assert receipt.check["greedy_equal"] == receipt.check["tokens"] == [32, 32]
    assert receipt.check["snippet"] is True
    assert receipt.level == {"copy": 1, "pruned": 3, "edited": 5}[name]
    assert receipt.check["trust_remote_code"] == (receipt.level == 5)
    assert not any("not confirmed" in w for w in receipt.warnings)


def test_drift_measures_the_edit_and_export_error_the_files(proved):
    _, _, copied = proved("copy")
    _, _, edited = proved("edited")
    assert copied.drift == {"max_abs_dlogits": 0.0, "mean_kl_nats": 0.0, "top1_agreement": 1.0}
    assert edited.drift["max_abs_dlogits"] > 100 * edited.check["export_error"]["max_abs"]
    assert edited.drift["mean_kl_nats"] > 0
    _, _, pruned = proved("pruned")
    assert pruned.drift["max_abs_dlogits"] > 100 * pruned.check["export_error"]["max_abs"]


def test_the_card_shows_the_receipt(proved):
    _, directory, receipt = proved("edited")
    card = (directory / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (.+?) \| (.+?) \|$", card, re.MULTILINE)
    assert [row for row in table if row[0] != "---"] == receipt.summary()
    edits = json.loads((directory / "receipt.json").read_text())["journal"]["edits"]
    assert re.findall(r"^(\d+)\. (.*) \((\w+);", card, re.MULTILINE) == [
        (str(k), e["why"], e["author"]) for k, e in enumerate(edits, 1)
    ]
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    assert code == exporting.snippet(directory.name, {"trust_remote_code": True})


def flip_weight(directory: Path) -> None:
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x40  # an exponent of the last tensor
    file.write_bytes(data)


def another_config(directory: Path) -> None:
    checkpoints.edit_config(directory, rms_norm_eps=0.5)


def another_code(directory: Path) -> None:
    file = next(directory.glob("modeling_*.py"))
    file.write_text(file.read_text().replace("F.silu", "F.relu"))


def broken_code(directory: Path) -> None:
    next(directory.glob("modeling_*.py")).write_text("import graphwright\n")


SABOTAGE = {
    "weight": (1, flip_weight, "logits of the files|not finite"),
    "config": (1, another_config, "logits of the files"),
    "code": (5, another_code, "logits of the files"),
    "import": (5, broken_code, "could not load"),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_corrupted_exports_leave_no_target_and_an_old_one_intact(made, tmp_path, monkeypatch, what):
    level, damage, words = SABOTAGE[what]
    m = gw.open(made("llama-tied").path)
    before = (m.program.hash(), len(m.program.journal))
    kind = LEVELS[level]
    honest = kind.write

    def write(self, directory, *rest):
        honest(self, directory, *rest)
        damage(directory)

    monkeypatch.setattr(kind, "write", write)
    old = tmp_path / "old"
    old.mkdir()
    (old / "mine.txt").write_text("mine")
    with pytest.raises(VerificationFailed, match=words):
        m.export(old, level=level, prompts=PROMPTS, overwrite=True, keep_failed=what == "weight")
    assert [f.name for f in old.iterdir()] == ["mine.txt"]
    left = ["old", "old.failed"] if what == "weight" else ["old"]
    assert sorted(f.name for f in tmp_path.iterdir()) == left
    assert (m.program.hash(), len(m.program.journal)) == before


def test_without_transformers_check_required_raises_and_auto_reopens(made, tmp_path, monkeypatch):
    m = gw.open(made("llama-tied").path)
    for module in (exporting, clean):
        monkeypatch.setattr(module, "transformers_installed", lambda: False)
    with pytest.raises(MissingExtra, match="hf"):
        m.export(tmp_path / "a", check="required")
    receipt = m.export(tmp_path / "b", prompts=PROMPTS)
    assert not receipt.confirmed
    assert receipt.check["loader"] == "graphwright"
    assert receipt.check["export_error"]["max_abs"] == 0
    assert "not confirmed" in receipt.warnings[0]
    assert [f.name for f in tmp_path.iterdir()] == ["b"]


def test_a_rounded_export_is_compared_with_rounded_weights(made, tmp_path):
    m = gw.open(made("llama-tied").path)
    skip(m, 0)
    before = m.program.hash()
    receipt = m.export(tmp_path / "out", dtype="bfloat16", prompts=PROMPTS)
    assert receipt.confirmed
    assert not receipt.exact
    assert receipt.check["export_error"]["max_rel"] <= 1e-5
    assert receipt.cost["bytes"]["after"] * 2 == receipt.cost["bytes"]["before"]
    assert m.program.hash() == before
    shutil.rmtree(tmp_path / "out")


# -- the comparison itself ---------------------------------------------------------------------------------------------
def computed(logits, greedy) -> LoaderOutput:
    return LoaderOutput([{"logits": np.asarray(logits, np.float32)}], [np.asarray(greedy)], {})


@pytest.mark.parametrize(
    ("logits", "greedy", "margin", "words"),
    [
        ([[1.0, 2.0]], [1, 2], None, None),
        ([[1.0, 2.1]], [1, 2], None, "logits of the files"),
        ([[1.0, np.nan]], [1, 2], None, "logits of the files"),
        ([[1.0, 2.0, 3.0]], [1, 2], None, "the shapes of the loader"),
        ([[1.0, 2.0]], [1, 3], 0.5, "greedy token of the files"),
        ([[1.0, 2.0]], [1, 3], None, "greedy token of the files"),
        ([[1.0, 2.0]], [1, 3], 1e-6, None),
        ([[1.0, 2.0]], [1], 0.5, "greedy token of the files"),
    ],
)
def test_logits_and_tokens_are_compared_within_tolerance(logits, greedy, margin, words):
    ours = computed([[1.0, 2.0]], [1, 2])
    given = None if margin is None else lambda prompt, at: margin
    if words is None:
        assert compare(ours, computed(logits, greedy), 1e-5, given)["max_abs"] == 0
    else:
        with pytest.raises(VerificationFailed, match=words):
            compare(ours, computed(logits, greedy), 1e-5, given)


def test_default_prompts_fit_the_vocabulary(made):
    bundled = gw.open("bundled")
    assert check_prompts(bundled.tokenizer, 256, ["ab", [1, 2]])[0].tolist() == [97, 98]
    assert len(check_prompts(bundled.tokenizer, 256)) == 8
    few = check_prompts(bundled.tokenizer, 10)
    assert [ids.shape for ids in few] == [(64,)] * 8
    assert all(ids.max() < 10 for ids in few)
    assert check_prompts(None, 97, [[3, 4]])[0].tolist() == [3, 4]
    with pytest.raises(UsageError, match="tokenizer"):
        check_prompts(None, 97, ["text"])


def test_a_verifying_process_that_times_out_is_stopped(made, monkeypatch):
    monkeypatch.setattr(clean, "_start", START)
    monkeypatch.setattr(clean, "TIMEOUT_S", 0.05)
    with pytest.raises(VerificationFailed, match="did not finish"):
        compute_there(made("llama").path, [{"input_ids": np.array([1])}])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"timed": "no"}, "timed"),
        ({"opset": 19}, "opset"),
        ({"predicted": {"a": "b"}}, "predicted"),
        ({"level": []}, "level"),
    ],
)
def test_an_invalid_option_is_refused_before_anything_is_written(
    wrong: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        gw.open("bundled").export(tmp_path / "out", check="none", **wrong)
    assert named in str(caught.value.where)
    assert not (tmp_path / "out").exists()
