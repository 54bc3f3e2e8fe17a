"""Function: a user's forward with a gradient of the user's own.

Eagerly and in traces the forward runs as ordinary operations without a tape, and one tape entry stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphwright.autograd.errors import NotDifferentiable
from graphwright.autograd.modes import grad_enabled, no_grad
from graphwright.autograd.recorder import active, scoped
from graphwright.autograd.tape import TapeNode
from graphwright.autograd.tensor import Tensor
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import Saves


class Context:
    """What a forward leaves for its vjp: tensors by `save`, other things as attributes.

    Attributes:
        saved: inside the vjp, the tensors given to `save`, in their order.
    """

    saved: tuple[Tensor, ...]

    def __init__(self) -> None:
        self._kept: tuple[Tensor, ...] = ()

    def save(self, *tensors: Tensor) -> None:
        """Keep tensors for the vjp: operands, results or values between. They are watched for writes and freed."""
        self._kept = tensors


class Function:
    """An operation with its own gradient; subclass it and call `apply`.

    >>> class Scaled(Function):
    ...     @staticmethod
    ...     def forward(ctx, x, factor):
    ...         ctx.factor = factor
    ...         return x * factor
    ...
    ...     @staticmethod
    ...     def vjp(ctx, g, needs):
    ...         return g * ctx.factor, None
    >>> y = Scaled.apply(x, 2.0)
    """

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """`forward(ctx, ...)`: compute a tensor or a tuple of tensors from the arguments."""
        raise NotImplementedError

    @staticmethod
    def vjp(ctx: Any, g: Any, needs: tuple[bool, ...]) -> Any:
        """The gradients of the arguments.

        Args:
            g: gradient of the result; of several results a tuple, None for those that nothing depends on.
            needs: per argument whether its gradient is wanted.
        Returns: one entry per argument in order, None where it is not wanted; for one argument the entry alone will do.
        """
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run `forward`; if an argument requires a gradient, `vjp` is what backward will call."""
        ctx = Context()
        with no_grad(), scoped(cls.__name__):
            made = cls.forward(ctx, *args)
        results = made if isinstance(made, tuple) else (made,)
        if not results or not all(isinstance(r, Tensor) for r in results):
            raise UsageError("a forward gives a tensor or a tuple of tensors", where=cls.__name__, got=repr(type(made)))
        outputs = [Tensor(_now(r)) for r in results]  # apart from the arguments, which forward may hand through
        saved, ctx._kept = ctx._kept, ()  # a result held by the context would be a cycle
        if grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            _taped(cls, ctx, args, saved, results, outputs)
        return tuple(outputs) if isinstance(made, tuple) else outputs[0]


def _now(t: Tensor) -> Any:
    """The array or symbol of a tensor at this point of a trace."""
    recorder = active.get()
    return recorder.resolve(t) if recorder is not None and (t.symbolic or t.carried) else t.data


@dataclass(frozen=True, slots=True)
class _Rule:
    """The row of the tape entry: calls the user's vjp with what was saved.

    Attributes:
        places: which of the `count` arguments are operands; values saved on the way are operands behind them.
        kept: per saved tensor whether it is an operand or a result, and its place there.
    """

    function: type[Function]
    ctx: Context
    count: int
    places: tuple[int, ...]
    kept: tuple[tuple[bool, int], ...]
    saves: Saves

    @property
    def name(self) -> str:
        """Of the user's class."""
        return self.function.__name__

    @property
    def why(self) -> Mapping[str, str]:
        """Nothing is missing."""
        return {}

    def vjp(
        self, g: Any, ins: Sequence[Any], outs: Sequence[Any], attrs: object, needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """One gradient per operand."""
        if grad_enabled() and any(is_operand and at >= len(self.places) for is_operand, at in self.kept):
            raise NotDifferentiable(
                "a value saved between operands and results has no tape: no second derivative",
                where=self.name,
                fix="save operands and results, and compute it again in the vjp",
            )
        wanted = [False] * self.count
        for place, need in zip(self.places, needs, strict=False):
            wanted[place] = need
        self.ctx.saved = tuple((ins if is_operand else outs)[at] for is_operand, at in self.kept)
        try:
            given = self.function.vjp(self.ctx, g, tuple(wanted))
        finally:
            del self.ctx.saved
        given = given if isinstance(given, tuple) else (given,)
        if len(given) != self.count:
            raise ComputeError(
                "a vjp must give one gradient per argument", where=self.name, expected=self.count, got=len(given)
            )
        for x in given:
            if not (x is None or isinstance(x, Tensor)):
                raise ComputeError("a vjp gives tensors or None", where=self.name, got=type(x).__name__)
        return (*(given[place] for place in self.places), *[None] * (len(needs) - len(self.places)))


def _taped(
    function: type[Function],
    ctx: Context,
    args: tuple[Any, ...],
    saved: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    outputs: list[Tensor],
) -> None:
    """Make the tape entry of a call."""
    places = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
    operands: list[Tensor] = [args[i] for i in places]
    kept: list[tuple[bool, int]] = []
    for t in saved:
        port, place = _place(t, results), _place(t, operands)
        if place is not None:
            kept.append((True, place))
        elif port is not None:
            kept.append((False, port))
        else:  # a value between: an operand that wants no gradient
            kept.append((True, len(operands)))
            operands.append(t)
    saves = Saves(tuple(at for side, at in kept if side), tuple(at for side, at in kept if not side))
    row = _Rule(function, ctx, len(args), places, tuple(kept), saves)
    TapeNode(row, {}, operands, [_now(t) for t in operands], outputs).take(outputs)


def _place(t: Tensor, among: Sequence[Tensor]) -> int | None:
    return next((i for i, other in enumerate(among) if other is t), None)
