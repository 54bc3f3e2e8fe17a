"""Lowering: run a captured graph on symbols, each operator by its row of the table, so that a trace records it."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from graphwright.array import NDArray, from_dlpack
from graphwright.array import dtype as named
from graphwright.array.sizes import Size
from graphwright.autograd import Parameter, Tensor, Variable, no_grad
from graphwright.autograd.named_sizes import TracedSize, traced
from graphwright.autograd.recorder import active_recorder, scope
from graphwright.errors import ShapeError
from graphwright.models.errors import CaptureError, UnsupportedOperator
from graphwright.models.importing.capture import GRAD_MODE, Captured
from graphwright.models.importing.operators import find, operator_name
from graphwright.models.importing.operators.complex import KINDS, Complex, find_complex
from graphwright.models.importing.sizes import EqualSizes, Limit
from graphwright.program.weights import abstract_array, is_abstract

_PYTHON = {python.add, python.sub, python.mul, python.floordiv, python.truediv, python.mod, python.neg, python.pow,
           python.getitem, python.eq, python.ne, python.lt, python.le, python.gt, python.ge, python.and_, python.or_,
           python.not_, torch.sym_not}  # fmt: skip
_CHOICES = {torch.sym_min: True, torch.sym_max: False}
_OPTIONS = {"device", "layout", "pin_memory", "memory_format"}
"""Options of torch's operators that say where and how a result is stored, which the plan decides here."""


