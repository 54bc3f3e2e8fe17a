"""Kernels of collectives, on the process group of the run; in a world of one they copy.

A kernel `*_start` notes the collective under the address of its bucket, where the kernel `*_wait` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.kernel import Tensors, copy_to_outputs, kernel, number, spec_of, widened
from graphwright.array.spec import Spec
from graphwright.array.world import described, group_of
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.array.process_group import Pending, ProcessGroup


# the host makes the call in every run, and reads the gate
_on_any_device: Any = partial(kernel, needs=Needs(answers=True))


def _together(name: str, work: Any = None, widen: bool = False) -> Any:
    """Return a decorator: the kernel runs `begin(group, out, x, attrs, work)` with the other ranks, and else copies.

    With `widen`, 16-bit floats are summed in float32, rounded once.
    """

    def decorate(begin: Callable[[ProcessGroup, torch.Tensor, torch.Tensor, Attrs, Tensors], Pending | None]) -> Any:
        def exchange(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
            def run() -> None:
                group = group_of(attrs["ranks"], attrs["group"])
                if group is None:
                    for copy in copy_to_outputs(outs, ins):
                        copy()
                elif (found := begin(group, outs[0], ins[0], attrs, work)) is not None:
                    found.wait()

            return run

        made, scratch = widened(exchange, work) if widen else (exchange, work)

        @wraps(begin)  # `kernel` notes the line of the innermost function
        def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
            calls = made(outs, ins, attrs, work)
            text = described(name, [spec_of(x) for x in ins], attrs)
            return [partial(_compare, name, text, attrs), *(calls if isinstance(calls, list) else [calls])]

        return _on_any_device(name, scratch)(bind)

    return decorate


def _compare(name: str, text: str, attrs: Attrs) -> None:
    """Compare a call with the other ranks, except in a run that was compared."""
    group = group_of(attrs["ranks"], attrs["group"])
    if group is not None and not group.whole.compared:
        group.compare("a collective", calls=[text], label=name)


@_together("all_reduce", widen=True)
def _all_reduce(group: ProcessGroup, out: torch.Tensor, x: torch.Tensor, attrs: Attrs, work: Tensors) -> Pending:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return group.all_reduce(out)


@_together("all_gather", lambda o, i, a: [Spec((o[0].size,), o[0].dtype)] if a["ranks"] > 1 else [])
def _all_gather(group: ProcessGroup, out: torch.Tensor, x: torch.Tensor, attrs: Attrs, work: Tensors) -> None:
    group.all_gather(work[0], x).wait()
    out.copy_(torch.cat(work[0].view(group.ranks, *x.shape).unbind(), attrs["axis"]))


def _exchange(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return the scratch of an exchange: the blocks to send, and those that arrive."""
    return [Spec((ins[0].size,), ins[0].dtype)] * 2 if attrs["ranks"] > 1 else []


@_together("reduce_scatter", _exchange, widen=True)
def _reduce_scatter(group: ProcessGroup, out: torch.Tensor, x: torch.Tensor, attrs: Attrs, work: Tensors) -> Pending:
    sent, arriving = work
    torch.stack(x.chunk(group.ranks, attrs["axis"]), out=sent.view(group.ranks, *out.shape))
    return group.reduce_scatter(out, sent, arriving)


@_together("all_to_all", _exchange)
def _all_to_all(group: ProcessGroup, out: torch.Tensor, x: torch.Tensor, attrs: Attrs, work: Tensors) -> None:
    sent, arriving = work
    parts = x.chunk(group.ranks, attrs["split"])
    blocks = (group.ranks, *parts[0].shape)
    torch.stack(parts, out=sent.view(blocks))
    group.all_to_all(arriving, sent).wait()
    out.copy_(torch.cat(arriving.view(blocks).unbind(), attrs["join"]))


@_together("broadcast")
def _broadcast(group: ProcessGroup, out: torch.Tensor, x: torch.Tensor, attrs: Attrs, work: Tensors) -> Pending:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return group.broadcast(out, attrs["root"])


@_together("reduce", widen=True)
def _reduce(group: ProcessGroup, out: torch.Tensor, x: torch.Tensor, attrs: Attrs, work: Tensors) -> None:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    group.all_reduce(out, "reduce").wait()
    if group.rank != attrs["root"]:
        out.zero_()


