"""Bits per byte of trained models over the density of attention, for rules that choose blocks of keys.

Each query sees its own block and others, up to a budget of blocks. Static rules are patterns: the first block and the
last ones (window and sink), or the blocks with the most attention mass on training text (learned: edges of a pattern
per query head that `prune` leaves). The other rules choose again for each query, as inference engines do: by the upper
bound of q·k over a block (min-max, as in Quest), by q·mean(k) (centroids, as in MoBA), or by the block's true attention
mass (oracle, which reads all keys). They run in transformers with another attention function; the static rules run in
Graphwright, and one of them in both, which must agree. Density is the share of causal pairs that a query may see;
finding the blocks is not counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import attention as at
from graphwright.models.bundled import bundled as bundled_directory
from graphwright.models.bundled import pydoc_split
from graphwright.models.metrics import _overlapping
from graphwright.models.open import config_from, create
from graphwright.models.train import Trainer, TrainOptions

PARTS = ("bundled", "mistral")
BLOCK, HELD = 16, 16000
"""Tokens of a block; characters of held-out text that are scored."""
WINDOW_AND_SINK, LEARNED = "window and sink", "learned pattern"
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
    "max_position_embeddings": 512, "sliding_window": None, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TRAINING = TrainOptions(steps=250, batch=8, window=512, lr=3e-3, warmup=40, floor=0.05, weight_decay=0.1, clip=1.0)


# -- rules -------------------------------------------------------------------------------------------------------------
def min_max(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the upper bounds Σ_c max(q_c·min k_c, q_c·max k_c) of each query and block [B, H, T, blocks]."""
    low, high = k.amin(3), k.amax(3)
    return q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT


