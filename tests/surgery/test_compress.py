"""Compressing a model: budgets, the chain that runs, dense matrices, densify, reports; beside numpy."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from networks import interrupting

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.plan import plan_for
from graphwright.program import Builder, EmptySelection, Program
from graphwright.safetensors import Checkpoint
from graphwright.surgery.calibration import MissingCalibration
from graphwright.surgery.factorise.chain import attach
from graphwright.surgery.factorise.factors import Factors, LowRank, parameters, reconstruct
from graphwright.surgery.factorise.methods import RingMethod, Unfolding
from graphwright.surgery.matrices import find_matrices
from seeds import DEEP

MLP = "layers.*.mlp"
NAMED: dict[Any, Any] = {"B": 5, "T": 3}


def opened(dtype: str = "float32"):
    return gw.open(tiny_llama.directory("f32"), dtype=dtype, compute=dtype)


def feeds(rows: int = 4) -> dict[str, np.ndarray]:
    ids = tiny_llama.batch(3, rows)[0]
    return {"ids": ids, "positions": np.broadcast_to(np.arange(64), ids.shape).copy()}


def logits(p: Program) -> np.ndarray:
    return p.run(feeds(), keep="outputs")["logits"].to_numpy()


@pytest.fixture(scope="module")
def data() -> sg.Calibration:
    return sg.Calibration(tiny_llama.batch(1, 8)[0])


def one(out: int, inner: int, lead: tuple[int | str, ...] = ("B",), bias: bool = True, seed: int = 0) -> Program:
    rng = np.random.default_rng(seed)
    b = Builder("one")
    extra = [b.param("fc.bias", rng.standard_normal(out))] if bias else []
    w = b.param("fc.weight", rng.standard_normal((out, inner)))
    b.output(b.linear(b.input("x", (*lead, inner), "float64"), w, *extra, name="fc"), "y")
    return b.build()


def factors(w: np.ndarray, kind: str) -> Factors:
    if kind == "svd":
        return sg.svd(w, 3)
    return RingMethod(w, int(kind[2:]), kind[:2] == "tr", True, 0).within_error(0.3)


@pytest.mark.parametrize("lead", [(), ("B",), ("B", "T", 2)])
@pytest.mark.parametrize("kind", ["svd", "tt2", "tt3", "tr3", "tr4"])
@pytest.mark.parametrize("shape", [(12, 18), (18, 12), (13, 10)])
def test_the_factored_chain_equals_the_product_with_the_matrix(shape: tuple[int, int], kind: str, lead: tuple) -> None:
    p = one(*shape, lead)
    made = factors(p.weights["fc.weight"].data.to_numpy(), kind)
    bias = p.weights["fc.bias"].data.to_numpy()
    w = reconstruct(made)
    with p.edit("factors") as e:
        attach(e, find_matrices(p, "fc")[0][0], made)
    x = np.random.default_rng(1).standard_normal((*(NAMED.get(n, n) for n in lead), shape[1]))
    wanted = x @ w.T + bias
    assert np.abs(p.run(x=x, keep="outputs")["y"].to_numpy() - wanted).max() <= 1e-10
    plan = plan_for(p, {"x": p.spec("x").bind(NAMED)}, ("y",))
    assert np.abs(plan({"x": x})["y"].to_numpy() - wanted).max() <= 1e-10
    assert "fc.weight" not in p.weights


@pytest.mark.parametrize("kind", ["svd", "tt3", "tr3"])
def test_gradients_reach_every_core(kind: str) -> None:
    p = one(12, 18)
    made = factors(p.weights["fc.weight"].data.to_numpy(), kind)
    with p.edit("factors") as e:
        cores = attach(e, find_matrices(p, "fc")[0][0], made)
    rng = np.random.default_rng(0)
    x, seed = rng.standard_normal((4, 18)), rng.standard_normal((4, 12))
    y = p(x=x)["y"]
    (y * gw.tensor(seed)).sum().backward()
    for node in cores:
        variable = p.weights[p.key(node)]
        assert variable.grad is not None
        values, found = variable.data.to_numpy().copy(), variable.grad.numpy()
        for index in [tuple(rng.integers(0, n) for n in values.shape) for _ in range(4)]:
            sides = []
            for h in (1e-6, -1e-6):
                moved = values.copy()
                moved[index] += h
                q = p.fork()
                with q.edit("moved") as e:
                    e.set_weight(p.key(node), moved)
                sides.append(float((q(x=x)["y"].numpy() * seed).sum()))
            assert found[index] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["svd", "tt3", "tr3"])
def test_no_buffer_has_the_size_of_the_matrix(kind: str) -> None:
    p = one(64, 64, bias=False)
    with p.edit("factors") as e:
        w = np.kron(np.ones((4, 4)), np.random.default_rng(0).standard_normal((16, 16)))
        made = factors(w, kind)
        attach(e, find_matrices(p, "fc")[0][0], made)
    specs = [s for node in p.nodes() for s in p.specs(node)]
    assert parameters(made) < 64 * 64
    assert max(s.bind({"B": 2}).size for s in specs) < 64 * 64
    plan = plan_for(p, {"x": p.spec("x").bind({"B": 2})}, ("y",))
    assert plan.arena_bytes < 64 * 64 * 8


def test_tied_tables_become_one_factored_param_used_twice() -> None:
    model = gw.open("bundled", dtype="float32")
    p = model.program
    w = p.weights.array("model.embed_tokens.weight").to_numpy("float64")
    found = sg.compress(p, "{embed,lm_head}", "svd", sg.Ratio(0.4))
    (row,) = found.applied
    assert row.path == "embed.weight"
    outer, inner = (p.weights.array(p.key(p.node(f"embed.{n}.weight"))).to_numpy("float64") for n in ("outer", "inner"))
    assert outer.shape == (256, row.ranks[0])
    ids = np.array([[3, 200, 65]])
    run = p.run({"ids": ids, "positions": np.arange(3)[None]}, keep="outputs", capture=["embed", "norm"])
    assert np.abs(run.value("embed").to_numpy() - (outer @ inner)[ids]).max() <= 1e-5
    last = run.value("norm").to_numpy("float64") @ (outer @ inner).T
    assert np.abs(run["logits"].to_numpy() - last).max() <= 1e-3
    assert np.linalg.norm(w - outer @ inner) / np.linalg.norm(w) == pytest.approx(row.weight_error, rel=1e-5)
    assert sg.densify(p) == ["embed.weight"]
    assert {p.path(n) for n in p.consumers("embed.weight")} == {"embed", "lm_head"}
    with pytest.raises(ValueError, match="cannot factor an embedding"):
        sg.compress(p, "embed", "tt")


@pytest.mark.parametrize("method", ["svd", "asvd", "tt", "tr"])
def test_quality_budgets_are_met_with_the_fewest_parameters(method: str, data: sg.Calibration) -> None:
    p = opened("float64").program
    found = sg.compress(p, MLP, method, sg.Error(0.6), calibration=data, dry_run=True)
    assert len(found.rows) == 6
    for row in found.rows:
        lost = row.output_error if method == "asvd" else row.weight_error
        assert lost is not None
        assert lost <= 0.6 * (1 + 1e-6)
        assert row.ratio == pytest.approx(np.prod(row.shape) / row.parameters)
        w = p.weights.array(p.key(p.node(row.path))).to_numpy()
        if method == "svd":
            sigma = np.linalg.svd(w, compute_uv=False)
            smaller = np.sqrt((sigma[row.ranks[0] - 1 :] ** 2).sum() / (sigma**2).sum())
            assert smaller > 0.6
            assert row.svd_error == pytest.approx(row.weight_error, rel=1e-9)
        if method in ("tt", "tr"):
            rank = row.parameters // sum(row.shape)
            sigma = np.linalg.svd(w, compute_uv=False)
            assert row.svd_error == pytest.approx(np.sqrt((sigma[rank:] ** 2).sum() / (sigma**2).sum()), rel=1e-9)


def test_energy_budgets_use_the_smallest_sufficient_rank() -> None:
    p = opened("float64").program
    for share in (0.5, 0.9):
        for row in sg.compress(p, MLP, "svd", sg.Energy(share), dry_run=True).rows:
            kept = np.cumsum(np.linalg.svd(p.weights.array(p.key(p.node(row.path))).to_numpy(), compute_uv=False) ** 2)
            assert row.ranks[0] == int(np.argmax(kept >= share * kept[-1])) + 1
    assert "Energy(share=0.99)" in sg.compress(p, MLP, "svd", dry_run=True).budget


@pytest.mark.parametrize("method", ["svd", "tr"])
def test_size_budgets_bound_all_matrices_together(method: str) -> None:
    p = opened().program
    whole = 6 * 128 * 64
    for budget, most in ((sg.Ratio(0.4), 0.6 * whole), (sg.Params(20_000), 20_000), (sg.Bytes(100_000), 25_000)):
        found = sg.compress(p, MLP, method, budget, dry_run=True)
        assert found.before == whole
        assert 0.8 * most <= found.after <= most
        assert found.after == sum(r.parameters for r in found.applied) + sum(
            128 * 64 for _ in range(6 - len(found.applied))
        )
        assert found.ratio == found.before / found.after
    heavy = sg.compress(p, MLP, "svd", sg.Ratio(0.4), importance={"layers.1.mlp": 100.0}, dry_run=True)
    plain = sg.compress(p, MLP, "svd", sg.Ratio(0.4), dry_run=True)
    ranks = [{r.path: r.ranks[0] for r in f.rows} for f in (heavy, plain)]
    assert ranks[0].get("layers.1.mlp.up.weight", 99) > ranks[1]["layers.1.mlp.up.weight"]


def test_the_best_method_is_applied_and_all_are_reported(data: sg.Calibration) -> None:
    p = opened("float64").program
    old = p.fork()
    found = sg.compress(p, "layers.0.mlp", "best", sg.Error(0.4), calibration=data)
    for path in {r.path for r in found.rows}:
        rows = [r for r in found.rows if r.path == path]
        assert [r.method for r in rows] == ["svd", "asvd", "tt", "tr"]
        (best,) = (r for r in rows if r.chosen)
        assert best.parameters == min(r.parameters for r in rows)
        assert best.applied
    a, b = logits(old), logits(p)
    again = p.run(data.feeds(p)[0], keep="outputs")["logits"].to_numpy()
    before = old.run(data.feeds(old)[0], keep="outputs")["logits"].to_numpy()
    assert found.drift is not None
    assert found.drift.relative == pytest.approx(np.linalg.norm(again - before) / np.linalg.norm(before), rel=1e-6)
    assert np.abs(a - b).max() > 1e-3
    assert all(r.kl is not None and r.kl >= 0 and r.speed.before > 0 and r.speed.after > 0 for r in found.rows)
    text = str(found)
    assert all(word in text for word in ("svd_error", "asvd_error", "dense_ms", "ratio"))


def test_reported_output_errors_match_measured_layer_outputs(data: sg.Calibration) -> None:
    p = opened("float64").program
    inputs = p.run(data.feeds(p)[0], keep="outputs", capture=["layers.0.mlp.norm"]).value("layers.0.mlp.norm")
    x = inputs.to_numpy().reshape(-1, 64)
    w = p.weights.array(p.key(p.node("layers.0.mlp.up.weight"))).to_numpy()
    for method in ("svd", "asvd", "tt"):
        q = p.fork()
        found = sg.compress(q, "layers.0.mlp.up", method, sg.Ratio(0.5), calibration=data)
        sg.densify(q)
        made = q.weights.array(q.key(q.node("layers.0.mlp.up.weight"))).to_numpy()
        measured = np.linalg.norm(x @ (w - made).T) / np.linalg.norm(x @ w.T)
        (row,) = found.rows
        assert row.output_error == pytest.approx(measured, rel=1e-6)
        assert row.asvd_error is not None
        assert row.asvd_error <= measured * (1 + 1e-3)


def test_factors_larger_than_one_matrix_raise_and_among_several_stay_dense() -> None:
    b = Builder("two")
    rng = np.random.default_rng(0)
    x = b.input("x", ("B", 256), "float64")
    for name, w in (("random", rng.standard_normal((256, 256))), ("flat", np.ones((256, 256)))):
        x = b.linear(x, b.param(f"{name}.weight", w), name=name)
    b.output(x, "y")
    p = b.build()
    start = p.hash()
    for method in ("best", "svd", "tt"):
        with pytest.raises(sg.CompressionWouldGrow) as refused:
            sg.compress(p, "random", method, sg.Error(0.05))
        assert refused.value.ratio <= 1
        assert p.hash() == start
    found = sg.compress(p, "{random,flat}", "svd", sg.Error(0.05))
    assert [r.path for r in found.applied] == ["flat.weight"]
    assert any(s.path == "random.weight" and "kept dense" in s.reason for s in found.skipped)
    assert found.after == 256 * 256 + 512
    assert p.hash() != start


@pytest.mark.parametrize("method", ["svd", "asvd", "tt", "tr"])
def test_densify_keeps_the_function_and_restores_the_names(method: str, data: sg.Calibration) -> None:
    for dtype, bound in (("float64", 1e-13), ("float32", 1e-6))[: 2 if DEEP or method == "svd" else 1]:
        model = opened(dtype)
        p = model.program
        start, structure = p.hash(), p.structure_hash()
        low = method in ("svd", "asvd")
        where = "layers.*.{mlp,attn}.*" if low else "layers.1.{mlp,attn}.*"
        sg.compress(p, where, method, sg.Ratio(0.5), calibration=data if method == "asvd" else None, min_dim=32)
        factored = logits(p)
        keys = set(p.weights)
        made = sg.densify(p)
        assert len(made) >= (12 if low else 6)
        assert np.linalg.norm(logits(p) - factored) <= bound * np.linalg.norm(factored)
        assert p.structure_hash() == structure
        assert not {k for k in p.weights if "core" in k or "inner" in k}
        p.undo()
        assert set(p.weights) == keys
        p.undo()
        assert p.hash() == start


def test_densify_applies_to_the_pattern_and_to_orthogonal_factors() -> None:
    p = opened("float64").program
    before = logits(p)
    sg.orthogonalize(p, "layers.*.attn.{q,k}", fold="insert")
    assert sg.densify(p, "layers.1.attn.q.**") == ["layers.1.attn.q.weight"]
    assert len(sg.densify(p)) == 3
    assert np.abs(logits(p) - before).max() <= 1e-10
    with pytest.raises(EmptySelection):
        sg.densify(p)
    sg.compress(p, "layers.0.mlp.up", "svd", sg.Ratio(0.5))
    with p.edit("manual") as e:
        e.insert(p.in_edges("layers.0.mlp.up")[0], "tanh", name="layers.0.mlp.up.bent")
    broken = p.hash()
    with pytest.raises(ValueError, match="was edited"):
        sg.densify(p)
    assert p.hash() == broken


def test_a_factored_model_is_saved_and_exported(tmp_path) -> None:
    model = opened()
    ids = feeds()["ids"]
    model.compress("layers.0.mlp", "tt", sg.Ratio(0.4))
    wanted = model.logits(ids)
    model.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    assert np.array_equal(again.logits(ids), wanted)
    assert len(sg.densify(again.program)) == 3
    receipt = model.export(tmp_path / "dense", check="none", timed=False)
    assert receipt.level == 3  # float32: the products are what the factors give
    receipt = model.export(tmp_path / "out", prefer="size", check="none", timed=False)
    assert receipt.level == 5
    with Checkpoint(tmp_path / "out") as written:
        assert sum("core" in key for key in written) == 9


def test_factors_can_be_trained() -> None:
    model = opened()
    model.compress(MLP, "svd", sg.Ratio(0.6))
    p = model.program
    ids, mask = tiny_llama.batch(5, 16)
    positions = np.broadcast_to(np.arange(64), ids.shape).copy()
    optimizer = gw.optim.Adam(p, lr=1e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        out = p(ids=ids, positions=positions)["logits"][:, :-1]
        loss = gw.nn.functional.cross_entropy(out, gw.tensor(ids[:, 1:]), dim=-1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert tiny_llama.accuracy(model.logits(ids), ids, mask) > 0.3


def test_error_curves_are_monotone_and_need_one_decomposition(
    monkeypatch: pytest.MonkeyPatch, data: sg.Calibration
) -> None:
    p = opened("float64").program
    start, sizes, svd = p.hash(), [], np.linalg.svd

    def counted(a, *args, **kwargs):
        sizes.append(a.size)
        return svd(a, *args, **kwargs)

    monkeypatch.setattr(np.linalg, "svd", counted)
    for method in ("svd", "asvd"):
        sizes.clear()
        found = sg.curve(p, "layers.0.mlp.up", [method], points=8, calibration=data)[method]
        assert sum(sizes) / (128 * 64) <= 1.3
        assert len(found) >= 6
        assert all(a.ratio < b.ratio and a.error < b.error for a, b in itertools.pairwise(found))
    first, calls = Unfolding.of, []
    monkeypatch.setattr(Unfolding, "of", staticmethod(lambda tensor: calls.append(tensor.shape) or first(tensor)))
    trains = sg.curve(p, "layers.0.mlp.up", ["tt"], points=4)["tt"]
    assert len(calls) == 1  # the large unfolding, once
    assert all(a.ratio < b.ratio and a.error < b.error for a, b in itertools.pairwise(trains))
    assert p.hash() == start
    with pytest.raises(ValueError, match="one matrix"):
        sg.curve(p, MLP)
    with pytest.raises(MissingCalibration):
        sg.curve(p, "layers.0.mlp.up", ["asvd"])


def test_a_dry_run_reports_the_same_and_changes_nothing(data: sg.Calibration) -> None:
    p = opened().program
    start = p.hash()
    planned = sg.compress(p, MLP, "asvd", sg.Error(0.3), calibration=data, dry_run=True).to_json()
    assert p.hash() == start
    done = sg.compress(p, MLP, "asvd", sg.Error(0.3), calibration=data).to_json()
    assert p.hash() != start
    for facts in (planned, done):
        facts.pop("dry_run")
        for row in facts["rows"]:
            for name in ("speed", "slower"):
                row.pop(name)
    assert json.loads(json.dumps(planned)) == json.loads(json.dumps(done))
    assert len(p.journal) == 1
    p.undo()
    assert p.hash() == start


def test_every_option_changes_the_result() -> None:
    p = opened().program

    def ranks(**options: Any) -> list[tuple[int, ...]]:
        chosen = {"method": "tt", "budget": sg.Error(0.6), **options}
        return [r.ranks for r in sg.compress(p, "layers.0.mlp", dry_run=True, **chosen).rows]

    base = ranks()
    assert ranks(order=2) != base
    assert ranks(method="svd") != base
    assert ranks(method="svd", max_rank=2, budget=sg.Ratio(0.5)) == [(2,)] * 3
    assert ranks(method="svd", min_rank=40, budget=sg.Error(0.9)) == [(40,)] * 3
    assert ranks(min_dim=65) == []
    swept = [sg.compress(p, "layers.0.mlp", "tr", sg.Error(0.6), sweeps=n, dry_run=True).rows for n in (0, 3)]
    errors = [[r.weight_error for r in rows] for rows in swept]
    assert all(b < a for a, b in zip(*errors, strict=True))
    with pytest.raises(sg.NotFactorable) as refused:
        ranks(order=8, pad=False)
    assert refused.value.where == "layers.0.mlp.gate.weight"
    best = sg.compress(p, "layers.0.mlp", "best", sg.Error(0.6), order=8, pad=False, dry_run=True).rows
    assert {row.method for row in best} == {"svd"}


def test_refused_calls_change_nothing(data: sg.Calibration) -> None:
    p = opened().program
    start = p.hash()
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"where": "layers.9"}, EmptySelection),
        ({"where": MLP, "method": "cp"}, ValueError),
        ({"where": MLP, "budget": 0.5}, ValueError),
        ({"where": MLP, "budget": sg.Latency(1.0)}, ValueError),
        ({"where": MLP, "budget": sg.Ratio(0.5, of="flops")}, ValueError),
        ({"where": MLP, "method": "asvd"}, MissingCalibration),
    ]
    for options, kind in refused:
        with pytest.raises(kind):
            sg.compress(p, **options)
    with pytest.raises(sg.BudgetUnreachable) as small:
        sg.compress(p, MLP, "svd", sg.Params(1000))
    assert small.value.best == 6 * (128 + 64)
    with pytest.raises(sg.BudgetUnreachable) as tight:
        sg.compress(p, MLP, "svd", sg.Error(0.1), max_rank=4)
    assert tight.value.best > 0.1
    with p.edit("damage") as e:
        e.set_weight("layers.1.mlp.up.weight", lambda w: w * np.where(np.arange(64) == 5, np.inf, 1.0))
    damaged = p.hash()
    with pytest.raises(sg.NonFiniteWeight):
        sg.compress(p, MLP, "svd")
    assert p.hash() == damaged != start


def test_an_interrupted_run_is_undone_or_keeps_finished_matrices() -> None:
    p = opened().program
    start = p.hash()

    stop = interrupting(2)
    with pytest.raises(KeyboardInterrupt):
        sg.compress(p, MLP, "svd", sg.Ratio(0.5), progress=stop)
    assert p.hash() == start
    kept = sg.compress(p, MLP, "svd", sg.Ratio(0.5), progress=stop, keep_partial=True)
    assert (len(kept.applied), kept.interrupted) == (2, True)
    assert "interrupted" in str(kept)
    assert len(sg.densify(p)) == 2


def test_bfloat16_weights_are_factored_in_their_dtype() -> None:
    model = gw.open("bundled")
    found = model.compress("layers.0.mlp.up", "svd", sg.Error(0.3))
    p = model.program
    assert p.spec("layers.0.mlp.up.outer.weight").dtype.name == "bfloat16"
    (row,) = found.applied
    assert row.weight_error <= 0.3 + 2**-7
    assert row.weight_error != row.svd_error  # after rounding
    assert isinstance(sg.svd(np.eye(3), 1), LowRank)
