"""A saved model continues in another process: journal, undo, redo, config, tokenizer, and the same logits."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import some_ids
from edits import cut_mlp, link, scale_weight

import graphwright as gw
from graphwright.files import DestinationExists
from graphwright.models import ConfigError
from graphwright.models.open import is_saved
from graphwright.models.tokenizer import need_tokenizer

CONTINUE = """
import json, sys, numpy as np, graphwright as gw
ids = np.load(sys.argv[1])
for folder in sys.argv[2:]:
    m = gw.open(folder)
    p = m.program
    out = {"hash": p.hash(), "journal": p.journal.hash, "whys": [e.why for e in p.journal], "version": len(p.journal),
           "logits": m.logits(ids).tolist(), "compute": m.compute}
    p.undo(2)
    out["undone"] = p.hash()
    p.redo(1)
    out["redone"] = p.hash()
    with p.edit("in another process") as e:
        e.set_weight("model.norm.weight", lambda w: w * 2)
    m.save(folder + "-again")
    out["after"] = p.hash()
    print(json.dumps(out))
"""


def test_another_process_loads_and_continues_a_saved_model(made, tmp_path):
    models, hashes, ids = {}, {}, some_ids((2, 9))
    for feature in ("llama-tied", "qwen3-bias", "mistral-window"):
        m = gw.open(made(feature).path)
        p, folder = m.program, tmp_path / feature
        models[folder], hashes[folder] = m, [p.hash()]
        for make in (cut_mlp, link):
            make(m, 1 if make is cut_mlp else 0)
            hashes[folder].append(p.hash())
        scale_weight(m, "model.norm.weight")
        p.undo()
        m.save(folder)
    np.save(tmp_path / "ids.npy", ids)
    command = [sys.executable, "-c", CONTINUE, tmp_path / "ids.npy", *models]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (folder, m), line in zip(models.items(), done.stdout.splitlines(), strict=True):
        found, p = json.loads(line), m.program
        assert found["hash"] == p.hash() == hashes[folder][2]
        assert found["journal"] == p.journal.hash
        assert found["whys"] == [e.why for e in p.journal]
        np.testing.assert_array_equal(np.array(found["logits"], np.float32), m.logits(ids))
        assert (found["undone"], found["redone"]) == (hashes[folder][0], hashes[folder][1])
        again = gw.open(f"{folder}-again")
        assert again.program.hash() == found["after"]
        assert again.program.journal[-1].why == "in another process"
        again.program.undo(2)
        assert again.program.hash() == hashes[folder][0]


def test_saving_keeps_config_tokenizer_and_companion_files(made, tmp_path, copy):
    source = copy("llama")
    (source / "LICENSE").write_bytes(b"terms")
    m = gw.open(source, compute="bfloat16")
    m.save(tmp_path / "saved")
    assert is_saved(tmp_path / "saved")
    assert not is_saved(source)
    assert (tmp_path / "saved/LICENSE").read_bytes() == b"terms"
    assert (tmp_path / "saved/config.json").read_bytes() == (source / "config.json").read_bytes()
    again = gw.open(tmp_path / "saved")
    assert (again.compute, again.keys, again.arch.name) == ("bfloat16", m.keys, "llama")
    assert (again.tokenizer is None) == (m.tokenizer is None)
    bundled = gw.open("bundled")
    bundled.save(tmp_path / "bytes")
    assert need_tokenizer(gw.open(tmp_path / "bytes")).encode("hé") == [104, 195, 169]


@pytest.mark.deep
def test_a_saved_model_exports_like_the_original_one(made, tmp_path):
    m = gw.open(made("llama-tied").path)
    scale_weight(m, "model.norm.weight")
    m.save(tmp_path / "saved")
    options = {"check": "none", "prompts": [[1, 2]]}
    direct = m.export(tmp_path / "a", **options)
    receipt = gw.open(tmp_path / "saved").export(tmp_path / "b", **options)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    a, b = (gw.open(tmp_path / x).program.hash() for x in "ab")
    assert a == b
    assert receipt.drift == direct.drift
    assert [e["why"] for e in receipt.journal["edits"]] == ["scale model.norm.weight"]


def test_an_existing_directory_is_replaced_only_on_request(made, tmp_path):
    m = gw.open(made("llama").path)
    m.save(tmp_path / "saved")
    with pytest.raises(DestinationExists):
        m.save(tmp_path / "saved")
    scale_weight(m, "model.norm.weight")
    m.save(tmp_path / "saved", overwrite=True)
    assert gw.open(tmp_path / "saved").program.hash() == m.program.hash()


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 2}',
        "[]",
        "{",
        '{"schema": 1}',
        '{"schema": 1, "keys": [], "compute": "float32"}',
        '{"schema": 1, "keys": {"a": 1}, "compute": "float32"}',
        '{"schema": 1, "keys": {}, "compute": "int8"}',
    ],
)
def test_invalid_model_facts_are_refused(made, tmp_path, text):
    gw.open(made("llama").path).save(tmp_path / "saved")
    (tmp_path / "saved/model.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.json"):
        gw.open(tmp_path / "saved")