@_on_any_device("send")
def _send(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    def run() -> None:
        group = group_of(attrs["ranks"], attrs["group"])
        if group is not None:
            group.send(ins[0], attrs["to"], spec_of(ins[0]))
        outs[0].zero_()

    return run


@_on_any_device("recv")
def _recv(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    def run() -> None:
        group = group_of(attrs["ranks"], attrs["group"])
        if group is None:
            outs[0].zero_()
        else:
            group.receive(outs[0], attrs["source"], spec_of(outs[0]))

    return run


# -- buckets -----------------------------------------------------------------------------------------------------------
def _fill(block: torch.Tensor, arrays: Tensors, scale: float = 1.0) -> list[Call]:
    """Return calls that copy arrays, times `scale`, one after another to a block, and zero its rest."""
    calls: list[Call] = []
    at = 0
    for x in arrays:
        part = block[at : at + x.numel()].view(x.shape)
        at += x.numel()
        if scale == 1 or x.dtype != part.dtype:
            calls.append(partial(part.copy_, x))
        if scale != 1:
            calls.append(partial(torch.mul, x if x.dtype == part.dtype else part, number(scale, part), out=part))
    return calls if at == block.numel() else [*calls, block[at:].zero_]


def _begun(
    what: str, bucket: torch.Tensor, fill: list[Call], gate: torch.Tensor | None, attrs: Attrs,
    begin: Callable[[ProcessGroup], Pending], otherwise: Sequence[Call] = (),
) -> Call:  # fmt: skip
    """Return a call that fills a bucket and begins its collective, or runs `otherwise` if the gate is 0, or alone."""
    address = bucket.data_ptr()
    text = described(what, [spec_of(bucket)], attrs)

    def run() -> None:
        _compare(what, text, attrs)
        group = group_of(attrs["ranks"], attrs["group"])
        if group is not None and (left := group.pending.pop(address, None)) is not None:
            left.wait()  # of a run that failed in between
        for call in fill:
            call()
        sends = group is not None and (gate is None or gate.item() != 0)
        if group is not None:
            group.pending[address] = begin(group) if sends else None
        for call in () if sends else otherwise:
            call()

    return run


def _gate(ins: Tensors, attrs: Attrs) -> tuple[Tensors, torch.Tensor | None]:
    return (ins[:-1], ins[-1]) if attrs["gated"] else (ins, None)


@_on_any_device("all_reduce_start")
def _all_reduce_start(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (bucket,), (arrays, gate) = outs, _gate(ins, attrs)
    what = f"all_reduce of a bucket of {len(arrays)} arrays"
    return _begun(what, bucket, _fill(bucket, arrays, attrs["scale"]), gate, attrs,
                  lambda group: group.all_reduce(bucket, what))  # fmt: skip


@_on_any_device("reduce_scatter_start")
def _reduce_scatter_start(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (bucket, arriving), (arrays, gate) = outs, _gate(ins, attrs)
    rows, fill, given = bucket.view(attrs["ranks"], -1), [], iter(arrays)
    for row, count in zip(rows, attrs["counts"], strict=True):
        fill += _fill(row, list(islice(given, count)), attrs["scale"])
    what = f"reduce_scatter of a bucket of {len(arrays)} arrays"
    alone = [partial(arriving.copy_, bucket)]
    return _begun(what, bucket, fill, gate, attrs, lambda group: group.all_to_all(arriving, bucket, what), alone)


@_on_any_device("all_gather_start")
def _all_gather_start(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (bucket,), (arrays, gate) = outs, _gate(ins, attrs)
    own = bucket.view(attrs["ranks"], -1)[attrs["rank"]]
    what = f"all_gather of a bucket of {len(arrays)} arrays"
    return _begun(what, bucket, _fill(own, arrays), gate, attrs, lambda group: group.all_gather(bucket, own, what))


def _ended(attrs: Attrs, bucket: torch.Tensor) -> ProcessGroup | None:
    """Wait for the collective of a bucket; return its group, or None if nothing was sent."""
    group = group_of(attrs["ranks"], attrs["group"])
    if group is None:
        return None
    if bucket.data_ptr() not in group.pending:
        raise UsageError("no collective was started on this bucket", where=f"rank {group.rank}",
                         fix="pass the result of the op that starts it, not a copy")  # fmt: skip
    found = group.pending.pop(bucket.data_ptr())
    if found is None:
        return None
    found.wait()
    return group


def _wait(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    def run() -> None:
        _ended(attrs, ins[0])
        for copy in copy_to_outputs(outs, ins):
            copy()

    return run


_on_any_device("all_reduce_wait")(_wait)
_on_any_device("all_gather_wait")(_wait)


@_on_any_device("reduce_scatter_wait")
def _reduce_scatter_wait(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    bucket, arriving = ins

    def run() -> None:
        if (group := _ended(attrs, bucket)) is not None:
            group.sum_blocks(outs[0], arriving)
        else:
            outs[0].copy_(bucket.view(attrs["ranks"], -1)[attrs["rank"]])

    return run
