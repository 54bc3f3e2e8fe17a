"""Data-parallel training that saves its state and resumes, on any number of ranks.

`torchrun --standalone --nproc-per-node 2 examples/data_parallel.py` trains on two processes, each on half of every
batch; `python examples/data_parallel.py` is the same training in one process.
"""

import argparse
from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright import data, distributed, nn, optim

CLASSES = 4


def network() -> gw.Program:
    """A classifier of points, as a program."""
    rng = np.random.default_rng(0)
    b = gw.Builder("classifier")
    x = b.input("x", ("B", 2))
    for name, inputs, outputs in (("first", 2, 32), ("second", 32, 32), ("third", 32, CLASSES)):
        weight = b.param(f"{name}.weight", (rng.normal(size=(outputs, inputs)) / inputs**0.5).astype("float32"))
        x = b.op("linear", x, weight, b.param(f"{name}.bias", np.zeros(outputs, "float32")))
        x = x if name == "third" else b.op("tanh", x)
    b.output(x, "logits")
    return b.build()


def spiral(count: int) -> data.TensorDataset:
    """Points on four arms of a spiral, and the number of the arm of each."""
    rng = np.random.default_rng(1)
    arm, radius = rng.integers(0, CLASSES, count), rng.uniform(0.1, 1, count)
    angle = 2 * np.pi * arm / CLASSES + 3 * radius + rng.normal(size=count) * 0.1
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return data.TensorDataset(points.astype("float32"), arm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 epochs of few points")
    parser.add_argument("--out", default="spiral-training", help="directory of the saved training")
    args = parser.parse_args()
    epochs, count, batch = (2, 480, 48) if args.quick else (40, 4800, 96)

    distributed.setup(timeout=60)  # reads torchrun's variables; without them a world of one
    own = batch // distributed.ranks()
    program, points = network(), spiral(count)
    loader = data.DataLoader(points, own, shuffle=True, drop_last=True)  # this rank's share of each epoch
    optimizer = optim.AdamW(program, lr=1e-2)
    step = gw.compile_step(
        program,
        lambda logits, targets: nn.functional.cross_entropy(logits, targets, dim=-1),
        optimizer,
        {"x": np.zeros((own, 2), "float32"), "targets": np.zeros(own, "int64")},
    )
    distributed.data_parallel(step, shard_optimizer=True)

    state = Path(args.out)
    if (state / "train.json").is_file():
        gw.load_state(state, program, optimizer, loader=loader, compiled=step)
    losses = []
    while loader.epoch < epochs:
        losses += [step(x=x, targets=targets).item() for x, targets in loader]
        gw.save_state(state, program, optimizer, loader=loader, step=loader.epoch, compiled=step)

    x, targets = points.batch(np.arange(count))
    right = (program(x=x)["logits"].numpy().argmax(-1) == targets.numpy()).mean()
    if distributed.is_main():
        print(f"{distributed.ranks()} ranks, {len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"{100 * right:.1f} % of the points are classified correctly")


if __name__ == "__main__":
    main()
