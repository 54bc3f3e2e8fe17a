"""A GPU that computes on the CPU: tensors that are not on the CPU for torch, for tests of kernels without a GPU.

A call of torch that mixes them with tensors of the host raises, as on a GPU, except for numbers (0-d tensors) of the
host. Reading an address as the host's, `numpy()`, raises too. Reads of values by the host are counted in `syncs`, and
the names of all operators of ATen that ran on the device are noted in `operators`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("meta")
"""What such tensors say is their device: one of torch that needs no driver, and takes part in no other way."""
READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default", "aten.is_nonzero.default",
         "aten.unique_dim.default", "aten._unique2.default", "aten.masked_select.default"}  # fmt: skip
"""Operators whose result, or its shape, the host waits for."""


class OnDevice(torch.Tensor):
    """A tensor of the emulated device, whose elements are those of `held` on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=GPU,
        )  # fmt: skip
        made.held = inner
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("the host cannot see memory of the device")

    def __repr__(self, **options: Any) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} outside of the emulated device")


class Emulated(TorchDispatchMode):
    """While active, operators on tensors of the device run."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs, self.operators = 0, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if isinstance(t, OnDevice)]
        asked = kwargs.get("device")
        target = None if asked is None else torch.device(asked).type
        if target == GPU.type:
            kwargs["device"] = torch.device("cpu")
        name = str(function)
        copies = name.startswith(("aten.copy_", "aten._to_copy"))
        if there and not copies:
            wrong = [t for t in tensors if not isinstance(t, OnDevice) and (t.dim() or t.is_meta)]
            if wrong:
                raise RuntimeError(f"{name} mixes tensors of the device and of the host: {[t.shape for t in wrong]}")
        leaves_device = there and (
            target == "cpu" or (name.startswith("aten.copy_") and not isinstance(args[0], OnDevice))
        )
        if there and (name in READS or leaves_device):
            self.syncs += 1
        made = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if there or target == GPU.type:
            self.operators.add(name)
        if leaves_device or name == "aten._local_scalar_dense.default" or not (there or target == GPU.type):
            return made
        if function._schema.is_mutable:
            known = {id(_inner(t)): t for t in tensors}
            return tree_map(lambda t: known.get(id(t), t) if isinstance(t, torch.Tensor) else t, made)
        return tree_map(lambda t: OnDevice(t) if isinstance(t, torch.Tensor) else t, made)


def _inner(t: Any) -> Any:
    return t.held if isinstance(t, OnDevice) else t


class _Made(TorchFunctionMode):
    """Makes tensors of Python's numbers on the device, which torch would do below its modes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and asked is not None and torch.device(asked) == GPU:
            return OnDevice(function(*args, **{**kwargs, "device": "cpu"}))
        return function(*args, **kwargs)


@contextmanager
def emulated() -> Iterator[Emulated]:
    """Run the device while active; `torch.device(GPU)` then makes tensors there."""
    with Emulated() as mode, _Made():
        yield mode
