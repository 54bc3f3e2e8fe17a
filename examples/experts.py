"""Turn a dense model into a mixture of experts, train it, see who is used, cut who is not, and export it.

Every step is an edit: the mixture leaves as MixtralForCausalLM, and an undo would give the dense model back.
`python examples/experts.py --out mixture` needs the extra hf for the check.
"""

import argparse
import tempfile
from pathlib import Path

import graphwright as gw
from graphwright import experts as ex
from graphwright.models.bundled import pydoc_split
from graphwright.models.train import Trainer, TrainOptions
from graphwright.surgery import Calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to export to; a temporary directory by default")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="2 small steps, and no proof by transformers")
    args = parser.parse_args()
    train_text, held_out = pydoc_split()
    held_out = held_out[: 600 if args.quick else 8000]

    model = gw.open("bundled")
    before = model.perplexity(held_out)
    ex.upcycle(model, experts=4, k=2)
    print(f"{len(ex.routed_layers(model.program))} MLPs are mixtures of 4 experts now")
    after = model.perplexity(held_out)
    print(f"held out: {before.bits_per_byte:.4f} bits per byte before, {after.bits_per_byte:.4f} after\n")

    recipe = TrainOptions(steps=2, batch=2, window=32, lr=3e-4, warmup=1)
    if not args.quick:
        recipe = TrainOptions(steps=args.steps, batch=12, window=256, lr=3e-4, warmup=5, floor=0.1)
    with model.edit(f"train {recipe.steps} steps"):
        Trainer(model, train_text, recipe).run()
    print(f"after {recipe.steps} steps: {model.perplexity(held_out).bits_per_byte:.4f} bits per byte")

    tokens = 512 if args.quick else 4096
    data = Calibration(train_text, tokens, 128, held_out=held_out, tokenizer=model.tokenizer)
    print(ex.usage(model, data), "\n")
    print(ex.prune(model, 0.25, by="effect", data=data), "\n")

    with tempfile.TemporaryDirectory() as directory:
        out = args.out or Path(directory) / "mixture"
        receipt = model.export(out, check="none" if args.quick else "auto", overwrite=args.out is not None)
        for label, value in receipt.summary():
            print(f"{label:<24}{value}")


if __name__ == "__main__":
    main()
