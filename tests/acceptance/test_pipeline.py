"""The pipeline on the trained tiny Llama: each step against something else, and undone to the byte before the next.

Training gates under a budget (step 8) is in `test_structure.py`, allocations of a planned step (9) in
`tests/optim/test_compile_step.py`. HYPOTHESIS_PROFILE=deep takes all calibration data, and a clean process for exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.program import Program
from graphwright.safetensors import Checkpoint
from graphwright.surgery.orthogonal.methods import gram_error
from graphwright.testing.defects import KINDS_OF_DEFECT, plant
from seeds import DEEP

pytestmark = pytest.mark.deep  # every run has examples/pipeline.py

KINDS = ("f32", "bf16", "sharded")
ATTENTION, MLP = "layers.*.attn.{q,k,v,o}", "layers.*.mlp.{gate,up,down}"
LEARNED, HELD = tiny_llama.batch(11, 64)[0], tiny_llama.batch(12, 32)[0]
IDS, MASK = tiny_llama.batch(13, 128)
BF16 = 2.0**-7
"""Relative step of bfloat16: a weight that is computed is off by as much when it is stored."""


def opened(kind: str = "f32", **options: Any) -> gw.Model:
    return gw.open(tiny_llama.directory(kind), **options)


def data(tokens: int) -> sg.Calibration:
    return sg.Calibration(LEARNED, 4096 if DEEP else tokens, held_out=HELD)


def logits(p: Program, ids: np.ndarray = HELD[:4]) -> np.ndarray:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    return p.run({"ids": ids, "positions": positions}, keep="outputs")["logits"].to_numpy("float64")


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference relative to the largest entry."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def accuracy(p: Program) -> float:
    return tiny_llama.accuracy(logits(p, IDS), IDS, MASK)


def theirs(directory: Path) -> np.ndarray:
    """Logits of transformers in float32, of weights that all were found."""
    loaded: Any = transformers.LlamaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    model, facts = loaded
    assert not any(facts[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.from_numpy(HELD[:4])).logits.numpy()


def payloads(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = Checkpoint(directory)
    return {i.key: (i.tag, tuple(i.shape), bytes(found.bytes(i.key))) for i in found.infos()}


@pytest.mark.parametrize("kind", KINDS)
def test_1_a_model_is_loaded_correctly(kind: str) -> None:
    model = opened(kind)
    p, own = model.program, payloads(tiny_llama.directory(kind))
    assert p.valid
    assert sorted(p.key(n) for n in p.params()) == sorted(own)
    assert [p.weights[k].shape for k in own] == [shape for _, shape, _ in own.values()]
    assert len(p.params()) == len(own) == 9 * 2 + 3
    assert not model.diagnose()


def test_2_a_model_runs_correctly() -> None:
    model = opened()
    ours, wanted = model.logits(HELD[:4]), theirs(tiny_llama.directory("f32"))
    assert off(ours, wanted) <= 2e-5
    cache = model.new_cache(64, kind="static")
    pieces = [cache.step(HELD[:1, :40]), *(cache.step(HELD[:1, i : i + 1]) for i in range(40, 64))]
    assert off(pieces[-1].to_numpy().reshape(-1), wanted[0, -1]) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_3_an_unedited_model_is_saved_unchanged(kind: str, tmp_path: Path) -> None:
    receipt = opened(kind).export(tmp_path / "out", check="none")
    assert receipt.level == 1
    assert payloads(tmp_path / "out") == payloads(tiny_llama.directory(kind))
    np.testing.assert_array_equal(theirs(tmp_path / "out"), theirs(tiny_llama.directory(kind)))


def test_4_planted_defects_are_found_and_repaired() -> None:
    model = opened()
    p = model.program
    before, sound = p.hash(), logits(p)
    for seed, kind in enumerate(KINDS_OF_DEFECT):
        planted = plant(p, kind, seed)
        report = model.diagnose()
        assert [f.kind for f in report] == [kind], (planted, str(report))
        assert planted.element in "\n".join((*report[0].paths, report[0].where))
        keeps = [fix for fix in report[0].fixes if fix.keeps_function]
        now = logits(p) if p.valid and keeps and kind != "tensor" else None
        report.fix(report[0])
        assert p.valid
        assert not model.diagnose()
        if now is not None and report[0].fixes[0].keeps_function:
            assert off(logits(p), now) <= 1e-6
        p.undo(2)
    assert p.hash() == before
    np.testing.assert_array_equal(logits(p), sound)


def test_5_orthogonalising_reports_its_error_and_drift() -> None:
    model = opened(dtype="float64", compute="float64")
    p, cal = model.program, data(512)
    before, plain = p.fork(), logits(p)
    report = sg.orthogonalize(p, ATTENTION, fold="insert", calibration=cal)
    assert report.max_error <= 1e-10
    assert report.mean_error <= 1e-8
    assert len(report.rows) == 8
    assert not report.skipped
    assert off(logits(p), plain) <= 1e-8
    p.undo()
    report = sg.orthogonalize(p, ATTENTION, fold="none", calibration=cal)
    assert all(gram_error(p.weights.array(p.key(p.node(r.path))).to_numpy("float64")) <= 1e-10 for r in report.rows)
    ids = cal.feeds(p)[0]["ids"]
    moved = np.linalg.norm(logits(p, ids) - logits(before, ids)) / np.linalg.norm(logits(before, ids))
    assert report.drift is not None
    assert report.drift.relative == pytest.approx(moved, rel=1e-6)
    assert moved > 0.1  # the symmetric factor was dropped, and the report says so


def test_6_compression_meets_its_budgets() -> None:
    model = opened()
    p, cal = model.program, data(512)
    start = p.hash()
    for budget in (0.01, 0.05, 0.2) if DEEP else (0.05,):
        report = sg.compress(p, "layers.1.mlp.{gate,up}", "best", sg.Error(budget), calibration=cal, dry_run=True)
        assert [r.method for r in report.rows] == ["svd", "asvd", "tt", "tr"] * 2
        assert all(r.error <= budget + 1e-9 and r.kl is not None and r.speed.after > 0 for r in report.rows)
        assert not any(r.applied and r.ratio <= 1 for r in report.rows)
    assert p.hash() == start
    report = sg.compress(p, MLP, "asvd", sg.Ratio(0.4), calibration=cal)
    assert p.hash() != start
    assert all(r.ratio > 1 for r in report.applied)
    assert report.after <= 0.6 * report.before
    assert not {r.shape for r in report.applied} & {s.shape for n in p.nodes() for s in p.specs(n)}  # never rebuilt
    factored = logits(p)
    sg.densify(p)
    assert off(logits(p), factored) <= 1e-5


def test_7_a_pruned_model_keeps_its_accuracy_and_10_is_exported(tmp_path: Path) -> None:
    model = opened()
    p = model.program
    before, was = p.fork(), accuracy(p)
    cal = data(2048)
    report = sg.prune(model, sg.Ratio(0.3), cal, recipe="default" if DEEP else "units")
    assert accuracy(p) >= was - 0.01
    assert report.reached["after"] <= 0.7 * report.reached["before"]
    for prefer in ("class", "size"):
        receipt = model.export(tmp_path / prefer, prefer=prefer, check="auto" if DEEP else "none")
        assert not DEEP or receipt.check["export_error"]["max_rel"] <= 1e-5
    assert off(theirs(tmp_path / "stock"), logits(p)) <= 1e-5  # what went is zero there: masked is smaller
    sizes = [sum(f.stat().st_size for f in (tmp_path / name).glob("*.safetensors")) for name in ("size", "stock")]
    assert sizes[0] < sizes[1]
    recomputed = json.loads(json.dumps(sg.optimise_report(p, cal)))
    for when in ("before", "after"):
        assert recomputed[when] == pytest.approx({k: getattr(report, when)[k] for k in recomputed[when]})
    old, new = (set(q.to_dot().splitlines()) for q in (before, p))
    assert old != new
    p.undo()
    assert p.hash() == before.hash()
    assert set(p.to_dot().splitlines()) == old


def test_8_hardening_cuts_closed_gates() -> None:
    model = opened()
    p = model.program
    start = p.hash()
    with p.edit("gate") as e:
        (gate,) = e.gate(p.axes()["layers.0.mlp.neurons"].units(range(128)), "hard_concrete")
        e.set_gate(gate, "closed", list(range(0, 128, 4)))
    closed = logits(p)
    gw.structure.DifferentiableGraph(p).discretize(0.5)
    assert p.axes()["layers.0.mlp.neurons"].size == 96
    assert off(logits(p), closed) <= 1e-5
    p.undo(2)
    assert p.hash() == start


@pytest.mark.parametrize("kind", ["bf16", "sharded"])
def test_11_other_checkpoint_formats_are_pruned_and_exported(kind: str, tmp_path: Path) -> None:
    model = opened(kind)
    report = sg.prune(model, sg.Ratio(0.2), data(512), recipe="units", restore=False, timed=False)
    assert report.steps
    model.export(tmp_path / "out", level=3, check="none")
    bound = BF16 if kind == "bf16" else 1e-5
    assert off(theirs(tmp_path / "out"), logits(model.program)) <= bound
    assert {tag for tag, _, _ in payloads(tmp_path / "out").values()} == ({"BF16"} if kind == "bf16" else {"F32"})
