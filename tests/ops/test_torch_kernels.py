"""Kernels that are written for GPUs with torch's functions, beside those of the CPU on the same tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from graphwright.array import from_numpy, random
from graphwright.array.cpu.kernel import KERNELS, TORCH_DTYPE, Kernel
from graphwright.array.cpu.words import fill_words_by_torch
from graphwright.array.cuda.torch_kernels import TORCH
from graphwright.array.formulas.gates import GATE_KINDS, MODES, STATES
from graphwright.ops import OPS


def run(row: Kernel, name: str, inputs: list[np.ndarray], attrs: Any) -> list[np.ndarray]:
    arrays = [from_numpy(x.copy()) for x in inputs]
    specs = [a.spec for a in arrays]
    outs = OPS[name].specs(specs, attrs)
    new = [[torch.empty(s.sizes, dtype=TORCH_DTYPE[s.dtype]) for s in given]
           for given in (outs, row.work(outs, specs, attrs) if row.work else [])]  # fmt: skip
    calls = row.bind(new[0], [a.impl for a in arrays], attrs, new[1])
    for step in calls if isinstance(calls, list) else [calls]:
        step()
    return [t.numpy() for t in new[0]]


def agree(name: str, inputs: list[np.ndarray], given: dict[str, Any], rtol: float = 1e-5) -> None:
    attrs = OPS[name].complete(given)
    found = (run(table[name], name, inputs, attrs) for table in (TORCH, KERNELS))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("stream", [0, 7, 2**31 + 5, 2**32 - 1])
def test_words_are_those_of_philox(stream: int) -> None:
    for seed, step, n in ((0, 0, 1), (2**63 - 1, 3, 9), (-5, 2**32 - 1, 64)):
        out = torch.empty(n, dtype=torch.int64)
        fill_words_by_torch(out, torch.tensor([seed, step]), stream, 0)
        wanted = random.bits(n, seed=seed & (2**64 - 1), stream=stream, step=step)
        assert out.tolist() == wanted.tolist()


def gate_operands(rng: np.random.Generator, mode: int) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Gates of all kinds in all states; choices have 3 options, other parts any number of gates."""
    kinds = [k for k, kind in enumerate(GATE_KINDS.values()) for _ in range(2)]
    sizes = tuple(3 if GATE_KINDS[list(GATE_KINDS)[k]].one_of else int(rng.integers(1, 8)) for k in kinds)
    n = sum(sizes)
    table = np.zeros((n, 7), np.int64)
    table[:, 0] = np.repeat(kinds, sizes)
    table[:, 1] = np.repeat(rng.integers(0, 2, len(sizes)), sizes)
    table[:, 2] = rng.integers(0, len(STATES), n)
    table[:, 3], table[:, 4], table[:, 5] = np.arange(n), rng.integers(0, 3, n), rng.integers(0, 9, n)
    logits, heat = rng.normal(size=n).astype("f8"), np.array([0.7, 1.3])
    return [logits, table, heat, np.array([int(rng.integers(99)), int(rng.integers(99)), mode])], sizes


@pytest.mark.parametrize("mode", range(len(MODES)), ids=MODES)
def test_gates_of_all_kinds_and_states_agree(mode: int) -> None:
    rng = np.random.default_rng(mode)
    for _ in range(3):
        operands, sizes = gate_operands(rng, mode)
        agree("gate", operands, {"sizes": sizes, "groups": ("a", "b")}, 1e-9)
        given = tuple(bool(k % 3) for k in range(len(sizes)))
        grads = [rng.normal(size=n) for n, there in zip(sizes, given, strict=True) if there]
        agree("gate_grad", [*operands, *grads], {"sizes": sizes, "given": given}, 1e-9)


def test_tokens_are_sampled_by_the_rules_of_the_cpu() -> None:
    rng, rows, tokens = np.random.default_rng(0), 24, 37
    for draw in range(6):
        logits = rng.normal(size=(rows, tokens)).astype("f4") * 3
        if draw == 5:
            logits[0, 3], logits[1, 5] = np.nan, np.inf
        pick = lambda *values: rng.choice(values, rows).astype("f4")  # noqa: E731
        rules = np.stack([pick(1, 1.3), pick(0, 0.5), pick(0, 0.2), pick(0, 0.5, 1.5), pick(1, 0.7), pick(0, 0.05)], 1)
        keys = np.stack([rng.integers(0, 2**40, rows), rng.integers(0, 2**32, rows), rng.integers(-1, 9, rows),
                         rng.choice([0, 1, 5, 99], rows)], 1)  # fmt: skip
        seen = np.full((rows, 8, 2), -1, np.int32)
        for row in seen:
            n = int(rng.integers(0, 8))
            row[:n, 0], row[:n, 1] = rng.permutation(tokens + 3)[:n], rng.integers(0, 4, n)
        found = [run(t["sample_token"], "sample_token", [logits, rules, keys, seen], {}) for t in (TORCH, KERNELS)]
        assert np.array_equal(found[0][0], found[1][0])
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 64, 100])
def test_a_scan_has_the_values_of_the_loop(steps: int, reverse: bool) -> None:
    rng = np.random.default_rng(steps)
    a, b = rng.uniform(-1, 1, (3, steps, 4)), rng.normal(size=(3, steps, 4))
    agree("linear_scan", [a, b], {"axis": 1, "reverse": reverse}, 1e-10)


