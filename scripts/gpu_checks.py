"""The checks of `make gpu`: driver, every op, plans, models and training on a device, beside the CPU.

A check is a function of the device's name that returns facts to show, or raises. GROUPS lists them in order of running.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import optim
from graphwright.array import CPU, Device, NDArray, backend, from_numpy
from graphwright.array.memory_pool import MemoryPool, OutOfDeviceMemory
from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, call, compute, expansion
from graphwright.plan import CaptureExecutable, Executable
from graphwright.program import Builder, Program

Check = Callable[[str], Mapping[str, Any]]
TEXT = "The following table lists the operators of the language, from the least to the most binding. "
DTYPES = {"float32": 2e-4, "bfloat16": 4e-2, "float16": 8e-3}
"""Dtype -> largest difference from the CPU, as a share of the largest value: roundings, and sums in other orders."""
DRAWS = 2


class Differs(AssertionError):
    """A value on the device is not that of the CPU."""


def share_of_difference(found: NDArray, wanted: NDArray) -> float:
    """Return the largest difference as a share of the largest finite value. Raises: Differs if NaN are elsewhere."""
    ours, theirs = (a.to(CPU).to_numpy("float64") for a in (found, wanted))
    if ours.shape != theirs.shape or not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
        raise Differs(f"shapes {ours.shape} and {theirs.shape}, or other values are not finite")
    fine = np.isfinite(theirs)
    scale = max(float(np.abs(theirs[fine]).max(initial=0.0)), 1e-30)
    return float(np.abs(ours[fine] - theirs[fine]).max(initial=0.0)) / scale


def close(found: Any, wanted: Any, limit: float, what: str) -> float:
    """Return the share of difference of two arrays. Raises: Differs above `limit`."""
    seen = share_of_difference(*(a if isinstance(a, NDArray) else from_numpy(np.asarray(a)) for a in (found, wanted)))
    if seen > limit:
        raise Differs(f"{what}: a difference of {seen:.2e} of the largest value; the limit is {limit:.0e}")
    return seen


# -- the driver --------------------------------------------------------------------------------------------------------
def driver_copies(device: str) -> Mapping[str, Any]:
    """Bytes survive the way to the device, within it and back; memory is counted."""
    driver: Any = backend(Device(device)).driver
    free = driver.mem_info()[0]
    a, b, back = driver.alloc(1 << 20), driver.alloc(1 << 20), np.zeros(1 << 20, np.uint8)
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    driver.copy(a, data, 1 << 20)
    driver.fill(b, 7, 1 << 20)
    driver.copy(b + 1024, a + 512, 4096)
    driver.copy(back, b, 1 << 20)
    driver.synchronize()
    wanted = np.full(1 << 20, 7, np.uint8)
    wanted[1024 : 1024 + 4096] = data[512 : 512 + 4096]
    if not np.array_equal(back, wanted):
        raise Differs("bytes changed on the way")
    used = free - driver.mem_info()[0]
    driver.free(a)
    driver.free(b)
    if used < 2 << 20 or driver.mem_info()[0] < free:
        raise Differs(f"memory is not counted: {used} bytes used, {free - driver.mem_info()[0]} after free")
    return {"bytes of the device": driver.mem_info()[1]}


def driver_graph(device: str) -> Mapping[str, Any]:
    """A captured graph runs when it is replayed, on the present content of memory, and not before."""
    driver: Any = backend(Device(device)).driver
    a, b, back = driver.alloc(256), driver.alloc(256), np.zeros(256, np.uint8)
    stream = driver.stream()
    driver.fill(b, 0, 256, stream)
    driver.synchronize()
    driver.begin_capture(stream)
    driver.copy(b, a, 256, stream)
    graph = driver.instantiate(driver.end_capture(stream))
    for value in (3, 4):
        driver.fill(a, value, 256, stream)
        driver.replay(graph, stream)
        driver.copy(back, b, 256, stream)
        driver.synchronize()
        if set(back.tolist()) != {value}:
            raise Differs(f"the replay wrote {set(back.tolist())}, not {value}")
    return {}


def streams_are_ordered(device: str) -> Mapping[str, Any]:
    """A read on one stream waits for the stream that wrote."""
    made: Any = backend(Device(device))
    x = from_numpy(np.full((1024, 1024), 1 / 1024, np.float32)).to(Device(device))
    side = made.driver.stream()
    made.driver.wait(side, made.driver.record(made.driver.current(0)))
    with made.on(side):
        y = x
        for _ in range(20):
            y = call("matmul", y, x)
    return {"difference": close(y, np.full((1024, 1024), 1 / 1024, np.float32), 1e-3, "20 products on a side stream")}


# -- ops ---------------------------------------------------------------------------------------------------------------
def op_check(name: str, device: str) -> Mapping[str, Any]:
    """All dtypes of one op, beside the CPU's kernel in the same dtype."""
    row, there, done, most, source = OPS[name], Device(device), list[str](), 0.0, ""
    if row.traits.table is not None:
        return {"kernel": "", "note": "attention over patterns has checks of its own"}
    for kind, limit in DTYPES.items():
        if kind != "float32" and (row.traits.updates_states or name.endswith("_backward")):
            continue  # their operands are of several dtypes
        for seed in range(DRAWS):
            inputs, given = row.sample(np.random.default_rng(seed))
            attrs = row.complete(given)
            arrays = [_as(np.asarray(x), kind, name) for x in inputs]
            try:
                row.specs([a.spec for a in arrays], attrs)
                truth = compute(row, [a.copy() for a in arrays], attrs)
            except GraphwrightError:
                continue  # the op refuses this dtype everywhere
            found = compute(row, [a.to(there) for a in arrays], attrs)
            for mine, other in zip(found, truth, strict=True):
                most = max(most, close(mine, other, limit, f"{name} in {kind}"))
            done += [kind] if kind not in done else []
            source = source or _source(name, truth, arrays, attrs, there)
    return {"kernel": source, "dtypes": done, "difference": most}


