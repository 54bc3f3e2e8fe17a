"""Recovery of transformers' classes: counts that configs say, outputs and gradients beside torch, units, cut heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import graphwright as gw
from graphwright.models.importing.recover import Recovered, recover

HEADS, LAYERS = 4, 2
SMALL = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64,
         "vocab_size": 99, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Family:
    """A class of transformers with a small config, and what is in each of its layers.

    Attributes:
        layer: recovered ops of a layer.
        masks: (causal, window, optional operands) of each attention, in the order of layers.
        out: the end of the key of the matrix that reads the heads, for a family with a fused weight.
        neurons: number of hidden units of all layers.
        deep: run with HYPOTHESIS_PROFILE=deep only.
    """

    config: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, int] = field(default_factory=dict)
    masks: tuple[Any, ...] = ((True, None, ()),) * LAYERS
    padded: bool = False
    out: str = ""
    neurons: int = 64 * LAYERS
    deep: bool = True


CAUSAL, ALL = (True, None, ()), (False, None, ())
ROPE = {"sdpa": 1, "rope": 2}
LLAMA = {**ROPE, "rms_norm": 2}
FAMILIES = {
    "llama": Family("Llama", "ForCausalLM", GROUPED, LLAMA),
    "qwen3": Family("Qwen3", "ForCausalLM", {**GROUPED, "head_dim": 8}, {**ROPE, "rms_norm": 4}),
    "mistral": Family("Mistral", "ForCausalLM", {**GROUPED, "sliding_window": 4}, LLAMA, ((True, 4, ()),) * 2),
    "mistral, padded": Family("Mistral", "ForCausalLM", {**GROUPED, "sliding_window": 4}, LLAMA,
                              ((True, 4, ("key_mask",)),) * 2, padded=True),
    "gemma3": Family("Gemma3Text:Gemma3", "ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4,
                     "layer_types": ["sliding_attention", "full_attention"]}, {**ROPE, "rms_norm": 6},
                     ((True, 4, ()), CAUSAL), deep=False),
    "gemma2": Family("Gemma2", "ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4,
                     "attn_implementation": "eager"}, {**ROPE, "rms_norm": 4}, ((True, 4, ()), CAUSAL)),
    "phi3": Family("Phi3", "ForCausalLM", GROUPED, LLAMA, out="o_proj.weight"),
    "olmo2": Family("Olmo2", "ForCausalLM", GROUPED, {**ROPE, "rms_norm": 4}),
    "mixtral": Family("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 4}, LLAMA),
    "gpt-oss": Family("GptOss", "ForCausalLM", {**GROUPED, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4,
                      "num_experts_per_tok": 2}, {**LLAMA, "dispatch": 1},
                      ((True, 4, ("sinks",)), (True, None, ("sinks",)))),
    "gpt2": Family("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": HEADS},
                   {"sdpa": 1, "linear": 4, "gelu": 1}, out="attn.c_proj.weight", neurons=256, deep=False),
    "gpt-neox": Family("GPTNeoX", "ForCausalLM", {}, ROPE, out="attention.dense.weight"),
    "bert": Family("Bert", "ForMaskedLM", {}, {"sdpa": 1}, (ALL, ALL)),
    "bert, padded": Family("Bert", "ForMaskedLM", {}, {"sdpa": 1}, ((False, None, ("key_mask",)),) * 2, padded=True),
    "roberta": Family("Roberta", "ForSequenceClassification", {"pad_token_id": 1}, {"sdpa": 1}, (ALL, ALL),
                      neurons=64 * LAYERS + 32),
    "distilbert": Family("DistilBert", "ForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 64},
                         {"sdpa": 1}, (ALL, ALL)),
    "modernbert": Family("ModernBert", "ForMaskedLM", {"cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}, ROPE,
                         (ALL, (False, None, ("bias",)))),
    "t5": Family("T5", "EncoderModel", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS},
                 {"sdpa": 1, "rms_norm": 2}, ((False, None, ("bias",)),) * 2),
    "vit": Family("ViT", "ForImageClassification", IMAGES, {"sdpa": 1}, (ALL, ALL)),
    "clip": Family("CLIPVision", "Model", IMAGES, {"sdpa": 1}, (ALL, ALL)),
}  # fmt: skip
NAMES = [pytest.param(name, marks=[pytest.mark.deep] if family.deep else []) for name, family in FAMILIES.items()]
FUSED = [pytest.param(name, marks=[pytest.mark.deep] if family.deep else [])
         for name, family in FAMILIES.items() if family.out]  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A recovered program beside its module."""

    module: Any
    program: gw.Program
    report: Recovered


