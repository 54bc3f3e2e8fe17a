"""Time as an input: a closed-form continuous-time net (CfC) compared with an RNN of equal size without times.

Task 1: predict the next sample of a sine at irregular times. Task 2: predict the parity of bits given as runs, for 4
bits, then 6, then 8. `python examples/irregular_time.py` trains 3 seeds of each.
"""

import argparse
from time import perf_counter

import numpy as np

import graphwright as gw
from graphwright import nn, optim
from graphwright.evolve import tasks

F = nn.functional


class Net(nn.Module):
    """Recurrent cells and a linear map of each output; elapsed times go to the CfC, and to others called timed."""

    def __init__(self, kind: str, outputs: int) -> None:
        self.kind, self.seen = kind, 2 if kind.endswith("timed") else 1
        width = {"cfc": 32, "gru": 48, "rnn": 84}[kind[:3]]  # of about equal size
        if kind == "cfc":
            self.cells = nn.CfC(1, width, backbone_units=48)
        else:
            self.cells = {"gru": nn.GRU, "rnn": nn.RNN}[kind[:3]](self.seen, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        value, time = x[:, :, : self.seen], x[:, :, 1]
        out, _ = self.cells(value, None, time) if self.kind == "cfc" else self.cells(value)
        return self.head(out)


def size(net: Net) -> int:
    return sum(p.numel() for p in net.parameters())


def sine(kind: str, seed: int, steps: int = 400) -> tuple[float, int]:
    """Mean squared error on sequences it has not seen, and the number of parameters."""
    gw.manual_seed(seed)
    net, part = Net(kind, 1), tasks.irregular_sine(8000, seed=seed).train
    opt = optim.Adam(net, lr=5e-3)

    def lost(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        return F.mse_loss(net(x)[:, 4:], y[:, 4:])  # four readings to find the phase

    @gw.compile
    def step(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = lost(x, y)
        loss.backward()
        optim.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss

    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.integers(0, len(part.x), 64)
        step(part.x[rows], part.y[rows])
    unseen = tasks.irregular_sine(500, seed=1000 + seed).train
    return lost(gw.tensor(unseen.x), gw.tensor(unseen.y)).item(), size(net)


def parity(kind: str, seed: int, most: int = 1000, bits: tuple[int, ...] = (4, 6, 8)) -> tuple[float, int]:
    """Accuracy on the longest strings, of those it has not learnt from, and the number of parameters."""
    gw.manual_seed(seed)
    net, rng = Net(kind, 2), np.random.default_rng(seed)
    opt = optim.AdamW(net, lr=5e-3)

    @gw.compile
    def step(x: gw.Tensor, end: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy((net(x) * end).sum(1), y)
        loss.backward()
        optim.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss

    def arrays(bits: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        part = tasks.event_xor(bits, count, seed).train
        return part.x, part.counts[..., None], part.y[:, 0, 0].astype(np.int64)

    def right(x: np.ndarray, end: np.ndarray, y: np.ndarray) -> float:
        return float(((net(gw.tensor(x)).numpy() * end).sum(1).argmax(1) == y).mean())

    for length in bits:  # longer strings when the shorter ones are known
        learnt, held = arrays(length, 10_000, seed), arrays(length, 1000, 500 + seed)
        for i in range(most):
            rows = rng.integers(0, len(learnt[0]), 64)
            step(*(part[rows] for part in learnt))
            if i % 50 == 49 and right(*held) >= 0.97:
                break
    return right(*arrays(bits[-1], 2000, 1000 + seed)), size(net)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    args = parser.parse_args()
    for seed in range(1 if args.quick else 3):
        began = perf_counter()
        (cfc, many), (rnn, few) = sine("cfc", seed), sine("rnn", seed)
        print(f"sine, seed {seed}: error of the CfC {cfc:.4f} ({many} parameters), of the RNN {rnn:.4f} ({few})")
        assert cfc <= 0.01
        assert cfc <= rnn / 10
        (cfc, _), (rnn, _) = parity("cfc", seed), parity("rnn", seed, 100)
        print(f"runs of 8 bits, seed {seed}: {cfc:.1%} right, the RNN {rnn:.1%}; {perf_counter() - began:.0f} s")
        assert cfc >= 0.95
        assert cfc > rnn


if __name__ == "__main__":
    main()