def _as(x: np.ndarray, kind: str, name: str) -> NDArray:
    array = from_numpy(np.array(x))
    fixed = x.dtype != np.float64 or (name.endswith("_step") and not x.ndim)
    return array if fixed else compute(OPS["cast"], [array], {"dtype": _dtype(kind)})[0]


def _dtype(kind: str) -> Any:
    return getattr(gw, kind)


def _source(name: str, outs: list[NDArray], ins: list[NDArray], attrs: Any, device: Device) -> str:
    kernels: Any = backend(device)
    if OPS[name].view is not None:
        return "view"
    if expansion.expanded(OPS[name], kernels, attrs):
        return "expansion"
    return kernels.choice(name, [o.spec for o in outs], [i.spec for i in ins], attrs).source


# -- plans -------------------------------------------------------------------------------------------------------------
def chain(n: int = 12) -> Program:
    """Return a program of products and tanh in a row."""
    b = Builder("chain")
    h = b.input("x", (64,))
    for k in range(n):
        h = b.tanh(b.mul(h, b.const(f"k{k}", np.float32(1.1)), name=f"times.{k}"), name=f"tanh.{k}")
    b.output(h, "y")
    return b.build()


def captured_plan(device: str) -> Mapping[str, Any]:
    """50 replays with new inputs, edits between them: values of the CPU, graphs of unchanged regions kept."""
    p = chain()
    space: Any = p.compile(x=(64,), device=device).executable()
    rng, most = np.random.default_rng(0), 0.0
    for step in range(50):
        x = rng.normal(size=64).astype(np.float32)
        if step in (20, 30):
            with p.edit("another factor") as e:
                e.rewire(p.in_edges(f"tanh.{step // 10}")[0], p.node(f"times.{step // 10 - 1}"))
            space = p.compile(x=(64,), device=device).executable()
        most = max(most, close(space.run({"x": x})["y"], p.run(x=x)["y"], 1e-4, f"step {step}"))
    if str(space.state) != "captured":
        raise Differs(f"the plan is {space.state}")
    return {"difference": most, "captures": space.captures}


def capture_fails_once(device: str) -> Mapping[str, Any]:
    """A kernel that fails while a stream captures: the run continues without graphs, and the device stays usable."""
    p = chain()
    space = CaptureExecutable(p.compile(x=(64,), device=device, executor="capture"))
    x = np.ones(64, np.float32)
    for _ in range(2):
        space.run({"x": x})
    plain, hit = space._calls_of, []

    def calls(i: int) -> list[Any]:
        def fail() -> None:
            hit.append(i)
            raise RuntimeError("planted")

        return [fail] if i == 5 and not hit else plain(i)

    space._calls_of = calls  # type: ignore[method-assign]
    close(space.run({"x": x})["y"], p.run(x=x)["y"], 1e-4, "the run whose capture failed")
    if space.state.name != "failed" or not hit:
        raise Differs(f"nothing failed: {space.state}")
    space.retry_capture()
    close(space.run({"x": x})["y"], p.run(x=x)["y"], 1e-4, "the run after it")
    return {"state after": str(space.state)}


