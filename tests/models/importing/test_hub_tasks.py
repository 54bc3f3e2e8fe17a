"""The tasks of classes of transformers: by its mappings, and by whether tokens read later ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import graphwright as gw
from graphwright.models.importing.recover.later import reads_later
from graphwright.models.importing.tasks import hub_task


@pytest.mark.parametrize(
    ("name", "task"),
    [("FlaubertWithLMHeadModel", "masked-lm"), ("BartForConditionalGeneration", "sequence-to-sequence"),
     ("ReformerModelWithLMHead", "causal-lm"), ("GPT2LMHeadModel", "causal-lm"), ("BertModel", "features"),
     ("DetrForObjectDetection", "object-detection"), ("PatchTSTForPrediction", "time-series-prediction"),
     ("ClassOfNobody", "features"), ("ClassOfNobodyForMaskedLM", "masked-lm")],
)  # fmt: skip
def test_mappings_of_transformers_decide_the_task(name, task):
    assert hub_task(name) == task


class Written(nn.Module):
    """Attention written out, whose mask depends on the input, so that it is not recovered as attributes."""

    def __init__(self, causal: bool, extra: int = 0) -> None:
        super().__init__()
        self.q, self.k, self.causal, self.extra = nn.Linear(8, 8), nn.Linear(8, 8), causal, extra

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1])
        seen = steps[None, None] < lengths[:, None, None]
        if self.causal:
            seen = seen & (steps[None] <= steps[:, None] + self.extra)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return scores.masked_fill(~seen, -float("inf")).softmax(-1) @ x


@pytest.mark.parametrize(("causal", "extra"), [(True, 0), (True, 1), (False, 0)])
def test_attention_to_later_tokens_is_found(causal, extra):
    module = Written(causal, extra)
    x, lengths = torch.randn(3, 5, 8), torch.tensor([5, 5, 5])
    sizes = {"x": ("B", "T", 8), "lengths": ("B",)}
    found = reads_later(gw.from_torch(module, (x, lengths), sizes=sizes))
    with torch.no_grad():
        changed = x.clone()
        changed[:, -1] += 1
        moved = (module(x, lengths) - module(changed, lengths))[:, :-1].abs().max() > 0
    assert found == bool(moved) == (not causal or extra > 0)


SMALL = {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
BERT = SMALL | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
XLM = SMALL | {"emb_dim": 32, "n_layers": 1, "n_heads": 4}


@pytest.mark.parametrize(
    ("name", "fields", "task"),
    [("XLMWithLMHeadModel", XLM, "masked-lm"), ("BertLMHeadModel", BERT | {"is_decoder": True}, "causal-lm"),
     pytest.param("XLMWithLMHeadModel", XLM | {"causal": True}, "causal-lm", marks=pytest.mark.deep),
     pytest.param("FlaubertWithLMHeadModel", XLM, "masked-lm", marks=pytest.mark.deep),
     pytest.param("BertLMHeadModel", BERT, "masked-lm", marks=pytest.mark.deep)],
)  # fmt: skip
def test_class_of_two_tasks_opens_with_that_of_its_config(name, fields, task, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: Any = getattr(tf, name)
    torch.manual_seed(0)
    module = made(made.config_class(**fields)).eval()
    module.save_pretrained(tmp_path / "model")
    model = gw.open(tmp_path / "model", tokenizer=False)
    assert model.task == task
    ids = np.array([[5, 6, 7, 8, 9], [4, 3, 2, 7, 8]])
    got = model.logits(ids) if task == "causal-lm" else model.outputs(input_ids=ids)["logits"]
    with torch.no_grad():
        assert np.allclose(got, module(torch.from_numpy(ids)).logits, atol=1e-5)
