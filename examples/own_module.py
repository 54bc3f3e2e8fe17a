"""A network of torch, trained in torch, is opened, its channels are pruned, and it goes back into torch.

`python examples/own_module.py` trains a small network with residual blocks on scikit-learn's digits, opens it with
`gw.from_torch`, cuts a quarter of the channels inside its blocks, those with the smallest weights, trains some more
steps here, and runs the result as a torch module.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import graphwright as gw
from graphwright.nn import functional
from graphwright.optim import AdamW


class Block(nn.Module):
    """x + conv(relu(norm(conv x)))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(torch.relu(self.norm(self.conv1(x))))


def network() -> nn.Module:
    blocks = Block(8, 16), Block(8, 16)
    head = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, *head)


def accuracy(logits: np.ndarray, digits: np.ndarray) -> float:
    return float((logits.argmax(1) == digits).mean())


def main(steps: int) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy((digits.images / 16).astype("f4"))[:, None]
    labels = torch.from_numpy(digits.target)
    net, test = network(), slice(1400, None)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(steps):
        rows = torch.randint(0, 1400, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()

    p = gw.from_torch(net, (images[:2],), sizes={"input": ("B", 1, 8, 8)})
    print(p.imported)
    held, answers = images[test].numpy(), labels[test].numpy()
    print(f"as trained in torch: {accuracy(p(input=held)['out'].numpy(), answers):.3f}")

    for block in (1, 2):
        norms = np.abs(p.weights[f"{block}.conv1.weight"].numpy()).sum((1, 2, 3))
        with p.edit(f"a quarter of the channels of block {block}") as e:
            e.cut_units(p.axes()[f"{block}.channels"].units(norms.argsort()[:4].tolist()))
    print(f"after cutting 4 of 16 channels twice: {accuracy(p(input=held)['out'].numpy(), answers):.3f}")

    tuned = AdamW(list(p.parameters()), lr=1e-3)
    for step in range(steps // 3):
        rows = np.random.default_rng(step).integers(0, 1400, 64)
        tuned.zero_grad()
        functional.cross_entropy(p(input=images[rows].numpy())["out"], labels[rows].numpy()).backward()
        tuned.step()
    back = p.as_module()
    with torch.no_grad():
        logits = back(images[test]).numpy()
    print(f"after {steps // 3} more steps, as a torch module: {accuracy(logits, answers):.3f}")
    print(f"{sum(w.numel() for w in net.parameters())} -> {sum(w.numel() for w in back.parameters())} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    main(30 if parser.parse_args().quick else 300)
