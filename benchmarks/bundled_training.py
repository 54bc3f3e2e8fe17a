"""The bundled model's whole training beside a torch/transformers run of the same size, data and steps."""

from __future__ import annotations

import json

import numpy as np
import torch

from benchmarks.harness import Figure
from benchmarks.training_step import torch_twin
from graphwright.models.bundled import CONFIG, RECIPE, bundled, pydoc_split
from graphwright.models.open import config_from, create
from graphwright.models.train import Trainer
from graphwright.optim import warmup_cosine


def run() -> list[Figure]:
    train, held_out = pydoc_split()
    model = create(config_from(CONFIG), seed=RECIPE.seed)
    trainer = Trainer(model, train, RECIPE)
    twin = torch_twin(model, "sdpa")
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": RECIPE.weight_decay},
        {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=RECIPE.lr, betas=RECIPE.betas, fused=True)
    losses = []
    for step in range(RECIPE.steps):
        for group in opt.param_groups:
            group["lr"] = warmup_cosine(
                step, peak=RECIPE.lr, warmup=RECIPE.warmup, total=RECIPE.steps, floor=RECIPE.floor
            )
        ids, targets = (torch.from_numpy(a) for a in trainer.batch(step))
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(ids, use_cache=False).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), RECIPE.clip)
        opt.step()
        losses.append(loss.item())
    for key, variable in model.program.weights.items():
        if key in twin.state_dict():
            with model.program.edit("torch's weights") as e:
                e.set_weight(key, twin.state_dict()[key].to(torch.bfloat16).float().numpy())
            assert variable.dtype.name == "float32"
    score = model.perplexity(held_out).bits_per_byte
    facts = json.loads((bundled() / "training.json").read_text())
    figure = Figure(
        "Training the bundled model",
        f"{RECIPE.steps} steps of {RECIPE.batch} x {RECIPE.window} bytes, same initial weights, batches and schedule",
    )
    mine = facts["loss"]
    figure.add(
        "graphwright: held out",
        facts["bits_per_byte"]["held_out"],
        "bits per byte",
        f"loss of the last 50 steps {np.mean(mine[-50:]):.4f}",
    )
    figure.add(
        "torch/transformers: held out",
        score,
        "bits per byte",
        f"loss of the last 50 steps {np.mean(losses[-50:]):.4f}",
    )
    figure.notes.append(
        f"loss over the first 50 steps differs by at most {np.abs(np.asarray(mine[:50]) - losses[:50]).max():.1e}"
    )
    return [figure]
