"""A vision transformer of transformers: trained on digits, opened, pruned, exported and loaded again.

`python examples/open_vit.py` trains a small `ViTForImageClassification` on scikit-learn's digits, saves it, opens the
directory, prunes neurons by 250 training images, removes the attention head that matters least in each layer, and
writes a directory that transformers loads.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import graphwright as gw
from graphwright import surgery as sg

CONFIG = ViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
                   num_attention_heads=4, intermediate_size=128, num_labels=10)  # fmt: skip


def trained(images: torch.Tensor, labels: torch.Tensor, steps: int) -> ViTForImageClassification:
    torch.manual_seed(0)
    net = ViTForImageClassification(CONFIG)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
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
    images = torch.from_numpy((digits.images / 8 - 1).astype("f4"))[:, None]
    labels = torch.from_numpy(digits.target)
    trained(images[:1400], labels[:1400], steps).save_pretrained(f"{out}/vit")

    model = gw.open(f"{out}/vit", tokenizer=False)
    print(model.inspect().text(depth=1))
    test, answers = images[1400:].numpy(), labels[1400:].numpy()
    print(f"as trained: {accuracy(model(pixel_values=test)['logits'], answers):.3f} of the held-out digits")

    data = sg.Calibration({"pixel_values": images[:333].numpy()})  # 250 to learn from, 83 held out
    print(model.prune(0.25, data, round_to=8, timed=False))
    print(f"fewer neurons: {accuracy(model(pixel_values=test)['logits'], answers):.3f}")
    with model.edit("the least head of each layer") as e:
        for group in [g for g in model.program.axes().values() if "heads" in g.kinds]:
            e.cut_units(group.units([int(sg.scores(group, data, "obs").argmin())]))
    pruned = model(pixel_values=test)["logits"]
    print(f"fewer heads: {accuracy(pruned, answers):.3f}")

    receipt = model.export(f"{out}/pruned", check="none", timed=False)
    again = ViTForImageClassification.from_pretrained(f"{out}/pruned").eval()
    with torch.no_grad():
        logits = again(pixel_values=images[1400:]).logits.numpy()
    print(f"export level {receipt.level}; transformers: {accuracy(logits, answers):.3f}, "
          f"logits differ by {np.abs(logits - pruned).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="open_vit", help="directory of both models")
    parser.add_argument("--quick", action="store_true", help="fewer steps of training")
    args = parser.parse_args()
    main(40 if args.quick else 300, args.out)
