"""Train a model on text: windows sampled by Philox, one compiled step, and a state that resumes bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.arguments import checked
from graphwright.array import random
from graphwright.array.world import world
from graphwright.autograd import Tensor
from graphwright.errors import NonFinite, UsageError
from graphwright.models.tokenizer import need_tokenizer
from graphwright.nn import functional
from graphwright.optim.checkpoint import SavedState, save_state
from graphwright.optim.lr_scheduler import warmup_cosine
from graphwright.optim.optimizers import AdamW
from graphwright.optim.step_terms import StepTerm
from graphwright.optim.training_step import compile_step
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.settings import AtLeastOne, Count, NotNegative, Positive, Settings, Share, Size

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(Settings):
    """Options of a training run.

    Attributes:
        steps: optimizer steps in all.
        batch: windows per step.
        window: predicted tokens per window.
        lr: peak learning rate.
        warmup: steps of linear warm-up to the peak learning rate; a cosine decay follows.
        floor: learning rate after the last step, as a share of the peak.
        betas, eps: options of AdamW.
        weight_decay: weight decay of matrices.
        clip: limit on the gradient norm; 0 sets no limit.
        autocast: `bfloat16` to run matrix products in 16 bits, or "" to keep their dtype.
        seed: seed of the random choice of windows.
        deterministic: as in `CompileOptions`, for the step.
    """

    steps: AtLeastOne = 100
    batch: Size = 16
    window: Size = 256
    lr: Positive = 1e-3
    warmup: Count = 10
    floor: Share = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0
    autocast: str = ""
    seed: Count = 0
    deterministic: bool = False


@dataclass(slots=True, repr=False)
class Training(Report):
    """Record of one run: loss (nats per token) of each step, tokens and seconds."""

    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole run, including the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, dim=-1)


@checked
class Trainer:
    """Trains a model on a text: holds the model, the optimizer and the number of steps done.

    Inside `with model.program.edit("train"):` a run is one journal entry, which undo reverts. `step` runs forward,
    backward, clipping and AdamW as one plan, which is recompiled after edits of the model. `also` are further terms of
    a step, see `compile_step`. Raises: UsageError if the text is shorter than a window.
    """

    def __init__(self, model: Model, text: str, options: TrainOptions, *, also: Sequence[StepTerm] = ()) -> None:
        r = self.options = options
        self.model, self.done = model, 0
        self.ids = np.asarray(need_tokenizer(model).encode(text), np.int64)
        if len(self.ids) < r.window + 1:
            raise UsageError("the training text is shorter than one window", expected=f"> {r.window} tokens",
                             got=len(self.ids), fix="give a longer text, or a smaller window")  # fmt: skip
        self.optimizer = AdamW(model, r.lr, r.betas, r.eps, r.weight_decay, decay_matrices_only=True)
        if r.batch % world().copies:
            raise UsageError("the windows of a step cannot be divided among the ranks", where="Trainer", got=r.batch,
                             expected=f"a multiple of {world().copies}", fix="another batch")  # fmt: skip
        self._positions = np.tile(np.arange(r.window), (r.batch // world().copies, 1))
        inputs: dict[str, Any] = dict.fromkeys(("ids", "positions", "targets"), self._positions)
        amp, clip = r.autocast or None, r.clip or None
        self.step = compile_step(
            model.program,
            _loss,
            self.optimizer,
            inputs,
            amp=amp,
            clip=clip,
            deterministic=r.deterministic,
            device=model.device,
            also=also,
        )

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets int64 [batch, window] of a step; they depend only on text, options and step.

        Of several ranks, each gets every `ranks`-th window.
        """
        r = self.options
        starts = random.integers(0, len(self.ids) - r.window, r.batch, seed=r.seed, stream=1, step=step)
        starts = starts[world().copy :: world().copies]
        rows = self.ids[starts[:, None] + np.arange(r.window + 1)]
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def run(
        self, steps: int | None = None, *, progress: ProgressCallback | None = None,
        take: Callable[[Mapping[str, Any]], float] | None = None,
    ) -> Training:  # fmt: skip
        """Train for some steps, by default all that remain.

        Args:
            steps: number of steps.
            progress: called after each step.
            take: takes a step with these inputs and returns the loss, such as `Segment.step` of a life; by default the
                compiled step does.
        Raises: NonFinite if the loss is not finite; the weights then include the update of that step.
        """
        r, made = self.options, Training()
        last = r.steps if steps is None else min(self.done + steps, r.steps)
        started = perf_counter()
        while self.done < last:
            self.optimizer.lr = warmup_cosine(self.done, peak=r.lr, warmup=r.warmup, total=r.steps, floor=r.floor)
            ids, targets = self.batch(self.done)
            feeds = {"ids": ids, "positions": self._positions, "targets": targets}
            loss = self.step(feeds).item() if take is None else take(feeds)
            self.done += 1
            made.losses.append(loss)
            made.tokens += ids.size * world().copies
            made.seconds = perf_counter() - started

            if not np.isfinite(loss):
                raise NonFinite("the loss is not finite", where=f"step {self.done}", got=loss,
                                fix="use a smaller lr, or clip=1.0; undo() reverts the training")  # fmt: skip
            if progress is not None:
                facts = {"loss": loss, "lr": self.optimizer.lr, "tokens/s": made.tokens_per_s}
                progress(Progress("training", self.done, r.steps, facts))
        return made

    # -- resuming ------------------------------------------------------------------------------------------------------
    def identity(self) -> dict[str, Any]:
        """Return what a training must share with a saved state to resume it: the options and a hash of the text."""
        options = json.loads(json.dumps(asdict(self.options)))
        return {"options": options, "text": sha256(self.ids.tobytes()).hexdigest()}

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer moments and the position in the data atomically; replaces an older state."""
        save_state(directory, self.model, self.optimizer, step=self.done, compiled=self.step, facts=self.identity())

    def load(self, directory: str | Path) -> None:
        """Restore a saved state and continue from it; everything is checked before anything changes.

        Raises: UsageError if options or text differ; CheckpointError for damaged files or a different structure.
        """
        saved = SavedState.read(directory)
        options = saved.facts.get("options")
        ours, theirs = self.identity(), {**saved.facts, **(options if isinstance(options, dict) else {})}
        ours |= ours.pop("options")
        differing = {name: (value, theirs.get(name)) for name, value in ours.items() if theirs.get(name) != value}
        if not differing and not 0 <= saved.step <= self.options.steps:
            differing = {"step": (f"0 to {self.options.steps}", saved.step)}
        if differing:
            expected, got = (", ".join(f"{n} {str(v[i])[:16]}" for n, v in differing.items()) for i in (0, 1))
            fix = "use the options, text and model of that training, or another directory for the state"
            what = "the saved state does not match the options, text or steps of this training"
            raise UsageError(what, where=str(directory), expected=expected, got=got, fix=fix)
        saved.restore(self.model, self.optimizer, compiled=self.step)
        self.done = saved.step
