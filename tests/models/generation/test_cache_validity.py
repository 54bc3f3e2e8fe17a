"""A cache under edits and faults: never used with another model's rows, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_bits import rows, state, unknown_rows
from checkpoints import Made, relative, some_ids

import graphwright as gw
from graphwright.errors import ComputeError
from graphwright.graph import NodeId
from graphwright.models import StaleCache, StaticCache

IDS = some_ids((2, 47))


# -- edits -------------------------------------------------------------------------------------------------------------
def test_a_cache_is_stale_after_an_upstream_edit_and_valid_after_undo(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :10])
    bits = state(cache)
    undisturbed = model.generate(IDS[0, :10], 5).ids
    with model.program.edit("louder values") as e:
        e.set_weight("layers.1.attn.v.weight", lambda w: w * 2)
    for attempt in (
        lambda: cache.step(IDS[:1, :1]),
        lambda: list(model.decode(cache, 1)),
        cache.last_logits,
        lambda: model.generate(IDS[0, :6], 2, cache=cache),
    ):
        with pytest.raises(StaleCache) as caught:
            attempt()
        assert caught.value.layers == ("layers.1.attn.sdpa", "layers.2.attn.sdpa")
        assert "layers.1.attn.sdpa" in str(caught.value.where)
        assert "louder values" in str(caught.value.got)
        assert "reprefill" in str(caught.value.fix)
        assert state(cache) == bits
    assert cache.validity() == {"layers.0.attn.sdpa": True, "layers.1.attn.sdpa": False, "layers.2.attn.sdpa": False}
    model.program.undo()
    assert all(cache.validity().values())
    assert list(model.decode(cache, 5)) == undisturbed


def test_structural_edits_make_the_cache_stale(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :10])
    with model.program.edit("cut the first MLP") as e:
        e.cut(model.program.in_edges("layers.0.out")[1])
    with pytest.raises(StaleCache) as caught:
        cache.step(IDS[:1, :1])
    assert caught.value.layers == ("layers.1.attn.sdpa", "layers.2.attn.sdpa")


def test_weights_written_in_place_make_the_cache_stale(model: gw.Model) -> None:
    """Training writes variables without an edit of the program."""
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :10])
    weight = model.program.weights["model.layers.0.self_attn.k_proj.weight"]
    weight.assign(weight * 1.01)
    model.reprefill(cache)
    weight.assign(weight * 1.01)
    with pytest.raises(StaleCache) as caught:
        cache.step(IDS[:1, :1])
    assert caught.value.got == "weights written in place"
    model.reprefill(cache)
    assert relative(cache.last_logits(), model.logits(IDS[:1, :10])[:, -1]) < 1e-5


def test_edits_after_the_last_attention_keep_the_cache_valid(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :10])
    cuts = [("layers.2.mid", 1), ("layers.2.out", 1)]
    for name in (
        "lm_head.weight",
        "norm.weight",
        "layers.2.mlp.up.weight",
        "layers.2.attn.o.weight",
        "layers.2.attn.q.weight",
    ):
        with model.program.edit(name) as e:
            e.set_weight(name, lambda w: w * 1.25)
        assert all(cache.validity().values())
    with model.program.edit("cut the last branches") as e:
        for junction, port in cuts:
            e.cut(model.program.in_edges(junction)[port])
    assert relative(cache.last_logits(), model.logits(IDS[:1, :10])[:, -1]) < 1e-5
    step = cache.step(IDS[:1, 10:11]).to_numpy("float32")
    assert relative(step[:, 0], model.logits(IDS[:1, :11])[:, -1]) < 1e-5
    model.program.undo()  # the last attention is back, but has no row for the token in between
    with pytest.raises(StaleCache) as caught:
        cache.step(IDS[:1, :1])
    assert caught.value.layers == ("layers.2.attn.sdpa",)


def change(m: gw.Model, node: NodeId) -> str | None:
    """Edit one node so that its value changes; None if there is no such edit."""
    p = m.program
    path, op = p.path(node), p.op(node)
    with p.edit(path) as e:
        if op == "param":
            e.set_weight(node, lambda w: w * 1.5 + 0.1)
        elif op == "sdpa":
            e.set_attr(node, scale=0.5)
        elif op == "rms_norm":
            e.set_attr(node, eps=0.5)
        elif op == "rope_table":
            e.set_attr(node, scale=1.3)
        elif p.is_junction(node):
            e.cut(p.in_edges(node)[1])
        elif op in ("input", "const", "flatten", "unflatten", "permute", "embedding"):
            return None
        else:
            e.insert(p.out_edges(node)[0] if p.out_edges(node) else p.in_edges(node)[0], "tanh")
    return path


def test_layers_reported_valid_have_bit_equal_recomputed_entries(made: Callable[[str], Made]) -> None:
    """Every node of a three-layer model is edited; what is still called valid is computed again and compared."""
    m = gw.open(made("qwen3").path)
    p, ids = m.program, IDS[:1, :8]
    cache = m.new_cache(8, kind="static")
    m.prefill(cache, ids)
    paths = [f"layers.{i}.attn.sdpa" for i in range(3)]
    before = {path: rows(cache, path) for path in paths}
    kept = stale = edited = 0
    for node in p.nodes():
        if change(m, node) is None:
            continue
        edited += 1
        fresh = m.new_cache(8, kind="static")
        m.prefill(fresh, ids)
        for path, valid in cache.validity().items():
            same = all(np.array_equal(a, b) for a, b in zip(before[path], rows(fresh, path), strict=True))
            assert same or not valid, f"{path} after an edit of {p.path(node)}"
            kept, stale = kept + valid, stale + (not same)
        p.undo()
        assert all(cache.validity().values())
    assert edited > 80
    assert kept > 60
    assert stale > 60


def test_cache_validity_can_be_checked_against_another_program(made: Callable[[str], Made]) -> None:
    a, b = gw.open(made("llama").path), gw.open(made("llama").path)
    cache = a.new_cache(9, kind="static")
    a.prefill(cache, IDS[:1, :5])
    assert all(cache.validity(b.program).values())
    with b.program.edit("other") as e:
        e.set_weight("layers.1.attn.k.weight", lambda w: w * 2)
    assert [v for _, v in sorted(cache.validity(b.program).items())] == [True, False, False]


def test_allow_stale_is_recorded_in_the_result(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :10])
    with model.program.edit("upstream") as e:
        e.set_weight("layers.1.attn.v.weight", lambda w: w * 2)
    done = model.generate(IDS[0, :12], 3, cache=cache, allow_stale=True)
    assert done.stale_layers == ("layers.1.attn.sdpa", "layers.2.attn.sdpa")
    assert done.to_json()["stale_layers"]
    notes = [e for e in model.program.journal if "stale cache" in e.why]
    assert len(notes) == 1
    model.program.journal.verify()
    with pytest.raises(StaleCache):
        cache.step(IDS[:1, :1])
    model.program.undo()  # the rows are a mixture now: the old model does not fit them either
    with pytest.raises(StaleCache):
        cache.step(IDS[:1, :1])
    model.reprefill(cache)
    assert cache.stale_runs == ()
    assert all(cache.validity().values())


# -- faults ------------------------------------------------------------------------------------------------------------
def _ready(model: gw.Model) -> tuple[StaticCache, Any, list[int]]:
    """A cache of 6 rows, the workspace of its next step, and the ids that follow."""
    cache = model.new_cache(20, kind="static")
    model.prefill(cache, IDS[:1, :6])
    undisturbed = model.generate(IDS[0, :6], 4).ids
    cache.step(IDS[:1, 6:7])
    cache.truncate(6)
    return cache, next(w.space for (_, _, n), w in cache.steps.spaces.items() if n == 1), undisturbed


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fault_at_any_call_of_a_step_changes_nothing(
    error: type[BaseException], model: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")
    cache, space, undisturbed = _ready(model)
    bits, calls = state(cache), list(space.kernels.calls)
    assert len(calls) > 60

    def fail() -> None:
        raise error("planted")

    for i in range(0, len(calls), 1 if error is KeyboardInterrupt else 9):  # what is raised makes no difference
        space.kernels.calls[i] = fail
        with pytest.raises((ComputeError, KeyboardInterrupt)):
            cache.step(IDS[:1, 6:7])
        space.kernels.calls[i] = calls[i]
        assert state(cache) == bits
    assert list(model.decode(cache, 4)) == undisturbed


def test_a_fault_at_any_instruction_of_the_native_call_changes_nothing(model: gw.Model) -> None:
    cache, space, undisturbed = _ready(model)
    bits, tried = state(cache), set()
    for op in unknown_rows(space):
        tried.add(op)
        with pytest.raises(ComputeError):
            cache.step(IDS[:1, 6:7])
        assert state(cache) == bits
    assert len(tried) > 40
    assert list(model.decode(cache, 4)) == undisturbed


def test_a_fault_in_a_later_chunk_undoes_all_chunks(model: gw.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = model.new_cache(20, kind="static")
    model.prefill(cache, IDS[:1, :4])
    bits, step, count = state(cache), StaticCache.step, 0

    def third(self: StaticCache, *args: Any, **options: Any) -> object:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return step(self, *args, **options)

    monkeypatch.setattr(StaticCache, "step", third)
    with pytest.raises(KeyboardInterrupt):
        cache.prefill(IDS[:1, 4:14], chunk=3)
    assert state(cache) == bits


def test_a_failed_reprefill_can_be_retried(model: gw.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = model.new_cache(20, kind="static")
    model.prefill(cache, IDS[:1, :4])
    with monkeypatch.context() as patch:
        patch.setattr(StaticCache, "prefill", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.reprefill(cache)
    assert cache.tokens[0].tolist() == IDS[0, :4].tolist()
    with pytest.raises(StaleCache):
        cache.step(IDS[:1, :1])
    model.reprefill(cache)
    assert relative(cache.last_logits(), model.logits(IDS[:1, :4])[:, -1]) < 1e-5
