"""Caches of heads that each token chooses: decoding is prefill, whatever the kind of cache and the history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dynamic import EXPERTS, FIELDS, HEADS, Decoder, dynamic_model, some_ids

import graphwright as gw
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.models import StaleCache
from graphwright.models.generation.cached_program import fingerprints, with_padding
from graphwright.models.open import config_from, create

ATTENTIONS = [f"layers.{i}.attn.{name}" for i in range(2) for name in ("routed_attention", "shared.sdpa")]


@pytest.fixture(scope="module")
def whole() -> gw.Model:
    return dynamic_model(null=True)


def near(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def sets(m: gw.Model, ids: np.ndarray) -> list[np.ndarray]:
    """The heads of each token in each layer, bool [T, E], of a run of the whole text."""
    run = m.run(ids)
    return [np.asarray(run.value(f"layers.{i}.attn.router.mask")) for i in range(2)]


def cached_sets(sequence: gw.models.CachedSequence) -> list[np.ndarray]:
    """The same by the cache: the last numbers of a row of keys."""
    return [sequence.gather(ATTENTIONS[2 * i])[0][0, :, -HEADS:] == 1 for i in range(2)]


@pytest.mark.parametrize(
    "options", [{"null": True}, {"theta": None, "shared": 0}, {"k0": 1, "shared": 2}, {"mode": "composed"}]
)
def test_token_by_token_is_prefill_with_the_same_heads(options: dict) -> None:
    m, ids = dynamic_model(**options), some_ids(2, 32)
    wanted = m.logits(ids)
    static, paged = m.new_cache(40, 2, kind="static"), m.new_cache(40, block=5).sequence()
    near(m.prefill(static, ids[:, :12]), wanted[:, 11])
    near(m.prefill(paged, ids[0, :12])[0], wanted[0, 11])
    for t in range(12, 32):
        near(static.step(ids[:, t : t + 1]).to_numpy()[:, 0], wanted[:, t])
        near(paged.step(ids[:1, t : t + 1]).to_numpy()[0, 0], wanted[0, t])
    flat = m.new_cache(40, block=3).sequence()
    near(m.prefill(flat, ids[0], chunk=7)[0], wanted[0, -1])
    if options.get("mode") == "composed":  # an `sdpa` as any other
        return
    found, chosen = cached_sets(paged), sets(m, ids[0])
    for a, b in zip(found, chosen, strict=True):
        np.testing.assert_array_equal(a, b)
        assert 0.1 < b.mean() < 0.7


def test_forks_truncation_and_snapshots(whole: gw.Model) -> None:
    ids, other = some_ids(1, 24)[0], some_ids(1, 24, seed=9)[0]
    cache = whole.new_cache(96, block=4)
    s = cache.sequence()
    whole.prefill(s, ids[:5])
    fork, mark = s.fork(), s.snapshot()
    for t in range(5, 24):
        near(s.step(ids[None, t : t + 1]).to_numpy()[0, 0], whole.logits(ids[: t + 1])[-1])
        mixed = np.concatenate([ids[:5], other[5 : t + 1]])
        near(fork.step(other[None, t : t + 1]).to_numpy()[0, 0], whole.logits(mixed)[-1])
    s.truncate(9)
    np.testing.assert_array_equal(cached_sets(s)[1], sets(whole, ids[:9])[1])
    near(s.step(other[None, 9:10]).to_numpy()[0, 0], whole.logits(np.append(ids[:9], other[9]))[-1])
    s.restore(mark)
    near(s.step(other[None, 5:9], all_logits=True).to_numpy()[0], whole.logits(np.append(ids[:5], other[5:9]))[5:])


def test_sequences_of_different_lengths_run_in_one_batch(whole: gw.Model) -> None:
    rows = [some_ids(1, n, seed=n)[0] for n in (3, 11, 16)]
    cache = whole.new_cache(80, 3, block=4)
    batch = [cache.sequence() for _ in rows]
    for s, ids in zip(batch, rows, strict=True):
        whole.prefill(s, ids)
    for t in range(6):
        new = some_ids(3, 1, seed=50 + t)
        found = cache.step(batch, new).to_numpy()[:, 0]  # with one padded row
        rows = [np.append(ids, n) for ids, n in zip(rows, new, strict=True)]
        near(found, np.stack([whole.logits(ids)[-1] for ids in rows]))


def test_generation_is_that_of_whole_texts(whole: gw.Model) -> None:
    ids = some_ids(1, 5)[0]
    found, text = whole.generate(ids, 20).ids, ids
    for _ in range(20):
        text = np.append(text, whole.logits(text)[-1].argmax())
    assert found == text[5:].tolist()
    assert len(set(found)) > 5


def test_entries_of_heads_that_lack_the_token_are_not_read(whole: gw.Model) -> None:
    ids = some_ids(1, 20)
    cache = whole.new_cache(40, 1, kind="static")
    whole.prefill(cache, ids[:, :19])
    for i in range(2):
        keys, values = (cache.variables[f"cache.{ATTENTIONS[2 * i]}.{n}"].own().to_numpy() for n in "kv")
        used = np.repeat(keys[0, 0, :19, -HEADS:] == 1, 4, axis=1)
        assert not keys[0, 0, :19, :-HEADS][~used].any()
        for part in (keys[0, 0, :19, :-HEADS], values[0, 0, :19]):
            part[~used] = np.nan
    near(cache.step(ids[:, 19:]).to_numpy()[0, 0], whole.logits(ids[0])[-1])


def test_heads_may_differ_in_the_width_of_their_values() -> None:
    m, ids = dynamic_model(), some_ids(1, 16)
    with m.edit("narrow values") as e:
        for head, columns in ((1, [0, 2]), (4, [3])):
            e.cut_units(m.program.axes()[f"layers.0.attn.heads.{head}.units"].units(columns))
    wanted, s = m.logits(ids[0]), m.new_cache(32).sequence()
    assert s.kv(ATTENTIONS[0])[1] == []
    m.prefill(s, ids[:, :6])
    assert s.gather(ATTENTIONS[0])[1].shape == (1, 6, 4 * HEADS - 3)
    for t in range(6, 16):
        near(s.step(ids[:, t : t + 1]).to_numpy()[0, 0], wanted[t])


def test_bfloat16_entries_keep_the_sets(whole: gw.Model) -> None:
    ids = some_ids(1, 20)
    s = whole.new_cache(32, dtype="bfloat16").sequence()
    whole.prefill(s, ids[:, :19])
    near_enough = np.abs(s.step(ids[:, 19:]).to_numpy()[0, 0] - whole.logits(ids[0])[-1]).max()
    assert 0 < near_enough < 0.05
    np.testing.assert_array_equal(cached_sets(s)[0], sets(whole, ids[0])[0])


EDITED = {
    "lm_head.weight": [],
    "layers.1.moe.experts.0.up.weight": [],
    "layers.1.attn.heads.2.o.weight": [],
    "layers.1.attn.heads.2.q.weight": [],
    "layers.1.attn.router.eta": ATTENTIONS[2:3],  # κ decides which experts are closed by a gate
    "layers.1.attn.heads.2.k.weight": ATTENTIONS[2:3],
    "layers.1.attn.heads.3.v.weight": ATTENTIONS[2:3],
    "layers.1.attn.heads.3.threshold": ATTENTIONS[2:3],
    "layers.1.attn.router.alive": ATTENTIONS[2:3],
    "layers.0.attn.heads.2.o.weight": ATTENTIONS[2:],
    "layers.0.moe.experts.0.prototype": ATTENTIONS[2:],
    "layers.0.attn.heads.1.k.weight": [ATTENTIONS[0], *ATTENTIONS[2:]],
}


def test_edits_upstream_of_entries_make_them_stale() -> None:
    m = dynamic_model()
    s = m.new_cache(16).sequence()
    m.prefill(s, some_ids(1, 6))
    keys = {m.program.path(n): m.program.key(n) for n in (*m.program.params(), *m.program.states())}
    for path, stale in EDITED.items():
        with m.edit("change") as e:
            e.set_weight(keys[path], lambda w: ~w if w.dtype == bool else w * 1.5)
            if path.endswith("alive"):
                e.set_weight(keys[path], np.arange(HEADS) != 2)
        assert [name for name, valid in s.validity().items() if not valid] == stale, path
        m.undo()
    with m.edit("another base") as e:
        e.set_attr(ATTENTIONS[0], theta=500.0)
    assert [name for name, valid in s.validity().items() if valid] == ATTENTIONS[1:2]
    with pytest.raises(StaleCache, match="routed_attention"):
        list(m.decode(s, 1))
    m.reprefill(s)
    near(s.last_logits()[0], m.logits(some_ids(1, 6))[0, -1])
    assert len(set(fingerprints(m.program).values())) == 4


def test_padding_is_seen_by_no_routed_head(whole: gw.Model) -> None:
    ids, mask = some_ids(2, 20), np.ones((2, 20), bool)
    mask[1, :7] = False
    found = whole.logits(ids, mask)
    near(found[0], whole.logits(ids[0]))
    near(found[1, 7:], whole.logits(ids[1, 7:]))
    other = ids.copy()
    other[1, :7] = 5
    np.testing.assert_array_equal(whole.logits(other, mask)[1, 7:], found[1, 7:])


def test_padding_of_chosen_ids_and_of_runs_from_elsewhere() -> None:
    b = gw.Builder("ids")
    b.input("ids", ("B", "T"), "int64")
    x, positions = b.input("x", ("B", "T", 3)), b.input("positions", (1, "T"), "int64")
    chosen, weights = (b.flatten(b.input(name, ("B", "T", 1), kind), start=0, end=1)
                       for name, kind in (("chosen", "int64"), ("weights", "float32")))  # fmt: skip
    rng = np.random.default_rng(0)
    heads = [b.param(f"m{i}", rng.normal(size=(2, 3) if i % 4 < 3 else (3, 2)).astype("f4")) for i in range(8)]
    b.output(b.op("routed_attention", x, *b.op("dispatch", chosen, experts=2), weights, positions, *heads), name="out")
    p = b.build()
    feeds = {"ids": np.zeros((2, 4), np.int64), "x": rng.normal(size=(2, 4, 3)).astype("f4"),
             "chosen": rng.integers(0, 2, (2, 4, 1)), "weights": rng.random((2, 4, 1)).astype("f4"),
             "positions": np.arange(4)[None]}  # fmt: skip
    mask = np.ones((2, 4), bool)
    mask[0, 1] = False
    found = np.asarray(with_padding(p).run({**feeds, "mask": mask})["out"])
    without = {**feeds, "chosen": np.where(mask[..., None], feeds["chosen"], -1)}
    np.testing.assert_array_equal(found, np.asarray(p.run(without)["out"]))
    assert (found[0] != np.asarray(p.run(feeds)["out"])[0]).any()


def test_experts_beside_routed_heads_are_those_of_the_text(whole: gw.Model) -> None:
    run = whole.run(some_ids(1, 20)[0])
    assert np.asarray(run.value("layers.1.moe.router.mask")).shape == (20, EXPERTS)
    assert whole.inspect().kv_bytes_per_token == 2 * 4 * (4 * HEADS + HEADS + 4 * HEADS + 2 * 4)


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.usefixtures("sim")
def test_caches_on_a_device_decode_as_on_the_host(kind: Any, whole: gw.Model) -> None:
    ids = some_ids(1, 14)
    cache: Any = whole.new_cache(32, kind=kind, device="sim")
    s = cache if kind == "static" else cache.sequence()
    near(whole.prefill(s, ids[:, :10])[0], whole.logits(ids[0, :10])[-1])
    for t in range(10, 14):
        near(s.step(ids[:, t : t + 1]).to_numpy()[0, 0], whole.logits(ids[0, : t + 1])[-1])


def test_a_program_that_counts_positions_itself_has_no_cache() -> None:
    class Own(Decoder):
        def forward(self, ids: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return {"logits": self.lm_head(self.norm(x))}

    p = gw.trace(Own(), some_ids(2, 9), sizes={"ids": ("B", "T")})
    model = create(config_from(FIELDS)).with_program(p)
    with pytest.raises(UsageError, match="counts positions itself"):
        model.generate(some_ids(1, 4), max_new_tokens=2)
