"""Processes that are the ranks of one run, for tests: `run_ranks(2, function, *args)` returns what each rank returns.

A rank is a new process (never a fork), with torchrun's variables, one thread, and the file of the function loaded by
its path; it calls `distributed.setup()` and the function, whose arguments and result are JSON. Start-up takes one to
two seconds, so a function checks many things.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a rank ended: its exit code, what the function returned (None for an error), its stderr."""

    code: int
    value: Any
    text: str


def refusal(call: Callable[[], object]) -> str:
    """Return the error of a call as text, or an empty text."""
    from graphwright.errors import GraphwrightError  # late: pytest imports this file in every worker

    try:
        call()
    except GraphwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PYTEST"))}
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return known | {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run a function on all ranks; return its results by rank. Raises: AssertionError with the stderr of a rank."""
    ended = end_ranks(ranks, function, *args, timeout=timeout)
    wrong = [f"rank {r} ended with {e.code}:\n{e.text}" for r, e in enumerate(ended) if e.code]
    assert not wrong, "\n".join(wrong)
    return [e.value for e in ended]


def end_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, seconds: float = 100.0, timeout: float = 60.0,
    start: Callable[[int], bool] = lambda rank: True, **environment: str,
) -> list[Ended]:  # fmt: skip
    """Run a function on all ranks; return how each process ended, in any way. `start`: whether a rank is started."""
    port, code = free_port(), function.__code__
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[int, subprocess.Popen[bytes], Path]] = []
        for rank in filter(start, range(ranks)):
            given = json.dumps([str(code.co_filename), function.__name__, args, timeout, f"{folder}/{rank}.json"])
            with open(f"{folder}/{rank}.txt", "wb") as text:
                command = [sys.executable, __file__, given]
                env = environment_of(rank, ranks, port) | environment
                process = subprocess.Popen(command, stderr=text, stdout=text, env=env, cwd=folder)
            running.append((rank, process, Path(folder, str(rank))))
        until = monotonic() + seconds
        try:
            for _, process, _ in running:
                with suppress(subprocess.TimeoutExpired):  # then its code says that it was killed
                    process.wait(max(0.1, until - monotonic()))
        finally:
            for _, process, _ in running:
                process.kill()
                process.wait()
        return [_ended(process, path) for _, process, path in running]


def _ended(process: subprocess.Popen[bytes], path: Path) -> Ended:
    result = path.with_suffix(".json")
    value = json.loads(result.read_text()) if result.is_file() else None
    return Ended(process.returncode, value, path.with_suffix(".txt").read_text(errors="replace"))


def _main(given: str) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    file, name, args, timeout, result = json.loads(given)
    sys.path.insert(0, str(Path(file).parent))
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    from graphwright import distributed

    if timeout:
        distributed.setup(timeout)
    value = getattr(module, name)(*args)
    Path(result).write_text(json.dumps(value))
    distributed.close()


if __name__ == "__main__":
    _main(sys.argv[1])
