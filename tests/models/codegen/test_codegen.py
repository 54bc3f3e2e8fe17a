"""Generated code computes what the program computes, whatever was edited, in a process without this package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from dynamic import dynamic_model
from edits import (
    cut_attention,
    cut_mlp,
    edge,
    factored,
    gate,
    insert,
    link,
    matrix,
    narrow,
    parallel,
    random_edits,
    remove_layer,
    skip,
)

import graphwright as gw
from block_edges import edges_of
from graphwright import attention, experts
from graphwright.models import ExportLevelImpossible
from graphwright.models.codegen.source import emittable, generate
from graphwright.ops import OPS
from seeds import deep

LAYERS = 6
DEEP: dict[str, Any] = {"num_hidden_layers": LAYERS}
RANDOM = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}),
    ("qwen3", {"head_dim": 14, "attention_bias": True}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
]
ROPES = ["rope-linear", "rope-dynamic", "rope-llama3", "rope-yarn", "rope-longrope-short", "rope-longrope-long"]
CASES = [
    *(f"random-{seed}" for seed in range(0, len(RANDOM), deep(1, 3))),
    *ROPES[:: deep(1, 2)],
    "everything",
    "four-at-once",
    "no-attention",
    "window-types",
    "bf16",
    "hostile-names",
    "zero-junction",
    "other-trunk",
    "routed-heads",
    "routed-alone",
    "star",
    "planes",
]


STEPS = dict.fromkeys(CASES, 8) | dict.fromkeys(
    ("random-0", "everything", "rope-dynamic", "window-types", "routed-heads", "star"), deep(32, 16)
)
"""Tokens to choose: many where there is a cache of windows, or frequencies that change on the way."""


def edited(case: str, folder: Path, made):
    """The model of a case, edited."""
    if case.startswith("random"):
        seed = int(case.partition("-")[2])
        family, fields = RANDOM[seed % len(RANDOM)]
        m = gw.open(checkpoints.make(folder, family, seed=seed, **DEEP, **fields).path)
        random_edits(m, seed, LAYERS)
        return m
    if case in ROPES:
        m = gw.open(made(case).path)
        cut_mlp(m, 1)
        return m
    if case == "window-types":  # the full-attention layers that remain must not get caches of the windowed ones
        m = gw.open(made("qwen2-layer-types").path)
        cut_attention(m, 0)
        return m
    if case == "routed-alone":  # all entries of the cache are those of routed heads; keys of layer 1 name no groups
        m = dynamic_model(shared=0, theta=None)
        with m.edit("odd keys") as e:
            for name in ("attn.heads.2.q.weight", "moe.experts.3.up.weight"):
                e.rename(f"layers.1.{name}", f"layers.1.{name}", key=f"odd.{name.replace('.', '_')}")
        return m
    if case == "routed-heads":
        m = dynamic_model(null=True)
        with m.edit("switch off two experts and a head") as e:
            experts.set_alive(e, "layers.0.moe", [2, 5], alive=False)
            experts.set_alive(e, "layers.1.attn", [0], alive=False)
        return m
    kind = "bfloat16" if case == "bf16" else "float32"
    m = gw.open(checkpoints.make(folder, "llama", dtype=kind, **DEEP).path)
    p = m.program
    if case == "star":  # one pattern of all layers but one; a row of blocks without edges, a manual edge
        pattern = attention.star(120, global_tokens=3, window=9, block=4)
        with pattern.edit("a row without edges") as e:
            e.cut(pattern.edges()[pattern.pairs()[:, 1] == 4])
            e.connect(5, 1)
        attention.sparsify(m, [f"layers.{i}.attn.sdpa" for i in range(5)], pattern)
        return m
    if case == "planes":  # a pattern for each layer, with planes for key heads and for heads
        made_by_planes = {1: attention.random_blocks(120, 2, block=3) | attention.block_local(120, 0, block=3)}
        made_by_planes |= {n: attention.sliding_window(120, 11, block=5, planes=n) for n in (2, 6)}
        made_by_planes[2].cut(edges_of(made_by_planes[2], (2, 1, 1)))
        made_by_planes[6].cut(edges_of(made_by_planes[6], (4, 3, 0), (4, 3, 4)))
        for i, planes in enumerate((1, 2, 6, 1, 2, 6)):
            attention.sparsify(m, f"layers.{i}.attn", {f"layers.{i}.attn": made_by_planes[planes].copy()})
        return m
    if case in ("everything", "bf16"):
        skip(m, 1, 4)
        insert(m, 0, "sigmoid")
        link(m, 2, 5)
        parallel(m, 3)
        narrow(m, 2)
    elif case == "four-at-once":
        skip(m, 1, 4)
        gate(m, 2, "mlp.down", "out", 0.6)
        factored(m, 3, "mlp.down")
        parallel(m, 0)
        m.select("layers.5.attn").heads[[0, 4, 5]].prune(ragged=True)
    elif case == "no-attention":
        for i in range(LAYERS):
            cut_attention(m, i)
    elif case == "hostile-names":
        rename_everything(p)
    elif case == "zero-junction":
        with p.edit("nothing left of layer 2") as e:
            for into in p.in_edges("layers.2.out"):
                e.cut(into)
        skip(m, 1, 3)
    elif case == "other-trunk":  # ops between layers, with constants, sizes of the run, slices and views
        with p.edit("trunk") as e:
            n = checkpoints.SIZES["hidden_size"]
            channels = e.const("per channel", np.linspace(0.5, 1.5, n, dtype=np.float32))
            x = e.add("mul", "layers.2.out", channels, name="scaled")
            halves = [e.add("slice", x, axis=-1, start=s, size=n // 2, step=1) for s in (n // 2, 0)]
            back = e.add("concat", *halves, axis=2)
            view = e.add("permute", e.add("unflatten", back, axis=2, sizes=(2, n // 2)), axes=(0, 1, 3, 2))
            flat = e.add("flatten", view, start=2, end=3)
            mean = e.add("mean", flat, axes=(2,), keepdims=True)
            for out in p.out_edges("layers.2.out"):
                if p.graph.target(out) != p.node(x):
                    e.rewire(out, e.add("sub", flat, mean))
    return m


HOSTILE = [
    "torch",
    "F",
    "run",
    "self",
    "x",
    "i",
    "layer",
    "lambda",
    "rms_norm",
    "attend",
    "int",
    "é",
    "0",
    "a b",
    'q"uote',
    "__debug__",
    "l",
    "model",
    "block_a",
    "ids_",
    "_",
    "@forward@",
    "back\\slash",
    "🙂",
]


def rename_everything(p) -> None:
    with p.edit('why """ and @shapes@ \\ {i}\nnew line') as e:
        ops = [n for n in p.nodes() if p.op(n) not in ("param", "input")]
        for k, node in enumerate(ops):
            word, path = HOSTILE[k % len(HOSTILE)], p.path(node)
            head = ".".join(path.split(".")[:2]) + "." if path.startswith("layers.") else ""
            e.rename(node, p.free_name(f"{head}{word}"))


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory, warm_process):
    """Case -> (model, exported directory, arrays of transformers, facts), all from one process without this package."""
    folder = tmp_path_factory.mktemp("codegen")
    jobs, models = {}, {}
    for case in CASES:
        m = edited(case, folder / f"source-{case}", made)
        m.export(folder / case, level=5, check="none", timed=False)
        ids = checkpoints.some_ids((2, 23), seed=len(case))
        mask = np.ones_like(ids)
        mask[0, :4] = 0
        jobs[case] = {"directory": str(folder / case), "ids": ids.tolist(), "mask": mask.tolist(), "steps": STEPS[case]}
        models[case] = (m, folder / case, ids, mask)
    out = folder / "out"
    out.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("clean_jobs.py")
    code, output = warm_process(["-I", str(script), str(folder / "jobs.json"), str(out)], str(folder))
    assert code == 0, output[-3000:]
    facts = json.loads((out / "facts.json").read_text())

    def get(case):
        assert "error" not in facts[case], facts[case]["error"]
        return (*models[case], dict(np.load(out / f"{case}.npz")), facts[case])

    return get


