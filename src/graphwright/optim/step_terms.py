"""Further terms of a compiled training step, which read values of the program and their gradients after the backward.

The result of the program does not change. A term adds to the gradients of the parameters that it names, before they are
accumulated, clipped and used; it may also only measure. It is tensor code, traced into the plan of the step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

from graphwright.array import bool_
from graphwright.autograd import Parameter, Tensor, Variable
from graphwright.errors import Diverged, UsageError
from graphwright.ops import call
from graphwright.optim.optimizer import wide
from graphwright.program.derived.gradient import endpoint
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Ref, Value

if TYPE_CHECKING:
    from graphwright.program.derived.step import StepValues
    from graphwright.program.program import Program

PATIENCE = 5
"""Number of consecutive skipped steps at which a training has diverged."""


class StepTerm:
    """Base of terms, for `compile_step(..., also=[term])`; a subclass defines what it needs of these methods.

        class Sparse(StepTerm):                                # L1 norm of a weight, times the gradient at its layer
            def nodes(self, program):
                return ["up"]

            def trains(self, program):
                return ["up.weight"]

            def __call__(self, view):
                share = view.gradient("up").abs().mean()       # a constant
                view.report("share", share)
                return 1e-3 * share * view.parameter("up.weight").abs().sum()

    Attributes:
        name: prefix of its names in the plan and in saved trainings; by default that of the class in lower case.
    """

    name: str = ""

    def nodes(self, program: Program) -> Iterable[Ref]:
        """Return the nodes whose results and gradients it reads; asked again after each edit."""
        return ()

    def trains(self, program: Program) -> Iterable[str]:
        """Return keys of the weights to whose gradients it adds, none if it measures; asked again after each edit."""
        return ()

    def variables(self) -> Mapping[str, Variable]:
        """Return its own state by name, which it may assign; it is part of saved trainings."""
        return {}

    def __call__(self, view: StepView) -> Tensor | None:
        """Return a loss, 0-d, whose gradient is added to that of the parameters that it trains; or None."""
        return None


class Asked:
    """What a term reads and trains in the present program. Raises: UsageError for another weight than a param."""

    def __init__(self, name: str, term: StepTerm, program: Program) -> None:
        self.name, self.term, self.program = name, term, program
        self.nodes = {endpoint(program, ref).node for ref in term.nodes(program)}
        self.trains: dict[str, Parameter] = {}
        self.needs: dict[str, Parameter] = {}  # those that are not frozen
        self.params: list[Value] = []
        for key in term.trains(program):
            found = [n for n in program.readers(key) if program.op(n) == PARAM]
            variable = program.weights[key] if found else None
            if not isinstance(variable, Parameter):
                raise UsageError("a term trains a weight which is unknown, or not a param", where=name, got=key,
                                 expected="keys of params", fix="return keys of program.weights")  # fmt: skip
            self.trains[key] = variable
            self.params += [Value(n) for n in found]
            if program.attrs(found[0]).get("trainable", True):
                self.needs[key] = variable

    def loss(self, view: StepView, trained: Collection[Parameter]) -> Tensor | None:
        """Run the term. Raises: UsageError for an invalid result, or parameters that are not in `trained`."""
        missing = [key for key, p in self.needs.items() if p.requires_grad and p not in trained]
        if missing:
            raise UsageError("a term trains parameters that the optimizer does not have", where=self.name,
                             got=", ".join(missing), fix="pass them to the optimizer too")  # fmt: skip
        found = self.term(view)
        if found is not None and (not isinstance(found, Tensor) or found.shape):
            raise UsageError("a term does not return a 0-d loss or None", where=self.name,
                             got=getattr(found, "spec", found), fix="reduce it, as by its mean")  # fmt: skip
        if found is not None and not self.trains:
            raise UsageError("a term returns a loss but trains no parameter", where=self.name,
                             fix="return the keys of parameters from trains(), or None as the loss")  # fmt: skip
        return found

    def values(self) -> Iterable[Value]:
        """Iterate over all values that the step provides for the term."""
        p = self.program
        yield from (Value(node, port) for node in sorted(self.nodes) for port in range(len(p.specs(node))))
        yield from self.params


class StepView:
    """What a term reads in a step; all tensors are detached, except the parameters that it trains.

    Gradients are those of the loss of this batch, without loss scale and accumulation, in float32 or wider.

    Attributes:
        program: the trained program.
        loss: the loss of this batch, 0-d.
        scaled: whether a GradScaler scales the loss; it then skips updates whose gradients overflow.
    """

    def __init__(
        self, asked: Asked, seen: StepValues, grads: Mapping[Parameter, Tensor], factor: Tensor | float | None,
        reports: dict[str, Tensor], skips: list[Tensor],
    ) -> None:  # fmt: skip
        self.program, self.loss, self.scaled = asked.program, seen.results["loss"], isinstance(factor, Tensor)
        self._asked, self._seen, self._grads, self._factor = asked, seen, grads, factor
        self._reports, self._skips = reports, skips

    def value(self, ref: Ref, port: int = 0) -> Tensor:
        """Return a result of a node that `nodes` returns. Raises: UsageError for another node."""
        return self._seen.values[self._declared(ref, port)]

    def gradient(self, ref: Ref, port: int = 0) -> Tensor:
        """Return the gradient of the loss with respect to a result of a node that `nodes` returns.

        It is zero where the loss does not depend on the result. Raises: UsageError for another node, or for integers.
        """
        at = self._declared(ref, port)
        value = self._seen.values[at]
        if not value.dtype.is_float:
            raise UsageError("integers and bools have no gradient", where=self._where(at), got=value.spec)
        if at not in self._seen.gradients:
            return call("full_like", value.to(wide(value.dtype)), value=0.0)
        return self._unscaled(self._seen.gradients[at])

    def parameter(self, key: str) -> Parameter | Tensor:
        """Return a parameter by its key, before the update; a detached value unless `trains` names it."""
        if key in self._asked.trains:
            return self._asked.trains[key]
        return self.program.weights[key].detach()

    def grad(self, key: str) -> Tensor | None:
        """Return the gradient of the loss with respect to a trained parameter; None if it does not depend on it."""
        variable = self.program.weights[key]
        found = self._grads.get(variable) if isinstance(variable, Parameter) else None
        return None if found is None else self._unscaled(found)

    def named(self, name: str) -> Tensor:
        """Return an input of the step, or an output of the program that the loss reads. Raises: UsageError."""
        if name not in self._seen.named:
            raise UsageError("the step has no such value", where=self._asked.name, got=name,
                             expected=", ".join(self._seen.named), fix="return its node from nodes()")  # fmt: skip
        return self._seen.named[name]

    def report(self, name: str, value: Tensor) -> None:
        """Make a value a further result of the step: `step.reports[name]` after a call. Raises: UsageError if taken."""
        if name in ("loss", "skipped") or name in self._reports:
            raise UsageError("a result of the step has this name", where=self._asked.name, got=name,
                             fix="report it under another name")  # fmt: skip
        self._reports[name] = value.detach()

    def skip(self, flag: Tensor) -> None:
        """Where `flag`, a 0-d bool, is True, skip the update: no weight, moment or step count changes.

        The step then returns NaN as its loss, and `step.skipped` is True. With `accumulate=k`, a flag in one of the k
        batches skips their update. Raises: UsageError for another tensor.
        """
        if flag.shape or flag.dtype is not bool_:
            raise UsageError("the flag of a skipped update is not a 0-d bool", where=self._asked.name, got=flag.spec)
        self._skips.append(flag.detach())

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Assign a state of the term, unless this term or one before it skips the update."""
        skipped = any_of(self._skips)
        kept = value if skipped is None else call("where", skipped, variable, value)
        variable.assign(kept.to(variable.dtype))

    def _declared(self, ref: Ref, port: int) -> Value:
        found = endpoint(self.program, ref)
        at = Value(found.node, port or found.port)
        if found.node not in self._asked.nodes or at not in self._seen.values:
            raise UsageError("a term reads a value that it did not ask for", where=self._where(at),
                             expected=", ".join(self.program.path(n) for n in sorted(self._asked.nodes)) or "no value",
                             fix="return the node from nodes()")  # fmt: skip
        return at

    def _unscaled(self, gradient: Tensor) -> Tensor:
        known = gradient.to(wide(gradient.dtype))
        return known if self._factor is None else known * self._factor

    def _where(self, at: Value) -> str:
        return f"{self._asked.name}: {self.program.path(at.node)}"