def centroids(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return q·mean(k) of each query and block."""
    return q @ k.mean(3).mT


def oracle(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of exp(q·k / √d) over the block, which orders blocks by attention mass."""
    scores = torch.einsum("bhtd,bhnkd->bhtnk", q, k) * q.shape[-1] ** -0.5
    return scores.logsumexp(-1)


RULES: Mapping[str, Scores | None] = {
    "min-max bounds": min_max,
    "centroids": centroids,
    "oracle": oracle,
    WINDOW_AND_SINK: None,
}
"""Name -> scores of blocks [B, H, T, blocks] from queries and blocks of keys [B, H, blocks, 16, d]."""


class Selected:
    """An attention function of transformers in which each query sees `budget` blocks, its own among them.

    Attributes:
        seen, causal: number of pairs that queries saw, and of causal pairs.
    """

    def __init__(self, rule: Scores | None, budget: int) -> None:
        self.rule, self.budget, self.seen, self.causal = rule, budget, 0, 0

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        length = q.shape[2]
        own = torch.arange(length) // BLOCK
        block = torch.arange(-(-length // BLOCK))
        if self.rule is None:
            chosen = (block == 0) | (block > own[:, None] - (self.budget - 1))
            chosen = chosen.expand(*q.shape[:3], -1)
        else:
            assert length % BLOCK == 0, "the rules of blocks take whole blocks"
            scores = self.rule(q, k.unflatten(2, (-1, BLOCK)))
            scores = scores.masked_fill(block > own[:, None], -torch.inf)  # the own block too is chosen before others
            scores = scores.masked_fill(block == own[:, None], torch.inf)
            best = scores.topk(min(self.budget, len(block)), -1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = chosen.repeat_interleave(BLOCK, -1)[..., :length] & causal
        self.seen += int(allowed.sum())
        self.causal += int(causal.sum()) * q.shape[0] * q.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling)
        return out.transpose(1, 2), None


@contextmanager
def selecting(peer: Any, rule: Scores | None, budget: int) -> Iterator[Selected]:
    """Let a model of transformers choose blocks by a rule."""
    one, before = Selected(rule, budget), peer.config._attn_implementation
    transformers.AttentionInterface.register("selected", one)
    peer.config._attn_implementation = "selected"
    try:
        yield one
    finally:
        peer.config._attn_implementation = before


@torch.no_grad()
def bits(peer: Any, held: str, window: int, batch: int = 8) -> float:
    """Return the bits per byte of a byte-level model of transformers, in the windows of `model.perplexity`."""
    ids = np.frombuffer(held.encode(), np.uint8).astype(np.int64)
    windows, nats = _overlapping([ids], window, window // 2), 0.0
    for start in range(0, len(windows), batch):
        some = windows[start : start + batch]
        rows = torch.from_numpy(np.stack([row for row, _ in some]))
        losses = -torch.log_softmax(peer(rows, use_cache=False).logits.double(), -1)
        for (_, first), row, loss in zip(some, rows, losses, strict=True):
            nats += float(loss[first - 1 : -1].gather(1, row[first:, None]).sum())
    return nats / (log(2) * (len(ids) - 1))


# -- patterns ----------------------------------------------------------------------------------------------------------
def window_and_sink(tokens: int, budget: int) -> at.Pattern:
    """Return the pattern of the first block and the last `budget - 1` ones."""
    return at.block_local(tokens, budget - 2, BLOCK) | at.star(tokens, BLOCK, window=1, block=BLOCK)


def with_all_edges(directory: Path, tokens: int, text: str, batches: int = 8) -> gw.Model:
    """Return a model whose heads have a plane each, with all causal edges and their attention mass on a text."""
    model = gw.open(directory)
    ids = np.frombuffer(text.encode(), np.uint8)
    heads = model.dims.heads
    where = [f"layers.{i}.attn" for i in range(model.dims.layers)]
    at.sparsify(model, "layers.*.attn", {path: at.causal_full(tokens, BLOCK, planes=heads) for path in where})
    starts = np.random.default_rng(0).integers(0, len(ids) - tokens, (batches, 8))
    positions = np.broadcast_to(np.arange(tokens), (8, tokens)).copy()
    at.collect(
        model,
        [{"ids": ids[row[:, None] + np.arange(tokens)].astype(np.int64), "positions": positions} for row in starts],
    )
    return model


def density(patterns: Sequence[at.Pattern]) -> float:
    """Return the share of the causal pairs that patterns allow."""
    pairs = sum(p.summary().pairs for p in patterns)
    return pairs / sum(p.planes * p.tokens[0] * (p.tokens[0] + 1) / 2 for p in patterns)


# -- figures -----------------------------------------------------------------------------------------------------------
def compare(title: str, directory: Path, window: int, budgets: Sequence[int], held: str, train: str) -> Figure:
    """Score every rule at every budget of blocks per query."""
    figure = Figure(
        title, f"{len(held.encode()):,} held-out bytes in windows of {window}, blocks of {BLOCK}; no training after"
    )
    transformers.utils.logging.disable_progress_bar()
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    whole = gw.open(directory)
    dense = whole.perplexity(held, window=window, stride=window // 2).bits_per_byte
    assert abs(dense - bits(peer, held, window)) < 1e-4
    figure.add("dense", dense, "bits per byte", "density 100 %")
    learned = with_all_edges(directory, window, train)
    found = learned.perplexity(held, window=window, stride=window // 2).bits_per_byte
    assert abs(found - dense) < 1e-4, (found, dense)
    rows: list[tuple[int, str, float, float]] = []
    for budget in sorted(budgets, reverse=True):
        for name, rule in RULES.items():
            with selecting(peer, rule, budget) as one:
                found = bits(peer, held, window)
            rows.append((budget, name, found, one.seen / one.causal))
        static = gw.open(directory)
        pattern = window_and_sink(window, budget)
        at.sparsify(static, "layers.*.attn", pattern)
        found = static.perplexity(held, window=window, stride=window // 2).bits_per_byte
        assert abs(found - rows[-1][2]) < 1e-4, (budget, found, rows[-1])
        for each in learned.program.patterns.values():
            at.prune(each, target_density=len(pattern) / pattern.blocks[0] ** 2)
        found = learned.perplexity(held, window=window, stride=window // 2).bits_per_byte
        rows.append((budget, LEARNED, found, density(list(learned.program.patterns.values()))))
    for budget, name, found, share in rows:
        note = f"density {100 * share:.1f} %; {found - dense:+.3f} bits beside dense"
        figure.add(f"{budget} blocks of {window // BLOCK}: {name}", found, "bits per byte", note)
    figure.notes.append(f"{WINDOW_AND_SINK} agrees in Graphwright and transformers within 1e-4 bits at every budget")
    return figure


def bundled(budgets: Sequence[int] = (2, 3, 4, 6, 8)) -> Figure:
    """The model in the package."""
    train, held = pydoc_split()
    title = "Rules that choose blocks, bundled model"
    return compare(title, bundled_directory(), 256, budgets, held[:HELD], train)


def mistral(budgets: Sequence[int] = (2, 3, 4, 8, 16), steps: int = TRAINING.steps) -> Figure:
    """A small Mistral, trained here with dense attention."""
    train, held = pydoc_split()
    model = create(config_from(MISTRAL))
    options = {name: getattr(TRAINING, name) for name in TRAINING.__slots__} | {"steps": steps}
    Trainer(model, train, TrainOptions(**options)).run()
    with tempfile.TemporaryDirectory() as folder:
        model.export(directory := Path(folder) / "mistral", check="none")
        title = f"Rules that choose blocks, a Mistral of 3 layers after {steps} steps"
        return compare(title, directory, 512, budgets, held[:HELD], train)
