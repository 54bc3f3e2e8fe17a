"""Axes of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graphwright.ops.axes.use import Dims, Use, broadcast_dims
from graphwright.ops.terms import Atom, Term, chain, product, size


def linear(u: Use) -> Sequence[Dims]:
    """The weight makes its first axis and sums over its second."""
    x, w = u.ins[:2]
    u.same(x[-1], w[1])
    u.summed(w[1], (0, -1), (1, 1))
    u.kind(w[1], "neurons")
    if len(u.ins) > 2:
        u.same(w[0], u.ins[2][0])
    return [(*x[:-1], w[0])]


def linear_int8(u: Use) -> Sequence[Dims]:
    """As `linear`; a scale belongs to a group of neighbours along the second axis."""
    x, q, scales, *bias = u.ins
    u.same(x[-1], q[1])
    u.kind(q[1], "neurons")
    for term in (q[1], scales[1]):
        u.frozen(term, "has a scale for each group along it")
    for other in (scales, *bias):
        u.same(q[0], other[0])
    return [(*x[:-1], q[0])]


def matmul(u: Use) -> Sequence[Dims]:
    """A sum over the inner axis, others as they are; an axis that both have is heads, or experts if one is a weight."""
    a, b = u.ins
    u.same(a[-1], b[-2:][0])
    u.summed(a[-1], (0, -1), (1, -2 if len(b) > 1 else 0))
    u.kind(a[-1], "neurons")
    rows, columns = a[-2:-1] if len(a) > 1 else (), b[-1:] if len(b) > 1 else ()
    shape = u.shapes[0]
    lead = broadcast_dims(u, (a[:-2], b[:-2]), shape[: len(shape) - len(rows) - len(columns)])
    for t in lead:
        shared = all(any(size(d) == size(t) for d in dims[:-2]) for dims in (a, b))
        if shared and isinstance(size(t), int):
            u.kind(t, "experts" if any(u.stored) else "heads")
    return [(*lead, *rows, *columns)]


def solve(u: Use) -> Sequence[Dims]:
    """Columns of B stay themselves; every other place depends on the whole matrix."""
    a, b = u.ins
    for term in (*a, b[0]):
        u.frozen(term, "solves a system along it")
    return [(a[1], b[1])]


def grouped_matmul(u: Use) -> Sequence[Dims]:
    """A sum over the inner axis; experts are the matrices, each with a run of rows."""
    x, w, offsets = u.ins
    u.same(x[1], w[1])
    u.summed(w[1], (0, 1), (1, 1))
    u.kind(w[1], "neurons")
    u.same(offsets[0], chain(Atom(1), w[0]))
    for term in (x[0], w[0]):
        u.mixed(term, "has a run of rows for each")
    u.kind(w[0], "experts")
    return [(x[0], w[2])]


def conv(u: Use) -> Sequence[Dims]:
    """Channels are groups × those of a group; x joins by group, w has the group in its outputs only."""
    x, w = u.ins[:2]
    groups, made = Atom(u.attrs["groups"]), Atom(int(size(w[0])) // u.attrs["groups"])
    u.same(x[1], product(groups, w[1]))
    u.same(w[0], product(groups, made))
    return _convolved(u, groups, w[1], w[0], 1)


def conv_transpose(u: Use) -> Sequence[Dims]:
    """As `conv`, with the group in the weight's inputs."""
    x, w = u.ins[:2]
    groups, read = Atom(u.attrs["groups"]), Atom(int(size(w[0])) // u.attrs["groups"])
    u.same(w[0], product(groups, read))
    u.same(x[1], w[0])
    return _convolved(u, groups, read, product(groups, w[1]), 0)


def _convolved(u: Use, groups: Atom, read: Term, made: Term, at: int) -> Sequence[Dims]:
    x, w = u.ins[:2]
    u.summed(read, (0, 1), (1, at))
    grouped_channels(u, groups, x[1], made)
    if len(u.ins) > 2:
        u.same(made, u.ins[2][0])
    for term in (*x[2:], *w[2:]):
        u.frozen(term, "slides a window over it")
    return [(x[0], made, *(u.fresh(n, "has so many places for its window") for n in u.shapes[0][2:]))]


def grouped_channels(u: Use, groups: Atom, *channels: Term) -> None:
    """Groups are an attribute and an axis; channels are groups × those of a group."""
    u.sizes["groups"] = groups
    u.kind(groups, "channel_groups")
    for term in channels:
        u.kind(term, "channels")


def unfold(u: Use) -> Sequence[Dims]:
    """Channels × entries of the window."""
    x, kernel = u.ins[0], u.fresh(prod(u.attrs["kernel"]), "has so many entries in its window")
    for term in x[2:]:
        u.frozen(term, "slides a window over it")
    return [(x[0], product(x[1], kernel), u.fresh(u.shapes[0][2], "has so many places for its window"))]


def fold(u: Use) -> Sequence[Dims]:
    """Channels, out of channels × entries of the window."""
    x, kernel = u.ins[0], u.fresh(prod(u.attrs["kernel"]), "has so many entries in its window")
    channels = Atom(u.shapes[0][1])
    u.same(x[1], product(channels, kernel))
    u.frozen(x[2], "slides a window over it")
    return [(x[0], channels, *(u.fresh(n, "slides a window over it") for n in u.shapes[0][2:]))]