@dataclass(eq=False)
class Lowered:
    """A captured module as a function of tensors, in the order of its inputs.

    Attributes:
        captured: the graph.
        share: whether variables share the memory of the module's tensors.
        values: tensors that replace those of the module, by name.
        variables: the params and the states by the name of the graph's signature.
        counts: operators of the graph by name, and how often each occurs.
    """

    captured: Captured
    share: bool = True
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph_module = self.captured.exported.graph_module
        self.functions: dict[tuple[Any, bool], Callable[..., Any]] = {}
        self.decided: dict[str, bool] = {}
        self.equal = EqualSizes(self.captured.limits)
        self._check(self.graph_module)
        self._check_ends()
        signature = self.captured.exported.graph_signature
        stored = {spec.target for spec in signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION}
        tied: dict[int, Any] = {}
        for spec in signature.input_specs:
            if spec.kind == InputKind.USER_INPUT or spec.target is None:
                continue
            tensor = self.values.get(spec.target, self.captured.tensors[spec.target])
            if id(tensor) not in tied:
                tied[id(tensor)] = self._variable(spec, tensor, spec.target in stored)
            self.variables[spec.arg.name] = tied[id(tensor)]

    def _variable(self, spec: Any, tensor: torch.Tensor, stored: bool) -> Any:
        if tensor.is_complex():
            return Complex(*(Tensor(self._array(part.contiguous()), name=f"{spec.target}.{name}")
                             for name, part in (("real", tensor.real), ("imag", tensor.imag))))  # fmt: skip
        array = self._array(tensor)
        if spec.kind == InputKind.PARAMETER:
            made: Any = Parameter(array, tensor.requires_grad, spec.target)
        elif stored:
            made = Variable(array, name=spec.target)
        else:
            array.storage.shared = self.share
            return Tensor(array, name=spec.target)
        made.shared = self.share
        return made

    def state(self, state: Mapping[str, torch.Tensor], keys: Container[str]) -> dict[str, str | Variable]:
        """Return for each key of a module's state the key of its weight, one of `keys`; else a variable of its own.

        Complex buffers have no key: they are two constants.
        """
        known = {id(tensor): name for name, tensor in self.captured.tensors.items() if name in keys}
        found: dict[str, str | Variable] = {}
        for key, tensor in state.items():
            if tensor.is_complex():
                continue
            name = key if key in keys else known.get(id(tensor))
            if name is not None:
                found[key] = name
                continue
            kind = Parameter if isinstance(tensor, torch.nn.Parameter) else Variable
            found[key] = unread = kind(self._array(tensor), tensor.requires_grad, key)
            unread.shared = self.share
        return found

    def _array(self, tensor: torch.Tensor) -> NDArray:
        if tensor.device.type == "meta":
            if tensor.numel():
                return abstract_array(tuple(tensor.shape), named(str(tensor.dtype).removeprefix("torch.")))
            tensor = torch.empty_like(tensor, device="cpu")  # there is no value to wait for
        return from_dlpack(tensor.detach(), copy=not self.share)

    # -- the function that is traced -----------------------------------------------------------------------------------
    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Run the graph; returns the outputs by name."""
        given, recorder = iter(self._limited(inputs)), active_recorder.get()
        assert recorder is not None
        read = {node.name for node in self.graph_module.graph.find_nodes(op="placeholder") if node.users}
        values: list[Any] = []
        spec: Any
        for spec in self.captured.exported.graph_signature.input_specs:
            if spec.kind != InputKind.USER_INPUT:
                value = self.variables[spec.arg.name]
                values.append(_recorded(value, recorder) if spec.arg.name in read else value)
            elif isinstance(spec.arg, ConstantArgument):
                values.append(spec.arg.value)
            else:
                values.append(next(given))
        self.chosen: list[Limit] = []
        results = self._run(self.graph_module, values)
        outputs: list[Any] = []
        signature = self.captured.exported.graph_signature
        for spec, value in zip(signature.output_specs, results, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                source = next(s for s in signature.input_specs if s.target == spec.target)
                self.variables[source.arg.name].assign(value.detach())
            elif spec.kind == OutputKind.USER_OUTPUT:
                outputs.append(value)
        for limit in self.chosen:
            at = next(i for i, value in enumerate(outputs) if isinstance(value, Tensor))
            outputs[at] = limit.applied(outputs[at])
        return output_names(self.captured.exported.call_spec.out_spec, outputs)

    def _limited(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs, with checks of the conditions on their sizes: each on an input that has one of its names.

        Raises: ShapeError if a condition does not hold for the sizes of this trace.
        """
        found, shapes = dict(zip(self.captured.examples, inputs, strict=True)), self.captured.sizes
        here = {n: size.here if type(size) is TracedSize else size for name, shape in shapes.items()
                for n, size in zip(shape, found[name].shape, strict=True) if isinstance(n, str)}  # fmt: skip
        for limit in self.captured.limits:
            if not limit.holds(here):
                values = ", ".join(f"{n} = {here[n]}" for n in limit.names)
                raise ShapeError(f"sizes do not meet the condition {limit.text}", where=limit.where, got=values)
            owner = next(name for name, shape in shapes.items() if set(shape) & set(limit.names))
            found[owner] = limit.applied(found[owner])
        return list(found.values())

    def _run(self, module: torch.fx.GraphModule, values: Sequence[Any]) -> tuple[Any, ...]:
        given, env = iter(values), dict[torch.fx.Node, Any]()
        path: tuple[str, ...] = ()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = self._attribute(module, node.target)
            elif node.op == "output":
                return tuple(_filled(node.args[0], env))
            else:
                path = _module_path(node, path)
                token = scope.set(path)
                try:
                    env[node] = self._in_one_form(self._call(module, node, env))
                except Exception as error:
                    error.add_note(f"at {'.'.join(path) or 'the module'}, {_line(node)}: {node.target}")
                    raise
                finally:
                    scope.reset(token)
        return ()

    def _in_one_form(self, value: Any) -> Any:
        """Return results with their sizes in the form of all sizes that the conditions make equal to them."""
        if isinstance(value, tuple | list):
            return tuple(map(self._in_one_form, value))
        return self.equal.applied(value) if isinstance(value, Tensor) else value

    def _attribute(self, module: Any, name: str) -> Any:
        found = module
        for part in name.split("."):
            found = getattr(found, part)
        return Tensor(from_dlpack(found.detach(), copy=True), name=name) if isinstance(found, torch.Tensor) else found

    def _call(self, module: Any, node: torch.fx.Node, env: Mapping[torch.fx.Node, Any]) -> Any:
        args, kwargs = _filled(node.args, env), _filled(node.kwargs, env)
        target: Any = node.target
        if target in _PYTHON:
            return target(*args)
        if target in _CHOICES:
            return self._choose(node, *args, least=_CHOICES[target])
        if operator_name(target)[0] == "_local_scalar_dense":
            return _number(node.args[0], env)
        if target is GRAD_MODE:
            enabled, inner, *rest = args
            if enabled:
                return self._run(inner, rest)
            with no_grad():
                return self._run(inner, rest)
        options = {k: v for k, v in kwargs.items() if k not in _OPTIONS}
        return self.functions[target, _is_complex(node)](*args, **options)

    def _choose(self, node: torch.fx.Node, a: Any, b: Any, *, least: bool) -> Any:
        """Return the smaller or larger of two sizes: the one that is so for the example, with a check that it stays so.

        Raises: ShapeError if it is the other one for the sizes of this trace.
        """
        here = [size.here if type(size) is TracedSize else size for size in (a, b)]
        first = (here[0] <= here[1]) if least else (here[0] >= here[1])
        if self.decided.setdefault(node.name, first) != first:
            raise ShapeError("another size is the smaller or larger one than in the example", where=_line(node),
                             got=f"{a} and {b}")  # fmt: skip
        if traced(a) or traced(b):
            small, large = (a, b) if first == least else (b, a)
            size = Size(Size.of(large).terms) - Size(Size.of(small).terms)
            limit = Limit("least", size, f"{small} <= {large}", _line(node))
            if not limit.always:
                self.chosen.append(limit)
        return a if first else b

    # -- operators -----------------------------------------------------------------------------------------------------
    def _check(self, module: torch.fx.GraphModule) -> None:
        """Find the function of each operator.

        Raises: UnsupportedOperator naming all that have none; CaptureError for values of tensors as numbers.
        """
        unknown: dict[str, list[str]] = {}
        for node in _calls(module):
            if node.target in _PYTHON or node.target in _CHOICES or node.target is GRAD_MODE:
                continue
            name, overload = operator_name(node.target)
            self.counts[name] = self.counts.get(name, 0) + 1
            on_pairs = _is_complex(node)
            function = _FUNCTIONS.get(name) or (find_complex if on_pairs else find)(name, overload)
            if name == "_local_scalar_dense" and not _of_sizes(node.args[0]):
                function = None  # a value of a tensor
            if function is None:
                where = ".".join(_module_path(node, ())) or "the module"
                label = f"{name}.{overload}{' of complex numbers' if on_pairs else ''}"
                unknown.setdefault(label, []).append(f"{where}, {_line(node)}")
            else:
                self.functions[node.target, on_pairs] = function
        if values := unknown.get("_local_scalar_dense.default"):
            raise CaptureError("the module has no graph: its code depends on values", where=values[0],
                               got=f"{len(values)} values of tensors are used as numbers, such as sizes of a split",
                               fix="wrap the module in one that computes that part by tensor operations")  # fmt: skip
        if unknown:
            lines = [f"{name} ({len(lines)}x): {lines[0]}" for name, lines in sorted(unknown.items())]
            raise UnsupportedOperator("operators of the module have no row in the table of operators",
                                      got="; ".join(lines), operators={n: tuple(p) for n, p in unknown.items()},
                                      fix="enter a function of tensors with "
                                          "graphwright.models.importing.operators.operator(NAME)")  # fmt: skip

    def _check_ends(self) -> None:
        """Raise CaptureError if inputs, parameters or outputs are complex, which no value of a program is."""
        signature, last = self.captured.exported.graph_signature, next(iter(reversed(self.graph_module.graph.nodes)))
        results = zip(signature.output_specs, pytree.tree_leaves(last.args[0]), strict=False)
        outputs = {f"output {i}": node for i, (spec, node) in enumerate(results)
                   if spec.kind == OutputKind.USER_OUTPUT and isinstance(node, torch.fx.Node)}  # fmt: skip
        values = {
            **{f"input {name}": tensor for name, tensor in self.captured.examples.items()},
            **{f"parameter {spec.target}": self.captured.tensors[spec.target] for spec in signature.input_specs
               if spec.kind == InputKind.PARAMETER and spec.target is not None},
            **{name: node.meta.get("val") for name, node in outputs.items()},
        }  # fmt: skip
        found = [name for name, value in values.items() if isinstance(value, torch.Tensor) and value.is_complex()]
        if found:
            where = next((_line(outputs[name]) for name in found if name in outputs), None)
            raise CaptureError("inputs, parameters and outputs cannot be complex", where=where, got=", ".join(found),
                               expected="complex numbers inside the module only",
                               fix="pass torch.view_as_real(x), and use torch.view_as_complex inside")  # fmt: skip


