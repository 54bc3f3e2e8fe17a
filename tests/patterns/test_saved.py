"""Patterns as arrays, as dense masks, as FlexAttention block masks; copies, hashes, differences, summaries."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_edges import edges_of
from graphwright import patterns as pt
from graphwright.errors import ShapeError, UsageError
from graphwright.patterns import Pattern
from graphwright.patterns.table import FULL, MASKED, RULE
from seeds import deep

from .reader import dense
from .test_generators import CASES


def edited(seed=0):
    """A pattern with edges of all kinds, freed slots and columns that are set."""
    rng = np.random.default_rng(seed)
    pattern = pt.dilated((90, 150), 7, 9, 3, 16, planes=2) | pt.sliding_window((90, 150), 40, 16, planes=2)
    pattern.cut(pattern.edges()[rng.permutation(len(pattern))[:9]])
    pattern.connect_many([5, 5, 4], [0, 1, 2], [0, 1, 1]) if not any(
        pattern.has(q, k, p) for q, k, p in ((5, 0, 0), (5, 1, 1), (4, 2, 1))
    ) else None
    with pattern.edit("columns") as e:
        e.set(pattern.edges(), score=rng.random(len(pattern)), birth=3, pinned=rng.integers(0, 2, len(pattern)))
    pattern.name, pattern.steps = "layer", 5
    return pattern


def test_saved_arrays_restore_handles_lists_columns_and_generator():
    pattern = edited()
    back = Pattern.from_arrays(pattern.to_arrays())
    assert back.hash(positions=True) == pattern.hash(positions=True)
    for name in pattern.edges.columns:
        if name != "bits":
            assert np.array_equal(np.asarray(back.edges[name]), np.asarray(pattern.edges[name]))
    assert (back.name, back.steps, back.version, back.rule) == ("layer", 5, pattern.version, pattern.rule)
    assert np.array_equal(dense(back.table), pattern.to_dense())
    for each in (pattern, back):
        each.cut(each.edges()[5])
        each.connect(5, 0, 1) if not each.has(5, 0, 1) else None
        each.extend((100, 160))
    assert back.hash(positions=True) == pattern.hash(positions=True)
    assert np.array_equal(dense(back.table), pattern.to_dense())


def test_saved_arrays_have_plain_dtypes():
    arrays = edited().to_arrays()
    kinds = {array.dtype.name for array in arrays.values()}
    assert kinds <= {"int32", "float32", "uint8", "uint64"}
    for made in (
        pt.document(50, np.arange(50) // 9, 16),
        pt.document(50, np.arange(50) // 9, 16) | pt.causal_full(50, 16),
    ):
        back = Pattern.from_arrays(made.to_arrays())
        assert back.hash(positions=True) == made.hash(positions=True)
        assert back.rule == made.rule


def damage():
    """(name, function) of ways to damage the arrays of `edited()`."""

    def swap(name, at, value):
        def change(arrays):
            arrays[name] = arrays[name].copy()
            arrays[name].reshape(-1)[at] = value

        return change

    def drop(name):
        return lambda arrays: arrays.pop(name)

    def shorter(name):
        def change(arrays):
            arrays[name] = arrays[name][:-1]

        return change

    def double(arrays):
        for name in ("edges.source", "edges.target"):
            arrays[name] = arrays[name].copy()
            arrays[name][1] = arrays[name][0]

    def facts(old, new):
        def change(arrays):
            text = arrays["facts"].tobytes()
            assert old in text
            arrays["facts"] = np.frombuffer(text.replace(old, new), np.uint8)

        return change

    yield "source out of range", swap("edges.source", 0, 10**6)
    yield "negative target", swap("edges.target", 0, -1)
    yield "a pair twice", double
    yield "an edge in a wrong list", lambda arrays: arrays.update({"in.items": np.roll(arrays["in.items"], 1)})
    yield "an edge twice in a list", swap("out.items", 1, 0)
    yield "a chain with a cycle", swap("in.blocks", 1, 0)
    yield "a block out of range", swap("in.blocks", 0, 10**6)
    yield "an unknown kind", swap("edges.kind", 0, 3)
    yield "a kind without mask", swap("edges.kind", slice(None), MASKED)
    yield "a gate that does not exist", swap("edges.gate", 0, 4)
    yield "another block number", swap("nodes.number", 2, 7)
    yield "a node slot out of range", swap("query_nodes", 0, 10**6)
    yield "a node twice", swap("key_nodes", 0, 1)
    yield "a wrong free list", swap("edges.free", 0, 0)
    yield "more tokens than blocks", facts(b'"tokens":[90,150]', b'"tokens":[90,10000000000]')
    yield "more planes than nodes", facts(b'"planes":2', b'"planes":2000000000')
    yield "block size 0", facts(b'"block":16', b'"block":0')
    yield "no tokens", facts(b'"tokens":[90,150]', b'"tokens":[0,150]')
    yield "another block size", facts(b'"block":16', b'"block":15')
    yield "an unknown rule", facts(b'"kind":"dilated"', b'"kind":"diluted"')
    yield "an unknown schema", facts(b'"schema":1', b'"schema":9')
    yield "stride 0", facts(b'"stride":7', b'"stride":0')
    yield "facts that are not JSON", swap("facts", 0, 0)
    for name, array in edited().to_arrays().items():
        yield f"no {name}", drop(name)
        if len(array):
            yield f"shorter {name}", shorter(name)
    yield "masks of another dtype", lambda arrays: arrays.update(bits=arrays["bits"].astype(np.int64))


@pytest.mark.parametrize(("name", "change"), list(damage()), ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_arrays_are_refused(name, change):
    arrays = edited().to_arrays()
    change(arrays)
    with pytest.raises(pt.PatternFileError):
        Pattern.from_arrays(arrays)


@given(data=st.data())
@settings(max_examples=deep(300, 30), deadline=None)
def test_random_damage_is_refused_or_harmless(data):
    arrays = edited().to_arrays()
    name = data.draw(st.sampled_from(sorted(set(arrays) - {"facts"})))
    arrays[name] = arrays[name].copy()
    flat = arrays[name].reshape(-1)
    if not len(flat):
        return
    at, value = data.draw(st.integers(0, len(flat) - 1)), data.draw(st.integers(-3, 300))
    flat[at] = value if arrays[name].dtype.kind != "u" else abs(value) % 256
    try:
        pattern = Pattern.from_arrays(arrays)
    except pt.PatternFileError:
        return
    assert np.array_equal(dense(pattern.table), pattern.to_dense())


@pytest.mark.parametrize("block", [1, 16, 64, 100])
@pytest.mark.parametrize("tokens", [(1, 1), (17, 17), (65, 65), (40, 129)])
def test_dense_masks_are_tabulated_exactly(tokens, block):
    rng = np.random.default_rng(0)
    mask = rng.random((2, *tokens)) < 0.2
    mask[:, : tokens[0] // 2] = False
    pattern = Pattern.from_dense(mask, block)
    assert np.array_equal(pattern.to_dense(), mask)
    causal = mask & (np.arange(tokens[1]) <= tokens[1] - tokens[0] + np.arange(tokens[0])[:, None])
    pattern = Pattern.from_dense(causal, block)
    assert pattern.causal
    assert np.array_equal(pattern.to_dense(), causal)
    assert {tuple(each) for each in pattern.empty_rows().tolist()} == {
        (p, q) for p in range(2) for q in range(pattern.blocks[0]) if not causal[p, q * block : (q + 1) * block].any()
    }


def test_dense_masks_have_the_kinds_of_the_base_rule():
    mask = np.tri(64, dtype=bool)
    assert list(Pattern.from_dense(mask, 32).edges["kind"]) == [RULE, FULL, RULE]
    mask[40, 33] = False
    assert list(Pattern.from_dense(mask, 32).edges["kind"]) == [RULE, FULL, MASKED]
    with pytest.raises(UsageError, match="later"):
        Pattern.from_dense(~mask, 32, causal=True)
    with pytest.raises(ShapeError):
        Pattern.from_dense(np.zeros((3, 3)), 32)


@pytest.mark.parametrize("tokens", [(65, 65), (40, 129)])
def test_mask_functions_of_flex_attention_are_tabulated(tokens):
    def fn(b, h, q, k):
        return (k <= q + 3 * h) & ((q - k) % 5 != 2)

    q, k = np.arange(tokens[0])[:, None], np.arange(tokens[1])
    wanted = np.array([fn(0, h, q, k) for h in range(3)])
    assert np.array_equal(Pattern.from_mask_fn(fn, tokens, 16, planes=3).to_dense(), wanted)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["causal", "window", "star", "dilated", "random", "symmetric", "document"])
@pytest.mark.parametrize("tokens", [64, 128, 129])
def test_flex_block_masks_round_trip(name, tokens):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    pattern = CASES[name][0](tokens, 16)
    mask = pattern.to_flex()
    assert isinstance(mask, flex.BlockMask)
    full = (np.asarray(pattern.edges["kind"]) == FULL).sum()
    assert int(mask.full_kv_num_blocks.sum()) == full
    assert int(mask.kv_num_blocks.sum()) == len(pattern) - full
    back = Pattern.from_flex(mask, causal=pattern.causal)
    assert np.array_equal(back.to_dense(), pattern.to_dense())
    q, k, v = (torch.randn(1, 2, tokens, 16) for _ in range(3))
    allowed = torch.from_numpy(pattern.to_dense())[None]
    theirs = flex.flex_attention(q, k, v, block_mask=mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed.expand(1, 2, -1, -1))
    rows = allowed[0, 0].any(-1)
    assert torch.allclose(theirs[:, :, rows], wanted[:, :, rows], atol=1e-5)


def test_flex_masks_of_mask_mods_are_tabulated_or_refused():
    pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def causal_but_one(b, h, q, k):
        return (k <= q) & (k != 5)

    mask = flex.create_block_mask(causal_but_one, None, 2, 128, 128, device="cpu", BLOCK_SIZE=32)
    i, j = np.arange(128)[:, None], np.arange(128)
    assert np.array_equal(Pattern.from_flex(mask).to_dense(), np.repeat([(j <= i) & (j != 5)], mask.shape[1], 0))

    def scalars(b, h, q, k):
        return bool(k <= q)

    mask.mask_mod = scalars
    with pytest.raises(pt.MaskLost, match=r"arrays(?s:.)*materialize=True"):
        Pattern.from_flex(mask)
    mask = flex.create_block_mask(causal_but_one, None, 2, 40, 40, device="cpu", BLOCK_SIZE=16)
    mask.mask_mod = lambda b, h, q, k: bool(k <= q) and int(k) != 5
    i, j = np.arange(40)[:, None], np.arange(40)
    with pytest.raises(pt.MaskLost):
        Pattern.from_flex(mask)
    found = Pattern.from_flex(mask, materialize=True)
    assert np.array_equal(found.to_dense(), np.repeat([(j <= i) & (j != 5)], mask.shape[1], 0))
    with pytest.raises(pt.PatternShape):
        Pattern.from_flex(flex.create_block_mask(causal_but_one, 2, 1, 128, 128, device="cpu", BLOCK_SIZE=32))


def test_planes_become_heads_of_a_flex_mask():
    pytest.importorskip("torch")
    pattern = pt.causal_full(64, 16, planes=2)
    pattern.cut(*edges_of(pattern, (3, 0, 1)))
    assert np.array_equal(Pattern.from_flex(pattern.to_flex()).to_dense(), pattern.to_dense())


def test_importing_patterns_loads_no_torch_and_no_numba():
    code = """if True:
        import sys
        from graphwright import patterns
        patterns.causal_full(64).connect
        print({"torch", "numba"} & {*sys.modules})"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_copies_are_independent():
    pattern = edited()
    twin = pattern.copy()
    assert twin.hash(positions=True) == pattern.hash(positions=True)
    edge = twin.edge_between(5, 4) or twin.connect(5, 4)
    before = pattern.hash(positions=True)
    twin.cut(edge)
    twin.extend((120, 180))
    assert pattern.hash(positions=True) == before
    assert np.array_equal(dense(twin.table), twin.to_dense())
    assert np.array_equal(dense(pattern.table), pattern.to_dense())


