"""One training step of the bundled model's shape beside torch eager and torch.compile, losses checked equal first."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from benchmarks.harness import Figure, add_rounds, rounds
from graphwright.models.bundled import CONFIG
from graphwright.models.corpus import pydoc_split
from graphwright.models.create import config_from, create
from graphwright.models.train import Recipe, Trainer


def torch_twin(model, implementation: str) -> torch.nn.Module:
    fields = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "dtype")}
    twin = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**fields), attn_implementation=implementation
    )
    state = {
        key: torch.from_numpy(v.numpy().copy()) for key, v in model.program.weights.items() if key in twin.state_dict()
    }
    twin.load_state_dict(state, strict=False)
    return twin


def torch_step(twin: torch.nn.Module, lr: float, trainer: Trainer):
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    at = iter(range(10_000))

    def step() -> float:
        ids, targets = (torch.from_numpy(a) for a in trainer.batch(next(at)))
        opt.zero_grad()
        logits = twin(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        opt.step()
        return loss.item()

    return step


def run() -> list[Figure]:
    threads = torch.get_num_threads()
    try:
        return [measure(n) for n in sorted({1, threads}, reverse=True)]
    finally:
        torch.set_num_threads(threads)


def measure(threads: int) -> Figure:
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    text, _ = pydoc_split()
    recipe = Recipe(steps=10_000, batch=16, window=256, lr=1e-4, warmup=0, floor=1.0)
    model = create(config_from(CONFIG))
    trainer = Trainer(model, text, recipe)
    peers = {}
    for name in ("eager", "sdpa"):
        peers[f"torch eager, {name} attention"] = torch_step(torch_twin(model, name), recipe.lr, trainer)
    compiled = torch_twin(model, "sdpa")
    compiled.forward = torch.compile(compiled.forward)
    peers["torch.compile, sdpa attention"] = torch_step(compiled, recipe.lr, trainer)
    first = {"graphwright": trainer.run(1).losses[0], **{name: step() for name, step in peers.items()}}
    spread = max(first.values()) - min(first.values())
    assert spread < 1e-4, first
    calls = {"graphwright": lambda: trainer.run(1), **peers}
    taken = rounds(calls, n=15, warm=2)
    tokens = recipe.batch * recipe.window
    figure = Figure(
        "Training step, 1.6 M parameters, 16 x 256 bytes",
        f"f32, {threads} thread{'s' * (threads > 1)}, forward to fused AdamW; first losses agree to {spread:.1e}",
    )
    notes = {name: f"{tokens / np.median(t):,.0f} byte/s" for name, t in taken.items()}
    add_rounds(figure, taken, "ms", notes)
    return figure
