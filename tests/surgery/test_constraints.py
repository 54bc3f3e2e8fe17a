"""Constraints: what satisfies and what violates each, enforcement, saving, and solving without harm."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from networks import feeds, mlp, outputs, random_decoder

import graphwright as gw
from graphwright import surgery
from graphwright.surgery import diagnose, solve
from graphwright.testing.defects import plant


def branches(width: int = 4) -> gw.Program:
    """Nine nodes: an input, two blocks that end in sums, the second without a residual path, and a head."""
    rng, b = np.random.default_rng(0), gw.Builder("branches")
    x = b.input("x", ("B", 4))
    here = b.junction(x, b.tanh(x, name="blocks.0.first"), name="blocks.0.out")
    w = b.param("blocks.1.weight", rng.normal(size=(width, 4)).astype("f4"))
    act = b.tanh(b.linear(here, w, name="blocks.1.fc"), name="blocks.1.act")
    here = b.junction(act, name="blocks.1.out")
    w = b.param("head.weight", rng.normal(size=(2, width)).astype("f4"))
    b.output(b.linear(here, w, name="head"), "y")
    return b.build()


def narrowed() -> gw.Program:
    p = random_decoder("llama")
    p.select("layers.1.mlp").neurons[:8].prune()
    return p


def cut_gradient() -> gw.Program:
    p = mlp()
    with p.edit("stop") as e:
        e.insert("1 -> 1.act", "stop_gradient", name="stopped")
    return p


def unbalanced() -> gw.Program:
    p = random_decoder("llama")
    plant(p, "unbalanced_heads", 1)
    return p


@surgery.constraint("short names")
def short_names(p):
    return [f"{path} is long" for path in map(p.path, p.nodes()) if len(path) > 40]


CASES = {
    "residual": (surgery.ResidualPath("x", "blocks.0.out"), branches,
                 surgery.ResidualPath("blocks.0.out", "blocks.1.out"), branches),
    "gradient_flow": (surgery.GradientFlow(), mlp, surgery.GradientFlow("0"), cut_gradient),
    "head_balance": (surgery.HeadBalance(8), lambda: random_decoder("llama"), surgery.HeadBalance(8), unbalanced),
    "reachable": (surgery.Reachable("x", "head"), branches, surgery.Reachable("head", "x"), branches),
    "no_path": (surgery.NoPath("head", "x"), branches, surgery.NoPath("x", "head"), branches),
    "budget": (surgery.Budget(parameters=1000), branches, surgery.Budget(parameters=23, flops=10, bytes=95), branches),
    "uniform": (surgery.EqualSizes("layers.*.mlp.neurons"), lambda: random_decoder("llama"),
                surgery.EqualSizes("layers.*.mlp.neurons"), narrowed),
    "multiple_of": (surgery.MultipleOf("layers.*.mlp.neurons", 16), lambda: random_decoder("llama"),
                    surgery.MultipleOf("layers.*.mlp.neurons", 64), lambda: random_decoder("llama")),
    "max_depth": (surgery.MaxDepth(5), mlp, surgery.MaxDepth(4), mlp),
    "custom": (surgery.Custom("short names"), mlp, surgery.Custom(lambda p: ["no"]), mlp),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_each_constraint_accepts_good_and_rejects_bad_programs(kind):
    holds, sound, breaks, broken = CASES[kind]
    assert holds.violations(sound()) == []
    found = breaks.violations(broken())
    assert found
    assert {f.kind for f in found} == {kind}
    if kind == "budget":
        assert [f.where for f in found] == ["parameters", "flops", "bytes"]
    if kind == "max_depth":
        assert found[0].witness["path"] == ["0", "0.act", "1", "1.act", "2"]


def test_every_constraint_has_a_case():
    from graphwright.program.constraints import KINDS

    assert set(KINDS) == set(CASES)


def test_a_residual_path_between_other_nodes_does_not_count():
    p = branches()
    assert not surgery.ResidualPath("x", "blocks.0.out").violations(p)
    assert surgery.ResidualPath("blocks.0.out", "blocks.1.out").violations(p)
    assert surgery.ResidualPath("x", "blocks.1.out").violations(p)


@pytest.mark.parametrize("width", [4, 6])
def test_a_residual_path_is_repaired_without_a_change_and_can_be_trained(width):
    p = branches(width)
    before = outputs(p)
    found = solve(p, [surgery.ResidualPath("blocks.0.out", "blocks.1.out")])
    assert found, str(found)
    assert len(found.made) == 1
    after = outputs(p)
    assert all(np.array_equal(before[k], after[k]) for k in before)
    added = [n for n in p.params() if not p.path(n).startswith(("blocks.1.weight", "head"))]
    learns = [n for n in added if p.attrs(n).get("trainable", True)]
    assert learns
    run = p.run(feeds(p))
    (slope,) = run.grad("y", [p.path(learns[0])], [np.arange(32, dtype="f4").reshape(16, 2)])
    assert np.abs(slope.to_numpy()).max() > 0
    assert not diagnose(p)


def test_a_residual_path_into_an_op_inserts_a_sum_after_it():
    p = mlp()
    before = outputs(p)
    assert solve(p, [surgery.ResidualPath("0.act", "1.act")])
    assert not surgery.ResidualPath("0.act", "1.act").violations(p)
    assert np.array_equal(outputs(p)["y"], before["y"])
    p.undo()
    assert len(p.journal) == 2


def test_three_violations_of_a_small_graph_are_solved_as_one_edit():
    p = branches(6)
    assert len(p) == 9
    with p.edit("stop") as e:
        e.insert("blocks.1.act -> blocks.1.out", "stop_gradient", name="stopped")
    keys = set(p.weights)
    wanted = [
        surgery.ResidualPath("blocks.0.out", "blocks.1.out"),
        surgery.GradientFlow(),
        surgery.MultipleOf("blocks.1.*", 4),
    ]
    assert sum(len(c.violations(p)) for c in wanted) == 3
    before, entries = outputs(p), len(p.journal)
    found = solve(p, wanted)
    assert found, str(found)
    assert len(found.made) <= 3
    assert len(p.journal) == entries + 1
    assert not diagnose(p)
    assert np.allclose(outputs(p)["y"], before["y"], atol=1e-6)
    assert set(p.weights) - keys == {"blocks.1.out.bridge.weight"}
    assert not [f for c in wanted for f in c.violations(p)]
    twin = branches(6)
    with twin.edit("stop") as e:
        e.insert("blocks.1.act -> blocks.1.out", "stop_gradient", name="stopped")
    assert solve(twin, wanted).made == found.made
    assert twin.journal[-1].edits == p.journal[-1].edits
    p.undo()
    assert set(p.weights) == keys


def test_unsolvable_constraints_change_nothing_and_list_rejected_repairs():
    p = branches()
    before, entries = p.hash(), len(p.journal)
    contradiction = [
        surgery.ResidualPath("blocks.0.out", "blocks.1.out"),
        surgery.NoPath("blocks.0.out", "blocks.1.out"),
    ]
    found = solve(p, contradiction)
    assert not found
    assert (p.hash(), len(p.journal)) == (before, entries)
    tried = {what: why for u in found.unsatisfied for what, why in u.tried}
    assert tried
    assert "no_path" in {u.violation.kind for u in found.unsatisfied}
    assert str(found).startswith("unsatisfied, nothing changed")
    found = solve(p, [surgery.Budget(parameters=1)])
    assert not found
    assert "no repair" in str(found)
    limited = solve(p, [surgery.ResidualPath("blocks.0.out", "blocks.1.out")], max_edits=0)
    assert not limited
    assert p.hash() == before


def test_repairs_that_cause_new_findings_are_rejected():
    p = branches()
    found = solve(p, [surgery.NoPath("blocks.0.out", "head")])  # cutting the only edge would leave a sum of nothing
    assert not found
    (why,) = [why for u in found.unsatisfied for _, why in u.tried]
    assert why.startswith("it would cause a new finding: ")
    assert "orphan_source" in why or "unreachable" in why


def test_a_repair_that_closes_a_cycle_is_rejected():
    p = branches()
    found = solve(p, [surgery.Reachable("head", "blocks.0.out")])
    assert not found
    assert not found.unsatisfied[0].tried


def test_no_path_is_repaired_by_cutting_edges_into_sums():
    p = branches()
    with p.edit("another way") as e:
        e.connect("x", "blocks.1.out")
    found = solve(p, [surgery.NoPath("blocks.0.out", "head")])
    assert found, str(found)
    assert not surgery.NoPath("blocks.0.out", "head").violations(p)
    assert not diagnose(p)
    assert "blocks.0.out" not in p.select().names()


def test_an_enforced_violation_rolls_the_edit_back():
    p = branches()
    rule = surgery.ResidualPath("x", "blocks.0.out")
    p.constraints.add(rule, enforce=True)
    before = p.hash()
    with pytest.raises(gw.program.ConstraintViolated) as error, p.edit("cut it") as e:
        e.cut("x -> blocks.0.out")
    assert error.value.findings[0].kind == "residual"
    assert p.hash() == before
    assert len(p.journal) == 0
    with p.edit("something else") as e:
        e.insert("blocks.1.out -> head", "tanh", name="t")
    p.undo()
    assert p.constraints.enforced(rule)
    p.constraints.remove(rule)
    with p.edit("cut it") as e:
        e.cut("x -> blocks.0.out")
    p.constraints.add(rule)
    assert [f.kind for f in p.constraints.violations(p)] == ["residual"]
    with p.edit("only result") as e:
        e.insert("blocks.1.out -> head", "tanh", name="t")
    assert solve(p)
    assert not p.constraints.violations(p)


def test_constraints_survive_a_fork_and_a_save(tmp_path):
    p = branches()
    held = [surgery.ResidualPath("x", "blocks.0.out"), surgery.Budget(parameters=50), surgery.Custom("short names"),
            surgery.MultipleOf("head.*", 2), surgery.GradientFlow("head", loss="y")]  # fmt: skip
    for at, rule in enumerate(held):
        p.constraints.add(rule, enforce=at == 0)
    assert list(p.fork().constraints) == held
    q = gw.load(p.save(tmp_path / "saved"))
    assert list(q.constraints) == held
    assert [q.constraints.enforced(c) for c in q.constraints] == [True, False, False, False, False]
    assert q.hash() == p.hash()
    with pytest.raises(gw.program.ConstraintViolated), q.edit("cut it") as e:
        e.cut("x -> blocks.0.out")
    p.constraints.add(surgery.Custom(lambda p: []))
    assert len(p.fork().constraints) == 6
    with pytest.raises(gw.GraphwrightError, match="holds a callable"):
        p.save(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(gw.GraphwrightError, match="registered"):
        surgery.Custom("unknown")


def test_a_process_that_imports_no_surgery_loads_constraints(tmp_path):
    p = branches()
    p.constraints.add(surgery.MaxDepth(99), enforce=True)
    p.save(tmp_path / "saved")
    code = f"""if True:
        import sys
        from graphwright.program import load
        assert not any(name.startswith("graphwright.surgery") for name in sys.modules)
        print(*load({str(tmp_path / "saved")!r}).constraints)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("MaxDepth(n=99)", "")


@pytest.mark.parametrize(
    "form", [{"constraint": "custom", "rule": "gone"}, {"constraint": "none"}, {"constraint": "residual"}, 3]
)
def test_a_saved_program_with_an_unknown_constraint_is_refused(tmp_path, form, monkeypatch):
    p = branches()
    p.constraints.add(surgery.MaxDepth(99))
    monkeypatch.setattr(surgery.MaxDepth, "to_json", lambda self: form)
    p.save(tmp_path / "saved")
    with pytest.raises(gw.program.ProgramFileError):
        gw.load(tmp_path / "saved")
