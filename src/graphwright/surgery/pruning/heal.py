"""Healing: a short distillation of the unpruned program into the pruned one, as one edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.arguments import checked
from graphwright.autograd import Tensor
from graphwright.autograd.clipping import clip_grad_norm_
from graphwright.errors import NonFinite
from graphwright.models.metrics import log_softmax
from graphwright.nn import functional
from graphwright.optim.optimizers import AdamW
from graphwright.plan.compiled import compile
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.settings import Range
from graphwright.surgery.calibration import Calibration, Stream
from graphwright.surgery.measure import Drift
from graphwright.surgery.pruning.plan import TOOL
from graphwright.surgery.pruning.scores import need_tokens

if TYPE_CHECKING:
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True, repr=False)
class Healing(Report):
    """The losses of a distillation by `heal`.

    Attributes:
        losses: KL(teacher ‖ program) at each step, in nats per token.
        before, after: KL(teacher ‖ program) on the held-out windows before and after training.
    """

    losses: tuple[float, ...]
    before: float
    after: float

    def _text(self) -> str:
        nats = f"{self.before:.4f} -> {self.after:.4f} nats per token from the original"
        return f"healed in {len(self.losses)} steps: {nats}"


@checked
def heal(
    program: Program, teacher: Program, calibration: Calibration, steps: int = 100, *, lr: float = 1e-4, batch: int = 8,
    seed: int = 0, progress: ProgressCallback | None = None,
) -> Healing:  # fmt: skip
    """Train a program to score tokens as its teacher does: minimise KL(teacher ‖ program) by AdamW, in one edit.

    Args:
        program: the pruned program, whose weights are trained.
        teacher: the program before pruning: `program.at(seq)`, or `model.original`. It is not changed.
        calibration: windows to learn from, and held-out windows to measure on.
        steps: number of training steps.
        lr: peak learning rate; the schedule is a warm-up over a tenth of the steps, then a cosine decay to 0.
        batch: windows per step.
        seed: seed of the random choice of windows.
        progress: called with `Progress`.
    Raises: UsageError if steps or batch is below 1; MissingCalibration if the program scores no tokens; NonFinite if
        the loss is not finite. After any error, and after Ctrl-C, the weights are unchanged.
    """
    for name, given in (("steps", steps), ("batch", batch)):
        Range(1, whole=True).check(name, given)
    need_tokens(program, "healing")
    chunks = calibration.feeds(program)
    windows = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
    names, rng, losses = list(windows), np.random.default_rng(seed), []
    optimizer = AdamW(program, lr, weight_decay=0.0)

    @compile
    def step(goal: Tensor, *feeds: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = program(**dict(zip(names, feeds, strict=True)))
        logits = found["logits"] if "logits" in found else next(iter(found.values()))
        scores = functional.log_softmax(logits.float())
        loss = functional.kl_div(scores, goal, log_target=True, reduction="batchmean") / float(goal.shape[1])
        loss.backward()
        clip_grad_norm_(program.parameters(), 1.0)
        optimizer.step()
        return loss

    before = divergence(program, teacher, calibration)
    with program.edit(f"heal in {steps} steps", author="pass", tool=TOOL):
        for i in range(steps):
            optimizer.lr = lr * min((i + 1) / max(steps // 10, 1), 0.5 * (1 + np.cos(np.pi * i / steps)))
            rows = rng.integers(0, len(windows["ids"]), min(batch, len(windows["ids"])))
            feeds = {n: np.ascontiguousarray(windows[n][rows]) for n in names}
            (goal,) = Stream(teacher, [feeds]).outputs("logits")
            losses.append(float(step(log_softmax(goal), *feeds.values()).item()))
            if not np.isfinite(losses[-1]):
                raise NonFinite("the loss is not finite", where=f"step {i}", got=losses[-1], fix="pass a smaller lr")
            if progress is not None:
                progress(Progress("healing", i + 1, steps, {"kl": losses[-1]}))
    return Healing(tuple(losses), before, divergence(program, teacher, calibration))


def divergence(program: Program, teacher: Program, calibration: Calibration) -> float:
    """Return KL(teacher ‖ program) on the held-out windows, in nats per token."""
    feeds, drift = calibration.feeds(program, held=True), Drift(scores=True)
    for pair in zip(Stream(teacher, feeds).outputs("logits"), Stream(program, feeds).outputs("logits"), strict=True):
        drift.add(*pair)
    return drift.kl or 0.0
