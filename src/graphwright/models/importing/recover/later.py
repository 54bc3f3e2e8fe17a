"""Whether the tokens of a captured model read later ones, by the weights of its attentions at small sizes."""

from __future__ import annotations

import numpy as np

from graphwright.array.sizes import names_of
from graphwright.errors import GraphwrightError
from graphwright.models.importing.recover.regions import Regions, arrays, normal
from graphwright.ops import traits
from graphwright.program.kinds import CONST, SOURCES
from graphwright.program.op_graph import Value
from graphwright.program.program import Program


def reads_later(program: Program) -> bool:
    """Return whether an attention between the tokens of one text gives weight to a later token.

    What only moves, masks or adds to scores is computed, on random numbers instead of the products that make the scores
    and of all inputs. Attentions are `sdpa`, and `softmax` along the last of two equal named sizes.
    """
    s = Regions(program)
    return any(_sdpa_reads_later(s, v) for v in s.values("sdpa")) or any(
        _looks_ahead(s, v) for v in s.values("softmax") if s.attr(v, "axis") in (-1, len(s.shape(v)) - 1)
    )


def _sdpa_reads_later(s: Regions, value: Value) -> bool:
    q, k, _, *extra = s.p.operands(value.node)
    if s.attr(value, "causal") or s.shape(q)[2] != s.shape(k)[2] or not names_of(s.shape(q)[2]):
        return False
    masks = dict(zip(s.attr(value, "optional"), extra, strict=True))
    return "bias" not in masks or _looks_ahead(s, masks["bias"])


def _looks_ahead(s: Regions, scores: Value) -> bool:
    """Return whether weights, a mask or numbers added to scores let any query see a later key."""
    shape = s.shape(scores)
    if len(shape) < 2 or shape[-1] != shape[-2] or not names_of(shape[-1]):
        return len(shape) > 1 and shape[-2] == 1  # the same for all queries
    rng, sizes = np.random.default_rng(0), s.sizes[1]
    try:
        given = {v: arrays(normal(rng, spec), spec) for v in _cut(s, scores)
                 for spec in [s.p.specs(v.node)[v.port].bind(sizes)]}  # fmt: skip
        (made,) = s.compute([scores], given, sizes, shapes=True)
    except GraphwrightError:
        return False
    values = made.to_numpy()
    seen = values if made.dtype.kind == "bool" else values != 0 if s.is_op(scores, "softmax") else values > -1e4
    return bool(np.triu(seen, 1).any())


def _cut(s: Regions, root: Value) -> list[Value]:
    """Return the products, looked-up rows and inputs that a value is computed from."""
    found, stack = dict[Value, None](), [root]
    while stack:
        value = stack.pop()
        if s.is_op(value, CONST) or value in found:
            continue
        if s.is_op(value, *SOURCES) or s.is_op(value, "matmul", "linear", "einsum", "embedding"):
            found[value] = None
        elif not traits(s.p.op(value.node)).valueless:
            stack += s.p.operands(value.node)
    return list(found)
