"""Native sparse attention with a learned threshold: three causal branches over one query, mixed by gates of the input.

The choice of blocks is a value: each forward pass makes lists, which no journal records. Every step is an ordinary op,
so a traced program has the scores, thresholds, lists and gates as nodes.

Source: Yuan et al. 2025, "Native Sparse Attention" (arXiv 2502.11089); the threshold is an alternative to its top n.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log
from typing import Literal

import numpy as np

from graphwright.arguments import checked
from graphwright.array import from_numpy
from graphwright.array.formulas.selected import FORCED, MARGIN
from graphwright.autograd import Parameter, Tensor, arange, autocast_to, cat, rand, zeros
from graphwright.autograd.functions import wide
from graphwright.autograd.recorder import labelled
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import initial
from graphwright.nn.functional import attention
from graphwright.nn.layers import Linear
from graphwright.nn.module import Module
from graphwright.nn.transformer import RotaryEmbedding
from graphwright.ops import call
from graphwright.settings import AtLeastOne, NotNegative, Number, Positive

BRANCHES = ("compressed", "selected", "sliding")
"""The order of the branch gates."""
FIRST_BIASES = (-1.0, -1.0, 1.0)
WIDTH = 0.1
"""Width of the sigmoid that replaces the threshold in the backward pass."""
LEAST_TOTAL = 1e-30
"""The least sum by which importances are divided."""

Select = Literal["tau", "topn"]
Granularity = Literal["token", "tile"]
Summary = Literal["mean", "mlp"]
Ste = Literal["tau", "scores"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Blocks chosen for R rows of queries of G key heads, from J blocks.

    Attributes:
        probabilities: P [B, G, R, J], importance normalised over the candidates of a row; 0 for other blocks.
        relative: P·n [B, G, R, J], 1 for all candidates of a flat row.
        candidates: n [R], number of candidates: the blocks 1 to own - 2.
        blocks: int32 [B, G, R, 3 + most + ghosts], see the op `select_blocks`.
        gates: of these blocks, of the same shape: 1 for those that are read, 0 for ghosts and absent ones.
        taken: candidates that are read, int64 [B, G, R].
        capped: bool [B, G, R], True where more candidates reach the threshold than a list can hold.
        entropy: H(P) / ln n [B, G, R], 0 for n <= 1.
        openness: mean over the candidates of σ((P·n - τ) / 0.1) [B, G, R], 0 without candidates; None for `topn`.
    """

    probabilities: Tensor
    relative: Tensor
    candidates: Tensor
    blocks: Tensor
    gates: Tensor
    taken: Tensor
    capped: Tensor
    entropy: Tensor
    openness: Tensor | None


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """What a forward pass of `NativeSparse` computed.

    Attributes:
        out: [B, T, dim].
        aux: the auxiliary loss, a scalar; 0 for `topn`.
        tau: thresholds [G]; None for `topn`.
        choice: the chosen blocks.
        branch_gates: [B, H, T, 3], in the order compressed, selected, sliding.
        compressed, selected, sliding: results of the branches [B, H, T, head_dim].
    """

    out: Tensor
    aux: Tensor
    tau: Tensor | None
    choice: Choice
    branch_gates: Tensor
    compressed: Tensor
    selected: Tensor
    sliding: Tensor

    def mean_taken(self) -> Tensor:
        """Return the mean number of candidates that a row reads."""
        return self.choice.taken.to(self.choice.relative.dtype).mean()

    def histogram(self) -> Tensor:
        """Return how many rows read 0, 1, 2, ... candidates, int64."""
        most = self.choice.relative.shape[3]
        return call("bincount", self.choice.taken.reshape(-1), length=most + 1)


class Compressor(Module):
    """Summaries of windows of tokens [..., l, d] -> [..., d]: their mean, or an MLP with a position embedding.

    Args:
        kind: `mean`, or `mlp`: down(gelu(up(flatten(x + position)))) with a hidden layer of 2d.
        length, width: l and d.
    """

    def __init__(self, kind: Summary, length: int, width: int, *, name: str = "", seed: int | None = None) -> None:
        self.kind = kind
        self.position = self.up = self.down = None
        if kind == "mlp":
            self.position = Parameter(initial.normal((length, width), name and f"{name}position", seed=seed))
            self.up = Linear(length * width, 2 * width, name=name and f"{name}up.", seed=seed)
            self.down = Linear(2 * width, width, name=name and f"{name}down.", seed=seed)

    def forward(self, windows: Tensor) -> Tensor:
        """Map windows [..., l, d] to summaries [..., d]."""
        if self.position is None or self.up is None or self.down is None:
            return windows.mean(axis=-2)
        flat = call("flatten", windows + self.position, start=-2, end=-1)
        return self.down(call("gelu", self.up(flat)))


