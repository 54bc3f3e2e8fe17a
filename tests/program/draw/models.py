"""Programs to draw: a Llama-shaped decoder, an MLP, a net with a skip, a block with three branches."""

from __future__ import annotations

import numpy as np

from graphwright.program import Builder, Program


def _weight(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def llama(layers: int = 2, width: int = 64, heads: int = 4, kv: int = 2, hidden: int = 192, vocab: int = 96) -> Program:
    """A decoder as Hugging Face names it: attention with rotary positions and grouped heads, gated MLP."""
    b, head = Builder("llama"), width // heads
    ids, positions = b.input("ids", ("B", "T"), "int64"), b.input("positions", ("B", "T"), "int64")
    x = b.embedding(b.param("embed.weight", _weight(vocab, width)), ids, name="embed")
    cos, sin = b.rope_table(positions, b.const("rope.frequencies", _weight(head // 2)), name="rope")
    for i in range(layers):
        block = b.scope(f"layers.{i}")
        a = block.scope("attn")
        normed = a.rms_norm(x, a.param("norm.weight", _weight(width)), name="norm")
        parts = {}
        for part, n in (("q", heads), ("k", kv), ("v", kv)):
            flat = a.linear(normed, a.param(f"{part}.weight", _weight(n * head, width)), name=part)
            split = a.unflatten(flat, axis=2, sizes=(n, head), name=f"{part}_heads")
            parts[part] = a.permute(split, axes=(0, 2, 1, 3), name=f"{part}_first")
        q = a.rope(parts["q"], cos, sin, name="q_rope")
        k = a.rope(parts["k"], cos, sin, name="k_rope")
        mixed = a.permute(a.sdpa(q, k, parts["v"], scale=head**-0.5, name="sdpa"), axes=(0, 2, 1, 3), name="heads_last")
        joined = a.flatten(mixed, start=2, end=3, name="join")
        mid = block.junction(x, a.linear(joined, a.param("o.weight", _weight(width, width)), name="o"), name="mid")
        m = block.scope("mlp")
        normed = m.rms_norm(mid, m.param("norm.weight", _weight(width)), name="norm")
        gate = m.silu(m.linear(normed, m.param("gate.weight", _weight(hidden, width)), name="gate"), name="act")
        up = m.linear(normed, m.param("up.weight", _weight(hidden, width)), name="up")
        down = m.linear(m.mul(gate, up, name="mul"), m.param("down.weight", _weight(width, hidden)), name="down")
        x = block.junction(mid, down, name="out")
    x = b.rms_norm(x, b.param("norm.weight", _weight(width)), name="norm")
    b.output(b.linear(x, b.param("lm_head.weight", _weight(vocab, width)), name="lm_head"), "logits")
    return b.build()


def mlp(hidden: int = 16) -> Program:
    """Two linear layers with biases."""
    b = Builder("mlp")
    h = b.input("x", ("B", 4))
    for name, shape in (("first", (hidden, 4)), ("second", (3, hidden))):
        h = b.linear(h, b.param(f"{name}.weight", _weight(*shape)), name=name)
        h = b.add(h, b.param(f"{name}.bias", _weight(shape[0])), name=f"{name}_bias")
        if name == "first":
            h = b.relu(h, name="act")
    b.output(h, "y")
    return b.build()


def skip() -> Program:
    """Five layers in a row, the first also read by the last: 1 -> 4."""
    b = Builder("skip")
    h = b.input("x", ("B", 8))
    made = []
    for i in range(5):
        h = b.tanh(h if i != 4 else b.junction(made[-1], made[0], name="join"), name=f"layer{i}")
        made.append(h)
    b.output(h, "y")
    return b.build()


def branches() -> Program:
    """One input, three branches of one, two and three layers, their sum, and the input itself."""
    b = Builder("branches")
    x = b.input("x", ("B", 8))
    stem = b.linear(x, b.param("stem.weight", _weight(8, 8)), name="stem")
    ends = []
    for i in range(1, 4):
        branch, h = b.scope(f"block.branch{i}"), stem
        for k in range(i):
            h = branch.linear(h, branch.param(f"conv{k}.weight", _weight(8, 8)), name=f"conv{k}")
            h = branch.relu(h, name=f"act{k}")
        ends.append(h)
    b.output(b.tanh(b.junction(*ends, stem, name="block.sum"), name="head"), "y")
    return b.build()


def chains(blocks: int = 625, depth: int = 16) -> Program:
    """Blocks of `depth` nodes one after the other, each with a residual sum: 10 000 nodes by default."""
    b = Builder("chains")
    h = b.input("x", ("B", 8))
    for i in range(blocks):
        block, x = b.scope(f"stage{i // 25}.block{i}"), h
        for k in range(depth - 1):
            h = (block.tanh if k % 2 else block.relu)(h, name=f"f{k}")
        h = block.junction(x, h, name="out")
    b.output(h, "y")
    return b.build()


def tangle() -> Program:
    """Modules with many ways in and out, shared sources and skips: every lane and channel is used."""
    b = Builder("tangle")
    made = [b.input("x", ("B", 8)), b.input("z", ("B", 8))]
    for i in range(40):
        module = ("a", "b.c", "b", "a.d", "e.f.g")[i * 7 % 5]
        made.append(b.junction(*(made[-1 - (i * k) % min(9, len(made))] for k in (1, 3, 5)), name=f"{module}.n{i}"))
    b.output(made[-1], "y")
    return b.build()


def flat(n: int = 10_000) -> Program:
    """Nodes without any module, each reading two earlier ones."""
    b = Builder("flat")
    made = [b.input("x", ("B", 8))]
    for i in range(n - 1):
        made.append(b.add(made[-1], made[max(0, i - (i * 7) % 13)], name=f"n{i}"))
    b.output(made[-1], "y")
    return b.build()
