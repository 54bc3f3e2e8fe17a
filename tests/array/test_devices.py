"""Devices: names, what is not here, mixes; memory that is owned, borrowed or mapped; sharing with other libraries."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.array import (
    CPU,
    Device,
    DeviceMismatch,
    DeviceUnavailable,
    NDArray,
    Storage,
    StorageClosed,
    backend,
    bfloat16,
    empty,
    float32,
    from_dlpack,
    from_numpy,
    int64,
)
from graphwright.array.meta import NoBytes
from graphwright.autograd import Tensor, grad, no_grad, tensor
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import OPS, call
from graphwright.testing.simulated_device import RuleBroken, SimBackend
from values import array_of, grad_of

pytestmark = pytest.mark.usefixtures("young_heap")

SIM, META = Device("sim"), Device("meta")


@pytest.fixture
def sim(sim: SimBackend) -> Iterator[SimBackend]:
    """Collect garbage while the device still exists, which frees its memory."""
    yield sim
    gc.collect()


# -- names -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "kind", "index", "shown"),
    [
        ("cpu", "cpu", 0, "cpu"),
        ("cpu:0", "cpu", 0, "cpu"),
        ("cuda", "cuda", 0, "cuda:0"),
        ("cuda:0", "cuda", 0, "cuda:0"),
        ("cuda:3", "cuda", 3, "cuda:3"),
        ("sim:1", "sim", 1, "sim:1"),
        ("meta", "meta", 0, "meta"),
    ],
)
def test_device_names_are_parsed(text: str, kind: str, index: int, shown: str) -> None:
    device = Device(text)
    assert device == Device.parse(text) == Device(kind, index) == Device.parse(device)
    assert hash(device) == hash(Device(kind, index))
    assert (device.kind, device.index, str(device)) == (kind, index, shown)
    assert len({device, Device(kind, index), Device(kind, index + 1)}) == 2


@pytest.mark.parametrize("text", ["tpu", "cpu:x", "", ":1", "cuda:-1", "cuda:1:2", "cuda:1.0"])
def test_invalid_device_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid device"):
        Device(text)
    with pytest.raises(UsageError):
        Device("cuda:1", 2)


def test_a_missing_device_raises_with_the_reason() -> None:
    for text in ("cuda", "cuda:1", "cpu:1"):
        with pytest.raises(DeviceUnavailable, match=text):
            backend(Device(text))
    with pytest.raises(DeviceUnavailable, match="CUDA"):
        tensor([1.0]).to("cuda")


# -- the meta device ---------------------------------------------------------------------------------------------------
def test_meta_arrays_have_specs_and_no_bytes() -> None:
    x = empty((2**20, 2**20), float32, META)
    w = tensor(np.ones((3, 4), np.float32)).to("meta")
    assert x.shape == (2**20, 2**20)
    h = call("linear", tensor(np.ones((2, 4), np.float32)).to("meta"), w).tanh()
    assert (h.shape, h.dtype, h.device) == ((2, 3), float32, META)
    for ask in (h.tolist, h.numpy, lambda: h.to("cpu"), lambda: call("embedding", w, w)):
        with pytest.raises((NoBytes, UsageError)):
            ask()
    assert "no values" in repr(array_of(h))


# -- mixes -------------------------------------------------------------------------------------------------------------
BITS = "bitwise_"  # of integers
BINARY = [n for n, row in OPS.items() if row.arity == 2 and row.traits.elementwise and row.traits.amp == "promote"
          and not n.startswith(BITS)]  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_numbers_are_moved_to_the_device_of_the_other_operand(name: str, sim: SimBackend) -> None:
    there, here = tensor(np.full((2, 3), 2.0, np.float32)).to(SIM), tensor(np.full((2, 3), 2.0, np.float32))
    number = tensor(np.float32(3.0))
    for order in (1, -1):
        for other in (3.0, number, number.to(SIM), there):
            pair = (there, other)[::order]
            plain = [t.to(CPU) if isinstance(t, Tensor) else t for t in pair]
            out = call(name, *pair)
            assert out.device == SIM
            assert out.tolist() == call(name, *plain).tolist()
        with pytest.raises(DeviceMismatch, match="cpu") as caught:
            call(name, *(there, here)[::order])
        assert "sim:0" in str(caught.value)
    out = empty((2, 3), call(name, array_of(here), array_of(here)).dtype)
    with pytest.raises(DeviceMismatch):
        call(name, array_of(there), array_of(there), out=out)


def test_moving_between_devices_is_differentiable(sim: SimBackend) -> None:
    x = tensor(np.array([1.0, 2.0]), requires_grad=True)
    scale = tensor(np.array(3.0), requires_grad=True)
    there = x.to("sim")
    assert there.requires_grad
    assert there.to("sim") is there
    assert x.to("cpu") is x
    back = (there * scale * there).to("cpu")
    back.sum().backward()
    assert (grad_of(x).device, grad_of(x).tolist()) == (CPU, [6.0, 12.0])
    assert (grad_of(scale).device, grad_of(scale).tolist()) == (CPU, 5.0)


# -- the simulated device ----------------------------------------------------------------------------------------------
def _network(device: Device) -> tuple[list[Tensor], Tensor]:
    rng = np.random.default_rng(0)
    shapes = ((8, 5), (8,), (3, 8))
    weights = [tensor(rng.normal(size=s).astype("f4")).to(device).detach() for s in shapes]
    for w in weights:
        w.requires_grad = True
    x = tensor(rng.normal(size=(6, 5)).astype("f4")).to(device)
    h = call("rms_norm", call("linear", x, weights[0], weights[1]).tanh(), weights[1])
    labels = tensor(np.array([0, 1, 2, 0, 1, 2])).to(device)
    loss, _ = call("cross_entropy", call("linear", h, weights[2]), labels)
    return weights, loss.mean()


def test_the_simulated_device_computes_the_same_bits_and_never_waits(sim: SimBackend) -> None:
    weights, loss = _network(SIM)
    gradients = grad(loss, weights)
    with_no_grad = [w.detach().sub_(g * 0.1) for w, g in zip(weights, gradients, strict=True)]
    assert sim.driver.syncs == 0
    ours = [t.numpy().tobytes() for t in (loss, *gradients, *with_no_grad)]
    weights, loss = _network(CPU)
    gradients = grad(loss, weights)
    theirs = [*gradients, *(w.detach().sub_(g * 0.1) for w, g in zip(weights, gradients, strict=True))]
    assert ours == [t.numpy().tobytes() for t in (loss, *theirs)]


def test_host_arrays_may_change_after_a_transfer_was_queued(sim: SimBackend) -> None:
    host = np.ones(4, np.float32)
    x = from_numpy(host).to(SIM)
    host[:] = 7
    assert x.to_numpy().tolist() == [1] * 4


def test_a_read_waits_for_the_stream_that_wrote(sim: SimBackend) -> None:
    x = tensor(np.ones(4, np.float32)).to(SIM)
    side = sim.driver.stream()
    sim.driver.wait(side, sim.driver.record(0))
    with sim.on(side):
        y = x + x
    assert y.tolist() == [2.0] * 4
    with sim.on(side):
        z = x + y
    with pytest.raises(RuleBroken, match="without a wait"):
        _ = z + x
    sim.driver.wait(0, sim.driver.record(side))
    assert (z + x).tolist() == [4.0] * 4


def test_every_block_is_freed_once_without_the_garbage_collector(sim: SimBackend) -> None:
    rng = np.random.default_rng(0)
    gc.collect()
    gc.disable()
    try:
        x: Any = None
        for seed in range(20):
            live: list[Any] = [from_numpy(rng.normal(size=(4, 4))).to(SIM)]
            for _ in range(30):
                kind = rng.integers(4)
                x = live[int(rng.integers(len(live)))]
                if kind == 0 and len(live) > 1:
                    live.remove(x) if not any(x is y for y in live[:1]) else None
                elif kind == 1:
                    live.append(x[::-1, :2].expand(4, 2) if x.shape == (1, 2) else x.permute(1, 0)[::-1])
                else:
                    live.append(call("exp", call("neg", call("abs", x))))
            if seed % 2:
                _network(SIM)[1].backward()
            live, x = [], None
            stats = sim.pool.stats()
            assert (stats.allocs, stats.live, stats.failed) == (stats.frees, 0, 0)
    finally:
        gc.enable()
    sim.driver.synchronize()
    sim.pool.empty_cache()
    assert sim.driver.allocs == sim.driver.frees


def test_live_memory_is_flat_over_steps_and_after_exceptions(sim: SimBackend) -> None:
    gc.collect()
    gc.disable()
    try:
        x = tensor(np.ones((8, 8), np.float32)).to(SIM).detach()
        x.requires_grad = True
        levels = set()
        for step in range(300):
            if step % 3 == 0:
                with pytest.raises(UsageError):
                    _ = (x * 2.0).tanh() + (x.exp() @ x[:3])
            else:
                x.grad = None
                (x.tanh() @ x).sum().backward()
            x.grad = None
            levels.add(sim.pool.stats().live)
            sim.driver.synchronize()
        assert levels == {8 * 8 * 4}
    finally:
        gc.enable()


def test_closing_a_storage_frees_it_once(sim: SimBackend) -> None:
    array = from_numpy(np.ones(1000)).to(SIM)
    view = array[::2]
    array.storage.close()
    array.storage.close()
    for use_it in (array.to_numpy, view.to_numpy, partial(call, "neg", view)):
        with pytest.raises(StorageClosed):
            use_it()
    other = from_numpy(np.full(1000, 3.0)).to(SIM)
    del array, view, use_it
    assert sim.pool.stats().stale == 0
    assert other.to_numpy().max() == 3.0


def test_a_process_ends_cleanly_with_memory_on_a_device() -> None:
    code = (
        "import numpy as np, graphwright as gw, graphwright.testing.simulated_device\n"
        "x = gw.tensor(np.ones(5)).to('sim'); y = (x * 2.0).exp()\n"
        "import builtins; builtins.kept = [x, y, y.data.storage]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- whose memory it is ------------------------------------------------------------------------------------------------
def test_borrowed_memory_keeps_its_owner_alive_and_frees_nothing() -> None:
    host = np.arange(6.0)
    array = from_numpy(host)
    alive = weakref.ref(host)
    del host
    assert alive() is not None
    assert array.storage.kind == "borrowed"
    array.storage.close()
    assert alive() is None
    with pytest.raises(StorageClosed):
        array.to_numpy()


def test_copy_controls_sharing_and_kind_reports_it() -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    packed = np.zeros(3, dtype=[("a", "u1"), ("b", "<f4")])["b"]
    swapped = host.astype(">f4")
    assert from_numpy(host).storage.kind == "borrowed"
    assert from_numpy(host, copy=True).storage.kind == empty((2,), float32).storage.kind == "owned"
    for odd, problem in ((packed, "not multiples"), (swapped, "byte order")):
        array = from_numpy(odd)
        assert array.storage.kind == "owned"
        assert np.array_equal(array.to_numpy(), odd)
        with pytest.raises(UsageError, match=problem):
            from_numpy(odd, copy=False)
    mapped = Storage.mapped(lambda: memoryview(bytes(4)), 4, CPU)
    assert mapped.kind == "mapped"
    mapped.close()
    with pytest.raises(StorageClosed):
        _ = mapped.memory


@pytest.mark.parametrize(
    "kind", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_torch_and_numpy_share_memory_through_dlpack(kind: str) -> None:
    theirs = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, kind))[:, 1:].transpose(0, 2)
    ours = from_dlpack(theirs)
    assert (ours.shape, ours.strides, ours.dtype.name) == (tuple(theirs.shape), theirs.stride(), kind)
    assert ours.storage.kind == "borrowed"
    theirs[0, 0, 0] = 1
    assert ours.to(CPU)[0, 0, 0].item() == 1
    back = torch.from_dlpack(ours)
    assert back.data_ptr() == theirs.data_ptr()
    assert torch.equal(back, theirs)
    own = from_dlpack(theirs, copy=True)
    theirs[0, 0, 0] = 0
    assert own[0, 0, 0].item() == 1
    if kind != "bfloat16":
        assert np.shares_memory(np.from_dlpack(ours), ours.to_numpy())


def test_shared_memory_outlives_either_owner() -> None:
    ours = empty((3,), float32).copy_from(from_numpy(np.array([1, 2, 3], np.float32)))
    theirs = torch.from_dlpack(ours)
    storage = weakref.ref(ours.storage)
    del ours
    assert storage() is None
    assert theirs.tolist() == [1, 2, 3]
    ours = from_dlpack(theirs)
    del theirs
    assert ours.to_numpy().tolist() == [1, 2, 3]


def test_arrays_that_dlpack_cannot_share_are_refused() -> None:
    readonly = np.arange(3.0)
    readonly.flags.writeable = False
    array = from_numpy(np.arange(6.0))
    for given in (from_numpy(readonly), array[::-1], array.to(SIM)):
        with pytest.raises(BufferError):
            given.__dlpack__()
    assert torch.from_dlpack(from_numpy(np.arange(3.0))).tolist() == [0, 1, 2]
    assert np.from_dlpack(from_numpy(readonly), copy=True).tolist() == [0, 1, 2]
    assert array.__dlpack_device__() == (1, 0)

    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(DeviceUnavailable):
        from_dlpack(OnGpu())


def test_plans_accept_reversed_feeds_and_refuse_closed_ones() -> None:
    step = gw.compile(lambda x: x * 2.0, executor="aten")
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    flipped = Tensor(from_numpy(host)[::-1, ::-1])
    assert np.array_equal(step(flipped).numpy(), 2 * host[::-1, ::-1])
    array = from_numpy(host.copy())
    fed = Tensor(array)
    assert step(fed).tolist() == (2 * host).tolist()
    array.storage.close()
    with pytest.raises(StorageClosed):
        step(fed)


# -- more of the simulated device --------------------------------------------------------------------------------------
def test_indexing_and_training_work_on_the_simulated_device(sim: SimBackend) -> None:
    table = tensor(np.arange(12, dtype=np.float32).reshape(4, 3)).to(SIM)
    ids = from_numpy(np.array([3, 0])).to(SIM)
    assert call("embedding", array_of(table), ids).to_numpy().tolist() == [[9, 10, 11], [0, 1, 2]]
    assert (ids.dtype, ids.device) == (int64, SIM)
    late = call("embedding", array_of(table), from_numpy(np.array([9])).to(SIM))
    with pytest.raises((IndexError, ComputeError, RuntimeError)):  # as on a GPU, told when it is read
        late.to_numpy()
    low = from_numpy(np.ones(2, np.float32)).to(SIM)
    assert call("cast", low, dtype=bfloat16).to_numpy("float32").tolist() == [1, 1]
    assert isinstance(low, NDArray)


def test_modules_train_on_a_device_after_moving_their_parameters(sim: SimBackend) -> None:
    layer = nn.Linear(3, 1)
    for p in layer.parameters():
        p.data = p.data.to(SIM)
    x = tensor(np.eye(3, dtype=np.float32)).to(SIM)
    losses = []
    for _ in range(20):
        error = layer(x) - 1.0
        loss = (error * error).mean()
        for p, g in zip(layer.parameters(), grad(loss, list(layer.parameters())), strict=True):
            with no_grad():
                p.sub_(g * 0.3)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
