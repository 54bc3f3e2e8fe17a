"""Generated code is used as a stock class: modules, attention implementations, caches, training, resizing, adapters."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright import attention
from graphwright.nn.functional import cross_entropy

pytestmark = pytest.mark.usefixtures("hf_modules")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 14, "attention_bias": True},
    "pattern": {},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def exported(request, tmp_path_factory):
    """A model of a family whose layers have unequal widths, and the directory of its export at level 5."""
    folder = tmp_path_factory.mktemp(request.param)
    family = "llama" if request.param == "pattern" else request.param
    m = gw.open(checkpoints.make(folder / "source", family, **FAMILIES[request.param]).path)
    m.select("layers.1.mlp").neurons[:9].prune()
    m.select("layers.0.attn").heads[[0, 1]].prune(ragged=True)
    if request.param == "pattern":
        pattern = attention.star(64, global_tokens=2, window=7, block=4)
        with pattern.edit("a far edge, a row without edges") as e:
            e.connect(6, 2)
            e.cut(pattern.edges()[pattern.pairs()[:, 1] == 1])
        attention.sparsify(m, "layers.*.attn", pattern)
    m.export(folder / "code", level=5, check="none", timed=False)
    return m, folder / "code"


def load(directory, **options) -> Any:
    from transformers import AutoModelForCausalLM

    options.setdefault("dtype", torch.float32)
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options).eval()


def ids_of(length: int = 11, rows: int = 2) -> np.ndarray:
    return checkpoints.some_ids((rows, length), seed=3)


def test_weights_are_in_the_modules_of_the_stock_class(exported):
    m, directory = exported
    model = load(directory)
    layer = model.model.layers[1]
    kinds = {"q_proj": layer.self_attn.q_proj, "down_proj": layer.mlp.down_proj, "head": model.lm_head}
    assert all(type(module) is nn.Linear for module in kinds.values())
    assert isinstance(model.model.embed_tokens, nn.Embedding)
    assert type(layer.input_layernorm).__name__ == "RMSNorm"
    for key, value in model.state_dict().items():
        if not key.startswith("patterns.") and (key != "lm_head.weight" or not model.config.tie_word_embeddings):
            np.testing.assert_array_equal(value.numpy(), m.program.weights.array(key).to_numpy())
    inner = [model.get_submodule(f"model.layers.{i}.mlp.up_proj").out_features for i in range(3)]
    heads = [model.get_submodule(f"model.layers.{i}.self_attn.q_proj").out_features for i in range(3)]
    assert model.config.intermediate_size == inner
    assert len(set(inner)) == len(set(heads)) == 2
    assert [h * m.dims.head_dim for h in model.config.num_attention_heads] == heads


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_equal_the_programs(exported, attention):
    m, directory = exported
    model, ids = load(directory, attn_implementation=attention), ids_of()
    mask = np.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        found = model(torch.tensor(ids), output_hidden_states=True, output_attentions=attention == "eager")
        padded = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()
        embedded = model(inputs_embeds=model.get_input_embeddings()(torch.tensor(ids))).logits
    assert checkpoints.relative(found.logits.numpy(), m.logits(ids)) <= 1e-5
    seen = mask.astype(bool)
    alone = [m.logits(row[None, shown])[0] for row, shown in zip(ids, seen, strict=True)]
    assert checkpoints.relative(padded[seen], np.concatenate(alone)) <= 1e-5
    torch.testing.assert_close(embedded, found.logits)
    states = m.program.run(ids=ids, positions=np.broadcast_to(np.arange(11), ids.shape))
    paths = ["embed", "layers.0.out", "layers.1.out", "norm"]
    assert len(found.hidden_states) == len(paths)
    for state, path in zip(found.hidden_states, paths, strict=True):
        assert checkpoints.relative(state.numpy(), states.value(path).to_numpy()) <= 1e-5
    if attention == "eager":
        for weights in found.attentions:
            sums = weights.sum(-1)
            torch.testing.assert_close(sums[sums > 0], torch.ones_like(sums[sums > 0]))
            assert (sums > 0).all() == (not m.program.patterns)  # queries without keys


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_equal_the_programs(exported, cache):
    m, directory = exported
    ids = ids_of(rows=1)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = load(directory).generate(torch.tensor(ids), cache_implementation=cache, **options)
    assert made[0, 11:].tolist() == list(m.generate(ids[0], 12).ids)
    beams = load(directory).generate(torch.tensor(ids), num_beams=2, **options)
    assert beams.shape == made.shape


def test_padding_does_not_change_tokens_with_a_static_cache(exported):
    _, directory = exported
    model, ids = load(directory), ids_of(rows=1)
    padded = np.concatenate([np.zeros((1, 3), np.int64), ids], axis=1)
    mask = torch.tensor([[0] * 3 + [1] * 11])
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(torch.tensor(ids), **options)[0, 11:]
    for cache in ("dynamic", "static"):
        made = model.generate(torch.tensor(padded), attention_mask=mask, cache_implementation=cache, **options)
        assert made[0, 14:].tolist() == plain.tolist()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_the_program(exported, checkpointing):
    m, directory = exported
    model, ids = load(directory).train(), ids_of()
    if checkpointing:
        model.activation_checkpointing_enable()
    model(torch.tensor(ids), labels=torch.tensor(ids)).loss.backward()
    p = m.program.fork()
    feeds = {"ids": ids, "positions": np.ascontiguousarray(np.broadcast_to(np.arange(11), ids.shape))}
    cross_entropy(p(**feeds)["logits"][:, :-1], gw.tensor(ids[:, 1:]), dim=-1).backward()
    for key, weight in model.named_parameters():
        gradient = p.weights[key].grad
        assert gradient is not None
        assert checkpoints.relative(weight.grad.numpy(), gradient.numpy()) <= 1e-4, key


def test_logits_have_the_dtype_of_the_model(exported):
    m, directory = exported
    ids = ids_of()
    with torch.no_grad():
        low = load(directory, dtype=torch.bfloat16)(torch.tensor(ids)).logits
    assert low.dtype is torch.bfloat16
    assert checkpoints.relative(low.float().numpy(), m.logits(ids)) < 0.05


def test_a_wider_vocabulary_survives_saving(exported, tmp_path):
    _, directory = exported
    model, ids = load(directory), torch.tensor(ids_of())
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 7)
    model.save_pretrained(tmp_path / "wider")
    again = load(tmp_path / "wider")
    assert again.config.vocab_size == size + 7
    assert again.get_output_embeddings().out_features == size + 7
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits[..., :size], load(directory)(ids).logits)


def test_longrope_with_unequal_heads_survives_saving(tmp_path):
    _, fields = checkpoints.FEATURES["rope-longrope-short"]
    m = gw.open(checkpoints.make(tmp_path / "source", "llama", **fields).path)
    m.select("layers.0.attn").heads[[0]].prune(ragged=True)
    m.export(tmp_path / "code", level=5, check="none", timed=False)
    model, ids = load(tmp_path / "code"), ids_of()
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        found = load(tmp_path / "again")(torch.tensor(ids)).logits.numpy()
    assert checkpoints.relative(found, m.logits(ids)) <= 1e-5


@pytest.mark.parametrize(
    "exported", [f if f in ("mistral", "pattern") else pytest.param(f, marks=pytest.mark.deep) for f in FAMILIES],
    indirect=True, scope="module",
)  # fmt: skip
def test_the_forward_pass_is_one_graph(exported):
    _, directory = exported
    model, ids = load(directory), torch.tensor(ids_of())
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(whole(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # called by peft
def test_adapters_attach_to_every_matrix(exported):
    peft = pytest.importorskip("peft", reason="not run: needs peft")
    _, directory = exported
    model, ids = load(directory), torch.tensor(ids_of())
    with torch.no_grad():
        before = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert sum(name.endswith("lora_A") for name, _ in adapted.named_modules()) == 3 * 7
    torch.testing.assert_close(adapted(ids).logits, before)


def test_config_lists_the_widths_of_layers(tmp_path):
    m = gw.open("bundled")
    m.select("layers.1.mlp").neurons[:200].prune()
    with m.program.edit("no mlp") as e:
        e.cut("layers.3.mlp.down -> layers.3.out")
    m.export(tmp_path / "code", level=5, check="none", timed=False)
    config = json.loads((tmp_path / "code" / "config.json").read_text())
    assert config["intermediate_size"] == [512, 312, 512, 0]
    assert config["num_attention_heads"] == 6


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_experts_are_chosen_in_float32_by_a_model_in_bfloat16(name, tmp_path, monkeypatch):
    """A softmax of bfloat16 logits chooses others for some tokens."""
    family, fields = checkpoints.MIXTURES[name]
    m = gw.open(checkpoints.make(tmp_path / "source", family, **fields).path)
    with m.edit("a skip") as e:
        e.connect("layers.0.out", "layers.2.out")
    m.export(tmp_path / "code", check="none", timed=False)
    model = load(tmp_path / "code", dtype=torch.bfloat16)
    code, seen = sys.modules[type(model).__module__], []
    mix = code.mix_experts

    def watched(x, offsets, rows, pairs, weights, *rest):
        seen.append((x, offsets, rows, weights))
        return mix(x, offsets, rows, pairs, weights, *rest)

    monkeypatch.setattr(code, "mix_experts", watched)
    with torch.no_grad():
        model(torch.tensor(ids_of(40, 6)))
    routers = [p.float() for key, p in model.named_parameters() if key.endswith(".gate.weight") and len(p) == 5]
    assert len(seen) == len(routers) >= 2
    for router, (x, offsets, rows, weights) in zip(routers, seen, strict=True):
        assert x.dtype is torch.bfloat16
        scores = (x.float() @ router.T).softmax(-1)
        values, ids = scores.topk(weights.shape[1])
        if m.dims.normalize:
            values = values / values.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, values)
        runs = [rows[a:b] for a, b in itertools.pairwise(offsets.tolist())]
        assert all(torch.equal(run.sort().values, (ids == e).any(1).nonzero()[:, 0]) for e, run in enumerate(runs))
