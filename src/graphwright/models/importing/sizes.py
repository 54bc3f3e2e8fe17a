"""Named sizes of a captured graph: what torch fixed, and the conditions under which the graph holds.

Invariant: for sizes that meet all conditions, the graph computes what the module does; the conditions come from the
branches that the module's code took for the example.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import sympy
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter

from graphwright.array.sizes import Size, names_of
from graphwright.autograd import Tensor
from graphwright.autograd.named_sizes import traced
from graphwright.errors import ShapeError
from graphwright.ops import call

Shape = Sequence[int | str | None]
_RELATIONS = {"least": ">=", "zero": "==", "other": "!="}
_MOST = 2**31  # torch's upper limits from here on are none


class Limit(NamedTuple):
    """A condition on named sizes.

    Attributes:
        kind: `least` if `size` must be 0 or more, `zero` if it must be 0, `other` if it must not be 0.
        size: a size computed from names.
        text: the condition in words of the names.
        where: file and line of the code that decided by it.
        decided: True if a line of the module's code decides by it; False if torch itself does, to choose kernels.
    """

    kind: str
    size: Size
    text: str
    where: str
    decided: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it."""
        return names_of(self.size.dim)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Return the outcome for values of the names."""
        found = self.size.value(values)
        return found >= 0 if self.kind == "least" else (found == 0) == (self.kind == "zero")

    @property
    def only_one(self) -> str:
        """The one name of a condition that fails where its size is 1, and for no larger size; else ""."""
        if len(self.names) != 1:
            return ""
        (name,) = self.names
        return name if not self.holds({name: 1}) and all(self.holds({name: n}) for n in (2, 3, 5, 64, 1009)) else ""

    @property
    def always(self) -> bool:
        """True if it holds for all sizes of 1 and more."""
        least, most = self.size.least, (-self.size).least
        if self.kind == "least":
            return least is not None and least >= 0
        apart = (least is not None and least > 0) or (most is not None and most > 0)
        return apart if self.kind == "other" else not self.size.terms

    def applied(self, x: Tensor) -> Tensor:
        """Return x after a check of the limit, which the program makes again for the sizes of each run."""
        left, right = (Size({f: abs(n) for f, n in self.size.terms.items() if n * sign > 0}).dim for sign in (1, -1))
        return call("assert_sizes", x, left=left, right=right, relation=_RELATIONS[self.kind], text=self.text)


class EqualSizes:
    """Sizes that conditions make equal: each class of them has one form, with as few floor divisions as possible."""

    def __init__(self, limits: Iterable[Limit]) -> None:
        self._rules: dict[tuple[str, ...], dict[tuple[str, ...], Fraction]] = {}  # term -> what it equals
        for limit in limits:
            if limit.kind == "zero":
                self._add(limit.size)

    def _add(self, zero: Size) -> None:
        terms = self._reduced(zero)
        term = max((t for t in terms if t), key=lambda t: ("//" in "".join(t), len("".join(t)), t), default=None)
        if term is None:
            return
        n = terms.pop(term)
        self._rules[term] = {t: -m / n for t, m in terms.items()}
        for known in (t for t, value in self._rules.items() if term in value):
            value = self._rules[known]
            n = value.pop(term)
            for t, m in self._rules[term].items():
                value[t] = value.get(t, Fraction(0)) + n * m

    def _reduced(self, size: Size) -> dict[tuple[str, ...], Fraction]:
        found: dict[tuple[str, ...], Fraction] = {}
        for term, n in size.terms.items():
            for t, m in self._rules.get(term, {term: Fraction(1)}).items():
                found[t] = found.get(t, Fraction(0)) + n * m
        return {t: m for t, m in found.items() if m}

    def form(self, size: Size) -> Size:
        """Return the form of all sizes that are equal to this one."""
        terms = self._reduced(size)
        by = lcm(*(m.denominator for m in terms.values()))
        return Size({t: int(m * by) for t, m in terms.items()}) // by

    def applied(self, x: Tensor) -> Tensor:
        """Return x with the sizes of its axes in this form."""
        if not self._rules:
            return x
        n: Any
        for axis, n in enumerate(x.shape):
            if traced(n) and (size := self.form(n)).dim != n.dim:
                x = call("slice", x, axis=axis, start=0, size=size.dim)
        return x


def named_sizes(
    exported: ExportedProgram, arguments: Mapping[str, str], sizes: Mapping[str, Shape]
) -> tuple[dict[str, Shape], dict[str, str], tuple[Limit, ...]]:
    """Return the shapes of inputs with names, what is fixed or limited, in words, and the limits.

    Args:
        exported: the graph.
        arguments: placeholder by input name.
        sizes: shape with names by input name, as wanted.
    """
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    fixed, symbols, shapes = dict[str, str](), dict[Any, str](), dict[str, Shape]()
    numbers: dict[str, int] = {}
    environment: Any = None
    for name, wanted in sizes.items():
        for n, have in zip(wanted, placeholders[arguments[name]].meta["val"].shape, strict=True):
            if not isinstance(n, str):
                continue
            if (number := _number(have, exported)) is not None:
                numbers[n] = number
                fixed[n] = f"{number}, by the module's code"
            else:
                environment = have.node.shape_env
                if symbols.setdefault(have.node.expr, n) != n:
                    fixed[n] = f"{symbols[have.node.expr]}, by the module's code"
    for name, wanted in sizes.items():
        have = placeholders[arguments[name]].meta["val"].shape
        shapes[name] = tuple(n if not isinstance(n, str) else numbers[n] if n in numbers else symbols[m.node.expr]
                             for n, m in zip(wanted, have, strict=True))  # fmt: skip
    limits: dict[tuple[str, str], Limit] = {}
    for limit, text in (*_conditions(environment, symbols), *_ranges(exported, symbols)):
        if limit is None:
            fixed[f"{text} (limit)"] = "a condition of the module's code that is not checked"
        elif not limit.always and (key := (limit.kind, str(limit.size.dim))) not in limits:
            limits[key] = limit
            fixed[f"{text} (limit)"] = f"for {limit.where}"
    return shapes, fixed, tuple(limits.values())


def _number(size: Any, exported: ExportedProgram) -> int | None:
    """Return a size that torch fixed, also where it is a symbol of one value."""
    if isinstance(size, int):
        return size
    value = size.node.shape_env.replace(size.node.expr)
    bounds = exported.range_constraints.get(value)
    if bounds is not None and bounds.lower == bounds.upper:
        value: Any = bounds.lower
    return int(value) if value.is_Integer else None


Found = Iterator[tuple[Limit | None, str]]


def _ranges(exported: ExportedProgram, symbols: Mapping[Any, str]) -> Found:
    """Yield limits of single sizes."""
    for symbol, name in symbols.items():
        bounds = exported.range_constraints.get(symbol)
        if bounds is not None and bounds.lower.is_Integer and bounds.lower > 2:
            text = f"{name} >= {bounds.lower}"
            yield Limit("least", Size.of(name) - int(bounds.lower), text, "its code"), text
        if bounds is not None and bounds.upper.is_Integer and bounds.upper < _MOST:
            text = f"{name} <= {bounds.upper}"
            yield Limit("least", int(bounds.upper) - Size.of(name), text, "its code"), text


def _conditions(environment: Any, symbols: Mapping[Any, str]) -> Found:
    """Yield the conditions that the code decided by, with their texts; None for one that has no form in sizes."""
    names = {symbol: sympy.Symbol(name, integer=True) for symbol, name in symbols.items()}
    if environment is None:
        return
    for guard in environment.guards:
        condition = _ordered(environment.replace(guard.expr))
        if not isinstance(condition, sympy.Rel) or not condition.free_symbols <= symbols.keys():
            continue
        decided = not _about_ones(condition) or _decides(guard)
        text = PythonPrinter().doprint(condition.xreplace(names))
        try:
            rest = _size(condition.lhs, symbols) - _size(condition.rhs, symbols)
        except ShapeError:
            if decided:
                yield None, text
            continue
        kind, size = {
            sympy.Eq: ("zero", rest), sympy.Ne: ("other", rest), sympy.Ge: ("least", rest), sympy.Le: ("least", -rest),
            sympy.Gt: ("least", rest - 1), sympy.Lt: ("least", -rest - 1),
        }[condition.func]  # fmt: skip
        yield Limit(kind, size, text, _location(guard), decided), text


def _ordered(condition: Any) -> Any:
    """Return min(a, b) == a as a <= b, max(a, b) == a as a >= b, and other conditions as they are."""
    if isinstance(condition, sympy.Eq):
        for side, a in ((condition.lhs, condition.rhs), (condition.rhs, condition.lhs)):
            relation = {"Min": sympy.Le, "Max": sympy.Ge}.get(type(side).__name__)
            if relation is not None and a in side.args and len(side.args) == 2:
                return relation(a, next(b for b in side.args if b != a))
    return condition


def _size(value: Any, symbols: Mapping[Any, str]) -> Size:
    """Return a sympy expression as a size. Raises: ShapeError for a function that sizes do not have."""
    if value in symbols:
        return Size.of(symbols[value])
    if value.is_Integer:
        return Size.of(int(value))
    kind = type(value).__name__
    parts = [_size(part, symbols) for part in value.args]
    if value.is_Add or value.is_Mul:
        found = parts[0]
        for part in parts[1:]:
            found = found + part if value.is_Add else found * part
        return found
    if value.is_Pow and value.exp.is_Integer and value.exp > 0:
        found = parts[0]
        for _ in range(int(value.exp) - 1):
            found = found * parts[0]
        return found
    if kind == "FloorDiv":
        return parts[0] // parts[1]
    if kind in ("Mod", "PythonMod"):
        return parts[0] - parts[0] // parts[1] * parts[1]
    raise ShapeError("not a size computed from names", got=value)


# -- conditions on sizes of 0 and 1 ------------------------------------------------------------------------------------
def _about_ones(condition: Any) -> bool:
    """Return True for a condition that fails for sizes of 0 or 1 only, such as `8*size != 8` and `size >= 2`."""
    for side, other in ((condition.lhs, condition.rhs), (condition.rhs, condition.lhs)):
        if other.is_Integer and not side.is_Integer:
            factor = side.as_coeff_Mul()[0]
            if isinstance(condition, sympy.Ne) and factor > 0 and other % factor == 0:
                other //= factor
            below = isinstance(condition, sympy.Lt | sympy.Le | sympy.Gt | sympy.Ge)
            return int(other) <= 2 if below else isinstance(condition, sympy.Ne) and int(other) in (0, 1)
    return False


def _frame(guard: Any) -> Any:
    """Return the innermost frame that made a condition, outside of torch's bookkeeping of sizes."""
    return guard.sloc.framework_loc or guard.sloc.maybe_user_loc


def _location(guard: Any) -> str:
    frame = guard.sloc.maybe_user_loc or _frame(guard)
    found = re.search(r"([^/\s\"]+\.py)[\":, ]+(?:line )?(\d+)", str(frame))
    return f"{found[1]}:{found[2]}" if found else "its code"


def _decides(guard: Any) -> bool:
    """Return True if a line of the module's code decides by a condition; torch's own conditions choose kernels."""
    frame = str(_frame(guard))
    found = re.search(r"(/\S+\.py)[\":, ]+(?:line )?(\d+)", frame)
    if found is None or "/torch/" in found[1]:
        return False
    return bool(
        re.search(r"\b(if|elif|while|assert|and|or|not)\b|[=!<>]=|[<>]", linecache.getline(found[1], int(found[2])))
    )
