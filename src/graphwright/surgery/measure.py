"""What a program costs and how well it does: loss on windows, parameters, bytes, operations, and measured time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from graphwright.errors import NonFinite
from graphwright.models.generation.cache import Cache
from graphwright.program import Program
from graphwright.program.cost import size
from graphwright.surgery.calibration import Calibration, Stream, host

CONTEXT, ROUNDS, WARM_UP = 128, 10, 2


def speaks(p: Program) -> bool:
    """Whether a program scores next tokens: an input `ids` and an output `logits`."""
    return "ids" in p.input_names() and "logits" in p.output_names()


def next_token_nats(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """-ln p of each token that has one before it: [B, T-1] float64 for logits [B, T, V] and ids [B, T]."""
    z = logits[:, :-1].astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    wanted = np.take_along_axis(z, ids[:, 1:, None], axis=-1)[..., 0]
    return np.log(np.exp(z).sum(axis=-1)) - wanted


def nats(stream: Stream) -> float:
    """Mean -ln p of next tokens over the windows of a stream, from where it stands."""
    total, count = 0.0, 0
    for feeds, logits in zip(stream.feeds, stream.outputs("logits"), strict=True):
        found = next_token_nats(logits, feeds["ids"])
        total, count = total + float(found.sum()), count + found.size
    return total / count if np.isfinite(total) and count else float("inf")


def drift(stream: Stream, reference: Sequence[np.ndarray]) -> float:
    """Mean squared difference of the first output from a reference, relative to the reference's mean square."""
    lost = size = 0.0
    for found, before in zip(stream.outputs(), reference, strict=True):
        lost += float(((found.astype(np.float64) - before) ** 2).sum())
        size += float((before.astype(np.float64) ** 2).sum())
    return lost / size if size else lost


def loss(stream: Stream, reference: Sequence[np.ndarray] | None = None) -> float:
    """Nats per token where the program scores tokens, else the drift from a reference."""
    return nats(stream) if speaks(stream.p) else drift(stream, reference or ())


def quality(
    p: Program, calibration: Calibration, reference: Program | None = None, tokenizer: Any = None
) -> dict[str, float]:
    """How a program does on the held-out windows: {nats, perplexity, bits_per_byte} or {drift}.

    `bits_per_byte` needs a tokenizer, which tells how many bytes the scored tokens are.
    Raises: CalibrationLeak if a window was learned from; UsageError without held-out windows.
    """
    calibration.check_held_out(calibration.held)
    stream = Stream(p, calibration.feeds(p, held=True))
    if not speaks(p):
        before = list(Stream(reference if reference is not None else p, stream.feeds).outputs())
        return {"drift": drift(stream, before)}
    found = nats(stream)
    facts = {"nats": found, "perplexity": exp(min(found, 700.0))}
    if tokenizer is not None:
        windows = [row[1:].tolist() for feeds in stream.feeds for row in feeds["ids"]]
        size = sum(len(tokenizer.decode(ids, skip_special_tokens=False).encode()) for ids in windows)
        facts["bits_per_byte"] = found * sum(map(len, windows)) / (log(2) * max(size, 1))
    return facts


def facts(
    p: Program, calibration: Calibration, reference: Program | None = None, tokenizer: Any = None
) -> dict[str, float]:
    """What a program takes, {parameters, bytes, flops} of one token (sample), and its `quality`."""
    taken = size(p)
    found = {"parameters": taken.params, "bytes": taken.bytes, "flops": taken.flops}
    return found | quality(p, calibration, reference, tokenizer)


def speed(p: Program, feeds: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Measured milliseconds: {ms_per_token, tokens_per_s} of decoding behind 128 tokens; {ms_per_run} of others."""
    if not speaks(p):
        plan = p.compile(feeds, freeze=True)
        return {"ms_per_run": _median(lambda: plan(feeds))}
    context = np.zeros((1, CONTEXT), np.int64)
    cache = Cache(p, 1, CONTEXT + ROUNDS + WARM_UP)
    try:
        cache.step(context)
        ms = _median(lambda: cache.step(np.zeros((1, 1), np.int64)))
    except NonFinite:  # a model that is broken has no speed
        return {"ms_per_token": float("nan"), "tokens_per_s": float("nan")}
    return {"ms_per_token": ms, "tokens_per_s": 1e3 / ms}


def _median(call: Any) -> float:
    times = []
    for _ in range(ROUNDS + WARM_UP):
        started = perf_counter()
        call()
        times.append((perf_counter() - started) * 1e3)
    return median(times[WARM_UP:])


def loss_gradients(
    p: Program, feeds: Sequence[Mapping[str, np.ndarray]], paths: Sequence[str]
) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Chunk by chunk: path -> (value, gradient of the chunk's summed -ln p of next tokens by it)."""
    for chunk in feeds:
        for start in range(0, len(chunk["ids"]), per := max(1024 // chunk["ids"].shape[1], 1)):
            given = {name: np.ascontiguousarray(a[start : start + per]) for name, a in chunk.items()}
            batch, length = given["ids"].shape
            with p.run(given, keep=[*paths]) as run:
                logits = run["logits"].to_numpy("float64")
                values = {path: host(run.value(path)) for path in paths}
            z = np.exp(logits - logits.max(axis=-1, keepdims=True))
            seed = z / z.sum(axis=-1, keepdims=True)
            rows, places = np.ogrid[:batch, : length - 1]
            seed[rows, places, given["ids"][:, 1:]] -= 1
            seed[:, -1] = 0
            gradient = p.grad("logits", list(paths), {"B": batch, "T": length}, seeded=True)
            name = next(n for n in gradient.input_names() if n not in given)
            kind = p.spec(p.output("logits")).dtype.name
            found = gradient.run({**given, name: seed.astype(kind)}, keep="outputs")
            yield {path: (values[path], host(found[f"grad.{path}"])) for path in paths}
