"""The export ladder: each edit's level and reasons; the original class computes what the pruned program does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import UNUSUAL, some_ids
from edits import cut_attention, cut_mlp, edge, factored, gate, insert, matrix, scale_weight, skip
from transformers import AutoModelForCausalLM

import graphwright as gw
from graphwright.models import ExportLevelImpossible
from graphwright.models.export.ladder import Ladder
from graphwright.models.export.levels import LevelPlan
from graphwright.models.export.receipt import weight_counts
from graphwright.models.export.template_match import KINDS
from graphwright.surgery.pruning.prunable import remove_branch, residual_branches
from seeds import deep

LAYERS = 6
IDS = some_ids((2, 23), seed=5)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Callable[..., gw.Model]:
    """Family (and storage dtype) -> a fresh model of six layers."""
    made: dict[tuple[str, str], Any] = {}

    def get(family: str = "llama", dtype: str = "float32") -> gw.Model:
        if (family, dtype) not in made:
            path = tmp_path_factory.mktemp(family)
            checkpoints.make(path, family, dtype=dtype, num_hidden_layers=LAYERS, **UNUSUAL[family])
            made[family, dtype] = path
        return gw.open(made[family, dtype])

    return get


def stock(path: Any, ids: np.ndarray = IDS) -> np.ndarray:
    """Logits of transformers' own class in this process, float32."""
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    model, facts = loaded
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits.numpy()


def written(m: gw.Model, target: Any, level: int | str = "auto") -> LevelPlan:
    """The files of a level, without what an export measures."""
    ladder = Ladder(m)
    plan = ladder.plan()
    chosen = ladder.choose(plan, level)
    target.mkdir()
    chosen.write(target, max_shard_size="5GB")
    return plan.at(chosen.number)


# -- edits -------------------------------------------------------------------------------------------------------------
def weight(m):
    scale_weight(m, "model.norm.weight")


def layers_dropped(m):
    m.select("layers").layers[[1, 4]].prune()


def even_mlp(m):
    m.select("layers.*.mlp").neurons[:12].prune()


def even_kv_groups(m):
    m.select("layers.*.attn").kv_groups[1].prune()


def even_queries(m):
    """Another one of each key head: a table at first, even groups in the end."""
    m.select("layers.*.attn").heads[[0, 5]].prune(ragged=True)


def uneven_neurons(m):
    rng = np.random.default_rng(0)
    axes = m.select("layers.*.mlp").neurons
    for k, name in enumerate(axes.chosen):
        gone = rng.choice(76, 15 + 3 * k, replace=False)
        m.program.axes()[name].units(gone).prune()


def uneven_heads(m):
    m.select("layers.1.attn").heads[[0]].prune(ragged=True)
    m.select("layers.3.attn").heads[[1, 5]].prune(ragged=True)


def attention_cut(m):
    cut_attention(m, 2)


def mlp_cut(m):
    cut_mlp(m, 4)


def skipped(m):
    skip(m, 1, 4)


def inserted(m):
    insert(m, 3)


def hidden_width(m):
    (axis,) = m.select("embed").channels.chosen
    m.program.axes()[axis].units([1, 7, 8, 30, 31, 32, 33, 34, 40, 41, 46, 47]).prune()


TABLE: dict[str, tuple[Callable[[Any], None], int, int]] = {
    f.__name__: (f, level_by_class, level_by_size)
    for f, level_by_class, level_by_size in [
        (weight, 1, 1),
        (layers_dropped, 2, 2),
        (even_mlp, 2, 2),
        (even_kv_groups, 2, 2),
        (even_queries, 2, 2),
        (uneven_neurons, 3, 5),
        (uneven_heads, 3, 5),
        (attention_cut, 3, 5),
        (mlp_cut, 3, 5),
        (factored, 3, 5),
        (gate, 3, 5),
        (skipped, 5, 5),
        (inserted, 5, 5),
        (hidden_width, 2, 2),
    ]
}
"""Edit -> the level that `auto` takes where the stock class is preferred, and where size is."""
UNIFORM = ["layers_dropped", "even_mlp", "even_kv_groups", "even_queries", "hidden_width"]
WHY = {
    "uneven_neurons": (2, "layers.1.mlp", "neurons", "intermediate_size"),
    "uneven_heads": (2, "layers.1.attn", "heads", "num_attention_heads"),
    "attention_cut": (2, "layers.2.mid", "layers", "num_hidden_layers"),
    "mlp_cut": (2, "layers.4.out", "layers", "num_hidden_layers"),
    "factored": (2, "layers.2.mlp.down.outer", None, None),
    "gate": (2, "layers.3.gated.out", None, None),
    "skipped": (3, "layers.4.out", None, None),
    "inserted": (3, "layers.3", None, None),
    "even_mlp": (1, "layers.0.mlp", "neurons", "intermediate_size"),
    "even_kv_groups": (1, "layers.0.attn", None, None),
    "hidden_width": (1, "embed.weight", "channels", "hidden_size"),
    "layers_dropped": (1, "layers.1.", None, None),
}
"""Edit -> what one level says against it: the start of a path, the axis, the field."""


