"""A training step of a program compiled to one plan: forward, backward, clipping and update.

After an edit of the program the step re-plans only what the edit touched, and remaps moments with their weights.
Learning rates, counts and loss scales are variables, so changing one needs no new plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, Device, Spec, from_numpy
from graphwright.array.world import world
from graphwright.autograd import (
    Parameter,
    Tensor,
    Variable,
    autocast_to,
    changes,
    enable_grad,
    grad,
    no_grad,
    scoped,
    training,
)
from graphwright.autograd.clipping import clip_grad_norm_
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.ops.casting import low_dtype
from graphwright.optim.exchange import Exchange, in_order_of_gradients
from graphwright.optim.optimizer import Optimizer
from graphwright.optim.step_terms import Asked, StepTerm, StepView, any_of, named_terms
from graphwright.plan.compile import plan_for, spec_of
from graphwright.plan.options import CompileOptions
from graphwright.plan.planning.lowering import wait_for_vm
from graphwright.plan.planning.planner import uncollected
from graphwright.plan.running.executable import BoundCall
from graphwright.program.axes.divide import is_divided
from graphwright.program.derived.backward import updatable
from graphwright.program.derived.step import RetracedStep, StepValues, TrainingStepGraph, TrainingTask
from graphwright.program.errors import FeedError
from graphwright.program.op_graph import Value
from graphwright.settings import AtLeastOne, Positive, Settings

if TYPE_CHECKING:
    from graphwright.amp import GradScaler
    from graphwright.plan.plan import Plan
    from graphwright.program.program import Program

Loss = str | Callable[..., Tensor]
_SUM = "gradient_sum"


@dataclass(frozen=True, slots=True)
class StepOptions(Settings):
    """Options of a compiled step; see `compile_step`. Raises: UsageError if `accumulate` or `clip` is out of range."""

    accumulate: AtLeastOne
    amp: object
    scaler: Any
    clip: Positive | None
    executor: str
    deterministic: bool
    device: Device | str
    remat: int | None
    also: Sequence[StepTerm]


class CompiledStep:
    """A training step: called with the inputs by name, it returns the loss, a 0-d tensor. See `compile_step`.

    Attributes:
        source: the trained program.
        optimizer: updates the parameters.
        settings: the options.
        terms: the terms of `also` by name.
        reports: what the terms reported in the last call, by name; with a term that may skip updates also `skipped`.
        exchange: what the step exchanges with other processes, or None; see `distributed.data_parallel`.
        inputs: specs by name.
        low: the dtype of autocast, or None.
    """

    def __init__(
        self, program: Program, loss: Loss, optimizer: Optimizer, inputs: Mapping[str, Any], settings: StepOptions
    ) -> None:
        self.source, self.optimizer, self.settings = program, optimizer, settings
        self.low = None if settings.amp is None else low_dtype(settings.amp)
        reads, self._names = _read_by(program, loss)
        self._loss, self.inputs = loss, _specs(program, inputs, self._names)
        self.terms, self.reports = named_terms(settings.also), dict[str, Tensor]()
        self._asked: list[Asked] = []
        for term in self.terms.values():
            tuple(term.nodes(program))  # errors come now, and terms make states for what they read
        update, observed = self._update, self._observed
        self._task = TrainingTask(self.inputs, reads, self._objective, self._trained, update, self.low, observed)
        device = Device.parse(settings.device)
        self._planning = CompileOptions(executor=settings.executor, deterministic=settings.deterministic,
                                        device=device, remat=settings.remat)  # fmt: skip
        self._count = Variable(from_numpy(np.zeros((), np.float32)), name="accumulated")
        self._skips = Variable(from_numpy(np.zeros((), np.float32)), name="skips")  # 1 if a batch of this step skips
        if settings.accumulate > 1:
            optimizer.extra_moments = (*dict.fromkeys((*optimizer.extra_moments, _SUM)),)
        self._made: TrainingStepGraph | RetracedStep | None = None
        self._known: Any = None
        self._plan: Plan | None = None
        self._seen = (-1, None)
        self.exchange: Exchange | None = None

    def __call__(self, feeds: Mapping[str, Any] | None = None, **named: Any) -> Tensor:
        """Run one batch: a whole step, or with `accumulate=k` one of the k batches of a step.

        Raises: FeedError; UsageError for a program divided among ranks, without `distributed.data_parallel`.
        """
        found = self.plan(feeds, **named)
        self.reports = {name: Tensor(found[name]) for name in found if name != "loss"}
        return Tensor(found["loss"])

    @property
    def skipped(self) -> bool:
        """Whether a term skipped the update of the last call; see `StepView.skip`. It reads memory."""
        return "skipped" in self.reports and bool(self.reports["skipped"].item())

    @property
    def sums_apart(self) -> bool:
        """Whether each of several processes has a sum of the gradients of its own batches, until the next update."""
        exchange = self.exchange
        if exchange is None or exchange.ranks == 1 or exchange.each_batch:
            return False
        return self.settings.accumulate > 1 and self._count.item() > 0

    def bind(self) -> BoundCall:
        """Bind the step to fixed buffers for inputs and loss; see `BoundCall`. After an edit, bind again."""
        wait_for_vm(self._planning)
        return self.plan.bind()

    @property
    def program(self) -> Program:
        """The whole step as a program, for inspection: forward nodes, backward nodes `grad.*`, and update nodes."""
        self.refresh()
        assert self._made is not None
        return self._made.program

    @property
    def plan(self) -> Plan:
        """The plan that the next call runs."""
        self.refresh()
        assert self._plan is not None
        return self._plan

    def variables(self) -> dict[str, Variable]:
        """Return the step's own state: the number of accumulated batches, and the states of terms."""
        own = {f"also.{name}.{n}": v for name, term in self.terms.items() for n, v in term.variables().items()}
        batches = (self._count, self._skips) if self.settings.accumulate > 1 else (self._count,)
        return {**{v.name: v for v in batches}, **own}

    def options(self) -> dict[str, Any]:
        """Return the options that a saved training and the step that resumes it must share, as JSON values."""
        settings, planning, inputs = self.settings, self._planning, {n: str(s) for n, s in self.inputs.items()}
        facts = {"inputs": inputs, "accumulate": settings.accumulate, "autocast": self.low and self.low.name}
        facts |= {"clip": settings.clip, "executor": planning.chosen, "device": str(planning.device)}
        facts |= {"lazy": self.optimizer.lazy, "also": [*self.terms]}
        facts["ranks"] = 1 if self.exchange is None else self.exchange.ranks
        return {**facts, "remat": None if planning.remat is None else str(planning.remat)}

    # -- updates ----------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Update the step, its plan and the states of terms after changes of the program; every call does it first."""
        if self._seen == (changes.count, training()):
            return
        if self.exchange is None and world().parts > 1 and is_divided(self.source):
            raise UsageError("a training step of a divided program needs the gradients of the other ranks",
                             where=self.source.name, fix="graphwright.distributed.data_parallel(step)")  # fmt: skip
        now = (self.source.plan_version, self.source.checkpoints, training())
        now += tuple((id(p), p.requires_grad, p.spec, p.lineage) for p in self.optimizer.parameters())
        if self._made is None or now != self._known or not self._made.fresh:
            made, self._made, self._known = self._made, None, None  # discarded if an error follows
            with uncollected():
                if made is not None and made.usable and (self.exchange is None or self.exchange.same_trace):
                    made.update()
                else:
                    kind = TrainingStepGraph if updatable(self.source) else RetracedStep
                    with no_grad():
                        made = kind(self.source, self._task)
            if self.exchange is not None:
                self.exchange.traced(self.source)
            self._made, self._known = made, now
        if self._plan is None or self._plan.program is not self._made.program or not self._plan.fresh:
            self._plan = plan_for(self._made.program, self.inputs, None, self._planning)
        self._seen = (changes.count, training())

    @property
    def executor(self) -> str:
        """The executor of the plan; see `CompileOptions`."""
        return self._planning.executor

    def trace_again(self, exchange: Exchange | None, executor: str) -> None:
        """Set `exchange` and the executor; the next call traces and plans the step from the start."""
        self.exchange, self._planning = exchange, replace(self._planning, executor=executor)
        self._made, self._known, self._plan, self._seen = None, None, None, (-1, None)

    def _trained(self) -> Iterable[Parameter]:
        return (p for p in self.optimizer.parameters() if p.requires_grad)

    def _observed(self) -> Iterable[Value]:
        self._asked = [Asked(name, term, self.source) for name, term in self.terms.items()]
        return (value for asked in self._asked for value in asked.values())

    # -- what is traced ----------------------------------------------------------------------------------------------
    def _objective(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        with autocast_to(self.low):
            if isinstance(self._loss, str):
                loss = given[self._loss]
            else:
                loss = self._loss(**{name: given[name] for name in self._names})
        if not isinstance(loss, Tensor) or loss.shape:
            raise UsageError("the loss is not a 0-d tensor", where=self.source.name, got=getattr(loss, "spec", loss),
                             fix="reduce it, as by its mean")  # fmt: skip
        return self._root(loss), {"loss": loss.detach()}

    def _root(self, loss: Tensor) -> Tensor:
        """Return the value to differentiate: the loss divided by the number of batches, times the loss scale."""
        root = loss if self.settings.accumulate == 1 else loss / float(self.settings.accumulate)
        return root if self.settings.scaler is None else self.settings.scaler.scale(root)

    def _update(self, seen: StepValues) -> Mapping[str, Tensor]:
        """Add the gradients of terms, accumulate, unscale and clip, then update, in the order of an eager loop."""
        reports, skip = self._add_terms(seen)
        waiting, held, scaler, exchange = None, None, self.settings.scaler, self.exchange
        members, loss, gate = list[Parameter](), seen.results["loss"], None
        if exchange is not None:
            members = in_order_of_gradients([*self.optimizer.parameters()])
            with no_grad(), scoped("exchange"):
                loss, skip = exchange.mean(loss, skip)
                reports["loss"] = loss
                if exchange.each_batch:
                    exchange.gradients(members, None)
        with no_grad(), scoped("skip"):
            if skip is not None:
                reports |= {"skipped": skip, "loss": call("where", skip, float("nan"), loss)}
                held = skip.to("float32")
        if self.settings.accumulate > 1:
            waiting, held = self._accumulated(held)
        if exchange is not None:
            with no_grad(), scoped("exchange"):
                gate = None if waiting is None else 1.0 - waiting
                if not exchange.each_batch:
                    exchange.gradients(members, gate)
        self._clip()
        if scaler is None:
            self.optimizer.step(found_inf=held)
        else:
            scaler.step(self.optimizer, waiting=held)
            scaler.update(waiting=waiting)
        if exchange is not None:
            with no_grad(), scoped("exchange"):
                exchange.updated(members, gate)
        return reports

    def _clip(self) -> None:
        """Unscale the gradients, and scale them to at most the limit of their norm."""
        scaler, exchange, clip = self.settings.scaler, self.exchange, self.settings.clip
        if scaler is not None and (clip is not None or exchange is not None):
            scaler.unscale_(self.optimizer, None if exchange is None else exchange.found)
        if clip is not None:
            clip_grad_norm_(self.optimizer.parameters(), clip, total=None if exchange is None else exchange.norm)

    def _add_terms(self, seen: StepValues) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add the gradients of the terms to those of the loss; return what they report, and if one may, who skips."""
        reports, skips = dict[str, Tensor](), list[Tensor]()
        if not self._asked:
            return reports, None
        trained = set(self._trained())
        grads = {p: p.grad for p in trained if p.grad is not None}
        with enable_grad():
            factor = self._from_root()
            for asked in self._asked:
                with scoped(asked.name):
                    loss = asked.loss(StepView(asked, seen, grads, factor, reports, skips), trained)
                    wanted = [p for p in dict.fromkeys(asked.trains.values()) if p in trained]
                    if loss is None or not loss.requires_grad:  # a constant, such as the spread of a single expert
                        continue
                    for p, g in zip(wanted, grad(self._root(loss), wanted, allow_unused=True), strict=True):
                        if g is not None:
                            p.grad = g if p.grad is None else p.grad + g.to(p.grad.dtype)
        return reports, any_of(skips)

    def _from_root(self) -> Tensor | float | None:
        """Return the factor of gradients of the differentiated value that gives those of the loss; None for 1."""
        scaler, batches = self.settings.scaler, float(self.settings.accumulate)
        return batches * scaler.inverse() if scaler is not None else None if batches == 1 else batches

    def _accumulated(self, skip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the gradients to those of the step's earlier batches.

        Return 0 on the last batch of a step, else 1; and the same, but 1 if `skip` was 1 in one of the batches.
        """
        with no_grad(), scoped("accumulate"):
            first, count = call("eq", self._count, 0.0), self._count + 1.0
            for p in self.optimizer.parameters():
                if p.grad is not None:
                    total = self.optimizer.state_of(p).moments[_SUM]
                    summed = call("where", first, p.grad, total + p.grad)
                    total.assign(summed)
                    p.grad = summed
            last = call("ge", count, float(self.settings.accumulate))
            self._count.assign(call("where", last, 0.0, count))
            waiting = call("where", last, 0.0, call("full_like", count, value=1.0))
            if skip is None:
                return waiting, waiting
            skips = call("maximum", skip, call("where", first, 0.0, self._skips))
            self._skips.assign(skips)
            return waiting, call("maximum", waiting, skips)


def compile_step(
    program: Program, loss: Loss, optimizer: Optimizer, inputs: Mapping[str, Any], *, accumulate: int = 1,
    amp: object = None, scaler: GradScaler | None = None, clip: float | None = None, executor: str = "auto",
    deterministic: bool = False, device: Device | str = CPU, remat: int | None = None, also: Sequence[StepTerm] = (),
) -> CompiledStep:  # fmt: skip
    """Compile a training step of a program to one plan: forward, backward, clipping and update.

    The next call after an edit or undo re-plans what the edit touched, without re-tracing, and remaps moments with
    their weights. Learning rates, counts and the loss scale are read from variables.

    Args:
        program: a forward pass; the states it assigns (statistics, a random generator's key) are assigned as in a run.
        loss: name of an output that is the loss, or a function whose parameters are named as outputs of the program and
            inputs of the step: `lambda logits, targets: cross_entropy(logits, targets)`. It may use further Parameters.
        optimizer: updates those of its parameters on which the loss depends.
        inputs: name of each input of the program and of the loss -> a Spec or an example array; for an input of the
            program also a shape.
        accumulate: batches per update; every call is one batch, and the gradients of loss / accumulate are summed.
        amp: `bfloat16` or `float16` to run forward and loss under autocast.
        scaler: a GradScaler, for float16.
        clip: maximum norm of all gradients together; None for no limit.
        executor, deterministic, device, remat: see `CompileOptions`; `deterministic=True` gives the bits of the eager
            loop.
        also: terms that read values of the program and their gradients after the backward, in the same plan; see
            `StepTerm`. They train the parameters that they name, or measure.
    Raises: UsageError if `accumulate` or `clip` is out of range, or the loss reads no output; FeedError for a missing,
        unknown or mismatched input.
    """
    options = StepOptions(accumulate, amp, scaler, clip, executor, deterministic, device, remat, tuple(also))
    return CompiledStep(program, loss, optimizer, inputs, options)


def _read_by(program: Program, loss: Loss) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the program's outputs that the loss reads, and the names of all values that it reads."""
    outputs = program.output_names()
    if isinstance(loss, str):
        program.output(loss)
        return (loss,), (loss,)
    names = tuple(inspect.signature(loss).parameters)
    found = tuple(name for name in names if name in outputs)
    if not found:
        expected, got = f"a parameter named {' or '.join(outputs)}", ", ".join(names) or "no parameter"
        raise UsageError("the loss reads no output of the program", where=program.name, expected=expected, got=got)
    return found, names


def _specs(program: Program, inputs: Mapping[str, Any], names: Iterable[str]) -> dict[str, Spec]:
    """Return a dict from names to specs of all inputs of a step. Raises: FeedError listing all problems."""
    declared = {program.path(n): program.spec(n) for n in program.inputs()}
    wanted = [*declared, *(n for n in names if n not in declared and n not in program.output_names())]
    wrong = [f"{name}: no such input of the program or the loss" for name in inputs if name not in wanted]
    wrong += [f"{name}: missing" for name in wanted if name not in inputs]
    taken = {program.path(n) for n in program.nodes()} - declared.keys()
    wrong += [f"{name}: name already used by a node of the program" for name in wanted if name in taken]
    given = [name for name in wanted if name in inputs]
    specs = {name: spec_of(inputs[name], declared[name].dtype if name in declared else None) for name in given}
    wrong += [f"{n}: a shape has no dtype: pass a Spec or an example array" for n, s in specs.items() if s is None]
    found = {name: spec for name, spec in specs.items() if spec is not None}
    dims: dict[str, int] = {}
    for name, spec in declared.items():
        if name in found and (found[name].dtype is not spec.dtype or not spec.match(found[name].sizes, dims)):
            wrong.append(f"{name}: expected {spec.bind(dims)}, got {found[name]}")
    if wrong:
        raise FeedError("inputs do not match:\n  " + "\n  ".join(wrong), where=program.name,
                        fix="pass a Spec or an example array per input of the program and the loss")  # fmt: skip
    return found
