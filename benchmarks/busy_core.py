"""Two-thread plans beside a process that keeps a core busy, with either of torch and graphwright imported first.

`python benchmarks/busy_core.py torch` prints the times of one case as JSON: relative to one thread beside the same
process, and to one thread on the machine before that process starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Figure

SIDE, DEPTH, ROUNDS = 512, 6, 9
FIRST = ("graphwright", "torch")
BUSY = "import os\nos.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nprint(flush=True)\nwhile True: pass"


def run() -> list[Figure]:
    from benchmarks.harness import Figure

    figure = Figure(
        "Two threads beside a process that keeps one core busy, relative to one thread beside it, and to one alone",
        f"{DEPTH} times matrix product, tanh and softmax, {SIDE} x {SIDE}, f32; medians of {ROUNDS} alternating rounds",
    )
    for first in FIRST:
        for executor, (beside, alone) in measured(first).items():
            figure.add(f"{executor}, {first} imported first", beside, "x", f"{alone:.2f} times one thread alone")
    return [figure]


def measured(first: str) -> dict[str, tuple[float, float]]:
    """Return executor -> times on two threads by that on one beside the process, and by that on one before it started.

    Measured in a new process without OpenMP's settings.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, str(Path(__file__)), first]
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)


def bound(executor: str) -> Callable[[], object]:
    import numpy as np

    import graphwright as gw
    from graphwright.plan import Executable

    rng = np.random.default_rng(0)
    b = gw.Builder("chain")
    h = b.input("x", (SIDE, SIDE))
    weight = b.param("weight", (rng.normal(size=(SIDE, SIDE)) / SIDE**0.5).astype("f4"))
    for _ in range(DEPTH):
        h = b.softmax(b.tanh(b.matmul(h, weight)))
    b.output(h, "y")
    plan = Executable(b.build().compile(x=(SIDE, SIDE), executor=executor))
    plan.run({"x": rng.normal(size=(SIDE, SIDE)).astype("f4")})
    return plan.execute


def seconds(call: Callable[[], object], *threads: int) -> list[float]:
    """Return the median time of a call on each number of threads, in alternating rounds."""
    from graphwright.array.cpu import set_num_threads

    times: dict[int, list[float]] = {n: [] for n in threads}
    for _ in range(ROUNDS):
        for n, taken in times.items():
            set_num_threads(n)
            call()
            start = perf_counter()
            call()
            taken.append(perf_counter() - start)
    return [median(taken) for taken in times.values()]


def main(first: str) -> None:
    if first == "torch":
        import torch  # noqa: F401  # loads OpenMP
    calls = {executor: bound(executor) for executor in ("vm", "aten")}
    alone = {executor: seconds(call, 1)[0] for executor, call in calls.items()}
    busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        found = {executor: seconds(call, 1, 2) for executor, call in calls.items()}
        print(json.dumps({executor: (two / one, two / alone[executor]) for executor, (one, two) in found.items()}))
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    main(sys.argv[1])
