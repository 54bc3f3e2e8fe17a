"""A module or a program as a `torch.nn.Module`: torch's optimizers, losses and modules around it, gradients both ways.

The bridge to torch is in `array/`, which alone imports it; this is the lowest layer that knows modules, programs and
plans, so what runs inside is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from graphwright.array import NDArray
from graphwright.autograd import Tensor, Variable, grad, no_grad
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.plan import compile
from graphwright.program import Program


def as_module(target: Module | Program, *, share: bool = True) -> Any:
    """A `torch.nn.Module` that computes what `target` computes.

    Args:
        target: a module, or a program, whose inputs are then given in order or by name.
        share: torch's parameters are the memory of the target's, so that either side trains both; call `.written()` of
            the result before the target runs by itself after a torch optimizer stepped. False: copies, and the target
            stays as it is.
    Returns: a torch module; parameters by their dotted names. Integers and buffers of the target are no parameters.
    Raises: UsageError for a target of another kind.
    """
    if isinstance(target, Program):
        keys = [target.key(n) for n in target.params()]
        variables: Mapping[str, Variable] = {key: target.weights[key] for key in keys}
        names = target.input_names()
    elif isinstance(target, Module):
        target.name_children()
        variables, names = dict(target.named_parameters()), ()
    else:
        raise UsageError("a module or a program becomes a module of torch", got=type(target).__name__)
    return _Wrapped(target, variables, names, share).torch()


class _Wrapped:
    """A target with its variables by name, and the arrays that torch's parameters show."""

    def __init__(
        self, target: Module | Program, variables: Mapping[str, Variable], names: tuple[str, ...], share: bool
    ) -> None:
        self.variables, self.names, self.share = variables, names, share
        self.arrays = {name: v.own() if share else v.data.copy() for name, v in variables.items()}
        self.call = self.infer = target
        if isinstance(target, Program):
            program, planned = target, compile(target)
            self.call = lambda *xs: program(**dict(zip(names, xs, strict=True)))
            single = len(program.outputs()) == 1

            def infer(*xs: Any) -> Any:
                found = planned(dict(zip(names, xs, strict=True)))
                return next(iter(found.values())) if single else found

            self.infer = infer
        self.keys: list[Any] | None = None

    def torch(self) -> Any:
        """The torch module."""
        return import_module("graphwright.array.torch_module").TorchModule(
            self.run,
            self.arrays,
            self.shaped,
            self.names,
            before=self.relink if self.share else None,
            trained={name: v.requires_grad for name, v in self.variables.items()},
        )

    def run(
        self, parameters: Mapping[str, NDArray], inputs: Sequence[NDArray], needs: Sequence[bool]
    ) -> tuple[list[NDArray], Callable[[Sequence[NDArray | None]], list[NDArray | None]]]:
        """Forward on a tape if anything wants a gradient, else without; and the way back."""
        count = len(self.variables)
        feeds = [Tensor(a, requires_grad=need) for a, need in zip(inputs, needs[count:], strict=True)]
        operands = [*self.variables.values(), *feeds]
        with self._as_torch_has_it(parameters, needs):
            if any(needs):
                outs = self.flat(self.call(*feeds))
            else:
                with no_grad():
                    outs = self.flat(self.infer(*feeds))

        def back(given: Sequence[NDArray | None]) -> list[NDArray | None]:
            pairs = [(o, Tensor(g)) for o, g in zip(outs, given, strict=True) if g is not None and o.requires_grad]
            wanted = [t for t, need in zip(operands, needs, strict=True) if need]
            found = iter(grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
            results = [next(found) if need else None for need in needs]
            return [None if g is None else g.own() for g in results]

        return [o.own() for o in outs], back

    @contextmanager
    def _as_torch_has_it(self, parameters: Mapping[str, NDArray], needs: Sequence[bool]) -> Iterator[None]:
        """Inside, variables want the gradients that torch wants, and hold torch's values where nothing is shared."""
        before = [(v, v.data, v.requires_grad) for v in self.variables.values()]
        try:
            for (name, v), need in zip(self.variables.items(), needs, strict=False):
                v.data = v.data if self.share else parameters[name]
                v.requires_grad = need
            yield
        finally:
            for v, data, wants in before:
                v.data, v.requires_grad = data, wants

    def relink(self, written: Sequence[str]) -> dict[str, NDArray]:
        """Count torch's writes; the arrays of variables that hold others now, or whose memory somebody else holds."""
        for name in written:
            self.arrays[name].storage.version += 1
        moved = {n: v.own() for n, v in self.variables.items() if v.shared or v.data is not self.arrays[n]}
        self.arrays.update(moved)
        return moved

    def flat(self, result: Any) -> list[Tensor]:
        """The tensors of a result; `shaped` puts them back."""
        self.keys = list(result) if isinstance(result, Mapping) else None if isinstance(result, Tensor) else []
        return [result] if isinstance(result, Tensor) else list(result.values() if self.keys else result)

    def shaped(self, tensors: Sequence[Any]) -> Any:
        """A tensor, a tuple or a dict, as the target gave it."""
        if self.keys is None:
            return tensors[0]
        return dict(zip(self.keys, tensors, strict=True)) if self.keys else tuple(tensors)
