"""Caches on the simulated device: steps are captured once, whatever forks, joins and fails around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import relative, some_ids

import graphwright as gw
from graphwright.array import Device
from graphwright.array.backend import use
from graphwright.array.memory_pool import Block
from graphwright.errors import GraphwrightError
from graphwright.testing.simulated_device import SimBackend, SimDriver

SIM = Device("sim")
IDS = some_ids((1, 60))[0]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's steps by ATen too."""
    monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")


def filled(m: gw.Model, kind: Any, device: str, ids: np.ndarray = IDS[:20], **options: Any) -> Any:
    cache: Any = m.new_cache(400, 1 if kind == "static" else 30, kind=kind, device=device, **options)
    s: Any = cache if kind == "static" else cache.sequence()
    m.prefill(s, ids)
    return s


def steps(s: Any) -> list[Any]:
    """Workspaces of steps of one token."""
    cache = getattr(s, "cache", s)
    return [fed.space for key, fed in cache.steps.spaces.items() if key[-1] == 1]


def rows(s: Any, i: int = 1) -> np.ndarray:
    """Keys and values of one layer. Weights on the host are mapped from the file, so last bits may differ."""
    if hasattr(s, "gather"):
        return np.stack(s.gather(i))
    return np.stack([v.data.to_numpy()[0, :, : s.length] for k, v in s.variables.items() if f".{i}." in k])


def equal(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and relative(np.asarray(a), np.asarray(b)) < 1e-5


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.usefixtures("sim", "plain")
def test_captured_tokens_and_entries_equal_those_of_the_host(kind: str, model: gw.Model) -> None:
    here, there = filled(model, kind, "cpu"), filled(model, kind, "sim")
    rules = {"temperature": 0.9, "seed": 3}
    assert list(model.decode(here, 30, **rules)) == list(model.decode(there, 30, **rules))
    assert there.length == 50
    assert equal(rows(there), rows(here))
    (space,) = steps(there)
    assert (str(space.state), space.captures) == ("captured", 1)
    assert [r.kind for r in space.regions] == ["capture"]  # the whole step
    assert all(v.data.device == SIM for v in (there if kind == "static" else there.cache).variables.values())
    for s in (here, there):
        s.truncate(33)
        s.step(IDS[None, 5:6])
    assert equal(rows(there), rows(here))
    assert equal(there.last_logits(), here.last_logits())


@pytest.mark.usefixtures("sim", "plain")
def test_forks_and_new_blocks_need_no_new_graph(model: gw.Model) -> None:
    """200 steps with 20 forks are one graph; each fork continues as its prompt does alone."""
    found, spaces = {}, []
    for device in ("cpu", "sim"):
        s = filled(model, "paged", device, poison=True)
        tokens = []
        for i in range(20):
            with s.fork() as f:
                f.truncate(20 - i % 3)
                tokens.append(list(model.decode(f, 5, temperature=1.1, seed=i)))
            tokens.append(list(model.decode(s, 5)))
        found[device] = tokens, rows(s)
        spaces = steps(s)
        assert s.length == 120
    assert found["sim"][0] == found["cpu"][0]
    assert equal(found["sim"][1], found["cpu"][1])
    (space,) = spaces
    assert (str(space.state), space.captures) == ("captured", 1)


@pytest.mark.usefixtures("sim", "plain")
def test_sequences_join_and_leave_a_batch(model: gw.Model) -> None:
    found = {}
    for device in ("cpu", "sim"):
        first = filled(model, "paged", device)
        batch, logits = [first, first.fork(), first.fork()], []
        batch[1].truncate(3)
        for t in range(8):
            ids = np.array([[int(s.length) + t] for s in batch]) % 97
            logits.append(first.cache.step(batch, ids).to_numpy())
            if t == 3:
                batch.append(first.fork())
            if t == 5:
                batch.pop(0)
        found[device] = [*logits, *(rows(s) for s in batch)]
    assert all(equal(a, b) for a, b in zip(found["sim"], found["cpu"], strict=True))


class Logged(SimDriver):
    """Notes the name of each call."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.log: list[str] = []

    def _tick(self, what: str, outside_capture: bool = False) -> None:
        self.log.append(what)
        super()._tick(what, outside_capture)


def warm(m: gw.Model, kind: str) -> tuple[Logged, Any, list[int]]:
    """A cache before the step that records, on a device of its own."""
    driver = Logged(SIM)
    use(SIM, SimBackend(SIM, driver))
    s = filled(m, kind, "sim")
    return driver, s, list(m.decode(s, 2))


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.usefixtures("plain")
def test_a_fault_at_any_driver_call_appends_an_entry_at_most_once(kind: str, model: gw.Model) -> None:
    """In the step that records: the step falls back, or leaves nothing."""
    expected = list(model.decode(filled(model, kind, "cpu"), 6))
    driver, s, _ = warm(model, kind)
    began = driver.calls
    next(model.decode(s, 1))
    log = driver.log[began:]
    fell_back, raised = set(), 0
    for fault, name in enumerate(log):
        if 0 < fault < len(log) - 1 and name in (log[fault - 1], log[fault + 1]) and fault % 20:
            continue  # one launch after the other
        driver, s, tokens = warm(model, kind)
        before = s.length, rows(s)
        driver.fail_at = driver.calls + 1 + fault
        try:
            tokens += list(model.decode(s, 1))
        except GraphwrightError:
            raised += 1
            driver.fail_at = None
            assert s.length == before[0]
            assert np.array_equal(rows(s), before[1])
        driver.fail_at = None
        if str(steps(s)[0].state).startswith("failed"):
            fell_back.add(name)
        assert not driver.capturing
        assert tokens + list(model.decode(s, 6 - len(tokens))) == expected, (fault, name)
        steps(s)[0].release()
        del s
    use(SIM)
    assert fell_back >= {"begin_capture", "end_capture", "instantiate", "replay"}
    assert raised > 0


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.usefixtures("plain")
def test_decode_steps_allocate_no_device_memory(kind: str, sim: SimBackend, model: gw.Model) -> None:
    s = filled(model, kind, "sim")
    tokens = iter(model.decode(s, 110))
    for _ in range(6):
        next(tokens)
    calls: list[int] = []
    alloc = sim.pool.alloc

    def noted(nbytes: int, stream: int = 0, owner: str = "") -> Block:
        calls.append(nbytes)
        return alloc(nbytes, stream, owner)

    sim.pool.alloc = noted
    for _ in range(100):
        next(tokens)
    assert set(calls) == {4 * 97, 8}  # the logits that are given out, and the id