def _recorded(value: Any, recorder: Any) -> Any:
    """Return a buffer without values as a node, as no op on it can run now; other values as they are."""
    if isinstance(value, Complex):
        return Complex(_recorded(value.real, recorder), _recorded(value.imag, recorder))
    if isinstance(value, Variable) or not is_abstract(value.data):
        return value
    return Tensor(recorder.resolve(value))


def sym_size(x: Tensor, axis: int) -> Any:
    """Return the size of an axis."""
    return x.shape[axis]


# -- numbers in tensors ------------------------------------------------------------------------------------------------
_NUMBERS: dict[str, Callable[..., Any]] = {
    "scalar_tensor": lambda n: n, "clone": lambda n: n, "alias": lambda n: n, "detach": lambda n: n,
    "neg": lambda a: -a, "add": lambda a, b, alpha=1: a + alpha * b, "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a, "mul": lambda a, b: a * b,
}  # fmt: skip
"""Operators on whole numbers, as tensors without axes; code makes such tensors of sizes and slices by them."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {"sym_size": sym_size, "_local_scalar_dense": lambda n: n}


def _of_sizes(value: Any) -> bool:
    """Return whether a whole number follows from sizes alone."""
    if not isinstance(value, torch.fx.Node):
        return isinstance(value, int)
    found = value.meta.get("val")
    if not isinstance(found, torch.Tensor):
        return isinstance(found, int | torch.SymInt)
    known = operator_name(value.target)[0] in _NUMBERS and not found.is_floating_point()
    return known and all(map(_of_sizes, (*value.args, *(value.kwargs[k] for k in value.kwargs if k == "alpha"))))


def _number(value: Any, env: Mapping[torch.fx.Node, Any]) -> Any:
    """Return a whole number that follows from sizes."""
    if not isinstance(value, torch.fx.Node):
        return value
    if not isinstance(value.meta.get("val"), torch.Tensor):
        return env[value]
    options = {k: _number(v, env) for k, v in value.kwargs.items() if k == "alpha"}
    return _NUMBERS[operator_name(value.target)[0]](*(_number(a, env) for a in value.args), **options)


def _calls(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from (n for n in part.graph.nodes if n.op == "call_function")


def _is_complex(node: torch.fx.Node) -> bool:
    """Return whether an operator has complex operands or results."""
    values = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


def _filled(value: Any, env: Mapping[torch.fx.Node, Any]) -> Any:
    """Return arguments with values instead of nodes, and dtypes of ours instead of torch's."""
    if isinstance(value, torch.fx.Node):
        return env[value]
    if isinstance(value, tuple | list):
        return [_filled(v, env) for v in value]
    if isinstance(value, dict):
        return {k: _filled(v, env) for k, v in value.items()}
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        return KINDS[name] if name in KINDS else named(name)
    return value


