"""A ResNet of transformers: trained on digits, opened, its channels pruned, exported and loaded again.

`python examples/open_resnet.py` trains a small `ResNetForImageClassification` on scikit-learn's digits, saves it, opens
the directory, removes a third of the parameters as channels between convolutions, whose readers are refitted by least
squares, and writes a directory that transformers loads.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification

import graphwright as gw

CONFIG = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
                      num_labels=10)  # fmt: skip


def trained(images: torch.Tensor, labels: torch.Tensor, steps: int) -> ResNetForImageClassification:
    torch.manual_seed(0)
    net = ResNetForImageClassification(CONFIG).train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(steps):
        rows = torch.randint(0, len(images), (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(pixel_values=images[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
    return net.eval()


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float((logits.argmax(-1) == labels).mean())


def main(steps: int, out: str) -> None:
    torch.set_num_threads(1)  # as fast, for a network of this size
    digits = load_digits()
    wide = digits.images.repeat(4, axis=1).repeat(4, axis=2)  # the first layers divide height and width by 4
    images = torch.from_numpy((wide / 8 - 1).astype("f4"))[:, None]
    labels = torch.from_numpy(digits.target)
    trained(images[:1400], labels[:1400], steps).save_pretrained(f"{out}/resnet")

    model = gw.open(f"{out}/resnet", tokenizer=False)
    test, answers = images[1400:].numpy(), labels[1400:].numpy()
    print(model.diagnose(inputs={"pixel_values": test[:64]}))
    print(f"as trained: {accuracy(model(pixel_values=test)['logits'], answers):.3f} of the held-out digits")

    print(model.prune(0.3, images[:200].numpy(), round_to=4, recipe="units", timed=False))  # the only input
    pruned = model(pixel_values=test)["logits"]
    print(f"fewer channels: {accuracy(pruned, answers):.3f}")

    receipt = model.export(f"{out}/pruned", check="none", timed=False)
    again = ResNetForImageClassification.from_pretrained(f"{out}/pruned").eval()
    with torch.no_grad():
        logits = again(pixel_values=images[1400:]).logits.numpy()
    print(f"export level {receipt.level}; transformers: {accuracy(logits, answers):.3f}, "
          f"logits differ by {np.abs(logits - pruned).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="open_resnet", help="directory of both models")
    parser.add_argument("--quick", action="store_true", help="fewer steps of training")
    args = parser.parse_args()
    main(20 if args.quick else 100, args.out)
