"""A whole training step of a program as one plan: forward, backward, clipping and update, in one graph.

The graph follows the program: after an edit the same step goes on, at the cost of what the edit touched, and moments
follow the entries of their weights. Rates, counts and scales are variables, so a new value of one is no new plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, Protocol

import numpy as np

from graphwright.array import CPU, Device, Spec, from_numpy
from graphwright.autograd import (
    Parameter,
    Tensor,
    Variable,
    autocast_to,
    changes,
    no_grad,
    scoped,
    training,
)
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.ops.casting import low_dtype
from graphwright.optim.clip import clip_grad_norm_
from graphwright.optim.optimizer import Optimizer
from graphwright.plan import Plan
from graphwright.plan.compile import plan_for, spec_of
from graphwright.plan.running.executable import BoundCall
from graphwright.program import FeedError, Program
from graphwright.program.derived.step import RetracedStep, TrainingStepGraph, TrainingTask

Loss = str | Callable[..., Tensor]
_SUM = "gradient_sum"


class Scaler(Protocol):
    """A GradScaler."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor."""
        ...

    def unscale_(self, optimizer: Any) -> None:
        """Divide gradients by the factor."""
        ...

    def step(self, optimizer: Any, *, waiting: Tensor | None = None) -> None:
        """The optimizer's step, unless a gradient is infinite."""
        ...

    def update(self, *, waiting: Tensor | None = None) -> None:
        """Set the factor of the next step."""
        ...


