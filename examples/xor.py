"""XOR by a 2-4-2 tanh net and Adam, from many seeds: each is solved within 100 epochs.

`python examples/xor.py` tries 50 seeds; a training step is one plan, planned once per seed.
"""

import argparse
from time import perf_counter

import numpy as np

import graphwright as gw
from graphwright import nn, optim

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
Y = np.array([0, 1, 1, 0])


def solve(seed: int, epochs: int = 100) -> tuple[bool, float]:
    """Train from a seed; whether all four rows come out right, and the last loss."""
    gw.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = optim.Adam(net, lr=0.1)

    @gw.compile
    def step(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss

    loss = 0.0
    for _ in range(epochs):
        loss = step(X, Y).item()
    with gw.mode("eval"):
        guess = net(gw.tensor(X)).numpy().argmax(1)
    return bool((guess == Y).all()), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="changes nothing: 50 seeds take seconds")
    seeds = parser.parse_args().seeds
    started = perf_counter()
    results = [solve(seed) for seed in range(seeds)]
    solved = sum(right for right, _ in results)
    worst = max(loss for _, loss in results)
    print(f"{solved} of {seeds} seeds solved in 100 epochs, largest loss {worst:.4f}, {perf_counter() - started:.1f} s")
    assert solved == seeds


if __name__ == "__main__":
    main()
