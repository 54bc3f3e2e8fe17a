"""Calls of a module with other parameters than its own, under torch's name; gradients flow to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graphwright.autograd import Tensor
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.module import Module


def functional_call(
    module: Module,
    parameters_and_buffers: Mapping[str, Tensor],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run a module with tensors in place of its parameters and buffers of these names; the others stay.

    Writes of the module to a replaced buffer are lost.

    Args:
        args: a tuple of arguments, or one argument.
    Raises: UsageError for an unknown name, ShapeError for another shape.
    """
    given = args if isinstance(args, tuple) else (args,)
    with _replaced(module, parameters_and_buffers):
        return module(*given, **(kwargs or {}))


@contextmanager
def _replaced(module: Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    unknown = [name for name in values if name not in own]
    if unknown:
        what, expected = "the module has no parameters of these names", ", ".join(own)
        raise UsageError(what, where="functional_call", expected=expected, got=", ".join(unknown))
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise ShapeError("a tensor does not fit", where=name, expected=own[name].spec, got=value.spec)
    by_id = {id(own[name]): value for name, value in values.items()}  # a tied parameter is replaced at all its names
    held = [
        (inner, name, v) for inner in module.modules() for name, v in vars(inner).items() if id(v) in by_id
    ]  # fmt: skip
    for inner, name, v in held:
        vars(inner)[name] = by_id[id(v)]
    try:
        yield
    finally:
        for inner, name, v in held:
            vars(inner)[name] = v
