"""Module: parameters, buffers and children by attribute, dotted names, and scopes that name traced nodes."""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, Self, TypeVar

from graphwright.array import Device, NDArray, empty, names_device
from graphwright.array import dtype as named
from graphwright.autograd import (
    Parameter,
    Tensor,
    Variable,
    active_recorder,
    as_tensor,
    changes,
    scope,
    scoped,
    training,
    zeros_like,
)
from graphwright.errors import DTypeError, UsageError
from graphwright.files import blake2b_128
from graphwright.nn.hooks import HookHandle, Hooks

_Path = tuple[str, ...]
"""Names of the attributes that lead from the root to a module."""


class _Paths(list[_Path]):
    """The paths of a module: several if it is shared."""


_PLAIN = frozenset({bool, int, float, str, type(None), _Paths})
"""Types of attributes that contain no module or variable."""


_SHORT = (bool, int, float, str, tuple)
"""Types of attributes that `repr` shows."""

_Held = TypeVar("_Held")
_Value = TypeVar("_Value")


class Buffer(Variable):
    """A variable of a module that is not trained; saved with the module if `persistent`."""

    __slots__ = ("persistent",)

    def __init__(self, data: Any, persistent: bool = True, name: str = "") -> None:
        super().__init__(data, False, name)
        self.persistent = persistent


