"""From an edit to the first training result (loss and gradients), 22 layers: beside torch eager, torch.compile and JAX.

Each peer does what its users do after a change of structure: torch eager just runs, the others compile again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter

import numpy as np

from benchmarks.harness import Figure

D, H, HD, FF, V, T, B, LAYERS = 256, 4, 64, 704, 512, 64, 2, 22
EDITS = ("skip", "remove")
STAGES = ("edit", "gradient and plan", "first result", "steady step")


def steady(step: Callable[[], object]) -> float:
    """Median seconds of five steps, after one more to warm up."""
    step()
    taken = []
    for _ in range(5):
        started = perf_counter()
        step()
        taken.append(perf_counter() - started)
    return float(np.median(taken))


def ours(rounds_: int) -> dict[str, list[float]]:
    from graphwright.models.open import config_from, create

    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "head_dim": HD,
        "intermediate_size": FF,
        "tie_word_embeddings": True,
    }
    ids, targets = (np.random.default_rng(i).integers(0, V, (B, T)) for i in range(2))
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(T), (B, T)))
    feeds = {"ids": ids, "positions": positions, "targets": targets}
    taken: dict[str, list[float]] = {
        f"{e}: {what}": [] for e in EDITS for what in ("edit", "gradient and plan", "first result", "steady step")
    }
    for _ in range(rounds_):
        for kind in EDITS:
            p = create(config_from(fields)).program
            with p.edit("loss") as e:
                e.set_outputs(loss=e.add("cross_entropy", p.outputs()[0], e.input("targets", ("B", "T"), "int64")))
            wrt = [p.path(n) for n in p.params()]

            def plan(p=p, wrt=wrt):
                gradient = p.grad("loss", wrt, {"B": B, "T": T})
                return gradient.compile({name: feed.shape for name, feed in feeds.items()}, executor="auto")

            def step(plan=plan):
                return plan()(feeds)

            step()
            p.hash()  # fresh weights are in no file: the first hash of a session reads them all
            t0 = perf_counter()
            with p.edit(kind) as e:
                if kind == "skip":
                    e.connect("layers.3.out", "layers.9.out")
                else:
                    for edge in p.out_edges("layers.10.out"):
                        e.rewire(edge, "layers.9.out")
                    e.remove([n for n in p.select("layers.10") if p.op(n) != "param"])
            t1 = perf_counter()
            planned = plan()
            t2 = perf_counter()
            planned(feeds)
            t3 = perf_counter()
            taken[f"{kind}: edit"].append(t1 - t0)
            taken[f"{kind}: gradient and plan"].append(t2 - t1)
            taken[f"{kind}: first result"].append(t3 - t0)
            taken[f"{kind}: steady step"].append(steady(lambda: planned(feeds)))
    return taken


def torch_peer(compiled: bool, rounds_: int) -> dict[str, list[float]]:
    import torch
    import torch._inductor.config
    import torch.nn.functional as F
    from torch import nn

    torch._inductor.config.force_disable_caches = True  # a structure that was never compiled before is in no cache

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
            self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
            self.gate, self.up, self.down = (
                nn.Linear(D, FF, bias=False),
                nn.Linear(D, FF, bias=False),
                nn.Linear(FF, D, bias=False),
            )

        def forward(self, x):
            y = F.rms_norm(x, (D,), self.n1, 1e-6)
            q, k, v = (m(y).view(B, T, H, HD).transpose(1, 2) for m in (self.q, self.k, self.v))
            x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
            y = F.rms_norm(x, (D,), self.n2, 1e-6)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.skip = (
                nn.Embedding(V, D),
                nn.ModuleList([Block() for _ in range(LAYERS)]),
                False,
            )

        def forward(self, ids):
            x = self.embed(ids)
            held = None
            for i, block in enumerate(self.blocks):
                x = block(x)
                if self.skip and i == 3:
                    held = x
                if self.skip and i == 9:
                    x = x + held
            return x @ self.embed.weight.t()

    ids, targets = torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))
    taken: dict[str, list[float]] = {f"{e}: {what}": [] for e in EDITS for what in ("first result", "steady step")}
    for _ in range(rounds_):
        for kind in EDITS:
            torch._dynamo.reset()
            net = Net()
            call = torch.compile(net) if compiled else net

            def step():
                net.zero_grad()
                F.cross_entropy(call(ids).view(-1, V), targets.view(-1)).backward()

            step()
            t0 = perf_counter()
            if kind == "skip":
                net.skip = True
            else:
                net.blocks = nn.ModuleList([b for i, b in enumerate(net.blocks) if i != 10])
            step()
            t1 = perf_counter()
            taken[f"{kind}: first result"].append(t1 - t0)
            taken[f"{kind}: steady step"].append(steady(lambda: step()))
    return taken


def jax_peer(rounds_: int) -> dict[str, list[float]]:
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def block():
        shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "gate": (FF, D), "up": (FF, D), "down": (D, FF)}
        return {
            **{n: jnp.asarray(rng.normal(size=s) * 0.02, jnp.float32) for n, s in shapes.items()},
            "n1": jnp.ones(D),
            "n2": jnp.ones(D),
        }

    ids, targets = (jnp.asarray(rng.integers(0, V, (B, T))) for _ in range(2))
    visible = jnp.tril(jnp.ones((T, T), bool))

    def norm(x, w):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w

    def forward(params, skip):
        x = params["embed"][ids]
        held = None
        for i, b in enumerate(params["blocks"]):
            y = norm(x, b["n1"])
            q, k, v = ((y @ b[n].T).reshape(B, T, H, HD).swapaxes(1, 2) for n in "qkv")
            s = jnp.where(visible, q @ k.swapaxes(-1, -2) / 8, -1e30)
            x = x + (jax.nn.softmax(s, -1) @ v).swapaxes(1, 2).reshape(B, T, D) @ b["o"].T
            y = norm(x, b["n2"])
            x = x + (jax.nn.silu(y @ b["gate"].T) * (y @ b["up"].T)) @ b["down"].T
            held = x if skip and i == 3 else held
            x = x + held if skip and i == 9 else x
        logp = jax.nn.log_softmax(x @ params["embed"].T, -1)
        return -jnp.take_along_axis(logp, targets[..., None], -1).mean()

    taken: dict[str, list[float]] = {f"{e}: {what}": [] for e in EDITS for what in ("first result", "steady step")}
    for _ in range(rounds_):
        for kind in EDITS:
            params = {
                "embed": jnp.asarray(rng.normal(size=(V, D)) * 0.02, jnp.float32),
                "blocks": [block() for _ in range(LAYERS)],
            }
            skip = False
            call = jax.jit(lambda p: jax.value_and_grad(lambda q: forward(q, skip))(p))  # read when traced
            jax.block_until_ready(call(params))
            t0 = perf_counter()
            if kind == "skip":
                skip = True
            else:
                params = {**params, "blocks": params["blocks"][:10] + params["blocks"][11:]}
            fresh = jax.jit(lambda p: jax.value_and_grad(lambda q: forward(q, skip))(p))  # read when traced
            jax.block_until_ready(fresh(params))
            t1 = perf_counter()
            taken[f"{kind}: first result"].append(t1 - t0)
            taken[f"{kind}: steady step"].append(steady(lambda: jax.block_until_ready(fresh(params))))
    return taken


def run() -> list[Figure]:
    import torch

    slow = int(os.environ.get("COMPILE_ROUNDS", "1"))
    peers: dict[str, dict[str, list[float]]] = {"graphwright": {}, "torch eager": {}}
    for _ in range(5):  # in turn: a machine may be quicker in one minute than in the next
        for who, taken in (("graphwright", ours(1)), ("torch eager", torch_peer(False, 1))):
            for part, samples in taken.items():
                peers[who].setdefault(part, []).extend(samples)
    peers |= {"JAX jit": jax_peer(2), "torch.compile": torch_peer(True, slow)}
    figures = []
    for kind in EDITS:
        what = "skip layer 3 -> 9" if kind == "skip" else "remove layer 10"
        figure = Figure(
            f"Edit to first training result, {what}",
            f"22 layers, width 256, batch 2 x 64, loss and all gradients, {torch.get_num_threads()} threads; "
            f"median of 5 in turn, JAX of 2, torch.compile of {slow} with cold caches",
        )
        for who, taken in peers.items():
            for part in STAGES:
                samples = taken.get(f"{kind}: {part}")
                if samples:
                    figure.add(f"{who}: {part}", float(np.median(samples)) * 1e3, "ms")
        mine, mine_steady = (float(np.median(peers["graphwright"][f"{kind}: {p}"])) for p in STAGES[2:])
        for who in list(peers)[1:]:
            first, steady = (float(np.median(peers[who][f"{kind}: {p}"])) for p in STAGES[2:])
            figure.notes.append(f"beside {who}: {ahead(mine, mine_steady, first, steady)}")
        figures.append(figure)
    return figures


def ahead(first: float, steady: float, other_first: float, other_steady: float) -> str:
    """Over which numbers of steps after an edit, the first included, less time was spent than by a peer."""
    if first < other_first and steady <= other_steady:
        return "ahead at any number of steps"
    if first >= other_first and steady >= other_steady:
        return "slower at any number of steps"
    steps = 1 + (other_first - first) / (steady - other_steady)
    return f"ahead up to {steps:,.0f} steps" if first < other_first else f"ahead from {steps:,.0f} steps on"
