"""Memory: what the pool asks its driver for beside no pool at all, and what a planned step asks the allocator for.

Requests of an eager loop are those that torch's allocator really got, recorded by its profiler and made again of the
pool. Allocations are counted where they arrive: at the driver, or by the profiler, not by the pool itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import nn, optim
from graphwright.array.cpu import tensor_allocations
from graphwright.array.memory_pool import Block, MemoryPool
from graphwright.testing.simulated_device import SimDriver

SHAPES = tuple(int(2**e) for e in np.linspace(10, 22, 12))
"""Bytes, 1 KiB to 4 MiB."""
ROUNDS, NODES, EDGES, WIDTH, STEPS = 20, 10_000, 80_000, 64, 100
Trace = list[tuple[int, int]]
"""(address, bytes) of each request, with negative bytes where memory is freed."""


class Counting(SimDriver):
    """A device that counts how often memory is asked of it."""

    fresh = 0

    def alloc(self, nbytes: int) -> int:
        self.fresh += 1
        return super().alloc(nbytes)


def mixed() -> Trace:
    """Twelve sizes in turn, eight alive at a time, a hundred times over."""
    trace: Trace = []
    sizes = np.random.default_rng(0).permutation(np.tile(SHAPES, 100))
    for i, size in enumerate(sizes):
        trace.append((i, int(size)))
        if i >= 8:
            trace.append((i - 8, -int(sizes[i - 8])))
    return trace


def eager() -> Trace:
    """h <- relu(A h W), message passing over random edges, as torch's allocator sees it."""
    rng = np.random.default_rng(0)
    source, target = (gw.tensor(rng.integers(0, NODES, EDGES)) for _ in range(2))
    h = gw.tensor(rng.standard_normal((NODES, WIDTH)).astype(np.float32))
    w = gw.tensor((rng.standard_normal((WIDTH, WIDTH)) / 64).astype(np.float32))
    zero = gw.tensor(np.zeros((NODES, WIDTH), np.float32))
    watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with watched as seen, gw.no_grad():
        for _ in range(ROUNDS):
            h = nn.functional.relu(zero.index_add(0, target, h[source]) @ w)
    found: list[tuple[int, int, int]] = []
    stack = list(seen.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(ptr, size) for _, ptr, size in sorted(found)]


def replayed(trace: Trace, pool: MemoryPool | None, driver: Counting) -> tuple[int, int, int, bytes]:
    """Requests, most bytes alive, alive at the end, and what the live memory holds after each was written to."""
    held: dict[int, tuple[Block | None, int, int]] = {}
    requests = live = peak = 0
    for key, size in trace:
        if size > 0:
            block = None if pool is None else pool.alloc(size)
            address = driver.alloc(size) if block is None else block.address
            driver.fill(address, requests % 251, size)
            held[key], requests, live = (block, address, size), requests + 1, live + size
        elif key in held:
            block, address, own = held.pop(key)
            driver.synchronize()
            live -= own
            if pool is not None and block is not None:
                pool.free(block)
            else:
                driver.free(address)
        peak = max(peak, live)
    driver.synchronize()
    content = b"".join(driver.read(address, size).tobytes() for _, address, size in held.values())
    return requests, peak, live, content


def pooled(name: str, trace: Trace) -> Figure:
    figure = Figure(f"Memory asked of the driver: {name}", "replayed on a simulated device, which counts its calls")
    found: dict[str, Any] = {}
    for who in ("no pool", "pool"):
        driver = Counting()
        pool = MemoryPool(driver) if who == "pool" else None
        requests, peak, live, content = replayed(trace, pool, driver)
        found[who] = (peak, live, content), driver.fresh
        figure.add(f"{who}, requests", requests, "")
        figure.add(f"{who}, asked of the driver", driver.fresh, "", f"reuse {1 - driver.fresh / requests:.1%}")
        figure.add(f"{who}, most in use", peak / 2**20, "MiB")
    assert found["pool"][0] == found["no pool"][0], "the same live set and bytes"
    figure.notes.append(f"{1 - found['pool'][1] / found['no pool'][1]:.1%} fewer allocations")
    return figure


def planned() -> Figure:
    """A hundred training steps by a plan beside the same steps made eagerly: allocations, and losses bit for bit."""
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((STEPS, 32, 64)).astype(np.float32)
    figure = Figure(
        f"Allocations of {STEPS} training steps", "MLP 64-128-64, batch 32, AdamW; counted by torch's profiler"
    )
    losses: dict[str, list[float]] = {}
    for who in ("eager", "planned"):
        gw.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        opt = optim.AdamW(net.parameters(), lr=1e-3)

        def step(x: Any, net: Any = net, opt: Any = opt) -> Any:
            opt.zero_grad()
            loss = ((net(x) - x) ** 2).mean()
            loss.backward()
            opt.step()
            return loss

        run = gw.compile(step, executor="aten") if who == "planned" else step  # the bits of the eager loop
        losses[who] = [float(run(gw.tensor(x)).item()) for x in xs[:3]]  # warm
        given = [gw.tensor(x) for x in xs[3:]]
        taken = tensor_allocations(lambda run=run, given=given, who=who: losses[who].extend(
            float(run(x).item()) for x in given))  # fmt: skip
        figure.add(f"{who}, a step", len(taken) / len(given), "allocations", f"{sum(taken) / len(given):,.0f} bytes")
    assert losses["eager"] == losses["planned"], "the same losses, bit for bit"
    return figure


def run() -> list[Figure]:
    loop = f"{ROUNDS} rounds of relu(A h W), {NODES:,} nodes, {EDGES:,} edges, width {WIDTH}"
    return [pooled("12 mixed sizes, 1 KiB to 4 MiB", mixed()), pooled(loop, eager()), planned()]
