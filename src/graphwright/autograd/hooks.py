"""Hooks: functions of a tensor's full gradient, called once in each backward; `Tensor.register_hook`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphwright.array import Spec
from graphwright.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

Call = Callable[["Tensor"], "Tensor | None"]


class Hook:
    """One registered function; `remove()` takes it off again, also a second time."""

    __slots__ = ("_owner", "call")

    def __init__(self, call: Call, owner: list[Hook]) -> None:
        self.call, self._owner = call, owner
        owner.append(self)

    def remove(self) -> None:
        """Call it no more."""
        if self in self._owner:
            self._owner.remove(self)


def hooked(hooks: Sequence[Hook], grad: Tensor, spec: Spec) -> Tensor:
    """The gradient after all hooks, each of which may give another of the same spec. Raises: ShapeError, UsageError."""
    from graphwright.autograd.tensor import Tensor

    for hook in list(hooks):
        given = hook.call(grad)
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise UsageError("a hook gives a tensor, or None to leave the gradient", got=type(given).__name__)
        if given.spec != spec:
            raise ShapeError("a hook must keep the spec of the gradient", expected=spec, got=given.spec)
        grad = given
    return grad
