"""A module or program as a `torch.nn.Module`, for use with torch's optimizers, losses and modules.

The bridge to torch itself is `array/torch_module.py`, as only `array/` imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.autograd import Parameter, Tensor, Variable, grad, no_grad
from graphwright.autograd.nested import parts, rebuilt
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.plan import compile
from graphwright.program.op_graph import OpGraph
from graphwright.program.recorder import unlabelled
from graphwright.program.weights import shared_variable

if TYPE_CHECKING:
    from graphwright.program import Program


def as_module(target: Module | Program, *, share: bool = True) -> Any:
    """Wrap a module or program as a `torch.nn.Module`.

    Args:
        target: a module, or a program, whose inputs are passed in order or by name.
        share: whether torch's parameters share the memory of the target's, so that training one trains both; False
            copies. After a step of a torch optimizer, call `.written()` of the result before running the target itself.
    Returns: a torch module with the target's parameters by dotted name; that of a program of a torch module has all
        entries of the module's state that the program still has, buffers too, under the module's keys. Its calls return
        what `forward` of a module returns; for a program the tensor of its one output `out`, a tuple of the outputs
        `out`, `out_1`, ..., or a dict of all outputs by other names.
    Raises: UsageError for any other target.
    """
    if isinstance(target, OpGraph):
        keys = dict.fromkeys(target.key(n) for n in target.params())
        variables = {**_module_state(target), **{key: target.weights[key] for key in keys}}
        names = target.input_names()
    elif isinstance(target, Module):
        target.name_children()
        variables, names = dict(target.named_parameters()), ()
        keys = variables
    else:
        raise UsageError("cannot wrap this as a torch module", expected="Module or Program", got=type(target).__name__)
    buffers = {name for name, v in variables.items() if name not in keys and not isinstance(v, Parameter)}
    return _TorchAdapter(target, variables, buffers, names, share).torch()


def _module_state(program: Program) -> dict[str, Variable]:
    """Return the state of the torch module from which a program was made, by its keys, less what edits removed.

    A tied parameter occurs under each of its keys; a tensor that no node reads is a new variable over the same array.
    """
    found: dict[str, Variable] = {}
    for key, source in program.module_state.items():
        if isinstance(source, Variable):
            found[key] = shared_variable(source, type(source), key)
        elif program.weights.has_key(source):
            found[key] = program.weights.at_key(source)
    return found


class _TorchAdapter:
    """Adapter that runs a module or program for torch; `arrays` maps names to the arrays of torch's tensors.

    Args:
        target: the module or program.
        variables: the parameters and buffers by name; a tied one may have several names.
        buffers: the names of buffers.
        names: names of the inputs.
        share: whether torch's tensors share the memory of the variables.
    """

    def __init__(
        self, target: Module | Program, variables: Mapping[str, Variable], buffers: Collection[str],
        names: tuple[str, ...], share: bool,
    ) -> None:  # fmt: skip
        first: dict[int, str] = {}
        self.aliases = {name: first.setdefault(id(v), name) for name, v in variables.items()}
        self.variables = {name: variables[name] for name in first.values()}
        self.buffers, self.names, self.share = buffers, names, share
        self.arrays = {name: v.own() if share else v.data.copy() for name, v in self.variables.items()}
        self.call = self.infer = target
        if isinstance(target, OpGraph):
            program, planned = target, compile(target)
            self.call = lambda *xs: unlabelled(program(**dict(zip(names, xs, strict=True))))
            self.infer = lambda *xs: unlabelled(planned(dict(zip(names, xs, strict=True))))
        self.structure: Any = 0

    def torch(self) -> Any:
        """Build the torch module that calls this adapter."""
        before, trained = self.relink if self.share else None, {n: v.requires_grad for n, v in self.variables.items()}
        make = import_module("graphwright.array.torch_module").TorchModule
        return make(self.run, self.arrays, self.shaped, self.names, before=before, trained=trained,
                    buffers=self.buffers, aliases=self.aliases)  # fmt: skip

    def run(
        self, parameters: Mapping[str, NDArray], inputs: Sequence[NDArray], needs: Sequence[bool]
    ) -> tuple[list[NDArray], Callable[[Sequence[NDArray | None]], list[NDArray | None]]]:
        """Run forward, on a tape if any gradient is needed; return the results and the function that runs backward.

        `needs` has for each parameter, then for each input, whether its gradient is needed. The function maps gradients
        of the results to those of the parameters and inputs.
        """
        count = len(self.variables)
        feeds = [Tensor(a, requires_grad=need) for a, need in zip(inputs, needs[count:], strict=True)]
        operands = [*self.variables.values(), *feeds]
        with self._torch_values(parameters, needs):
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
    def _torch_values(self, parameters: Mapping[str, NDArray], needs: Sequence[bool]) -> Iterator[None]:
        """Context manager: run the target with torch's parameters; on exit, restore its own.

        Inside, each variable has its array from `parameters`, unless it shares torch's anyway, and the `requires_grad`
        that is its entry in `needs`.
        """
        before = [(v, v.data, v.requires_grad) for v in self.variables.values()]
        try:
            for (name, v), need in zip(self.variables.items(), needs, strict=False):
                v.data = v.data if self.share else parameters[name]
                v.requires_grad = need
            yield
        finally:
            for (name, v), (_, data, wants) in zip(self.variables.items(), before, strict=True):
                if not self.share and name in self.buffers and v.data is not parameters[name]:  # a state was written
                    parameters[name].copy_from(v.data)
                v.data, v.requires_grad = data, wants

    def relink(self, written: Sequence[str]) -> dict[str, NDArray]:
        """Mark the arrays of names in `written` as modified; return {name: array} of parameters with a new array."""
        for name in written:
            self.arrays[name].storage.version += 1
        moved = {n: v.own() for n, v in self.variables.items() if v.shared or v.data is not self.arrays[n]}
        self.arrays.update(moved)
        return moved

    def flat(self, result: Any) -> list[Tensor]:
        """Flatten a result to a list of tensors, and remember its structure for `shaped`."""
        found: list[Tensor] = []
        self.structure = _numbered(result, found)
        return found

    def shaped(self, tensors: Sequence[Any]) -> Any:
        """Return the tensors in the structure of the target's last result."""
        return _filled(self.structure, tensors)


def _numbered(value: Any, found: list[Tensor]) -> Any:
    """Append the tensors of a nested result to `found`; return the result with their indices instead."""
    if isinstance(value, tuple | list | Mapping):
        return rebuilt(value, {key: _numbered(inner, found) for key, inner in parts(value).items()})
    if value is None:
        return None
    found.append(value)
    return len(found) - 1


def _filled(at: Any, tensors: Sequence[Any]) -> Any:
    """Return a structure of `_numbered` with tensors instead of indices."""
    if at is None or isinstance(at, int):
        return at if at is None else tensors[at]
    return rebuilt(at, {key: _filled(inner, tensors) for key, inner in parts(at).items()})
