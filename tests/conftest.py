"""Hypothesis profiles, and what a test may be left out for: a marker names it, and only its absence skips."""

import gc
import os
import shutil
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: spinning thread pools would fight

import pytest
from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=_quiet)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=_quiet)
settings.register_profile("deep", max_examples=10_000, deadline=None, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS = {
    "browser": ("a system Chromium (make chromium)", lambda: CHROMIUM is not None),
    "gpu": ("a CUDA device", _gpu),
    "linux": ("Linux", lambda: sys.platform == "linux"),
}
"""Marker -> what its tests need, and whether it is there."""


@pytest.fixture
def sim():
    """The backend of a fresh simulated device `sim`, which goes with the test."""
    from graphwright.array import Device
    from graphwright.array.backend import use
    from graphwright.array.sim import SimBackend
    from graphwright.array.sim.driver import SimDriver

    device = Device("sim")
    made = SimBackend(device, SimDriver(device))
    use(device, made)
    yield made
    use(device)


@pytest.fixture(scope="module")
def young_heap():
    """For tests that collect garbage: what others left behind is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


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
