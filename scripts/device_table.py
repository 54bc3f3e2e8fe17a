"""Write the tables of docs/devices.md: which kernel runs each op on a GPU.

python scripts/device_table.py            # Triton's row stays as it is where Triton cannot be imported
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from graphwright.array import Device, from_numpy
from graphwright.array.cuda.cuda_backend import CudaBackend, triton_kernels
from graphwright.ops import OPS, expansion
from graphwright.testing.simulated_device import SimDriver

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
SOURCES = {
    "triton": "a kernel of this package in Triton, where it takes the dtypes",
    "torch": "torch's functions, written for GPUs",
    "aten": "the CPU's kernel, which only calls torch",
    "expansion": "simpler ops",
    "host": "the host, on copies",
}


def table() -> str:
    """Return the table of ops by the kernel that runs them without Triton, and Triton's row if it can be imported."""
    device = Device("sim:7")
    backend, found = CudaBackend(device, SimDriver(device), {}), {source: list[str]() for source in SOURCES}
    for name, row in OPS.items():
        if row.view is not None:
            continue
        inputs, given = row.sample(np.random.default_rng(0))
        attrs = row.complete(given)
        specs = [from_numpy(np.asarray(x)).spec for x in inputs]
        if expansion.expanded(row, backend, attrs):
            found["expansion"].append(name)
        else:
            found[backend.choice(name, row.specs(specs, attrs), specs, attrs).source].append(name)
    if find_spec("triton") is not None:
        found["triton"] = [name for name in OPS if name in triton_kernels()]
    lines = ["| kernel | what runs | ops |", "| --- | --- | --- |"]
    for source, what in SOURCES.items():
        lines.append(f"| {source} | {what} | {', '.join(f'`{name}`' for name in found[source])} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the page with the present table; Triton's row is kept where Triton is missing."""
    before, _, rest = text.partition("<!-- kernels -->\n")
    old, _, after = rest.partition("\n<!-- end -->")
    new, kept = table(), re.search(r"(?m)^\| triton \|.*$", old)
    if find_spec("triton") is None and kept is not None:
        new = re.sub(r"(?m)^\| triton \|.*$", lambda _: kept.group(), new)
    return f"{before}<!-- kernels -->\n{new}\n<!-- end -->{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
