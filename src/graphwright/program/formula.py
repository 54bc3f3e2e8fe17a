"""A small program as formulas: an expression of the input's entries for each entry of each output.

The program is evaluated on arrays of sympy expressions, batch size 1. Views move entries, fused ops run by their
expansions, and `_functions` has the functions of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial, reduce
from math import nan, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Layout, Spec
from graphwright.array.layout import row_major
from graphwright.array.sizes import is_dim_name
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops import get
from graphwright.ops.expansion import Arithmetic
from graphwright.program.agreement import largest_difference
from graphwright.program.kinds import INPUT, STORED
from graphwright.settings import Range

if TYPE_CHECKING:
    from graphwright.ops import Op
    from graphwright.program.program import Program

_USED = ("np", "math", "sigmoid")
"""Names that the source text of a formula reads."""
_CASES = 32
_AGREES = 1e-3
"""Cases on which a formula with all digits is compared with the program; largest accepted relative difference."""


class NoFormula(UsageError):
    """The program is not a formula of the entries of one case."""


class FormulaTooLarge(UsageError):
    """The formula has more operations than the limit; `operations` counts them, or is a lower bound."""

    def __init__(self, operations: int, limit: int, where: str) -> None:
        fix = f"prune the network, or pass limit={2 * operations}"
        super().__init__("the formula is too large to be read", where=where, expected=f"at most {limit} operations",
                         got=f"{operations} or more", fix=fix)  # fmt: skip
        self.operations = operations


@dataclass(frozen=True, repr=False, eq=False)
class Formula:
    """Formulas of a program; `str` lists them one a line.

    Attributes:
        inputs: name of the symbol of each entry of the inputs, in order.
        definitions: (name, sympy expression) of terms that occur several times; each may use those before it.
        outputs: output name -> sympy expression, or list of expressions for an output of several entries.
        error: largest |formula - program| over random cases, relative to the largest |value| of the program; NaN if the
            program gives no finite value in these cases.
    """

    inputs: tuple[str, ...]
    definitions: tuple[tuple[str, Any], ...]
    outputs: Mapping[str, Any]
    error: float = 0.0

    @property
    def operations(self) -> int:
        """Number of operations in all expressions."""
        return sum(int(e.count_ops()) for e in self._expressions())

    @property
    def python(self) -> str:
        """Source text of a numpy function `formula` of the inputs, which are numbers or arrays of one shape."""
        body = [f"    {name} = {_source(e)}" for name, e in self.definitions]
        ends = [_source(e) for entries in self.outputs.values() for e in _entries(entries)]
        text = "".join((*body, *ends))
        imports = ["import math\n"] if "math." in text else []
        helper = ["def sigmoid(x):\n    return 0.5 + 0.5 * np.tanh(0.5 * x)\n\n"] if "sigmoid(" in text else []
        head = [*imports, "import numpy as np\n\n", *helper, f"def formula({', '.join(self.inputs)}):"]
        return "\n".join([*head, *body, f"    return {', '.join(ends)}"]) + "\n"

    @property
    def latex(self) -> str:
        """The formulas as LaTeX, one a line of an `aligned` environment."""
        import sympy

        rows = [f"{sympy.latex(sympy.Symbol(name))} &= {sympy.latex(e)}" for name, e in self._named()]
        return "\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}"

    def __call__(self, *inputs: Any) -> Any:
        """Evaluate in float64; returns a number or array, or a tuple for several entries of outputs."""
        return self._function(*inputs)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        names: dict[str, Any] = {}
        exec(compile(self.python, "<formula>", "exec"), names)
        return names["formula"]

    def _named(self) -> list[tuple[str, Any]]:
        found = list(self.definitions)
        for name, entries in self.outputs.items():
            several = isinstance(entries, list)
            found += [(f"{name}{i}" if several else name, e) for i, e in enumerate(_entries(entries))]
        return found

    def _expressions(self) -> list[Any]:
        return [e for _, e in self._named()]

    def __str__(self) -> str:
        return "\n".join(f"{name} = {e}" for name, e in self._named())

    def __repr__(self) -> str:
        return str(self)


def formula(
    p: Program, *, digits: int = 4, limit: int = 200, drop: float = 0.0, names: Sequence[str] | None = None
) -> Formula:
    """Write a small program as formulas of the entries of its inputs, and compare them with the program.

    The first axis of an input is a batch if the input has two or more axes, or if its size has a name: the formulas are
    those of one case. Terms of several readers get names. Products with 1 and sums with 0 are left out.

    Args:
        digits: significant decimal digits of constants, >= 1.
        limit: largest number of operations.
        drop: constants of at most this absolute value become 0.
        names: a Python identifier for each entry of the inputs, but not `np`, `math` or `sigmoid`, which the source
            text uses; by default the input's name and the entry's number.
    Raises: FormulaTooLarge; NoFormula for states, for ops that have no formula, and where cases of a batch depend on
        each other; UsageError for invalid options.
    """
    for name, value, least in (("digits", digits, 1), ("limit", limit, 1), ("drop", drop, 0)):
        Range(least, whole=name != "drop").check(f"formula, {name}", value)
    if p.states() or p.assigns():
        raise NoFormula("the program has states, so its outputs depend on earlier calls", where=p.name,
                        got=", ".join(p.path(n) for n in p.states()[:5]))  # fmt: skip
    read = sum(p.weights.array(p.key(n)).size for n in p.params())
    if read > 2 * limit:  # most weights cost a product and a sum
        raise FormulaTooLarge(read, limit, p.name)
    inputs, outputs = _evaluate(p, names)
    exact = _shortened(inputs, outputs, lambda e: e)
    if exact.operations > limit:
        raise FormulaTooLarge(exact.operations, limit, p.name)
    if (error := _difference(p, exact)) > _AGREES:
        raise NoFormula("the formula of one case differs from the program on a batch", where=p.name,
                        expected=f"a relative difference of at most {_AGREES:g}", got=f"{error:.3g}",
                        fix="cases of a batch must not depend on each other")  # fmt: skip
    found = _shortened(inputs, outputs, lambda e: _rounded(e, digits, drop))
    return Formula(found.inputs, found.definitions, found.outputs, _difference(p, found))


# -- evaluation on expressions -----------------------------------------------------------------------------------------
def _evaluate(p: Program, names: Sequence[str] | None) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Evaluate a program on symbols; return their names, and the expressions of each output."""
    import sympy

    shapes = {n: _one_case(p.spec(n)).sizes for n in p.inputs()}
    count = sum(map(prod, shapes.values()))
    labels = [*(names if isinstance(names, Iterable) else [names])] if names is not None else [
        p.path(n).replace(".", "_") + ("" if prod(shape) == 1 else str(i)) for n, shape in shapes.items()
        for i in range(prod(shape))
    ]  # fmt: skip
    if len(set(labels)) != count or not all(is_dim_name(label) and label not in _USED for label in labels):
        expected = f"{count} different identifiers other than {', '.join(_USED)}"
        raise UsageError("invalid names of the inputs' entries", where=p.name, expected=expected, got=labels,
                         fix="pass names=")  # fmt: skip
    dims = dict.fromkeys((d for n in p.inputs() for d in p.spec(n).shape if isinstance(d, str)), 1)
    symbols = iter(sympy.symbols(labels, real=True))
    values: dict[Any, _Expressions] = {}
    for node in p.order():
        op, specs = p.op(node), p.specs(node)
        if op == INPUT:
            entries = [next(symbols) for _ in range(prod(shapes[node]))]
            made: Any = _Expressions(_objects(entries, shapes[node]), specs[0])
        elif op in STORED:
            array = p.weights.array(p.key(node)).to_numpy("float64")
            made = _Expressions(_objects([_number(v) for v in array.ravel().tolist()], array.shape), specs[0])
        elif not p.operands(node):  # a junction without edges
            made = _Expressions(_objects([sympy.Integer(0)], ()), specs[0])
        else:
            try:
                row = get(op)
                made = _apply(row, [values[v] for v in p.operands(node)], row.bind_sizes(p.attrs(node), dims))
            except (GraphwrightError, ValueError) as error:
                what = error.what if isinstance(error, GraphwrightError) else str(error)
                raise NoFormula(what, where=f"{p.path(node)} ({op})",
                                fix='trace with a named batch size: sizes={"x": ("B", ...)}') from error  # fmt: skip
        for port, value in enumerate(made if isinstance(made, tuple) else (made,)):
            values[p.value(node)._replace(port=port)] = value
    return tuple(labels), {name: values[p.output(name)].array for name in p.output_names()}