class NativeSparse(Module):
    """Causal attention by three branches: summaries of all blocks, selected blocks in full, and a sliding window.

    o = Σ_branch σ(w_b·x + b_b)·o_b per head and token; the biases begin at -1, -1 and +1, so the window leads.
    Compressed: attention over summaries of the windows of `summary` tokens that begin every `stride` tokens, for a
    query only those that are complete. Selected: attention over blocks of `block` tokens, for each token and key head
    the same for all its query heads: block 0, the previous and the own block always, and candidates, the blocks between
    them, by their importance, the attention that their summaries get. Sliding: the last `window` tokens.

    `select="tau"` takes block j for query t iff P_tj·n_t >= τ, where P_t is the importance normalised over the n_t
    candidates and τ = softplus(ψ) is learned per key head from 1 on. Flat importance takes many blocks, peaked
    importance few. `select="topn"` takes the n best candidates.

    τ gets its gradient as if a block's gate were σ((P·n - τ) / 0.1): from the blocks taken, and, in training, from
    `ghosts` random blocks of each row that are not, which do not change the result.

    Args:
        dim, heads, kv_heads, head_dim: size of a token, numbers of query and key heads, even size of a head; kv_heads
            is `heads` and head_dim is dim / heads by default.
        select: `tau`, or `topn`.
        n: candidates that `topn` takes, beside the three blocks that are always read.
        most: the most candidates that `tau` takes, the best first; no limit by default.
        summary, stride, block, window: in tokens; stride divides summary and block.
        compressor: `mean`, or `mlp` (see `Compressor`), separate for keys and values.
        granularity: `token`: each query has a list; `tile`: the queries of a block share one, made from the scores of
            the last query of the block before.
        shared_kv: whether the branches share keys and values; else each has its own projections.
        ghosts: random blocks per row that τ is trained by.
        ste: `tau`; or `scores`, so that the scores get the gradient of the gates too.
        entropy_weight, sparse_weight: of the auxiliary loss w_ent·mean (κ - H)² + w_sparse·mean κ, with κ the
            `openness` and H the `entropy` of the rows that have candidates.
        theta: base of the rotary frequencies.
        qk_gain: factor of the initial weights of q and k: larger ones make the scores of blocks differ from the start.
    Raises: UsageError for sizes that do not fit.
    """

    @checked
    def __init__(
        self, dim: AtLeastOne, heads: int, kv_heads: int | None = None, *, head_dim: int | None = None,
        select: Select = "tau", n: int = 16, most: int | None = None, summary: int = 32, stride: int = 16,
        block: int = 64, window: int = 512, compressor: Summary = "mean", granularity: Granularity = "token",
        shared_kv: bool = True, ghosts: int = 2, ste: Ste = "tau", entropy_weight: NotNegative = 0.01,
        sparse_weight: NotNegative = 0.001, theta: Positive = 10000.0, qk_gain: Number = 1.0, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads < 1 or heads % self.kv_heads:
            expected, got = "kv_heads >= 1, and heads a multiple of it", f"heads {heads}, kv_heads {self.kv_heads}"
            raise UsageError("invalid numbers of heads", expected=expected, got=got)
        if head_dim is None and dim % heads:
            raise UsageError("dim is not a multiple of heads", expected=f"a multiple of {heads}, or head_dim", got=dim)
        self.head_dim = dim // heads if head_dim is None else head_dim
        if stride < 1 or summary < 1 or block < 1 or summary % stride or block % stride:
            got = f"summary {summary}, stride {stride}, block {block}"
            raise UsageError("invalid sizes of blocks", expected="stride >= 1 that divides summary and block", got=got)
        if window < 1 or n < 0 or ghosts < 0 or (most is not None and most < 0):
            got = f"window {window}, n {n}, ghosts {ghosts}, most {most}"
            raise UsageError("an argument is out of range", expected="window >= 1; n, ghosts and most >= 0", got=got)
        self.select, self.n, self.most = select, n, most
        self.summary, self.stride, self.block, self.window = summary, stride, block, window
        self.granularity, self.shared_kv, self.ste = granularity, shared_kv, ste
        self.ghosts = ghosts if select == "tau" else 0  # by name: nothing learns from ghosts of the n best
        self.entropy_weight, self.sparse_weight = entropy_weight, sparse_weight
        self.rope = RotaryEmbedding(self.head_dim, theta)
        narrow = self.kv_heads * self.head_dim

        def linear(inner: int, outer: int, label: str, bias: bool = False) -> Linear:
            return Linear(inner, outer, bias, name=name and f"{name}{label}.", seed=seed)

        self.q = linear(dim, heads * self.head_dim, "q")
        count = 1 if shared_kv else len(BRANCHES)
        self.k = [linear(dim, narrow, f"k.{i}") for i in range(count)]
        self.v = [linear(dim, narrow, f"v.{i}") for i in range(count)]
        for m in (self.q, *self.k) if qk_gain != 1.0 else ():
            m.weight.assign(m.weight.detach() * qk_gain)
        self.mix = linear(dim, len(BRANCHES) * heads, "mix", bias=True)
        assert self.mix.bias is not None
        self.mix.bias.assign(Tensor(from_numpy(np.repeat(np.array(FIRST_BIASES, np.float32), heads))))
        self.out = linear(heads * self.head_dim, dim, "out")
        made = (name and f"{name}compress_{kind}." for kind in "kv")
        self.compress_k, self.compress_v = (
            Compressor(compressor, summary, self.head_dim, name=label, seed=seed) for label in made
        )
        self.psi = Parameter(initial.full((self.kv_heads,), log(expm1(1.0)))) if select == "tau" else None

    def forward(self, x: Tensor, mod: Tensor | None = None) -> Tensor:
        """Attend within each sequence of x [B, T, dim]; the shape is kept. For `mod` see `attend`."""
        return self.attend(x, mod).out

    def attend(self, x: Tensor, mod: Tensor | None = None) -> SparseAttention:
        """Attend within each sequence, and return the choice, the branches and the auxiliary loss too.

        Args:
            x: [B, T, dim]. Tokens have the positions 0 to T - 1.
            mod: multiplier of τ per token [B, T], such as a surprise, clipped to ½ .. 2; `tile` reads it at the last
                query of the previous tile.
        Raises: ShapeError.
        """
        if len(x.shape) != 3 or (mod is not None and mod.shape != x.shape[:2]):
            got = f"x {x.shape}" + ("" if mod is None else f", mod {mod.shape}")
            raise ShapeError("invalid operands of NativeSparse", expected="x [B, T, dim], mod [B, T]", got=got)
        time = x.shape[1]
        positions = arange(time)
        q, keys, values = self._projected(x)
        cos, sin = self.rope(positions[None])
        q = self.rope.rotate(q, cos, sin)
        rotated = [self.rope.rotate(k, cos, sin) for k in keys]
        summaries = self._summaries(keys[0], values[0])
        compressed, shares = self._compressed(q, summaries, positions)
        importance = labelled(self._importance(shares, -(-time // self.block)), "importance")
        own = positions // self.block
        if self.granularity == "tile":
            importance, own = self._of_tiles(importance), arange(importance.shape[3])
            mod = None if mod is None else self._of_tiles(mod[:, None, :, None], 1.0)
        else:
            mod = None if mod is None else mod[:, None, :, None]
        choice = self._choose(importance, own, mod)
        second, third = (0, 0) if self.shared_kv else (1, 2)
        selected = self._selected(q, rotated[second], values[second], choice)
        sliding = attention(q, rotated[third], values[third], causal=True, window=self.window)
        return self._mixed(x, (compressed, selected, sliding), choice)

    # -- steps, shared with `NativeSparseDecoder` ----------------------------------------------------------------------
    def _projected(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return q [B, H, T, d], and keys and values of each branch, [B, G, T, d]."""
        q = self._split(self.q(x), self.heads)
        return q, [self._split(k(x), self.kv_heads) for k in self.k], [self._split(v(x), self.kv_heads) for v in self.v]

    def _selected_operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [B, H, T, d], and rotated k and v of the selected branch [B, G, T, d]."""
        q, keys, values = self._projected(x)
        cos, sin = self.rope(arange(x.shape[1])[None])
        own = 0 if self.shared_kv else 1
        return self.rope.rotate(q, cos, sin), self.rope.rotate(keys[own], cos, sin), values[own]

    def _split(self, t: Tensor, heads: int) -> Tensor:
        return call("unflatten", t, axis=2, sizes=(heads, self.head_dim)).permute(0, 2, 1, 3)

    def _summaries(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated summaries of keys, and of values, [B, G, C, d] with C >= 1; an incomplete one is hidden."""
        count = max((k.shape[2] - self.summary) // self.stride + 1, 1)
        summary, value = self.compress_k(self._windows(k, count)), self.compress_v(self._windows(v, count))
        return self._rotated_at(summary, arange(count) * (2 * self.stride) + (self.summary - 1)), value

    def _rotated_at(self, k: Tensor, twice: Tensor) -> Tensor:
        """Rotate summaries [B, G, C, d] at half of the positions `twice` [C]: middles of windows may be halves."""
        cos, sin = call("rope_table", twice[None], self.rope.inv_freq * 0.5, scale=1.0)
        return self.rope.rotate(k, cos, sin)

    def _windows(self, t: Tensor, count: int) -> Tensor:
        """Return the first `count` windows of tokens [B, G, T, d] as [B, G, count, l, d], padded by zeros."""
        length = (count - 1) * self.stride + self.summary
        if length > t.shape[2]:
            t = call("pad", t, widths=((0, length - t.shape[2]), (0, 0)))
        t = call("slice", t, axis=2, start=0, size=length)
        parts = call("unflatten", t, axis=2, sizes=(length // self.stride, self.stride))
        shifts = range(self.summary // self.stride)
        return cat([call("slice", parts, axis=2, start=i, size=count) for i in shifts], 3)

    def _compressed(self, q: Tensor, summaries: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Attend over summaries; return the result, and the probabilities summed over query heads [B, G, T, C]."""
        k, v = (call("unsqueeze", t, axes=(2,)) for t in summaries)
        grouped = call("unflatten", q, axis=1, sizes=(self.kv_heads, self.heads // self.kv_heads))
        with autocast_to(None):
            scores = wide(grouped) @ wide(k).transpose(3, 4) * self.head_dim**-0.5
            ends = call("iota", scores, axis=4) * self.stride + (self.summary - 1)
            shares = labelled(call("softmax", scores, call("le", ends, positions[:, None])), "compressed")
        made = call("flatten", shares.to(v.dtype) @ v, start=1, end=2)
        return made, shares.sum(axis=2)

    def _importance(self, shares: Tensor, count: int) -> Tensor:
        """Return Σ_c p[c]·overlap(c, j) / l [B, G, R, J] of J = `count` blocks, from p [B, G, R, C].

        In strides, window c begins at c and has r = l / stride, block j begins at m·j and has m = block / stride. The
        windows that overlap block j are c = m·j + o - (r - 1), by min(o + 1, r, m, m + r - 1 - o) strides.
        """
        r, m = self.summary // self.stride, self.block // self.stride
        padded = call("pad", shares, widths=((r - 1, m * count - shares.shape[3]),))
        total = None
        for o in range(m + r - 1):
            weight = min(o + 1, r, m, m + r - 1 - o) / r
            term = call("slice", padded, axis=3, start=o, step=m, size=count) * weight
            total = term if total is None else total + term
        assert total is not None
        return total

    def _of_tiles(self, t: Tensor, first: float = 0.0) -> Tensor:
        """Return the rows of [.., .., T, n] at the last query of the tile before each tile; `first` for tile 0."""
        count = -(-t.shape[2] // self.block)
        start = call("full_like", call("slice", t, axis=2, start=0, size=1), value=first)
        if count == 1:
            return start
        return cat([start, call("slice", t, axis=2, start=self.block - 1, step=self.block, size=count - 1)], 2)

    def _choose(self, importance: Tensor, own: Tensor, mod: Tensor | None) -> Choice:
        """Choose blocks for rows with importance [B, G, R, J] whose queries are in the blocks `own` [R]."""
        importance = importance if self.ste == "scores" else importance.detach()
        kind = importance.dtype
        blocks = call("iota", importance, axis=3)
        candidate = call("logical_and", call("ge", blocks, 1), call("le", blocks, own[:, None] - 2))
        n = (own - 2).clamp(min=0)
        size = n.to(kind)
        held = importance * candidate.to(kind)
        share = labelled(held / held.sum(axis=3, keepdims=True).clamp(min=LEAST_TOTAL), "probabilities")
        relative = labelled(share * size[:, None], "relative")
        entropy = -(share * call("where", call("gt", share, 0.0), share, 1.0).log()).sum(axis=3)
        entropy = labelled(entropy / size.clamp(min=2.0).log() * call("gt", size, 1.0).to(kind), "entropy")
        room, openness, soft = max(importance.shape[3] - FORCED, 0), None, None
        if self.psi is None:
            thresholds, room = zeros(1, 1, 1, 1, dtype=kind) - 1.0, min(self.n, room)
        else:
            tau = self.tau().to(kind).reshape(1, self.kv_heads, 1, 1)
            thresholds = tau if mod is None else tau * mod.to(kind).clamp(min=0.5, max=2.0)
            thresholds = labelled(thresholds, "thresholds")
            room = room if self.most is None else min(self.most, room)
            soft = labelled(((relative - thresholds) / WIDTH).sigmoid(), "soft")
            openness = labelled((soft * candidate.to(kind)).sum(axis=3) / size.clamp(min=1.0), "openness")
        ghosts = self.ghosts if self.trains else 0
        noise = [rand(*relative.shape, dtype=kind)] if ghosts else []
        given = (relative.detach(), thresholds.detach(), own, *noise)
        lists = labelled(call("select_blocks", *given, most=room, ghosts=ghosts), "blocks")
        present = call("ge", lists, 0)
        read = call("lt", call("iota", lists, axis=3), FORCED + room)
        hard = call("logical_and", present, read).to(kind)
        taken = labelled(call("slice", hard, axis=3, start=FORCED, size=room).sum(axis=3).to("int64"), "taken")
        above = call("logical_and", call("ge", relative.detach(), thresholds.detach() - MARGIN), candidate)
        capped = labelled(call("gt", above.to("int64").sum(axis=3), taken), "capped")
        if soft is not None:
            hard = hard + self._soft_part(soft, lists, present)
        gates = labelled(hard, "gates")
        return Choice(share, relative, n, lists, gates, taken, capped, entropy, openness)

    def _soft_part(self, soft: Tensor, lists: Tensor, present: Tensor) -> Tensor:
        """Return zeros of the shape of the lists with the gradient of the soft gates of the listed candidates."""
        width = lists.shape[3] - FORCED
        ids, here = (call("slice", t, axis=3, start=FORCED, size=width) for t in (lists, present))
        listed = call("gather", soft, ids.to("int64").clamp(min=0), axis=3)
        listed = call("where", here, listed, 0.0)
        return call("pad", listed - listed.detach(), widths=((FORCED, 0),))

    def _selected(self, q: Tensor, k: Tensor, v: Tensor, choice: Choice, *start: Tensor) -> Tensor:
        """Attend over the chosen blocks [B, H, T, d]; `start` is the position of the first query, if it is not 0."""
        tile = self.block if self.granularity == "tile" and not start else 1
        return call(
            "sdpa_selected", q, k, v, choice.blocks, choice.gates, *start, scale=self.head_dim**-0.5, block=self.block,
            tile=tile, optional=("q_start",) if start else (),
        )  # fmt: skip

    def _mixed(self, x: Tensor, branches: tuple[Tensor, Tensor, Tensor], choice: Choice) -> SparseAttention:
        made = call("unflatten", self.mix(x), axis=2, sizes=(len(BRANCHES), self.heads)).sigmoid()
        gates = labelled(made.permute(0, 3, 1, 2), "branch_gates")
        total = None
        for i, branch in enumerate(branches):
            term = branch * call("slice", gates, axis=3, start=i, size=1)
            total = term if total is None else total + term
        assert total is not None
        out = self.out(call("flatten", total.permute(0, 2, 1, 3), start=2, end=3))
        tau = None if self.psi is None else labelled(self.tau(), "tau")
        return SparseAttention(out, labelled(self._aux(choice), "aux"), tau, choice, gates, *branches)

    def tau(self) -> Tensor:
        """Return the thresholds τ = softplus(ψ) [G]. Raises: UsageError for `topn`."""
        if self.psi is None:
            raise UsageError("the n best blocks have no threshold", where="NativeSparse", expected='select="tau"')
        return call("softplus", self.psi)

    def _aux(self, choice: Choice) -> Tensor:
        """Return w_ent·mean (κ - H)² + w_sparse·mean κ over the rows that have candidates."""
        if choice.openness is None:
            return zeros((), dtype=choice.relative.dtype)
        rows = call("gt", choice.candidates, 0).to(choice.openness.dtype)
        count = (rows.sum() * float(np.prod(choice.openness.shape[:2]))).clamp(min=1.0)
        gap = choice.openness - choice.entropy
        both = gap * gap * self.entropy_weight + choice.openness * self.sparse_weight
        return (both * rows).sum() / count
