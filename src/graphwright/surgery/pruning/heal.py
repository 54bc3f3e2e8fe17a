"""Healing: a short distillation of a pruned program from what it was, as one edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import NonFinite, UsageError
from graphwright.nn import functional
from graphwright.optim import AdamW, clip_grad_norm_
from graphwright.plan import compile
from graphwright.progress import Progress
from graphwright.surgery.calibration import Stream
from graphwright.surgery.pruning.plan import TOOL
from graphwright.surgery.pruning.statistics import need_tokens

if TYPE_CHECKING:
    from graphwright.autograd import Tensor
    from graphwright.program import Program
    from graphwright.progress import Report
    from graphwright.surgery.calibration import Calibration


@dataclass(frozen=True, slots=True)
class Healing:
    """What a distillation did.

    Attributes:
        losses: KL(teacher ‖ program), nats per token, at each step.
        before, after: the same on the held-out windows.
    """

    losses: tuple[float, ...]
    before: float
    after: float


def heal(
    program: Program,
    teacher: Program,
    calibration: Calibration,
    steps: int = 100,
    *,
    lr: float = 1e-4,
    batch: int = 8,
    seed: int = 0,
    report: Report | None = None,
) -> Healing:
    """Train a program to score tokens as another does: KL(teacher ‖ program) by AdamW, in one journal entry.

    Args:
        program: the pruned one; its weights are trained.
        teacher: what it was: `program.at(seq)`, or the model that it was opened from. It is only read.
        calibration: windows to learn from, and held-out ones to measure on.
        steps: of `batch` windows each, drawn with a seed.
        lr: peak; it falls to nothing as half a cosine, after a warm-up of a tenth of the steps.
        batch: windows per step.
        seed: of the draw.
        report: called with `Progress`.
    Raises: UsageError for steps below one; MissingCalibration for programs that score no tokens; NonFinite when the
        loss is no number. After any error, Ctrl-C included, the weights are as before.
    """
    if steps < 1 or batch < 1:
        raise UsageError("healing takes steps", expected="steps and batch from 1 up", got=(steps, batch))
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
            losses.append(float(step(_log_softmax(goal), *feeds.values()).item()))
            if not np.isfinite(losses[-1]):
                raise NonFinite("the loss is not a finite number", where=f"step {i}", fix="a smaller lr")
            if report is not None:
                report(Progress("healing", i + 1, steps, {"kl": losses[-1]}))
    return Healing(tuple(losses), before, divergence(program, teacher, calibration))


def divergence(program: Program, teacher: Program, calibration: Calibration) -> float:
    """KL(teacher ‖ program) on the held-out windows, nats per token."""
    feeds, total, count = calibration.feeds(program, held=True), 0.0, 0
    pair = zip(Stream(teacher, feeds).outputs("logits"), Stream(program, feeds).outputs("logits"), strict=True)
    for x, y in pair:
        a, b = _log_softmax(x).astype(np.float64), _log_softmax(y).astype(np.float64)
        total, count = total + float((np.exp(a) * (a - b)).sum()), count + a[..., 0].size
    return total / count


def _log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
