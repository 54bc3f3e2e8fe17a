"""Fewer experts: bits per byte on held-out text by score, share and seed, of a small mixture of experts.

A Mixtral of bytes, two layers of eight experts of which a byte uses two, is trained on the bundled text, once per seed.
Each score then cuts a quarter and half of its experts, the same number in each layer or where it costs least, without
any training after it; `random` is the mean of three draws. Scores see learning windows alone.
"""

from __future__ import annotations

from math import log
from statistics import mean

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import experts as ex
from graphwright.experts.scores import SCORES
from graphwright.models.bundled import pydoc_split
from graphwright.models.open import config_from, create
from graphwright.models.train import Trainer, TrainOptions
from graphwright.surgery import Calibration
from graphwright.surgery.measure import quality

SEEDS, STEPS, EXPERTS, TOKENS, CONTEXT = 5, 400, 8, 8192, 128
SHARES, RANDOM = (0.25, 0.5), 3
FIELDS = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 1024, "sliding_window": None,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "initializer_range": 0.05, "tie_word_embeddings": False,
}  # fmt: skip


def trained(seed: int) -> gw.Model:
    """A model after `STEPS` steps on the training half of the bundled text."""
    model = create(config_from(FIELDS), seed=seed)
    options = TrainOptions(steps=STEPS, batch=16, window=CONTEXT, lr=3e-3, warmup=20, seed=seed)
    Trainer(model, pydoc_split()[0], options).run()
    return model


def run() -> list[Figure]:
    """Train, cut and measure for each seed."""
    found: dict[tuple[str, float, str], list[float]] = {}
    base, shares = [], []
    for seed in range(SEEDS):
        model = trained(seed)
        learn, held = pydoc_split()
        data = Calibration(learn, TOKENS, CONTEXT, seed, held_out=held, tokenizer=model.tokenizer)
        base.append(bits(model, data))
        use = ex.usage(model, data)
        shares.append(max(u.max_load for u in use.layers.values()))
        for share in SHARES:
            for per_layer in (True, False):
                for by in SCORES:
                    draws = range(RANDOM) if by == "random" else (0,)
                    value = mean(cut(model, data, share, by, per_layer, 1, draw) for draw in draws)
                    found.setdefault((by, share, "even" if per_layer else "uneven"), []).append(value)
                    if by == "effect":
                        again = cut(model, data, share, by, per_layer, int(share * EXPERTS), 0)
                        key = ("effect, measured after each cut", share, "even" if per_layer else "uneven")
                        found.setdefault(key, []).append(again)
            with_model = model.program.fork()
            other = model.with_program(with_model)
            ex.merge_similar(other, share, data=data)
            found.setdefault(("merged by similar results", share, "even"), []).append(bits(other, data))
    text = f"{SEEDS} seeds, {STEPS} steps, {EXPERTS} experts a layer, k 2; scores from {TOKENS} tokens; no healing"
    figure = Figure("experts cut from a small mixture: bits per byte on held-out text", text)
    figure.add("whole", float(np.mean(base)), "bits/byte", spread(base), seeds=base)
    for share in SHARES:
        for way in ("even", "uneven"):
            rows = {by: values for (by, s, w), values in found.items() if s == share and w == way}
            for by, values in sorted(rows.items(), key=lambda row: float(np.mean(row[1]))):
                figure.add(
                    f"{share:.0%} {way}: {by}", float(np.mean(values)), "bits/byte", spread(values), seeds=values
                )
    figure.notes.append(f"largest load of an expert {np.mean(shares):.2f} of equal shares")
    return [figure]


def cut(model: gw.Model, data: Calibration, share: float, by: str, per_layer: bool, rounds: int, seed: int) -> float:
    """Bits per byte after a cut, on a fork."""
    other = model.with_program(model.program.fork())
    ex.prune(other, share, by=by, per_layer=per_layer, rounds=rounds, data=data, seed=seed)
    return bits(other, data)


def bits(model: gw.Model, data: Calibration) -> float:
    """Bits per byte on the held-out windows."""
    return quality(model.program, data)["nats"] / log(2)


def spread(values: list[float]) -> str:
    """Least and largest value over the seeds."""
    return f"{min(values):.3f} to {max(values):.3f}"
