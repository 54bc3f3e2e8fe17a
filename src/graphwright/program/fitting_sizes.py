"""Numbers for the named sizes of a program at which all of its ops can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from graphwright.array.sizes import names_of
from graphwright.errors import GraphwrightError
from graphwright.ops import get
from graphwright.program.kinds import KINDS

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program

_NEAR, _MOST = 64, 1 << 24


def fitting_sizes(p: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes, each changed to a near one where an op of the program refuses it.

    Sizes may be too small for a window of a convolution, or break a condition (`assert_sizes`). Names are changed one
    by one, upwards if possible; if no such change is enough, the sizes returned do not fit either.
    """
    found = dict(sizes)
    names = {node: _names(p, node) & found.keys() for node in p.order() if p.op(node) not in KINDS}
    named = [node for node, own in names.items() if own]
    for _ in range(len(named)):
        refusing = next((node for node in named if not _runs(p, node, found)), None)
        if refusing is None:
            break
        tried = ({**found, name: n} for name in sorted(names[refusing]) for n in _others(found[name]))
        better = next((other for other in tried if _runs(p, refusing, other)), None)
        if better is None:
            break
        found = better
    return found


def _names(p: Program, node: NodeId) -> set[str]:
    """Return the names in the sizes that a node reads, makes and has as attributes."""
    specs = (*p.specs(node), *(p.specs(v.node)[v.port] for v in p.operands(node)))
    attrs = (p.attrs(node)[name] for name in get(p.op(node)).sized)
    listed = (dim for attr in attrs for dim in (attr if isinstance(attr, tuple | list) else (attr,)))
    return {name for dim in chain(listed, *(s.shape for s in specs)) for name in names_of(dim)}


def _runs(p: Program, node: NodeId, sizes: Mapping[str, int]) -> bool:
    """Return whether an op accepts its operands at these sizes."""
    row = get(p.op(node))
    try:
        ins = [p.specs(v.node)[v.port].bind(dict(sizes)) for v in p.operands(node)]
        row.specs(ins, row.bind_all_sizes(p.attrs(node), sizes) if row.sized else p.attrs(node))
        return all(spec.bind(dict(sizes)) is not None for spec in p.specs(node))
    except GraphwrightError:
        return False


def _others(n: int) -> Iterator[int]:
    """Yield other sizes: larger ones one by one and then at powers of 2, then smaller ones."""
    doubled = (n << k for k in range(1, 25) if n << k <= _MOST)
    return chain(range(n + 1, n + _NEAR), doubled, range(n - 1, 0, -1))