@pytest.mark.parametrize("name", TABLE)
def test_each_edit_has_its_level_with_reasons(opened, name):
    m = opened()
    change, by_class, by_size = TABLE[name]
    change(m)
    arrays = [m.program.weights.array(key) for key in m.program.weights]
    before = {id(a) for a in arrays if a.storage.readonly and a.storage.touched}
    plan, small = m.export_plan(), m.export_plan(prefer="size")
    assert {id(a) for a in arrays if a.storage.readonly and a.storage.touched} == before
    assert (plan.level, small.level) == (by_class, by_size)
    assert all(d.kind in KINDS for d in plan.deviations)
    carry = set.intersection({2, 3, 5}, *(set(d.levels) for d in plan.deviations))
    if plan.deviations:
        assert carry == set(plan.possible)
    if name in WHY:
        level, path, axis, field = WHY[name]
        reasons = plan.levels[level - 1].reasons
        hit = [r for r in reasons if r.path.startswith(path) and (axis is None or r.axis == axis)]
        assert hit, reasons
        assert field is None or any(r.field == field for r in hit)
    json.dumps(plan.to_json())


def test_gates_and_factors_are_kinds_of_deviation(opened):
    m = opened()
    gate(m)
    factored(m)
    kinds = {d.kind for d in m.export_plan().deviations}
    assert {"gate", "factor"} <= kinds


# -- level 2 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", UNUSUAL)
@pytest.mark.parametrize("name", [*UNIFORM[deep(0, 4) :], "all"])
def test_uniform_sizes_export_as_a_resized_config(opened, tmp_path, family, name):
    m = opened(family)
    for change in [TABLE[name][0]] if name != "all" else [layers_dropped, even_mlp, even_queries, hidden_width]:
        change(m)
    if family == "qwen3" and name in ("hidden_width", "all"):  # its norms of heads share the eps
        assert 2 not in m.export_plan().possible
        return
    receipt = written(m, tmp_path / "out", level=2)
    assert receipt.exact
    assert weight_counts(tmp_path / "out")["parameters"] == m.inspect().parameters
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    again = gw.open(tmp_path / "out")
    np.testing.assert_array_equal(again.logits(IDS), m.logits(IDS))
    assert again.export_plan().level == 1


