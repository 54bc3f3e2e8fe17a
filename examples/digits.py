"""Handwritten digits (8 x 8, from scikit-learn) by an MLP or a small convolutional net: data loader, schedule, AdamW,
a state saved half-way and continued.

`python examples/digits.py --net cnn` trains the convolutional one.
"""

import argparse
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from sklearn.datasets import load_digits

import graphwright as gw
from graphwright import data, nn, optim


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Training:
    """A net and all that its training carries from step to step."""

    def __init__(self, make, images: np.ndarray, labels: np.ndarray, epochs: int) -> None:
        gw.manual_seed(0)
        self.net = make()
        self.loader = data.DataLoader(data.TensorDataset(images, labels), 64, shuffle=True, drop_last=True)
        self.opt = optim.AdamW(self.net, lr=1e-2)
        total = epochs * len(self.loader)
        self.schedule = optim.lr_scheduler.WarmupCosineLR(self.opt, warmup=total // 10, total=total)
        self.step = gw.compile(self._step)

    def _step(self, x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        self.opt.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.opt.step()
        return loss

    def epoch(self) -> float:
        """One pass over the data; the mean loss."""
        losses = []
        for x, y in self.loader:
            losses.append(self.step(x, y).item())
            self.schedule.step()
        return float(np.mean(losses))

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        with gw.mode("eval"):
            return float((self.net(gw.tensor(images)).numpy().argmax(1) == labels).mean())

    def parts(self) -> dict:
        return {"model": self.net, "optimizer": self.opt, "scheduler": self.schedule, "loader": self.loader}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="both nets, 12 epochs")
    args = parser.parse_args()
    epochs = 12 if args.quick else args.epochs

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, held = order[:1400], order[1400:]
    for name in ("mlp", "cnn") if args.quick else (args.net,):
        make = {"mlp": mlp, "cnn": cnn}[name]
        started = perf_counter()
        first = Training(make, images[train], digits.target[train], epochs)
        losses = [first.epoch() for _ in range(epochs // 2)]
        with tempfile.TemporaryDirectory() as directory:
            gw.save_state(Path(directory) / "state", **first.parts(), step=epochs // 2)
            second = Training(make, images[train], digits.target[train], epochs)
            done = gw.load_state(Path(directory) / "state", **second.parts())
        losses += [second.epoch() for _ in range(done, epochs)]
        right = second.accuracy(images[held], digits.target[held])
        size = sum(p.numel() for p in second.net.parameters())
        print(
            f"{name}: {size} parameters, loss {losses[0]:.3f} -> {losses[-1]:.4f}, "
            f"{right:.1%} of {len(held)} held-out digits right, {perf_counter() - started:.1f} s"
        )
        assert right >= 0.95


if __name__ == "__main__":
    main()
