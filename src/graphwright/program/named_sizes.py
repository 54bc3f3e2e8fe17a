"""Traces with named sizes: prove that one trace is the program for all sizes.

A trace is one path through its code. What it computes holds for all sizes that take the same path, and the path depends
on sizes only where code compares them (`autograd.named_sizes` refuses every other use of a size as a number). So the
code is traced once more for each comparison, with sizes that decide it otherwise. Both traces must be equal; a trace
that fails is code that is not meant for these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.sizes import Size, names_of
from graphwright.autograd import TraceError
from graphwright.autograd.named_sizes import Comparison
from graphwright.program.kinds import CONST

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program
    from graphwright.program.recorder import TraceRecorder

MOST_TRACES = 64
_SMALL = 64  # sizes up to here are tried one by one, larger ones at powers of 2
_LARGEST = 1 << 40


def try_other_sizes(
    p: Program, recorder: TraceRecorder, again: Callable[[Mapping[str, int], bool], tuple[Program, TraceRecorder]]
) -> None:
    """Trace code again for sizes that decide its comparisons otherwise.

    Args:
        p, recorder: the trace, which has named sizes.
        again: function that traces the same code with these values of the names, as names if its second argument is
            True, else as plain ints.
    Raises: TraceError naming comparison and op if the code records another program for other sizes, or makes too many
        comparisons.
    """
    assert recorder.named is not None
    first = recorder.named.values
    waiting, known = list(recorder.named.comparisons.values()), set(recorder.named.comparisons)
    done = {tuple(first.items())}
    while waiting:
        comparison = waiting.pop()
        for values in _decided_otherwise(comparison, first):
            if (key := tuple(values.items())) in done:
                continue
            done.add(key)
            if len(done) > MOST_TRACES:
                what = f"the traced code makes more than {MOST_TRACES} comparisons of named sizes"
                raise TraceError(what, where=comparison.where, fix="leave a size fixed")
            try:
                other, found = again(values, True)
            except Exception as error:
                if _refuses(again, values):
                    continue
                raise _other_path(comparison, first, values, error.where if isinstance(error, TraceError) else None,
                                  str(error)) from error  # fmt: skip
            _check_equal(p, other, comparison, first, values)
            assert found.named is not None
            new = {key: c for key, c in found.named.comparisons.items() if key not in known}
            known |= set(new)
            waiting += new.values()


def _refuses(again: Callable[[Mapping[str, int], bool], object], values: Mapping[str, int]) -> bool:
    """Return True if the code itself fails for these sizes: then the program need not hold for them."""
    try:
        again(values, False)
    except Exception:
        return True
    return False


def _decided_otherwise(comparison: Comparison, values: Mapping[str, int]) -> list[dict[str, int]]:
    """Return sizes for which a comparison has another outcome; each differs from `values` in one name."""
    outcome, found = comparison.holds(values), []
    for name in names_of(comparison.rest):
        here, tried = (
            values[name],
            {*range(1, _SMALL + 1), *(1 << k for k in range(6, 41)), *_roots(comparison, name, values)},
        )
        other = [n for n in tried if 1 <= n <= _LARGEST and comparison.holds({**values, name: n}) != outcome]
        nearest = {max((n for n in other if n < here), default=0), min((n for n in other if n > here), default=0)}
        found += [{**values, name: n} for n in sorted(nearest - {0})]
    return found


def _roots(comparison: Comparison, name: str, values: Mapping[str, int]) -> list[int]:
    """Return sizes of a name around the one where the two sides of a comparison are equal, if they are linear in it."""
    rest = Size.of(comparison.rest)
    at, step = (rest.value({**values, name: n}) for n in (0, 1))
    slope = step - at
    root = -at // slope if slope else 0
    return [root - 1, root, root + 1, root + 2]


def _nodes(p: Program) -> list[tuple[Any, ...]]:
    return [(p.path(n), p.op(n), [(p.path(v.node), v.port) for v in p.operands(n)], dict(p.attrs(n)), p.specs(n))
            for n in p.order()]  # fmt: skip


def _equal_constants(p: Program, node: NodeId, other: Program, twin: NodeId) -> bool:
    arrays = [q.weights.array(q.key(n)).to_numpy() for q, n in ((p, node), (other, twin))]
    return np.array_equal(arrays[0], arrays[1], equal_nan=arrays[0].dtype.kind == "f")


def _check_equal(
    p: Program, other: Program, comparison: Comparison, first: Mapping[str, int], values: Mapping[str, int]
) -> None:
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


def _other_path(
    comparison: Comparison, first: Mapping[str, int], values: Mapping[str, int], where: str | None, got: str
) -> TraceError:
    (name,) = (n for n in values if values[n] != first[n])
    what = f"the traced code computes something else where the named size {name} is {values[name]} than where it is "
    what += f"{first[name]}: {comparison.where} compares {_sides(comparison)}"
    fix = f"replace the branch by tensor operations that hold for every size, or leave {name} fixed"
    return TraceError(what, where=where, got=got, fix=fix)


def _sides(comparison: Comparison) -> str:
    rest = Size.of(comparison.rest)
    rest = -rest if all(n < 0 for factors, n in rest.terms.items() if factors) else rest
    number = rest.terms.get((), 0)
    return f"{(rest - number).dim} with {-number}"