@pytest.mark.parametrize("case", CASES)
def test_generated_code_matches_the_program_in_transformers(runs, case):
    m, _, ids, mask, found, facts = runs(case)
    assert facts["class"] == "EditedForCausalLM"
    assert checkpoints.relative(found["logits"], m.logits(ids)) <= 1e-5
    seen = mask.astype(bool)
    # patterns count from the first token of a text, so that padding does not change what a token sees
    alone = [m.logits(row[None, shown])[0] for row, shown in zip(ids, seen, strict=True)]
    assert checkpoints.relative(found["padded"][seen], np.concatenate(alone)) <= 1e-5
    if m.program.patterns:
        assert checkpoints.relative(found["padded"][seen], m.logits(ids, seen)[seen]) <= 1e-5
    np.testing.assert_array_equal(found["kept"], found["logits"][:, -2:])
    assert checkpoints.relative(found["low"], found["logits"]) < 0.2  # loads and runs in bfloat16 too


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_equal_with_and_without_cache(runs, case):
    m, _, ids, mask, found, _ = runs(case)
    for row, prompt in enumerate(ids):
        ours = m.generate(prompt, STEPS[case]).ids
        for cached in (True, False):
            theirs = found[f"greedy_{cached}"][row].tolist()
            if case == "rope-dynamic" and not cached:  # cached keys keep the frequencies they were written with
                continue
            assert theirs == ours, f"cache {cached}"
    if case != "rope-dynamic":  # there the frequencies follow the longest row of the batch
        assert found["greedy_padded"][0].tolist() == m.generate(ids[0][mask[0].astype(bool)], STEPS[case]).ids
    assert found["greedy_padded"][1].tolist() == found["greedy_True"][1].tolist()


