"""The tasks of classes of transformers: by its mappings, and by whether tokens read later ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import graphwright as gw
from graphwright.models.errors import CaptureError
from graphwright.models.export.examples import random_example, random_facts
from graphwright.models.importing import hub
from graphwright.models.importing.recover.later import reads_later
from graphwright.models.importing.tasks import hub_task


@pytest.mark.parametrize(
    ("name", "task"),
    [("FlaubertWithLMHeadModel", "masked-lm"), ("BartForConditionalGeneration", "sequence-to-sequence"),
     ("ReformerModelWithLMHead", "causal-lm"), ("GPT2LMHeadModel", "causal-lm"), ("BertModel", "features"),
     ("MarianMTModel", "sequence-to-sequence"),
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
    [("BertLMHeadModel", BERT, "masked-lm"),
     pytest.param("BertLMHeadModel", BERT | {"is_decoder": True}, "causal-lm", marks=pytest.mark.deep),
     pytest.param("XLMWithLMHeadModel", XLM, "masked-lm", marks=pytest.mark.deep),
     pytest.param("XLMWithLMHeadModel", XLM | {"causal": True}, "causal-lm", marks=pytest.mark.deep),
     pytest.param("FlaubertWithLMHeadModel", XLM, "masked-lm", marks=pytest.mark.deep)],
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


MIXTURE = BERT | {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
          "image_size": 32, "patch_size": 8}  # fmt: skip
SERIES = {"d_model": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64, "context_length": 32,
          "prediction_length": 8, "num_input_channels": 3, "patch_length": 8, "patch_stride": 8}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "choices": ("BertForMultipleChoice", BERT, {"input_ids": ("B", "C", "T"), "attention_mask": ("B", "C", "T")}),
    "series": ("PatchTSTForPrediction", SERIES, {"past_values": ("B", 32, 3)}),
    "video": ("VivitForVideoClassification", VISION | {"num_frames": 4, "tubelet_size": [2, 8, 8]},
              {"pixel_values": ("B", 4, 3, 32, 32)}),
    "text beside an image": (
        "BlipForImageTextRetrieval",
        {"text_config": BERT | {"encoder_hidden_size": 32, "projection_dim": 16}, "image_text_hidden_size": 16,
         "vision_config": VISION | {"projection_dim": 16}},
        {"input_ids": ("B", "T"), "attention_mask": ("B", "T"), "pixel_values": ("B", 3, 32, 32)}),
    "objects": ("YolosForObjectDetection", VISION | {"image_size": [32, 48], "num_detection_tokens": 5},
                {"pixel_values": ("B", 3, 32, 48)}),
    "complex rotation": (
        "DeepseekV2ForCausalLM",
        MIXTURE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 16,
                   "q_lora_rank": 16, "v_head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                   "moe_intermediate_size": 16},
        {"ids": ("B", "T"), "positions": ("B", "T")}),
    "fourier": ("FNetForMaskedLM", BERT, {"input_ids": ("B", "T")}),
    "stored buffers": (
        "MiniMaxForCausalLM",
        MIXTURE | {"num_local_experts": 2, "block_size": 256, "layer_types": ["linear_attention"]},
        {"ids": ("B", "T"), "positions": ("B", "T")}),
}  # fmt: skip
QUICK = ("series",)


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.deep) for k in SHAPES])
def test_class_opens_with_inputs_of_its_kind(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, fields, shapes = SHAPES[kind]
    made: Any = getattr(tf, name)
    torch.manual_seed(0)
    module = made(made.config_class(**fields)).eval()
    module.save_pretrained(tmp_path / "model")
    model = gw.open(tmp_path / "model", tokenizer=False)
    assert {n: model.program.spec(model.program.node(n)).shape for n in model.program.input_names()} == shapes
    for number, facts in enumerate(random_facts(model.program)):
        given = random_example(facts, number)
        hub_names = {"ids": "input_ids", "positions": "position_ids"}
        with torch.no_grad():
            theirs = module(**{hub_names.get(n, n): torch.from_numpy(a) for n, a in given.items()}, return_dict=True)
        if model.task == "causal-lm":
            assert np.allclose(model.logits(given["ids"]), theirs.logits, atol=1e-5)
        else:
            same = {n: a for n, a in model.outputs(**given).items() if n in theirs}
            assert same
            assert all(np.allclose(a, theirs[n], atol=1e-5) for n, a in same.items())


class Scored(tf.PreTrainedModel):
    """A class with an input of its own."""

    config_class = tf.BertConfig

    def forward(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return input_ids * scores


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [("Scored", BERT, "scores"),
     pytest.param("ViltModel", BERT | VISION, "modeling_vilt.py", marks=pytest.mark.deep),
     pytest.param("LongformerForMaskedLM", BERT | {"attention_window": 4}, "modeling_longformer.py",
                  marks=pytest.mark.deep)],
)  # fmt: skip
def test_class_without_a_graph_is_refused_with_its_reason_and_a_way_out(name, fields, reason, capfd):
    made: Any = getattr(tf, name, Scored)
    config = made.config_class(**fields)
    module, values = hub.meta_module(made, config, torch.float32)
    capfd.readouterr()
    with pytest.raises(CaptureError, match="from_torch") as refused:
        hub._program(module, config, hub_task(name), values)
    assert reason in str(refused.value)
    assert capfd.readouterr() == ("", "")
