"""Peak memory of a training step of the bundled model's shape beside torch eager, each in a process of its own."""

from __future__ import annotations

from benchmarks.harness import Figure, peak_rss_mib

COMMON = """
from graphwright.models.bundled import CONFIG
"""
OURS = (
    COMMON
    + """
import torch
from graphwright.models.bundled import pydoc_split
from graphwright.models.open import config_from, create
from graphwright.models.train import TrainOptions, Trainer
model = create(config_from(CONFIG))
trainer = Trainer(model, pydoc_split()[0], TrainOptions(steps=3, batch=16, window=256))
from graphwright.array.vm.machine import build
build()  # loaded code is no memory of the step, as torch's is none of the peers'
out["before_mib"] = peak_mib()
trainer.run()
plan = trainer.step.plan
out["arena_mib"] = plan.arena_bytes / 2**20
out["bound_mib"] = plan.lower_bound / 2**20
"""
)
TORCH = (
    COMMON
    + """
import torch, transformers
fields = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "dtype")}
model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**fields), attn_implementation="IMPL")
opt = torch.optim.AdamW(model.parameters(), fused=True)
ids = torch.randint(0, 256, (16, 257))
out["before_mib"] = peak_mib()
for _ in range(3):
    opt.zero_grad()
    logits = model(ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
"""
)


def run() -> list[Figure]:
    figure = Figure(
        "Peak memory of a training step",
        "1.6 M parameters, 16 x 256 bytes, f32; growth of peak resident memory over the loaded process",
    )
    ours = peak_rss_mib(OURS)
    figure.add(
        "graphwright",
        ours["peak_mib"] - ours["before_mib"],
        "MiB",
        f"arena {ours['arena_mib']:.0f} MiB, liveness bound {ours['bound_mib']:.0f} MiB",
    )
    for name in ("eager", "sdpa"):
        peer = peak_rss_mib(TORCH.replace("IMPL", name))
        figure.add(f"torch eager, {name} attention", peer["peak_mib"] - peer["before_mib"], "MiB")
    return [figure]
