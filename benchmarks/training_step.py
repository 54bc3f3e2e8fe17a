"""One training step beside torch eager and torch.compile, in float32 and under bfloat16 autocast; losses checked first.

A step is forward, backward, clipping to norm 1 and fused AdamW on a new batch: of the bundled model's shape on bytes of
the corpus, and of a Llama of 6 M parameters on random tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import nn, optim
from graphwright.models.bundled import CONFIG, pydoc_split
from graphwright.models.open import config_from, create

LLAMA = {
    **CONFIG,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "vocab_size": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "the bundled model's shape": (CONFIG, 16, 256),
    "a Llama of 6 layers, 256 wide, 4096 tokens": (LLAMA, 8, 128),
}
PARTS = ("bundled", "llama", "bundled_alone", "llama_alone")
THREADS = torch.get_num_threads()
LR, BETAS, DECAY = 1e-4, (0.9, 0.95), 0.1
Step = Callable[[], float]


def torch_twin(model: Any, implementation: str) -> torch.nn.Module:
    fields = {k: v for k, v in model.config.fields.items() if k not in ("architectures", "model_type", "dtype")}
    twin = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**fields), attn_implementation=implementation
    )
    state = {
        key: torch.from_numpy(v.numpy().copy()) for key, v in model.program.weights.items() if key in twin.state_dict()
    }
    twin.load_state_dict(state, strict=False)
    return twin


def torch_step(twin: torch.nn.Module, batches: Iterator[np.ndarray], low: bool) -> Step:
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def step() -> float:
        rows = torch.from_numpy(next(batches))
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            logits = twin(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        opt.step()
        return loss.item()

    return step


def own_step(model: Any, batches: Iterator[np.ndarray], size: tuple[int, int], low: bool) -> tuple[Step, Any]:
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(size[1]), size))
    compiled = optim.compile_step(
        model.program,
        lambda logits, targets: nn.functional.cross_entropy(logits.float(), targets, dim=-1),
        optim.AdamW(model, LR, BETAS, weight_decay=DECAY, decay_matrices_only=True),
        {"ids": positions, "positions": positions, "targets": positions},
        amp="bfloat16" if low else None,
        clip=1.0,
    )

    def step() -> float:
        rows = next(batches)
        ids, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        return compiled(ids=ids, positions=positions, targets=targets).item()

    return step, compiled


def drawn(vocabulary: int, batch: int, window: int) -> Iterator[np.ndarray]:
    """Rows of window + 1 tokens, the same for everybody: text for bytes, else random."""
    text = np.frombuffer(pydoc_split()[0].encode(), np.uint8)
    for i in count():
        rng = np.random.default_rng(i)
        if vocabulary != 256:
            yield rng.integers(0, vocabulary, (batch, window + 1))
            continue
        starts = rng.integers(0, len(text) - window, batch)
        yield text[starts[:, None] + np.arange(window + 1)].astype(np.int64)


def bundled() -> Figure:
    return measure("the bundled model's shape", THREADS)


def llama() -> Figure:
    return measure("a Llama of 6 layers, 256 wide, 4096 tokens", THREADS)


def bundled_alone() -> Figure:
    return measure("the bundled model's shape", 1)


def llama_alone() -> Figure:
    return measure("a Llama of 6 layers, 256 wide, 4096 tokens", 1)


def measure(name: str, threads: int) -> Figure:
    torch.set_num_threads(threads)
    try:
        return _measured(name, threads)
    finally:
        torch.set_num_threads(THREADS)


def _measured(name: str, threads: int) -> Figure:
    fields, batch, window = MODELS[name]

    def batches() -> Iterator[np.ndarray]:
        return drawn(fields["vocab_size"], batch, window)

    own: dict[str, Step] = {}
    peers: dict[str, Step] = {}
    compiled = None
    for low in (False, True):
        torch._dynamo.reset()
        kind = "bf16 autocast" if low else "f32"
        model = create(config_from(fields))
        peers[f"torch eager, {kind}"] = torch_step(torch_twin(model, "sdpa"), batches(), low)
        fast = torch_twin(model, "sdpa")
        fast.forward = torch.compile(fast.forward)
        peers[f"torch.compile, {kind}"] = torch_step(fast, batches(), low)
        own[f"graphwright, {kind}"], compiled = own_step(model, batches(), (batch, window), low)
    calls = {**own, **peers}
    first = {who: step() for who, step in calls.items()}
    exact = [loss for who, loss in first.items() if who.endswith("f32")]
    spread, off = max(exact) - min(exact), max(abs(loss - exact[0]) for loss in first.values())
    assert spread < 1e-4, first
    assert off < 2e-2, first
    taken = rounds(calls, n=15, warm=2)
    parameters = sum(p.size for p in compiled.optimizer.parameters())
    figure = Figure(
        f"Training step of {name}, {parameters / 1e6:.1f} M parameters, {batch} x {window} tokens",
        f"{threads} thread{'s' * (threads > 1)}, forward to fused AdamW; first losses agree to {spread:.0e} in f32, "
        f"{off:.0e} with bf16",
    )
    tokens = batch * window
    add_rounds(figure, taken, "ms", {who: f"{tokens / np.median(t):,.0f} token/s" for who, t in taken.items()})
    f32, low = (median(taken[who]) for who in own)
    figure.notes.append(f"bf16 autocast takes 1/{f32 / low:.2f} of the time of f32")
    figure.notes.append(f"an operation inserted between two steps costs {1e3 * edit_cost(compiled, own):.0f} ms once")
    return figure


def edit_cost(compiled: Any, own: dict[str, Step]) -> float:
    """Seconds that rebuilding and planning take after an edit in the middle of the model, median of nine."""
    *_, step = own.values()
    p, taken = compiled.source, []
    for _ in range(9):
        step()
        with p.edit("another activation") as e:
            e.insert(p.in_edges("layers.1.mlp.down")[0], "tanh")
        started = perf_counter()
        assert compiled.plan.patched.kind == "patched"
        taken.append(perf_counter() - started)
        step()
        p.undo()
    return median(taken)
