"""Function: a forward pass with a user-defined gradient.

The forward runs as ordinary operations without a tape, eagerly and in traces; one tape node stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.errors import NotDifferentiable
from graphwright.autograd.modes import is_grad_enabled, no_grad
from graphwright.autograd.recorder import active_recorder, scoped
from graphwright.autograd.tape import TapeNode
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import Saves
from graphwright.ops.registry import Traits

if TYPE_CHECKING:
    from graphwright.array import Device
    from graphwright.autograd.tensor import Tensor


class Context:
    """Container that passes values from a forward to its vjp: tensors by `save`, other values as attributes.

    Attributes:
        saved: inside the vjp, the tensors given to `save`, in their order.
        needs_input_grad: inside a `backward`, per argument whether its gradient is needed.
    """

    saved: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def __init__(self) -> None:
        self._pending: tuple[Tensor, ...] = ()

    def save(self, *tensors: Tensor) -> None:
        """Save operands, results or intermediate values for the vjp; checked for in-place writes, freed by backward."""
        self._pending = tensors

    save_for_backward = save

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The same as `saved`, under torch's name."""
        return self.saved


class Function:
    """An operation with a user-defined gradient: subclass it and call `apply`.

    The gradient is `vjp`, or torch's `backward(ctx, *grads)` with `ctx.save_for_backward` and `ctx.saved_tensors`.

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
        """Compute a tensor or a tuple of tensors from the arguments; define it as `forward(ctx, ...)`."""
        raise NotImplementedError("this Function does not define forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compute the gradients of the arguments in torch's form: zeros for unused results; used if there is no vjp."""
        raise NotImplementedError("this Function defines neither vjp nor backward")

    @staticmethod
    def vjp(ctx: Any, g: Any, needs: tuple[bool, ...]) -> Any:
        """Compute the gradients of the arguments.

        Args:
            g: gradient of the result; for several results a tuple with None for unused ones.
            needs: per argument whether its gradient is needed.
        Returns: one entry per argument, None where it is not needed; with one argument, the entry alone is allowed.
        """
        raise NotImplementedError("this Function does not define vjp")

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run `forward`; if an argument requires a gradient, backward will call `vjp`."""
        ctx = Context()
        with no_grad(), scoped(cls.__name__):
            made = cls.forward(ctx, *args)
        results = made if isinstance(made, tuple) else (made,)
        if not results or not all(isinstance(r, TensorBase) for r in results):
            what, expected = "forward did not return tensors only", "a tensor, or a tuple of one or more tensors"
            raise UsageError(what, where=cls.__name__, expected=expected, got=type(made).__name__)
        given = [a.data for a in args if isinstance(a, TensorBase)]
        outputs = [as_tensor(_new(_data(r), given)) for r in results]  # new: forward may return its arguments
        saved, ctx._pending = ctx._pending, ()  # a result held by the context would be a cycle
        if is_grad_enabled() and any(isinstance(a, TensorBase) and a.requires_grad for a in args):
            _put_on_tape(cls, ctx, args, saved, results, outputs)
        return tuple(outputs) if isinstance(made, tuple) else outputs[0]


def _data(t: TensorBase) -> Any:
    """Return the array of a tensor, or its symbol at this point of a trace."""
    recorder = active_recorder.get()
    return recorder.resolve(as_tensor(t)) if recorder is not None and (t.symbolic or t.is_variable) else t.data


def _new(data: Any, given: Sequence[Any]) -> Any:
    """Return an array that writes in place see as a view, if `data` is an argument's own array."""
    shared = isinstance(data, NDArray) and any(data is other for other in given)
    return data.view(data.layout) if shared else data


