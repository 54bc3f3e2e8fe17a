"""Make attention a graph: a window in the bundled model, edges cut by their mass, far edges found by their gradient.

Every step is an edit of the program, so one undo at the end gives the dense model back.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import attention as at
from graphwright.models.bundled import pydoc_split


def bits(model: gw.Model, text: str) -> str:
    return f"{model.perplexity(text).bits_per_byte:.4f} bits per byte"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less text, fewer steps")
    args = parser.parse_args()
    train_text, held_out = pydoc_split()
    held_out = held_out[: 1000 if args.quick else 8000]

    model = gw.open("bundled")
    print(f"dense: {bits(model, held_out)}")
    entries = len(model.program.journal)
    at.sparsify(model, "layers.*.attn", at.causal_full(512, block=16))
    (pattern,) = at.patterns(model).values()
    print(f"as a graph with {len(pattern)} edges: {bits(model, held_out)}")

    tokens = np.asarray(model.tokenizer.encode(train_text, add_special_tokens=False))
    for start in range(0, 512 if args.quick else 4096, 512):
        at.collect(model, {"ids": tokens[None, start : start + 512], "positions": np.arange(512)[None]})
    for density in (0.3, 0.2, 0.1):
        done = pattern.prune(target_density=density)
        print(f"{done.density:5.1%} of the blocks: {bits(model, held_out)}")
    model.program.undo(len(model.program.journal) - entries)
    print(f"undone: {bits(model, held_out)}\n")

    far_edges(steps=4 if args.quick else 12)


def far_edges(steps: int, tokens: int = 64, offset: int = 11) -> None:
    """Find the edges of a task whose keys are outside the window: each query needs the value `offset` tokens before."""
    rng = np.random.default_rng(0)
    pattern = at.sliding_window(tokens, window=4, block=1)
    needed = [(i, i - offset) for i in range(offset, tokens)]
    for _ in range(steps):
        q, k, v = (rng.normal(size=(64, 1, tokens, 16)).astype("f4") for _ in range(3))
        gap = at.attend(q, k, v, pattern).numpy() - np.roll(v, offset, axis=2)
        gap[:, :, :offset] = 0
        done = pattern.step(q, k, v, gap, prune=16)
        held = sum(pattern.has(*pair) for pair in needed)
        print(f"{done}; {held} of {len(needed)} needed ones")
    print(at.sliding_window(tokens, window=4, block=1).diff(pattern))


if __name__ == "__main__":
    main()