def _module_path(node: torch.fx.Node, last: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the module whose code made a node; without one, `last`, the path of the node before it."""
    stack = [
        path for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if not key.startswith("_empty")
    ]
    if not stack:
        return last
    path = stack[-1].removeprefix("L['self'].").removeprefix("L['self']")
    return tuple(part for part in path.split(".") if part)


def _line(node: torch.fx.Node) -> str:
    """Return `file:line` of the module's code that made a node."""
    frames = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    own = [f for f in frames if "/torch/" not in f] or frames
    if not own:
        return "without a line"
    file, line = own[-1].split('"')[1], own[-1].split("line ")[1].split(",")[0]
    return f"{file.rpartition('/')[2]}:{line}"


def output_names(spec: Any, values: Sequence[Any]) -> dict[str, Any]:
    """Return outputs by name: keys of dicts and fields, `out`, `out_1` for tuples."""
    numbered = pytree.tree_unflatten(list(range(len(values))), spec)
    plain = _plain(numbered)
    top = plain if isinstance(plain, dict) else plain if isinstance(plain, list) else [plain]
    parts = top.items() if isinstance(top, dict) else (
        ("out" if i == 0 else f"out_{i}", v) for i, v in enumerate(top))  # fmt: skip
    return {name: _values(inner, values) for name, inner in parts}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {k: _plain(getattr(value, k)) for k in value.__dataclass_fields__}
    return value


def _values(at: Any, values: Sequence[Any]) -> Any:
    if isinstance(at, dict):
        return {k: _values(v, values) for k, v in at.items()}
    if isinstance(at, list):
        return [_values(v, values) for v in at]
    return values[at] if isinstance(at, int) else None
