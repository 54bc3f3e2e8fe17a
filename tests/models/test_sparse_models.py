"""Models whose attention runs over a pattern: families, windows, padding, caches, generation and training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SIZES, Made, relative, some_ids

import graphwright as gw
from block_edges import edges_of
from graphwright import attention as at
from graphwright.errors import UsageError
from graphwright.models import StaleCache
from graphwright.models.generation.batched import GreedyBatch
from graphwright.patterns import HeadMismatch, NoGenerator, PatternShape

IDS = some_ids((2, 47))
FAMILIES = ["llama", "llama-one-group", "mistral", "qwen2", "qwen3-tied", "mixtral", "rope-yarn", "rope-dynamic"]


def window(tokens: int) -> at.Pattern:
    return at.sliding_window(tokens, window=9, block=4)


def masked(made: Made, mask: np.ndarray, ids: np.ndarray = IDS) -> np.ndarray:
    """Return the logits of transformers with a mask bool [T, T] in place of the causal one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(made.path, attn_implementation="eager").eval()
    n = ids.shape[1]
    added = torch.where(torch.from_numpy(mask[:n, :n]), 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        given = {"full_attention": added[None, None], "sliding_attention": added[None, None]}
        kind = getattr(model.config, "layer_types", None) or getattr(model.config, "sliding_window", None)
        return model(
            torch.from_numpy(ids), attention_mask=given if kind is not None else added[None, None]
        ).logits.numpy()


# -- sparsify ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_all_causal_pairs_equal_dense_attention_and_undo_restores_the_hash(
    name: str, made: Callable[[str], Made]
) -> None:
    m = gw.open(made(name).path)
    whole, digest, bits = m.logits(IDS), m.program.hash(), m.logits(IDS, deterministic=True).tobytes()
    assert at.sparsify(m, "layers.*.attn", lambda n: at.causal_full(n, block=8)) is m
    assert relative(m.logits(IDS), whole) < 1e-5
    assert m.program.hash() != digest
    assert m.program.journal[0].why == "sparsify 3 attentions"
    assert {m.program.op(n) for n in m.program.of_traits(attention=True)} == {"block_sdpa"}
    m.program.undo(len(m.program.journal))  # a pattern shorter than the text was extended
    assert m.program.hash() == digest
    assert m.logits(IDS, deterministic=True).tobytes() == bits


@pytest.mark.parametrize("size", [1, 5, 47, 64])
def test_a_window_equals_mistral_of_transformers(size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("window")
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=size)
    config._attn_implementation = "eager"
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.save_pretrained(path)
    m = gw.open(path)
    with m.program.edit("no window") as e:
        for node in m.program.of_traits(attention=True):
            e.set_attr(node, window=None)
    at.sparsify(m, "layers.*.attn", at.sliding_window(64, window=size, block=8), name="window")
    with torch.no_grad():
        want = theirs(torch.from_numpy(IDS)).logits.numpy()
    assert relative(m.logits(IDS), want) < 1e-5
    assert list(at.patterns(m)) == ["window"] == list(m.program.patterns)


