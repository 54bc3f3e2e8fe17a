"""Hooks of modules: functions called before and after `forward`, and in backward with the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphwright.autograd import Function, Tensor, changes, is_grad_enabled

if TYPE_CHECKING:
    from graphwright.nn.module import Module

_Hook = tuple[Callable[..., Any], bool]
"""A hook, and whether it takes keyword arguments."""


class HookHandle:
    """A registered hook, which `remove()` removes."""

    def __init__(self, hooks: dict[HookHandle, _Hook]) -> None:
        self.hooks = hooks

    def remove(self) -> None:
        """Remove the hook; again has no effect."""
        self.hooks.pop(self, None)
        changes.rise()


class _Passed(Function):
    """The operands themselves; `receive` gets their gradients, None for unused ones, and returns others."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[[tuple[Any, ...]], tuple[Any, ...]], *tensors: Tensor) -> Any:
        ctx.receive = receive
        return tensors

    @staticmethod
    def vjp(ctx: Any, g: Any, needs: Any) -> Any:
        return None, *ctx.receive(g if isinstance(g, tuple) else (g,))


class Hooks:
    """The hooks of a module, in the order of registration."""

    def __init__(self) -> None:
        self.before: dict[HookHandle, _Hook] = {}
        self.after: dict[HookHandle, _Hook] = {}
        self.backward: dict[HookHandle, _Hook] = {}

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the hooks and `forward`."""
        for hook, with_kwargs in list(self.before.values()):
            found = hook(module, args, kwargs) if with_kwargs else hook(module, args)
            if found is not None and with_kwargs:
                args, kwargs = found
            elif found is not None:
                args = found if isinstance(found, tuple) else (found,)
        watched = _Watched(module, list(self.backward.values())) if self.backward and is_grad_enabled() else None
        output = module.forward(*(args if watched is None else watched.inputs(args)), **kwargs)
        for hook, with_kwargs in list(self.after.values()):
            found = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
            output = output if found is None else found
        return output if watched is None else watched.outputs(output)


class _Watched:
    """One call of a module with backward hooks: tape nodes around its tensors tell the hooks their gradients."""

    def __init__(self, module: Module, hooks: Sequence[_Hook]) -> None:
        self.module, self.hooks = module, hooks
        self.of_outputs: tuple[Any, ...] = ()
        self.count = 0  # of inputs that require a gradient

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with tensors that require a gradient on the tape of the hooks."""
        at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        self.positions = [at.index(i) if i in at else None for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.count = len(at)
        if not at:
            return args
        made = dict(zip(at, _Passed.apply(self._hooked, *(args[i] for i in at)), strict=True))
        return tuple(made.get(i, a) for i, a in enumerate(args))

    def outputs(self, output: Any) -> Any:
        """Return the output, a tensor or a tuple, with its tensors on the tape of the hooks."""
        parts = output if isinstance(output, tuple) else (output,)
        at = [i for i, t in enumerate(parts) if isinstance(t, Tensor)]
        if not any(parts[i].requires_grad for i in at):
            return output
        made = dict(zip(at, _Passed.apply(self._noted, *(parts[i] for i in at)), strict=True))
        found = tuple(made.get(i, t) for i, t in enumerate(parts))
        return found if isinstance(output, tuple) else found[0]

    def _noted(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        self.of_outputs = grads
        if not self.count:
            self._hooked(())
        return grads

    def _hooked(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call the hooks with the gradients of all tensors among the arguments; return those that require one."""
        given = tuple(None if at is None else grads[at] for at in self.positions)
        for hook, _ in self.hooks:
            found = hook(self.module, given, self.of_outputs)
            given = given if found is None else found if isinstance(found, tuple) else (found,)
        return tuple(g for g, at in zip(given, self.positions, strict=True) if at is not None)
