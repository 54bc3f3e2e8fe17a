"""Measuring fairly: peers in the same process, rounds interleaved, median and bootstrap interval, A/A as noise.

A figure is a list of rows; `rounds` measures callables side by side, `row` holds what other figures have to say.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
_BUILDS = tempfile.TemporaryDirectory(prefix="inductor", ignore_cleanup_errors=True)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _BUILDS.name)  # what a killed run left half-written would be loaded
COMMIT = subprocess.run(  # as the process begins: a run of hours is of the code it loaded
    ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
).stdout.strip()


@dataclass(slots=True)
class Row:
    """One line of a table: who, what it took, and notes; stored with it, what each seed (0, 1, ...) gave."""

    who: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    note: str = ""
    seeds: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Figure:
    """What a benchmark found: its rows, its conditions, and what may be said."""

    title: str
    conditions: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, who: str, value: float, unit: str, note: str = "", low: float | None = None, high: float | None = None,
        seeds: Sequence[float | None] = (),
    ) -> None:  # fmt: skip
        self.rows.append(Row(who, value, unit, low, high, note, list(seeds)))


def rounds(
    calls: dict[str, Callable[[], Any]], *, n: int = 15, warm: int = 2, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds per call of each, measured in interleaved rounds; the first one is measured twice, as `A/A`."""
    names = list(calls)
    twice = {**calls, "A/A": calls[names[0]]}
    for _ in range(warm):
        for call in calls.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in twice}
    for r in range(n):
        order = list(twice) if r % 2 == 0 else list(reversed(twice))
        for name in order:
            call, started = twice[name], perf_counter()
            for _ in range(inner):
                call()
            taken[name].append((perf_counter() - started) / inner)
    return taken


def interval(samples: list[float], draws: int = 2000) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    rng = np.random.default_rng(0)
    a = np.asarray(samples)
    medians = np.median(a[rng.integers(0, len(a), (draws, len(a)))], axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def add_rounds(
    figure: Figure, taken: dict[str, list[float]], unit: str = "ms", note: dict[str, str] | None = None
) -> None:
    """Rows of a measurement."""
    scale = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
    for name, samples in taken.items():
        low, high = interval(samples)
        figure.add(name, median(samples) * scale, unit, (note or {}).get(name, ""), low * scale, high * scale)


def machine() -> dict[str, Any]:
    """Where it was measured."""
    fields = [line.split(":") for line in open("/proc/cpuinfo") if ":" in line]
    known = {name.strip(): value.strip() for name, value in reversed(fields)}
    model = known.get("model name", platform.processor())
    if "cpu family" in known:  # generations of one maker share a name
        model += f", family {known['cpu family']} model {known['model']}"
    versions = {}
    for name in ("torch", "numpy", "numba", "transformers", "jax", "rustworkx", "networkx"):
        if name in sys.modules:
            versions[name] = getattr(sys.modules[name], "__version__", "?")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": COMMIT,
    }


def show(figure: Figure) -> str:
    """The table as text."""
    width = max((len(r.who) for r in figure.rows), default=0)
    lines = [figure.title, f"  ({figure.conditions})"]
    for r in figure.rows:
        span = f"  [{r.low:,.4g} .. {r.high:,.4g}]" if r.low is not None and r.high is not None else ""
        lines.append(f"  {r.who:<{width}}  {r.value:>12,.4g} {r.unit}{span}  {r.note}".rstrip())
    return "\n".join([*lines, *(f"  {s}" for s in figure.notes)])


def write(name: str, figures: list[Figure]) -> None:
    """Store a benchmark's result, among those of this kind of machine."""
    _store(name, [_plain(figure) for figure in figures])


def write_part(name: str, part: str, figure: Figure, parts: Sequence[str]) -> None:
    """Store one part of a benchmark over its earlier result; parts that did not run stay as they are.

    Args:
        parts: all that the benchmark has, in the order of the page.
    """
    path = _path(name)
    kept = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.is_file() else []
    stored = {f["part"]: f for f in kept if "part" in f}
    stored[part] = {"part": part, "commit": COMMIT, **_plain(figure)}
    _store(name, [stored[p] for p in parts if p in stored])


def _store(name: str, figures: list[dict[str, Any]]) -> None:
    data = {"name": name, "command": f"python -m benchmarks {name}", "machine": machine(), "figures": figures}
    _path(name).parent.mkdir(parents=True, exist_ok=True)
    _path(name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _path(name: str) -> Path:
    return RESULTS / re.sub(r"\W+", "-", machine()["cpu"].lower()).strip("-") / f"{name}.json"


def _plain(figure: Figure) -> dict[str, Any]:
    """A figure for a file; what seeds gave where it was kept."""
    found = asdict(figure)
    for row in found["rows"]:
        if not row["seeds"]:
            del row["seeds"]
    return found


PEAK = """
import json, re
def peak_mib():  # of this process alone; ru_maxrss begins with the parent's size
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
out = {}
"""


def peak_rss_mib(script: str) -> dict[str, Any]:
    """Run a script in a process of its own; what it puts into `out` comes back, with its peak resident MiB.

    The script may call `peak_mib()` itself, to take what came before the measurement off.
    """
    code = f"{PEAK}{script}\nout['peak_mib'] = peak_mib()\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])
