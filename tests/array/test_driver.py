"""What every driver must do (tests of DRIVERS), and the rules by which the simulated one finds what a GPU would not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_cuda import LimitedDriver

from graphwright.array import Device
from graphwright.array.cuda.driver import TorchDriver
from graphwright.array.memory_pool import DeviceFull, Driver, DriverError
from graphwright.testing.simulated_device import InjectedFault, RuleBroken, SimDriver

DRIVERS: dict[str, Callable[[], Driver]] = {
    "sim": SimDriver,
    "fake": LimitedDriver,
    "cuda": lambda: TorchDriver(Device("cuda")),
}
"""Makers of drivers for the conformance tests: simulated, on a fake of torch.cuda, and of a GPU."""


@pytest.fixture(params=["sim", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]()


def host(values: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(values), np.uint8)


# -- every driver ------------------------------------------------------------------------------------------------------
def test_bytes_round_trip_through_device_memory(driver: Driver) -> None:
    a, b, back = driver.alloc(1000), driver.alloc(1000), host(bytes(1000))
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    driver.copy(a, data, 1000)
    driver.fill(b, 7, 1000)
    driver.copy(b + 100, a + 50, 300)
    driver.copy(back, b, 1000)
    driver.synchronize()
    expected = np.full(1000, 7, np.uint8)
    expected[100:400] = data[50:350]
    assert np.array_equal(back, expected)
    for address in (a, b):
        driver.free(address)


def test_memory_is_counted(driver: Driver) -> None:
    before, total = driver.mem_info()
    address = driver.alloc(2**20)
    assert driver.mem_info()[0] <= before - 2**20
    driver.free(address)
    assert driver.mem_info() == (before, total)
    with pytest.raises(DeviceFull):
        driver.alloc(total + 1)
    with pytest.raises(DriverError):
        driver.free(12345)


def test_an_event_orders_two_streams(driver: Driver) -> None:
    a, back = driver.alloc(4), host(bytes(4))
    other = driver.stream()
    driver.fill(a, 1, 4, 0)
    driver.wait(other, driver.record(0))
    driver.copy(back, a, 4, other)
    event = driver.record(other)
    driver.synchronize(other)
    assert driver.done(event)
    assert back.tolist() == [1] * 4
    driver.wait(0, event)
    driver.fill(a, 2, 4, 0)
    driver.synchronize()


def test_a_captured_graph_runs_when_it_is_replayed(driver: Driver) -> None:
    a, b, back = driver.alloc(8), driver.alloc(8), host(bytes(8))
    stream = driver.stream()
    driver.fill(b, 0, 8, stream)
    driver.synchronize()
    driver.begin_capture(stream)
    driver.copy(b, a, 8, stream)
    graph = driver.instantiate(driver.end_capture(stream))
    for value in (3, 4):
        driver.fill(a, value, 8, stream)
        driver.copy(back, b, 8, stream)
        driver.synchronize()
        assert back[0] == (0 if value == 3 else 3)  # capturing ran nothing
        driver.replay(graph, stream)
        driver.copy(back, b, 8, stream)
        driver.synchronize()
        assert back.tolist() == [value] * 8


def test_a_pointer_of_another_device_is_refused() -> None:
    one, other = SimDriver(Device("sim")), SimDriver(Device("sim:1"))
    address = one.alloc(64)
    for use in (lambda: other.free(address), lambda: other.fill(address, 0, 64)):
        with pytest.raises(DriverError, match="sim:1"):
            use()
    assert one.mem_info()[0] == one.capacity - 64


# -- the rules of the simulated one ------------------------------------------------------------------------------------
def test_queued_work_runs_only_when_it_is_waited_for() -> None:
    d = SimDriver()
    a = d.alloc(4)
    d.fill(a, 5, 4)
    d.fill(a, 6, 4)
    event = d.record(0)
    assert not d.done(event)
    with pytest.raises(RuleBroken, match="host reads"):
        d.read(a, 4)
    d.advance(0)
    with pytest.raises(RuleBroken):
        d.read(a, 4)
    d.advance(0)
    assert d.done(event)
    assert d.read(a, 4).tolist() == [6] * 4
    assert d.syncs == 0


def test_unordered_use_of_memory_by_two_streams_is_found() -> None:
    def two() -> tuple[SimDriver, int, int]:
        d = SimDriver()
        a, s = d.alloc(16), d.stream()
        d.fill(a, 1, 8)
        return d, a, s

    back = host(bytes(8))
    for use in (lambda d, a, s: d.fill(a + 4, 2, 8, s), lambda d, a, s: d.copy(back, a, 8, s)):
        d, a, s = two()
        with pytest.raises(RuleBroken, match="without a wait"):
            use(d, a, s)
        d.wait(s, d.record(0))
        use(d, a, s)
        d, a, s = two()
        d.synchronize()
        use(d, a, s)
    d, a, s = two()
    d.fill(a + 8, 2, 8, s)  # beside it
    d, a, s = two()
    early = d.record(0)
    d.fill(a, 3, 8)
    d.wait(s, early)  # an event from before the second write does not order it
    with pytest.raises(RuleBroken):
        d.fill(a, 4, 8, s)
    d = SimDriver()  # order is passed on: 0 before s before t
    a, s, t = d.alloc(8), d.stream(), d.stream()
    d.fill(a, 1, 8)
    d.wait(s, d.record(0))
    d.wait(t, d.record(s))
    d.fill(a, 2, 8, t)
    d.synchronize(t)
    assert d.read(a, 8).tolist() == [2] * 8


def test_memory_that_queued_work_uses_is_not_freed() -> None:
    d = SimDriver()
    a = d.alloc(4)
    d.fill(a, 5, 4)
    with pytest.raises(RuleBroken, match="queued"):
        d.free(a)
    d.synchronize()
    d.free(a)
    with pytest.raises(RuleBroken, match=r"not allocated|no allocation"):
        d.fill(a, 5, 4)
    b = d.alloc(100)
    for low, count in ((b, 101), (b - 1, 2), (b + 50, 51)):
        with pytest.raises(RuleBroken):
            d.fill(low, 0, count)


def test_a_capture_allows_launches_only() -> None:
    d = SimDriver()
    a = d.alloc(4)
    d.begin_capture(0)
    for forbidden in (lambda: d.alloc(4), lambda: d.free(a), d.synchronize, lambda: d.begin_capture(0)):
        with pytest.raises(RuleBroken, match="captures"):
            forbidden()
    with pytest.raises(RuleBroken, match=r"not allocated|no allocation"):
        d.fill(a + 4096, 0, 4)  # an address that was not there before
    d.fill(a, 1, 4)
    graph = d.instantiate(d.end_capture(0))
    with pytest.raises(RuleBroken):
        d.end_capture(0)
    d.free(a)
    with pytest.raises(RuleBroken, match=r"not allocated|no allocation"):
        d.replay(graph, 0)


def test_an_injected_fault_occurs_at_the_requested_call_and_changes_nothing() -> None:
    def work(d: SimDriver) -> None:
        a = d.alloc(8)
        d.fill(a, 1, 8)
        d.wait(0, d.record(0))
        d.synchronize()
        d.free(a)

    counted = SimDriver()
    work(counted)
    for k in range(1, counted.calls + 1):
        d = SimDriver(fail_at=k)
        with pytest.raises(InjectedFault):
            work(d)
        assert d.calls == k
        assert d.allocs - d.frees == (1 if k > 1 else 0)
        assert d.mem_info()[0] == d.capacity - 8 * (d.allocs - d.frees)


def test_new_memory_is_filled_with_nan() -> None:
    d = SimDriver()
    assert np.isnan(d.read(d.alloc(16), 16).view(np.float32)).all()
