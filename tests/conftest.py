"""Hypothesis profiles, and what a test may be left out for: a marker names it, and only its absence skips."""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: spinning thread pools would fight

import pytest
from hypothesis import HealthCheck, settings

import graphwright.testing.simulated_device  # noqa: F401  # makes the device kind `sim` available
from graphwright import timing
from graphwright.models.generation import timed

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=4, deadline=None, suppress_health_check=_quiet)
settings.register_profile("ci", max_examples=4, deadline=None, derandomize=True, suppress_health_check=_quiet)
settings.register_profile("deep", max_examples=10_000, deadline=None, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def _open_at_all(fd: Any) -> None:
    """Replaces `os.fsync`, which costs some ms and shows nothing: no test cuts the power.

    What is synced, and when, is checked on the disk that `graphwright.testing.faults` plays; processes that tests start
    sync for real.
    """
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


os.fsync = _open_at_all
timing.SECONDS = 0.02  # tests check what is measured, not how precisely
timed.MOST = 4  # decoded tokens of a round: there are 7 rounds however short they are

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


APART = Path(sys.prefix) / "apart"
"""Where scripts/triton.sh installs Triton: only processes that have it in PYTHONPATH import it."""


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


WHOLE, MANY = 10_000, 6  # tests of the whole suite at least; cases of a test that are many
COMPLETE = ("test_docs.py", "test_examples.py", "test_help_examples.py")
"""Files of which each case is a page, an example or a verb: all of them run."""

NEEDS = {
    "browser": ("a system Chromium (make chromium)", lambda: CHROMIUM is not None),
    "gpu": ("a CUDA device", _gpu),
    "triton": ("Triton (scripts/triton.sh)", lambda: APART.is_dir() or find_spec("triton") is not None),
    "ray": ("Ray (pip install ray)", lambda: find_spec("ray") is not None),
    "linux": ("Linux", lambda: sys.platform == "linux"),
    "deep": ("HYPOTHESIS_PROFILE=deep", lambda: os.environ.get("HYPOTHESIS_PROFILE") == "deep"),
}
"""Marker -> what its tests need, and whether it is there."""


@pytest.fixture(scope="session", autouse=True)
def native_code() -> None:
    """Build the native code that plans use, once for all workers, so that no test depends on when it gets ready."""
    from graphwright.array.vm.machine import part as vm
    from graphwright.plan.planning.native import part as planner

    planner.start()
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        assert vm.wait(), vm.why
        assert planner.wait(), planner.why


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """One pool of two workers for all tests of a process: a worker costs the start of a Python, and of torch."""
    from graphwright import workers

    with workers.Processes(2, timeout=100) as made:
        yield made


@pytest.fixture
def no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans run on ATen, and the planner's loops as Python."""
    monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")


@pytest.fixture
def sim():
    """The backend of a fresh simulated device `sim`, which goes with the test."""
    from graphwright.array import Device
    from graphwright.array.backend import use
    from graphwright.testing.simulated_device import SimBackend, SimDriver

    device = Device("sim")
    made = SimBackend(device, SimDriver(device))
    use(device, made)
    yield made
    use(device)


@pytest.fixture
def gpu():
    """The backend of a device `sim:1` with the kernels of a GPU, without Triton, over simulated memory."""
    from graphwright.array import Device
    from graphwright.array.backend import use
    from graphwright.array.cuda.cuda_backend import CudaBackend
    from graphwright.testing.simulated_device import SimDriver

    device = Device("sim:1")
    made = CudaBackend(device, SimDriver(device), {})
    use(device, made)
    yield made
    use(device)


@pytest.fixture(scope="module")
def young_heap():
    """For tests that collect garbage: freeze the objects of other tests, so that they are not scanned each time.

    They stay frozen: in a process of thousands of tests a collection of all objects takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_process() -> Iterator[Callable[[list[str], str], tuple[int, str]]]:
    """What stands for a new Python in tests that are not about one: a fork of a process that has imported transformers.

    It replaces `verify._start`.
    """
    server: list[Any] = []

    def start(command: list[str], directory: str) -> tuple[int, str]:
        if not server:
            script = [sys.executable, "-I", str(Path(__file__).parent / "models" / "warm_process.py")]
            server.append(subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        errors = Path(directory) / "stderr"
        assert command[0] == "-I"
        server[0].stdin.write(json.dumps({"command": command[1:], "cwd": directory, "stderr": str(errors)}) + "\n")
        server[0].stdin.flush()
        return int(server[0].stdout.readline()), errors.read_text()

    yield start
    if server:
        server[0].stdin.close()
        server[0].stdout.close()
        server[0].wait()


@pytest.fixture
def warm(warm_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports and verifications of this test fork their clean processes."""
    from graphwright.models.export import verify

    monkeypatch.setattr(verify, "_start", warm_process)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole suite takes about half of the cases of tests with many; fewer files, and the deep profile, take all.

    The name of a case decides: every second one would leave out one value of a parameter that has two.
    """
    if len(items) < WHOLE or os.environ.get("HYPOTHESIS_PROFILE") == "deep":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.path.name not in COMPLETE and not item.get_closest_marker("deep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    many = (item for found in cases.values() if len(found) >= MANY for item in found[1:])
    left = {id(item) for item in many if crc32(item.nodeid.encode()) % 2}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected lives to the end: garbage is not looked for in it, and less often than in a small process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers():
        thing, present = NEEDS.get(marker.name, ("", lambda: True))
        if not present():
            pytest.skip(f"not run: needs {thing}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> object:
    """Any other skip is a failure: it would hide a test where everything that it needs is there."""
    report = (yield).get_result()
    if report.skipped and not hasattr(report, "wasxfail") and "not run: needs" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skips on its own, without a marker of tests/conftest.py: {report.longrepr}"
