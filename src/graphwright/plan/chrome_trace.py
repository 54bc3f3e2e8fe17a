"""Timed events as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from json import dumps
from typing import Any, NamedTuple

from graphwright.array import Spec
from graphwright.files import StrPath, atomic_write

FORWARD, BACKWARD, PLAN = "forward", "backward", "plan"
"""Categories of events: ops outside of a backward pass; passes, vjps and ops in them; runs of plans."""


class Event(NamedTuple):
    """One timed call.

    Attributes:
        name: the op, `<op> (vjp)`, `backward`, or `plan <program>`.
        category: `forward`, `backward` or `plan`.
        start, duration: ns, by `time.perf_counter_ns`.
        thread: identifier of the thread.
        inner: True for an op within a vjp, whose time its event contains.
        path: path of the module that ran the op, or "".
        ins, outs: specs of the operands and results of an op.
        flops, nbytes: operations, and bytes read and written, of an op (`Op.cost`).
    """

    name: str
    category: str
    start: int
    duration: int
    thread: int
    inner: bool = False
    path: str = ""
    ins: tuple[Spec, ...] = ()
    outs: tuple[Spec, ...] = ()
    flops: int = 0
    nbytes: int = 0


def save_trace(path: StrPath, events: Iterable[Event]) -> None:
    """Write events as JSON in the Trace Event Format: complete events (`ph` X) with times in us from the first one."""
    found = sorted(events, key=lambda e: (e.start, -e.duration))
    zero = found[0].start if found else 0
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(e.thread for e in found))}
    pid = os.getpid()
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": number, "args": {"name": f"thread {number}"}}
        for number in threads.values()
    ]
    for e in found:
        args: dict[str, Any] = {}
        if e.path:
            args["path"] = e.path
        if e.outs:
            args |= {"operands": [repr(s) for s in e.ins], "results": [repr(s) for s in e.outs]}
            args |= {"flops": e.flops, "bytes": e.nbytes}
        rows.append({"name": e.name, "cat": e.category, "ph": "X", "ts": (e.start - zero) / 1e3,
                     "dur": e.duration / 1e3, "pid": pid, "tid": threads[e.thread], "args": args})  # fmt: skip
    atomic_write(path, dumps({"traceEvents": rows, "displayTimeUnit": "ms"}).encode())
