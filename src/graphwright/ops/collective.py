"""Collectives: ops that all ranks of a run execute together, in the same order.

The attribute `group` names the ranks that take part: all of the run, or those that share a copy of a divided model
("model"), or those that have the same part of all copies ("data"); `ranks` is their number. In a world of one every
collective is a copy. Gradients are those of the sum of the losses of all ranks, so the gradient of each op is the
transposed collective. Sums over ranks are in a fixed order, in float32 for 16-bit floats, rounded once.

An op `*_start` copies its operands into one buffer and begins a collective on it; the op `*_wait` of that buffer waits
for the result. In between, a plan runs what does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from graphwright.array.dtype import float32, int32, int64
from graphwright.array.sizes import product
from graphwright.array.spec import Spec
from graphwright.array.world import GROUPS, WrongWorld
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import axis_of, identity, spliced
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Row, Traits, op
from graphwright.settings import Number, Range

Ranks = Annotated[int, Range(1, 1 << 20, whole=True)]
Rank = Annotated[int, Range(0, (1 << 20) - 1, whole=True)]
_AMONG = {"ranks": Attr(Ranks), "group": Attr(Literal[GROUPS], "run")}
_NOT_EXPORTED = dict.fromkeys(("emit", "onnx"), "an exported model runs in one process")
_ONE_PROGRAM = {"axes": "the blocks of an axis are on different ranks, whose programs are edited together"}


def summable(x: Spec, **attrs: Any) -> Spec:
    """Return the operand's spec. Raises: DTypeError if it cannot be summed over ranks."""
    if not (x.dtype.is_float or x.dtype in (int32, int64)) or x.dtype.itemsize == 1:
        expected = "float16, bfloat16, float32, float64, int32 or int64"
        raise DTypeError("values of this dtype cannot be summed over ranks", got=x, expected=expected, fix="cast it")
    return x


def in_ranks(rank: int, ranks: int, name: str) -> None:
    """Raise WrongWorld unless `rank`, the attribute `name`, is one of the ranks."""
    if rank >= ranks:
        raise WrongWorld(f"the attribute {name!r} is no rank", expected=f"0 to {ranks - 1}", got=rank)


def _wide_bytes(x: Spec) -> int:
    """Return the bytes of x in the dtype in which it is summed."""
    return x.size * max(x.dtype.itemsize, 4)


def _sent(share: Callable[[int], float], size: Callable[[Spec], int] = lambda x: x.nbytes) -> Any:
    """Return a `cost`: `share(ranks)` of the first operand's bytes are sent."""

    def cost(ins: Sequence[Spec], outs: Sequence[Spec], attrs: Any) -> Cost:
        sent = round(share(attrs["ranks"]) * size(ins[0]))
        return Cost(0, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs), sent)

    return cost


def _among(attrs: Any) -> dict[str, Any]:
    return {name: attrs[name] for name in _AMONG}


def _others(n: int) -> float:
    return (n - 1) / n


def _drawn(*shape: int, **attrs: Any) -> Any:
    return lambda rng: ([rng.normal(size=shape)], {"ranks": 1, "group": "run", **attrs})


class _Collective(Row):
    arity, operands = 1, ("x",)
    traits = Traits(update=True, collective=True, contiguous=(0,), linear_in=(0,))
    why = _NOT_EXPORTED


@op("all_reduce")
class AllReduce(_Collective):
    """The sum of x over all ranks, on all ranks; the gradient is the sum of the gradients."""

    attrs, infer, axes, sample = _AMONG, summable, identity, _drawn(3, 4)
    traits = Traits(inplace=((0, 0),))
    cost = _sent(lambda n: 2 * _others(n), _wide_bytes)
    vjp = lambda g, ins, outs, attrs, needs: (call("all_reduce", g, **attrs),)


