"""Time as an operand: a closed-form continuous-time net (CfC) beside an RNN of equal size that does not see the clock.

Two tasks on 16 events that come at irregular times, answered at each event: the XOR of two bits that are the lengths of
the last two pauses, and the sign that a sine will have at its next reading. `python examples/irregular_time.py` trains
3 seeds of each.
"""

import argparse
from time import perf_counter

import numpy as np

import graphwright as gw
from graphwright import nn, optim

T = 16


def event_xor(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Events after long or short pauses: was exactly one of the last two pauses long? Their values are noise."""
    long = rng.integers(0, 2, (n, T))
    dt = np.where(long, rng.uniform(1.0, 1.5, (n, T)), rng.uniform(0.1, 0.5, (n, T))).astype(np.float32)
    label = np.full((n, T), -100)  # ignored: nothing comes before the first
    label[:, 1:] = long[:, 1:] ^ long[:, :-1]
    return rng.normal(size=(n, T, 1)).astype(np.float32), dt, label


def irregular_sine(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Readings of sin(t + phase), and with each the pause until the next one; will that be above zero?"""
    dt = rng.uniform(0.1, 1.5, (n, T + 1)).astype(np.float32)
    value = np.sin(dt.cumsum(1) + rng.uniform(0, 2 * np.pi, (n, 1))).astype(np.float32)
    label = (value[:, 1:] > 0).astype(np.int64)
    label[:, 0] = -100  # one reading does not tell the way
    return value[:, :-1, None], dt[:, 1:], label


class Net(nn.Module):
    """Recurrent cells and a linear map of each output; the RNN gets no elapsed times."""

    def __init__(self, kind: str) -> None:
        self.timed = kind == "cfc"
        self.cells = nn.CfC(1, 16, backbone_units=20) if self.timed else nn.RNN(1, 38)
        self.head = nn.Linear(16 if self.timed else 38, 2)

    def forward(self, x: gw.Tensor, dt: gw.Tensor) -> gw.Tensor:
        out, _ = self.cells(x, None, dt) if self.timed else self.cells(x)
        return self.head(out)


def accuracy(kind: str, task, seed: int, steps: int) -> tuple[float, int]:
    """Of a net after training, on sequences it has not seen; and its number of parameters."""
    gw.manual_seed(seed)
    net = Net(kind)
    opt = optim.Adam(net, lr=1e-2)
    schedule = optim.lr_scheduler.CosineAnnealingLR(opt, steps)

    @gw.compile
    def step(x: gw.Tensor, dt: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x, dt), y)
        loss.backward()
        optim.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss

    rng = np.random.default_rng(seed)
    for _ in range(steps):
        step(*task(rng, 64))
        schedule.step()
    x, dt, y = task(np.random.default_rng(1000 + seed), 1000)
    with gw.mode("eval"):
        guess = net(gw.tensor(x), gw.tensor(dt)).numpy().argmax(-1)
    return float((guess == y)[y >= 0].mean()), sum(p.size for p in net.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    args = parser.parse_args()
    for task, steps, least in ((event_xor, 300, 0.95), (irregular_sine, 200, 0.9)):
        for seed in range(1 if args.quick else 3):
            started, found = perf_counter(), {}
            for kind in ("cfc", "rnn"):
                found[kind], size = accuracy(kind, task, seed, steps)
                print(f"{task.__name__:<16} seed {seed}  {kind}: {size} parameters, {found[kind]:.1%} right", end="   ")
            print(f"{perf_counter() - started:.1f} s")
            assert found["cfc"] > found["rnn"]
            assert found["cfc"] >= least


if __name__ == "__main__":
    main()
