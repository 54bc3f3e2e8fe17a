"""Give a model a gated skip, train it, export it for transformers, and verify the export.

The skip is y += sigmoid(g) * (W x), around one block. W starts at zero, so nothing changes until it is trained.
`python examples/skip_and_export.py --out skipped` needs the extra hf for the check.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright.models.bundled import pydoc_split
from graphwright.models.export.verify import verify
from graphwright.models.train import Trainer, TrainOptions


def add_gated_skip(p: gw.Program, source: str, target: str, name: str) -> None:
    """One edit: a projection, a gate per channel, and an edge into the junction."""
    width = p.spec(source).shape[-1]
    with p.edit(f"gated skip from {source} to {target}", tool="skip_and_export.py") as e:
        matrix = e.param(f"{name}.weight", np.zeros((width, width), np.float32))
        gate = e.param(f"{name}.gate", np.full(width, -1.0, np.float32))
        projected = e.add("linear", source, matrix, name=f"{name}.projected")
        opened = e.add("sigmoid", gate, name=f"{name}.opened")
        e.connect(e.add("mul", projected, opened, name=name), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to export to; a temporary directory by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="2 small steps, and no proof by transformers")
    args = parser.parse_args()
    train_text, held_out = pydoc_split()
    held_out = held_out[: 600 if args.quick else 8000]

    model = gw.open("bundled")
    p = model.program
    ids = model.tokenizer.encode("The following")
    logits, before = model.logits(ids), model.perplexity(held_out)

    add_gated_skip(p, "layers.0.out", "layers.2.out", "layers.2.skip")
    assert np.array_equal(model.logits(ids), logits), "a zero projection changes no bit"

    recipe = TrainOptions(steps=2, batch=2, window=32, lr=3e-4, warmup=1)
    if not args.quick:
        recipe = TrainOptions(steps=args.steps, batch=12, window=256, lr=1e-4, warmup=5, floor=0.1)
    with p.edit(f"train {recipe.steps} steps", tool="skip_and_export.py"):
        result = Trainer(model, train_text, recipe).run()
    norm = float(np.linalg.norm(p.weights["layers.2.skip.weight"].numpy()))
    after = model.perplexity(held_out)
    print(f"{recipe.steps} steps, {result.tokens_per_s:,.0f} bytes/s, the skip has grown to norm {norm:.3f}")
    print(f"held out: {before.bits_per_byte:.4f} -> {after.bits_per_byte:.4f} bits per byte\n")

    with tempfile.TemporaryDirectory() as directory:
        out = args.out or Path(directory) / "skipped"
        receipt = model.export(out, check="none" if args.quick else "auto", overwrite=args.out is not None)
        for label, value in receipt.summary():
            print(f"{label:<24}{value}")
        if not args.quick:
            found = verify(out, trust_code=True)  # written a moment ago, by us
            for kind, lines in (("holds", found.checked), ("unchecked", found.unchecked), ("differs", found.problems)):
                for line in lines:
                    print(f"{kind:<24}{line}")
            assert not found.problems

    p.undo(2)
    assert np.array_equal(model.logits(ids), logits), "undo brings back every bit"
    print(f"\n{p.journal}")


if __name__ == "__main__":
    main()