class IncompatibleKeys(NamedTuple):
    """The result of `load_state_dict`: keys that the state lacks, and those that the module lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __repr__(self) -> str:
        keys = f"missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys}"
        return f"IncompatibleKeys({keys})" if any(self) else "<All keys matched successfully>"


class Module:
    """A function with parameters. Subclasses set parameters and modules as attributes and define `forward`.

    Names of parameters and buffers are dotted paths of attributes, through lists, tuples and dicts too. A parameter
    that several paths reach is named by the first, which is its key in a traced program.

    Attributes:
        training: whether layers such as dropout and batch norm train; `gw.mode` overrides it.
    """

    @property
    def training(self) -> bool:
        """Whether layers in this module train; see the class."""
        return self.__dict__.get("_training", True)

    @training.setter
    def training(self, value: bool) -> None:
        self.__dict__["_training"] = value
        changes.rise()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, naming traced nodes after the path of the module, whichever module calls it."""
        paths = self.__dict__.get("_paths")
        if paths:
            with scoped(*_remainder(paths, scope.get())):
                return self._run(args, kwargs)
        self.name_children()
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks: Hooks | None = self.__dict__.get("_hooks")
        return self.forward(*args, **kwargs) if hooks is None else hooks.run(self, args, kwargs)

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> HookHandle:
        """Call `hook(module, args)` before `forward`; what it returns, unless None, replaces the arguments.

        With `with_kwargs` it is `hook(module, args, kwargs)`, which returns None or (args, kwargs). A compiled step
        does what the hooks did in its trace.
        Returns: a handle, whose `remove()` removes the hook.
        """
        return self._hook("before", hook, with_kwargs, prepend)

    def register_forward_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> HookHandle:
        """Call `hook(module, args, output)` after `forward`; what it returns, unless None, replaces the output.

        With `with_kwargs` it is `hook(module, args, kwargs, output)`.
        Returns: a handle, whose `remove()` removes the hook.
        """
        return self._hook("after", hook, with_kwargs, prepend)

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Call `hook(module, grad_input, grad_output)` in backward; what it returns, unless None, replaces grad_input.

        Both are tuples with one entry per tensor among the positional arguments, or the results, of the call; None for
        a tensor that needs no gradient. Without a tensor that needs one, the hook runs before the gradients of the
        parameters. Returns: a handle, whose `remove()` removes the hook.
        """
        return self._hook("backward", hook, False, prepend)

    def _hook(self, when: str, hook: Callable[..., Any], with_kwargs: bool, first: bool) -> HookHandle:
        hooks = self.__dict__.setdefault("_hooks", Hooks())
        handle = HookHandle(getattr(hooks, when))
        others = dict(handle.hooks) if first else {}
        if first:
            handle.hooks.clear()
        handle.hooks.update({handle: (hook, with_kwargs), **others})
        changes.rise()
        return handle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; defined by subclasses."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    # -- contents ----------------------------------------------------------------------------------------------------
    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Iterate over (name, module) of direct children; names in lists are `list.0`, ..., in dicts `dict.key`."""
        return _once((name, value) for name, value in self._members() if isinstance(value, Module))

    def children(self) -> Iterator[Module]:
        """Iterate over the direct children, each once."""
        return (child for _, child in self.named_children())

    def modules(self) -> Iterator[Module]:
        """Iterate over this module and all its descendants, each once."""
        return (module for _, module in self.named_modules())

    def named_modules(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """Iterate over (dotted path, module) of this module, whose path is `prefix`, and all its descendants.

        Args:
            remove_duplicate: list a shared module under its first path only.
        """
        seen: set[int] = set()
        stack: list[tuple[str, Module]] = [(prefix, self)]
        while stack:
            path, module = stack.pop()
            if id(module) not in seen or not remove_duplicate:
                seen.add(id(module))
                yield path, module
                inner = [(_joined(path, name), v) for name, v in module._members() if isinstance(v, Module)]
                stack += inner[::-1]

    def apply(self, fn: Callable[[Module], object]) -> Self:
        """Call `fn` on all descendants and then on this module, children before their parents."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def get_submodule(self, target: str) -> Module:
        """Return the descendant at a dotted path; "" is this module. Raises: UsageError if there is no such name."""
        return _found(dict(self.named_modules()), target, "submodule")

    def get_parameter(self, target: str) -> Parameter:
        """Return the parameter of a dotted name. Raises: UsageError if there is no such name."""
        return _found({n: v for n, v in self._variables("") if isinstance(v, Parameter)}, target, "parameter")

    def get_buffer(self, target: str) -> Buffer:
        """Return the buffer of a dotted name. Raises: UsageError if there is no such name."""
        return _found({n: v for n, v in self._variables("") if isinstance(v, Buffer)}, target, "buffer")

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Set the attribute `name` to a buffer with the value of `tensor`, or to None."""
        self._register(name, None if tensor is None else Buffer(_array(tensor), persistent))

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Set the attribute `name` to a parameter or None. Raises: UsageError for any other value."""
        if param is not None and not isinstance(param, Parameter):
            raise UsageError("this is no parameter", where=name, expected="a Parameter or None", got=type(param))
        self._register(name, param)

    def add_module(self, name: str, module: Module | None) -> None:
        """Set the attribute `name` to a module or None. Raises: UsageError for any other value."""
        if module is not None and not isinstance(module, Module):
            raise UsageError("this is no module", where=name, expected="a Module or None", got=type(module))
        self._register(name, module)

    register_module = add_module

    def set_submodule(self, target: str, module: Module, strict: bool = False) -> None:
        """Replace the module at a dotted path, or unless `strict` add it to the module that holds the path.

        Raises: UsageError for the path "", if there is no module to hold it, and if `strict` for a new path.
        """
        holder, _, name = target.rpartition(".")
        owner = self.get_submodule(holder)
        if strict or not name:
            self.get_submodule(target or "an empty path")
        if hasattr(owner, "__setitem__"):
            owner[int(name) if name.isdecimal() else name] = module  # pyright: ignore[reportIndexIssue]  # a container
        else:
            setattr(owner, name, module)

    def _register(self, name: str, value: object) -> None:
        if not name or "." in name or hasattr(type(self), name):
            raise UsageError("an attribute cannot have this name", where=type(self).__name__, got=repr(name),
                             expected="a name without dots that the class does not use")  # fmt: skip
        setattr(self, name, value)

    def _members(self) -> Iterator[tuple[str, Any]]:
        """Yield (dotted name, module or variable) of the attributes and the lists, tuples and dicts in them."""
        stack = [item for item in vars(self).items() if type(item[1]) not in _PLAIN][::-1]
        while stack:
            name, value = stack.pop()
            if isinstance(value, (Module, Variable)):
                yield name, value
            elif isinstance(value, (list, tuple)):
                stack += [(f"{name}.{i}", v) for i, v in enumerate(value)][::-1]
            elif isinstance(value, Mapping):
                stack += [(f"{name}.{k}", v) for k, v in value.items()][::-1]

    def name_children(self) -> None:
        """Set the names by which variables and descendants appear in a trace."""
        deque(self._variables("", {}), maxlen=0)

    def _variables(
        self, prefix: str, named: dict[int, _Paths] | None = None, path: _Path = ()
    ) -> Iterator[tuple[str, Parameter | Buffer]]:
        """Yield (dotted name, parameter or buffer), a tied variable once per name.

        With `named`, also set missing names of variables, and the paths of descendants, which begin with `path`; a
        shared module has several, and `named` maps the id of each module to them.
        """
        children: list[tuple[str, Module]] = []
        for name, value in self._members():
            if isinstance(value, Module):
                children.append((name, value))
            elif isinstance(value, (Parameter, Buffer)):
                if named is not None and not value.name:
                    value.name = prefix + name
                yield prefix + name, value
        for name, child in children:
            below = (*path, name)
            if named is not None:
                paths = named.setdefault(id(child), _Paths())
                paths.append(below)
                child.__dict__["_paths"] = paths
            yield from child._variables(f"{prefix}{name}.", named, below)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Iterate over (dotted name, parameter).

        Args:
            prefix: path of this module, before each name.
            recurse: those of all descendants too.
            remove_duplicate: list a shared parameter under its first name only.
        """
        return self._named(Parameter, prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Buffer]]:
        """Iterate over (dotted name, buffer); the arguments are those of `named_parameters`."""
        return self._named(Buffer, prefix, recurse, remove_duplicate)

    def _named(
        self, kind: builtins.type[_Value], prefix: str, recurse: bool, once: bool
    ) -> Iterator[tuple[str, _Value]]:
        found = self._variables(f"{prefix}." if prefix else "") if recurse else self._members()
        if not recurse and prefix:
            found = ((f"{prefix}.{name}", value) for name, value in found)
        kept = ((name, v) for name, v in found if isinstance(v, kind))
        return _once(kept) if once else kept

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Iterate over the parameters, each once; without `recurse`, over those of this module alone."""
        self.name_children()
        return (p for _, p in self.named_parameters(recurse=recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Buffer]:
        """Iterate over the buffers, each once; without `recurse`, over those of this module alone."""
        return (b for _, b in self.named_buffers(recurse=recurse))

    def variables(self) -> dict[str, Variable]:
        """Return a dict of all saved variables: parameters and persistent buffers, tied ones under each name."""
        return {n: v for n, v in self._variables("") if isinstance(v, Parameter) or v.persistent}

    def structure_hash(self) -> str:
        """Return a BLAKE2b hash of names, ties and specs of `variables()`; equal hashes mean that saved states fit."""
        own = self.variables()
        first: dict[int, str] = {}
        rows = [f"{name} {first.setdefault(id(v), name)} {v.spec}" for name, v in own.items()]
        return blake2b_128("\n".join(rows).encode())

    # -- modes and dtypes --------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Self:
        """Set `training` of this module and all descendants; gradients flow in either mode."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Call `train(False)`."""
        return self.train(False)

    @property
    def trains(self) -> bool:
        """True if the layer trains now, by `gw.mode` or else `training`; a trace is valid only for this `training`."""
        recorder = active_recorder.get()
        if recorder is not None:
            recorder.assume(lambda: self.training)
        return bool(training(self.training))

    def requires_grad_(self, wanted: bool = True) -> Self:
        """Set `requires_grad` of all parameters."""
        for p in self.parameters():
            p.requires_grad = wanted
        return self

    def to(
        self, to: object = None, kind: object = None, non_blocking: bool = False, *, dtype: object = None,
        device: object = None,
    ) -> Self:  # fmt: skip
        """Convert floating parameters and buffers to a dtype, or move all to a device (a Device or its name), or both.

        In place: parameter objects, ties and optimizers stay valid; optimizer state is converted at the next step.

        Args:
            to: a dtype, a device, or a tensor with the wanted dtype and device.
            kind: a dtype after a device.
            non_blocking: accepted as in torch, without an effect.
        Raises: DTypeError for a dtype that is not floating; DeviceUnavailable.
        """
        if isinstance(to, Tensor):
            to, dtype, device = None, to.dtype, to.device
        there = device if device is not None else to if names_device(to) else None
        wanted = dtype if dtype is not None else kind if kind is not None else None if names_device(to) else to
        converted = None if wanted is None else named(wanted)
        if converted is not None and not converted.is_float:
            raise DTypeError("cannot convert a module to this dtype", expected="a floating dtype", got=converted)
        if there is not None:
            for _, variable in self._variables(""):
                variable.data = variable.data.to(Device.parse(there))  # pyright: ignore[reportArgumentType]  # names_device
                variable.grad = None if variable.grad is None else variable.grad.to(there)
        for _, variable in self._variables(""):
            old = variable.data
            if converted is not None and old.dtype.is_float and old.dtype is not converted:
                variable.data = empty(old.shape, converted, old.device).copy_from(old)
                variable.shared = False
                if variable.grad is not None:
                    variable.grad = variable.grad.to(variable.grad_dtype)
        return self

    def cpu(self) -> Self:
        """Call `to("cpu")`."""
        return self.to("cpu")

    def cuda(self, device: int | str | Device | None = None) -> Self:
        """Move to a GPU, by default the first. Raises: DeviceUnavailable without one."""
        return self.to(Device("cuda", device or 0) if isinstance(device, int | None) else device)

    def type(self, dst_type: object) -> Self:
        """Call `to(dst_type)`."""
        return self.to(dst_type)

    def float(self) -> Self:
        """Call `to("float32")`."""
        return self.to("float32")

    def double(self) -> Self:
        """Call `to("float64")`."""
        return self.to("float64")

    def half(self) -> Self:
        """Call `to("float16")`."""
        return self.to("float16")

    def bfloat16(self) -> Self:
        """Call `to("bfloat16")`."""
        return self.to("bfloat16")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None, or with `set_to_none=False` to zeros."""
        for p in self.parameters():
            p.grad = None if set_to_none or p.grad is None else zeros_like(p.grad)

    # -- text --------------------------------------------------------------------------------------------------------
    def extra_repr(self) -> str:
        """Return the text in the parentheses of `repr`: own attributes, and shapes of own parameters and buffers."""
        texts: list[str] = []
        for name, value in vars(self).items():
            if name == "attrs" and isinstance(value, Mapping):
                texts += [f"{k}={v!r}" for k, v in value.items()]
            elif isinstance(value, (Parameter, Buffer)):
                texts.append(f"{name}={list(value.shape)}")
            elif not name.startswith("_") and isinstance(value, _SHORT):
                texts.append(f"{name}={value!r}")
        return ", ".join(texts)

    def __repr__(self) -> str:
        head, children = type(self).__name__, list(self.named_children())
        if not children:
            return f"{head}({self.extra_repr()})"
        lines = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in children]
        own = self.extra_repr()
        total = sum(p.numel() for p in self.parameters())
        body = "\n  ".join([own, *lines] if own else lines)
        return f"{head}(  # {total:,} parameters\n  {body}\n)"

    # -- state -------------------------------------------------------------------------------------------------------
    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Return a dict from names to copies of parameters and persistent buffers, each under its first name.

        Args:
            prefix: text before each name.
            keep_vars: return the parameters and buffers themselves instead of copies.
        """
        return {prefix + n: v if keep_vars else v.detach().clone() for n, v in _once(self.variables().items())}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load values by name; all are checked before any is written. A tied variable may have any of its names.

        Args:
            strict: whether missing and unexpected names are errors; wrong shapes and dtypes always are.
            assign: take the arrays of the values, with their dtypes and devices, instead of copying from them; the
                parameter objects stay.
        Returns: the missing keys, and the unexpected ones.
        Raises: UsageError listing all missing, unexpected and mismatched entries.
        """
        own = self.variables()
        names: dict[int, list[str]] = {}
        for name, variable in own.items():
            names.setdefault(id(variable), []).append(name)
        found = [
            (own[known[0]], next((n for n in known if n in state_dict), None), known[0]) for known in names.values()
        ]
        missing = sorted(first for _, name, first in found if name is None)
        unexpected = sorted(state_dict.keys() - own.keys())
        values = [(v, name, as_tensor(state_dict[name])) for v, name, _ in found if name is not None]
        wrong = [f"missing: {n}" for n in missing if strict] + [f"unexpected: {n}" for n in unexpected if strict]
        differs: Callable[[Tensor, Tensor], bool] = lambda v, t: v.shape != t.shape if assign else v.spec != t.spec  # noqa: E731
        wrong += sorted(f"{n}: expected {v.spec}, got {t.spec}" for v, n, t in values if differs(v, t))
        if wrong:
            raise UsageError("the state does not fit the module:\n  " + "\n  ".join(wrong), where=type(self).__name__)
        for variable, _, value in values:
            if assign:
                variable.data = value.concrete("load_state_dict")
            else:
                variable.assign(value)
        return IncompatibleKeys(missing, unexpected)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _found(known: Mapping[str, _Value], target: str, what: str) -> _Value:
    if target not in known:
        near = get_close_matches(target, known, 3)
        raise UsageError(f"there is no {what} of this name", got=repr(target), expected=", ".join(near) or None)
    return known[target]


def _array(value: Any) -> NDArray:
    return as_tensor(value).concrete("a buffer").copy()


def _remainder(paths: _Paths, outer: _Path) -> _Path:
    """Return the end of a module's path that the scope `outer` does not contain yet.

    The scope may have further segments, such as steps, between those of the path. Of several paths, that of which the
    scope contains most is taken.
    """
    best = paths[0]
    for number, path in enumerate(paths):
        depth, end = 0, len(path)
        for segment in outer:
            if depth < end and segment == path[depth]:
                depth += 1
        if not number or end - depth < len(best):
            best = path[depth:]
    return best


def _once(items: Iterable[tuple[str, _Held]]) -> Iterator[tuple[str, _Held]]:
    """Yield the (name, value) items, skipping any value that occurred before under another name."""
    seen: set[int] = set()
    for name, value in items:
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
