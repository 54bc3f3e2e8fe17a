"""On-policy prefixes: imitation of the target from the model's own output, in place of the target's only.

L = (1 - η)·CE + η·CE', where CE = -1/T Σ_t ln p(y*_t | x, y*_<t) is teacher forcing, and
CE' = -1/T' Σ_t ln p(y*_t | x, ŷ_<t) predicts the same target after the model's own greedy output ŷ, with
T' = min(T, |ŷ| + 1). Gradients do not pass through ŷ. Nothing in it is variational.
Sources: Bengio et al. 2015, "Scheduled Sampling"; Ross et al. 2011, "DAgger".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.arguments import checked
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.lifecycle.prefixes import TrainingRows, pairs_of
from graphwright.models.generation.batched import GreedyBatch
from graphwright.models.generation.text import feeds_of
from graphwright.nn import functional
from graphwright.optim import Optimizer, compile_step
from graphwright.optim.training_step import CompiledStep
from graphwright.settings import AtLeastOne, Count, Positive, Range, Share

if TYPE_CHECKING:
    from graphwright.models.model import Model

Eta = float | Callable[[int], float]
"""The share η of the own prefixes in the loss, or a function of the step."""
EXTRA = 2
"""Tokens that a rollout may be longer than its target."""
SHARE = Range(0, 1)


@checked
def ramp(start: Share = 0.0, end: Share = 0.5, steps: Count = 1000) -> Callable[[int], float]:
    """Return a schedule of η: linear from `start` at step 0 to `end` at step `steps`, then constant."""
    return lambda step: end if step >= steps else start + (end - start) * step / steps


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Σ w·(-ln softmax(z)[target]) in float32, for logits [R, L, V], targets and weights [R, L]."""
    return (functional.cross_entropy(logits.float(), targets, dim=-1, reduction="none") * weights).sum()


@checked
class OnPolicy:
    """Training on pairs of prompt and answer, with the model's own output as prefix in a share η of the loss.

    >>> policy = lf.OnPolicy(model, gw.optim.AdamW(model, lr=3e-3), eta=lf.ramp(0, 0.5, steps=500))
    >>> for batch in loader:
    ...     loss = policy.step(batch)

    A step with η > 0 continues each prompt greedily by at most |answer| + 2 tokens, with a KV cache and without a
    gradient. Both rows, prompt with answer and prompt with output, are in one compiled plan. η enters as a weight.

    Args:
        model: is trained in place; tokens of its `eos_ids` end an output.
        optimizer: updates the parameters of the model.
        eta: η in [0, 1] of all steps, or a function of the step such as `ramp`. With 0 a step is teacher forcing alone.
        clip: limit on the gradient norm; None for no limit.
        pad: id of the padding at the end of rows; by default `pad_token_id` of the model's config.
        round_to: rows are padded to a multiple of this, so that batches of similar lengths share a plan.
        deterministic: as in `CompileOptions`, for the training step.

    Attributes:
        done: number of steps done; the next one is step number `done` of the schedule.
        exact: share of outputs of the last step that were equal to their targets; None without outputs.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, eta: Eta = 0.5, *, clip: Positive | None = None,
        pad: int | None = None, round_to: AtLeastOne = 32, deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.eta, self.clip = model, optimizer, eta, clip
        self.pad, self.round_to, self.deterministic, self.done = pad, round_to, deterministic, 0
        self.exact: float | None = None
        self._outputs = GreedyBatch(model, 64)
        self._steps: dict[tuple[int, ...], CompiledStep] = {}
        self.eta_at(0)

    def eta_at(self, step: int) -> float:
        """Return η of a step. Raises: UsageError if it is outside [0, 1]."""
        eta = self.eta(step) if callable(self.eta) else self.eta
        if eta not in SHARE:
            raise UsageError(
                "the share of own prefixes is out of range", where=f"eta, step {step}", expected=SHARE, got=eta
            )
        return float(eta)

    def step(self, batch: Any) -> Tensor:
        """Train on one batch; return the loss before the update, a 0-d tensor.

        Args:
            batch: {"prompt": rows, "answer": rows}, where rows are ids [B, T] with padding at the end, as grid tasks
                have them, or lists of ids; or a list of pairs (prompt, answer).
        Raises: UsageError for another batch; PromptError for ids out of range; NonFinite if the logits are not finite.
        """
        rows, program = self.rows(batch), self.model.program
        feeds = {**feeds_of(program, rows.ids), "targets": rows.targets, "weights": rows.weights}
        if (step := self._steps.get(rows.ids.shape)) is None:
            step = compile_step(
                program, weighted_loss, self.optimizer, feeds, clip=self.clip, deterministic=self.deterministic
            )
            self._steps[rows.ids.shape] = step
        loss = step(feeds)
        self.done += 1
        return loss

    def rows(self, batch: Any) -> TrainingRows:
        """Return the rows of the next step on a batch: prompts with answers and, if η > 0, with the model's outputs."""
        eta, pairs = self.eta_at(self.done), pairs_of(batch, self.model, self.pad)
        rows = [(prompt, answer, answer, (1 - eta) / len(pairs)) for prompt, answer in pairs]
        self.exact = None
        if eta > 0:
            made = self._outputs([prompt for prompt, _ in pairs], [len(answer) + EXTRA for _, answer in pairs])
            rows += [(prompt, own, y, eta / len(pairs)) for (prompt, y), own in zip(pairs, made, strict=True)]
            self.exact = float(np.mean([np.array_equal(own, y) for own, (_, y) in zip(made, pairs, strict=True)]))
        return TrainingRows.of(rows, round_to=self.round_to)


EAVI = OnPolicy
"""An earlier name of the method."""
