"""TorchModule: a `torch.nn.Module` that runs a function of arrays, with gradients for torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from graphwright.array.ndarray import NDArray, from_dlpack

Arrays = Sequence[NDArray]
Back = Callable[[Sequence[NDArray | None]], Sequence[NDArray | None]]
Run = Callable[[Mapping[str, NDArray], Arrays, Sequence[bool]], tuple[Arrays, Back]]


class _Bridge(torch.autograd.Function):
    """The function of a TorchModule, as a function of torch's autograd."""

    @staticmethod
    def forward(ctx: Any, run: Run, names: Sequence[str], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the function; `tensors` are the parameters in the order of `names`, then the inputs."""
        arrays = [from_dlpack(t.detach().resolve_neg()) for t in tensors]
        count = len(names)
        parameters = dict(zip(names, arrays[:count], strict=True))
        outs, ctx.back = run(parameters, arrays[count:], ctx.needs_input_grad[2:])
        made = tuple(torch.from_dlpack(o.copy() if o.storage.readonly else o) for o in outs)
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's decorator is untyped
        ctx: Any, *grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the parameters and inputs, given those of the outputs."""
        given = [None if g is None else from_dlpack(g.detach().contiguous()) for g in grad_outputs]
        found = ctx.back(given)
        return (None, None, *(None if g is None else torch.from_dlpack(g) for g in found))


class TorchModule(torch.nn.Module):
    """A torch module that runs a function of arrays; `forward` takes and returns torch tensors.

    Args:
        run: function of (parameters by name, inputs, bools: which of both need a gradient); returns (outputs, function
            from the outputs' gradients to those of the parameters and the inputs).
        parameters: dict from dotted names to arrays, whose memory the module's parameters share. Dots separate names
            of submodules, as in torch.
        shape: converts the sequence of outputs to the value that the module returns.
        names: names of the inputs, for keyword arguments.
        before: called before each run with the names of parameters that torch has written since the last run; returns
            a dict from names to the arrays that replace parameters.
        trained: dict from names to whether a parameter needs a gradient; by default all floating ones do.
        buffers: names in `parameters` that are buffers.
        aliases: dict from all names, in order, to the name in `parameters` of the same tensor; by default each has one.
    """

    @torch.inference_mode(False)  # parameters made in inference mode could never be trained
    def __init__(
        self, run: Run, parameters: Mapping[str, NDArray], shape: Callable[[Sequence[torch.Tensor]], Any],
        names: Sequence[str] = (), before: Callable[[Sequence[str]], Mapping[str, NDArray]] | None = None,
        trained: Mapping[str, bool] | None = None, buffers: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._run, self._shape, self._names, self._before = run, shape, tuple(names), before
        self._linked: dict[str, torch.Tensor] = {}
        for name, array in parameters.items():
            made = torch.from_dlpack(array)
            if name not in buffers:
                wanted = trained is None or trained.get(name, True)
                made = torch.nn.Parameter(made, requires_grad=wanted and array.dtype.is_float)
            self._linked[name] = made
        for name, of in (aliases or {n: n for n in self._linked}).items():
            home: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in dict(home.named_children()):
                    home.add_module(part, torch.nn.Module())
                home = home.get_submodule(part)
            tensor = self._linked[of]
            if isinstance(tensor, torch.nn.Parameter):
                home.register_parameter(leaf, tensor)
            else:
                home.register_buffer(leaf, tensor)
        self._seen = {name: p._version for name, p in self._linked.items()}

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> Any:
        """Run on tensors given by position or by name. Raises: TypeError for missing or unknown inputs."""
        unknown = named.keys() - set(self._names[len(args) :])
        if unknown or (self._names and len(args) + len(named) != len(self._names)):
            raise TypeError(
                f"expected inputs {', '.join(self._names) or 'by position'}; got {len(args)} by position, "
                f"{', '.join(named) or 'none'} by name"
            )
        tensors = [*args, *(named[n] for n in self._names[len(args) :])]
        self.written()
        made = _Bridge.apply(self._run, tuple(self._linked), *self._linked.values(), *tensors)
        self.written()  # states of which the run has replaced the array
        return self._shape(made)

    def written(self) -> None:
        """Call `before` with the names of the parameters that torch has written, and adopt the arrays that it returns.

        `forward` calls this. Call it after a step of a torch optimizer if the arrays are next used without this module.
        """
        if self._before is None:
            return
        changed = [name for name, p in self._linked.items() if p._version != self._seen[name]]
        for name, array in self._before(changed).items():
            self._linked[name].data = torch.from_dlpack(array)
        self._seen = {name: p._version for name, p in self._linked.items()}
