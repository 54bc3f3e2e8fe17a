"""Hypothesis profiles for the whole suite: `dev` (30 examples), `ci` (100, derandomised), `deep` (10 000)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: spinning thread pools would fight

from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=_quiet)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=_quiet)
settings.register_profile("deep", max_examples=10_000, deadline=None, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
