"""Scripts that need Triton run in a process of their own, which alone has it on its path, and print JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(script: Path, folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script with Triton installed; Triton's cache is in `folder`, `more` are environment variables."""
    seen = os.pathsep.join([str(Path(sys.prefix) / "apart"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": seen, "TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1", **more}
    return subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True, check=False)


def facts(script: Path, folder: Path, *arguments: str, **more: str) -> dict[str, Any]:
    """Return the facts that a script prints, one [name, value] a line; see `run`."""
    done = run(script, folder, *arguments, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())
