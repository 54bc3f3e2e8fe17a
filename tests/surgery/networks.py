"""Networks without a defect, of many families, small and random; and what they are run on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import graphwright as gw
from fixtures import tiny_llama
from graphwright import evolve as ev
from graphwright import nn
from graphwright.evolve.neurons import program as genomes
from graphwright.models.open import config_from, create
from graphwright.progress import Progress

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def interrupting(done: int) -> Callable[[Progress], None]:
    """A progress callback that is Ctrl-C once so much is done."""

    def stop(progress: Progress) -> None:
        if progress.done == done:
            raise KeyboardInterrupt

    return stop


def trained_llama() -> gw.Program:
    return gw.open(tiny_llama.directory("f32")).program


def random_decoder(family: str, seed: int = 0, **fields) -> gw.Program:
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    facts = {"architectures": [f"{names[family]}ForCausalLM"], "model_type": family}
    return create(config_from({**SIZES, **facts, **fields}), seed=seed).program


def gpt2(layers: int = 3, width: int = 24, heads: int = 3, vocab: int = 37) -> gw.Program:
    """Learned positions, LayerNorm with bias, one matrix for q, k and v, GELU, tied head."""
    rng, b = np.random.default_rng(3), gw.Builder("gpt2")
    ids, positions = b.input("ids", ("B", "T"), "int64"), b.input("positions", ("B", "T"), "int64")

    def param(name, *shape, std=0.08):
        return b.param(name, rng.normal(size=shape).astype("f4") * std)

    def plain(name, n, value=0.0):
        return b.param(name, np.full(n, value, "f4"))

    def norm(x, path):
        return b.layer_norm(x, plain(f"{path}.weight", width, 1.0), plain(f"{path}.bias", width), eps=1e-5, name=path)

    def linear(x, path, out, wide):
        return b.linear(x, param(f"{path}.weight", out, wide), plain(f"{path}.bias", out), name=path)

    table = param("wte.weight", vocab, width)
    x = b.add(b.embedding(table, ids, name="wte"), b.embedding(param("wpe.weight", 64, width), positions, name="wpe"))
    for i in range(layers):
        path = f"h.{i}"
        fused = linear(norm(x, f"{path}.ln_1"), f"{path}.attn.c_attn", 3 * width, width)
        parts = []
        for k, name in enumerate("qkv"):
            part = b.slice(fused, axis=2, start=k * width, size=width, name=f"{path}.attn.{name}")
            split = b.unflatten(part, axis=2, sizes=(heads, width // heads), name=f"{path}.attn.{name}_split")
            parts.append(b.permute(split, axes=(0, 2, 1, 3), name=f"{path}.attn.{name}_heads"))
        o = b.sdpa(*parts, scale=(width // heads) ** -0.5, name=f"{path}.attn.sdpa")
        rows = b.flatten(
            b.permute(o, axes=(0, 2, 1, 3), name=f"{path}.attn.rows"), start=2, end=3, name=f"{path}.attn.merged"
        )
        x = b.junction(x, linear(rows, f"{path}.attn.c_proj", width, width), name=f"{path}.mid")
        hidden = b.gelu(linear(norm(x, f"{path}.ln_2"), f"{path}.mlp.c_fc", 4 * width, width), name=f"{path}.mlp.act")
        x = b.junction(x, linear(hidden, f"{path}.mlp.c_proj", width, 4 * width), name=f"{path}.out")
    b.output(b.linear(norm(x, "ln_f"), table, name="lm_head"), "logits")
    return b.build()


def mlp() -> gw.Program:
    rng, b = np.random.default_rng(1), gw.Builder("mlp")
    x = b.input("x", ("B", 12))
    for i, (n, m) in enumerate(((24, 12), (20, 24), (3, 20))):
        w = b.param(f"{i}.weight", (rng.normal(size=(n, m)) / np.sqrt(m)).astype("f4"))
        x = b.linear(x, w, b.param(f"{i}.bias", np.zeros(n, "f4")), name=f"{i}")
        x = b.relu(x, name=f"{i}.act") if i < 2 else x
    b.output(x, "y")
    return b.build()


def cnn() -> gw.Program:
    """Convolutions with batch norm and residual sums, averaged over the image."""
    rng, b = np.random.default_rng(2), gw.Builder("cnn")
    x = b.input("x", ("B", 1, 8, 8))

    def conv(x, path, out, inner):
        w = b.param(f"{path}.weight", (rng.normal(size=(out, inner, 3, 3)) / np.sqrt(9 * inner)).astype("f4"))
        return b.conv(x, w, stride=(1, 1), padding=(1, 1), name=path)

    def norm(x, path, n):
        facts = [b.param(f"{path}.{k}", np.full(n, v, "f4")) for k, v in (("weight", 1), ("bias", 0))]
        return b.group_norm(x, *facts, groups=4, eps=1e-5, name=path)

    x = conv(x, "stem", 12, 1)
    for i in range(3):
        y = b.relu(norm(conv(x, f"blocks.{i}.a", 12, 12), f"blocks.{i}.na", 12), name=f"blocks.{i}.act")
        x = b.junction(x, norm(conv(y, f"blocks.{i}.b", 12, 12), f"blocks.{i}.nb", 12), name=f"blocks.{i}.out")
    pooled = b.mean(x, axes=(2, 3), keepdims=False, name="pooled")
    w = b.param("head.weight", (rng.normal(size=(10, 12)) / np.sqrt(12)).astype("f4"))
    b.output(b.linear(pooled, w, b.param("head.bias", np.zeros(10, "f4")), name="head"), "y")
    return b.build()


def neat() -> gw.Program:
    """A recurrent network of neurons: every link open, two of them through a delay."""
    links = [
        (0, 4, 0, 0.7),
        (1, 4, 0, -1.1),
        (2, 4, 0, 0.4),
        (3, 4, 0, 0.2),
        (1, 5, 0, 0.9),
        (4, 5, 0, 1.3),
        (5, 4, 1, -0.6),
    ]
    made = tuple(ev.LinkGene(10 + i, s, t, delay, True, w) for i, (s, t, delay, w) in enumerate(links))
    own = ev.LinkGene(10 + len(links), 5, 5, 1, True, 0.5)
    return genomes.founder(ev.Genome(3, 1, (ev.NodeGene(4, "tanh"), ev.NodeGene(5, "tanh")), (*made, own)), batch=2)


def training_cnn() -> gw.Program:
    """In training: a counter of batches beside the network, and a bias that batch norm takes away again."""
    gw.manual_seed(0)
    conv, norm, head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
    with gw.mode("train"):
        return gw.trace(lambda x: head(norm(conv(x)).tanh().mean((2, 3))), gw.tensor(np.ones((8, 3, 6, 6), "f4")))


def gru() -> gw.Program:
    gw.manual_seed(0)
    cell, head = nn.GRU(6, 12, batch_first=True), nn.Linear(12, 4)
    return gw.trace(lambda x: head(cell(x)[0]), gw.tensor(np.ones((4, 5, 6), "f4")))


CLEAN: dict[str, Callable[[], gw.Program]] = {
    "trained llama": trained_llama,
    "random llama": lambda: random_decoder("llama"),
    "qwen2 with biases": lambda: random_decoder("qwen2"),
    "qwen3": lambda: random_decoder("qwen3"),
    "gpt2": gpt2,
    "mlp": mlp,
    "residual cnn": cnn,
    "cnn in training": training_cnn,
    "gru": gru,
    "recurrent neat": neat,
}


def feeds(p: gw.Program, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch for any of them."""
    rng = np.random.default_rng(seed)
    given = {}
    for node in p.inputs():
        spec = p.spec(node).bind({"B": 16 if p.path(node) == "x" else 2, "T": 12})
        if p.path(node) == "positions":
            given["positions"] = np.ascontiguousarray(np.broadcast_to(np.arange(12), spec.sizes))
        elif spec.dtype.is_float:
            given[p.path(node)] = rng.normal(size=spec.sizes).astype("f4")
        else:
            given[p.path(node)] = rng.integers(0, 37, spec.sizes)
    return given


def outputs(p: gw.Program) -> dict[str, np.ndarray]:
    """Results of one run, on a fork: a run writes state."""
    run = p.fork().run(feeds(p))
    return {name: run[name].to_numpy("float64") for name in p.output_names()}
