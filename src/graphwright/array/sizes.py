"""Sizes computed from named sizes: polynomials such as `B*T` and `T-1`, with floor divisions such as `(T+1)//2`.

A spec stores such a size as its text. The text is canonical, so that equal sizes are equal strings; a name is the text
of itself. Named sizes are at least 1.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from keyword import iskeyword
from math import prod
from typing import Any, TypeVar

from graphwright.errors import ShapeError

Dim = int | str
_LONGEST = 400  # characters of a text, which may come from a file
_CACHED = 1 << 14


def is_dim_name(value: object) -> bool:
    """Return True for a valid name of a dimension: a Python identifier, as generated code reads it as an attribute."""
    return type(value) is str and value.isidentifier() and not iskeyword(value)


def is_dim_text(value: object) -> bool:
    """Return True for a name of a dimension, and for the canonical text of a size computed from names."""
    return type(value) is str and (_canonical(value) if not value.isidentifier() else is_dim_name(value))


class Size:
    """A polynomial of named sizes with whole coefficients; the factors of a term are names and floor divisions.

    >>> (Size.of("B") * "T" + 2 * Size.of("T")).dim
    'B*T+2*T'
    >>> ((Size.of("T") + 3) // 2).dim
    '(T+1)//2+1'
    """

    __slots__ = ("terms",)
    __hash__ = object.__hash__

    def __init__(self, terms: Mapping[tuple[str, ...], int]) -> None:
        self.terms = {factors: n for factors, n in terms.items() if n}

    @staticmethod
    def of(dim: Any) -> Size:
        """Return the size that a dimension of a spec stands for: an int, or a text."""
        return dim if isinstance(dim, Size) else _parsed(dim) if isinstance(dim, str) else Size({(): int(dim)})

    @property
    def dim(self) -> Dim:
        """The size as a dimension of a spec: an int, or the canonical text."""
        return self.terms.get((), 0) if not any(self.terms) else _text(self)

    @property
    def least(self) -> int | None:
        """A lower bound, for names >= 1; None if some term has no known sign."""
        above = Size.of(0)  # in terms of what each factor is above its own bound
        for factors, n in self.terms.items():
            above += prod((Size({(f,): 1, (): _least(f)}) for f in factors), start=Size.of(n))
        return None if any(n < 0 for factors, n in above.terms.items() if factors) else above.terms.get((), 0)

    def value(self, dims: Mapping[str, int]) -> int:
        """Return the number that it is for the sizes `dims` of all its names; it may be negative."""
        found = _bound(self, dims).dim
        assert isinstance(found, int), f"{found} is not bound"
        return found

    def __add__(self, other: Any) -> Size:
        found = dict(self.terms)
        for factors, n in Size.of(other).terms.items():
            found[factors] = found.get(factors, 0) + n
        return Size(found)

    def __mul__(self, other: Any) -> Size:
        found: dict[tuple[str, ...], int] = {}
        for a, n in self.terms.items():
            for b, m in Size.of(other).terms.items():
                factors = tuple(sorted((*a, *b)))
                found[factors] = found.get(factors, 0) + n * m
        return Size(found)

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Any) -> Size:
        return self + -Size.of(other)

    def __rsub__(self, other: Any) -> Size:
        return Size.of(other) - self

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Size:
        """Divide by a positive int, or by a size that divides this one. Raises: ShapeError for another size."""
        by = Size.of(other).dim
        if isinstance(by, str):
            if (found := divided(self, Size.of(other))) is None:
                what = "a named size can be divided by ints and by its factors only"
                raise ShapeError(what, expected=f"a divisor of {self.dim}", got=by)
            return found
        if by < 1:
            raise ShapeError("a named size is divided by a number below 1", got=f"{self.dim} // {by}")
        whole = Size({factors: n // by for factors, n in self.terms.items()})
        left = Size({factors: n % by for factors, n in self.terms.items()})
        inner = [f for f in left.terms if any("//" in factor for factor in f)]
        if len(inner) == 1 and len(inner[0]) == 1 and left.terms[inner[0]] == 1:  # (x//d + m)//by = (x + m*d)//(d*by)
            text, _, d = inner[0][0].rpartition("//")
            return whole + (_parsed(text) + (left - Size({inner[0]: 1})) * int(d)) // (int(d) * by)
        rest = left.dim
        if isinstance(rest, int):
            return whole
        return whole + Size({(f"{rest if is_dim_name(rest) else f'({rest})'}//{by}",): 1})

    def __index__(self) -> int:
        """Return the number. Raises: ShapeError if the size depends on a name."""
        if isinstance(dim := self.dim, str):
            raise ShapeError("a size that depends on names is no number", expected="a static size", got=dim)
        return dim

    def __repr__(self) -> str:
        return f"Size({self.dim})"


def _least(factor: str) -> int:
    """Return a lower bound of a factor of a term: a name, or a size of any kind divided by an int."""
    inner, _, by = factor.rpartition("//")
    return max((_parsed(inner).least or 0) // int(by), 0) if inner else 1


def dim_of(size: int | Size) -> Dim:
    """Return a size as a dimension of a spec. Comparing dimensions compares no values of named sizes."""
    return size.dim if isinstance(size, Size) else size


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of sizes: the number of elements of a shape."""
    given = tuple(dims)
    return prod(map(Size.of, given), start=Size.of(1)).dim if str in map(type, given) else prod(given)


def total(dims: Iterable[Dim]) -> Dim:
    """Return the sum of sizes."""
    given = tuple(dims)
    return sum(map(Size.of, given), Size.of(0)).dim if str in map(type, given) else sum(given)  # pyright: ignore[reportCallIssue, reportArgumentType]  # all are ints


def divided(size: Size, by: Size) -> Size | None:
    """Return size / by if the division leaves no rest, else None: a long division of polynomials."""
    found, rest = Size.of(0), size
    if not by.terms:
        return None
    lead = max(by.terms, key=_order)
    while rest.terms:
        most = max(rest.terms, key=_order)
        factors = list(most)
        for factor in lead:
            if factor not in factors:
                return None
            factors.remove(factor)
        n, left = divmod(rest.terms[most], by.terms[lead])
        if left:
            return None
        step = Size({tuple(factors): n})
        found, rest = found + step, rest - step * by
    return found


def bound(dim: Dim, dims: Mapping[str, int]) -> Dim:
    """Replace names in a dimension by their sizes; names that are not in `dims` are kept.

    Raises: ShapeError if the size is negative.
    """
    if type(dim) is not str:
        return dim
    known = dims.get(dim)
    if known is not None or dim.isidentifier():
        return dim if known is None else known
    found = _bound(_parsed(dim), dims).dim
    if isinstance(found, int) and found < 0:
        names = ", ".join(f"{n} = {dims[n]}" for n in names_of(dim) if n in dims)
        raise ShapeError(f"the size {dim} is negative", expected=">= 0", got=f"{found} for {names}")
    return found


T = TypeVar("T")


def folded(dim: Dim, leaf: Callable[[Dim], T], combine: Callable[[str, T, T], T]) -> T:
    """Compute a dimension from values of its own: `leaf` makes those of ints and names.

    `combine` takes the names of ONNX and two values: `Add`, `Mul` and `Div`, which rounds down.
    """
    parts = []
    for factors, n in Size.of(dim).terms.items():
        given = [leaf(n)] if n != 1 or not factors else []
        for factor in factors:
            inner, _, by = factor.rpartition("//")
            given.append(
                combine("Div", folded(_parsed(inner).dim, leaf, combine), leaf(int(by))) if inner else leaf(factor)
            )
        parts.append(reduce(lambda a, b: combine("Mul", a, b), given))
    return reduce(lambda a, b: combine("Add", a, b), parts) if parts else leaf(0)


def names_of(dim: Dim) -> tuple[str, ...]:
    """Return the names in a dimension, in the order of its text."""
    return tuple(dict.fromkeys(_NAME.findall(dim))) if isinstance(dim, str) else ()


def renamed(dim: Dim, prefix: str) -> str:
    """Return the text of a dimension with a prefix for each name, such as `run.`."""
    return _NAME.sub(lambda found: prefix + found[0], dim) if isinstance(dim, str) else repr(dim)


_NAME = re.compile(r"[^\W\d]\w*")


def _order(factors: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return len(factors), factors


def _bound(size: Size, dims: Mapping[str, int]) -> Size:
    found = Size.of(0)
    for factors, n in size.terms.items():
        term = Size.of(n)
        for factor in factors:
            inner, _, by = factor.rpartition("//")
            term *= _bound(_parsed(inner), dims) // int(by) if inner else Size.of(dims.get(factor, factor))
        found += term
    return found


def _text(size: Size) -> str:
    parts: list[str] = []
    for factors in sorted(size.terms, key=lambda f: (-len(f), f)):
        n = size.terms[factors]
        several = len(factors) > 1 or (factors and n != 1)
        named = [f"({f})" if several and "//" in f else f for f in factors]
        sign = "-" if n < 0 else "+" if parts else ""
        parts.append(sign + "*".join([str(abs(n))] * (abs(n) != 1 or not factors) + named))
    return "".join(parts)


@lru_cache(_CACHED)
def _canonical(text: str) -> bool:
    try:
        return _parsed(text).dim == text
    except (ShapeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


@lru_cache(_CACHED)
def _parsed(text: str) -> Size:
    """Return the size of a text. Raises: ShapeError for anything else, SyntaxError, ValueError."""
    if text.isidentifier():
        return Size({(text,): 1})
    if len(text) > _LONGEST:
        raise ShapeError("the text of a size is too long", expected=f"at most {_LONGEST} characters", got=len(text))
    return sum((_term(node) * sign for node, sign in _summed(ast.parse(text, mode="eval").body, 1)), Size.of(0))


def _summed(node: ast.expr, sign: int) -> Iterator[tuple[ast.expr, int]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from _summed(node.left, sign)
        yield from _summed(node.right, sign if isinstance(node.op, ast.Add) else -sign)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _summed(node.operand, -sign)
    else:
        yield node, sign


def _term(node: ast.expr) -> Size:
    """Return a product of names, numbers and floor divisions; a product of sums is not canonical."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _term(node.left) * _term(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_term(node.operand)
    if isinstance(node, ast.Name):
        return Size({(node.id,): 1})
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Size.of(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        inner = sum((_term(part) * sign for part, sign in _summed(node.left, 1)), Size.of(0))
        return inner // _term(node.right)
    raise ShapeError("not a size computed from names", got=ast.unparse(node))