def _one_case(spec: Spec) -> Spec:
    """Return the spec of one case: named sizes and the batch axis are 1."""
    shape = [1 if isinstance(d, str) else d for d in spec.shape]
    return Spec((1, *shape[1:]) if _batched(spec) else tuple(shape), spec.dtype)


def _batched(spec: Spec) -> bool:
    """Return True if the first axis is a batch: it is not the only one, or its size has a name."""
    return len(spec.shape) > 1 or spec.symbolic


def _objects(entries: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    made = np.empty(len(entries), object)
    made[:] = entries
    return made.reshape(shape)


def _number(value: float, digits: int = 17) -> Any:
    """Return an expression of a number; small integers are exact, so that 1·x and x + 0 become x."""
    import sympy

    whole = abs(value) < 10**digits and value == int(value)
    return sympy.Integer(int(value)) if whole else sympy.Float(repr(value), digits)


class _Expressions(Arithmetic):
    """An array of expressions in place of a tensor, for `Op.expand`."""

    def __init__(self, array: np.ndarray, spec: Spec) -> None:
        self.array, self.dtype, self.shape, self.ndim = array, spec.dtype, array.shape, array.ndim
        self.spec = Spec(array.shape, spec.dtype)

    @staticmethod
    def __gw_op__(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Any = None) -> Any:
        kind = next(o.spec for o in operands if isinstance(o, _Expressions))
        given = [o if isinstance(o, _Expressions) else _Expressions(_objects([_number(o)], ()), Spec((), kind.dtype))
                 for o in operands]  # fmt: skip
        return _apply(row, given, attrs)


def _apply(row: Op, ins: Sequence[_Expressions], attrs: Mapping[str, Any]) -> Any:
    """Apply an op. Raises: NoFormula if it has no formula."""
    spec = row.specs([x.spec for x in ins], attrs)[0]
    if row.view is not None:
        source = np.ascontiguousarray(ins[0].array)
        to = row.view(Layout(source.shape, row_major(source.shape)), attrs)
        if to is not None:
            flat = np.arange(source.size)
            at = np.lib.stride_tricks.as_strided(flat[to.offset :], to.shape, [s * flat.itemsize for s in to.strides])
            return _Expressions(source.ravel()[at], spec)
    elif (function := _functions().get(row.name)) is not None:
        arrays = [x.array for x in ins]
        made = _over(partial(function, **attrs), arrays) if row.traits.elementwise else function(*arrays, **attrs)
        return _Expressions(np.asarray(made, object), spec)
    elif row.expand is not None:
        return row.expand(ins, attrs)
    raise NoFormula("this op has no formula", got=row.name)


@cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    """Return a dict from op to its function of expressions, or of arrays if it is not elementwise, and attributes."""
    import sympy as sp

    class sigmoid(sp.Function):  # kept whole: as a quotient it would absorb constants and lose its form
        is_real = True

    def one(c: Any) -> Any:
        return sp.Piecewise((1, c), (0, True))

    def cast(a: Any, dtype: Any) -> Any:
        if not dtype.is_float:
            raise NoFormula("a cast to this dtype has no formula", got=dtype.name)
        return one(a) if a.is_Boolean or a.is_Relational else a

    return {  # by name: sympy's function of each op
        "abs": sp.Abs, "acos": sp.acos, "acosh": sp.acosh, "add": lambda a, b: a + b,
        "amax": _reduction(lambda v: sp.Max(*v)), "amin": _reduction(lambda v: sp.Min(*v)), "asin": sp.asin,
        "asinh": sp.asinh, "atan": sp.atan, "atanh": sp.atanh, "cast": cast, "ceil": sp.ceiling,
        "concat": lambda *a, axis: np.concatenate(a, axis), "copy": lambda a: a, "cos": sp.cos, "cosh": sp.cosh,
        "div": lambda a, b: a / b, "erf": sp.erf, "exp": sp.exp, "expm1": lambda a: sp.exp(a) - 1, "floor": sp.floor,
        "full_like": lambda a, value: _number(value), "ge": sp.Ge, "gt": sp.Gt,
        "junction": lambda *a: reduce(np.add, a), "le": sp.Le, "log": sp.log, "log1p": lambda a: sp.log(1 + a),
        "logical_and": sp.And, "logical_not": sp.Not, "logical_or": sp.Or, "lt": sp.Lt, "matmul": lambda a, b: a @ b,
        "maximum": sp.Max,
        "mean": _reduction(lambda v: sum(v) / len(v)), "minimum": sp.Min, "mul": lambda a, b: a * b,
        "neg": lambda a: -a, "pow": lambda a, b: a**b, "prod": _reduction(prod), "reciprocal": lambda a: 1 / a,
        "relu": lambda a: sp.Max(a, 0), "rsqrt": lambda a: 1 / sp.sqrt(a), "sech": lambda a: 1 / sp.cosh(a),
        "sigmoid": sigmoid, "sign": sp.sign, "sin": sp.sin, "sinh": sp.sinh, "sqrt": sp.sqrt,
        "step": lambda a: one(a > 0), "sub": lambda a, b: a - b, "sum": _reduction(sum), "tan": sp.tan,
        "tanh": sp.tanh, "where": lambda c, a, b: sp.Piecewise((a, c), (b, True)),
    }  # fmt: skip


def _reduction(function: Callable[[Sequence[Any]], Any]) -> Callable[..., np.ndarray]:
    """Return the reduction over axes by a function of a list of expressions."""

    def reduced(a: np.ndarray, *, axes: tuple[int, ...] | None, keepdims: bool) -> np.ndarray:
        over = tuple(range(a.ndim)) if axes is None else tuple(axis % a.ndim for axis in axes)
        kept = [i for i in range(a.ndim) if i not in over]
        rows = a.transpose(*kept, *over).reshape(*(a.shape[i] for i in kept), -1)
        made = np.empty(rows.shape[:-1], object)
        for index in np.ndindex(made.shape):
            made[index] = function(list(rows[index]))
        return np.expand_dims(made, over) if keepdims else made

    return reduced


def _over(function: Callable[..., Any], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Apply a function of expressions elementwise, with broadcasting."""
    given = np.broadcast_arrays(*arrays)
    made = np.empty(given[0].shape, object)
    for index in np.ndindex(made.shape):
        made[index] = function(*(a[index] for a in given))
    return made


# -- expressions -------------------------------------------------------------------------------------------------------
def _shortened(inputs: tuple[str, ...], outputs: Mapping[str, np.ndarray], round: Callable[[Any], Any]) -> Formula:
    """Name the terms that occur several times, and round the constants."""
    import sympy

    flat = [sympy.sympify(e) for a in outputs.values() for e in a.ravel()]
    free = (s for s in sympy.numbered_symbols("t", real=True) if s.name not in inputs)
    terms, ends = sympy.cse([round(e) for e in flat], symbols=free)
    left = iter(ends)
    found = {name: next(left) if a.size == 1 else [next(left) for _ in range(a.size)] for name, a in outputs.items()}
    return Formula(inputs, tuple((s.name, e) for s, e in terms), found)


def _rounded(e: Any, digits: int, drop: float) -> Any:
    import sympy

    def constant(value: Any) -> Any:
        if abs(value) <= drop:
            return sympy.Integer(0)
        return _number(float(f"{float(value):.{digits - 1}e}"), digits)

    return e.xreplace({value: constant(value) for value in e.atoms(sympy.Float)})


def _entries(entries: Any) -> list[Any]:
    return entries if isinstance(entries, list) else [entries]


def _difference(p: Program, found: Formula) -> float:
    """Return the largest |formula - program| on random cases, relative to the largest finite |value| of the program.

    NaN if there is no finite value.
    """
    rng = np.random.default_rng(0)
    named = {d for n in p.inputs() for d in p.spec(n).shape if isinstance(d, str)}
    dims = dict.fromkeys(named, _CASES)
    feeds = {p.path(n): rng.standard_normal(s.sizes).astype(s.dtype.name) for n in p.inputs()
             for s in (p.spec(n).bind(dims),)}  # fmt: skip
    columns = [c for n, a in feeds.items() for c in (a.reshape(len(a), -1).T if _batched(p.spec(n)) else a.reshape(-1))]
    with np.errstate(all="ignore"):  # cases may be outside of the domain of a logarithm or a root
        given = found(*(c.astype(np.float64) for c in columns))
    ours = iter(given if isinstance(given, tuple) else (given,))
    run, gap, scale, finite = p.run(feeds, keep="outputs"), 0.0, 0.0, False
    for name, entries in found.outputs.items():
        array, count = run[name].to_numpy("float64"), len(_entries(entries))
        if array.size % count:
            raise NoFormula("the output has no axis for the cases of a batch", where=name, got=p.spec(p.output(name)))
        kind = np.float32 if run[name].dtype.is_float and run[name].dtype.itemsize < 8 else np.float64
        for column in array.reshape(-1, count).T:
            with np.errstate(over="ignore"):
                rounded = np.broadcast_to(next(ours), column.shape).astype(kind)
            difference, largest = largest_difference(column, rounded)
            gap, scale, finite = max(gap, difference), max(scale, largest), finite or bool(np.isfinite(column).any())
    return gap / (scale or 1.0) if finite or gap else nan


@cache
def _printer() -> Any:
    from sympy.printing.numpy import NumPyPrinter

    class Printer(NumPyPrinter):
        def _print_Max(self, expr: Any) -> str:
            return reduce(lambda a, b: f"numpy.maximum({a}, {b})", map(self._print, expr.args))

        def _print_Min(self, expr: Any) -> str:
            return reduce(lambda a, b: f"numpy.minimum({a}, {b})", map(self._print, expr.args))

        def _print_sigmoid(self, e: Any) -> str:
            return f"sigmoid({self._print(e.args[0])})"  # a function of the source text, without overflow

        def _print_erf(self, e: Any) -> str:
            return f"numpy.vectorize(math.erf)({self._print(e.args[0])})"

    return Printer()


def _source(e: Any) -> str:
    return _printer().doprint(e).replace("numpy.", "np.")