def test_each_layer_may_have_a_pattern_of_its_own(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    whole = m.logits(IDS)
    at.sparsify(m, "**", {f"layers.{i}.attn": lambda n: at.causal_full(n, block=8) for i in range(3)})
    assert list(at.patterns(m)) == [f"layers.{i}.attn.pattern" for i in range(3)]
    assert relative(m.logits(IDS), whole) < 1e-5
    before = m.logits(IDS)
    second = at.patterns(m)["layers.1.attn.pattern"]
    edge = second.edge_between(5, 0)
    assert edge is not None
    second.cut(edge)
    changed = np.abs(m.logits(IDS) - before).max(axis=(0, 2)) > 0
    assert not changed[:40].any()
    assert changed[40:].all()


def test_a_shared_pattern_is_one_node_and_can_be_shared_further(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    pattern = window(64)
    at.sparsify(m, "layers.0.attn", pattern, name="local")
    at.sparsify(m, "layers.{1,2}.attn.sdpa", pattern)
    assert at.patterns(m) == {"local": pattern}
    assert len(m.program.of_kind("pattern")) == 1
    assert pattern.name == "local" if pattern.name else True
    assert relative(m.logits(IDS), masked(made("llama"), pattern.to_dense()[0])) < 1e-5


def test_planes_per_head_equal_masks_per_head(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    pattern = at.causal_full(64, block=4, planes=6)
    at.sparsify(m, "layers.*.attn", pattern)
    before = m.logits(IDS)
    with pattern.edit("another window in plane 3") as e:
        e.cut(
            [
                edge
                for edge in pattern.edges()
                if pattern.ends(edge)[0] == 3 and pattern.ends(edge)[1] > pattern.ends(edge)[2] + 1
            ]
        )
    with_planes = m.logits(IDS)
    assert np.abs(with_planes - before).max() > 1e-3
    m.program.undo()
    assert m.logits(IDS).tobytes() == before.tobytes()


def test_what_sparsify_refuses(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    digest = m.program.hash()
    with pytest.raises(HeadMismatch):
        at.sparsify(m, "layers.*.attn", at.causal_full(64, planes=4))
    with pytest.raises(UsageError, match="not causal"):
        at.sparsify(m, "layers.*.attn", at.full(64))
    with pytest.raises(PatternShape):
        at.sparsify(m, "layers.*.attn", at.causal_full((32, 64)))
    with pytest.raises(UsageError, match="no dense attention"):
        at.sparsify(m, "layers.*.mlp", at.causal_full(64))
    with pytest.raises(UsageError, match="one pattern"):
        at.sparsify(m, "layers.*.attn", {"layers.0.attn": window})
    with pytest.raises(UsageError, match="attention pattern"):
        at.sparsify(m, "layers.*.attn", cast("Any", 3))
    assert m.program.hash() == digest
    assert len(m.program.journal) == 0
    at.sparsify(m, "layers.*.attn", window)
    other = gw.open(made("llama").path)
    with pytest.raises(UsageError, match="already belongs"):
        at.sparsify(other, "layers.*.attn", at.patterns(m)["pattern"])
    with pytest.raises(UsageError, match="no dense attention"):
        at.sparsify(m, "layers.*.attn", window)


# -- lengths and padding -----------------------------------------------------------------------------------------------
def test_a_pattern_grows_by_its_rule_and_one_without_a_rule_is_refused(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", window(16))
    pattern = at.patterns(m)["pattern"]
    want = masked(made("llama"), window(64).to_dense()[0])
    assert relative(m.logits(IDS), want) < 1e-5
    assert pattern.tokens[0] >= 47
    assert m.program.journal[-1].why.startswith("extend")
    m.program.undo()
    assert pattern.tokens == (16, 16)
    bare = gw.open(made("llama").path)
    manual = at.Pattern(16, block=4)
    manual.connect_many(np.arange(4), np.arange(4))
    at.sparsify(bare, "layers.*.attn", manual)
    with pytest.raises(NoGenerator):
        bare.logits(IDS)


@pytest.mark.parametrize("layers", ["*", "1"])
@pytest.mark.parametrize("padding", [[*range(13)], [*range(30, 47)], [0, 1, 2, 20, 21, 46]])
def test_padding_does_not_change_the_logits_of_tokens(
    padding: list[int], layers: str, made: Callable[[str], Made]
) -> None:
    """Rows of a pattern are counted from the first token of each text, as in exported files."""
    m = gw.open(made("llama").path)
    pattern = at.star(64, global_tokens=3, window=6, block=8)
    pattern.connect(4, 2)
    at.sparsify(m, f"layers.{layers}.attn", pattern)
    mask = np.ones((2, 47), bool)
    mask[0, padding] = False
    found = m.logits(IDS, mask)
    own = m.logits(IDS[:1, mask[0]])
    assert relative(found[0][mask[0]], own[0]) < 1e-5
    assert relative(found[1], m.logits(IDS[1:])[0]) < 1e-5


def test_padding_may_have_scores_with_a_bound(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", at.star(64, global_tokens=3, window=6, block=8))
    with m.program.edit("softcap") as e:
        for node in m.program.of_traits(attention=True):
            e.set_attr(node, softcap=0.2)
    mask = np.arange(47) >= np.array([[9], [0]])
    found = m.logits(IDS, mask)
    assert relative(found[0, 9:], m.logits(IDS[:1, 9:])[0]) < 1e-5


# -- caches ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_decoding_equals_one_run_with_the_mask(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    at.sparsify(m, "layers.*.attn", at.star(16, global_tokens=2, window=6, block=4))
    pattern = at.patterns(m)["pattern"]
    cache = m.new_cache(47, batch=2, kind="static")
    steps = [cache.step(IDS[:, :7], all_logits=True).to_numpy("float32")]
    steps += [cache.step(IDS[:, 7:15], all_logits=True).to_numpy("float32")]  # in chunks
    steps += [cache.step(IDS[:, t : t + 1]).to_numpy("float32") for t in range(15, 47)]
    assert pattern.tokens[0] >= 47
    whole = np.concatenate(steps, axis=1)
    assert relative(whole, m.logits(IDS)) < 1e-5
    assert relative(whole, masked(made(name), pattern.to_dense()[0])) < 1e-5


def test_an_edge_added_between_two_tokens_counts_from_the_next_token_on(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    pattern = window(64)
    at.sparsify(m, "layers.*.attn", pattern)
    cache = m.new_cache(47, batch=2, kind="static")
    cache.step(IDS[:, :24])
    cache.step(IDS[:, 24:25])
    plan = cache.steps.bound(True, 2, 1, cache.variables).space.plan
    without = m.logits(IDS)
    for t in range(25, 28):
        cache.step(IDS[:, t : t + 1])
    pattern.connect(7, 0)  # the block of tokens 28 to 31, none of which ran yet
    pattern.connect(9, 2)
    found = [cache.step(IDS[:, t : t + 1]).to_numpy("float32") for t in range(28, 47)]
    want = masked(made("llama"), pattern.to_dense()[0])
    assert relative(np.concatenate(found, axis=1), want[:, 28:]) < 1e-5
    assert np.abs(want[:, 28] - without[:, 28]).max() > 1e-3
    assert cache.steps.bound(True, 2, 1, cache.variables).space.plan is plan
    assert plan.fresh


def test_an_edge_of_a_token_that_ran_makes_upper_layers_stale_until_undo(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    pattern = window(64)
    at.sparsify(m, "layers.*.attn", pattern)
    cache = m.new_cache(47, batch=2, kind="static")
    cache.step(IDS[:, :30])
    pattern.connect(5, 0)  # tokens 20 to 23
    with pytest.raises(StaleCache) as caught:
        cache.step(IDS[:, 30:31])
    assert caught.value.layers == ("layers.1.attn.sdpa", "layers.2.attn.sdpa")  # the first layer reads no pattern
    assert cache.validity()["layers.0.attn.sdpa"]
    m.program.undo()
    cache.check()
    m.program.redo()
    cache.refill()
    found = cache.step(IDS[:, 30:31]).to_numpy("float32")
    assert relative(found[:, 0], masked(made("llama"), pattern.to_dense()[0])[:, 30]) < 1e-5


def test_the_last_logits_follow_an_edit_of_their_row(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.2.attn", window(64))
    pattern = at.patterns(m)["pattern"]
    cache = m.new_cache(47, kind="static")
    cache.step(IDS[:1, :30])
    first = cache.last_logits().copy()
    pattern.connect(7, 0)
    assert np.abs(cache.last_logits() - first).max() > 1e-4
    assert relative(cache.last_logits(), m.logits(IDS[:1, :30])[:, -1]) < 1e-5


def test_generation_grows_the_pattern_and_equals_a_pattern_of_full_length(byte_model: gw.Model) -> None:
    whole, grown = byte_model, gw.open(byte_model.directory)
    at.sparsify(whole, "layers.*.attn", at.sliding_window(64, window=9, block=4))
    at.sparsify(grown, "layers.*.attn", at.sliding_window(8, window=9, block=4))
    prompt = some_ids((11,), seed=3)
    texts = []
    for m in (whole, grown):
        texts.append(m.generate(prompt, max_new_tokens=30, cache=m.new_cache(64, kind="static")).ids)
    assert np.array_equal(*texts)
    assert at.patterns(grown)["pattern"].tokens[0] >= len(texts[0])


@pytest.mark.parametrize(
    ("block", "tokens", "prompt"), [(8, 1, 1), (8, 20, 17), (16, 20, 7), (16, 40, 33), (64, 20, 11)]
)
def test_decoding_extends_a_short_last_block_between_edits(
    block: int, tokens: int, prompt: int, made: Callable[[str], Made]
) -> None:
    m = gw.open(made("llama").path)
    pattern = at.sliding_window(tokens, 9, block=block) | at.star(tokens, global_tokens=2, window=6, block=block)
    last = pattern.blocks[0] - 1
    pattern.cut(edges_of(pattern, (last, 0)))
    pattern.connect(last, 0)
    if last:
        pattern.cut(edges_of(pattern, (last - 1, 0)))
    at.sparsify(m, "layers.*.attn", pattern)
    cache = m.new_cache(80, kind="static")
    ids = some_ids((1, 76), seed=4)
    found = [cache.step(ids[:, :prompt], all_logits=True).to_numpy("float32")]
    for t in range(prompt, 76):
        row = t // block
        if t % block == 0 and row < pattern.blocks[0] and row > 3 and not pattern.has(row, 1):
            pattern.connect(row, 1)  # before the first token of the block runs
        found.append(cache.step(ids[:, t : t + 1]).to_numpy("float32"))
    assert pattern.tokens[0] >= 76
    assert relative(np.concatenate(found, axis=1), m.logits(ids)) < 1e-5


def test_decoding_reads_no_entry_that_no_later_row_reaches(made: Callable[[str], Made]) -> None:
    """A block of keys is dropped, here filled with NaN, once no edge of the current and later rows reaches it."""
    m, ids, block = gw.open(made("llama").path), some_ids((1, 70), seed=5), 4
    pattern = at.sliding_window(72, 6, block=block) | at.star(72, global_tokens=2, window=3, block=block)
    pattern.connect(13, 5)
    pattern.connect(16, 9)
    at.sparsify(m, "layers.*.attn", pattern)
    cache = m.new_cache(72, kind="static")
    found, dropped = [cache.step(ids[:, :5], all_logits=True).to_numpy("float32")], dict[int, int]()
    for t in range(5, 70):
        pairs = pattern.pairs()
        reached = set(pairs[pairs[:, 1] >= t // block, 2].tolist())
        for j in {*range(t // block)} - reached - {*dropped}:
            dropped[j] = t
            for entries in cache._entries():
                entries.to_numpy(bits=True)[:, :, block * j : block * (j + 1)] = np.nan
        found.append(cache.step(ids[:, t : t + 1]).to_numpy("float32"))
    assert set(dropped) == {*range(1, 15)}  # block 0 has the global tokens
    assert (dropped[5], dropped[9], dropped[6]) == (56, 68, 36)  # 5 and 9 have manual edges
    assert relative(np.concatenate(found, axis=1), m.logits(ids)) < 1e-5


def test_an_edit_after_an_extension_makes_the_row_of_cached_tokens_stale(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    pattern = at.star(20, global_tokens=2, window=9, block=8)
    at.sparsify(m, "layers.*.attn", pattern)
    cache = m.new_cache(47, kind="static")
    for part in (IDS[:1, :19], IDS[:1, 19:20], IDS[:1, 20:21]):  # the last one extends the pattern
        cache.step(part)
    assert pattern.tokens[0] > 20
    cache.check()
    pattern.cut(edges_of(pattern, (2, 0)))  # tokens 16 to 23
    with pytest.raises(StaleCache):
        cache.step(IDS[:1, 21:22])
    m.program.undo()
    cache.step(IDS[:1, 21:22])


def test_prompts_of_a_batch_continue_as_each_alone(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", at.star(20, global_tokens=2, window=6, block=8))
    prompts = [IDS[0, :5], IDS[1, :19], IDS[0, 20:31]]
    alone = [m.generate(ids, 8, cache=m.new_cache(64, kind="static")).ids for ids in prompts]
    found = GreedyBatch(m)(prompts, [8] * 3)
    assert [row.tolist() for row in found] == [list(row) for row in alone]


# -- training ----------------------------------------------------------------------------------------------------------
def test_edits_between_training_steps_need_no_new_plan(made: Callable[[str], Made]) -> None:
    losses = []
    for eager in (False, True):
        m = gw.open(made("llama").path)
        pattern = window(64)
        at.sparsify(m, "layers.*.attn", pattern)
        optimizer = gw.optim.SGD(m.parameters(), lr=0.05)

        def loss_of(logits: gw.Tensor, labels: gw.Tensor) -> gw.Tensor:
            return gw.nn.functional.cross_entropy(logits[:, :-1], labels[:, 1:], dim=-1)

        feeds = {"ids": IDS, "positions": np.arange(47)[None].repeat(2, 0)}
        step = None if eager else gw.compile_step(m.program, loss_of, optimizer, {**feeds, "labels": IDS})
        found, plan = [], None
        for i in range(5):
            if step is None:
                optimizer.zero_grad()
                value = loss_of(m.program(**feeds)["logits"], gw.tensor(IDS))
                value.backward()
                optimizer.step()
            else:
                value = step(**feeds, labels=IDS)
                plan = plan or step.plan
                assert step.plan is plan
            found.append(float(value.item()))
            pattern.connect(5 + i, i)
        losses.append(found)
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)


def test_generation_and_edits_in_two_threads(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    pattern = window(64)
    at.sparsify(m, "layers.*.attn", pattern)
    plan_of = [m.logits(IDS)]
    failures: list[BaseException] = []

    def edit() -> None:
        try:
            for _ in range(30):
                edge = pattern.connect(9, 0)
                pattern.cut(edge)
        except BaseException as error:  # shown by the test
            failures.append(error)

    thread = threading.Thread(target=edit)
    thread.start()
    with_edge = window(64)
    with_edge.connect(9, 0)
    wanted = [plan_of[0], masked(made("llama"), with_edge.to_dense()[0])]
    while thread.is_alive():
        found = m.logits(IDS)
        assert min(relative(found, want) for want in wanted) < 1e-5
    thread.join()
    assert not failures
    assert m.logits(IDS).tobytes() == plan_of[0].tobytes()


def test_a_paged_cache_is_refused_with_the_way_out(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", window)
    with pytest.raises(UsageError, match="cannot run over a paged cache"):
        m.new_cache(64)
