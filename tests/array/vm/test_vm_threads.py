"""Rows shared by threads give the bits of one thread; how the machine is called; lifetimes of a call."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from time import thread_time
from typing import Any

import numpy as np
import pytest
from vm_forms import encode, form_of, low, unset

from graphwright.array import CPU, NDArray, backend, bfloat16, float32, from_numpy
from graphwright.array.vm import sharing as at
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group
from graphwright.array.vm.encode.operands import Row, View
from graphwright.array.vm.encode.share import Cut, cut
from graphwright.array.vm.running import call, segment
from graphwright.array.vm.running.segment import BadIndex, VmSegment
from graphwright.native import njit
from graphwright.ops import OPS

pytestmark = pytest.mark.usefixtures("young_heap")

rng = np.random.default_rng(0)


def view(array: NDArray) -> View:
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def normal(*shape: int) -> NDArray:
    return from_numpy(rng.normal(size=shape).astype("f4"))


def op(name: str, *ins: NDArray, **attrs: object) -> tuple[list[NDArray], list[Row]]:
    full = OPS[name].complete(attrs)
    specs = OPS[name].specs([a.spec for a in ins], full)
    outs = [unset(s.sizes, s.dtype) for s in specs]
    rows = encode(name, [view(o) for o in outs], [view(a) for a in ins], full)
    assert rows is not None
    return outs, rows


def chain(n: int) -> tuple[list[NDArray], list[Row]]:
    """tanh(x) + x as a loop, over rows with a broadcast operand."""
    x, b, out = normal(n, 700), normal(700), from_numpy(np.zeros((n, 700), "f4"))
    f32 = x.dtype
    members = [
        Member(form_of("tanh"), [Inner(0)], [view(x)], {}, [f32, f32]),
        Member(form_of("add"), [view(out)], [Inner(0), view(b)], {}, [f32, f32, f32]),
    ]
    rows = encode_group((n, 700), members)
    assert rows is not None
    KEEP.extend((x, b))
    return [out], rows


KEEP: list[NDArray] = []


def retained(*arrays: NDArray) -> tuple[NDArray, ...]:
    KEEP.extend(arrays)
    return arrays


TARGETS = from_numpy(rng.integers(0, 200, 6000))
CASES: dict[str, Callable[[], tuple[list[NDArray], list[Row]]]] = {
    "tall product": lambda: op("matmul", *retained(normal(700, 300), normal(300, 200))),
    "wide product": lambda: op("matmul", *retained(normal(20, 400), normal(400, 1500))),
    "square, long sums": lambda: op("matmul", *retained(normal(200, 2000), normal(2000, 200))),
    "with an addend": lambda: op("linear", *retained(normal(500, 300), normal(400, 300), normal(400))),
    "one axis": lambda: op("exp", *retained(normal(700_001))),
    "rows": lambda: op("mul", *retained(normal(3000, 700), normal(3000, 1))),
    "bytes": lambda: op("lt", *retained(normal(2_000_000), normal(2_000_000))),
    "softmax": lambda: op("softmax", *retained(normal(3000, 200))),
    "norm": lambda: op("rms_norm", *retained(normal(9000, 200), normal(200))),
    "columns": lambda: op("sum", *retained(normal(9000, 300)), axes=(0,), keepdims=False),
    "widened": lambda: op("cast", *retained(low(normal(1_100_003).to_numpy())), dtype=float32),
    "rounded": lambda: op("cast", *retained(normal(1_100_003)), dtype=bfloat16),
    "rounded rows": lambda: op("cast", *retained(from_numpy(normal(3000, 700).to_numpy()[:, :600])), dtype=bfloat16),
    "bfloat16": lambda: op("mul", *retained(low(normal(1_100_003).to_numpy()), low(normal(1_100_003).to_numpy()))),
    "loss": lambda: op("cross_entropy", *retained(normal(6000, 200)), TARGETS),
    "loop": lambda: chain(2000),
    "copy": lambda: op("copy", from_numpy(retained(normal(40, 50, 8, 100))[0].to_numpy().transpose(0, 2, 1, 3))),
    "attention": lambda: op(
        "sdpa", *retained(normal(2, 6, 150, 32), normal(2, 2, 150, 32), normal(2, 2, 150, 32)), scale=0.2
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_rows_have_the_bits_of_one_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outs, rows = CASES[name]()
    assert any(row[0] == Code.SHARED for part in cut(rows).parts for row in part)
    VmSegment([Cut((rows,), 0.0)])()  # in one piece
    truth = [o.to_numpy(bits=True).tobytes() for o in outs]
    for threads in (1, 2, 3):
        monkeypatch.setattr(segment, "get_num_threads", lambda n=threads: n)
        run = VmSegment([rows])
        for _ in range(3):
            for o in outs:
                o.to_numpy(bits=True)[...] = 0
            run()
            assert [o.to_numpy(bits=True).tobytes() for o in outs] == truth


def test_many_short_shared_runs_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "get_num_threads", lambda: 3)
    x = from_numpy(np.zeros(1_100_000, "f4"))
    one = from_numpy(np.ones((), "f4"))
    rows = encode("add", [view(x)], [view(x), view(one)], {})
    assert rows is not None
    run = VmSegment([rows])
    for _ in range(300):
        run()
    assert (x.to_numpy() == 300).all()


def test_index_out_of_range_is_reported_by_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = TARGETS.to_numpy().copy()
    _, rows = op("cross_entropy", *retained(normal(6000, 200), from_numpy(targets)))
    run = VmSegment([rows])
    run()
    for threads in (1, 3):
        monkeypatch.setattr(segment, "get_num_threads", lambda n=threads: n)
        for bad in (0, 3000, 5999):
            KEEP[-1].to_numpy()[bad] = 200
            with pytest.raises(BadIndex):
                run()
            KEEP[-1].to_numpy()[bad] = 0
        run()


def test_concurrent_callers_do_not_interfere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "get_num_threads", lambda: 2)
    made = [CASES["tall product"]() for _ in range(4)]
    runs = [VmSegment([rows]) for _, rows in made]
    for run in runs:
        run()
    truth = [outs[0].to_numpy().tobytes() for outs, _ in made]

    def many(i: int) -> None:
        for _ in range(10):
            runs[i]()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(4)))
    assert [outs[0].to_numpy().tobytes() for outs, _ in made] == truth


def test_wait_for_an_interrupted_helper_leaves_the_core_and_stops_sharing_for_a_while() -> None:
    @njit(error_model="numpy")
    def offered(team, row) -> Any:
        return at.share(team, row, 2)

    @njit(error_model="numpy", nogil=True)
    def finished(team, row) -> Any:
        return at.finish(team, row)

    def offers() -> int:
        """Return the number of instructions until one is offered again."""
        count = 0
        while not offered(address, row):
            count += 1
        finished_by(0)
        return count

    def finished_by(seconds: float) -> float:
        """Return the CPU time of this thread while a ticket is done after some seconds."""
        helper = Timer(seconds, team.__setitem__, (at.DONE, 2))
        helper.start()
        start = thread_time()
        assert not finished(address, row)
        helper.join()
        return thread_time() - start

    team = np.zeros(at.TEAM_CELLS, np.int64)
    code = np.array([Code.SHARED, 2, 1, 25_000], np.int64)
    address, row = team.ctypes.data, code.ctypes.data
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    team[at.USLEEP] = usleep.value or 0
    assert offers() == 0
    assert offered(address, row)
    assert finished_by(0.3) < 0.1
    assert 10e6 < offers() * 50_000 <= 26e6  # nanoseconds of instructions that were not offered
    assert offers() == 0
    assert offered(address, row)
    finished_by(0.3)
    code[3] = 15_000_000  # an instruction longer than the wait it may cost
    assert offers() == 0
    code[3] = 60_000_000  # as long as such a ticket takes, every helper is slow
    assert offered(address, row)
    finished_by(0.1)
    assert offers() == 0


def test_call_leaks_no_reference_and_keeps_its_memory() -> None:
    outs, rows = op("exp", *retained(normal(40)))
    run = VmSegment([rows]).run
    gc.collect()
    before = [sys.getrefcount(x) for x in (None, NotImplemented)]
    for _ in range(5000):
        run()
    after = [sys.getrefcount(x) for x in (None, NotImplemented)]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True))
    np.testing.assert_allclose(outs[0].to_numpy(), np.exp(KEEP[-1].to_numpy()), rtol=1e-6)


def test_failed_call_leaks_no_reference() -> None:
    scores, targets = retained(normal(2, 3), from_numpy(np.array([0, 9])))
    run = VmSegment([op("cross_entropy", scores, targets)[1]])
    before = sys.getrefcount(NotImplemented)
    for _ in range(1000):
        assert run.run() is not None
    assert abs(sys.getrefcount(NotImplemented) - before) < 100
    with pytest.raises(BadIndex):
        run()


def test_unknown_object_layout_falls_back_to_ctypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_make_method", lambda: None)
    outs, rows = op("exp", *retained(normal(40)))
    VmSegment([rows])()
    np.testing.assert_allclose(outs[0].to_numpy(), np.exp(KEEP[-1].to_numpy()), rtol=1e-6)
