"""Associative recall: a learned threshold finds the one block of the past that holds the answer.

64 of the first 104 tokens each pair a key with one of 16 values; the last 8 of 128 tokens ask for the values of some of
the keys, all of them outside the window of 16 tokens. `python examples/associative_recall.py` trains one layer of two
heads four times: by a window alone, by native sparse attention with a threshold or with the 3 best blocks, and dense.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import attention as at
from graphwright import nn
from graphwright.nn import functional
from graphwright.optim import Adam

TOKENS, KEYS, VALUES, ASKED, WINDOW, BLOCK = 128, 64, 16, 8, 16, 8
DIM, HEADS, BATCH = 64, 2, 32
MODES = ("window", "tau", "topn", "dense")


def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens int64 [B, T, 2] (key, value: 0 for none, VALUES + 1 asks), and the answers int64 [B, ASKED]."""
    tokens, answers = np.zeros((BATCH, TOKENS, 2), np.int64), np.zeros((BATCH, ASKED), np.int64)
    for row in range(BATCH):
        indices = rng.permutation(TOKENS - ASKED - WINDOW)[:KEYS]
        keys, values = rng.permutation(KEYS) + 1, rng.integers(0, VALUES, KEYS)
        tokens[row, indices, 0], tokens[row, indices, 1] = keys, values + 1
        asked = rng.permutation(KEYS)[:ASKED]
        tokens[row, -ASKED:, 0], tokens[row, -ASKED:, 1] = keys[asked], VALUES + 1
        answers[row] = values[asked]
    return tokens, answers


class Recall(nn.Module):
    """head(norm(x + attention(norm x))) of the last tokens."""

    def __init__(self, mode: str, seed: int, qk_gain: float = 2.0) -> None:
        self.key = nn.Embedding(KEYS + 1, DIM, name="key.", seed=seed)
        self.value = nn.Embedding(VALUES + 2, DIM, name="value.", seed=seed)
        self.norm, self.last = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mode = mode
        if mode in ("tau", "topn"):
            self.attn = at.NativeSparse(
                DIM, HEADS, select=mode, n=3, summary=8, stride=8, block=BLOCK, window=WINDOW, qk_gain=qk_gain,
                name="attn.", seed=seed,
            )  # fmt: skip
        else:
            window = WINDOW if mode == "window" else None
            rope = nn.RotaryEmbedding(DIM // HEADS)
            self.attn = nn.MultiHeadAttention(DIM, HEADS, window=window, rope=rope, name="attn.", seed=seed)
        self.head = nn.Linear(DIM, VALUES, name="head.", seed=seed)

    def forward(self, tokens: gw.Tensor) -> dict[str, gw.Tensor]:
        """Map tokens [B, T, 2] to logits [B, ASKED, VALUES], an auxiliary loss, and the share of candidates taken."""
        x = self.key(tokens[:, :, 0]) + self.value(tokens[:, :, 1])
        if isinstance(self.attn, at.NativeSparse):
            made = self.attn.attend(self.norm(x))
            y, aux, taken = made.out, made.aux, made.choice.taken[:, :, -ASKED:].to("float32").mean()
            share = taken / made.choice.candidates[-ASKED:].to("float32").mean()
        else:
            y, aux, share = self.attn(self.norm(x)), gw.zeros(()), gw.ones(())
        return {"logits": self.head(self.last((x + y)[:, -ASKED:])), "aux": aux, "share": share}


def loss(logits: gw.Tensor, aux: gw.Tensor, answers: gw.Tensor) -> gw.Tensor:
    return functional.cross_entropy(logits.reshape(-1, VALUES), answers.reshape(-1)) + aux


def trained(mode: str, steps: int, seed: int = 0, qk_gain: float = 2.0, lr: float = 3e-3) -> tuple[float, float]:
    """Train in a compiled step; return accuracy and share of the candidates taken, over 8 further batches."""
    rng, model = np.random.default_rng(seed), Recall(mode, seed, qk_gain)
    tokens, answers = batch(rng)
    program, opt = gw.trace(model, gw.tensor(tokens)), Adam(model.parameters(), lr=lr)
    step = gw.compile_step(program, loss, opt, {"tokens": tokens, "answers": answers})
    for _ in range(steps):
        tokens, answers = batch(rng)
        step(tokens=tokens, answers=answers)
    right, shares = [], []
    for _ in range(8):
        tokens, answers = batch(rng)
        out = program.run({"tokens": tokens}, keep="outputs")
        right.append((out["logits"].to_numpy().argmax(2) == answers).mean())
        shares.append(float(out["share"].to_numpy()))
    return float(np.mean(right)), float(np.mean(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 steps")
    args = parser.parse_args()
    print(f"{'mode':<8}{'accuracy':>10}{'candidates taken':>20}")
    for mode in MODES:
        accuracy, share = trained(mode, 2 if args.quick else args.steps, args.seed)
        taken = f"{share:.0%}" if mode in ("tau", "topn") else "-"
        print(f"{mode:<8}{accuracy:>10.3f}{taken:>20}")


if __name__ == "__main__":
    main()
