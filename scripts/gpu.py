"""Check the package on a GPU and measure it there; write docs/gpu.md and docs/gpu.json.

    make gpu                        # checks and figures on cuda:0
    make gpu DEVICE=sim             # the checks on simulated memory with the kernels of a GPU; no figures
    python scripts/gpu.py --only models,figures/training --out DIR     # in an environment that has torch and triton

Each group of rows runs in a process of its own, and each row is written when it is known. A row that fails, that ends
the process (an assertion on the device ends every later call) or that takes too long is recorded with its error, and
the next one runs in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "src", ROOT / "scripts"):  # the script runs without an installed package too
    sys.path.insert(0, str(folder))

GROUPS = ("driver", "ops", "plans", "models", "figures")
SECONDS = {"driver": 120, "ops": 120, "plans": 300, "models": 600, "figures": 900}
"""Group -> longest time of one row."""
AIMS = {
    "elementwise chain": "at least 0.85 of the copy's bandwidth", "norms": "at least 0.9 of torch's speed",
    "forward, float32": "at least 0.95 of the raw graph's speed, and not slower than torch.compile",
    "forward, bfloat16": "as in float32", "training step": "not slower than torch.compile",
    "beside the CPU": "more than 10 times faster", "products": "torch's speed",
}  # fmt: skip
"""Figure -> what it should reach."""
PASSED, FAILED, UNMEASURED = "passed", "failed", "not measured"
Row = dict[str, Any]


# -- one process -------------------------------------------------------------------------------------------------------
def rows_of(group: str, device: str) -> Mapping[str, Callable[[str], Mapping[str, Any]]]:
    """Return the rows of a group; on `sim`, first make it a device with the kernels of a GPU."""
    if device.startswith("sim"):
        from graphwright.array import Device
        from graphwright.array.backend import use
        from graphwright.array.cuda.cuda_backend import CudaBackend
        from graphwright.testing.simulated_device import SimDriver

        there = Device(device)
        use(there, CudaBackend(there, SimDriver(there), {}))
    if group == "figures":
        from gpu_figures import FIGURES

        return FIGURES
    from gpu_checks import GROUPS as CHECKS

    return CHECKS[group]


def work(group: str, device: str, names: list[str], out: Path) -> None:
    """Run rows of a group and append each to a file, after its name when it begins."""
    found = rows_of(group, device)
    with out.open("a", encoding="utf-8") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for name in names or found:
            write({"name": name, "begins": True})
            started = monotonic()
            row: Row = {"name": name, "outcome": PASSED}
            try:
                facts = dict(found[name](device))
                if "graphwright, error" in facts and device.startswith("cuda"):
                    row |= {"outcome": FAILED, "error": facts["graphwright, error"]}
                row["facts"] = _plain(facts)
            except BaseException as error:
                row |= {"outcome": FAILED, "error": f"{type(error).__name__}: {error}"[:2000],
                        "trace": traceback.format_exc(limit=-6)[-4000:]}  # fmt: skip
                if isinstance(error, KeyboardInterrupt):
                    raise
            if group == "figures" and not device.startswith("cuda"):
                row = {**row, "outcome": FAILED if row["outcome"] == FAILED else UNMEASURED, "facts": {}}
            write({**row, "seconds": round(monotonic() - started, 3)})
            if row["outcome"] == FAILED and _lost(device):
                sys.exit(3)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def _lost(device: str) -> bool:
    """Return True if the device answers no call of this process any more."""
    if not device.startswith("cuda"):
        return False
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device=device).cpu().item() != 1)
    except Exception:
        return True


# -- all groups --------------------------------------------------------------------------------------------------------
def run_group(group: str, device: str, folder: Path, names: list[str]) -> Iterator[Row]:
    """Run a group in processes of its own and yield its rows; a row that ends its process is one that failed."""
    left = names
    part = folder / f".{group}.rows"
    while left:
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--child", group, "--device", device, "--rows", str(part), *left]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        ended, text = _watched(child, part, SECONDS[group])
        rows = _read(part)
        done = [row for row in rows if "outcome" in row]
        begun = [row["name"] for row in rows if row.get("begins")]
        yield from done
        finished = {row["name"] for row in done}
        stopped = next((name for name in begun if name not in finished), None)
        if stopped is None and not done:
            stopped = left[0]
        if stopped is not None:
            yield {"name": stopped, "outcome": FAILED, "error": f"{ended}: {text[-1500:]}".strip(), "facts": {}}
            finished.add(stopped)
        left = [name for name in left if name not in finished]
    part.unlink(missing_ok=True)


def _watched(child: subprocess.Popen[str], part: Path, seconds: float) -> tuple[str, str]:
    """Wait for a process as long as it continues to write rows; return how it ended and what it wrote to stderr."""
    size, since, text = -1, monotonic(), ""
    while True:
        try:
            _, text = child.communicate(timeout=1)
            return f"the process ended with {child.returncode}", text or ""
        except subprocess.TimeoutExpired:
            now = part.stat().st_size if part.exists() else 0
            if now != size:
                size, since = now, monotonic()
            elif monotonic() - since > seconds:
                child.kill()
                _, text = child.communicate()
                return f"it took more than {seconds} s", text or ""


def _read(part: Path) -> list[Row]:
    lines = part.read_text(encoding="utf-8").splitlines() if part.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # the process ended while it wrote
            continue
    return found


def machine(device: str) -> Row:
    """Return what the figures depend on: versions, the GPU, the driver, the commit."""
    import numpy as np
    import torch

    import graphwright as gw

    facts: Row = {"device": device, "graphwright": gw.__version__, "torch": torch.__version__, "numpy": np.__version__,
                  "python": platform.python_version(), "cores": os.cpu_count(), "cuda": torch.version.cuda}  # fmt: skip
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        facts["gpu"], facts["capability"] = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        facts["memory"] = torch.cuda.mem_get_info(index)[1]
        facts["tf32"] = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    for name, command in (("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
                          ("commit", ["git", "rev-parse", "--short", "HEAD"])):  # fmt: skip
        try:
            facts[name] = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            facts[name] = None
    return facts


# -- the page ----------------------------------------------------------------------------------------------------------
def page(found: Mapping[str, Any]) -> str:
    """Return the results as a page of the docs."""
    facts, groups = found["machine"], found["groups"]
    shown = [f"{name} {facts[name]}" for name in ("gpu", "driver", "cuda", "torch", "triton") if facts.get(name)]
    lines = ["# On a GPU", ""]
    if not facts.get("gpu"):
        lines += ["**No GPU has run this yet.** These are the checks on simulated memory, with those kernels of a GPU",
                  "that need none; there are no figures.", ""]  # fmt: skip
    lines += ["`make gpu` writes this page and `gpu.json`; `make gpu DEVICE=sim` writes both of a simulated device",
              "to `graphwright-gpu`.", "",
             f"Device `{facts['device']}`: {', '.join(shown) or 'no GPU'}; commit {facts['commit']}.", ""]  # fmt: skip
    lines += ["| group | rows | passed | failed | not measured | seconds |", "| --- | --- | --- | --- | --- | --- |"]
    for group, rows in groups.items():
        counts = [sum(row["outcome"] == kind for row in rows) for kind in (PASSED, FAILED, UNMEASURED)]
        taken = round(sum(row.get("seconds", 0) for row in rows), 1)
        lines.append(f"| {group} | {len(rows)} | {' | '.join(map(str, counts))} | {taken} |")
    failed = [(group, row) for group, rows in groups.items() for row in rows if row["outcome"] == FAILED]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- {group}, {row['name']}: `{_line(row.get('error', ''))}`" for group, row in failed]
    for group, rows in groups.items():
        lines += ["", f"## {group.capitalize()}", ""]
        if group == "ops":
            lines += ["| kernel | ops |", "| --- | --- |"]
            sources: dict[str, list[str]] = {}
            for row in rows:
                sources.setdefault(row.get("facts", {}).get("kernel") or "not run here", []).append(row["name"])
            lines += [
                f"| {source} | {', '.join(f'`{n}`' for n in names)} |" for source, names in sorted(sources.items())
            ]
            continue
        aims = group == "figures"
        lines += ["| row | outcome | aim | facts |", "| --- | --- | --- | --- |"] if aims else [
            "| row | outcome | facts |", "| --- | --- | --- |"
        ]  # fmt: skip
        for row in rows:
            shown = "; ".join(f"{key}: {_shown(value)}" for key, value in row.get("facts", {}).items())
            aim = f" {AIMS.get(row['name'], '')} |" if aims else ""
            lines.append(f"| {row['name']} | {row['outcome']} |{aim} {shown.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())[:200].replace("`", "'")


def _shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float)
        else ", ".join(map(_shown, value))
        if isinstance(value, list)
        else str(value)
    )


def main() -> int:
    """Run the groups that are asked for; return 1 if a row failed."""
    parser = argparse.ArgumentParser(description="check and measure on a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="groups, or group/row, separated by commas")
    parser.add_argument(
        "--out", type=Path, help="folder of gpu.md and gpu.json: docs, or graphwright-gpu without a GPU"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        work(given.child, given.device, given.names, given.rows)
        return 0
    if given.device.startswith("cuda"):
        import graphwright as gw

        try:
            gw.cuda.synchronize(given.device)
        except gw.GraphwrightError as error:
            print(f"{error}\nwithout a GPU: make gpu DEVICE=sim", file=sys.stderr)
            return 2
    out: Path = given.out or ROOT / ("docs" if given.device.startswith("cuda") else "graphwright-gpu")
    asked = [each.partition("/") for each in given.only.split(",") if each]
    out.mkdir(parents=True, exist_ok=True)
    found: Row = {"schema": 1, "machine": machine(given.device), "groups": {}}
    for group in GROUPS:
        rows = [name for part, _, name in asked if part == group]
        if asked and not any(part == group for part, _, _ in asked):
            continue
        names = [name for name in rows if name] or list(rows_of(group, given.device))
        made: list[Row] = []
        found["groups"][group] = made
        for row in run_group(group, given.device, out, names):
            made.append(row)
            text = f"{group}/{row['name']}: {row['outcome']} {_line(row.get('error', ''))}"
            print(text.rstrip(), flush=True)
            _write(out / "gpu.json", json.dumps(found, indent=1) + "\n")
    _write(out / "gpu.md", page(found))
    failed = sum(row["outcome"] == FAILED for rows in found["groups"].values() for row in rows)
    print(f"{failed} rows failed; {out / 'gpu.md'} and {out / 'gpu.json'}")
    return 1 if failed else 0


def _write(path: Path, text: str) -> None:
    """Write a file whole."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