def example(family: Family, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of a family; padding is on the right of the first sequence."""
    if "image_size" in family.fields:
        return {"pixel_values": torch.randn(batch, 3, 32, 32)}
    ids = torch.randint(3, 90, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask} if family.padded else {"input_ids": ids}


@cache
def imported(name: str) -> Imported:
    """A family's class with random weights, captured once."""
    torch.manual_seed(5)
    family = FAMILIES[name]
    config_name, _, model = family.config.partition(":")
    config = getattr(transformers, f"{config_name}Config")(**{**SMALL, **family.fields})
    config.use_cache = False
    module = getattr(transformers, f"{model or config_name}{family.name}")(config).eval()
    inputs = example(family, 3, 7)
    sizes = {key: ("B", "T", 32, 32)[: 1 if t.ndim == 4 else 2] + (() if t.ndim == 2 else (3, 32, 32))
             for key, t in inputs.items()}  # fmt: skip
    p = gw.from_torch(module, (), inputs, sizes=sizes, recover=False)
    return Imported(module, p, recover(p))


def layer_of(path: str) -> str:
    """The number of the layer in a path, "" outside of layers."""
    return next((part for part in path.split(".") if part.isdigit()), "")


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_has_the_ops_that_of_its_config(name):
    family, made = FAMILIES[name], imported(name)
    for kind, count in family.layer.items():
        for layer in range(LAYERS):
            found = [path for path in made.report.found[kind] if layer_of(path) == str(layer)]
            assert len(found) == count, f"{kind} of layer {layer}: {found}; {made.report}"
    p = made.program
    attentions = sorted(p.of_kind("sdpa"), key=p.order_labels.key)
    attrs = [p.attrs(n) for n in attentions]
    assert tuple((a["causal"], a["window"], a["optional"]) for a in attrs) == family.masks
    biased = any("bias" in optional for _, _, optional in family.masks)
    assert biased == ("mask" in made.report.left)
    squares = [p.path(n) for n in p.nodes() for s in p.specs(n) if s.shape.count("T") > 1]
    assert bool(squares) == biased, squares
    assert all(p.path(n).endswith("sdpa") for n in attentions)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_equal_those_of_torch_at_other_sizes(name):
    family, made = FAMILIES[name], imported(name)
    module, p = made.module, made.program
    inputs = example(family, 2, 11)
    results = module(**inputs)
    key = p.output_names()[0]
    expected, out = results[key], p(**{k: gw.tensor(t.numpy()) for k, t in inputs.items()})[key]
    close(out.numpy(), expected.detach().numpy(), 2e-6)
    up = torch.randn_like(expected)
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad(expected, list(parameters.values()), up, allow_unused=True)
    out.backward(gw.tensor(up.numpy()))
    for (path, _), grad in zip(parameters.items(), grads, strict=True):
        if grad is not None and path in p.weights:
            found: Any = p.weights[path].grad
            close(found.numpy(), grad.numpy(), 1e-4)


def close(ours: Any, theirs: Any, rtol: float) -> None:
    """Compare relative to the largest entry."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * max(np.abs(theirs).max(), 1e-2))


@pytest.mark.parametrize("name", NAMES)
def test_heads_and_neurons_are_units(name):
    p = imported(name).program
    shared = 1 if name == "t5" else LAYERS  # of one bias for all layers
    assert p.select("**", units="heads").count == HEADS * shared
    if name != "mixtral":
        assert p.select("**", units="neurons").count == FAMILIES[name].neurons


@pytest.mark.parametrize("name", FUSED)
def test_a_head_of_a_fused_weight_is_cut_as_if_it_were_masked(name):
    family, made = FAMILIES[name], imported(name)
    masked, cut = made.program.fork(), made.program.fork()
    axis = next(a for a in cut.axes().values() if a.kind == ("kv_groups" if GROUPED.items() <= family.fields.items()
                                                              else "heads"))  # fmt: skip
    unit, width = 1, 32 // axis.size
    key = next(k for k in masked.weight_keys() if k.endswith(family.out))
    rows = slice(unit * width, (unit + 1) * width)

    def without(w: gw.NDArray) -> np.ndarray:
        made = w.to_numpy().copy()
        made[rows if name == "gpt2" else (slice(None), rows)] = 0
        return made

    with masked.edit("mask") as e:
        e.set_weight(key, without(masked.weights.array(key)))
    with cut.edit("cut") as e:
        e.cut_units(axis.units([unit]))
    feeds = {k: t.numpy() for k, t in example(family, 2, 9).items()}
    close(cut.run(feeds)["logits"], masked.run(feeds)["logits"], 1e-6)
    assert not np.allclose(cut.run(feeds)["logits"], made.program.run(feeds)["logits"], atol=1e-4)


def test_an_imported_llama_is_its_template(tmp_path: Path):
    made = imported("llama")
    made.module.save_pretrained(tmp_path)
    model = gw.open(tmp_path)
    ids = example(FAMILIES["llama"], 2, 12)["input_ids"].numpy()
    close(made.program.run({"input_ids": ids})["logits"], np.asarray(model.logits(ids)), 2e-6)
    for units in ("heads", "kv_groups", "neurons"):
        assert made.program.select("**", units=units).count == model.program.select("**", units=units).count


def test_no_constant_of_a_llama_grows_with_its_length():
    p = imported("llama").program
    assert max(p.weights.array(p.key(n)).nbytes for n in p.of_kind("const")) < 1 << 20
    plan = p.compile(input_ids=(1, 512), freeze=True)
    folded = [b.nbytes for b in plan.buffers if b.kind not in ("temp", "input", "param")]
    assert max(folded, default=0) < 1 << 20
