"""A journal or a YAML recipe on another checkpoint of the family: the same structure, or nothing, and no reads."""

from __future__ import annotations

import json
import shutil

import checkpoints
import numpy as np
import pytest
from typer.testing import CliRunner

import graphwright as gw
from graphwright.cli import app
from graphwright.graph import chain
from graphwright.program import ProgramFileError, ReplayConflict, apply_recipe, replay

RECIPE = """
# manually
- why: a third of the neurons of two layers, and whole key heads
  cut_units: {"layers.{1,2}.mlp.neurons": 0-19 30, layers.0.attn.kv_groups: 1}
- why: a head alone
  ragged: true
  cut_units: {layers.1.attn.heads: [4]}
- cut: layers.2.attn.o -> layers.2.mid
- why: several things
  insert: "layers.0.mlp.down -> layers.0.out : tanh"
  connect: ["layers.0.out -> layers.2.out"]
  set: {layers.0.attn.sdpa.window: 9}
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints of one config with other weights."""
    return [checkpoints.make(tmp_path_factory.mktemp("pair"), "llama", seed=seed).path for seed in (1, 2)]


def edit_manually(p):
    with p.edit("a third of the neurons of two layers, and whole key heads") as e:
        e.cut_units(p.select("layers.{1,2}.mlp").neurons[[*range(20), 30]])
        e.cut_units(p.select("layers.0.attn").kv_groups[1])
    with p.edit("a head alone") as e:
        e.cut_units(p.select("layers.1.attn").heads[[4]], ragged=True)
    with p.edit("cut") as e:
        e.cut("layers.2.attn.o -> layers.2.mid")
    with p.edit("several things") as e:
        e.insert("layers.0.mlp.down -> layers.0.out", "tanh")
        e.connect("layers.0.out", "layers.2.out")
        e.set_attr("layers.0.attn.sdpa", window=9)


def written(tmp_path, text=RECIPE):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def touched(p) -> bool:
    return any(v.data.storage.readonly and v.data.storage.touched for v in p.weights.values())


def test_a_recipe_equals_manual_edits(pair, tmp_path):
    ours, theirs = (gw.open(pair[0]).program for _ in range(2))
    edit_manually(theirs)
    done = apply_recipe(written(tmp_path), ours)
    assert ours.hash() == theirs.hash()
    assert [e.why for e in done.entries][:2] == [e.why for e in theirs.journal][:2]
    assert {e.tool for e in ours.journal} == {"recipe"}
    ours.undo(4)
    assert ours.hash() == gw.open(pair[0]).program.hash()


def test_a_journal_of_unit_cuts_replays_from_its_lines_alone(pair, tmp_path):
    """Cuts of neurons, of key heads and of a head alone, whose table the line tells itself; then the same level."""
    first, second = (gw.open(path) for path in pair)
    edit_manually(first.program)
    lines = tmp_path / "journal.jsonl"
    chain.write(lines, first.program.journal.chain)
    replay(lines, second.program)
    assert second.program.structure_hash() == first.program.structure_hash()
    assert second.export_plan().level == first.export_plan().level
    kept = np.setdiff1d(np.arange(76), [*range(20), 30])
    key = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(second.program.weights[key].numpy(),
                                  gw.open(pair[1]).program.weights[key].numpy()[kept])  # fmt: skip


@pytest.mark.parametrize(
    ("step", "where", "what"),
    [
        ("cut_units: {layers.9.mlp.neurons: 3}", "step 4", "no axis"),
        ("cut_units: {layers.1.mlp.neurons: 70}", "step 4", "unit index out of range"),
        ("cut_units: {layers.2.attn.heads: 0}", "step 4", "unequal number"),
        ("cut: layers.1.mlp.down -> layers.2.out", "step 4", ""),
        ("cut: layers.1.act", "step 4", ""),
        ("insert: layers.1.mlp.down", "step 4", "cannot be read"),
        ("set: {layers.1.attn.sdpa.colour: 1}", "step 4", ""),
        ("remove: layers.1.mlp.act", "step 4", ""),
    ],
)
def test_the_first_invalid_step_is_named_and_nothing_is_read_or_changed(pair, tmp_path, step, where, what):
    p = gw.open(pair[0]).program
    before = p.structure_hash()
    with pytest.raises(ReplayConflict, match=where) as error:
        apply_recipe(written(tmp_path, f"{RECIPE}- {step}\n"), p)
    assert what in error.value.what
    assert not touched(p)
    assert (p.structure_hash(), len(p.journal)) == (before, 0)


def test_a_mismatched_journal_is_refused_without_reading_weights(pair, made):
    p = gw.open(pair[0]).program
    p.select("layers.2.mlp").neurons[:70].prune()
    p.select("layers.1.attn").kv_groups[1].prune()
    other = gw.open(made("llama-one-group").path).program
    with pytest.raises(ReplayConflict, match="entry 1"):
        replay(p, other)
    assert not touched(other)
    assert len(other.journal) == 0


def test_replay_warns_of_copied_weights(pair, tmp_path):
    m = gw.open(pair[0])
    key = "model.layers.1.self_attn.o_proj.weight"
    m.select("layers.0.mlp").neurons[:3].prune()
    with m.program.edit("values") as e:
        e.set_weight(key, lambda w: w * 2)
    m.save(tmp_path / "saved")
    warned = {}
    for path in pair:
        p = gw.open(path).program
        warned[path] = [e.warnings for e in apply_recipe(tmp_path / "saved", p).entries]
        assert p.structure_hash() == m.program.structure_hash()
    assert warned[pair[0]] == [(), ()]
    assert warned[pair[1]] == [(), (f"{key}: the values are those of the program that was recorded",)]


NO_RECIPES = [
    *("", "nothing", "- 3", "- why: nothing is done", "- explode: all", "steps: {}", "- [", "- !!python/object:x {}"),
    "- cut: x\n  ragged: maybe",
]


@pytest.mark.parametrize("text", NO_RECIPES)
def test_invalid_recipe_files_are_refused(pair, tmp_path, text):
    p = gw.open(pair[0]).program
    with pytest.raises(ProgramFileError, match=r"recipe\.yaml"):
        apply_recipe(written(tmp_path, text), p)


def test_recipes_can_be_applied_on_the_command_line(pair, tmp_path):
    path, out = written(tmp_path), tmp_path / "out"
    done = CliRunner().invoke(app, ["edit", str(pair[1]), "--apply", str(path), str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["journal"] == 4
    assert json.loads(done.stdout)["warnings"] == []
    one = gw.open(pair[0]).program
    edit_manually(one)
    assert gw.open(out).program.structure_hash() == one.structure_hash()
    again = tmp_path / "again"
    for journal in (out, out / "journal.jsonl"):
        done = CliRunner().invoke(app, ["edit", str(pair[1]), "--apply", str(journal), "--out", str(again), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["after"] == gw.open(out).program.hash()
        shutil.rmtree(again)
    path.write_text(RECIPE.replace("layers.2.attn.o", "layers.7.attn.o"))
    done = CliRunner().invoke(app, ["edit", str(pair[1]), "--apply", str(path), "--out", str(again), "--json"])
    assert done.exit_code != 0
    assert not again.exists()