class CompiledStep:
    """See `compile_step`; called with the inputs by name, gives the loss, a tensor of no axes.

    Attributes:
        source: the program that is trained.
        optimizer, scaler, accumulate, clip: as they were given.
        inputs: specs by name.
        low: the dtype of autocast, or None.
    """

    def __init__(
        self,
        program: Program,
        loss: Loss,
        optimizer: Optimizer,
        inputs: Mapping[str, Any],
        *,
        accumulate: int,
        amp: object,
        scaler: Scaler | None,
        clip: float | None,
        executor: str,
        device: Device | str,
        remat: int | None,
    ) -> None:
        if accumulate < 1 or (clip is not None and not (clip > 0 and isfinite(clip))):
            raise UsageError(
                "a number is out of range", expected="accumulate >= 1, clip > 0 or None", got=(accumulate, clip)
            )
        self.source, self.optimizer, self.scaler = program, optimizer, scaler
        self.accumulate, self.clip = accumulate, clip
        self.low = None if amp is None else low_dtype(amp)
        reads, self._names = _read_by(program, loss)
        self._loss, self.inputs = loss, _specs(program, inputs, self._names)
        self._task = TrainingTask(self.inputs, reads, self._objective, self._trained, self._update, self.low)
        self._options = {"executor": executor, "device": Device.parse(device), "remat": remat}
        self._count = Variable(from_numpy(np.zeros((), np.float32)), name="accumulated")
        if accumulate > 1:
            optimizer.carried = (*dict.fromkeys((*optimizer.carried, _SUM)),)
        self._made: TrainingStepGraph | RetracedStep | None = None
        self._known: Any = None
        self._plan: Plan | None = None
        self._seen = (-1, None)

    def __call__(self, feeds: Mapping[str, Any] | None = None, **named: Any) -> Tensor:
        """One step, or with `accumulate=k` a k-th of one. Raises: FeedError before anything runs; as a plan's run."""
        self._refresh()
        assert self._plan is not None
        return Tensor(self._plan.executable().run({**feeds, **named} if feeds else named)["loss"])

    def bind(self) -> BoundCall:
        """The step as it is now, of which inputs and loss are memory to write to and to read; see `Bound`.

        It does not follow edits: bind again after one.
        """
        return self.plan.bind()

    @property
    def program(self) -> Program:
        """The whole step as a program, to look at: its nodes are the forward's names, `grad.*` and the update's."""
        self._refresh()
        assert self._made is not None
        return self._made.program

    @property
    def plan(self) -> Plan:
        """The plan of the next call."""
        self._refresh()
        assert self._plan is not None
        return self._plan

    def variables(self) -> dict[str, Variable]:
        """What it carries beside the model, the optimizer and the scaler: how many batches were accumulated."""
        return {self._count.name: self._count}

    def options(self) -> dict[str, Any]:
        """What a training that is continued must agree with, as JSON can have it."""
        return {
            "inputs": {name: str(spec) for name, spec in self.inputs.items()},
            "accumulate": self.accumulate,
            "autocast": None if self.low is None else self.low.name,
            "clip": self.clip,
            **{name: None if value is None else str(value) for name, value in self._options.items()},
        }

    # -- keeping up --------------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Bring the step and its plan up to the program, the parameters and the mode as they are."""
        if self._seen == (changes.count, training()):
            return
        now = (self.source.version, self.source.checkpoints, training())
        now += tuple((id(p), p.requires_grad, p.spec, p.lineage) for p in self.optimizer.parameters())
        if self._made is None or now != self._known or not self._made.fresh:
            made, self._made, self._known = self._made, None, None  # after an error it is not kept
            if made is not None and made.usable:
                made.update()
            else:
                kind = TrainingStepGraph if TrainingStepGraph.follows(self.source) else RetracedStep
                with no_grad():
                    made = kind(self.source, self._task)
            self._made, self._known = made, now
        if self._plan is None or self._plan.program is not self._made.program or not self._plan.fresh:
            self._plan = plan_for(self._made.program, self.inputs, **self._options)
        self._seen = (changes.count, training())

    def _trained(self) -> Iterable[Parameter]:
        return (p for p in self.optimizer.parameters() if p.requires_grad)

    # -- what is traced ----------------------------------------------------------------------------------------------
    def _objective(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        with autocast_to(self.low):
            if isinstance(self._loss, str):
                loss = given[self._loss]
            else:
                loss = self._loss(**{name: given[name] for name in self._names})
        if not isinstance(loss, Tensor) or loss.shape:
            raise UsageError("the loss is a tensor of no axes", where=self.source.name, got=getattr(loss, "spec", loss))
        root = loss if self.accumulate == 1 else loss / float(self.accumulate)
        return root if self.scaler is None else self.scaler.scale(root), {"loss": loss.detach()}

    def _update(self) -> None:
        """What happens to the gradients, as the eager loop would say it."""
        waiting = self._accumulated() if self.accumulate > 1 else None
        if self.scaler is not None and self.clip is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            clip_grad_norm_(self.optimizer.parameters(), self.clip)
        if self.scaler is None:
            self.optimizer.step(found_inf=waiting)
            return
        self.scaler.step(self.optimizer, waiting=waiting)
        self.scaler.update(waiting=waiting)

    def _accumulated(self) -> Tensor:
        """Add the gradients to those of the batches before; returns 1 unless this is the last batch of a step."""
        with no_grad(), scoped("accumulate"):
            first, count = call("eq", self._count, 0.0), self._count + 1.0
            for p in self.optimizer.parameters():
                if p.grad is not None:
                    total = self.optimizer.state_of(p).moments[_SUM]
                    summed = call("where", first, p.grad, total + p.grad)
                    total.assign(summed)
                    p.grad = summed
            last = call("ge", count, float(self.accumulate))
            self._count.assign(call("where", last, 0.0, count))
            return call("where", last, 0.0, call("full_like", count, value=1.0))


def compile_step(
    program: Program,
    loss: Loss,
    optimizer: Optimizer,
    inputs: Mapping[str, Any],
    *,
    accumulate: int = 1,
    amp: object = None,
    scaler: Scaler | None = None,
    clip: float | None = None,
    executor: str = "auto",
    device: Device | str = CPU,
    remat: int | None = None,
) -> CompiledStep:
    """A training step of a program as one plan: forward, backward, clipping and update.

    An edit between two steps, or its undo, is noticed at the next one: what the edit touched is rebuilt and planned
    again, nothing is traced anew, and moments follow their weights. Learning rates, counts and the loss scale are
    read from variables.

    Args:
        program: a forward pass; what it writes (statistics, a generator's key) is written as in any run.
        loss: name of an output that is the loss, or a function whose parameters name outputs of the program and inputs
            of the step: `lambda logits, targets: cross_entropy(logits, targets)`. It may read parameters of its own.
        optimizer: its parameters are trained, those of them that the loss reads.
        inputs: per input of the program, and of the loss, a Spec or an example array; for the program's own a shape.
        accumulate: batches per update. Gradients of loss / accumulate are summed; every call is one batch.
        amp: `bfloat16` or `float16` to run forward and loss under autocast.
        scaler: a GradScaler, for float16.
        clip: largest norm of all gradients together; None for no limit.
        executor, device, remat: see `graphwright.plan.compile`; "auto" may use the VM, "aten" gives
            the bits of the eager loop.
    Raises: UsageError for a number out of range or an input that is missing or unknown.
    """
    return CompiledStep(
        program,
        loss,
        optimizer,
        inputs,
        accumulate=accumulate,
        amp=amp,
        scaler=scaler,
        clip=clip,
        executor=executor,
        device=device,
        remat=remat,
    )


def _read_by(program: Program, loss: Loss) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Outputs of the program that the loss reads, and the names of all that it reads."""
    outputs = program.output_names()
    if isinstance(loss, str):
        program.output(loss)
        return (loss,), (loss,)
    names = tuple(inspect.signature(loss).parameters)
    found = tuple(name for name in names if name in outputs)
    if not found:
        raise UsageError(
            "the loss reads no output of the program",
            where=program.name,
            expected=f"a parameter named {' or '.join(outputs)}",
            got=", ".join(names) or "no parameter",
        )
    return found, names


def _specs(program: Program, inputs: Mapping[str, Any], names: Iterable[str]) -> dict[str, Spec]:
    """Specs of all inputs of a step. Raises: FeedError."""
    declared = {program.path(n): program.spec(n) for n in program.inputs()}
    wanted = [*declared, *(n for n in names if n not in declared and n not in program.output_names())]
    wrong = [f"{name}: not an input of the program or the loss" for name in inputs if name not in wanted]
    wrong += [f"{name}: missing" for name in wanted if name not in inputs]
    taken = {program.path(n) for n in program.nodes()} - declared.keys()
    wrong += [f"{name}: a node of the program has this name" for name in wanted if name in taken]
    found: dict[str, Spec] = {}
    for name in wanted:
        if name not in inputs:
            continue
        spec = spec_of(inputs[name], declared[name].dtype if name in declared else None)
        if spec is None:
            wrong.append(f"{name}: a shape alone does not say its dtype: give a Spec or an example")
        else:
            found[name] = spec
    dims: dict[str, int] = {}
    for name, spec in declared.items():
        if name in found and (found[name].dtype is not spec.dtype or not spec.match(found[name].sizes, dims)):
            wrong.append(f"{name}: expected {spec.bind(dims)}, got {found[name]}")
    if wrong:
        raise FeedError("inputs do not fit:\n  " + "\n  ".join(wrong), where=program.name)
    return found


__all__ = ["CompiledStep", "compile_step"]
