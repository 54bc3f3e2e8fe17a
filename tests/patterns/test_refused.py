"""Arguments that patterns refuse, with a typed error and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphwright import attention as at
from graphwright.errors import GraphwrightError, UsageError
from graphwright.patterns import PatternFileError, PatternShape

make: Any = at
IDS = np.zeros(64, int)


def document() -> at.Pattern:
    return at.document(64, IDS, block=8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: make.sliding_window(64, 2.5), lambda: make.sliding_window(64, "8"),
        lambda: make.sliding_window(64, 2**70),
        lambda: make.causal_full(2.5), lambda: make.causal_full((1, 2, 3)), lambda: make.causal_full(64, planes="kv"),
        lambda: make.causal_full(64, q_start=1.5), lambda: make.causal_full(64, timeout=-1), lambda: make.star(64, 1.5),
        lambda: make.dilated(64, 1.5, 2), lambda: make.dilated(64, 10**30, 2), lambda: make.random_blocks(64, 1, None),
        lambda: make.topk("a", "b", 2), lambda: make.topk(np.full((8, 2), np.nan), np.ones((8, 2)), 2),
        lambda: make.document(64, None), lambda: make.document(64, "a" * 64), lambda: make.Pattern(64, causal="no"),
        lambda: make.document(4, np.array([0, 2**32, 0, 2**32])), lambda: make.Pattern.from_flex("a"),
    ],
)  # fmt: skip
def test_values_of_another_type_or_range_make_no_pattern(call: Callable[[], Any]) -> None:
    with pytest.raises(GraphwrightError):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.connect("a", 1), lambda p: p.connect(1.0, 1), lambda p: p.has(1.5, 0), lambda p: p.cut(None),
        lambda p: p.extend("100"), lambda p: p.extend(70.5), lambda p: p.extend(70, segments=[2**32] * 6),
        lambda p: p.extend(70, segments=[1.5] * 6), lambda p: p.apply("x"),
    ],
)  # fmt: skip
def test_a_refused_edit_changes_nothing(call: Callable[[Any], Any]) -> None:
    pattern = document()
    before = pattern.hash(positions=True), pattern.version, len(pattern.journal)
    with pytest.raises(GraphwrightError):
        call(pattern)
    assert (pattern.hash(positions=True), pattern.version, len(pattern.journal)) == before


@pytest.mark.parametrize("columns", [{"gate": -2}, {"gate": 2_000_000_000}, {"score": np.nan}, {"score": np.inf}])
def test_values_that_no_kernel_or_file_can_use_are_not_written(columns: dict[str, Any]) -> None:
    pattern = document()
    before = pattern.hash(positions=True), pattern.gates
    with pytest.raises(UsageError, match=r"out of range|not finite"), pattern.edit("wrong") as e:
        e.set(pattern.edges()[:1], **columns)
    assert (pattern.hash(positions=True), pattern.gates) == before


def test_segments_of_a_pattern_without_segments_are_refused() -> None:
    with pytest.raises(UsageError, match="no segments"):
        at.sliding_window(64, 9, block=8).extend(70, segments=[1] * 6)


def test_large_ids_of_documents_work_once_they_are_numbered() -> None:
    ids = np.array([0, 2**32, 0, 2**32])
    with pytest.raises(PatternShape, match="return_inverse"):
        at.document(4, ids, block=1)
    found = at.document(4, np.unique(ids, return_inverse=True)[1], block=1).to_dense()[0]
    assert np.array_equal(found, (ids[:, None] == ids) & np.tril(np.ones((4, 4), bool)))


def test_saved_masks_that_see_the_future_are_refused() -> None:
    pattern = at.dilated(16, 3, 4, 0, block=8)
    arrays = {name: array.copy() for name, array in pattern.to_arrays().items()}
    assert at.Pattern.from_arrays(arrays).hash() == pattern.hash()
    arrays["bits"][...] = np.uint64(0xFF)
    with pytest.raises(PatternFileError, match="come after their queries"):
        at.Pattern.from_arrays(arrays)


def test_an_extension_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphwright.graph import slots

    pattern, other = at.sliding_window(64, 9, block=8), at.sliding_window(64, 9, block=8)
    before, real, left = pattern.hash(positions=True), slots.aligned, [3]

    def short(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(slots, "aligned", short)
        with pytest.raises(MemoryError):
            pattern.extend(4096)
    assert (pattern.hash(positions=True), pattern.tokens, pattern.journal) == (before, (64, 64), ())
    for each in (pattern, other):
        each.connect(7, 0)
        each.extend(4096)
    assert pattern.hash(positions=True) == other.hash(positions=True)
    assert np.array_equal(pattern.pairs(), other.pairs())


def test_edits_of_no_edges_are_no_edits() -> None:
    pattern = document()
    before = pattern.version
    pattern.cut([])
    pattern.connect_many([], [])
    with pattern.edit("nothing") as e:
        e.set(pattern.edges()[:0], gate=0)
    assert (pattern.version, pattern.journal) == (before, ())


def test_a_dilated_pattern_of_no_distances_is_empty() -> None:
    assert len(at.dilated(64, 2, 0, block=8)) == 0