def poisoned_plan(device: str) -> Mapping[str, Any]:
    """Memory that no value needs is filled with NaN, and no result has one."""
    p, x = chain(), np.ones(64, np.float32)
    space = Executable(p.compile(x=(64,), device=device, executor="aten"), poison=True)
    return {"difference": close(space.run({"x": x})["y"], p.run(x=x)["y"], 1e-4, "poisoned")}


def full_memory(device: str) -> Mapping[str, Any]:
    """A limit of the pool: a typed error, the same state after it, and a smaller allocation that works."""
    made: Any = backend(Device(device))
    pool: MemoryPool = made.pool
    kept = from_numpy(np.ones(1 << 18, np.float32)).to(Device(device))
    pool.empty_cache()
    pool.set_limit(pool.stats().reserved + (8 << 20))
    try:
        try:
            made.empty((1 << 26,), kept.dtype)
        except OutOfDeviceMemory as error:
            facts = {"asked": error.asked, "room": error.room}
        else:
            raise Differs("an allocation above the limit succeeded")
        close(call("add", kept, kept), np.full(1 << 18, 2, np.float32), 0, "after the error")
    finally:
        pool.set_limit(None)
    return facts


# -- models ------------------------------------------------------------------------------------------------------------
def model_logits(device: str) -> Mapping[str, Any]:
    """Logits of the bundled model, five runs: without graphs, then captured."""
    model, plain = gw.open("bundled", device=device), gw.open("bundled")
    truth = plain.logits(TEXT)
    return {"difference": max(close(model.logits(TEXT), truth, 1e-4, f"run {k}") for k in range(5))}


def generated_tokens(device: str) -> Mapping[str, Any]:
    """64 greedy and 64 sampled tokens, which are those of the CPU."""
    model, plain = gw.open("bundled", device=device), gw.open("bundled")
    sampled = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5}
    equal = {}
    for name, options in (("greedy", {}), ("sampled", sampled)):
        ours, theirs = (m.generate(TEXT, 64, **options).ids for m in (model, plain))
        equal[name] = int(np.argmin([*np.equal(ours, theirs), False]))  # tokens before the first that differs
    if equal["greedy"] < 64:
        raise Differs(f"greedy tokens differ from number {equal['greedy']} on")
    return {"equal greedy tokens": equal["greedy"], "equal sampled tokens": equal["sampled"]}


def paged_cache(device: str) -> Mapping[str, Any]:
    """A forked sequence in a paged cache gives the logits of the CPU."""
    found = []
    for there in (device, "cpu"):
        model = gw.open("bundled", device=there)
        sequence: Any = model.new_cache(256).sequence()
        model.prefill(sequence, TEXT)
        found.append(model.prefill(sequence.fork(), " and"))
    return {"difference": close(found[0], found[1], 1e-4, "logits after a fork")}


def trained(device: str, steps: int = 20) -> Mapping[str, Any]:
    """AdamW on the bundled model: the losses of the CPU."""
    from graphwright.models.train import Trainer, TrainOptions

    losses = []
    for there in (device, "cpu"):
        options = TrainOptions(steps=steps, batch=4, window=64, warmup=2)
        losses.append(Trainer(gw.open("bundled", device=there), TEXT * 40, options).run().losses)
    return {"difference": close(losses[0], losses[1], 5e-3, "losses"), "losses": [losses[0][0], losses[0][-1]]}


def trained_with_dropout(device: str) -> Mapping[str, Any]:
    """A step in Python, compiled: dropout draws the CPU's numbers, new ones in each replay."""
    losses = []
    for there in (device, "cpu"):
        gw.manual_seed(3)
        net = gw.nn.Sequential(gw.nn.Linear(16, 64), gw.nn.Dropout(0.5), gw.nn.GELU(), gw.nn.Linear(64, 4))
        opt = optim.AdamW(net, lr=0.01)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(32, 16)).astype("f4"), rng.integers(0, 4, 32)

        def step(x: Any, y: Any, net: Any = net, opt: Any = opt) -> Any:
            opt.zero_grad()
            loss = gw.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            return loss

        run = gw.compile(step, device=there)
        losses.append([float(run(x, y).to(CPU).numpy()) for _ in range(10)])
    return {"difference": close(losses[0], losses[1], 1e-3, "losses")}