@pytest.mark.parametrize("case", CASES)
def test_save_pretrained_of_generated_code_writes_a_loadable_model(runs, case):
    _, directory, _, _, found, facts = runs(case)
    np.testing.assert_array_equal(found["again"], found["logits"])
    code = {f.name for f in directory.glob("*.py")}
    assert code <= set(facts["files"])


@pytest.mark.parametrize("case", CASES)
def test_gradient_flows_into_every_weight(runs, case):
    m, directory, ids, _, found, facts = runs(case)
    logits = m.logits(ids).astype(np.float64)[:, :-1]
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    nats = (lse - np.take_along_axis(logits, ids[:, 1:, None], 2)[..., 0]).mean()
    assert found["loss"] == pytest.approx(nats, rel=1e-5)
    dead = [key for key, g in facts["gradients"].items() if not g]
    assert not [key for key in dead if not (case == "zero-junction" and ".layers.3." in key)]  # it reads zeros
    from graphwright.safetensors import Checkpoint

    assert facts["keys"] == sorted(Checkpoint(directory).keys())


def test_generated_files_are_plain_and_import_only_torch_and_transformers(runs):
    folders = [runs(case)[1] for case in CASES]
    for file in (f for directory in folders for f in directory.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imports = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        imports += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
        assert {name.partition(".")[0] for name in imports} <= {"torch", "transformers"}
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not called & {"exec", "eval", "compile", "__import__", "open", "globals"}
    rules = ["--isolated", "--line-length", "120", "--select", "E,F,I,UP,B,RUF,SIM", "--target-version", "py310"]
    command = [sys.executable, "-m", "ruff", "check", *rules, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def text_of(m) -> str:
    return generate(m.program, "id", ["why"]).files["modeling_id.py"]


@pytest.mark.deep
def test_24_unequal_layers_take_less_than_350_lines(tmp_path):
    m = gw.open(checkpoints.make(tmp_path, "llama", num_hidden_layers=24, attention_bias=True, mlp_bias=True).path)
    for i in range(24):
        if i % 5 == 1:
            cut_attention(m, i)
        elif i % 5 == 2:
            cut_mlp(m, i)
        elif i % 5 == 3:
            insert(m, i)
        if i % 5 != 2:
            narrow(m, i)
    text = text_of(m)
    assert len(text.splitlines()) < 350
    assert text.count("\nclass Block") == 4


def test_equal_blocks_share_one_function_and_become_a_loop(made):
    m = gw.open(made("llama").path)
    text = text_of(m)
    assert text.count("class Block") == 1
    assert "for i in range(3):\n            x = self.model.layers[i](x, cos, sin, run)" in text


def test_routed_layers_share_one_function_and_hold_what_their_routers_read():
    text = text_of(dynamic_model())
    assert text.count("class Block") == 1
    assert "for i in range(2):\n            x = self.layers[i](x, position" in text
    assert "self.attn.heads(" in text
    assert "self.moe.experts(" in text
    assert '"layers.{}.attn.heads.3.prototype": dict.fromkeys(range(2), (16,))' in text
    assert text.count("torch.tensor(-torch.inf") == 1
    assert max(map(len, text.splitlines())) <= 120


def test_heads_that_no_module_can_hold_are_operands(runs):
    code = next(runs("routed-alone")[1].glob("modeling_*.py")).read_text()
    assert code.count("attend_routed(") == 3  # its definition, the module of layer 0, and layer 1
    assert code.count("mix_experts(") == 3


def test_a_program_that_changes_state_is_refused():
    m = dynamic_model()
    p = m.program
    state = next(n for n in p.states() if p.path(n) == "layers.0.attn.shared.rope.inv_freq")
    with m.edit("decay") as e:
        e.assign(state, e.add("mul", state, e.const("half", np.float32(0.5))))
    with pytest.raises(ExportLevelImpossible, match="changes state"):
        emittable(p)


def test_a_skip_ends_the_loop(made):
    m = gw.open(made("llama").path)
    skip(m, 0, 2)
    text = text_of(m)
    assert "for i in" not in text
    assert "self.model.layers[2](layer_1_out, cos, sin, layer_0_out, run)" in text


def test_layers_of_other_widths_share_one_function(made):
    m = gw.open(made("llama").path)
    for i in range(3):
        narrow(m, i)
    text = text_of(m)
    assert text.count("class Block") == 1
    widths = "{0: (nn.Linear, 48, 71, False), 1: (nn.Linear, 48, 69, False), 2: (nn.Linear, 48, 67, False)"
    assert f'"model.layers.{{}}.mlp.gate_proj": {widths}' in " ".join(text.split()).replace("{ 0:", "{0:")


def test_remaining_layers_keep_their_numbers(made, tmp_path):
    m = gw.open(checkpoints.make(tmp_path, "llama", num_hidden_layers=4).path)
    remove_layer(m, 1)
    assert "for i in (0, 2, 3):" in text_of(m)


def test_an_op_without_source_text_is_named(made):
    m = gw.open(made("llama").path)
    p = m.program
    with p.edit("bad") as e:
        padded = e.add("pad_slice", "layers.1.mlp.down", axis=2, start=0, size=48, name="layers.1.padded")
        e.rewire(edge(p, "layers.1.mlp.down", "layers.1.out"), padded)
    with pytest.raises(ExportLevelImpossible) as error:
        emittable(p)
    assert error.value.where == "layers.1.padded"
    assert error.value.got == "pad_slice (backward ops are not part of an exported model)"
    assert m.export_plan().level is None


def test_an_op_without_source_text_is_written_as_its_expansion(made, monkeypatch):
    monkeypatch.setitem(OPS, "silu", replace(OPS["silu"], emit=None))
    m = gw.open(made("llama").path)
    assert m.export_plan().levels[-1].possible
    assert "silu" not in text_of(m)


def test_attention_that_sees_the_future_is_refused(made):
    m = gw.open(made("llama").path)
    with m.program.edit("both ways") as e:
        e.set_attr("layers.1.attn.sdpa", causal=False)
    with pytest.raises(ExportLevelImpossible, match=r"layers\.1\.attn\.sdpa"):
        emittable(m.program)


@pytest.mark.parametrize("key", ['w"]; import os #', "a..b", "über", "", "a b", "x.y\n"])
def test_a_key_that_could_be_code_is_refused(made, key):
    m = gw.open(made("llama").path)
    p = m.program
    with p.edit("key", check=False) as e:
        weight = e.param("layers.1.side", matrix(48, 48), key=key or None)
        if not key:
            e.rename(weight, "layers.1.side.other", key="model")  # a prefix of all others
        e.connect(e.add("linear", "layers.0.out", weight), "layers.1.out")
    with pytest.raises(ExportLevelImpossible, match=r"layers\.1\.side|model"):
        emittable(p)


def test_a_large_const_is_refused(made):
    m = gw.open(made("llama").path)
    with m.program.edit("const") as e:
        table = e.const("table", np.ones((96, 48), np.float32))
        e.connect(e.add("embedding", table, "ids"), "layers.0.out")
    with pytest.raises(ExportLevelImpossible, match="table"):
        emittable(m.program)