_UNKNOWN = Traits()


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """Stand-in for an op in the tape node of a Function call; its `vjp` calls the user's `vjp`.

    Attributes:
        operands: indices of the tensors among the `count` arguments. They are the node's first operands; the saved
            intermediate values follow.
        saved: per saved tensor whether it is an operand (else a result), and its index among these.
    """

    function: type[Function]
    ctx: Context
    count: int
    operands: tuple[int, ...]
    saved: tuple[tuple[bool, int], ...]
    saves: Saves

    @property
    def name(self) -> str:
        """Name of the user's class."""
        return self.function.__name__

    @property
    def traits(self) -> Traits:
        """Properties as in `Op.traits`: none are known of the user's function."""
        return _UNKNOWN

    @property
    def why(self) -> Mapping[str, str]:
        """Reasons for missing rules, as in `Op.why`; empty, because the vjp exists."""
        return {}

    def vjp(
        self, g: Any, ins: Sequence[Any], outs: Sequence[Any], attrs: object, needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Call the user's vjp; return one gradient per operand."""
        if is_grad_enabled() and any(is_operand and at >= len(self.operands) for is_operand, at in self.saved):
            what = "no second derivative, because forward saved an intermediate value for the vjp, which has no tape"
            fix = "save operands and results only, and recompute the value in the vjp"
            raise NotDifferentiable(what, where=self.name, fix=fix)
        wanted = [False] * self.count
        for i, need in zip(self.operands, needs, strict=False):
            wanted[i] = need
        self.ctx.saved = tuple((ins if is_operand else outs)[at] for is_operand, at in self.saved)
        try:
            given = self._pull_back(g, outs, tuple(wanted))
        finally:
            del self.ctx.saved
        given = given if isinstance(given, tuple) else (given,)
        if len(given) != self.count:
            what = "the vjp did not return one gradient (or None) per argument"
            raise ComputeError(what, where=self.name, expected=self.count, got=len(given))
        for x in given:
            if not (x is None or isinstance(x, TensorBase)):
                what, got = "the vjp returned a gradient of the wrong type", type(x).__name__
                raise ComputeError(what, where=self.name, expected="a tensor or None", got=got)
        return (*(given[i] for i in self.operands), *[None] * (len(needs) - len(self.operands)))

    def _pull_back(self, g: Any, outs: Sequence[Any], needs: tuple[bool, ...]) -> Any:
        """Call the user's `vjp`, or else `backward`, which gets zeros in place of None."""
        if self.function.vjp is not Function.vjp:
            return self.function.vjp(self.ctx, g, needs)
        self.ctx.needs_input_grad = needs
        grads = g if isinstance(g, tuple) else (g,)
        grads = [_zeros_like(o) if x is None else x for x, o in zip(grads, outs, strict=True)]
        return self.function.backward(self.ctx, *grads)


def _zeros_like(spec: Any) -> Tensor:
    """Return zeros of the shape and dtype of a tensor or spec."""
    return as_tensor(np.zeros(spec.shape, np.float32), dtype=spec.dtype)


def _put_on_tape(
    function: type[Function],
    ctx: Context,
    args: tuple[Any, ...],
    saved: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    outputs: list[Tensor],
) -> None:
    arguments = tuple(i for i, a in enumerate(args) if isinstance(a, TensorBase))
    operands: list[Tensor] = [args[i] for i in arguments]
    found: list[tuple[bool, int]] = []
    for t in saved:
        operand, result = _index(t, operands), _index(t, results)
        if operand is not None:
            found.append((True, operand))
        elif result is not None:
            found.append((False, result))
        else:  # an intermediate value: an operand that needs no gradient
            found.append((True, len(operands)))
            operands.append(t)
    saves = Saves(tuple(at for is_operand, at in found if is_operand), tuple(at for is_op, at in found if not is_op))
    rule = FunctionRule(function, ctx, len(args), arguments, tuple(found), saves)
    TapeNode(rule, {}, operands, [_data(t) for t in operands], outputs).take(outputs)


def _index(t: Tensor, among: Sequence[Tensor]) -> int | None:
    return next((i for i, other in enumerate(among) if other is t), None)


class ToDevice(Function):
    """Copy a tensor to another device; the gradient is copied back. `Tensor.to` calls it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Device) -> Tensor:
        """Copy to the device. Raises: TraceError for a traced tensor."""
        ctx.source = x.device
        return as_tensor(x.concrete("to(device)").to(device))

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor, None]:
        """Copy back to the device of the operand."""
        return g.to(ctx.source), None
