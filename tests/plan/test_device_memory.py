"""A device that is full: what the error names, what `remat` would save, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import Device, DeviceUnavailable
from graphwright.array.backend import use
from graphwright.array.memory_pool import OutOfDeviceMemory
from graphwright.errors import UsageError
from graphwright.plan import PlanOutOfMemory
from graphwright.program import Builder, Program
from graphwright.testing.simulated_device import SimBackend, SimDriver

FULL = Device("sim:3")
MIB = 2**20


@pytest.fixture
def full() -> Iterator[SimBackend]:
    made = SimBackend(FULL, SimDriver(FULL, capacity=10 * MIB))
    use(FULL, made)
    yield made
    use(FULL)


def deep(state: bool = False) -> Program:
    """Eight layers of 256 KiB, whose values are all read again in reverse order."""
    b = Builder("deep")
    h, kept = b.input("x", ("B", 256)), []
    for k in range(8):
        weight = np.random.default_rng(k).normal(size=(256, 256)).astype("f4") / 16
        h = b.tanh(b.linear(h, b.param(f"layers.{k}.w", weight), name=f"layers.{k}.up"), name=f"layers.{k}.act")
        kept.append(h)
    for other in reversed(kept):
        h = b.mul(h, other)
    b.output(h, "y")
    if state:
        count = b.state("count", np.zeros((), np.float32))
        b.assign(count, b.add(count, b.const("one", np.float32(1.0))))
    return b.build()


def feed(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(rows, 256)).astype("f4")}


def test_an_arena_without_room_names_buffers_and_a_remat_that_fits(full: SimBackend) -> None:
    p = deep(state=True)
    small = p.compile(x=(64, 256), device="sim:3", executor="aten")
    truth = small(feed(64))["y"].tobytes()
    big = p.compile(x=(1024, 256), device="sim:3", executor="aten")
    with pytest.raises(PlanOutOfMemory, match=r"remat=") as caught:
        big(feed(1024))
    e = caught.value
    assert e.room is not None
    assert e.with_remat is not None
    assert e.needed == big.arena_bytes > e.room >= e.with_remat
    assert {path for _, path in e.largest} <= {"x", *(p.path(n) for n in p.nodes())}
    assert [size for size, _ in e.largest] == [1024 * 256 * 4] * 5
    assert isinstance(e.__cause__, OutOfDeviceMemory)
    assert "layers." in str(e.__cause__)  # the weights that hold memory
    assert e.__cause__.room == e.room + 2 * MIB  # the output
    assert p.weights["count"].data.to_numpy() == 1.0
    assert small(feed(64))["y"].tobytes() == truth
    less = p.compile(x=(1024, 256), device="sim:3", executor="aten", remat=e.with_remat)
    assert less(feed(1024))["y"].tobytes() == p.compile(x=(1024, 256), executor="aten")(feed(1024))["y"].tobytes()
    assert p.weights["count"].data.to_numpy() == 4.0


def test_no_remat_is_proposed_that_would_not_fit(full: SimBackend) -> None:
    p = deep()
    with pytest.raises(PlanOutOfMemory, match="a smaller batch") as caught:
        p.compile(x=(4096, 256), device="sim:3", executor="aten")(feed(4096))
    assert caught.value.with_remat is not None
    assert caught.value.needed > caught.value.with_remat > (caught.value.room or 0)
    assert full.pool.stats().failed == 0


def test_weights_without_room_name_what_holds_memory(full: SimBackend) -> None:
    p, other = deep(), deep()
    p.compile(x=(8, 256), device="sim:3", executor="aten")(feed(8))
    full.pool.set_limit(full.pool.stats().reserved)
    with pytest.raises(OutOfDeviceMemory, match=r"layers\.\d\.w") as caught:
        other.compile(x=(8, 256), device="sim:3", executor="aten")(feed(8))
    assert all(name.startswith("layers.") for _, name in caught.value.owners)
    full.pool.set_limit(None)
    again = other.compile(x=(8, 256), device="sim:3", executor="aten")(feed(8))["y"]
    assert again.tobytes() == p.compile(x=(8, 256), executor="aten")(feed(8))["y"].tobytes()


def test_constants_and_folded_values_in_a_summary_have_names(full: SimBackend) -> None:
    b = Builder("low precision")
    x = b.input("x", (8, 256), "bfloat16")
    low = b.op("cast", b.const("w", np.ones((256, 64), np.float32)), dtype="bfloat16", name="low")
    b.output(b.op("matmul", x, low), "y")
    p = b.build()
    run, x = p.compile(x=(8, 256), device="sim:3", executor="aten"), gw.ones(8, 256, dtype="bfloat16")
    y = run({"x": x})["y"]
    names = {line.split()[-1] for line in gw.cuda.memory_summary("sim:3").splitlines()[9:]}
    assert names == {"low", "w", "precision", "unnamed"}  # the last word of the arena's, and y
    assert y.shape == (8, 64)


def test_memory_is_reported_by_the_names_of_torch(full: SimBackend) -> None:
    before = gw.cuda.memory_allocated("sim:3")
    x = gw.zeros(1000, device="sim:3")
    stats = gw.cuda.memory_stats("sim:3")
    assert gw.cuda.memory_allocated(FULL) - before == 4000 == stats["requested_bytes.all.current"]
    assert (stats["allocated_bytes.all.current"], stats["waste"]) == (4096, 96)
    assert gw.cuda.memory_reserved("sim:3") == 2 * MIB == stats["reserved_bytes.all.current"]
    del x
    assert gw.cuda.memory_allocated("sim:3") == 0
    assert gw.cuda.max_memory_allocated("sim:3") == 4000
    gw.cuda.reset_peak_memory_stats("sim:3")
    assert gw.cuda.max_memory_allocated("sim:3") == 0
    gw.cuda.synchronize("sim:3")
    assert gw.cuda.empty_cache("sim:3") == 2 * MIB
    assert "reserved" in gw.cuda.memory_summary("sim:3")
    gw.cuda.set_per_process_memory_fraction(0.1, "sim:3")
    with pytest.raises(OutOfDeviceMemory):
        gw.zeros(2, device="sim:3")
    gw.cuda.set_memory_limit(None, "sim:3")
    assert gw.zeros(2, device="sim:3").tolist() == [0.0, 0.0]
    for fraction in (1.5, -0.1, float("nan")):  # torch refuses them, too
        with pytest.raises(UsageError, match="from 0 to 1"):
            gw.cuda.set_per_process_memory_fraction(fraction, "sim:3")


def test_functions_of_gpus_without_one_raise_with_the_reason() -> None:
    for ask in (gw.cuda.memory_allocated, gw.cuda.synchronize, lambda: gw.cuda.memory_summary("cuda:1")):
        with pytest.raises(DeviceUnavailable, match=r"without CUDA|finds no NVIDIA"):
            ask()
    with pytest.raises(DeviceUnavailable, match="no pool"):
        gw.cuda.memory_allocated("cpu")
