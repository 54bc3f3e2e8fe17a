"""`graphwright train DIR_OR_CONFIG --text FILE`: train a model on text, resumable, and write the result."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphwright.cli.common import Command, OnDevice, Output, Overwrite, argument, bar, flag, option, read_text
from graphwright.errors import UsageError
from graphwright.progress import ProgressCallback

if TYPE_CHECKING:
    from graphwright.lifecycle import Life
    from graphwright.models import Model
    from graphwright.models.train import Trainer, TrainOptions


@Command(
    "graphwright train bundled --text notes.txt --steps 50 --out trained",
    "graphwright.models.train:TrainOptions",
    hide="betas eps autocast",
)
def train(
    source: Annotated[str, argument("DIR_OR_CONFIG", "A model, or a config.json to start from scratch.")],
    text: Annotated[Path, option("FILE", "File to train on, UTF-8.")],
    out: Annotated[Path | None, option("DIR", "Hugging Face directory to write, or saved model.")] = None,
    overwrite: Overwrite = False,
    bf16: Annotated[bool, flag("--bf16", "Matrix products in bfloat16.")] = False,
    state: Annotated[Path | None, option("DIR", "State to resume from, written every --save-every steps.")] = None,
    save_every: Annotated[int, option("N", "Steps between two states.", min=1)] = 100,
    life: Annotated[Path | None, option("DIR", "Life to begin or resume; a thread commits its steps.")] = None,
    held_out: Annotated[Path | None, option("FILE", "File to measure bits per byte on, before and after.")] = None,
    device: OnDevice = "cpu",
    threads: int = 0,
    tensor_parallel: Annotated[int, option("N", "Ranks that have a copy of the model together.", min=1)] = 1,
    *,
    options: TrainOptions,
) -> Output:
    """Train a model, or a config from scratch, on a text file.

    Uses AdamW with warm-up, cosine decay and gradient clipping; the whole step is one plan. With --state or --life, the
    same command resumes an interrupted training. A complete one cannot be extended, since --steps is a fact of its
    schedule: train what --out has written. Under torchrun, each rank computes a part of every batch; with
    --tensor-parallel N, neighbouring ranks divide the model and compute the same part.
    """
    from graphwright import distributed
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.models.architectures.architecture import Config
    from graphwright.models.open import create
    from graphwright.models.train import Trainer

    distributed.setup(device=device, threads=threads or None)
    device = f"{device}:{distributed.local_rank()}" if device == "cuda" and distributed.ranks() > 1 else device
    if life is not None and distributed.ranks() > 1:
        raise UsageError("a life is trained by one process", where="--life", got=f"{distributed.ranks()} ranks",
                         fix="use --state to resume a training of several ranks")  # fmt: skip
    if life is not None and state is not None:
        raise UsageError("--life and --state were both given", fix="a life needs no state: leave out --state")
    if out is not None:
        check_free(out, overwrite)  # before the training
    if state is not None:
        check_free(state, overwrite=True)
    words, held = read_text(text), None if held_out is None else read_text(held_out)
    scratch = source.endswith(".json")
    model = create(Config.read(Path(source).parent, Path(source).name), seed=options.seed) if scratch else open(source)
    recipe = replace(options, autocast="bfloat16" if bf16 else "")
    living = None if life is None else _living(life, model, options.seed)
    if living is not None:
        model = living.model
    program = model.to(device).program
    if tensor_parallel > 1:
        with program.edit("divide among ranks", author="human", tool="graphwright train") as e:
            distributed.tensor_parallel(e, program.select("*"), tensor_parallel)
    trainer = Trainer(model, words, recipe)
    distributed.data_parallel(trainer.step)
    facts: dict[str, Any] = {"parameters": model.inspect().parameters, "options": asdict(recipe)}
    with bar() as progress:
        if held is not None:
            facts["bits_per_byte"] = {"before": model.perplexity(held, progress=progress).bits_per_byte}
        if state is not None and (state / "train.json").is_file():
            trainer.load(state)
            facts["resumed_at"] = trainer.done
        if living is not None:
            losses = _live(living, trainer, text, facts, progress)
        else:
            losses = _train(trainer, text, state, save_every, facts, progress)
        if held is not None:
            facts["bits_per_byte"]["after"] = model.perplexity(held, progress=progress).bits_per_byte
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    facts |= {"steps": trainer.done, "loss": {"first": first, "last": last}}
    lines = [f"the training is complete: the state in {life or state} is at step {trainer.done}"]
    if losses:
        speed = f"{facts['tokens_per_s']:,.0f} token/s"
        lines = [f"{len(losses)} steps, loss {first:.4f} -> {last:.4f} nats per token, {speed}"]
    if held is not None:
        lines.append("held out {before:.4f} -> {after:.4f} bits per byte".format(**facts["bits_per_byte"]))
    if out is not None:
        with distributed.gathered(program):
            if distributed.is_main():
                facts["out"] = _write(model, out, scratch, overwrite)
                lines.append(f"wrote {out}: {facts['out']}")
    return Output(facts, "\n".join(lines))


def _train(
    trainer: Trainer, text: Path, state: Path | None, save_every: int, facts: dict[str, Any],
    progress: ProgressCallback | None,
) -> list[float]:  # fmt: skip
    """Train as one journal entry, and save the state every `save_every` steps; return the losses."""
    losses: list[float] = []
    with trainer.model.program.edit(f"train on {text.name}", author="human", tool="graphwright train"):
        while trainer.done < trainer.options.steps:
            done = trainer.done
            try:
                made = trainer.run(min(save_every, trainer.options.steps - done), progress=progress)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_saved(state, done)) from None
            losses += made.losses
            facts["tokens_per_s"] = made.tokens_per_s
            if state is not None:
                trainer.save(state)
    return losses


def _living(directory: Path, model: Model, seed: int) -> Life:
    """Open the life in a directory, or begin one."""
    from graphwright import lifecycle

    if (directory / "identity.json").exists():
        return lifecycle.open(directory, like=model, asynchronous=True)
    return lifecycle.birth(model, directory, name=directory.name, seed=seed, asynchronous=True)


def _live(
    life: Life, trainer: Trainer, text: Path, facts: dict[str, Any], progress: ProgressCallback | None
) -> list[float]:
    """Train a life with a commit after every step; return the losses of this process."""
    data = {"name": text.name, "items": len(trainer.ids), **trainer.identity()}
    before = life.figures
    with life:
        facts["life"] = {"id": life.identity.id, "resumed_at": life.age}
        begin = life.resume if life.resumable else life.segment
        if before is not None and before.ended:
            if life.log.of("segment_start")[-1].facts["data"] == data:  # the number of steps is one of its options
                trainer.done = before.steps
                return []
            begin = life.segment
        try:
            with begin(trainer.step, data, objective="next token") as run:
                trainer.done = run.steps
                made = trainer.run(progress=progress, take=run.step)
        except KeyboardInterrupt:
            text_ = f"{life.store.last.step} steps are saved in {life.folder}; the same command resumes"
            raise KeyboardInterrupt(text_) from None
        facts["tokens_per_s"] = made.tokens_per_s
    return made.losses


def _saved(state: Path | None, steps: int) -> str:
    if state is None:
        return "nothing was saved; use --state DIR to save the training"
    return f"{steps} steps are saved in {state}; the same command resumes" if steps else "nothing was saved yet"


def _write(model: Any, out: Path, scratch: bool, overwrite: bool) -> str:
    if model.export_plan().level is None:
        model.save(out, overwrite=overwrite)
        return "a saved model, since no architecture has its structure; see graphwright export --plan"
    dtype = "bfloat16" if scratch and model.config.get("dtype") == "bfloat16" else "keep"
    receipt = model.export(out, dtype=dtype, overwrite=overwrite)
    return "a Hugging Face directory" + (", confirmed by transformers" if receipt.confirmed else "")