@op("all_gather")
class AllGather(_Collective):
    """The x of all ranks, concatenated along an axis in the order of the ranks; the gradient is reduce_scatter."""

    attrs, sample = {"axis": Attr(int, 0), **_AMONG}, _drawn(3, 4, axis=-1)
    why, cost = _ONE_PROGRAM, _sent(lambda n: n - 1)
    vjp = lambda g, ins, outs, attrs, needs: (call("reduce_scatter", g, **attrs),)

    def infer(x, axis, ranks, group):
        at = axis_of(axis, len(x.shape))
        return Spec(spliced(x.shape, at, product((x.shape[at], ranks))), x.dtype)


@op("reduce_scatter")
class ReduceScatter(_Collective):
    """Block r of the sum of x over all ranks, on rank r; the blocks are equal parts of an axis.

    Blocks are added in the order of the ranks. The gradient is all_gather.
    """

    attrs, sample = {"axis": Attr(int, 0), **_AMONG}, _drawn(3, 4, axis=1)
    why, cost = _ONE_PROGRAM, _sent(_others, _wide_bytes)
    vjp = lambda g, ins, outs, attrs, needs: (call("all_gather", g, **attrs),)

    def infer(x, axis, ranks, group):
        return _block(summable(x), axis, ranks)


@op("all_to_all")
class AllToAll(_Collective):
    """Block r of x along the axis `split` goes to rank r; the blocks received are concatenated along the axis `join`.

    The gradient is the exchange back.
    """

    attrs = {"split": Attr(int, 0), "join": Attr(int, 0), **_AMONG}
    why, cost, sample = _ONE_PROGRAM, _sent(_others), _drawn(3, 4, split=1, join=0)

    def infer(x, split, join, ranks, group):
        block = _block(x, split, ranks)
        at = axis_of(join, len(x.shape))
        return Spec(spliced(block.shape, at, product((block.shape[at], ranks))), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        return (call("all_to_all", g, **{**attrs, "split": attrs["join"], "join": attrs["split"]}),)


class _Rooted(_Collective):
    attrs, axes, sample = {"root": Attr(Rank, 0), **_AMONG}, identity, _drawn(3, 4, root=0)
    traits = Traits(inplace=((0, 0),))


@op("broadcast")
class Broadcast(_Rooted):
    """The x of rank `root`, on all ranks. The gradient is the sum of the gradients there, and 0 elsewhere."""

    cost = _sent(_others)
    vjp = lambda g, ins, outs, attrs, needs: (call("reduce", g, **attrs),)

    def infer(x, root, ranks, group):
        in_ranks(root, ranks, "root")
        return x


@op("reduce")
class Reduce(_Rooted):
    """The sum of x over all ranks on rank `root`, and 0 elsewhere; the gradient is broadcast."""

    cost = _sent(lambda n: 2 * _others(n), _wide_bytes)
    vjp = lambda g, ins, outs, attrs, needs: (call("broadcast", g, **attrs),)

    def infer(x, root, ranks, group):
        in_ranks(root, ranks, "root")
        return summable(x)


class _PointToPoint(_Collective):
    traits = Traits(point_to_point=True)


@op("send")
class Send(_PointToPoint):
    """Send x to rank `to`; the result is 0, 0-d. Where it is part of a loss, x gets the gradient that `to` sends back.

    In a world of one, which can only send to itself, nothing is sent.
    """

    attrs, sample = {"to": Attr(Rank), **_AMONG}, _drawn(3, 4, to=0)
    why = {"axes": "the receiver's program has to be edited too"}
    cost = _sent(lambda n: float(n > 1))

    def infer(x, to, ranks, group):
        in_ranks(to, ranks, "to")
        return Spec((), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        like = call("expand", g, shape=ins[0].shape)
        return (call("recv", like, source=attrs["to"], **_among(attrs)),)


@op("recv")
class Recv(_PointToPoint):
    """What rank `source` sends: an array with the spec of x, of which no value is read.

    If x needs a gradient, the gradient of the result is sent to `source`, and that of x is 0. In a world of one the
    result is 0.
    """

    attrs, axes, sample = {"source": Attr(Rank), **_AMONG}, identity, _drawn(3, 4, source=0)
    cost = _sent(lambda n: 0.0)

    def infer(x, source, ranks, group):
        in_ranks(source, ranks, "source")
        return x

    def vjp(g, ins, outs, attrs, needs):
        sent = call("send", g, to=attrs["source"], **_among(attrs))
        return (call("expand", sent, shape=ins[0].shape),)


def _block(x: Spec, axis: int, ranks: int) -> Spec:
    """Return the spec of one of `ranks` equal blocks of x along an axis. Raises: ShapeError."""
    at = axis_of(axis, len(x.shape))
    size = x.shape[at]
    if type(size) is not int or size % ranks:
        raise ShapeError("the axis cannot be divided among the ranks", where=f"axis {axis}", got=size,
                         expected=f"a multiple of {ranks}")  # fmt: skip
    return Spec(spliced(x.shape, at, size // ranks), x.dtype)


# -- buckets: many arrays in one collective, beside which other instructions run ---------------------------------------
class _Start(Row):
    """Base of the ops that fill a bucket and begin a collective on it.

    With `gated`, the last operand is a 0-d float32 of equal value on all ranks: where it is 0, nothing is sent, and the
    op that waits returns this rank's own values.
    """

    arity, traits = (1, None), Traits(update=True, collective=True, starts=True)
    vjp = None
    why = {**_NOT_EXPORTED, "vjp": "it serves the update of a training step", "axes": "a training step is traced again"}


class _Wait(Row):
    """Base of the ops that wait for the collective of a bucket."""

    arity, traits = 1, Traits(update=True, collective=True, waits=True, contiguous=(0,))
    vjp = None
    why = _Start.why
    cost = lambda ins, outs, attrs: Cost(0, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))


def _arrays(ins: Sequence[Spec], gated: bool) -> Sequence[Spec]:
    """Return the operands that are arrays of the bucket. Raises: DTypeError for another gate than a 0-d float32."""
    if gated and (len(ins) < 2 or ins[-1] != _FLAG):
        raise DTypeError("the gate of a bucket is not a float32 scalar", expected=_FLAG, got=ins[-1])
    return ins[:-1] if gated else ins


_FLAG = Spec((), float32)
_BUCKET = {**_AMONG, "gated": Attr(bool, False)}
_SUMMED = {**_BUCKET, "scale": Attr(Number, 1.0)}


def _total(arrays: Sequence[Spec]) -> int:
    """Return the number of elements of arrays of one dtype that can be summed, all of known size."""
    for x in arrays:
        if summable(x).dtype is not arrays[0].dtype or x.symbolic:
            raise DTypeError(
                "the arrays of a bucket are not of one dtype and of known sizes", expected=arrays[0], got=x
            )
    return sum(x.size for x in arrays)


def _wide(x: Spec, size: int) -> Spec:
    return Spec((size,), float32 if x.dtype.is_low else x.dtype)


@op("all_reduce_start")
class AllReduceStart(_Start):
    """Copy arrays, times `scale`, one after another to a bucket, 1-d, and begin to sum it over the ranks.

    16-bit floats become float32. `all_reduce_wait` returns the sum.
    """

    attrs = _SUMMED

    def infer(*ins: Any, ranks, group, gated, scale):
        arrays = _arrays(ins, gated)
        return _wide(arrays[0], _total(arrays))

    def cost(ins, outs, attrs):
        sent = round(2 * _others(attrs["ranks"]) * outs[0].nbytes)
        return Cost(outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes, sent)

    def sample(rng):
        return [rng.normal(size=s) for s in ((3, 4), (5,))], {"ranks": 1, "group": "run", "gated": False, "scale": 0.5}


@op("all_reduce_wait")
class AllReduceWait(_Wait):
    """The sum that `all_reduce_start` began, over the bucket that it returned."""

    attrs, infer, traits = _AMONG, summable, Traits(inplace=((0, 0),))
    sample = _drawn(7)


@op("reduce_scatter_start")
class ReduceScatterStart(_Start):
    """Copy arrays, times `scale`, to a bucket of `ranks` equal blocks, and begin to send block r to rank r.

    The first `counts[0]` arrays are in block 0, the next `counts[1]` in block 1, and so on; all blocks are as long as
    the longest. Results: the bucket, and the memory in which the blocks for this rank arrive.
    """

    attrs, results = {**_SUMMED, "counts": Attr(tuple[int, ...])}, ("bucket", "arriving")

    def infer(*ins: Any, ranks, group, gated, scale, counts):
        arrays = _arrays(ins, gated)
        if len(counts) != ranks or sum(counts) != len(arrays) or min(counts) < 0:
            raise ShapeError("the counts do not divide the arrays among the ranks", got=counts,
                             expected=f"{ranks} counts of {len(arrays)} arrays")  # fmt: skip
        _total(arrays)
        made = _wide(arrays[0], ranks * max(map(sum, blocks([x.size for x in arrays], counts))))
        return made, made

    def cost(ins, outs, attrs):
        sent = round(_others(attrs["ranks"]) * outs[0].nbytes)
        return Cost(outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes, sent)

    def sample(rng):
        attrs = {"ranks": 1, "group": "run", "gated": False, "scale": 0.5, "counts": (2,)}
        return [rng.normal(size=s) for s in ((3, 4), (5,))], attrs


def blocks(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """Divide values into consecutive blocks of `counts` each."""
    given = iter(values)
    return [[next(given) for _ in range(count)] for count in counts]


@op("reduce_scatter_wait")
class ReduceScatterWait(_Wait):
    """The sum over all ranks of the block of this rank, added in the order of the ranks, 1-d.

    The operands are the results of `reduce_scatter_start`; `rank` is this rank.
    """

    arity, attrs = 2, {"rank": Attr(Rank), **_AMONG}
    traits = Traits(contiguous=(0, 1))
    sample = lambda rng: ([rng.normal(size=7)] * 2, {"rank": 0, "ranks": 1, "group": "run"})

    def infer(bucket, arriving, rank, ranks, group):
        in_ranks(rank, ranks, "rank")
        if bucket != arriving or len(bucket.shape) != 1:
            raise ShapeError("the operands are no bucket", expected="two arrays [n]", got=f"{bucket}, {arriving}")
        return _block(summable(bucket), 0, ranks)


@op("all_gather_start")
class AllGatherStart(_Start):
    """Copy arrays to block `rank` of a bucket of `ranks` blocks of `length` elements, and begin to gather the others.

    `rank` is this rank; `all_gather_wait` returns the bucket with the blocks of all ranks.
    """

    attrs = {**_BUCKET, "rank": Attr(Rank), "length": Attr(Annotated[int, Range(0, 1 << 62, whole=True)])}

    def infer(*ins: Any, ranks, group, gated, rank, length):
        in_ranks(rank, ranks, "rank")
        arrays = _arrays(ins, gated)
        if any(x.dtype is not arrays[0].dtype for x in arrays) or sum(x.size for x in arrays) > length:
            got = ", ".join(map(repr, arrays))
            raise ShapeError("the arrays do not fit the block", expected=f"{length} elements of one dtype", got=got)
        return Spec((ranks * length,), arrays[0].dtype)

    def cost(ins, outs, attrs):
        sent = round(_others(attrs["ranks"]) * outs[0].nbytes)
        return Cost(0, sum(i.nbytes for i in ins), outs[0].nbytes, sent)

    def sample(rng):
        attrs = {"ranks": 1, "group": "run", "gated": False, "rank": 0, "length": 17}
        return [rng.normal(size=s) for s in ((3, 4), (5,))], attrs


@op("all_gather_wait")
class AllGatherWait(_Wait):
    """The bucket that `all_gather_start` returned, with the blocks of all ranks."""

    attrs, traits, sample = _AMONG, Traits(inplace=((0, 0),)), _drawn(7)
    infer = lambda x, ranks, group: x
