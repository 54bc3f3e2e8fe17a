"""`graphwright train DIR_OR_CONFIG --text FILE`: train on text, resumable, and write the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import (
    Debug,
    Json,
    Overwrite,
    Quiet,
    Seed,
    Threads,
    bar,
    emit_json,
    read_text,
    say,
    set_threads,
    verb,
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright train bundled --text notes.txt --steps 50 --out trained")(train)


@verb
def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_CONFIG",
            help="A model (directory, or the word bundled), or a config.json to start from scratch.",
        ),
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="File to train on, UTF-8.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Hugging Face directory to write; a structure no class has is saved as a model."
        ),
    ] = None,
    overwrite: Overwrite = False,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps in all.")] = 100,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Windows per step.")] = 16,
    window: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens per window.")] = 256,
    lr: Annotated[float, typer.Option(metavar="X", help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Steps to reach it.")] = 10,
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Of matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(metavar="X", help="Largest gradient norm; 0 for none.")] = 1.0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Matrix products in bfloat16.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the state to resume from; written every --save-every steps."),
    ] = None,
    save_every: Annotated[int, typer.Option(metavar="N", min=1, help="Steps between two states.")] = 100,
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to measure bits per byte on, before and after.")
    ] = None,
    seed: Seed = 0,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model, or a config from scratch, on a text file.

    AdamW, warm-up and cosine, gradient clipping; the whole step is one plan. With --state, the same command again
    resumes where it stopped.
    """
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.models.architectures.config import Config
    from graphwright.models.open import create
    from graphwright.models.train import Trainer, TrainOptions

    set_threads(threads)
    if out is not None:
        check_free(out, overwrite)  # now, not after the training
    words, held = read_text(text), None if held_out is None else read_text(held_out)
    scratch = source.endswith(".json")
    model = create(Config.read(Path(source).parent, Path(source).name), seed=seed) if scratch else open(source)
    recipe = TrainOptions(
        steps=steps,
        batch=batch,
        window=window,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        autocast="bfloat16" if bf16 else "",
        seed=seed,
    )
    trainer = Trainer(model, words, recipe)
    facts: dict = {"parameters": model.inspect().parameters}
    with bar(quiet or as_json) as report:
        if held is not None:
            facts["bits_per_byte"] = {"before": model.perplexity(held, report=report).bits_per_byte}
        if state is not None and (state / "train.json").is_file():
            trainer.load(state)
            facts["resumed_at"] = trainer.done
        losses: list[float] = []
        with model.program.edit(f"train on {text.name}", author="human", tool="graphwright train"):
            while trainer.done < recipe.steps:
                kept = trainer.done
                try:
                    made = trainer.run(min(save_every, recipe.steps - kept), report)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(_kept(state, kept)) from None
                losses += made.losses
                facts["tokens_per_s"] = made.tokens_per_s
                if state is not None:
                    trainer.save(state)
        if held is not None:
            facts["bits_per_byte"]["after"] = model.perplexity(held, report=report).bits_per_byte
    facts |= {
        "steps": trainer.done,
        "loss": {"first": losses[0] if losses else None, "last": losses[-1] if losses else None},
    }
    if out is not None:
        facts["out"] = _write(model, out, scratch, overwrite)
    if as_json:
        emit_json(facts)
        return
    if losses:
        say(
            f"{len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token, "
            f"{facts['tokens_per_s']:,.0f} token/s"
        )
    else:
        say(f"nothing left to do: the state in {state} is at step {trainer.done}")
    if held is not None:
        say(f"held out {facts['bits_per_byte']['before']:.4f} -> {facts['bits_per_byte']['after']:.4f} bits per byte")
    if out is not None:
        say(f"wrote {out}: {facts['out']}")


def _kept(state: Path | None, steps: int) -> str:
    if state is None:
        return "nothing is kept; --state DIR would keep what was trained"
    return f"{steps} steps are kept in {state}; the same command goes on from there" if steps else "nothing is kept yet"


def _write(model, out: Path, scratch: bool, overwrite: bool) -> str:  # typer reads annotations of commands only
    if model.export_plan().level is None:
        model.save(out, overwrite=overwrite)
        return "a saved model (its structure is no family's): graphwright export says more"
    dtype = "bfloat16" if scratch and model.config.get("dtype") == "bfloat16" else "keep"
    receipt = model.export(out, dtype=dtype, overwrite=overwrite)
    return "a Hugging Face directory, confirmed by transformers" if receipt.confirmed else "a Hugging Face directory"
