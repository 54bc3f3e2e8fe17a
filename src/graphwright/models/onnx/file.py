"""Writing an ONNX file, and running it with onnxruntime beside the program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from graphwright.errors import MissingExtra
from graphwright.files import StrPath, check_free, target_path
from graphwright.models.errors import VerificationFailed
from graphwright.ops.onnx import OPSET
from graphwright.program import Program

EXTERNAL = 1_500_000_000
"""Bytes of weights from which on they lie in a file of their own: one protobuf message ends at 2 GiB."""
TOLERANCE = 1e-4
"""Largest difference of results, relative to the largest entry, that other kernels may make in float32."""


_STEPS = 8
"""Tokens behind each prompt that a file with cache is checked on."""


def need_onnx() -> None:
    """Raises: MissingExtra without the libraries that write ONNX and run it."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        raise MissingExtra("onnx", "ONNX")


def save_onnx(p: Program, path: StrPath, *, overwrite: bool = False, opset: int = OPSET, cache: bool = False) -> Path:
    """Write a program as an ONNX file; named sizes stay open.

    Args:
        p: what to write.
        path: `model.onnx`; weights past 1.5 GB go beside it, into `model.onnx.data`.
        overwrite: replace what stands there.
        opset, cache: see `models.onnx.graph.to_model`.
    Raises: MissingExtra without the onnx library, ExportError naming every op that has no form in ONNX,
        DestinationExists, UsageError for another opset.
    """
    need_onnx()
    import onnx

    from graphwright.models.onnx.graph import to_model

    place = target_path(path)
    check_free(place, overwrite)
    model = to_model(p, opset=opset, cache=cache)
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
    session = _session(path)
    return [_run(session, feed) for feed in feeds]


def run_cached(path: StrPath, ids: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
    """Logits [B, T, V] of a file with cache for ids [B, T] fed in pieces that end at `cuts`, rows handed on.

    Raises: MissingExtra.
    """
    session = _session(path)
    held = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    rows = {i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), kinds[i.type]) for i in held}
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    found = []
    for start, end in pairwise((0, *cuts, ids.shape[1])):
        made = _run(session, {"ids": ids[:, start:end], "positions": places[:, start:end].copy(), **rows})
        found.append(made["logits"])
        rows = {name: made[name.replace("past_key_values", "present")] for name in rows}
    return np.concatenate(found, axis=1)


def _session(path: StrPath) -> Any:
    need_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own have no other class in common
        fix = 'other runtimes may; for this one open the model with compute="float32"'
        words = str(error).splitlines()[0][:300]
        raise VerificationFailed(
            "onnxruntime cannot run this file", where=Path(path).name, got=words, fix=fix
        ) from error


def _run(session: Any, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name; what the file does not read may be fed too."""
    names, wanted = [o.name for o in session.get_outputs()], {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: v for k, v in feed.items() if k in wanted}), strict=True))


def compare_onnx(
    path: Path,
    prompts: Sequence[np.ndarray],
    logits: Sequence[np.ndarray],
    greedy: Sequence[np.ndarray] | None = None,
) -> dict[str, Any]:
    """Logits of a file against those of the program; of one with cache also the tokens chosen behind each prompt.

    Args:
        path: of the file.
        prompts: ids [T].
        logits: of the program, [T, V] each.
        greedy: for a file with cache what the program chose; each token must be within `TOLERANCE` of the best here.
    Raises: VerificationFailed past `TOLERANCE`.
    """
    feeds = [{"ids": ids[None], "positions": np.arange(len(ids), dtype=np.int64)[None]} for ids in prompts]
    if greedy is None:
        found = [run["logits"][0] for run in run_onnx(path, feeds)]
    else:
        texts = [np.concatenate([ids, tokens[:_STEPS]]) for ids, tokens in zip(prompts, greedy, strict=True)]
        found = [run_cached(path, t[None], range(len(p), len(t)))[0] for p, t in zip(prompts, texts, strict=True)]
    scale = max(float(np.abs(a).max()) for a in logits)
    pairs = zip(logits, found, strict=True)
    worst = max(float(np.abs(a - b[: len(a)].astype(np.float32)).max()) for a, b in pairs)
    if not worst <= TOLERANCE * scale:
        raise VerificationFailed(
            "onnxruntime computes other logits than the program", where=path.name, expected=TOLERANCE * scale, got=worst
        )
    for ids, tokens, scores in zip(prompts, greedy or (), found if greedy is not None else (), strict=True):
        rows = scores[len(ids) - 1 : -1]
        short = rows.max(-1) - rows[np.arange(len(rows)), tokens[: len(rows)]]
        if not short.max(initial=0) <= 2 * TOLERANCE * scale:
            at = int(short.argmax())
            raise VerificationFailed(
                "onnxruntime chooses another token than the program",
                where=f"{path.name}, token {at} behind a prompt",
                expected=int(tokens[at]),
                got=int(rows[at].argmax()),
            )
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "max_abs": worst, "max_rel": worst / scale, "tol": TOLERANCE}
