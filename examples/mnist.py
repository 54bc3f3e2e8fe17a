"""MNIST by an MLP and a small convolutional net, from the IDX files in a directory: `train-images-idx3-ubyte`, perhaps
`.gz`, and its three companions.

`python examples/mnist.py --data ~/mnist` trains both from three seeds. `--quick` needs no files: it writes some of that
format from the digits of scikit-learn, drawn larger.
"""

import argparse
import gzip
import struct
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from sklearn.datasets import load_digits

import graphwright as gw
from graphwright import data, nn, optim

NAMES = {split: (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte") for split in ("train", "t10k")}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 10)),
    )


def read(directory: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [N, 1, 28, 28] in 0..1, labels int64 [N]."""
    files = [next(p for p in (directory / name, directory / f"{name}.gz") if p.exists()) for name in NAMES[split]]
    images, labels = map(data.read_idx, files)
    return images[:, None].astype(np.float32) / 255, labels.astype(np.int64)


def write_digits(directory: Path) -> None:
    """The 8 x 8 digits of scikit-learn as files of MNIST's format: each pixel 3 x 3, two pixels of margin."""
    digits = load_digits()
    images = np.pad(np.kron(digits.images, np.ones((3, 3))) * (255 / 16), ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    for split, rows in (("train", order[:1400]), ("t10k", order[1400:])):
        for name, array in zip(NAMES[split], (images[rows], digits.target[rows].astype(np.uint8)), strict=True):
            sizes = struct.pack(f">{array.ndim}I", *array.shape)
            (directory / f"{name}.gz").write_bytes(
                gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
            )


def train(make, directory: Path, epochs: int, seed: int) -> float:
    """Share of the test images that a net trained from a seed gets right."""
    gw.manual_seed(seed)
    net = make()
    loader = data.DataLoader(data.TensorDataset(*read(directory, "train")), 64, shuffle=True, seed=seed, drop_last=True)
    opt = optim.AdamW(net, lr=2e-3)
    total = epochs * len(loader)
    schedule = optim.lr_scheduler.WarmupCosineLR(opt, warmup=total // 10, total=total)

    @gw.compile
    def step(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss

    for _ in range(epochs):
        for x, y in loader:
            step(x, y)
            schedule.step()
    images, labels = read(directory, "t10k")
    with gw.mode("eval"):
        parts = [net(gw.tensor(images[at : at + 500])).numpy().argmax(1) for at in range(0, len(images), 500)]
    return float((np.concatenate(parts) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the four files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="digits of scikit-learn instead, one seed")
    args = parser.parse_args()
    if args.data is None and not args.quick:
        parser.error("--data DIR, or --quick")
    with tempfile.TemporaryDirectory() as made:
        directory = args.data if args.data is not None else Path(made)
        if args.data is None:
            write_digits(directory)
        least = {"mlp": 0.95, "cnn": 0.95} if args.data is None else {"mlp": 0.97, "cnn": 0.98}
        epochs = {"mlp": 8, "cnn": 4} if args.quick else dict.fromkeys(least, args.epochs)
        for make in (mlp, cnn):
            for seed in range(1 if args.quick else args.seeds):
                started = perf_counter()
                right = train(make, directory, epochs[make.__name__], seed)
                print(f"{make.__name__}, seed {seed}: {right:.2%} right, {perf_counter() - started:.1f} s")
                assert right >= least[make.__name__]


if __name__ == "__main__":
    main()
