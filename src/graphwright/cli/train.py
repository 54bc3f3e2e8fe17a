"""`graphwright train DIR_OR_CONFIG --text FILE`: train a model on text, resumable, and write the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import (
    Batch,
    Debug,
    Json,
    Overwrite,
    Quiet,
    Seed,
    Threads,
    Window,
    bar,
    command,
    emit_json,
    read_text,
    say,
    set_threads,
)


@command("graphwright train bundled --text notes.txt --steps 50 --out trained")
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
            metavar="DIR", help="Hugging Face directory to write; a structure without a class is saved as a model."
        ),
    ] = None,
    overwrite: Overwrite = False,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Total number of steps.")] = 100,
    batch: Batch = 16,
    window: Window = 256,
    lr: Annotated[float, typer.Option(metavar="X", help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Steps until the peak learning rate.")] = 10,
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Weight decay of matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(metavar="X", help="Bound on the gradient norm; 0 for none.")] = 1.0,
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

    Uses AdamW with warm-up, cosine decay and gradient clipping; the whole step is one plan. With --state, the same
    command resumes an interrupted training.
    """
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.models.architectures.architecture import Config
    from graphwright.models.open import create
    from graphwright.models.train import Trainer, TrainOptions

    set_threads(threads)
    if out is not None:
        check_free(out, overwrite)  # before the training
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
                done = trainer.done
                try:
                    made = trainer.run(min(save_every, recipe.steps - done), report)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(_saved(state, done)) from None
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
        say(f"the training is complete: the state in {state} is at step {trainer.done}")
    if held is not None:
        say(f"held out {facts['bits_per_byte']['before']:.4f} -> {facts['bits_per_byte']['after']:.4f} bits per byte")
    if out is not None:
        say(f"wrote {out}: {facts['out']}")


def _saved(state: Path | None, steps: int) -> str:
    if state is None:
        return "nothing was saved; use --state DIR to save the training"
    return f"{steps} steps are saved in {state}; the same command resumes" if steps else "nothing was saved yet"


def _write(model, out: Path, scratch: bool, overwrite: bool) -> str:  # typer reads annotations of commands only
    if model.export_plan().level is None:
        model.save(out, overwrite=overwrite)
        return "a saved model, since no architecture has its structure; see graphwright export --plan"
    dtype = "bfloat16" if scratch and model.config.get("dtype") == "bfloat16" else "keep"
    receipt = model.export(out, dtype=dtype, overwrite=overwrite)
    return "a Hugging Face directory, confirmed by transformers" if receipt.confirmed else "a Hugging Face directory"
