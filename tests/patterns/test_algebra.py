"""Unions, intersections and differences against dense masks, and patterns that get longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_edges import edges_of
from graphwright import patterns as pt
from graphwright.errors import UsageError
from graphwright.patterns.table import IN_HEAD
from seeds import deep

from .reader import dense
from .test_generators import check_kinds

MAKERS = {
    "causal": lambda T, B: pt.causal_full(T, B),
    "full": lambda T, B: pt.full(T, B),
    "window": lambda T, B: pt.sliding_window(T, 21, B),
    "symmetric": lambda T, B: pt.sliding_window(T, 9, B, symmetric=True),
    "local": lambda T, B: pt.block_local(T, 1, B),
    "star": lambda T, B: pt.star(T, 5, 9, B),
    "openstar": lambda T, B: pt.star(T, 5, 9, B, causal=False),
    "dilated": lambda T, B: pt.dilated(T, 7, 4, 3, B),
    "random": lambda T, B: pt.random_blocks(T, 2, 3, B),
    "document": lambda T, B: pt.document(T, np.arange(T) // 13, B),
}
HOW = {"|": np.logical_or, "&": np.logical_and, "-": lambda a, b: a & ~b}


def combine(how, a, b):
    return {"|": a.__or__, "&": a.__and__, "-": a.__sub__}[how](b)


@given(
    names=st.lists(st.sampled_from(sorted(MAKERS)), min_size=3, max_size=3),
    how=st.lists(st.sampled_from(sorted(HOW)), min_size=2, max_size=2),
    tokens=st.sampled_from([1, 17, 63, 64, 65, 129]),
    block=st.sampled_from([1, 16, 64]),
    seed=st.integers(0, 9),
)
@settings(max_examples=deep(300, 40), deadline=None)
def test_combinations_are_exact_to_the_token_also_after_manual_edits(names, how, tokens, block, seed):
    rng = np.random.default_rng(seed)
    made, masks = [], []
    for name in names:
        pattern = MAKERS[name](tokens, block)
        if seed and len(pattern):
            pattern.cut(pattern.edges()[int(rng.integers(len(pattern)))])
            q, k = (int(rng.integers(n)) for n in pattern.blocks)
            if not pattern.has(q, k) and (k <= q or not pattern.causal):
                pattern.connect(q, k)
        made.append(pattern)
        masks.append(pattern.to_dense()[0])
    joined = combine(how[1], combine(how[0], made[0], made[1]), made[2])
    wanted = HOW[how[1]](HOW[how[0]](masks[0], masks[1]), masks[2])
    assert np.array_equal(joined.to_dense()[0], wanted)
    check_kinds(joined, wanted)
    if tokens * block < 3000:
        assert np.array_equal(dense(joined.table)[0], wanted)


def test_a_union_keeps_gates_pins_and_scores_of_the_first_pattern_that_has_the_edge():
    a, b = pt.sliding_window(64, 16, 16), pt.causal_full(64, 16)
    with a.edit("a") as e:
        e.set(*edges_of(a, (2, 2)), pinned=1, score=0.5, gate=3)
    with b.edit("b") as e:
        e.set(b.edges(), pinned=0, score=0.25, gate=7)
    joined = a | b
    near, far = edges_of(joined, (2, 2), (3, 0))
    assert [joined.edges[name][near] for name in ("pinned", "score", "gate")] == [1, 0.5, 3]
    assert [joined.edges[name][far] for name in ("pinned", "score", "gate")] == [0, 0.25, 7]


def test_patterns_of_other_shapes_are_not_combined():
    for other in (pt.causal_full(65, 16), pt.causal_full(64, 8), pt.causal_full(64, 16, planes=2)):
        with pytest.raises(pt.PatternShape):
            _ = pt.causal_full(64, 16) | other


EXTENSIBLE = [
    *(name for name in MAKERS if name != "document"),
    "window | star", "window - random", "dilated & causal", "star | full",
]  # fmt: skip


def make(name, tokens, block):
    if " " in name:
        a, how, b = name.split(" ")
        return combine(how, MAKERS[a](tokens, block), MAKERS[b](tokens, block))
    if name == "document":
        return pt.document(tokens, np.arange(tokens) // 13, block)
    return MAKERS[name](tokens, block)


@pytest.mark.parametrize("name", EXTENSIBLE)
@pytest.mark.parametrize("block", [1, 16])
def test_extended_pattern_equals_the_generators_pattern_of_that_length(name, block):
    pattern = make(name, 1, block)
    start, lengths = pattern.hash(), [2, 3, 15, 16, 17, 31, 32, 33, 50, 51, 97]
    for tokens in lengths:
        pattern.extend(tokens)
        wanted = make(name, tokens, block)
        assert np.array_equal(pattern.to_dense(), wanted.to_dense()), tokens
        assert pattern.hash() == wanted.hash(), tokens
    longest = make(name, lengths[-1], block)
    assert np.array_equal(dense(pattern.table), longest.to_dense())
    for _ in lengths:
        pattern.undo()
    assert pattern.hash() == start
    for _ in lengths:
        pattern.redo()
    assert pattern.hash() == longest.hash()
    assert np.array_equal(dense(pattern.table), longest.to_dense())


def test_documents_are_extended_by_the_ids_that_are_given_or_by_the_last_one():
    pattern = pt.document(20, np.arange(20) // 13, 16)
    pattern.extend(40, segments=np.arange(20, 40) // 13)
    assert np.array_equal(pattern.to_dense(), make("document", 40, 16).to_dense())
    pattern.extend(45)
    ids = np.append(np.arange(40) // 13, [3] * 5)
    assert np.array_equal(pattern.to_dense(), pt.document(45, ids, 16).to_dense())
    pattern.undo()
    pattern.undo()
    assert np.array_equal(pattern.to_dense(), make("document", 20, 16).to_dense())
    with pytest.raises(pt.PatternShape):
        pattern.extend(40, segments=np.zeros(3, int))


@given(data=st.data())
@settings(max_examples=deep(200, 25), deadline=None)
def test_manual_edits_stay_when_a_pattern_is_extended(data):
    name = data.draw(st.sampled_from(["window", "star", "dilated", "window | star", "full"]))
    block, tokens = data.draw(st.sampled_from([1, 16])), data.draw(st.integers(1, 60))
    pattern = make(name, tokens, block)
    connected, cut = [], []
    for _ in range(data.draw(st.integers(1, 6))):
        q, k = (data.draw(st.integers(0, n - 1)) for n in pattern.blocks)
        edge = pattern.edge_between(q, k)
        if edge is not None:
            pattern.cut(edge)
            cut.append((q, k))
            connected = [pair for pair in connected if pair != (q, k)]
        elif k <= q or not pattern.causal:
            connected.append((q, k))
            pattern.connect(q, k)
            cut = [pair for pair in cut if pair != (q, k)]
    old, handles = pattern.to_dense()[0], {edge: pattern.ends(edge) for edge in pattern.edges()}
    before = pattern.hash(positions=True)
    for _ in range(data.draw(st.integers(1, 3))):
        tokens += data.draw(st.integers(1, 20))
        pattern.extend(tokens)
    assert np.array_equal(dense(pattern.table), pattern.to_dense())
    new, n = pattern.to_dense()[0], len(old)
    assert np.array_equal(new[:n, :n], old)
    assert {edge: pattern.ends(edge) for edge in handles} == handles
    wanted = make(name, tokens, block).to_dense()[0]
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    manual = np.zeros((tokens, tokens), bool)
    for q, k in connected:
        manual[q * block : (q + 1) * block, k * block : (k + 1) * block] = True
    for q, k in cut:
        wanted[q * block : (q + 1) * block, k * block : (k + 1) * block] = False
    late = (i >= n) | (j >= n)
    known = (i // block < -(-n // block)) & (j // block < -(-n // block))  # blocks that existed
    free = late & ~known
    assert np.array_equal(new[free], make(name, tokens, block).to_dense()[0][free])
    assert not (new & late & known & ~wanted & ~manual).any()
    while pattern.tokens[0] > n:
        pattern.undo()
    assert pattern.hash(positions=True) == before


def test_long_edge_in_an_incomplete_block_grows_with_it():
    pattern = pt.sliding_window(40, 4, 16)
    pattern.connect(2, 0)
    pattern.extend(48)
    assert pattern.to_dense()[0, 32:, :16].all()


def test_longer_keys_alone_add_columns():
    pattern = pt.full((20, 30), 16)
    pattern.extend((20, 70))
    assert pattern.to_dense().all()
    assert pattern.to_dense().shape == (1, 20, 70)
    decode = pt.sliding_window((1, 30), 5, 16, q_start=29)
    decode.extend((4, 33))
    assert np.array_equal(decode.to_dense(), pt.sliding_window((4, 33), 5, 16).to_dense())


def test_extending_costs_the_new_edges_whatever_the_length():
    touched = []
    for tokens in (64 * 100, 64 * 2000):
        pattern = pt.star(tokens, 70, 300)
        pattern.extend(tokens + 64)
        touched.append(len(pattern.journal[-1].change))
    assert touched == [8, 8]


def test_patterns_without_a_generator_are_not_extended():
    for pattern in (
        pt.Pattern(64, 16),
        pt.topk(np.ones((64, 4)), np.ones((64, 4)), 2),
        pt.random_blocks(64, 2, block=16, causal=False),
        pt.causal_full(64, 16) | pt.Pattern(64, 16),
    ):
        with pytest.raises(pt.NoGenerator):
            pattern.extend(80)
    with pytest.raises(pt.PatternShape, match="shorter"):
        pt.causal_full(64, 16).extend(63)
    pattern = pt.causal_full(64, 16)
    pattern.extend(64)
    assert pattern.journal == ()


def test_compact_sorts_lists_so_that_history_does_not_matter():
    rng = np.random.default_rng(0)
    lists = []
    for seed in range(3):
        pattern = pt.Pattern(640, 16, planes=2)
        pairs = [(q, k) for q in range(40) for k in range(q + 1) if (q * 7 + k) % 3]
        for at in np.random.default_rng(seed).permutation(len(pairs)).tolist():
            pattern.connect(*pairs[at], plane=at % 2)
        extra = [pattern.connect(39, k) for k in range(40) if not pattern.has(39, k)]
        for edge in rng.permutation(len(extra)).tolist():
            pattern.cut(extra[edge])
        before, handles = pattern.hash(positions=True), pattern.edges().ids
        pattern.compact()
        assert np.array_equal(pattern.edges().ids, handles)
        found = {}
        graph = pattern.graph
        for node in graph.nodes():
            for side, of in ((graph.in_edges(node), graph.source), (graph.out_edges(node), graph.target)):
                numbers = [graph.node(of(edge), "number") for edge in side]
                assert numbers == sorted(numbers)
                found[node.index, side is graph.in_edges] = numbers
        words = pattern.table[IN_HEAD]
        assert words == graph.buffers().incoming.head.__array_interface__["data"][0]
        lists.append((found, graph.buffers().incoming.head.tolist(), graph.buffers().outgoing.after[:20].tolist()))
        mask = pattern.to_dense()
        assert np.array_equal(dense(pattern.table), mask)
        after = pattern.hash(positions=True)
        change = pattern.journal[-1].change
        pattern.undo()
        assert pattern.hash(positions=True) == before
        assert np.array_equal(dense(pattern.table), mask)
        pattern.redo()
        assert pattern.hash(positions=True) == after
        pattern.undo()
        pattern.apply(pt.PatternChange.from_json(change.to_json(), 16))
        assert pattern.hash(positions=True) == after
        pattern.connect(39, 39, plane=1) if not pattern.has(39, 39, 1) else None
        assert np.array_equal(dense(pattern.table), pattern.to_dense())
        with pattern.edit("open"), pytest.raises(UsageError):
            pattern.compact()
    assert lists[0] == lists[1] == lists[2]


def test_extension_as_json():
    pattern = pt.document(20, np.arange(20) // 13, 16)
    pattern.extend(40, segments=np.arange(20, 40) // 7)
    after = pattern.hash(positions=True)
    data = pattern.journal[-1].change.to_json()
    pattern.undo()
    pattern.apply(pt.PatternChange.from_json(data, 16))
    assert pattern.hash(positions=True) == after
