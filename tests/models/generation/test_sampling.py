"""Rules from logits to tokens against transformers' processors, and the draw against the softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphwright.array import from_numpy
from graphwright.errors import ShapeError, UsageError
from graphwright.models import NonFinite, Sampling
from graphwright.models.metrics import log_softmax
from graphwright.ops import compute, get
from graphwright.report import plain


def logits(n: int, size: int = 60, seed: int = 0) -> np.ndarray:
    """Random rows without ties; flat, middling and peaked ones."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, size)) * rng.choice([0.3, 2.0, 9.0], (n, 1))).astype(np.float32)


def drawn(rows: np.ndarray, rule: Sampling, positions: Any, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and kept logits of many rows at once, as a step of a batch draws them."""
    n = len(rows)
    keys = np.tile(np.array(rule.keys(stream, 0)), (n, 1))
    keys[:, 2] = positions
    operands = rows, np.tile(np.array(rule.numbers(), np.float32), (n, 1)), keys, np.full((n, 1, 2), -1, np.int32)
    ids, kept = compute(get("sample_token"), [from_numpy(x) for x in operands], {})
    return ids.to_numpy(), kept.to_numpy()


@pytest.mark.parametrize(
    ("rules", "theirs"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 99}, [TopKLogitsWarper(99)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"top_p": 0.3}, [TopPLogitsWarper(0.3)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
        ({"temperature": 0.5, "top_p": 0.8}, [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.8)]),
        (
            {"temperature": 1.7, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
            [TemperatureLogitsWarper(1.7), TopKLogitsWarper(20), TopPLogitsWarper(0.7), MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_remaining_tokens_match_transformers(rules: dict[str, Any], theirs: list[Any]) -> None:
    rows = logits(10_000)
    z = torch.tensor(rows)
    for processor in theirs:
        z = processor(torch.zeros(len(rows), 1, dtype=torch.long), z)
    rule = Sampling(**{"temperature": 1.0, **rules})
    np.testing.assert_array_equal(np.isfinite(drawn(rows, rule, 0)[1]), np.isfinite(z.numpy()))
    np.testing.assert_array_equal(rule.filtered(rows[7]), drawn(rows[7:8], rule, 0)[1][0])


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    rows = logits(50)
    seen = np.array([3, 3, 17, 40, 59])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor(seen)[None].repeat(50, 1),  # pyright: ignore[reportArgumentType]  # int64 is what they mean by long
        torch.tensor(rows),
    ).numpy()
    rule = Sampling(repetition_penalty=penalty)
    ours = np.stack([rule.filtered(z, seen[:2], seen[2:]) for z in rows])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert (rows[:, seen] < 0).any()  # negative ones are multiplied


def test_presence_and_frequency_count_the_output_only() -> None:
    z = np.zeros(6, np.float32)
    rule = Sampling(presence=0.5, frequency=0.25)
    out = rule.filtered(z, prompt=np.array([0, 0, 1]), output=np.array([1, 2, 2, 2]))
    np.testing.assert_array_equal(out, [0, -0.75, -1.25, 0, 0, 0])


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.5, [0]), (0.51, [0, 1]), (0.8, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2]), (1e-9, [0])]
)
def test_top_p_keeps_the_crossing_token(top_p: float, expected: list[int]) -> None:
    z = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    assert np.flatnonzero(np.isfinite(Sampling(temperature=1.0, top_p=top_p).filtered(z))).tolist() == expected


def test_ties_keep_the_lowest_ids() -> None:
    z = np.array([1, 5, 5, 5, 0], np.float32)
    assert Sampling().sample(z, 0) == 1
    assert np.flatnonzero(np.isfinite(Sampling(temperature=1.0, top_k=2).filtered(z))).tolist() == [1, 2]


def test_every_default_leaves_logits_unchanged() -> None:
    z = logits(1)[0]
    np.testing.assert_array_equal(Sampling().filtered(z, np.array([3]), np.array([4])), z)
    np.testing.assert_array_equal(Sampling(temperature=1.0).filtered(z), z)


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 100 000 draws over 8 tokens; p > 1e-3 means below 24.3 with 7 degrees of freedom."""
    z = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.25, 1.5], np.float32)
    rule = Sampling(temperature=0.8, seed=3)
    p = np.exp(z / 0.8) / np.exp(z / 0.8).sum()
    n = 100_000
    ids, _ = drawn(np.tile(z, (n, 1)), rule, np.arange(n))
    assert ((np.bincount(ids, minlength=8) - n * p) ** 2 / (n * p)).sum() < 24.3
    assert [rule.sample(z, position) for position in range(50)] == ids[:50].tolist()


def test_draws_depend_on_seed_stream_and_position_alone() -> None:
    z = np.zeros(50, np.float32)
    rule = Sampling(temperature=1.0, seed=1)
    base = [rule.sample(z, i) for i in range(40)]
    assert base == [rule.sample(z, i) for i in range(40)]
    assert base != [rule.sample(z, i + 1) for i in range(40)]
    assert base != [rule.sample(z, i, 1) for i in range(40)]
    assert base != [Sampling(temperature=1.0, seed=2).sample(z, i) for i in range(40)]