def test_windows_follow_the_remaining_layers(opened, tmp_path):
    m = opened("qwen2")
    layers_dropped(m)
    written(m, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["layer_types"] == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert "max_window_layers" not in config


def test_a_size_of_one_layer_alone_is_not_uniform(opened):
    m = opened()
    m.select("layers.2.mlp").neurons[:5].prune()
    (reason,) = m.export_plan().levels[1].reasons
    assert reason.path.startswith("layers.2.mlp.")
    assert "71 neurons where layer 0 has 76 (intermediate_size)" in reason.reason


# -- level 3 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", UNUSUAL)
def test_uneven_pruning_exports_zero_filled(opened, tmp_path, family):
    m = opened(family)
    for change in (uneven_neurons, uneven_heads, attention_cut, mlp_cut):
        change(m)
    gate(m)
    gate(m, 5, "attn.o", "mid", -1.3)
    factored(m, 2, "mlp.down")
    factored(m, 1, "attn.o")
    factored(m, 4, "attn.q")
    m.select("layers").layers[[0]].prune()
    receipt = written(m, tmp_path / "out")
    assert (receipt.level, receipt.exact) == (3, True)
    assert (tmp_path / "out/config.json").read_bytes() == m.config.raw
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    counts = weight_counts(tmp_path / "out")
    assert counts["nonzero_parameters"] < 0.8 * counts["parameters"]
    assert counts["bytes"] == receipt.bytes


def test_heads_cut_from_unfolded_nodes_export_as_zero_columns(opened, tmp_path):
    m = opened()
    p = m.program
    with p.edit("unfold, and cut heads 1 and 4") as e:
        e.unfold("layers.2.attn.o", "in", 6)
    units = [n for n in p.nodes() if p.is_junction(n) and p.path(n).startswith("layers.2.attn.o")]
    sums = max(units, key=lambda n: p.graph.in_degree(n))
    with p.edit("cut") as e:
        for into in (p.in_edges(sums)[1], p.in_edges(sums)[4]):
            e.cut(into)
    receipt = written(m, tmp_path / "out")
    assert (receipt.level, receipt.exact) == (3, True)
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    o = gw.open(tmp_path / "out").program.weights["model.layers.2.self_attn.o_proj.weight"].numpy()
    dead = np.flatnonzero(np.abs(o).max(0) == 0)
    assert dead.tolist() == [*range(10, 20), *range(40, 50)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_narrower_stream_exports_zero_filled_to_the_original_class(opened, tmp_path, family):
    m = opened(family)
    hidden_width(m)
    uneven_neurons(m)
    written(m, tmp_path / "out", level=3)
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    assert (tmp_path / "out/config.json").read_bytes() == m.config.raw  # eps · d/d' and back


def test_eps_is_scaled_for_an_uncorrected_narrow_stream_unless_shared(opened, tmp_path):
    for family, possible in (("llama", True), ("qwen3", False)):
        m = opened(family)
        (axis,) = m.select("embed").channels.chosen
        with m.program.edit("without the correction") as e:
            e.cut_units(m.program.axes()[axis].units(range(12)), correct=False)
        uneven_neurons(m)
        assert (3 in m.export_plan().possible) == possible
        if possible:
            written(m, tmp_path / family, level=3)
            config = json.loads((tmp_path / family / "config.json").read_text())
            assert config["rms_norm_eps"] == pytest.approx(m.config["rms_norm_eps"] * 36 / 48)
            assert checkpoints.relative(stock(tmp_path / family), m.logits(IDS)) <= 1e-5


def test_key_heads_with_too_many_queries_are_repeated(opened, tmp_path):
    """Six heads on two key heads; all six read key head 1: it stands in both groups."""
    m = opened()
    p = m.program
    m.select("layers.1.attn").heads[[0]].prune(ragged=True)
    with p.edit("all read key head 1") as e:
        e.set_weight("layers.1.attn.sdpa.key_head", lambda t: np.ones_like(t))
    written(m, tmp_path / "out", level=3)
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5
    k = gw.open(tmp_path / "out").program.weights["model.layers.1.self_attn.k_proj.weight"].numpy()
    np.testing.assert_array_equal(k[:10], k[10:])


def test_factors_in_16_bits_are_inexact_and_need_an_explicit_level(opened, tmp_path):
    m = opened("llama", "bfloat16")
    factored(m)
    plan = m.export_plan()
    assert plan.level == 5
    assert not plan.levels[2].exact
    assert plan.levels[2].reasons[0].path == "layers.2.mlp.down.weight"
    receipt = written(m, tmp_path / "out", level=3)
    assert not receipt.exact
    assert 1e-5 < checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 2e-2


def test_zero_filling_is_exact_in_16_bits(opened, tmp_path):
    m = opened("llama", "bfloat16")
    uneven_neurons(m)
    uneven_heads(m)
    receipt = written(m, tmp_path / "out")
    assert (receipt.level, receipt.exact) == (3, True)
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5


def test_remaining_units_keep_their_indices_and_removed_ones_are_zero(opened, tmp_path):
    m = opened()
    m.select("layers.2.mlp").neurons[[3, 40]].prune()
    m.select("layers.2.mlp").neurons[[0, 20]].prune()  # among the remaining ones: 0 and 21
    m.select("layers.1.attn").heads[[0]].prune(ragged=True)
    m.select("layers.1.attn").heads[[2]].prune(ragged=True)  # was 3
    m.select("layers.3.attn").kv_groups[0].prune()
    written(m, tmp_path / "out")
    a, b = (gw.open(d).program.weights for d in (m.directory, tmp_path / "out"))
    stem = "model.layers.{}.{}_proj.weight"
    zero = {
        stem.format(2, "mlp.up"): (0, [0, 3, 21, 40]),
        stem.format(2, "mlp.down"): (1, [0, 3, 21, 40]),
        stem.format(1, "self_attn.q"): (0, [*range(10), *range(30, 40)]),
        stem.format(1, "self_attn.o"): (1, [*range(10), *range(30, 40)]),
        stem.format(1, "self_attn.k"): (0, []),
        stem.format(3, "self_attn.k"): (0, list(range(10))),
        stem.format(3, "self_attn.o"): (1, list(range(30))),
    }
    for key, (axis, gone) in zero.items():
        expected = a[key].numpy().copy()
        expected[(slice(None),) * axis + (gone,)] = 0
        np.testing.assert_array_equal(b[key].numpy(), expected, err_msg=key)


def test_zeros_of_a_saved_model_are_in_the_dtype_of_its_other_weights(opened, tmp_path):
    m = opened("llama", "bfloat16")
    attention = next(b for b in residual_branches(m.program) if b.kind == "attention")
    with m.program.edit("remove the attention of a layer") as e:
        remove_branch(e, attention)
    m.save(tmp_path / "saved", history="none")
    weights = weight_counts(m.directory)
    written(gw.open(tmp_path / "saved"), tmp_path / "stock", 3)
    assert weight_counts(tmp_path / "stock")["bytes"] == weights["bytes"]


def test_a_saved_program_without_original_indices_is_still_zero_filled(opened, tmp_path):
    m = opened()
    uneven_neurons(m)
    uneven_heads(m)
    m.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    written(again, tmp_path / "out")
    assert checkpoints.relative(stock(tmp_path / "out"), m.logits(IDS)) <= 1e-5


def test_unchanged_weights_keep_their_bytes(opened, tmp_path):
    m = opened()
    m.select("layers.2.mlp").neurons[::3].prune()
    written(m, tmp_path / "out")
    a, b = gw.open(m.directory).program.weights, gw.open(tmp_path / "out").program.weights
    changed = [key for key in a if a[key].numpy().tobytes() != b[key].numpy().tobytes()]
    kinds = [f"{part}.{kind}" for part in ("gate_proj", "up_proj") for kind in ("weight", "bias")]
    assert sorted(changed) == sorted(f"model.layers.2.mlp.{name}" for name in (*kinds, "down_proj.weight"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e, p: e.set_attr("layers.2.attn.sdpa", scale=0.4),
        lambda e, p: e.set_attr("layers.2.attn.sdpa", window=3),
        lambda e, p: e.set_attr("layers.2.mlp.norm", eps=0.1),
        lambda e, p: e.rewire(edge(p, "layers.2.mid", "layers.2.mlp.norm"), "layers.1.out"),
        lambda e, p: e.rewire(edge(p, "layers.2.mlp.gate", "layers.2.mlp.act"), "layers.2.mlp.up"),
        lambda e, p: e.insert(edge(p, "layers.2.mid", "layers.2.out"), "tanh"),
        lambda e, p: e.set_weight("rope.frequencies", lambda f: f * 2),
        lambda e, p: e.set_outputs(logits=e.add("tanh", "lm_head", name="capped")),
        lambda e, p: e.link("layers.2.mid", "layers.2.out", matrix(48, 48)),
        lambda e, p: e.cut("layers.2.mid -> layers.2.out"),
    ],
)
def test_a_changed_function_cannot_use_the_original_class(opened, tmp_path, spoil):
    m = opened()
    p = m.program
    with p.edit("spoil") as e:
        spoil(e, p)
    assert not {2, 3} & set(m.export_plan().possible)
    with pytest.raises(ExportLevelImpossible):
        written(m, tmp_path / "out", level=3)
    assert not (tmp_path / "out").exists()
