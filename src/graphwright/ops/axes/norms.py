"""Axes of norms."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.ops.axes.products import grouped_channels
from graphwright.ops.axes.use import Correction, Dims, Use
from graphwright.ops.terms import Atom, product, size


def rms_norm(u: Use) -> Sequence[Dims]:
    """The scale is the last axis; removing zeros from it has a correction."""
    x, w = u.ins
    u.same(x[-1], w[0])
    u.mixed(x[-1], "divides by its root mean square")
    u.kind(x[-1], "channels")
    u.corrections.append(Correction(x[-1], 1, "eps", 1.0 if u.attrs["unit_offset"] else 0.0))
    return [x]


def layer_norm(u: Use) -> Sequence[Dims]:
    """Scale and shift are the last axes."""
    x, rank = u.ins[0], u.attrs["rank"]
    for scale in u.ins[1:]:
        for a, b in zip(x[-rank:], scale, strict=True):
            u.same(a, b)
    for term in x[-rank:]:
        u.mixed(term, "subtracts its mean")
        u.kind(term, "channels")
    return [x]


def group_norm(u: Use) -> Sequence[Dims]:
    """Channels are groups × those of a group, over which it normalises."""
    x = u.ins[0]
    groups, inner = Atom(u.attrs["groups"]), Atom(int(size(x[1])) // u.attrs["groups"])
    u.same(x[1], product(groups, inner))
    u.mixed(inner, "normalises over it")
    grouped_channels(u, groups, x[1])
    for term in x[2:]:
        u.mixed(term, "normalises over it")
    for scale in u.ins[1:]:
        u.same(x[1], scale[0])
    return [x]


def batch_norm(u: Use) -> Sequence[Dims]:
    """Every table is of channels, each by itself."""
    x = u.ins[0]
    u.kind(x[1], "channels")
    for table in u.ins[1:]:
        u.same(x[1], table[0])
    for term in (x[0], *x[2:]) if len(u.shapes) > 1 else ():
        u.mixed(term, "normalises over it")
    return [x, *((x[1],) for _ in u.shapes[1:])]