def test_streams_are_not_correlated() -> None:
    z = np.zeros((3000, 64), np.float32)
    a, b = (drawn(z, Sampling(temperature=1.0), np.arange(3000), s)[0] for s in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.06  # three standard deviations
    assert abs((a == b).mean() - 1 / 64) < 0.01


def test_dropped_tokens_are_never_sampled() -> None:
    rule = Sampling(temperature=1.0, top_k=3)
    z = logits(1, 40)[0]
    allowed = set(np.argsort(-z)[:3].tolist())
    assert {rule.sample(z, i) for i in range(500)} == allowed


def test_penalties_precede_processors_and_these_the_temperature() -> None:
    def forty(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        return np.where(z == 4.0, np.float32(40), z)

    rule = Sampling(repetition_penalty=2.0, presence=1.0, processors=(forty,), temperature=4.0)
    z = np.array([8, 10, 4, 3], np.float32)
    # 8 / 2 = 4 becomes 40; 10 / 2 - 1 = 4 too; 4 was 4 all the time; then everything is divided by 4
    np.testing.assert_array_equal(rule.filtered(z, np.array([0]), np.array([1])), [10, 10, 10, 0.75])


def test_each_filter_sees_the_tokens_left_by_earlier_ones() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    z = np.log(p).astype(np.float32)

    def left(**rules: Any) -> list[int]:
        return np.flatnonzero(np.isfinite(Sampling(temperature=1.0, **rules).filtered(z))).tolist()

    assert left(top_p=0.55) == [0, 1]
    assert left(top_k=2, top_p=0.55) == [0]  # of 0.7 that are left the first has 0.57
    assert left(min_p=0.5) == [0, 1, 2]
    assert left(top_k=2, min_p=0.5) == [0, 1]
    assert np.flatnonzero(np.isfinite(Sampling(temperature=0.5, top_p=0.55).filtered(z))).tolist() == [0, 1]
    assert np.flatnonzero(np.isfinite(Sampling(temperature=0.25, top_p=0.55).filtered(z))).tolist() == [0]


def test_samples_match_the_gumbel_formula_of_the_random_words() -> None:
    """argmax of z + G with G = -ln(-ln u), u on the 24-bit grid between 0 and 1, never at an end."""
    from graphwright.array.random import bits

    z = logits(1, 300)[0]
    words = bits(300, seed=7, stream=2, step=31) >> 8
    u = (words + 0.5) / 2**24
    assert Sampling(temperature=1.0, seed=7).sample(z, 31, 2) == int(np.argmax(z - np.log(-np.log(u))))
    worst = (np.array([0, 2**24 - 1]) + 0.5) / 2**24
    assert np.isfinite(-np.log(-np.log(worst))).all()


def test_processors_receive_ids_and_cannot_change_the_given_logits() -> None:
    calls = []

    def ban(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        calls.append(ids.tolist())
        z = z.copy()
        z[int(np.argmax(z))] = -np.inf
        return z

    z = np.array([1, 4, 3, 2], np.float32)
    assert Sampling(processors=(ban, ban)).sample(z, 0, 0, np.array([7]), np.array([8])) == 3
    assert calls == [[7, 8], [7, 8]] * 1
    np.testing.assert_array_equal(z, [1, 4, 3, 2])


@pytest.mark.parametrize("made", [np.zeros(3, np.float32), np.zeros(4, np.float64), np.zeros((1, 4), np.float32)])
def test_processors_that_change_shape_or_dtype_are_refused(made: np.ndarray) -> None:
    def wrong(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        return made

    with pytest.raises(ShapeError) as caught:
        Sampling(processors=(wrong,)).sample(np.zeros(4, np.float32), 0)
    assert (caught.value.where, caught.value.expected) == ("wrong", "float32 [4]")


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_non_finite_logits_are_refused(bad: list[float]) -> None:
    with pytest.raises(NonFinite) as caught:
        Sampling().sample(np.array(bad, np.float32), 12)
    assert caught.value.where == "position 12"


def test_processors_that_ban_every_token_are_refused() -> None:
    with pytest.raises(NonFinite, match="after all rules"):
        Sampling(processors=(lambda ids, z: z - np.float32(np.inf),)).sample(np.zeros(4, np.float32), 0)


@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"presence": float("nan")},
        {"frequency": float("inf")},
    ],
)
def test_options_out_of_range_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**rules)
    assert caught.value.where == f"Sampling, {next(iter(rules))}"
    assert caught.value.expected is not None
    assert str(caught.value.got) == str(next(iter(rules.values())))


def test_log_softmax_equals_torch() -> None:
    rows = logits(20) * 10
    for z in rows:
        np.testing.assert_allclose(log_softmax(z), torch.log_softmax(torch.tensor(z), -1).numpy(), rtol=1e-5, atol=1e-5)


def test_options_as_json_name_their_processors() -> None:
    def keep(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        return z

    assert plain(Sampling(top_k=3, processors=(keep,)))["processors"] == ["keep"]


def test_non_callable_processors_are_refused_at_construction() -> None:
    with pytest.raises(UsageError, match="processors"):
        Sampling(processors=(3,))  # pyright: ignore[reportArgumentType]  # wrong on purpose
