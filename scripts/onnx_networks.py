"""Open ONNX files and compare them with onnxruntime, as they are and after a quarter of some units is cut.

    python scripts/onnx_networks.py FILE... [--sizes x=1,3,96,128]

Wheels of the package index have trained networks; `pip download --no-deps magika silero-vad rapidocr-onnxruntime` and
`unzip` give files to try. Inputs are random, and each size that a file leaves open is 2, or what `--sizes` says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime

import graphwright as gw
from graphwright.program import EmptyAxis, FrozenAxis, RaggedUnit

CUTS = 2
"""How many axes lose a quarter of their units."""


def main() -> int:
    """Print a line for each file; the status is 1 if a file is refused."""
    parser = argparse.ArgumentParser(description="Compare ONNX files with onnxruntime, before and after an edit.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--sizes", nargs="*", default=[], help="shapes of inputs, as x=1,3,96,128")
    options = parser.parse_args()
    sizes = {name: tuple(map(int, shape.split(","))) for name, shape in (s.split("=") for s in options.sizes)}
    refused = 0
    for file in options.files:
        try:
            print(f"{file.name}: {compared(file, sizes)}")
        except gw.GraphwrightError as error:
            refused = 1
            print(f"{file.name}: {type(error).__name__}: {error}")
    return refused


def compared(file: Path, sizes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the largest differences from onnxruntime, relative to the largest entry of an output, at least 1e-3."""
    session, rng = onnxruntime.InferenceSession(str(file)), np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for given in session.get_inputs():
        shape = sizes.get(given.name, [n if isinstance(n, int) else 2 for n in given.shape])
        drawn = rng.integers(0, 200, shape) if "int" in given.type else rng.normal(size=shape) * 0.1
        feeds[given.name] = drawn.astype({"tensor(float)": "float32", "tensor(double)": "float64"}.get(
            given.type, given.type[len("tensor(") : -1]))  # fmt: skip
    p = gw.from_onnx(file, sizes={name: shape for name, shape in sizes.items() if name in feeds})
    before, cuts = _difference(p, session, feeds), 0
    for axis in p.axes().values():
        if cuts < CUTS and not axis.frozen and not axis.mixed and axis.size >= 8:
            with suppress(RaggedUnit, EmptyAxis, FrozenAxis):
                axis.units(range(0, axis.size, 4)).prune()
                cuts += 1
    with TemporaryDirectory() as folder:
        p.to_onnx(Path(folder) / "cut.onnx")
        after = _difference(p, onnxruntime.InferenceSession(str(Path(folder) / "cut.onnx")), feeds)
    return f"{len(p)} nodes, differs by {before:.0e}, after cuts on {cuts} axes by {after:.0e}"


def _difference(p: gw.Program, session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> float:
    found = p(**dict(zip(p.input_names(), feeds.values(), strict=True))).values()
    names = [given.name for given in session.get_inputs()]
    wanted = session.run(None, dict(zip(names, feeds.values(), strict=True)))
    pairs = [(np.asarray(a.numpy(), np.float64), np.asarray(b)) for a, b in zip(found, wanted, strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
