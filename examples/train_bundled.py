"""Train the bundled byte-level Llama on the text of `pydoc_data.topics`, and write it as a Hugging Face directory with
its model card and `training.json`.

    python examples/train_bundled.py --out pydoc-llama            # 700 steps, about 5 minutes on 2 cores
    python examples/train_bundled.py --out /tmp/try --steps 20    # to see it work
"""

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import graphwright as gw
from graphwright.files import atomic_directory, sha256_file
from graphwright.models.bundled import CONFIG, RECIPE, pydoc_split, text_sha256
from graphwright.models.export.write import write_model
from graphwright.models.open import config_from, create
from graphwright.models.train import Trainer
from graphwright.progress import Progress as Step

CARD = """---
license: psf-2.0
library_name: transformers
---
# pydoc-llama

A byte-level Llama of 1.6 M parameters for tests and demonstrations of Graphwright. It continues text in the manner of
the Python language reference; it knows nothing else and is of no other use.

- Architecture: `LlamaForCausalLM`, vocabulary 256 (id = byte), hidden 192, 4 layers, 6 heads, 2 key-value heads.
- Text: `pydoc_data.topics` of CPython {python} (PSF License),
  {train_bytes:,} bytes to train on, {held_bytes:,} held out.
- Trained with `python examples/train_bundled.py` in {minutes:.1f} minutes: {steps} steps of {tokens} bytes.
- Held out: **{held:.4f} bits per byte** after rounding to bfloat16 (windows of 256, stride 128).
"""


def loaded(*names: str) -> dict[str, str]:
    """Versions of the libraries that are in use."""
    return {name: sys.modules[name].__version__ for name in names if name in sys.modules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--quick", action="store_true", help="3 steps, and score a tenth of the held-out text")
    args = parser.parse_args()
    recipe = replace(RECIPE, steps=3 if args.quick else args.steps)
    train, held_out = pydoc_split()
    if args.quick:
        held_out = held_out[:3000]
    model = create(config_from(CONFIG), seed=recipe.seed)
    trainer = Trainer(model, train, recipe)
    started = perf_counter()
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=recipe.steps)

        def show(p: Step) -> None:
            shown = f"loss {p.facts['loss']:.3f}  {p.facts['tokens/s']:,.0f} bytes/s"
            bar.update(task, completed=p.done, description=shown)

        result = trainer.run(progress=show)
    minutes = (perf_counter() - started) / 60
    with atomic_directory(args.out, overwrite=True) as directory:
        write_model(model, directory, dtype="bfloat16")
        final = gw.open(directory)
        held = final.perplexity(held_out)
        seen = final.perplexity(train[: len(held_out)])
        facts = {
            "recipe": {name: getattr(recipe, name) for name in recipe.__slots__},
            "command": "python examples/train_bundled.py",
            "python": platform.python_version(),
            "text": {
                "source": "pydoc_data.topics",
                "train_bytes": len(train.encode()),
                "held_out_bytes": len(held_out.encode()),
                "train_sha256": text_sha256(train),
                "held_out_sha256": text_sha256(held_out),
            },
            "bits_per_byte": {"held_out": round(held.bits_per_byte, 5), "train_sample": round(seen.bits_per_byte, 5)},
            "loss": [round(x, 4) for x in result.losses],
            "minutes": round(minutes, 1),
            "versions": {"graphwright": gw.__version__, **loaded("torch", "numpy")},
            "sha256": {"model.safetensors": sha256_file(directory / "model.safetensors")},
        }
        (directory / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (directory / "README.md").write_text(
            CARD.format(
                python=platform.python_version(),
                train_bytes=len(train.encode()),
                minutes=minutes,
                held_bytes=len(held_out.encode()),
                steps=recipe.steps,
                tokens=recipe.batch * recipe.window,
                held=held.bits_per_byte,
            ),
            encoding="utf-8",
        )
    console.print(f"held out {held}; wrote {args.out}")


if __name__ == "__main__":
    main()
