"""Masses collected from programs, pruning inside an open edit, and gates that survive saving, forks and undo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright import attention as at
from graphwright.errors import UsageError
from graphwright.patterns import Pattern, causal_full, sliding_window


def arrays(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    return [rng.normal(size=(1, 2, tokens, 4)).astype("f4") for _ in range(3)]


def scores(pattern: Pattern) -> np.ndarray:
    return np.asarray(pattern.edges["score"]).astype(np.float64)


def test_attentions_that_share_a_pattern_give_the_mean_of_their_masses() -> None:
    rng = np.random.default_rng(0)
    pattern = causal_full(16, block=4)
    q, k, v = arrays(rng, 16)
    each = []
    for left, right in ((q, k), (k, q)):
        twin = pattern.copy()
        at.attend(left, right, v, twin, collect="mass")
        each.append(scores(twin))
    p = gw.trace(lambda q, k, v: at.attend(q, k, v, pattern) + at.attend(k, q, v, pattern), *map(gw.tensor, (q, k, v)))
    found = at.collect(p, dict(zip(p.input_names(), (q, k, v), strict=True)))
    assert list(found.values()) == [pattern]
    np.testing.assert_allclose(scores(pattern), np.mean(each, axis=0), atol=1e-6)
    with pytest.raises(UsageError, match="sparsify"):
        at.collect(gw.trace(lambda x: x + x, gw.tensor(q)), {})


def test_an_open_edit_prunes_and_connects_in_one_entry() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(64, window=24, block=4)
    at.attend(*arrays(rng, 64), pattern=pattern, collect="mass")
    before, edges = pattern.hash(), len(pattern)
    with pattern.edit("trim", author="me") as e:
        done = e.prune(mass=0.1)
        e.connect(query=15, key=0)
    assert len(pattern) == edges - len(done.pairs) + 1
    assert [(entry.why, entry.author) for entry in pattern.journal] == [("trim", "me")]
    pattern.undo()
    assert (pattern.hash(), len(pattern)) == (before, edges)


def test_a_program_journals_pruning_and_steps() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(32, window=12, block=4)
    q, k, v = arrays(rng, 32)
    p = gw.trace(lambda q, k, v: at.attend(q, k, v, pattern), *map(gw.tensor, (q, k, v)))
    at.collect(p, dict(zip(p.input_names(), (q, k, v), strict=True)))
    before = p.hash()
    pattern.prune(0.3)
    pattern.step(q, k, v, rng.normal(size=v.shape), prune=2)
    assert [entry.author for entry in p.journal[-2:]] == ["pass", "gate"]
    p.undo(2)
    assert p.hash() == before


def test_gated_patterns_are_saved_and_forked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(32, window=12, block=4)
    q, k, v = arrays(rng, 32)
    p = gw.trace(lambda q, k, v: at.attend(q, k, v, pattern), *map(gw.tensor, (q, k, v)))
    pattern.gate("sigmoid", init=rng.normal(size=len(pattern)))
    feeds = dict(zip(p.input_names(), (q, k, v), strict=True))
    (wanted,) = p(**feeds).values()
    p.save(tmp_path / "saved")
    for twin in (p.fork(), gw.load(tmp_path / "saved")):
        (own,) = twin.patterns.values()
        assert twin.hash() == p.hash()
        assert np.array_equal(next(iter(twin(**feeds).values())).numpy(), wanted.numpy())
        (handle,) = twin.gates()
        with twin.edit("without gates") as e:
            e.ungate(handle)
        assert own.gates == 0
        assert pattern.gates == len(pattern)