def test_the_last_of_several_values_is_written() -> None:
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(3, 5, 2)), np.array([4, 1, 4, -1, 1, 0])
    agree("index_put", [x, rng.normal(size=(3, 6, 2)), ids], {"axis": 1})
    agree("index_fill", [x, ids], {"axis": 1, "value": 2.5})


@pytest.mark.parametrize(("queries", "keys", "causal"), [(5, 5, True), (1, 7, True), (3, 7, False)])
def test_plain_attention_agrees_and_other_is_refused(queries: int, keys: int, causal: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 5)
    operands = [rng.normal(size=s) for s in shapes]
    agree("sdpa", operands, {"scale": 0.4, "causal": causal}, 1e-6)
    tensors = [torch.from_numpy(x) for x in operands]
    takes = TORCH["sdpa"].takes
    for other in ({"window": 2}, {"softcap": 1.0}, {"optional": ("key_mask",)}):
        assert takes([], tensors, OPS["sdpa"].complete({"scale": 0.4, "causal": causal, **other}))
    assert (
        takes([], [tensors[0][:, :, :2], *tensors[1:]], OPS["sdpa"].complete({"scale": 1.0, "causal": True}))
        or queries < 2
    )


def paged(rng: np.random.Generator, queries: int) -> list[np.ndarray]:
    """A pool of 9 blocks of 4 positions for 3 sequences, one of which is idle."""
    pool = rng.normal(size=(9, 2, 4, 6))
    table = np.array([[3, 7, 0], [5, -1, -1], [8, 2, 1]], np.int32)
    return [pool, rng.normal(size=(3, 2, queries, 6)), table, np.array([6, -1, 9 - queries], np.int32)]


@pytest.mark.parametrize("queries", [1, 3])
def test_entries_are_appended_to_blocks(queries: int) -> None:
    operands = paged(np.random.default_rng(queries), queries)
    operands[2][1, 0], operands[3][0] = 7, 4  # the idle sequence names the slot that another one writes
    agree("kv_append_paged", operands, {})
    operands[3][:] = -1  # all are idle
    agree("kv_append_paged", operands, {})


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_over_blocks_agrees(queries: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(queries)
    pool, _, table, lengths = paged(rng, queries)
    operands = [rng.normal(size=(3, 4, queries, 6)), pool, rng.normal(size=(9, 2, 4, 5)), table, lengths]
    agree("sdpa_paged", operands, {"scale": 0.4, **options})
    agree("sdpa_paged", [*operands, rng.normal(size=4)], {"scale": 0.4, **options})


def test_a_missing_block_writes_nothing_and_gives_nan() -> None:
    rng = np.random.default_rng(0)
    pool, rows, table, lengths = paged(rng, 1)
    lengths[1] = 6  # position 6 is in block 1 of the sequence, which has none
    attrs = OPS["kv_append_paged"].complete({})
    (made,) = run(TORCH["kv_append_paged"], "kv_append_paged", [pool, rows, table, lengths], attrs)
    lengths[1] = -1
    (wanted,) = run(KERNELS["kv_append_paged"], "kv_append_paged", [pool, rows, table, lengths], attrs)
    assert np.array_equal(made, wanted)
    lengths[1] = 6
    operands = [rng.normal(size=(3, 4, 1, 6)), pool, pool, table, lengths]
    (mixed,) = run(TORCH["sdpa_paged"], "sdpa_paged", operands, OPS["sdpa_paged"].complete({"scale": 1.0}))
    assert [bool(np.isnan(row).all()) for row in mixed] == [False, True, False]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["adam_step", "adamw_step", "sgd_step"])
def test_a_step_is_skipped_where_a_gradient_is_not_finite(name: str, seed: int) -> None:
    """With one flag, and with one a parameter."""
    inputs, given = OPS[name].sample(np.random.default_rng(seed))
    attrs = OPS[name].complete(given)
    rate, _, *rest = (np.asarray(x) for x in inputs)
    operands = [x.astype("f4") for x in rest]
    params = len(operands) // _width(name, attrs)
    for found in (np.float32(0), np.float32(1), np.arange(params, dtype="f4")):
        results = [run(t[name], name, [rate, np.asarray(found), *operands], attrs) for t in (TORCH, KERNELS)]
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        if np.all(found == 1):
            for mine, before in zip(results[0], operands[-len(results[0]) :], strict=True):
                assert np.array_equal(mine, before)


def _width(name: str, attrs: Any) -> int:
    """Return how many operands a parameter has: gradient, parameter, moments, step count."""
    return 3 + bool(attrs["momentum"]) if name == "sgd_step" else 5 + bool(attrs["amsgrad"])
