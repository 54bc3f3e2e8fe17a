"""Traces with named sizes: prove that one trace is the program for all sizes.

A trace is one path through its code. What it computes holds for all sizes that take the same path, and the path depends
on sizes only where code compares them (`autograd.named_sizes` refuses every other use of a size as a number). So the
code is traced again for every combination of outcomes that sizes can have. All traces must be equal; where code fails
also with plain ints, it is not meant for these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.sizes import Size, names_of
from graphwright.autograd import TraceError
from graphwright.autograd.named_sizes import Comparison
from graphwright.program.kinds import CONST
from graphwright.program.weights import is_abstract

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program
    from graphwright.program.recorder import TraceRecorder

MOST_TRACES = 100
_SMALL = 64  # sizes up to here are tried one by one, larger ones at powers of 2
_SEARCHED = 4096  # where an equation is not linear
_LARGEST = 1 << 40

Sizes = Mapping[str, int]


def try_other_sizes(
    p: Program, recorder: TraceRecorder, again: Callable[[Sizes, bool], tuple[Program, TraceRecorder]]
) -> None:
    """Trace code again for sizes that decide its comparisons otherwise, in every combination that sizes can have.

    Args:
        p, recorder: the trace, which has named sizes.
        again: function that traces the same code with these values of the names, as names if its second argument is
            True, else as plain ints.
    Raises: TraceError naming comparison and op if the code records another program for other sizes, or makes too many
        comparisons.
    """
    assert recorder.named is not None
    first, known = recorder.named.values, dict(recorder.named.comparisons)
    tried: list[Sizes] = [first]
    while (found := _untried(known.values(), tried)) is not None:
        comparison, values = found
        tried.append(values)
        if len(tried) > MOST_TRACES:
            what = f"comparisons of named sizes in the traced code have more than {MOST_TRACES} combined outcomes"
            raise TraceError(what, where=comparison.where, fix="leave a size fixed, or compare fewer sizes")
        try:
            other, their = again(values, True)
        except Exception as error:
            if _refuses(again, values):
                continue
            raise _other_path(comparison, first, values, comparison.where, str(error)) from error
        _check_equal(p, other, comparison, first, values)
        assert their.named is not None
        known |= their.named.comparisons


def _untried(known: Iterable[Comparison], tried: Sequence[Sizes]) -> tuple[Comparison, Sizes] | None:
    """Return sizes with outcomes of all comparisons that no tried sizes have, and the comparison that they turn."""
    comparisons = list(known)
    seen = {tuple([c.holds(values) for c in comparisons]) for values in tried}
    for values in tried:
        for comparison in comparisons:
            for other in _decided_otherwise(comparison, values):
                if tuple([c.holds(other) for c in comparisons]) not in seen:
                    return comparison, other
    return None


def _refuses(again: Callable[[Sizes, bool], object], values: Sizes) -> bool:
    """Return True if the code itself fails for these sizes: then the program need not hold for them."""
    try:
        again(values, False)
    except Exception:
        return True
    return False


def _decided_otherwise(comparison: Comparison, values: Sizes) -> list[dict[str, int]]:
    """Return sizes near `values` for which a comparison has another outcome; none if all sizes decide it equally.

    Raises: TraceError for an equation that no tried sizes decide otherwise, but some may.
    """
    own = tuple((name, values[name]) for name in names_of(comparison.rest))
    return [{**values, **other} for other in _turns(comparison, own)]


@lru_cache(1 << 12)
def _turns(comparison: Comparison, own: tuple[tuple[str, int], ...]) -> list[dict[str, int]]:
    """Return values of the names of a comparison, near `own`, that turn it; empty if none do."""
    here, outcome = dict(own), comparison.holds(dict(own))
    found: list[dict[str, int]] = []
    for name in here:
        other = sorted(n for n in _tried(comparison, name, here) if comparison.holds({**here, name: n}) != outcome)
        below, above = ([n for n in other if n < here[name]], [n for n in other if n > here[name]])
        found += [{**here, name: n} for n in (*below[-1:], *above[:1])]
    if not found and len(here) > 1:  # two sizes have to change
        grids = ({**here, name: n} for name in here for n in (*range(1, 13), 16, 64, 256, 1024))
        pairs = ((other, name, n) for other in grids for name in here for n in _tried(comparison, name, other, 12))
        sizes = ({**other, name: n} for other, name, n in pairs)
        found += islice((other for other in sizes if comparison.holds(other) != outcome), 1)
    linear = all(len(factors) < 2 and "//" not in "".join(factors) for factors in Size.of(comparison.rest).terms)
    if not found and comparison.equal and (len(here) > 1 or not linear):
        what = f"the traced code compares {_sides(comparison)}, and for which sizes they are equal is not known"
        raise TraceError(what, where=comparison.where, fix="compare single sizes, or leave a size fixed")
    return found


def _tried(comparison: Comparison, name: str, values: Sizes, small: int = _SMALL) -> set[int]:
    """Return values to try for a name: small ones, powers of 2, and those around a solution of the equation.

    The equation is solved for terms that are linear in the name; for others, more sizes are tried.
    """
    rest = Size.of(comparison.rest)
    at, one, two = (rest.value({**values, name: n}) for n in (0, 1, 2))
    slope = one - at
    root = -at // slope if slope else 0
    linear = two - one == slope and not any(
        "//" in f and name in names_of(f) for factors in rest.terms for f in factors
    )
    small = small if linear or not comparison.equal else _SEARCHED
    found = {*range(1, small + 1), *(1 << k for k in range(6, 41)), root - 1, root, root + 1, root + 2}
    return {n for n in found if 1 <= n <= _LARGEST}


def _nodes(p: Program) -> list[tuple[Any, ...]]:
    return [(p.path(n), p.op(n), [(p.path(v.node), v.port) for v in p.operands(n)], dict(p.attrs(n)), p.specs(n))
            for n in p.order()]  # fmt: skip


def _equal_constants(p: Program, node: NodeId, other: Program, twin: NodeId) -> bool:
    a, b = (q.weights.array(q.key(n)) for q, n in ((p, node), (other, twin)))
    if a.storage is b.storage or is_abstract(a) or is_abstract(b):
        return a.storage is b.storage and a.layout == b.layout
    arrays = a.to_numpy(), b.to_numpy()
    return np.array_equal(*arrays, equal_nan=arrays[0].dtype.kind == "f")


def _check_equal(p: Program, other: Program, comparison: Comparison, first: Sizes, values: Sizes) -> None:
    """Raise TraceError unless two traces of the same code are equal."""
    pairs = list(zip(p.order(), other.order(), strict=False))
    differ = next((n for (n, _), a, b in zip(pairs, _nodes(p), _nodes(other), strict=False) if a != b), None)
    if differ is None:
        consts = ((a, b) for a, b in pairs if p.op(a) == CONST)
        differ = next((a for a, b in consts if not _equal_constants(p, a, other, b)), None)
    outputs = [[(name, q.path(v.node), v.port) for name, v in zip(q.output_names(), q.outputs(), strict=True)]
               for q in (p, other)]  # fmt: skip
    if differ is None and outputs[0] == outputs[1] and len(p) == len(other):
        return
    differ = p.order()[-1] if differ is None else differ
    got = f"{len(p)} and {len(other)} nodes"
    raise _other_path(comparison, first, values, f"{p.path(differ)} ({p.op(differ)})", got)


def _other_path(comparison: Comparison, first: Sizes, values: Sizes, where: str | None, got: str) -> TraceError:
    moved = [name for name in values if values[name] != first[name]]
    here, there = (", ".join(f"{name} = {sizes[name]}" for name in moved) for sizes in (first, values))
    what = f"the traced code computes something else where {there} than where {here}: "
    what += f"{comparison.where} compares {_sides(comparison)}"
    fix = f"replace the branch by tensor operations that hold for every size, or leave {' and '.join(moved)} fixed"
    return TraceError(what, where=where, got=got, fix=fix)


def _sides(comparison: Comparison) -> str:
    terms = Size.of(comparison.rest).terms
    more, less = (Size({f: abs(n) for f, n in terms.items() if n * sign > 0}).dim for sign in (1, -1))
    return f"{more} with {less}" if isinstance(more, str) else f"{less} with {more}"
