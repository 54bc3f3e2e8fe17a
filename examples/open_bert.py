"""A BERT of transformers: trained on masked bytes, opened, heads pruned, exported and loaded again.

`python examples/open_bert.py` trains a small `BertForMaskedLM` for a moment on the texts of `pydoc_data.topics`, whose
bytes are its tokens (it learns little more than how frequent they are), saves it, opens the directory, prunes attention
heads, whose readers are refitted by least squares, and writes a directory that transformers loads.
"""

import argparse

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

import graphwright as gw
from graphwright.metrics import nll
from graphwright.models.bundled import pydoc_split

MASK, WIDTH = 256, 32
CONFIG = BertConfig(vocab_size=257, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96,
                    max_position_embeddings=64, pad_token_id=0, initializer_range=0.1)  # fmt: skip


def windows(text: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of bytes of which each seventh is masked at random, and the bytes."""
    rng, tokens = np.random.default_rng(seed), np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    rows = tokens[rng.integers(0, len(tokens) - WIDTH, count)[:, None] + np.arange(WIDTH)]
    return np.where(rng.random(rows.shape) < 1 / 7, MASK, rows), rows


def trained(text: str, steps: int) -> BertForMaskedLM:
    torch.manual_seed(0)
    net = BertForMaskedLM(CONFIG)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(steps):
        masked, rows = map(torch.from_numpy, windows(text, 32, step))
        optimizer.zero_grad()
        net(input_ids=masked, labels=rows.where(masked == MASK, -100)).loss.backward()
        optimizer.step()
    return net.eval()


def main(steps: int, out: str) -> None:
    torch.set_num_threads(1)  # as fast, for a network of this size
    text, held_out = pydoc_split()
    trained(text, steps).save_pretrained(f"{out}/bert")

    model = gw.open(f"{out}/bert", tokenizer=False)
    masked, rows = windows(held_out, 256, 1)

    def nats(logits: np.ndarray) -> float:
        return float(nll(logits, rows)[masked == MASK].mean())

    print(f"as trained: {nats(model(input_ids=masked)['logits']):.4f} nats per masked byte")
    batches = [{"input_ids": windows(text, 32, seed)[0]} for seed in range(4)]  # attention_mask is ones by default
    print(model.prune(0.1, batches, kinds=("heads",), recipe="units", timed=False))
    pruned = model(input_ids=masked)["logits"]
    print(f"fewer heads: {nats(pruned):.4f}")

    receipt = model.export(f"{out}/pruned", check="none", timed=False)
    again = BertForMaskedLM.from_pretrained(f"{out}/pruned").eval()
    with torch.no_grad():
        logits = again(input_ids=torch.from_numpy(masked)).logits.numpy()
    print(f"export level {receipt.level}; transformers: {nats(logits):.4f}, "
          f"logits differ by {np.abs(logits - pruned).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="open_bert", help="directory of both models")
    parser.add_argument("--quick", action="store_true", help="fewer steps of training")
    args = parser.parse_args()
    main(20 if args.quick else 100, args.out)
