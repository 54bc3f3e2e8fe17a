"""Small encoders of transformers with random weights and sizes that all differ, and inputs for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import transformers

HEADS = 3
TEXT = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "intermediate_size": 20, "max_position_embeddings": 17, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
IMAGES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 20,
          "image_size": 14, "patch_size": 4, "num_channels": 2}  # fmt: skip
LABELS = {"num_labels": 5}


@dataclass(frozen=True)
class Sample:
    """A class of transformers with a config.

    Attributes:
        config, model: names of the classes.
        fields: of the config.
        deep: whether the tests of an ordinary run leave it out where a class of the same family stands for it.
    """

    config: str
    model: str
    fields: dict[str, Any]
    deep: bool = True

    @property
    def exact(self) -> float:
        """Relative difference of float64 outputs: transformers rotates in float32."""
        return 2e-7 if self.config.startswith("ModernBert") else 1e-12

    @property
    def images(self) -> bool:
        return "image_size" in self.fields


def _family(
    stem: str, fields: dict[str, Any], endings: tuple[str, ...], ordinary: tuple[str, ...]
) -> dict[str, Sample]:
    """The classes of a family by name; a class with another ending than the `ordinary` ones is deep."""
    labelled = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
    return {f"{stem}{end}": Sample(f"{stem}Config", f"{stem}{end}", {**fields, **(LABELS if end in labelled else {})},
                                   end not in ordinary) for end in endings}  # fmt: skip


TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
SAMPLES: dict[str, Sample] = {
    **_family("Bert", TEXT, TASKS, ("Model", "ForMaskedLM")),
    **_family(
        "Roberta",
        TEXT | {"pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1},
        TASKS,
        ("ForSequenceClassification",),
    ),
    **_family("XLMRoberta", TEXT | {"pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1}, TASKS, ()),
    **_family(
        "DistilBert",
        {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 20, "max_position_embeddings": 17},
        TASKS,
        ("ForTokenClassification",),
    ),
    **_family("Albert", TEXT | {"embedding_size": 14}, TASKS, ("ForMaskedLM",)),
    **_family(
        "ModernBert",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 4, "local_attention": 4},
        TASKS,
        ("ForMaskedLM",),
    ),
    **_family("ViT", IMAGES, ("Model", "ForImageClassification"), ("ForImageClassification",)),
    **_family("Dinov2", IMAGES | {"mlp_ratio": 2}, ("Model", "ForImageClassification"), ("ForImageClassification",)),
    **_family("CLIPVision", IMAGES | {"projection_dim": 10}, ("Model", "ModelWithProjection"), ("Model",)),
    **_family("SiglipVision", IMAGES, ("Model",), ("Model",)),
    "ViT, oblong": Sample(
        "ViTConfig",
        "ViTModel",
        IMAGES
        | {
            "image_size": [12, 20],
            "patch_size": [4, 5],
            "qkv_bias": False,
            "pooler_output_size": 14,
            "pooler_act": "relu",
        },
    ),
    "Dinov2, gated": Sample("Dinov2Config", "Dinov2Model", IMAGES | {"use_swiglu_ffn": True}),
    "SiglipVision, no pooler": Sample("SiglipVisionConfig", "SiglipVisionModel", IMAGES | {"vision_use_head": False}),
    "ModernBert, biases": Sample(
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {
            **TEXT,
            **LABELS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 6,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "classifier_activation": "silu",
            "hidden_activation": "gelu_new",
        },
    ),
}


@dataclass(frozen=True)
class Saved:
    """A directory of a sample and its module."""

    path: Path
    module: Any
    sample: Sample

    def outputs(self, feeds: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
        """The outputs of the module by name, in a dtype."""
        given = {n: torch.from_numpy(a).to(dtype if a.dtype.kind == "f" else torch.int64) for n, a in feeds.items()}
        with torch.no_grad():
            found = self.module.to(dtype)(**given)
        self.module.to(torch.float32)
        return {name: t.numpy() for name, t in found.items() if torch.is_tensor(t)}


def make(path: Path, sample: Sample, **fields: Any) -> Saved:
    """Write a checkpoint with random weights."""
    config = getattr(transformers, sample.config)(**{**sample.fields, **fields})
    module = getattr(transformers, sample.model)(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, w in module.named_parameters():
            scale = 0.2 if w.ndim == 1 else (w.numel() / w.shape[0]) ** -0.5
            w.copy_(torch.randn(w.shape, generator=generator) * scale + (w.ndim == 1 and key.endswith("weight")))
    module.save_pretrained(path)
    return Saved(path, module, dataclasses.replace(sample, fields={**sample.fields, **fields}))


@cache
def saved(name: str) -> Saved:
    """The checkpoint of a sample, written once per process and never changed."""
    return make(Path(mkdtemp()) / name, SAMPLES[name])


def feeds_of(sample: Sample, names: tuple[str, ...], batch: int = 2, length: int = 9) -> dict[str, np.ndarray]:
    """Random inputs of a program; the first text of a batch is padded."""
    rng, found = np.random.default_rng(batch), {}
    for name in names:
        if name == "pixel_values":
            size = np.broadcast_to(sample.fields["image_size"], 2)
            found[name] = rng.normal(size=(batch, sample.fields["num_channels"], *size)).astype("f4")
        elif name == "token_type_ids":
            found[name] = rng.integers(0, sample.fields.get("type_vocab_size", 2), (batch, length))
        else:
            found[name] = rng.integers(3, 60, (batch, length))
        if name == "attention_mask":
            found[name] = np.ones((batch, length), np.int64)
            found[name][0, -2:] = 0
    if "input_ids" in found and "attention_mask" in found:
        found["input_ids"][found["attention_mask"] == 0] = sample.fields.get("pad_token_id", 0)
    return found
