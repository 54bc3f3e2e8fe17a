"""Plans captured on the simulated device read patterns that are edited between and during replays: one capture."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np

from graphwright.array import Device
from graphwright.array.backend import use
from graphwright.array.pattern_mirror import CapacityGrown
from graphwright.patterns import Pattern, sliding_window
from graphwright.plan import CaptureExecutable
from graphwright.testing.simulated_device import SimBackend
from program.pattern_programs import KEY, dense, inputs, program_of

SIM, TOKENS, BLOCK = Device("sim", 5), 64, 8


def captured(pattern: Pattern) -> tuple[CaptureExecutable, Any]:
    use(SIM, SimBackend(SIM))
    program = program_of(pattern)
    plan = program.compile({"x": (2, TOKENS, 8)}, device=SIM)
    return CaptureExecutable(plan, warmups=1, require_capture=True), program


def toggle(pattern: Pattern, rng: np.random.Generator) -> None:
    q = int(rng.integers(TOKENS // BLOCK))
    k, plane = int(rng.integers(q + 1)), int(rng.integers(pattern.planes))
    edge = pattern.edge_between(q, k, plane)
    if edge is None:
        pattern.connect(q, k, plane)
    else:
        pattern.cut(edge)


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() <= 5e-5 * max(1.0, np.abs(wanted).max()))


def test_1000_edits_between_replays_need_one_capture() -> None:
    pattern = sliding_window(tokens=TOKENS, window=48, block=BLOCK, planes=2)
    space, program = captured(pattern)
    x, rng, plan = inputs(TOKENS), np.random.default_rng(0), space.plan
    for step in range(1000):
        toggle(pattern, rng)
        y = space.run({"x": x})["y"]
        if step % 10 == 0 or step < 50:  # the dense oracle costs more than a run
            assert close(y.to_numpy(), dense(program, x, pattern.to_dense())), step
    assert space.state.name == "captured"
    assert space.captures == 1
    assert space.plan is plan
    (mirror,) = space.kernels.mirrors.values()
    assert (mirror.growths, mirror.copies) == (0, 1)
    assert program.patterns[KEY] is pattern


def test_growth_needs_one_more_capture() -> None:
    pattern = Pattern(TOKENS, BLOCK, planes=2)
    space, program = captured(pattern)
    x, before = inputs(TOKENS), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapacityGrown)
        for q in range(TOKENS // BLOCK):
            for k in range(q + 1):
                pattern.connect(q, k, k % 2)
                y = space.run({"x": x})["y"].to_numpy()
                assert close(y, dense(program, x, pattern.to_dense())), (q, k)
                (mirror,) = space.kernels.mirrors.values()
                before = max(before, mirror.growths)
                if space.state.name == "captured":
                    assert space.captures == 1 + mirror.growths
    assert before >= 2
    assert isinstance(space.kernels.backend, SimBackend)
    assert space.kernels.backend.pool.stats().failed == 0


def test_an_edit_of_another_thread_is_seen_by_whole_runs_only() -> None:
    pattern = sliding_window(tokens=TOKENS, window=48, block=BLOCK, planes=2)
    space, program = captured(pattern)
    x, stop = inputs(TOKENS), threading.Event()
    space.run({"x": x})
    masks, rng = [pattern.to_dense()], np.random.default_rng(1)

    def edits() -> None:
        while not stop.is_set():
            with pattern.edit("two at once"):
                toggle(pattern, rng)
                toggle(pattern, rng)
            masks.append(pattern.to_dense())

    thread = threading.Thread(target=edits)
    thread.start()
    try:
        found = []
        for _ in range(60):
            first = len(masks) - 1
            found.append((space.run({"x": x})["y"].to_numpy(), first, len(masks) + 1))
    finally:
        stop.set()
        thread.join()
    for y, first, last in found[::4]:
        assert any(close(y, dense(program, x, mask)) for mask in masks[first : last + 1])
    assert space.captures == 1


def test_an_edit_after_the_launch_is_not_in_the_replay() -> None:
    pattern = sliding_window(tokens=TOKENS, window=48, block=BLOCK, planes=2)
    space, program = captured(pattern)
    x, rng, driver = inputs(TOKENS), np.random.default_rng(2), space.kernels.backend.driver
    for _ in range(3):
        space.run({"x": x})
    for _ in range(20):
        toggle(pattern, rng)
        mask = pattern.to_dense()
        with space._running():
            space.execute()
        for _ in range(3):
            toggle(pattern, rng)  # the replay is queued and has not run
        assert driver is not None
        driver.synchronize()
        y = space.kernels.view(space.plan.outputs["y"]).to_numpy()
        assert close(y, dense(program, x, mask))
