"""A training step, run eagerly and as one plan: equal bits, and the time of both.

`python examples/train_step.py` takes 50 steps of a classifier of six gated blocks.
"""

import argparse
from statistics import median
from time import perf_counter

import numpy as np

import graphwright as gw
from graphwright import nn, optim


class Block(nn.Module):
    """A residual MLP with a norm in front and a gate."""

    def __init__(self, width: int) -> None:
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class Classifier(nn.Module):
    def __init__(self, width: int, blocks: int, classes: int) -> None:
        self.embed = nn.Embedding(classes, width)
        self.blocks = [Block(width) for _ in range(blocks)]
        self.head = nn.Linear(width, classes)

    def forward(self, ids: gw.Tensor) -> gw.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def training_step(net: nn.Module, opt: optim.AdamW):
    def step(ids: gw.Tensor, targets: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(ids), targets, dim=-1)
        loss.backward()
        optim.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 steps of a small net")
    args = parser.parse_args()
    width, blocks, steps = (16, 2, 4) if args.quick else (64, 6, 50)

    steppers, nets = {}, {}
    for how in ("eager", "compiled"):
        gw.manual_seed(0)  # equal initial weights
        nets[how] = Classifier(width, blocks, classes=64)
        step = training_step(nets[how], optim.AdamW(nets[how], lr=3e-3))
        steppers[how] = gw.compile(step, deterministic=True) if how == "compiled" else step

    rng = np.random.default_rng(0)
    losses: dict[str, list[float]] = {how: [] for how in steppers}
    taken: dict[str, list[float]] = {how: [] for how in steppers}
    for _ in range(steps):
        ids = rng.integers(0, 64, (8, 16))
        targets = (3 * ids + 1) % 64
        for how, run in steppers.items():
            started = perf_counter()
            losses[how].append(run(ids, targets).item())
            taken[how].append((perf_counter() - started) * 1e3)

    assert losses["eager"] == losses["compiled"], "the same bits at every step"
    for (name, a), (_, b) in zip(nets["eager"].named_parameters(), nets["compiled"].named_parameters(), strict=True):
        assert np.array_equal(a.numpy(), b.numpy()), name
    print(f"{steps} steps, loss {losses['eager'][0]:.4f} -> {losses['eager'][-1]:.4f}, equal bit for bit")
    for how, ms in taken.items():
        print(f"{how:<10}{median(ms[1:]):>8.2f} ms per step (median), first step {ms[0]:.1f} ms")
    print(steppers["compiled"].plan(ids, targets))


if __name__ == "__main__":
    main()