def test_hash_tells_edges_apart_and_not_histories():
    a, b = pt.Pattern(64, 16), pt.Pattern(64, 16)
    for k in (0, 1, 2):
        a.connect(3, k)
    for k in (2, 0, 1):
        b.connect(3, k)
    assert a.hash() == b.hash()
    assert a.hash(positions=True) != b.hash(positions=True)
    with b.edit("score") as e:
        e.set(b.edges(), score=1.0, birth=3)
    assert a.hash() == b.hash()
    with b.edit("pin") as e:
        e.set(*edges_of(b, (3, 0)), pinned=1)
    assert a.hash() != b.hash()
    others = [
        pt.Pattern(64, 16, causal=False),
        pt.Pattern(64, 16, window=3),
        pt.Pattern(63, 16),
        pt.Pattern(64, 16, q_start=1),
    ]
    assert len({p.hash() for p in [pt.Pattern(64, 16), *others]}) == 5
    full, ruled = (pt.Pattern(16, 16, causal=False, window=3, symmetric=True) for _ in range(2))
    edge = full.connect(0, 0)
    ruled.connect(0, 0)
    full.graph.set_edge(edge, kind=FULL)
    assert full.hash() != ruled.hash()
    masks = [Pattern.from_dense(np.eye(16, k=k, dtype=bool), 16, causal=False).hash() for k in (0, 1)]
    assert masks[0] != masks[1]


