"""What `diagnose` says: nothing of sound networks, one finding per planted defect, and repairs that hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
from networks import CLEAN, feeds, gpt2, mlp, outputs, random_decoder

import graphwright as gw
from fixtures import tiny_llama
from graphwright import plugins, surgery
from graphwright.errors import UsageError
from graphwright.surgery import Severity, diagnose
from graphwright.testing.defects import KINDS_OF_DEFECT, plant
from seeds import deep

MODELS = {"llama": CLEAN["trained llama"], "qwen2": CLEAN["qwen2 with biases"], "gpt2": gpt2}

NOWHERE = {("unbalanced_heads", "gpt2"), ("unlike_siblings", "llama")}
"""Defects without a position: q, k and v are rows of one weight, so none is scaled alone; and two layers are no
majority."""


def with_loss(twin: gw.Program) -> str:
    """Half the mean square of the first output."""
    with twin.edit("a loss") as e:
        out = twin.outputs()[0]
        square = e.add("mul", out, out, name="loss.square")
        return twin.path(e.add("mean", square, name="loss", axes=None, keepdims=False))


@pytest.mark.parametrize("name", CLEAN)
def test_valid_networks_have_no_findings(name):
    p = CLEAN[name]()
    before = p.state_hash()
    assert list(diagnose(p)) == []
    found = diagnose(p, inputs=feeds(p), loss=with_loss)
    assert list(found) == []
    assert set(found.asked) > set(diagnose(p).asked)
    assert p.state_hash() == before
    assert len(p.journal) == (1 if name == "recurrent neat" else 0)


@pytest.mark.parametrize("text", ["ab", "abc"])
def test_a_text_of_few_tokens_is_too_little_to_judge_blocks_by(text):
    assert not gw.open("bundled").diagnose(text=text, kinds=["harmful_block"])


def test_models_have_no_findings_with_a_text():
    model = gw.open("bundled")
    assert not diagnose(model)
    assert not diagnose(gw.open(tiny_llama.directory("bf16")))
    found = model.diagnose(text="The following program reads a file and writes what it finds into a table. " * 2)
    assert not found, str(found)
    assert {"redundant", "gain", "blocked_gradient"} <= set(found.asked)
    assert len(model.program.journal) == 0


@pytest.mark.parametrize("kind", KINDS_OF_DEFECT)
def test_a_planted_defect_is_the_only_finding(kind):
    for name, make in MODELS.items():
        p = make()
        if (kind, name) in NOWHERE:
            continue
        for seed in range(deep(20, 2) if name == "llama" else deep(6, 1)):
            planted = plant(p, kind, seed)
            found = diagnose(p)
            assert [f.kind for f in found] == [kind], (name, seed, planted, str(found))
            assert planted.element in "\n".join((*found[0].paths, found[0].where)), (name, seed, planted, str(found))
            p.undo()
        assert not diagnose(p)


@pytest.mark.parametrize("kind", KINDS_OF_DEFECT)
def test_a_fix_removes_its_finding_and_adds_none(kind):
    for name, make in MODELS.items():
        p = make()
        if (kind, name) in NOWHERE:
            continue
        sound = outputs(p)
        for seed in range(deep(3, 1)):
            plant(p, kind, seed)
            before = outputs(p) if p.valid else None
            for index in range(len(diagnose(p)[0].fixes)):
                found = diagnose(p)
                fix = found[0].fixes[index]
                found.fix(found[0], fix)
                assert p.valid, (name, seed, fix.what)
                again = diagnose(p)
                assert not again, (name, seed, fix.what, str(again))
                if fix.keeps_function and before is not None:
                    close(outputs(p), before, (name, seed, fix.what))
                p.undo()
            p.undo()
            close(outputs(p), sound, "undone")


def close(ours, theirs, where):
    for key, want in theirs.items():
        scale = max(float(np.abs(want).max()), 1e-30)
        assert np.abs(ours[key] - want).max() <= 1e-6 * max(scale, 1.0), where


@pytest.mark.parametrize("kind", ["cycle", "orphan_source", "interface"])
def test_fixing_restores_parts_that_did_not_run(kind):
    """Not by knowing what was there: the lost value is the one that nothing reads, or that the siblings read."""
    p = random_decoder("llama")
    sound, same = outputs(p), 0
    count = deep(20, 8)
    for seed in range(count):
        plant(p, kind, seed)
        found = diagnose(p)
        found.fix_all()
        after = outputs(p)
        same += all(np.array_equal(after[k], sound[k]) for k in sound)
        p.undo(2)
    assert same >= 0.9 * count, same


def test_one_defect_of_each_kind_at_once_gives_one_finding_of_each():
    p = random_decoder("llama", num_hidden_layers=6)
    before = p.hash()
    late = ["unreachable", "interface", "cycle", "orphan_source", "unlike_siblings"]
    for at, kind in enumerate([*(k for k in KINDS_OF_DEFECT if k not in late), *late]):
        plant(p, kind, 40 + at)
    found = diagnose(p)
    assert sorted(f.kind for f in found) == sorted(KINDS_OF_DEFECT), str(found)
    p.undo(len(KINDS_OF_DEFECT))
    assert p.hash() == before


def test_a_cycle_names_its_shortest_path():
    p = mlp()
    with p.edit("an entry") as e:
        j = e.insert("0 -> 0.act", "junction", name="j")
    with p.edit("a loop", check=False) as e:
        e.connect("0.act", j)
    (found,) = diagnose(p, kinds=["cycle"])
    assert found.witness["path"] == ["j", "0.act"]
    assert found.severity is Severity.CRITICAL


def test_interface_findings_name_edge_axis_and_sizes():
    p = mlp()
    with p.edit("half a weight", check=False) as e:
        e.set_weight("1.weight", np.ones((20, 23), "f4"))
    (found,) = diagnose(p)
    assert (found.kind, found.axis, found.witness["edge"]) == ("interface", 1, "1.weight -> 1")
    assert (found.expected, found.got) == ("f32[20, 24]", "f32[20, 23]")


def test_manually_built_defects_are_found():
    p = mlp()
    with p.edit("three of them", check=False) as e:
        e.param("extra.weight", np.ones((3, 3), "f4"))
        e.add("tanh", "0.act", name="idle")
        e.cut("1 -> 1.act")
    found = diagnose(p)
    assert {(f.kind, f.where) for f in found} == {
        ("tensor", "extra.weight"), ("dead_end", "idle"), ("orphan_source", "1.act, port 0")}  # fmt: skip
    assert found.fix_all() == tuple(found)
    assert p.valid
    assert not diagnose(p)
    assert p.journal[-1].why == "fix 3 findings"
    p.undo()
    assert not p.valid


@pytest.mark.parametrize(("loss", "squash"), [("cross_entropy", "softmax"), ("bce_with_logits", "sigmoid")])
def test_a_loss_that_reads_probabilities_instead_of_logits_is_found(loss, squash):
    rng, results = np.random.default_rng(0), []
    for twice in (False, True):
        b = gw.Builder("classifier")
        x = b.input("x", (4, 3))
        y = b.input("y", *(((4,), "int64") if squash == "softmax" else ((4, 5),)))
        scores = b.linear(x, b.param("w", np.linspace(-1, 1, 15, dtype="f4").reshape(5, 3)), name="scores")
        fed = b.op(squash, scores, name="p", **({"axis": -1} if squash == "softmax" else {})) if twice else scores
        values = b.op(loss, fed, y, name="loss")
        b.output(b.mean(values[0] if isinstance(values, tuple) else values, axes=None), "mean")
        results.append(b.build())
    plain, doubled = results
    assert not diagnose(plain)
    findings = diagnose(doubled)
    (found,) = findings
    assert (found.kind, found.where, found.witness) == ("double_softmax", "loss", {"loss": "loss", "from": "p"})
    findings.fix_all(only=None)
    assert not diagnose(doubled)
    feeds = {"x": rng.normal(size=(4, 3)).astype("f4")}
    feeds["y"] = rng.integers(5, size=4) if squash == "softmax" else rng.random((4, 5)).astype("f4")
    assert doubled.run(feeds)["mean"].to_numpy() == plain.run(feeds)["mean"].to_numpy()


def test_delayed_edges_are_no_cycles_and_zero_terms_can_be_removed():
    b = gw.Builder("loop")
    x = b.input("x", (2, 3))
    b.output(b.junction(x, b.tanh(x, name="t"), name="j"), "y")
    p = b.build()
    with p.edit("over time") as e:
        e.connect("j", "j", delay=1)
    assert not diagnose(p)
    with p.edit("an empty sum") as e:
        e.insert("t -> j", "junction", name="none")
    with p.edit("empty it") as e:
        e.cut("t -> none")
    (found,) = diagnose(p)
    assert (found.kind, found.severity) == ("orphan_source", Severity.WARNING)
    assert found.fixes[0].what == "connect t to none"


def test_only_frozen_zero_gates_block_gradients():
    for trainable in (True, False):
        p = mlp()
        with p.edit("a gate") as e:
            gate = e.param("gate", np.zeros((), "f4"), trainable=trainable)
            edge = p.edge("1 -> 1.act")
            gated = e.add("mul", "1", gate, name="gated")
            e.rewire(edge, gated)
        found = diagnose(p, kinds=["blocked_gradient"])
        assert [f.where for f in found] == ([] if trainable else ["gated"])
        if found:
            assert set(found[0].witness["params"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
            found.fix_all()
            assert p.attrs(p.node("gate"))["trainable"]


def test_a_closed_gate_blocks_only_the_weights_before_it():
    p = random_decoder("llama")
    with p.edit("a gate") as e:
        gate = e.gate("layers.1.mlp.down -> layers.1.out", "scale", init=0.5)
    assert not diagnose(p)
    with p.edit("close") as e:
        e.set_gate(gate, "closed")
    (found,) = diagnose(p)
    assert (found.kind, found.nodes[0]) == ("blocked_gradient", gate)
    names = ("norm", "gate", "up", "down")
    assert set(found.witness["params"]) == {f"layers.1.mlp.{n}.weight" for n in names}
    diagnose(p).fix_all(only=None)
    assert not diagnose(p)


def test_a_probe_finds_silent_units_and_weak_gradients():
    p = mlp()
    with p.edit("silence") as e:
        e.set_weight("0.bias", lambda b: np.where(np.arange(24) < 2, -100, b))
    x = {"x": np.random.default_rng(0).normal(size=(64, 12)).astype("f4")}
    assert not diagnose(p)
    (found,) = diagnose(p, inputs=x, loss=with_loss)
    assert (found.kind, found.where, found.witness["units"]) == ("blocked_gradient", "0.act", [0, 1])


def test_the_key_bias_of_gpt2_is_exempt():
    """Without rotary positions the softmax cancels a shift of all keys: its gradient is zero by construction."""
    b, rng = gw.Builder("attention"), np.random.default_rng(0)
    x = b.input("x", (2, 5, 8), "float64")
    parts = []
    for name in "qkv":
        y = b.linear(x, b.param(f"{name}.weight", rng.normal(size=(8, 8))), b.param(f"{name}.bias", rng.normal(size=8)))
        parts.append(b.permute(b.unflatten(y, axis=2, sizes=(2, 4)), axes=(0, 2, 1, 3)))
    b.output(b.sdpa(*parts, scale=0.5, name="sdpa"), "y")
    p, x = b.build(), {"x": rng.normal(size=(2, 5, 8))}
    slopes = p.run(x).grad("y", ["k.bias", "q.bias"], [rng.normal(size=(2, 2, 5, 4))])
    norms = [np.linalg.norm(g.to_numpy()) for g in slopes]
    assert norms[0] < 1e-9 * norms[1]
    assert not diagnose(p, inputs=x, loss=with_loss)


@pytest.mark.parametrize(("kind", "factor", "redundant"), [("const", 1e-9, 1), ("param", 1e-9, 0), ("param", 0.0, 0)])
def test_an_edge_with_a_trained_small_factor_is_not_redundant(kind, factor, redundant):
    p = random_decoder("llama")
    with p.edit("a faint branch") as e:
        scale = getattr(e, kind)("scale", np.full((), factor, "f4"))
        e.connect(e.add("mul", "layers.0.out", scale, name="faint"), "layers.2.mid")
    assert [f.kind for f in diagnose(p, inputs=feeds(p), loss=with_loss)] == ["redundant"] * redundant


def test_redundant_edges_are_confirmed_by_a_run():
    p = random_decoder("llama")
    with p.edit("an echo of nothing") as e:
        faint = e.add("mul", "layers.0.out", e.const("tiny", np.full((), 1e-9, "f4")), name="faint")
        e.connect(e.add("tanh", faint, name="echo"), "layers.2.mid")
    (found,) = diagnose(p, inputs=feeds(p), loss=with_loss)
    assert (found.kind, found.where) == ("redundant", "echo -> layers.2.mid")
    before = outputs(p)
    diagnose(p, inputs=feeds(p), loss=with_loss).fix_all()
    close(outputs(p), before, "cut")
    assert "echo" not in p.select().names()


def test_gain_is_found_in_long_chains_and_collapsed_tokens():
    p = mlp()
    with p.edit("loud") as e:
        for i in range(3):
            e.set_weight(f"{i}.weight", lambda w: w * 40)
    (found,) = diagnose(p)
    assert found.kind == "gain"
    product = np.prod([np.linalg.norm(p.weights[f"{i}.weight"].numpy(), 2) for i in range(3)])
    assert float(found.got or 0) == pytest.approx(product, rel=1e-2)
    q = random_decoder("llama")
    with q.edit("one token") as e:
        e.set_weight("model.embed_tokens.weight", lambda w: np.ones_like(w) * w[:1] * 100)
    kinds = {f.kind for f in diagnose(q, inputs=feeds(q), loss=with_loss, kinds=["gain"])}
    assert kinds == {"gain"}


def test_a_dead_head_is_cut_without_a_change():
    p = random_decoder("llama", num_key_value_heads=6)
    with p.edit("kill head 2") as e:
        for key in ("v_proj", "k_proj", "q_proj"):
            e.set_weight(f"model.layers.1.self_attn.{key}.weight", lambda w: zeroed(w, slice(16, 24), 0))
        e.set_weight("model.layers.1.self_attn.o_proj.weight", lambda w: zeroed(w, slice(16, 24), 1))
    (found,) = diagnose(p)
    assert (found.kind, found.witness["dead"]) == ("unbalanced_heads", [2])
    before = outputs(p)
    diagnose(p).fix_all()
    assert p.weights["model.layers.1.self_attn.q_proj.weight"].shape == (40, 32)
    close(outputs(p), before, "cut head")
    assert not diagnose(p)


def zeroed(w, indices, dim):
    np.moveaxis(w, dim, 0)[indices] = 0
    return w


def test_missing_residual_paths_are_found_from_the_opened_checkpoint():
    model = gw.open(tiny_llama.directory("f32"))
    p = model.program
    with p.edit("no path around any attention") as e:
        e.cut("embed -> layers.0.mid")
        e.cut("layers.0.out -> layers.1.mid")
    assert not diagnose(p)
    found = diagnose(model)
    assert [(f.kind, f.where) for f in found] == [("missing_residual", f"layers.{i}.mid") for i in (0, 1)]
    found.fix_all()
    assert not diagnose(model)


def test_a_tie_missing_against_the_config_is_found_and_restored():
    model = gw.open("bundled")
    p = model.program
    assert model.dims.tied
    with p.edit("untie") as e:
        own = e.param("lm_head.weight", p.weights.array("model.embed_tokens.weight").copy())
        e.rewire("embed.weight -> embed.weight.cast", own)
    found = diagnose(model)
    assert [f.kind for f in found] == ["tensor"], str(found)
    assert found[0].paths[0] == "lm_head.weight"
    found.fix_all()
    assert not diagnose(model)
    assert [p.path(n) for n in p.consumers("embed.weight")] == ["embed", "embed.weight.cast"]


def test_invalid_values_are_restored_from_the_checkpoint():
    model = gw.open(tiny_llama.directory("f32"))
    p, key = model.program, "model.layers.1.mlp.up_proj.weight"
    before = p.hash()
    with p.edit("spoil") as e:
        e.set_weight(key, lambda w: np.where(w > 0.1, np.nan, w))
    found = diagnose(model)
    assert [(f.kind, f.witness["key"]) for f in found] == [("tensor", key)]
    assert found[0].witness["count"] == int((np.isnan(p.weights[key].numpy())).sum())
    restore = next(f for f in found[0].fixes if f.what.startswith("restore"))
    found.fix(found[0], restore)
    assert p.hash() == before
    with p.edit("nothing left") as e:
        e.set_weight(key, lambda w: 0 * w)
    assert [f.what for f in diagnose(model)] == ["all values are zero"]
    p.undo()
    with p.edit("a norm that shuts off its branch") as e:
        e.set_weight("model.layers.1.input_layernorm.weight", lambda w: 0 * w)
    assert [(f.what, f.paths[0]) for f in diagnose(model)] == [("all values are zero", "layers.1.attn.norm.weight")]
    p.undo()
    with p.edit("hardly anything left") as e:
        e.set_weight(key, lambda w: np.outer(np.ones(len(w)), np.ones(w.shape[1])))
    (found,) = diagnose(model)
    assert float(found.got or 0) == pytest.approx(1.0)


# -- the report --------------------------------------------------------------------------------------------------------
def test_the_json_report_has_a_fixed_schema():
    p = mlp()
    plant(p, "dead_end", 1)
    data = diagnose(p).to_json()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {"schema", "program", "version", "complete", "kinds", "counts", "findings"}
    assert data["counts"] == {"critical": 0, "error": 0, "warning": 1, "info": 0}
    (finding,) = data["findings"]
    assert {k: type(v).__name__ for k, v in finding.items()} == {
        "kind": "str", "severity": "str", "where": "str", "what": "str", "axis": "NoneType", "expected": "NoneType",
        "got": "NoneType", "paths": "list", "witness": "dict", "fixes": "list"}  # fmt: skip
    assert [set(f) for f in finding["fixes"]] == [{"what", "cost", "keeps_function"}] * 2
    for kind in KINDS_OF_DEFECT:
        q = random_decoder("llama")
        plant(q, kind, 3)
        json.dumps(diagnose(q).to_json(), allow_nan=False)


def test_the_overlay_colours_findings_and_shows_their_text_on_hovering():
    p = random_decoder("llama")
    planted = plant(p, "blocked_gradient", 2)
    found = diagnose(p)
    drawn = found.overlay()
    assert p.node(planted.element) in drawn
    assert {r.level for r in drawn.values()} == {int(Severity.ERROR)}
    svg = p.to_svg(overlay=drawn, level=4)
    assert "no gradient passes" in svg
    assert "error</text>" in svg
    assert 'class="gw-b gw-none' not in svg
    page = p.to_html(overlay=drawn)
    assert "no gradient passes" in page
    dot = p.to_dot(color=drawn, level=4)
    assert "no gradient passes" in dot
    assert "fillcolor" in dot
    with pytest.raises(gw.GraphwrightError, match="both numbers and notes"):
        p.to_svg(overlay={**drawn, "lm_head": 1.0})


def test_custom_rules_are_registered_and_run():
    from graphwright.surgery.findings import diagnose as kinds

    @surgery.finding("long_name")
    def long_name(d):
        for node in d.program.nodes():
            if len(d.program.path(node)) > 30:
                yield surgery.Finding.of(d.program, "long_name", Severity.INFO, "is hard to read", node)

    try:
        p = mlp()
        with p.edit("a name") as e:
            e.rename("0.act", "a" * 31)
        assert [f.where for f in diagnose(p)] == ["a" * 31]
        assert diagnose(p, kinds=["cycle"]).asked == ("cycle",)
        with pytest.raises(gw.GraphwrightError, match="registered"):
            surgery.finding("long_name")(long_name)
    finally:
        del kinds._rules["long_name"]


def test_rules_from_packages_are_loaded_and_broken_ones_skipped(monkeypatch, caplog):
    from graphwright.surgery.findings import diagnose as kinds

    class Point:
        def __init__(self, name, rule):
            self.name, self.rule = name, rule

        def load(self):
            return self.rule()

    def good():
        @surgery.finding("from_a_package")
        def rule(d):
            yield surgery.Finding.of(d.program, "from_a_package", Severity.INFO, "is here", d.program.node("0"))

    points = [Point("broken", lambda: 1 / 0), Point("good", good)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "graphwright.findings" else [])
    monkeypatch.setattr(plugins, "_loaded", set())
    try:
        assert [f.kind for f in diagnose(mlp())] == ["from_a_package"]
        assert "'broken' was skipped" in caplog.text
    finally:
        kinds._rules.pop("from_a_package", None)


def test_a_broken_program_is_loaded_diagnosed_and_repaired(tmp_path):
    p = random_decoder("llama")
    sound = outputs(p)
    plant(p, "cycle", 4)
    plant(p, "interface", 5)
    p.save(tmp_path / "broken")
    with pytest.raises(gw.program.InvalidProgram):
        gw.load(tmp_path / "broken")
    q = gw.load(tmp_path / "broken", check=False)
    assert not q.valid
    found = diagnose(q)
    assert [f.kind for f in found] == ["interface", "cycle"]
    found.fix_all()
    assert q.valid
    assert all(np.array_equal(outputs(q)[k], sound[k]) for k in sound)


def test_an_empty_port_does_not_shift_later_operands():
    """The operand after an empty port does not move up into it: the spec of the node stays the same."""
    p = gpt2()
    spec = p.spec("h.1.ln_2")
    with p.edit("cut x", check=False) as e:
        e.cut("h.1.mid -> h.1.ln_2")
    assert p.spec("h.1.ln_2") == spec
    assert [(f.kind, f.where) for f in diagnose(p)] == [("orphan_source", "h.1.ln_2, port 0")]


def test_progress_of_each_part_ends_at_its_total():
    p, seen = random_decoder("llama"), []
    assert diagnose(p, inputs=feeds(p), loss=with_loss, progress=seen.append).complete
    last = {event.what: event for event in seen}
    assert {"diagnosing", "probe", "gradients"} <= last.keys()
    assert [e for e in last.values() if e.done != e.total] == []


def test_cancelled_diagnoses_are_incomplete_and_invalid_arguments_refused():
    p = random_decoder("llama")
    before, seen = p.state_hash(), []
    found = diagnose(p, inputs=feeds(p), loss=with_loss, progress=seen.append, cancel=lambda: len(seen) > 9)
    assert not found.complete
    assert p.state_hash() == before
    with pytest.raises(gw.GraphwrightError, match="nonsense"):
        diagnose(p, kinds=["nonsense"])
    with pytest.raises(gw.GraphwrightError, match="nonsense"):
        diagnose(p, limits={"nonsense": 1})
    for wrong in ("a", -1, float("nan")):
        with pytest.raises(UsageError, match="noise"):
            diagnose(p, limits={"noise": wrong})
    with pytest.raises(UsageError, match="expected a text"):
        diagnose(gw.open("bundled"), text=5)  # pyright: ignore[reportArgumentType]
    with p.edit("open"), pytest.raises(gw.GraphwrightError, match="open"):
        diagnose(p)
    with pytest.raises(gw.GraphwrightError, match="no tokenizer"):
        diagnose(p, text="some text")
    with pytest.raises(gw.GraphwrightError, match="together with inputs"):
        diagnose(gw.open("bundled"), text="some text", inputs=feeds(p))
    plant(p, "dead_end", 0)
    found = diagnose(p)
    plant(p, "dead_end", 1)
    with pytest.raises(gw.GraphwrightError, match="changed after"):
        found.fix_all()


def test_limits_can_be_passed_as_arguments():
    p = random_decoder("llama")
    planted = plant(p, "bottleneck", 0)
    assert [f.kind for f in diagnose(p)] == ["bottleneck"]
    assert not diagnose(p, limits={"declared": (planted.element,)})
    assert not diagnose(p, limits={"width": 0.01})


@pytest.mark.parametrize("name", ["layers.{}", "block{}", "stage.b{}"])
def test_a_missing_residual_is_found_however_blocks_are_numbered(name):
    b, rng, labels = gw.Builder("blocks"), np.random.default_rng(0), [name.format(i) for i in range(6)]
    x = b.input("x", ("B", 8))
    for i, label in enumerate(labels):
        w = b.param(f"{label}.w", rng.normal(size=(8, 8)).astype("f4"))
        h = b.tanh(b.linear(x, w, name=f"{label}.fc"), name=f"{label}.act")
        x = b.junction(*([h] if i == 2 else [x, h]), name=f"{label}.out")
    b.output(x, "y")
    found = surgery.diagnose(b.build(), kinds=["missing_residual"])
    assert [f.where for f in found] == [f"{labels[2]}.out"]
    assert found[0].fixes[0].keeps_function
