"""The driver of a GPU over a fake torch.cuda: order of calls, device index, captures that fail; plans over both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import HOST, FakeCuda, LimitedDriver
from fake_cuda import OTHER as DEVICE

import graphwright as gw
from graphwright import nn, optim
from graphwright.array import CPU, Device, backend, from_dlpack, from_numpy
from graphwright.array.backend import use
from graphwright.array.cpu.words import fill_words_by_torch
from graphwright.array.cuda.cuda_backend import CudaBackend
from graphwright.array.cuda.driver import TorchDriver
from graphwright.array.memory_pool import DeviceFull, DriverError
from graphwright.ops import call
from graphwright.plan import CaptureExecutable
from graphwright.program import Builder, Program


@pytest.fixture
def gpu() -> Iterator[CudaBackend]:
    made = CudaBackend(DEVICE, LimitedDriver(), {})
    use(DEVICE, made)
    yield made
    use(DEVICE)


def calls(driver: Any, *names: str) -> list[tuple[Any, ...]]:
    return [entry for entry in driver.cuda.log if not names or entry[0] in names]


# -- the driver --------------------------------------------------------------------------------------------------------
def test_stream_0_is_the_current_one_of_torch_at_each_call() -> None:
    d = LimitedDriver()
    a, cuda = d.alloc(64), d.cuda
    own = cuda.Stream(device=2)
    first = d.current(0)
    with cuda.stream(own):
        assert d.current(0) != first
        d.wait(0, d.record(0))
        seen: list[int] = []
        d.enqueue(0, lambda: seen.append(cuda.now.cuda_stream), [], [])
        d.enqueue(first, lambda: seen.append(cuda.now.cuda_stream), [], [])
    assert seen == [own.cuda_stream, 0]
    assert calls(d, "record", "wait") == [("record", own.cuda_stream, 1), ("wait", own.cuda_stream, 1)]
    other = d.stream()
    d.fill(a, 3, 64, other)
    assert d.tensor(a, 64).tolist() == [3] * 64
    d.synchronize(other)
    assert calls(d, "synchronize") == [("synchronize", 2)]


def test_kernels_run_with_their_device_as_the_current_one() -> None:
    d, seen = LimitedDriver(), list[int]()
    d.cuda.active = 0  # as in a program that works on the first GPU too
    d.enqueue(d.current(0), lambda: seen.append(d.cuda.active), [], [])
    assert (seen, d.cuda.active) == ([2], 0)


def test_numbers_of_events_rise_and_hold_the_events() -> None:
    d = LimitedDriver()
    events = [d.record(0) for _ in range(3)]
    assert events == sorted(events)
    assert max(events[0], events[1]) is events[1]
    assert all(map(d.done, events))


def test_an_error_in_a_capture_ends_it_and_leaves_the_device_usable() -> None:
    d = LimitedDriver()
    a, before = d.alloc(64), d.cuda.now
    d.begin_capture(0)
    assert d.cuda.now is not before
    assert d.current(0) == 1  # what is captured counts as work of the stream that replays it
    with pytest.raises(DriverError, match="captures already"):
        d.begin_capture(0)
    with pytest.raises(DriverError, match="not permitted"):
        d.synchronize()
    with pytest.raises(DriverError, match="while a stream captures"):
        d.alloc(64)
    late = d.record(0)
    assert not d.done(late)
    with pytest.raises(DriverError, match=r"previous error during capture$"):
        d.end_capture(0)
    assert (d.cuda.now, d.cuda.capturing) == (before, None)
    assert d.done(late)
    with pytest.raises(DriverError, match="no capture"):
        d.end_capture(0)
    order = [entry[0] for entry in calls(d, "wait_stream", "capture_begin", "capture_end", "record")]
    assert order == ["wait_stream", "capture_begin", "capture_end", "wait_stream", "record"]
    d.fill(a, 1, 64)
    d.synchronize()


def test_a_capture_that_does_not_begin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    d = LimitedDriver()
    before = d.cuda.now
    monkeypatch.setattr("fake_cuda.CUDAGraph.capture_begin", lambda *facts, **named: _raise())
    with pytest.raises(DriverError, match="begin_capture failed: not now"):
        d.begin_capture(0)
    assert d.cuda.now is before
    d.alloc(64)


def _raise() -> None:
    raise RuntimeError("not now")


def test_errors_of_torch_are_typed() -> None:
    d = LimitedDriver(total=1000)
    with pytest.raises(DeviceFull):
        d.alloc(2000)
    with pytest.raises(DeviceFull):
        d.alloc(0)
    with pytest.raises(DriverError, match="not allocated"):
        d.tensor(12345, 4)
    full = TorchDriver(DEVICE, FakeCuda(2), torch.device("cuda", 7))
    with pytest.raises((DriverError, AssertionError)):
        full.alloc(64)


# -- the backend over it -----------------------------------------------------------------------------------------------
def test_values_go_to_the_device_and_back(gpu: CudaBackend) -> None:
    host = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    x = from_numpy(host).to(DEVICE)
    assert (x.device, x.impl.device) == (DEVICE, HOST)
    host[:] = 0
    assert np.array_equal(x.to_numpy(), np.arange(12).reshape(3, 4))
    assert np.array_equal(x[::-1].to_numpy(), x.to_numpy()[::-1])
    assert np.array_equal(x.permute(1, 0)[::-1, ::-1].copy().to_numpy(), x.to_numpy().T[::-1, ::-1])
    y = x.copy()
    y[::-1].copy_from(x)
    assert np.array_equal(y.to_numpy(), x.to_numpy()[::-1])
    with gpu.on(gpu.driver.stream()):
        z = call("mul", x, x)
    assert np.array_equal(z.to_numpy(), x.to_numpy() ** 2)
    assert calls(gpu.driver, "wait")[-1][1] == 0  # the read waited for the stream that wrote


def test_memory_of_other_libraries_is_borrowed(gpu: CudaBackend) -> None:
    theirs = torch.arange(6.0).reshape(2, 3).t()
    ours = gpu.adopt(theirs)
    assert (ours.shape, ours.strides, ours.storage.kind) == ((3, 2), (1, 3), "borrowed")
    assert call("add", ours, ours).to_numpy().tolist() == (2 * theirs).tolist()
    theirs[0, 0] = 7
    assert ours.to_numpy()[0, 0] == 7
    before = gpu.pool.stats()
    ours.storage.close()
    assert gpu.pool.stats() == before
    assert theirs[0, 0] == 7


def chain(n: int = 10) -> Program:
    b = Builder("chain")
    h = b.input("x", (4,))
    for k in range(n):
        h = b.tanh(b.mul(h, b.const(f"k{k}", np.float32(1.1))))
    b.output(h, "y")
    return b.build()


def test_a_plan_is_captured_and_replayed(gpu: CudaBackend) -> None:
    p = chain()
    space = CaptureExecutable(p.compile(x=(4,), device="sim:2", executor="capture"), require_capture=True)
    for step in range(6):
        x = np.full(4, step, np.float32)
        np.testing.assert_allclose(space.run({"x": x})["y"].to_numpy(), p.run(x=x)["y"].to_numpy(), 1e-6)
    assert str(space.state) == "captured"
    assert len(calls(gpu.driver, "replay")) == 4


def training(device: str) -> list[float]:
    rng = np.random.default_rng(0)
    gw.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    opt = optim.AdamW(model, lr=0.05)
    x, y = rng.normal(size=(6, 5)).astype("f4"), rng.integers(0, 3, 6)

    def step(x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    run = gw.compile(step, device=device, executor="aten" if device == "cpu" else "capture")
    return [run(x, y).to(CPU).numpy().item() for _ in range(6)]


def test_a_training_step_is_captured_whole(gpu: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws new numbers in each replay, and AdamW reads nothing on the host."""
    truth = training("cpu")

    def words(out: torch.Tensor, key: torch.Tensor, attrs: Any, shift: int = 8) -> Any:
        return lambda: fill_words_by_torch(out.view(-1), key, attrs["stream"], shift)

    monkeypatch.setattr("graphwright.array.cpu.random.words", words)  # as on a GPU
    found = training("sim:2")
    np.testing.assert_allclose(found, truth, rtol=2e-5)
    assert len(calls(gpu.driver, "capture_begin")) == 1
    assert len(calls(gpu.driver, "replay")) == 4


def test_running_out_of_memory_leaves_the_device_usable() -> None:
    made = CudaBackend(DEVICE, LimitedDriver(total=8 * 2**20), {})
    use(DEVICE, made)
    try:
        kept = from_numpy(np.ones(2**20, np.float32)).to(DEVICE)
        with pytest.raises(Exception, match="memory"):
            from_numpy(np.ones(2**21, np.float32)).to(DEVICE)
        assert call("sum", kept, axes=None, keepdims=False).to_numpy() == 2**20
    finally:
        use(DEVICE)


@pytest.mark.gpu
def test_memory_is_shared_with_torch_on_a_gpu() -> None:
    theirs = torch.arange(6.0, device="cuda")
    ours = from_dlpack(theirs)
    assert (str(ours.device), ours.impl.data_ptr()) == ("cuda:0", theirs.data_ptr())
    made = call("add", ours, ours)
    back = torch.from_dlpack(made)
    assert back.data_ptr() == made.impl.data_ptr()
    del made
    assert back.tolist() == (2 * theirs).tolist()
    assert isinstance(backend(Device("cuda")), CudaBackend)
