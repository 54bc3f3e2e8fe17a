"""A small decoder learns a rule of grids from few tasks, by teacher forcing and from its own prefixes.

`python examples/on_policy.py --kind flip` trains both from the same weights on the same batches, and prints exposure
gap and exact match. `--out FILE` writes a drawing of a held-out task with the second model's answer.
"""

import argparse
from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright import data, optim
from graphwright import lifecycle as lf
from graphwright.data.grid_tasks import END, PAD, VOCABULARY
from graphwright.data.grids import KINDS
from graphwright.models.open import config_from, create

BATCH = 16


def decoder(hidden: int) -> gw.Model:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    return create(config_from(fields), seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="recolour")
    parser.add_argument("--tasks", type=int, default=48, help="number of different training tasks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="file for a drawing")
    parser.add_argument("--quick", action="store_true", help="grids of 3 x 3, 90 steps")
    args = parser.parse_args()
    side, steps, hidden = (3, 90, 32) if args.quick else (4, args.steps, 64)

    tasks = data.grids(args.kind, side, pairs=0, seed=1, fixed=True, count=args.tasks)
    held_out = data.grids(args.kind, side, pairs=0, seed=2, fixed=True)
    order = np.random.default_rng(0).integers(0, args.tasks, steps * BATCH)
    print(f"{args.kind}: {args.tasks} tasks of {side} x {side}, {steps} steps of {BATCH}\n{held_out[0]}")

    for name, eta in (("teacher forcing", 0.0), ("own prefixes", lf.ramp(0.0, 0.5, steps // 2))):
        model = decoder(hidden)
        optimizer = optim.AdamW(model, lr=3e-3, weight_decay=0.01)
        policy = lf.OnPolicy(model, optimizer, eta, clip=1.0)
        for batch in data.DataLoader(data.Subset(tasks, order), BATCH):
            policy.step(batch)
        print(f"\n{name}\n{lf.exposure_gap(model, held_out)}")

    found = lf.exact_match(model, held_out, count=16, voting=False)
    print(f"\n{found}")
    if args.out is not None:
        guess = found.answers[0][0] if found.answers[0] else None
        args.out.write_text(held_out[0].to_svg(guess), encoding="utf-8")


if __name__ == "__main__":
    main()
