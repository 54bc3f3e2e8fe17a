"""Writing an ONNX file, and running it with onnxruntime beside the program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from graphwright.errors import MissingExtra
from graphwright.files import StrPath, check_free, target_path
from graphwright.models.errors import VerificationFailed
from graphwright.program import Program

EXTERNAL = 1_500_000_000
"""Bytes of weights from which on they lie in a file of their own: one protobuf message ends at 2 GiB."""
TOLERANCE = 1e-4
"""Largest difference of results, relative to the largest entry, that other kernels may make in float32."""


def need_onnx() -> None:
    """Raises: MissingExtra without the libraries that write ONNX and run it."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        raise MissingExtra("onnx", "ONNX")


def save_onnx(p: Program, path: StrPath, *, overwrite: bool = False) -> Path:
    """Write a program as an ONNX file of opset 20; named sizes stay open.

    Args:
        p: what to write.
        path: `model.onnx`; weights past 1.5 GB go beside it, into `model.onnx.data`.
        overwrite: replace what stands there.
    Raises: MissingExtra without the onnx library, ExportError naming every op that has no form in ONNX,
        DestinationExists.
    """
    need_onnx()
    import onnx

    from graphwright.models.onnx.graph import to_model

    place = target_path(path)
    check_free(place, overwrite)
    model = to_model(p)
    large = sum(len(t.raw_data) for t in model.graph.initializer) > EXTERNAL
    with TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as folder:
        made = Path(folder) / place.name
        beside = {"save_as_external_data": True, "location": f"{place.name}.data"} if large else {}
        onnx.save(model, str(made), **beside)
        onnx.checker.check_model(str(made), full_check=True)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the values before what names them
            os.replace(file, place.with_name(file.name))
    return place


def run_onnx(path: StrPath, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """What onnxruntime computes from a file, on the CPU: outputs by name. Raises: MissingExtra."""
    need_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    wanted = {i.name for i in session.get_inputs()}
    runs: list[dict[str, np.ndarray]] = []
    for feed in feeds:
        found: Any = session.run(names, {k: v for k, v in feed.items() if k in wanted})
        runs.append(dict(zip(names, found, strict=True)))
    return runs


def compare_onnx(path: Path, logits: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> dict[str, Any]:
    """Logits [T, V] of the file against those of the program. Raises: VerificationFailed past `TOLERANCE`."""
    feeds = [{"ids": ids[None], "positions": np.arange(len(ids), dtype=np.int64)[None]} for ids in prompts]
    found = [run["logits"][0].astype(np.float32) for run in run_onnx(path, feeds)]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(logits, found, strict=True))
    scale = max(float(np.abs(a).max()) for a in logits)
    if not worst <= TOLERANCE * scale:
        raise VerificationFailed(
            "onnxruntime computes other logits than the program", where=path.name, expected=TOLERANCE * scale, got=worst
        )
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "max_abs": worst, "max_rel": worst / scale, "tol": TOLERANCE}
