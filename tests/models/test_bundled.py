"""The model in the package: the files that training.json describes, and figures that transformers gets too."""

from __future__ import annotations

import json
import platform
from hashlib import sha256

import numpy as np
import pytest
import torch
import transformers

import graphwright as gw
from graphwright.models import ModelNotFound
from graphwright.models import bundled as module
from graphwright.models.bundled import CONFIG, RECIPE, bundled, pydoc_split, text_sha256

FACTS = json.loads((bundled() / "training.json").read_text())
SAME_TEXT = pytest.mark.skipif(
    text_sha256(pydoc_split()[1]) != FACTS["text"]["held_out_sha256"],
    reason=f"topics of CPython {platform.python_version()}",
)


def test_the_bundled_files_have_the_recorded_digests():
    directory = bundled()
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json", "README.md"} <= {
        f.name for f in directory.iterdir()
    }
    for name, digest in FACTS["sha256"].items():
        assert sha256((directory / name).read_bytes()).hexdigest() == digest
    assert sum(f.stat().st_size for f in directory.iterdir()) < 4_000_000
    assert json.loads((directory / "config.json").read_text()) == CONFIG
    assert FACTS["recipe"]["steps"] == RECIPE.steps == len(FACTS["loss"])
    card = (directory / "README.md").read_text()
    assert f"{FACTS['bits_per_byte']['held_out']:.4f} bits per byte" in card
    assert FACTS["bits_per_byte"]["held_out"] <= 1.66


@pytest.fixture(scope="module")
def theirs():
    model, facts = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair
        bundled(), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    return model.eval()


def test_it_loads_in_transformers_with_its_tokenizer(theirs):
    assert sum(p.numel() for p in theirs.parameters()) == 1_623_744
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled())
    assert tokenizer("héllo\n").input_ids == list("héllo\n".encode())
    assert tokenizer.decode(list("héllo".encode())) == "héllo"


def test_bits_per_byte_of_an_excerpt_match_transformers(theirs):
    text = pydoc_split()[1][:4000]
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    nats, scored, upto = 0.0, 0, 1
    starts = [*range(0, len(ids) - 256 + 1, 128)]
    starts += [len(ids) - 256] if starts[-1] + 256 < len(ids) else []
    for start in starts:
        with torch.no_grad():
            logits = theirs(torch.from_numpy(ids[None, start : start + 256])).logits[0]
        first = upto - start
        rows = torch.log_softmax(logits.double(), -1)[first - 1 : 255]
        targets = torch.from_numpy(ids[start + first : start + 256])
        nats -= float(rows.gather(1, targets[:, None]).sum())
        scored += len(targets)
        upto = start + 256
    ours = gw.open("bundled").perplexity(text)
    assert (ours.tokens, ours.bytes) == (scored, scored)
    assert ours.bits_per_byte == pytest.approx(nats / np.log(2) / scored, abs=1e-5)


@SAME_TEXT
@pytest.mark.deep
def test_held_out_bits_per_byte_match_training_json():
    held_out = pydoc_split()[1]
    assert FACTS["text"]["held_out_bytes"] == len(held_out.encode())
    found = gw.open("bundled").perplexity(held_out)
    assert found.bits_per_byte == pytest.approx(FACTS["bits_per_byte"]["held_out"], abs=0.005)


def test_a_build_without_the_model_raises_with_the_fix(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "bundled.py"))
    with pytest.raises(ModelNotFound, match="train_bundled"):
        bundled()
