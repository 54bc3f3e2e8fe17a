"""What a rank does in `test_collectives.py`; each function returns JSON."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import distributed as d
from graphwright.array.world import world
from graphwright.ops import call, get
from run_ranks import refusal


def _values(seed: int, shape: tuple[int, ...], dtype: str = "float64") -> list[np.ndarray]:
    """The x of each rank; all ranks know all."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for _ in range(d.ranks())]


def expected(name: str, xs: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray:
    """The result of a collective on this rank, by numpy."""
    n, me = len(xs), d.rank()
    if name == "all_reduce":
        return np.add.reduce(xs)
    if name == "all_gather":
        return np.concatenate(xs, attrs["axis"])
    if name == "reduce_scatter":
        return np.split(np.add.reduce(xs), n, attrs["axis"])[me]
    if name == "all_to_all":
        return np.concatenate([np.split(x, n, attrs["split"])[me] for x in xs], attrs["join"])
    if name == "broadcast":
        return xs[attrs["root"]]
    assert name == "reduce"
    return np.add.reduce(xs) if attrs["root"] == me else np.zeros_like(xs[0])


CASES: list[tuple[str, dict[str, Any]]] = [
    ("all_reduce", {}),
    ("all_gather", {"axis": 0}),
    ("all_gather", {"axis": -1}),
    ("reduce_scatter", {"axis": 0}),
    ("reduce_scatter", {"axis": 1}),
    ("all_to_all", {"split": 0, "join": 0}),
    ("all_to_all", {"split": 1, "join": 2}),
    ("all_to_all", {"split": 0, "join": 1}),
    ("broadcast", {"root": 1}),
    ("reduce", {"root": 0}),
]
SHAPE = (6, 12, 5)


def check_values() -> list[str]:
    """Each collective, eager and in a plan, beside numpy; return the names of the ones that differ."""
    wrong = []
    for seed, (name, attrs) in enumerate(CASES):
        xs = _values(seed, SHAPE)
        want = expected(name, xs, attrs)
        eager = getattr(d, name)(gw.tensor(xs[d.rank()]), **attrs).numpy()
        p = gw.trace(lambda x: {"y": getattr(d, name)(x, **attrs)}, gw.tensor(xs[0]))  # noqa: B023
        for kind, got in (
            ("eager", eager),
            ("run", np.asarray(p.run({"x": xs[d.rank()]})["y"])),
            ("plan", np.asarray(p.compile(x=SHAPE)({"x": xs[d.rank()]})["y"])),
        ):
            if got.shape != want.shape or not np.allclose(got, want, rtol=1e-14, atol=1e-14):
                wrong.append(f"{kind} {name} {attrs}")
    return wrong


def check_gradients() -> list[str]:
    """Gradients of the sum of the losses of all ranks, by finite differences."""
    wrong = []
    ring = lambda x: _ring(x)  # noqa: E731
    named = [(name, lambda x, name=name, attrs=attrs: getattr(d, name)(x, **attrs)) for name, attrs in CASES]
    for seed, (name, f) in enumerate([*named, ("send and recv", ring)]):
        me, shape = d.rank(), SHAPE
        x = _values(seed, shape)[me]
        given = gw.tensor(x, requires_grad=True)
        y = f(given)
        w = np.random.default_rng(100 * me + seed).normal(size=y.shape)
        loss = ((y * gw.tensor(w)) ** 2).sum()
        loss.backward()
        assert given.grad is not None
        got = given.grad.numpy()
        for at in range(2 * d.ranks()):  # elements in turn: all ranks take part, one of them moves
            owner, index = at % d.ranks(), tuple(np.random.default_rng(at).integers(0, shape))
            total = []
            for sign in (1, -1):
                moved = x.copy()
                if owner == me:
                    moved[index] += sign * 1e-5
                part = ((f(gw.tensor(moved)).numpy() * w) ** 2).sum()
                total.append(float(d.all_reduce(gw.tensor(part)).item()))
            slope = (total[0] - total[1]) / 2e-5
            if owner == me and abs(slope - got[index]) > 1e-5 * (1 + abs(slope)):
                wrong.append(f"{name} at {index}: {got[index]} instead of {slope}")
        d.barrier()
    return wrong


def _ring(x: Any) -> Any:
    """Send x from rank 0 to rank 1; the result of rank 1 is what it received, that of the others x."""
    if d.rank() == 0:
        return x + d.send(2.0 * x, 1)
    return d.recv(x, 0) if d.rank() == 1 else x


def check_low() -> list[str]:
    """16-bit sums are rounded once from float32; integers and small dtypes move."""
    wrong = []
    for kind in ("bfloat16", "float16"):
        xs = [gw.tensor(x).to(getattr(gw, kind)) for x in _values(5, (4, 6), "float32")]
        want = sum(x.float().numpy() for x in xs)
        got = d.all_reduce(xs[d.rank()])
        if not np.array_equal(got.float().numpy(), gw.tensor(want).to(getattr(gw, kind)).float().numpy()):
            wrong.append(kind)
    for kind in ("int16", "uint8", "bool_", "float8_e4m3fn", "int64"):
        of = lambda rank: gw.tensor(np.arange(6) + rank).to(getattr(gw, kind))  # noqa: B023,E731
        if not np.array_equal(d.broadcast(of(d.rank()), 1).float().numpy(), of(1).float().numpy()):
            wrong.append(kind)
    return wrong


def _sent_by_sockets() -> int:
    """Bytes that the TCP sockets of this process have sent, from the kernel."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                info = s.getsockopt(socket.IPPROTO_TCP, 11, 256)  # TCP_INFO
        except OSError:
            continue
        if len(info) >= 216:
            sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
            total += sent - again
    return total


def check_bytes() -> dict[str, list[float]]:
    """Collective -> bytes sent by this rank: as its cost counts them, as the group counts them, by the sockets."""
    found = {}
    x = gw.tensor(np.ones((12, 60_000), np.float32))
    for name, attrs in (*((n, a) for n, a in CASES if n != "all_to_all"), ("all_to_all", {"split": 0, "join": 1})):
        d.barrier()
        group = world().group
        assert group is not None
        before, sent = _sent_by_sockets(), group.sent
        y = call(name, x, ranks=d.ranks(), **attrs)
        d.barrier()
        row = get(name)
        cost = row.cost([x.spec], [y.spec], row.complete({**attrs, "ranks": d.ranks()}))
        found[f"{name} {attrs}"] = [cost.sent, group.sent - sent, _sent_by_sockets() - before]
    return found


def backward(number: int) -> None:
    """Take the gradient of one of two gathered arrays."""
    x = {n: gw.tensor(np.ones(n), requires_grad=True) for n in (3, 4)}
    y = {n: d.all_gather(v) for n, v in x.items()}
    y[number].sum().backward()


def slice_of(p: gw.Program, x: np.ndarray) -> None:
    """Run a slice of a plan."""
    plan = p.compile(x=x.shape)
    executable = plan.new_executable()
    executable.feed({"x": x})
    executable.run(plan[0 : len(plan.instrs)])


def summed_rows() -> gw.Program:
    """Return a program that looks up rows, and sums them over the ranks."""
    b = gw.Builder("rows")
    rows = b.op("embedding", b.param("table", np.ones((4, 3), "f4")), b.input("ids", ("B",), "int64"))
    b.output(b.op("all_reduce", rows, ranks=d.ranks()), "y")
    return b.build()


def check_refused() -> dict[str, str]:
    """Calls that differ among the ranks, or that no other rank can answer -> their errors; the group still works."""
    last = d.rank() == d.ranks() - 1
    b = gw.Builder("sums")
    b.output(b.op("all_reduce", b.op("all_reduce", b.input("x", ("B", 3)), ranks=d.ranks()), ranks=d.ranks()), "y")
    p, x = b.build(), np.ones((2 + last, 3), "f4")
    pair = lambda first, second: [first, second, lambda: None][min(d.rank(), 2)]()  # noqa: E731
    calls = {
        "shape": lambda: d.all_reduce(np.ones(3 + last)),
        "dtype": lambda: d.all_gather(np.ones(3, "f4" if last else "f8")),
        "op": lambda: (d.all_gather if last else d.all_reduce)(np.ones(3)),
        "root": lambda: d.broadcast(np.ones(3), root=int(last)),
        "run": lambda: p.run({"x": x}),
        "tape": lambda: p(x=x),
        "plan": lambda: p.compile(x=x.shape)({"x": x}),
        "instead": lambda: d.all_reduce(x) if last else p.run({"x": np.ones((3, 3), "f4")}),
        "called": lambda: call("all_reduce", gw.tensor(np.ones(3 + last)), ranks=d.ranks()),
        "backward": lambda: backward(3 + last),
        "slice": lambda: slice_of(p, x),
        "exchanged": lambda: d.broadcast_object(1) if last else d.barrier(),
        "sent": lambda: pair(lambda: d.send(np.ones(3), to=1), lambda: d.recv(np.ones((1, 3)), source=0)),
        "both": lambda: pair(lambda: d.send(np.ones(3), to=1), lambda: d.send(np.ones(3), to=0)),
        "same error in a run": lambda: summed_rows().run({"ids": np.array([9])}),
        "same error in a plan": lambda: summed_rows().compile(ids=(1,))(ids=np.array([9])),
        "self": lambda: d.send(np.ones(3), to=d.rank()),
    }
    found = {name: text for name, run in calls.items() if (text := refusal(run))}
    assert d.all_reduce(np.ones(2)).numpy().tolist() == [d.ranks()] * 2
    return found


def everything() -> dict[str, Any]:
    return {
        "world": [d.rank(), d.ranks(), d.local_rank(), d.is_main(), gw.get_num_threads()],
        "values": check_values(),
        "gradients": check_gradients(),
        "low": check_low(),
        "bytes": check_bytes(),
        "refused": check_refused(),
        "object": d.broadcast_object({"from": d.rank()}, root=1),
    }