def optimizers(device: str) -> Mapping[str, Any]:
    """Three steps of every optimizer, in Python without a plan."""
    most = {}
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Lion", "Muon", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
                 "ASGD", "Rprop"):  # fmt: skip
        kind, ends = getattr(optim, name, None), []
        if kind is None:
            continue
        for there in (device, "cpu"):
            with gw.fork_rng(3):
                net = gw.nn.Linear(16, 8).to(there)
            opt = kind([net.weight], 0.01)
            for _ in range(3):
                opt.zero_grad()
                net(gw.tensor(np.ones((4, 16), "f4"), device=there)).abs().sum().backward()
                opt.step()
            ends.append(net.weight.data.to(CPU))
        most[name] = close(ends[0], ends[1], 1e-3, name)
    return {"optimizers": len(most), "difference": max(most.values())}


def experts(device: str) -> Mapping[str, Any]:
    """The bundled model with three experts a layer."""
    from graphwright import experts as ex

    model = gw.open("bundled")
    ex.upcycle(model, 3, 2)
    truth = model.logits(TEXT)
    return {"difference": close(model.to(device).logits(TEXT), truth, 1e-4, "logits")}


def patterns(device: str) -> Mapping[str, Any]:
    """The bundled model with a window of 32 tokens as a pattern, edited between runs."""
    from graphwright.attention import sliding_window, sparsify

    model, most = gw.open("bundled"), 0.0
    pattern = sliding_window(tokens=256, window=32, block=16)
    sparsify(model, "layers.*", pattern)
    own = next(iter(model.program.patterns.values()))
    for step in range(6):
        truth = model.to("cpu").logits(TEXT)
        most = max(most, close(model.to(device).logits(TEXT), truth, 1e-4, f"run {step}"))
        own.connect(step + 3, 0)
    return {"difference": most, "kernel": "triton" if getattr(backend(Device(device)), "triton", {}) else "host"}


def gates(device: str) -> Mapping[str, Any]:
    """Gates of all kinds in all modes: values and gradients of the CPU."""
    from graphwright.array.formulas.gates import GATE_KINDS, MODES

    rng, most, there = np.random.default_rng(0), 0.0, Device(device)
    n = 4 * len(GATE_KINDS)
    table = np.zeros((n, 7), np.int64)
    table[:, 0], table[:, 2] = np.repeat(np.arange(len(GATE_KINDS)), 4), rng.integers(0, 4, n)
    table[:, 3], table[:, 5] = np.arange(n), np.arange(n)
    sizes = (4,) * len(GATE_KINDS)
    for mode in range(len(MODES)):
        values = [rng.normal(size=n).astype("f4"), table, np.ones(1, np.float32) * 0.7, np.array([3, 5, mode])]
        arrays = [from_numpy(np.asarray(v)) for v in values]
        attrs = OPS["gate"].complete({"sizes": sizes, "groups": ("default",)})
        found = compute(OPS["gate"], [a.to(there) for a in arrays], attrs)
        for mine, other in zip(found, compute(OPS["gate"], arrays, attrs), strict=True):
            most = max(most, close(mine, other, 1e-4, f"mode {MODES[mode]}"))
    return {"difference": most}


@contextmanager
def saved_model() -> Iterator[str]:
    """Yield a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def exported(device: str) -> Mapping[str, Any]:
    """A model that was trained on the device is saved and opened again with the same logits."""
    from graphwright.models.train import Trainer, TrainOptions

    model = gw.open("bundled", device=device)
    Trainer(model, TEXT * 20, TrainOptions(steps=2, batch=2, window=32, warmup=1)).run()
    with saved_model() as folder:
        model.save(f"{folder}/saved")
        again = gw.open(f"{folder}/saved", device=device)
        return {"difference": close(again.logits(TEXT), model.logits(TEXT), 1e-6, "logits of the saved model")}


GROUPS: dict[str, dict[str, Check]] = {
    "driver": {"copies": driver_copies, "graph": driver_graph, "streams": streams_are_ordered},
    "ops": {name: partial(op_check, name) for name in OPS},
    "plans": {"captured": captured_plan, "capture fails": capture_fails_once, "poison": poisoned_plan,
              "full memory": full_memory},
    "models": {"logits": model_logits, "generation": generated_tokens, "paged cache": paged_cache, "training": trained,
               "dropout in a plan": trained_with_dropout, "optimizers": optimizers, "experts": experts,
               "patterns": patterns, "gates": gates, "save and open": exported},
}  # fmt: skip
"""Group -> check -> its function; the ops are one group of many short checks."""