def test_difference_of_two_versions_is_the_journal():
    pattern = pt.star(257, 5, 9, 16, planes=2)
    old = pattern.copy()
    assert not old.diff(pattern)
    with pattern.edit("several") as e:
        e.cut(*edges_of(pattern, (9, 9, 1)))
        e.connect(9, 3, 1)
        e.connect(12, 2)
        e.set(*edges_of(pattern, (5, 5)), pinned=1)
    diff = old.diff(pattern)
    assert diff.added.tolist() == [[0, 12, 2], [1, 9, 3]]
    assert diff.removed.tolist() == [[1, 9, 9]]
    assert diff.changed.tolist() == [[0, 5, 5]]
    change = pattern.journal[-1].change
    for op, rows in ((0, diff.added), (1, diff.removed)):
        source, target = change.pairs(op)
        own = {(int(pattern._numbers[t]), int(pattern._numbers[s])) for s, t in zip(source, target, strict=True)}
        assert own == {(q, k) for _, q, k in rows.tolist()}
    assert "2 edges added, 1 removed, 1 changed" in str(diff)
    with pytest.raises(pt.PatternShape):
        pattern.diff(pt.star(257, 5, 9, 16))


def test_summary_counts_edges_pairs_and_bytes():
    pattern = edited()
    mask, summary = pattern.to_dense(), pattern.summary()
    assert summary.edges == len(pattern) == summary.full + summary.rule + summary.masked
    assert summary.pairs == mask.sum()
    assert summary.token_density == pytest.approx(mask.mean())
    assert summary.block_density == pytest.approx(len(pattern) / (2 * 6 * 10))
    assert summary.empty_rows == len(pattern.empty_rows()) == 0
    assert pt.Pattern(64, 16).summary().empty_rows == 4
    assert summary.to_json()["edges"] == len(pattern)
