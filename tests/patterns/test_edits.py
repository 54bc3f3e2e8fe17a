"""Edits against a model (a dict of pairs), with every table read back from memory after each edit."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_edges import edges_of
from graphwright import patterns as pt
from graphwright.errors import UsageError
from graphwright.graph import EditBusy, NotUndoable, StaleHandle
from graphwright.patterns import Pattern, PatternChange
from graphwright.patterns.table import FULL, MASKED, RULE
from seeds import deep

from .reader import dense

SHAPES = {
    "causal": {"tokens": 70, "block": 16},
    "planes": {"tokens": (30, 70), "block": 16, "planes": 2, "causal": False},
    "window": {"tokens": 70, "block": 16, "window": 20},
    "documents": {"tokens": 70, "block": 16, "segments": np.arange(70) // 23},
    "tokens": {"tokens": 9, "block": 1},
    "wide": {"tokens": 200, "block": 100},
}


def allowed(pattern, q, k):
    """The mask of an edge that is connected manually, by its definition."""
    i = pattern.q_start + np.arange(pattern.tokens[0])[:, None]
    j = np.arange(pattern.tokens[1])
    causal = (j <= i) if pattern.causal else np.ones((len(i), len(j)), bool)
    rule = causal & pattern.base.allowed(pattern.frame, i, j[None])
    part = np.s_[q * pattern.block : (q + 1) * pattern.block, k * pattern.block : (k + 1) * pattern.block]
    return rule[part] if rule[part].any() else causal[part]


def expected(pattern, model):
    mask = np.zeros((pattern.planes, *pattern.tokens), bool)
    for plane, q, k in model:
        part = np.s_[plane, q * pattern.block : (q + 1) * pattern.block, k * pattern.block : (k + 1) * pattern.block]
        mask[part] = allowed(pattern, q, k)
    return mask


def check(pattern, model):
    """The pattern, its memory and its queries agree with the model."""
    wanted = expected(pattern, model)
    assert len(pattern) == len(model)
    assert np.array_equal(dense(pattern.table), wanted)
    assert np.array_equal(pattern.to_dense(), wanted)
    assert {tuple(each) for each in pattern.pairs().tolist()} == set(model)
    for (plane, q, k), edge in model.items():
        assert pattern.edge_between(q, k, plane) == edge
        assert pattern.ends(edge) == (plane, q, k)


def possible(pattern):
    rows, columns = pattern.blocks
    return [(p, q, k) for p in range(pattern.planes) for q in range(rows) for k in range(columns)
            if allowed(pattern, q, k).any()]  # fmt: skip


VERBS = ("connect", "connect", "cut", "many", "cut many", "set", "undo", "redo", "edit")


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
@settings(max_examples=deep(200, 20), deadline=None)
def test_random_edits_undo_and_redo_agree_with_a_model(shape, data):
    pattern = Pattern(**SHAPES[shape])
    pairs, states = possible(pattern), [{}]
    hashes, at = [pattern.hash(positions=True)], 0
    for _ in range(data.draw(st.integers(1, 25))):
        verb = data.draw(
            st.sampled_from(["connect", "connect", "cut", "many", "cut many", "set", "undo", "redo", "edit"])
        )
        model = dict(states[at])
        free = [p for p in pairs if p not in model]
        if verb == "undo":
            if at:
                pattern.undo()
                at -= 1
                assert pattern.hash(positions=True) == hashes[at]
            else:
                with pytest.raises(NotUndoable):
                    pattern.undo()
            check(pattern, states[at])
            continue
        if verb == "redo":
            if at + 1 < len(states):
                pattern.redo()
                at += 1
                assert pattern.hash(positions=True) == hashes[at]
            else:
                with pytest.raises(NotUndoable):
                    pattern.redo()
            check(pattern, states[at])
            continue
        before = pattern.version
        with pattern.edit("several") if verb == "edit" else pattern._transaction(verb):
            for step in (
                data.draw(st.lists(st.sampled_from(["connect", "cut"]), max_size=4)) if verb == "edit" else [verb]
            ):
                if step == "connect" and free:
                    p, q, k = free.pop(data.draw(st.integers(0, len(free) - 1)))
                    model[p, q, k] = pattern.connect(q, k, p)
                elif step == "cut" and model:
                    pair = data.draw(st.sampled_from(sorted(model)))
                    pattern.cut(model.pop(pair))
                elif step == "many":
                    chosen = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=8)) if free else []
                    edges = pattern.connect_many(*np.array(chosen, int).reshape(-1, 3)[:, [1, 2, 0]].T)
                    model |= dict(zip(chosen, edges, strict=True))
                elif step == "cut many" and model:
                    chosen = data.draw(st.lists(st.sampled_from(sorted(model)), unique=True, max_size=8))
                    pattern.cut([model.pop(pair) for pair in chosen])
                elif step == "set" and model:
                    pair = data.draw(st.sampled_from(sorted(model)))
                    pt.PatternEdit(pattern).set(model[pair], pinned=1, score=0.5)
                check(pattern, model)
        if pattern.version > before:
            del states[at + 1 :], hashes[at + 1 :]
            states.append(model)
            hashes.append(pattern.hash(positions=True))
            at += 1
    for state, expected_hash in zip(states[:at][::-1], hashes[:at][::-1], strict=True):
        pattern.undo()
        check(pattern, state)
        assert pattern.hash(positions=True) == expected_hash


def test_bulk_edits_equal_the_loop_of_single_edits_down_to_the_order_of_lists():
    rng = np.random.default_rng(0)
    for batch in range(200):
        one, many = (Pattern((40 * 4, 60 * 4), block=4, planes=2, causal=bool(batch % 2)) for _ in range(2))
        for _ in range(3):
            size = int(rng.choice([1, 5, 40, 400])) if batch < 40 else int(rng.choice([1, 5, 40]))
            choice = rng.permutation(2 * 40 * 60)[:size]
            p, q, k = choice // 2400, choice // 60 % 40, choice % 60
            fit = np.array([not one.has(*each) for each in zip(q.tolist(), k.tolist(), p.tolist(), strict=True)])
            if one.causal:
                fit &= k <= q + 20
            p, q, k = p[fit], q[fit], k[fit]
            for each in zip(q.tolist(), k.tolist(), p.tolist(), strict=True):
                one.connect(*each)
            many.connect_many(q, k, p)
            cut = one.edges().ids[rng.permutation(len(one))[: len(one) // 2]]
            for edge in cut.tolist():
                one.cut(edge)
            many.cut(pt.pattern.EdgeArray(cut))
        assert one.hash(positions=True) == many.hash(positions=True)
        assert np.array_equal(one.to_dense(), many.to_dense())
        if batch % 50 == 49:
            assert np.array_equal(dense(many.table), many.to_dense())


def test_edges_selected_by_a_column_are_cut_and_written():
    pattern = pt.causal_full(257, 16)
    scores = np.random.default_rng(0).random(len(pattern)).astype(np.float32)
    with pattern.edit("scores") as e:
        e.set(pattern.edges(), score=scores)
    where = pattern.pairs()
    pattern.cut(pattern.edges["score"] < 0.5)
    assert np.array_equal(pattern.pairs(), where[scores >= 0.5])
    pattern.undo()
    assert np.array_equal(np.asarray(pattern.edges["score"]), scores)
    pattern.undo()
    assert not np.asarray(pattern.edges["score"]).any()
    with pytest.raises(UsageError, match="kind"), pattern.edit("no") as e:
        e.set(pattern.edges(), kind=0)


def state(pattern, exact):
    """What an edit that raises must not change; with `exact`, the next handle too, which is never issued twice."""
    memory = hashlib.sha256(dense(pattern.table).tobytes()).hexdigest()
    facts = (pattern.hash(positions=True), len(pattern.journal), pattern.version, pattern.tokens, memory)
    return (*facts, pattern.graph.next_edge()) if exact else facts


def refused(pattern, error, call, exact=True):
    """The call raises, and leaves pattern, journal and memory as they were; return the error."""
    before = state(pattern, exact)
    with pytest.raises(error) as caught:
        call()
    assert state(pattern, exact) == before
    return caught.value


def test_bad_edits_are_refused_and_change_nothing():
    pattern = pt.sliding_window(257, 40, 16, planes=2)
    edge = pattern.connect(16, 3)
    gone = pattern.connect(16, 4)
    pattern.cut(gone)
    error = refused(pattern, pt.BlockRange, lambda: pattern.connect(17, 0))
    assert (error.side, error.index, error.count) == ("query", 17, 17)
    assert refused(pattern, pt.BlockRange, lambda: pattern.connect(0, -1)).side == "key"
    assert refused(pattern, pt.BlockRange, lambda: pattern.connect(0, 0, 2)).side == "plane"
    assert refused(pattern, pt.EdgeExists, lambda: pattern.connect(16, 3)).edge == edge
    error = refused(pattern, pt.CausalityViolation, lambda: pattern.connect(3, 4))
    assert (error.query, error.key) == (3, 4)
    refused(pattern, StaleHandle, lambda: pattern.cut(gone))
    refused(pattern, StaleHandle, lambda: pattern.cut([edge, gone]))
    refused(pattern, UsageError, lambda: pattern.cut([edge, edge]))
    refused(pattern, pt.EdgeExists, lambda: pattern.connect_many([16, 16], [5, 3]))
    error = refused(pattern, pt.EdgeExists, lambda: pattern.connect_many([16, 15, 16], [5, 5, 5]))
    assert error.edge is None
    refused(pattern, pt.CausalityViolation, lambda: pattern.connect_many([16, 3], [5, 4]))
    refused(pattern, pt.BlockRange, lambda: pattern.connect_many([16, 3], [5, 40]))
    refused(pattern, UsageError, lambda: pattern.connect_many([16, 3], [1, 2, 3]))
    refused(pattern, UsageError, lambda: pattern.connect_many([1.5], [1]))


def test_an_edit_that_raises_leaves_no_trace_and_edits_do_not_nest():
    pattern = pt.star(257, 5, 9, 16)
    (edge,) = edges_of(pattern, (16, 16))

    def fails():
        with pattern.edit("fails") as e:
            e.connect(16, 5)
            e.cut(edge)
            e.cut(pattern.edges()[:40])
            e.connect_many([16, 15], [7, 7])
            raise RuntimeError("stop")

    refused(pattern, RuntimeError, fails, exact=False)
    with pattern.edit("outer"):
        with pytest.raises(UsageError, match="open"), pattern.edit("inner"):
            pass
        with pytest.raises(UsageError, match="open"):
            pattern.extend(300)


def test_handles_of_reused_slots_are_new_and_old_ones_stay_stale():
    pattern = Pattern(64, 16)
    first = pattern.connect(3, 1)
    pattern.cut(first)
    second = pattern.connect(2, 1)
    assert second.index == first.index
    assert second != first
    assert (len(pattern), pattern.has(3, 1), pattern.has(2, 1)) == (1, False, True)
    with pytest.raises(StaleHandle):
        pattern.cut(first)
    pattern.undo()
    pattern.undo()
    assert pattern.edge_between(3, 1) == first


def test_an_edge_outside_the_window_sees_all_causal_pairs():
    pattern = pt.sliding_window(64, 4, 16)
    pattern.connect(3, 0)
    assert pattern.to_dense()[0, 48:, :16].all()
    (near,) = edges_of(pattern, (3, 2))
    before = pattern.to_dense()
    pattern.cut(near)
    pattern.connect(3, 2)
    assert np.array_equal(pattern.to_dense(), before)
    kinds = dict(zip(map(tuple, pattern.pairs()[:, 1:].tolist()), pattern.edges["kind"], strict=True))
    assert (kinds[3, 0], kinds[3, 2]) == (FULL, RULE)
    separate = Pattern(32, 16, segments=(np.zeros(32, int), np.ones(32, int)))
    separate.connect_many([0, 1], [0, 0])
    assert list(separate.edges["kind"]) == [MASKED, FULL]
    assert np.array_equal(dense(separate.table)[0, :, :16], np.tri(32, 16, dtype=bool))


@pytest.mark.parametrize("degree", [2, 10_000])
@pytest.mark.parametrize("tokens", [4_096, 65_536, 1_000_000])
def test_single_edits_touch_few_words_whatever_the_length_and_the_degree(tokens, degree):
    pattern = Pattern(tokens * 2, 2, causal=False, debug_counters=True)
    count = min(degree, tokens - 8)
    edges = pattern.connect_many(np.zeros(count, int), np.arange(count))
    graph, lookups = pattern.graph, pattern.lookups
    assert lookups is not None
    words, probes = [], []
    for q, k in sorted({pattern.ends(edges[at])[1:] for at in (0, len(edges) // 2, len(edges) - 1)}):
        actions = (
            lambda q=q, k=k: pattern.cut(*edges_of(pattern, (q, k))),
            lambda q=q, k=k: pattern.connect(q, k),
            lambda: pattern.connect(7, 3),
            lambda: pattern.cut(*edges_of(pattern, (7, 3))),
        )
        for action in actions:
            touched, probed = graph.cells_touched, lookups[0]
            action()
            words.append(graph.cells_touched - touched)
            probes.append(lookups[0] - probed)
    columns = 6  # of an edge: each is written once, or read once
    assert max(words) - columns <= 32
    assert max(probes) <= 32  # of the pair index, at a load of at most one half


def test_journal_of_ten_thousand_edits_is_small_and_undoes_them():
    rng = np.random.default_rng(1)
    pattern = pt.sliding_window(65_536, 512, 64)
    start = pattern.hash(positions=True)
    pairs = [(q, k) for q in range(20, 1024) for k in range(q - 10)]
    rows = rng.permutation(len(pairs))[:5_000].tolist()
    with pattern.edit("mixed") as e:
        for row in rows:
            q, k = pairs[row]
            edge = e.connect(q, k)
            e.cut(pattern.edge_between(q, q) or edge)
    change = pattern.journal[-1].change
    text = json.dumps(change.to_json())
    assert len(change) > 9_000
    assert len(text) <= 16 * len(change) + 1024
    after = pattern.hash(positions=True)
    pattern.undo()
    assert pattern.hash(positions=True) == start
    again = PatternChange.from_json(json.loads(text), 64)
    pattern.apply(again)
    assert pattern.hash(positions=True) == after
    pattern.apply(again.invert())
    assert pattern.hash(positions=True) == start


def test_journal_of_ten_thousand_cuts_of_edges_with_random_scores():
    """A score costs 4.2 bytes: random float32 numbers hardly compress, and base 85 has 5 characters for 4 bytes."""
    rng = np.random.default_rng(1)
    pattern = pt.sliding_window(131_072, 512, 64)
    scores = rng.random(len(pattern)).astype(np.float32)
    with pattern.edit("scores") as e:
        e.set(pattern.edges(), score=scores)
    sizes = []
    for scored in (True, False):
        if not scored:
            with pattern.edit("no scores") as e:
                e.set(pattern.edges(), score=0)
        pattern.cut(pattern.edges()[np.random.default_rng(2).permutation(len(pattern))[:10_000]])
        sizes.append(len(json.dumps(pattern.journal[-1].change.to_json())))
        pattern.undo()
    assert sizes[0] <= 16 * 10_000 + 1024
    assert 3.9 * 10_000 < sizes[0] - sizes[1] < 5 * 10_000
    pattern.undo()
    assert np.array_equal(pattern.edges["score"], scores)


def test_a_change_that_does_not_fit_is_refused_as_a_whole():
    pattern = Pattern(256, 16)
    with pattern.edit("first") as e:
        a = e.connect(5, 1)
        e.connect(6, 1)
        e.set(a, pinned=1)
    change = pattern.journal[-1].change
    error = refused(pattern, NotUndoable, lambda: pattern.apply(change))
    assert "exists" in str(error)
    pattern.cut(*edges_of(pattern, (6, 1)))
    assert "does not exist" in str(refused(pattern, NotUndoable, lambda: pattern.apply(change.invert())))


def test_an_owner_is_given_each_transaction_and_owns_undo():
    class Journal:
        """An owner that notes transactions, or refuses them."""

        busy = False

        def holding(self):
            return nullcontext()

        def __call__(self, *entry):
            if self.busy:
                raise RuntimeError("busy")
            seen.append(entry)

        def changes(self):
            return ((entry, entry[0]) for entry in seen)

    pattern, seen = Pattern(256, 16, name="layer 3"), []
    pattern.owner = journal = Journal()
    with pattern.edit("two", author="gate") as e:
        e.connect(5, 1)
        e.connect(6, 1)
    pattern.connect(7, 1)
    assert [(len(change), why, author) for change, why, author in seen] == [(2, "two", "gate"), (1, "connect", None)]
    assert pattern.journal == ()
    assert pattern.blame(6, 1) == seen[:1]
    with pytest.raises(UsageError, match=r"program\.undo"):
        pattern.undo()
    pattern.apply(seen[1][0].invert())
    assert not pattern.has(7, 1)
    assert len(seen) == 2

    journal.busy = True
    refused(pattern, RuntimeError, lambda: pattern.connect(8, 1), exact=False)


def test_edits_wait_for_runs_and_runs_for_edits():
    pattern = Pattern(256, 16, timeout=0.1)
    with pattern.reading(), pattern.reading(), pytest.raises(EditBusy, match="run"):
        pattern.connect(5, 1)
    pattern.connect(5, 1)
    with pattern.edit("open"):
        done = []

        def run():
            try:
                with pattern.reading():
                    done.append("read")
            except EditBusy:
                done.append("busy")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert done == ["busy"]
        with pattern.reading():  # the thread that edits may look at its edit
            pattern.connect(6, 1)
    pattern.timeout = 5
    waited = threading.Event()

    def holds():
        with pattern.reading():
            waited.set()
            time.sleep(0.05)

    thread = threading.Thread(target=holds)
    thread.start()
    waited.wait()
    began = time.monotonic()
    pattern.connect(7, 1)
    thread.join()
    assert time.monotonic() - began < 4


def test_readers_of_another_thread_see_whole_transactions():
    pattern = Pattern(256, 16)
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            with pattern.reading():
                rows = dense(pattern.table)[0, ::16, ::16].sum(1)
            if rows[9] not in (0, 4):
                wrong.append(rows)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(60):
        with pattern.edit("four") as e:
            for k in range(4):
                e.connect(9, k)
        with pattern.edit("none") as e:
            for edge in pattern.graph.in_edges(pattern.graph.nodes()[9]):
                e.cut(edge)
    stop.set()
    thread.join()
    assert wrong == []


def test_masks_of_cut_edges_come_back_and_their_memory_is_reused():
    pattern = pt.dilated(257, 7, 9, block=16)
    masked = np.asarray(pattern.edges["kind"]) == MASKED
    assert masked.sum() > 20
    before, bytes_before = pattern.to_dense(), pattern.summary().bytes
    for _ in range(3):
        pattern.cut(pattern.edges()[masked.nonzero()[0]])
        pattern.undo()
        pattern.cut(pattern.edges()[int(masked.nonzero()[0][3])])
        pattern.undo()
    assert np.array_equal(dense(pattern.table), before)
    assert np.array_equal(pattern.to_dense(), before)
    assert pattern._pool.nbytes <= 2 * masked.sum() * 16 * 8
    assert pattern.summary().bytes <= 1.6 * bytes_before


def test_bytes_per_edge_without_masks():
    pattern = pt.sliding_window(100_000, 4096)
    size = pattern.graph.memory()["total"] + pattern._index.nbytes
    nodes = 40 * pattern.graph.node_count
    assert (size - nodes) / len(pattern) - 4 <= 64  # without the column `bits`
