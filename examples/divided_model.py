"""Train a language model that is divided among ranks, save it by all of them, and open what was saved.

`torchrun --standalone --nproc-per-node 2 examples/divided_model.py` divides the bundled model among two processes; with
`--nproc-per-node 4` and `--ranks 2` two copies of it are divided among two processes each. `python
examples/divided_model.py` is the same training in one process.
"""

import argparse
from pydoc_data.topics import topics

import numpy as np

import graphwright as gw
from graphwright import data, distributed, nn, optim

WINDOW, BATCH = 48, 8


def windows(model: gw.Model, count: int) -> data.TensorDataset:
    """Windows of tokens of Python's reference, with the positions and the next tokens."""
    text = " ".join(topics[name] for name in ("assignment", "class", "for", "function"))
    ids = np.asarray(model.tokenizer.encode(text), np.int64)
    starts = np.random.default_rng(0).integers(0, len(ids) - WINDOW, count)
    rows = ids[starts[:, None] + np.arange(WINDOW + 1)]
    return data.TensorDataset(rows[:, :-1], np.tile(np.arange(WINDOW), (count, 1)), rows[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 steps")
    parser.add_argument("--ranks", type=int, help="ranks of a copy of the model (default: all)")
    parser.add_argument("--out", default="divided-model", help="directory of the trained model")
    args = parser.parse_args()

    distributed.setup(timeout=60)
    model = gw.open("bundled", dtype="float32")
    p = model.program
    with p.edit("divide among the ranks") as e:
        division = distributed.tensor_parallel(e, p.select("layers.*"), ranks=args.ranks)
    loader = data.DataLoader(windows(model, 32 if args.quick else 800), BATCH, shuffle=True)  # of this copy
    shape = np.zeros((BATCH, WINDOW), np.int64)
    step = gw.compile_step(
        p,
        lambda logits, targets: nn.functional.cross_entropy(logits, targets, dim=-1),
        optim.AdamW(p, lr=1e-3),
        {"ids": shape, "positions": shape, "targets": shape},
        clip=1.0,
    )
    distributed.data_parallel(step)
    losses = [step(ids=i, positions=at, targets=t).item() for i, at, t in loader]
    if distributed.is_main():
        print(division)
        print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    distributed.save(model, args.out, overwrite=True)  # each rank writes a shard
    if distributed.is_main():
        saved = gw.open(args.out)
        print(f"saved in {args.out}; it continues: {saved.generate('An assignment', max_new_tokens=12)}")


if __name__ == "__main__":
    main()
