"""Saved programs that are not language models: every command that reads a graph takes them, and evolved champions."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnxruntime
import pytest

import graphwright as gw
from graphwright.program import load


@pytest.fixture
def net(tmp_path: Path) -> Path:
    b = gw.Builder("net")
    x = b.input("x", ("N", 3))
    w = b.param("fc.weight", np.arange(9, dtype="f4").reshape(3, 3) / 9)
    b.output(b.junction(x, b.tanh(b.linear(x, w, name="fc"), name="act"), name="sum"), "y")
    return Path(b.build().save(tmp_path / "net"))


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = gw.evolve.Evolution(gw.evolve.tasks.named("xor"), settings=gw.evolve.NEAT(population=20), seed=0)
    out = tmp_path_factory.mktemp("evolved")
    run.run(1).best.program.save(out / "champion")
    return out


def test_inspect_describes_a_program(call, net):
    facts = json.loads(call("inspect", net, "--json"))
    assert (facts["family"], facts["model"], facts["parameters"], facts["nbytes"]) == ("program", "net", 9, 36)
    assert facts["flops_per_token"] == 2 * 9 + 3 + 3  # the product, tanh, the sum
    assert list(facts["inputs"]) == ["x"]
    text = call("inspect", net)
    assert "FLOP per sample of x f32[N, 3]" in text
    assert "token" not in text


def test_a_program_is_edited_in_place_and_to_another_directory(call, net, tmp_path):
    call("edit", net, tmp_path / "cut", "--cut", "act -> sum")
    assert load(net).hash() != load(tmp_path / "cut").hash()
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(load(tmp_path / "cut")(x=x)["y"].numpy(), x)
    facts = json.loads(call("diff", net, tmp_path / "cut", "--json", code=1).partition("\nerror")[0])
    assert facts["identical"] is False
    call("edit", tmp_path / "cut", "--undo", 1)
    assert "equal" in call("diff", net, tmp_path / "cut")
    assert "two language models" in call("diff", net, net, "--logits", "a text", code=2)


def test_a_program_has_no_vocabulary(call, net, tmp_path):
    message = call("edit", net, tmp_path / "out", "--resize-vocab", 300, code=2)
    assert "not a language model" in message


def test_a_program_is_exported_as_onnx(call, net, tmp_path):
    out = tmp_path / "net.onnx"
    assert "onnxruntime within" in call("export", net, out)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("f4")
    (y,) = onnxruntime.InferenceSession(str(out)).run(["y"], {"x": x})
    assert np.allclose(np.asarray(y), load(net)(x=x)["y"].numpy(), atol=1e-6)
    assert "exists" in call("export", net, out, code=2)
    assert "not a language model" in call("export", net, tmp_path / "folder", code=2)
    assert "not a language model" in call("export", net, "--plan", code=2)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", ["picture.svg", "picture.html", "picture.dot"])
def test_draw_writes_the_picture_of_a_program(call, net, tmp_path, name):
    out = tmp_path / name
    facts = json.loads(call("draw", net, out, "--json"))
    text = out.read_text(encoding="utf-8")
    assert facts["bytes"] == len(text.encode())
    assert "act" in text
    if name.endswith(".svg"):
        assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "already exists" in call("draw", net, out, code=2)
    assert "unknown kind of picture" in call("draw", net, tmp_path / "picture.png", code=2)


def test_draw_compares_two_programs(call, net, tmp_path):
    call("edit", net, tmp_path / "cut", "--cut", "act -> sum")
    call("draw", tmp_path / "cut", tmp_path / "diff.svg", "--diff", net)
    assert "gw-removed" in (tmp_path / "diff.svg").read_text(encoding="utf-8")
    call("draw", "bundled", tmp_path / "model.svg", "--level", 1)


def test_the_champion_of_an_evolution_is_opened_by_the_directory_of_the_run(call, evolved, tmp_path):
    parameters = sum(p.size for p in (load(evolved / "champion").spec(n) for n in load(evolved / "champion").params()))
    assert json.loads(call("inspect", evolved, "--json"))["parameters"] == parameters
    call("draw", evolved, tmp_path / "champion.svg")
    call("export", evolved, tmp_path / "champion.onnx")
    assert "equal" in call("diff", evolved, evolved / "champion")


@pytest.mark.parametrize("verb", [("generate",), ("run", "--text", "a"), ("prune", "--dry-run")])
def test_commands_for_language_models_name_what_they_got(call, net, verb):
    assert "this is a saved program, not a language model" in call(verb[0], net, *verb[1:], code=2)


def test_a_directory_that_is_not_saved_is_not_edited_in_place(call, evolved):
    for directory in ("bundled", evolved):
        message = call("edit", directory, "--undo", 1, code=2)
        assert "cannot change this directory in place" in message
        assert "a saved model or program" in message
