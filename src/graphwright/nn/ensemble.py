"""Ensembles: models of one structure that run and train together, as one program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphwright.autograd import Parameter, Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.program import Program, trace
from graphwright.program.derived.stack import stack
from graphwright.program.kinds import CONST


class Ensemble:
    """Models of one structure stacked to one program, whose weights have a leading axis of members.

    Training it is training each member by itself, up to rounding, if the loss is the sum of the members' losses and the
    optimizer works element by element. What mixes members is no longer the same: clipping by the norm of all gradients.

    Args:
        models: modules, which are traced with the examples, or programs.
        examples: arguments of the modules: arrays or tensors, of which only the specs matter.
        sizes: named sizes of the inputs, as for `gw.trace`, such as `{"x": ("B", 8)}` for any batch size.
        shared: names of inputs that all members read; by default all. Each other input has a leading axis [members].
    Raises: NotStackable if the structures differ or an op draws random numbers; TraceError; UsageError.

    Attributes:
        program: the stacked program; its weights are copies of those of the models.
        models: the models.

    >>> ensemble = gw.nn.Ensemble([gw.nn.Linear(4, 2) for _ in range(8)], gw.rand(16, 4))
    >>> ensemble(gw.rand(16, 4)).shape
    (8, 16, 2)
    """

    def __init__(
        self, models: Sequence[Module] | Sequence[Program], *examples: Any,
        sizes: Mapping[str, Sequence[int | str | None]] | None = None, shared: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        if wrong := [type(m).__name__ for m in models if not isinstance(m, Module | Program)]:
            raise UsageError("cannot stack this", expected="modules or programs", got=", ".join(dict.fromkeys(wrong)))
        self.models = list(models)
        self._members = [m if isinstance(m, Program) else trace(m, *examples, sizes=sizes) for m in models]
        self.program = stack(self._members, shared=shared)

    def __len__(self) -> int:
        return len(self.models)

    def __call__(self, *inputs: Any, **feeds: Any) -> Any:
        """Run all members on tensors, differentiable and traceable.

        Args:
            inputs, feeds: inputs in order or by name, with the leading axis where they are not shared.
        Returns: the only output [members, ...], or a dict of several by name.
        Raises: FeedError for inputs that do not fit; UsageError for too many.
        """
        names = self.program.input_names()
        if len(inputs) > len(names):
            raise UsageError("too many inputs", where=repr(self), expected=", ".join(names), got=len(inputs))
        found = self.program(**dict(zip(names, inputs, strict=False)), **feeds)
        return next(iter(found.values())) if len(found) == 1 else found

    def parameters(self) -> Iterator[Parameter]:
        """Iterate over the trainable variables, each with the values of all members."""
        return self.program.parameters()

    def unstack(self) -> None:
        """Write the weights and states of each member into its model."""
        with no_grad():
            for name in self.program.weight_keys():
                stacked = self.program.weights[name]
                for k, member in enumerate(self._members):
                    if name in member.weights and any(member.op(n) != CONST for n in member.readers(name)):
                        member.weights[name].assign(Tensor(stacked.data)[k])

    def __repr__(self) -> str:
        return f"Ensemble({len(self)} x {self._members[0].name!r})"
