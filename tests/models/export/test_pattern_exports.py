"""Export of attention over patterns: windows in config fields, other static patterns as generated code, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import graphwright as gw
from block_edges import edges_of
from graphwright import attention as at
from graphwright import structure
from graphwright.models import ExportLevelImpossible
from graphwright.models.export import verify
from graphwright.models.export.static_attention import with_static_attention
from graphwright.patterns.positional import causal_rule
from graphwright.program.errors import SoftGates
from graphwright.safetensors import Checkpoint
from seeds import deep

pytestmark = pytest.mark.usefixtures("hf_modules")
QUICK: dict[str, Any] = {"timed": False, "check": "none"}
IDS = checkpoints.some_ids((2, 40), seed=3)


@pytest.fixture
def opened(tmp_path) -> Callable[..., gw.Model]:
    """Family and config fields -> a fresh model of three layers."""
    return lambda family, **fields: gw.open(checkpoints.make(tmp_path / "source", family, **fields).path)


def logits_of(path: Any, ids: np.ndarray = IDS, **options: Any) -> np.ndarray:
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    with torch.no_grad():
        return loaded.eval()(torch.tensor(ids)).logits.numpy()


# -- which pattern is a window -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 17, 64, 257])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_windows_are_recognised_exactly(tokens, block):
    for window in (1, 5, 16, 40, 300):
        rule = causal_rule(at.sliding_window(tokens, window, block=block, planes=2))
        assert rule is not None
        assert rule.window == window
    full = causal_rule(at.causal_full(tokens, block=block))
    assert full is not None
    assert full.window is None


def test_a_window_is_recognised_by_its_pairs_and_not_by_its_generator():
    window = at.sliding_window(50, 9, block=4)
    same = at.Pattern.from_dense(window.to_dense(), block=4)
    assert same.rule is None
    assert causal_rule(same) == causal_rule(window)
    again = at.star(50, global_tokens=3, window=9, block=4)
    assert causal_rule(again) is None
    for query, key in ((5, 5), (5, 3), (12, 12)):
        cut = at.sliding_window(50, 9, block=4)
        cut.cut(edges_of(cut, (query, key)))
        assert causal_rule(cut) is None
    more = at.sliding_window(50, 9, block=4)
    more.connect(9, 1)
    assert causal_rule(more) is None
    planes = at.sliding_window(50, 9, block=4, planes=2)
    planes.cut(edges_of(planes, (7, 6, 1)))
    assert causal_rule(planes) is None
    assert causal_rule(at.sliding_window(50, 9, symmetric=True)) is None
    assert causal_rule(at.sliding_window((10, 50), 9)) is None


@pytest.mark.parametrize("seed", range(deep(60, 8)))
def test_the_rule_of_a_random_pattern_is_that_of_its_dense_mask(seed):
    rng = np.random.default_rng(seed)
    tokens, block, window = int(rng.integers(1, 60)), int(rng.integers(1, 9)), int(rng.integers(1, 70))
    i, j = np.indices((tokens, tokens))
    mask = (j <= i) & (i - j < window)
    if rng.random() < 0.6:  # one pair differs
        q = int(rng.integers(tokens))
        mask[q, rng.integers(q + 1)] ^= True
    rule = causal_rule(at.Pattern.from_dense(mask, block=block, causal=True))
    windows = [w for w in range(1, tokens + 1) if np.array_equal(mask, (j <= i) & (i - j < w))]
    assert (rule is not None) == bool(windows)
    if rule is not None:
        assert windows[-1] == (tokens if rule.window is None else rule.window)


# -- config fields -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_window_becomes_a_config_field(opened, tmp_path, warm_process, monkeypatch, family):
    monkeypatch.setattr(verify, "_start", warm_process)
    m = opened(family, **({"sliding_window": None} if family == "mistral" else {}))
    at.sparsify(m, "layers.*.attn", at.sliding_window(64, window=5, block=4))
    receipt = m.export(tmp_path / "out", timed=False, check="auto" if family == "qwen2" else "none")
    assert (receipt.level, receipt.level_name, receipt.exact, receipt.confirmed) == (
        2,
        "resized_config",
        True,
        family == "qwen2",
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["sliding_window"] == 5
    assert not list((tmp_path / "out").glob("*.py"))
    assert checkpoints.relative(logits_of(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    again = gw.open(tmp_path / "out")
    assert checkpoints.relative(again.logits(IDS), m.logits(IDS)) <= 1e-5


def test_a_window_of_some_layers_becomes_layer_types(opened, tmp_path):
    m = opened("qwen2")
    at.sparsify(m, "layers.1.attn", at.sliding_window(64, window=7, block=4))
    receipt = m.export(tmp_path / "out", **QUICK)
    assert (receipt.level, receipt.exact) == (2, True)
    assert checkpoints.relative(logits_of(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (7, True)


def test_another_window_replaces_that_of_the_config(opened, tmp_path):
    m = opened("mistral", sliding_window=9)
    at.sparsify(m, "layers.*.attn", at.sliding_window(64, window=3, block=8))
    assert m.export_plan().level == 2
    m.program.undo()
    at.sparsify(m, "layers.*.attn", at.causal_full(64, block=8))
    receipt = m.export(tmp_path / "out", **QUICK)
    assert (receipt.level, receipt.exact) == (2, True)
    assert checkpoints.relative(logits_of(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    assert json.loads((tmp_path / "out/config.json").read_text())["sliding_window"] is None


def test_the_dense_pattern_is_the_original_class(opened):
    m = opened("llama")
    at.sparsify(m, "layers.*.attn", at.causal_full(64, block=8))
    assert m.export_plan().level == 1
    assert m.program.patterns  # the plan changes nothing


def test_two_windows_are_generated_code(opened):
    m = opened("mistral", sliding_window=None)
    at.sparsify(m, "layers.0.attn", at.sliding_window(64, window=5))
    at.sparsify(m, "layers.1.attn", at.sliding_window(64, window=6))
    plan = m.export_plan()
    assert plan.level == 5
    assert "no config of this family gives this layer the window" in str(plan)


def test_a_family_without_windows_gets_generated_code_without_block_lists(opened, tmp_path):
    m = opened("llama")
    at.sparsify(m, "layers.*.attn", at.sliding_window(64, window=5, block=4))
    receipt = m.export(tmp_path / "out", **QUICK)
    assert (receipt.level_name, receipt.exact) == ("generated_code", True)
    assert checkpoints.relative(logits_of(tmp_path / "out", trust_remote_code=True), m.logits(IDS)) <= 1e-5
    assert "create_sliding_window_causal_mask" in next((tmp_path / "out").glob("modeling_*.py")).read_text()
    assert not [key for key in Checkpoint(tmp_path / "out") if "pattern" in key]


# -- generated code ----------------------------------------------------------------------------------------------------
@pytest.mark.deep
def test_other_static_patterns_are_generated_code_with_block_lists(opened, tmp_path):
    m = opened("mistral", sliding_window=None)
    pattern = at.star(128, global_tokens=3, window=9, block=4)
    at.sparsify(m, "layers.*.attn", pattern)
    with m.program.patterns["pattern"].edit("a long edge") as e:
        e.connect(20, 4)
    receipt = m.export(tmp_path / "out", timed=False)
    assert (receipt.level, receipt.level_name, receipt.exact, receipt.confirmed) == (5, "generated_code", True, True)
    assert "its pattern is not that of a sliding window" in receipt.not_better[1]["reason"]
    assert receipt.check["export_error"]["max_rel"] <= 1e-5
    assert receipt.cost["parameters"]["after"] == receipt.cost["parameters"]["before"]  # edges are no parameters
    stored = Checkpoint(tmp_path / "out")
    assert stored.info("patterns.pattern.edges").shape == (len(pattern), 4)
    ours = m.logits(IDS)
    assert checkpoints.relative(logits_of(tmp_path / "out", trust_remote_code=True), ours) <= 1e-5
    eager: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, trust_remote_code=True)
    with torch.no_grad():
        found = eager.eval()(torch.tensor(IDS), output_attentions=True)
    assert checkpoints.relative(found.logits.numpy(), ours) <= 1e-5
    seen = np.stack([w.numpy() for w in found.attentions]) > 0
    np.testing.assert_array_equal(seen.any((0, 1, 2)), pattern.to_dense()[0, :40, :40])


def test_a_pattern_that_grows_is_written_up_to_the_longest_text(opened, tmp_path):
    m = opened("llama", max_position_embeddings=96)
    pattern = at.star(40, global_tokens=3, window=9, block=4)
    at.sparsify(m, "layers.*.attn", pattern)
    receipt = m.export(tmp_path / "out", **QUICK, prompts=[IDS[0, :30]])
    assert not [w for w in receipt.warnings if "longer texts" in w]
    long = checkpoints.some_ids((1, 96), seed=8)
    assert checkpoints.relative(logits_of(tmp_path / "out", long, trust_remote_code=True), m.logits(long)) <= 1e-5


def test_the_receipt_names_the_longest_text_of_a_pattern_without_rule(opened, tmp_path):
    m = opened("llama")
    star = at.star(40, global_tokens=3, window=9, block=4)
    at.sparsify(m, "layers.*.attn", at.Pattern.from_dense(star.to_dense(), block=4))
    receipt = m.export(tmp_path / "out", **QUICK, prompts=[IDS[0, :4]])
    assert "a pattern of attention has 40 tokens, so the files refuse longer texts" in receipt.warnings
    with pytest.raises(ValueError, match="has 40 tokens, the text 41"):
        logits_of(tmp_path / "out", checkpoints.some_ids((1, 41)), trust_remote_code=True)


def test_an_export_changes_neither_the_model_nor_its_pattern(opened):
    m = opened("llama")
    at.sparsify(m, "layers.*.attn", at.star(40, global_tokens=3, window=9, block=4))
    before, tokens = m.program.hash(), m.program.patterns["pattern"].tokens
    with_static_attention(m)
    assert (m.program.hash(), m.program.patterns["pattern"].tokens) == (before, tokens)


# -- refusals ----------------------------------------------------------------------------------------------------------
def gated(m: gw.Model, values: list[float], where: str = "exp") -> None:
    """Give edges from block 0 of a pattern of two layers constant gates."""
    at.sparsify(m, "layers.{0,2}.attn", at.star(64, global_tokens=3, window=9, block=4))
    p = m.program
    pattern = p.patterns["pattern"]
    with pattern.edit("gates") as e:
        for slot in range(len(values)):
            e.set(edges_of(pattern, (8 + slot, 0)), gate=slot)
    with p.edit("gates") as e:
        gates = e.const("gates", np.array(values, np.float32))
        for node in list(p.of_traits(attention=True)):
            if p.op(node) == "block_sdpa":
                attrs = {**p.attrs(node), "optional": ("gates",), "where": where}
                made = e.add("block_sdpa", *p.operands(node), gates, **attrs)
                for edge in p.out_edges(node):
                    e.rewire(edge, made)


def test_gates_of_0_and_1_become_edges(opened, tmp_path):
    m = opened("llama")
    gated(m, [0.0, 1.0, 0.0])
    receipt = m.export(tmp_path / "out", **QUICK, prompts=[IDS[0, :9]])
    assert (receipt.level, receipt.exact) == (5, True)
    edges = Checkpoint(tmp_path / "out")
    (key,) = [key for key in edges if key.endswith(".edges")]
    assert edges.info(key).shape[0] == len(m.program.patterns["pattern"]) - 2
    assert checkpoints.relative(logits_of(tmp_path / "out", trust_remote_code=True), m.logits(IDS)) <= 1e-5


@pytest.mark.parametrize(("values", "where"), [([0.5, 1.0], "exp"), ([0.0, 1.0], "weight")])
def test_gates_that_no_edges_express_are_refused_with_the_reason(opened, values, where):
    m = opened("llama")
    gated(m, values, where)
    plan = m.export_plan()
    assert plan.level is None
    assert "edges have gates that are not constants 0 or 1" in str(plan)
    with pytest.raises(ExportLevelImpossible, match=r'dg\.discretize\(\.\.\., to="one"\) hardens trained ones'):
        m.export("unused")


def test_trained_gates_are_refused_until_they_are_hardened(opened, tmp_path):
    m = opened("llama")
    at.sparsify(m, "layers.*.attn", at.star(64, global_tokens=3, window=9, block=4))
    pattern = m.program.patterns["pattern"]
    edges = len(pattern)
    at.gate(pattern, init=np.where(np.arange(edges) % 5 == 3, -4.0, 4.0))
    dg = structure.DifferentiableGraph(m.program)
    for harden in (lambda: None, dg.discretize):  # the default freezes open gates, because no weights can absorb them
        harden()
        with pytest.raises(SoftGates, match=r'dg\.discretize\(\.\.\., to="one"\)'):
            m.export(tmp_path / "out", **QUICK)
        assert "dg.discretize(..., to='one')" in str(m.export_plan())
    dg.discretize(to="one")
    assert 0 < len(pattern) < edges
    receipt = m.export(tmp_path / "out", **QUICK, prompts=[IDS[0, :9]])
    assert (receipt.level, receipt.exact) == (5, True)
    assert checkpoints.relative(logits_of(tmp_path / "out", trust_remote_code=True), m.logits(IDS)) <= 1e-5


@pytest.mark.parametrize("pattern", ["star", "window"])
def test_a_softcap_is_written_and_applied_before_the_mask(opened, tmp_path, pattern):
    m = opened("mistral", sliding_window=None)
    star = at.star(64, global_tokens=3, window=9, block=4)
    at.sparsify(m, "layers.*.attn", star if pattern == "star" else at.sliding_window(64, 9, block=4))
    before = m.logits(IDS)
    with m.program.edit("softcap") as e:
        for node in m.program.of_traits(attention=True):
            e.set_attr(node, softcap=0.05)
    assert checkpoints.relative(m.logits(IDS), before) > 1e-3
    receipt = m.export(tmp_path / "out", **QUICK, prompts=[IDS[0, :9]])
    assert (receipt.level_name, receipt.exact) == ("generated_code", True)
    assert checkpoints.relative(logits_of(tmp_path / "out", trust_remote_code=True), m.logits(IDS)) <= 1e-5
    source = next((tmp_path / "out").glob("modeling_*.py")).read_text()
    assert "0.05" in source
