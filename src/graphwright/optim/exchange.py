"""What a compiled step exchanges with other processes, between its backward and its update, in the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from graphwright.autograd import Parameter, Tensor, active_recorder

if TYPE_CHECKING:
    from graphwright.optim.optimizer import Optimizer
    from graphwright.program.program import Program


class Exchange:
    """Base of exchanges, for `CompiledStep.exchange`: tensor code that is traced into the step. This one does nothing.

    Attributes:
        ranks: number of processes of the run.
        same_trace: whether the traces of all processes have the same nodes. If not, the step is traced from the start
            after an edit, as the order of its collectives would else depend on nodes of the former trace.
        each_batch: with `accumulate`, whether `gradients` is called on those of each batch, instead of on their sum.
    """

    same_trace = True
    each_batch = False
    ranks = 1

    def traced(self, source: Program) -> None:
        """Look at the present program, for which a step was traced."""

    def mean(self, loss: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the loss that the step returns, and whether its update is skipped, a 0-d bool, or None."""
        return loss, skip

    def gradients(self, members: Sequence[Parameter], gate: Tensor | None) -> None:
        """Replace the gradients of parameters, which are in the order in which the gradients become ready.

        `gate` is None, or a 0-d float32 that is 0 while gradients are still being accumulated.
        """

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, given that of the gradients which parameters have after `gradients`."""
        return norm

    def found(self, found: Tensor) -> Tensor:
        """Return whether a gradient is not finite, a 0-d float32, given that of the same gradients."""
        return found

    def updated(self, members: Sequence[Parameter], gate: Tensor | None) -> None:
        """Assign to parameters after the update; the arguments are those of `gradients`."""


class Shards(Protocol):
    """How the states of an optimizer are divided among processes: each parameter has one owner."""

    def owns(self, p: Parameter) -> bool:
        """Return whether this process has the state of a parameter."""
        ...

    def whole(self, optimizer: Optimizer, gather: bool) -> AbstractContextManager[object]:
        """Return a context in which the optimizer of the process that writes has all states.

        Args:
            gather: fetch them from their owners, for which all processes must call this; else every process has all
                states, those of others with values to be set, and keeps its own.
        """
        ...


def whole(optimizer: object, gather: bool) -> AbstractContextManager[object]:
    """Return the context of `Shards.whole` for an optimizer whose states are divided; else one that does nothing."""
    shards = getattr(optimizer, "shards", None)
    return nullcontext() if shards is None else shards.whole(optimizer, gather)


def in_order_of_gradients(members: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters that have a gradient, sorted by the position of its node in the traced program."""
    recorder: Any = active_recorder.get()
    key = recorder.program.order_labels.key
    return sorted((p for p in members if p.grad is not None), key=lambda p: key(recorder.value_of(p.grad).node))
