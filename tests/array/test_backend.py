"""The backend sets what its libraries read when they load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_idle_threads_spin_briefly_unless_configured(given, found):
    code = "import os; from graphwright.array import CPU, backend; backend(CPU); print(os.environ['GOMP_SPINCOUNT'])"
    kept = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
