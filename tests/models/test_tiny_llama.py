"""The trained fixture: its files are those of its script, and it does what it was trained for."""

import json

import pytest

import graphwright as gw
from fixtures import tiny_llama


def test_the_stored_model_was_made_by_the_present_script():
    assert json.loads((tiny_llama.HERE / "made.json").read_text())["script"] == tiny_llama.script_hash()


@pytest.mark.parametrize("kind", ["f32", "bf16", "sharded"])
def test_the_stored_model_solves_its_task(kind):
    ids, mask = tiny_llama.batch(10**6, 64)
    logits = gw.open(tiny_llama.directory(kind)).logits(ids)
    assert tiny_llama.accuracy(logits, ids, mask) > 0.94
    assert tiny_llama.loss(logits, ids, mask) < 0.6