def check_streak(streak: int, where: object, fix: str = "") -> None:
    """Raise Diverged if the updates of at least `PATIENCE` steps in a row were skipped; `fix` is a further one."""
    if streak >= PATIENCE:
        raise Diverged("loss or gradients of consecutive steps were not finite, so that their updates were skipped",
                       where=where, expected=f"fewer than {PATIENCE} such steps in a row", got=f"{streak} steps",
                       fix=f"check the batches, use a smaller learning rate, or clip=1.0{fix}")  # fmt: skip


def any_of(flags: Sequence[Tensor]) -> Tensor | None:
    """Return whether one of some 0-d bools is True, 0-d; None without any."""
    return reduce(partial(call, "logical_or"), flags) if flags else None


def named_terms(terms: Sequence[StepTerm]) -> dict[str, StepTerm]:
    """Return terms by their names, made unique by numbers. Raises: UsageError for an invalid name."""
    found: dict[str, StepTerm] = {}
    for term in terms:
        wanted = term.name or type(term).__name__.lower()
        if not re.fullmatch(r"\w+", wanted):
            raise UsageError("invalid name of a term", where="also", got=wanted, fix="use letters, digits, _")
        name, number = wanted, 2
        while name in found:
            name, number = f"{wanted}_{number}", number + 1
        found[name] = term
    return found
