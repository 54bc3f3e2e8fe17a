"""Measurements of a program: loss on calibration windows, size, time, and drift from another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, inf, log, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.errors import NonFinite
from graphwright.metrics import nll
from graphwright.models.generation.text import MASK
from graphwright.models.generation.timed import decode_calls
from graphwright.models.metrics import kl, log_softmax, scored_bytes
from graphwright.program.cost import size
from graphwright.report import Report
from graphwright.surgery.calibration import Calibration, Stream, as_float, chunked
from graphwright.timing import TimeComparison, compare_times, measure_time

if TYPE_CHECKING:
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


def scores_tokens(p: Program) -> bool:
    """Return whether a program scores next tokens: it has an input `ids` and an output `logits`."""
    return "ids" in p.input_names() and "logits" in p.output_names()


def scores_classes(p: Program) -> bool:
    """Return whether the first output has scores of classes in its last dimension, i.e. is named `logits` or so.

    Maps [B, C, H, W] have their classes in another dimension, and are compared by their values alone.
    """
    name = p.output_names()[0]
    spec = p.spec(p.output(name))
    return name.endswith("logits") and 2 <= len(spec.shape) <= 3 and spec.shape[-1] != 1


def without_padding(feeds: Mapping[str, np.ndarray], y: np.ndarray) -> np.ndarray:
    """Return the rows of an output [B, T, ..] of which `attention_mask` [B, T] is not 0; other outputs unchanged."""
    mask = feeds.get(MASK)
    return y if mask is None or y.shape[:2] != mask.shape or mask.all() else y[mask != 0]


def nats(stream: Stream) -> float:
    """Return the mean -ln p of next tokens over the windows of a stream; infinity if the sum is not finite."""
    total, count = 0.0, 0
    for nats, tokens in stream.each(_nats, [stream.p.output("logits")]):
        total, count = total + nats, count + tokens
    return total / count if np.isfinite(total) and count else inf


def _nats(feeds: Mapping[str, np.ndarray], found: Sequence[NDArray]) -> tuple[float, int]:
    """Return the sum of -ln p of the next tokens of a chunk, and their number."""
    losses = nll(as_float(found[0])[:, :-1], feeds["ids"][:, 1:])
    return float(losses.sum()), losses.size


def squared_drift(stream: Stream, reference: Sequence[np.ndarray]) -> float:
    """Return ‖output - reference‖² / ‖reference‖² of the first output without padding, over all chunks of a stream."""
    lost = whole = 0.0
    for feeds, *pair in zip(stream.feeds, stream.outputs(), reference, strict=True):
        found, before = (without_padding(feeds, y).astype(np.float64) for y in pair)
        lost += float(((found - before) ** 2).sum())
        whole += float((before**2).sum())
    return lost / whole if whole else lost


def loss(stream: Stream, reference: Sequence[np.ndarray] | None = None) -> float:
    """Return nats per token if the program scores tokens, else the squared drift from the outputs `reference`."""
    return nats(stream) if scores_tokens(stream.p) else squared_drift(stream, reference or ())


def quality(
    p: Program, calibration: Calibration, reference: Program | None = None, tokenizer: Any = None
) -> dict[str, float]:
    """Return a dict of nats (per token), perplexity and bits_per_byte on the held-out windows.

    For a program that scores no tokens, the dict has the drift of its first output from that of `reference`: relative,
    max_abs, and kl and same_top for scores of classes; see `Drift`.
    `bits_per_byte` needs a tokenizer, to count the bytes of the scored tokens.
    Raises: CalibrationLeak if a held-out window is also a learning window; UsageError if no window is held out.
    """
    calibration.check_held_out(calibration.held)
    stream = calibration.stream(p, held=True)
    if not scores_tokens(p):
        before = stream.of(reference if reference is not None else p)
        return output_drift(before, stream).figures()
    found = nats(stream)
    facts = {"nats": found, "perplexity": exp(min(found, 700.0))}
    if tokenizer is not None:
        windows = [row for feeds in stream.feeds for row in feeds["ids"]]
        tokens, nbytes = sum(len(w) - 1 for w in windows), scored_bytes(windows, tokenizer)
        facts["bits_per_byte"] = found * tokens / (log(2) * nbytes) if nbytes else nan
    return facts


def figures(
    p: Program, calibration: Calibration, reference: Program | None = None, tokenizer: Any = None
) -> dict[str, float]:
    """Return a dict of parameters, bytes, flops (of one token or sample) and the figures of `quality`."""
    taken = size(p)
    found = {"parameters": taken.params, "bytes": taken.bytes, "flops": taken.flops}
    return found | quality(p, calibration, reference, tokenizer)


def activation_memory(program: Program, inputs: Mapping[str, Any]) -> int:
    """Return the bytes of memory that a run with these inputs (arrays by input name) needs for activations.

    Raises: the errors of `Program.compile`.
    """
    return program.compile(inputs).arena_bytes


def _timed(feeds: Mapping[str, np.ndarray], *programs: Program) -> Sequence[Callable[[], object]]:
    """Return functions that decode tokens after 128 others, or run on `feeds` if the programs score no tokens."""
    if all(map(scores_tokens, programs)):
        return decode_calls(*programs)
    return [partial(p.compile(feeds, freeze=True), feeds) for p in programs]


def milliseconds(p: Program, feeds: Mapping[str, np.ndarray]) -> float:
    """Measure the time per token (or run, if p scores no tokens) in ms; NaN if the outputs are not finite."""
    try:
        return measure_time(_timed(feeds, p)[0])
    except NonFinite:
        return float("nan")


def compare_speed(before: Program, after: Program, feeds: Mapping[str, np.ndarray]) -> TimeComparison | None:
    """Compare the times per token (or run) of two programs in alternating rounds; None if outputs are not finite."""
    try:
        old, new = _timed(feeds, before, after)
        return compare_times(old, new)
    except NonFinite:
        return None


def gradient_chunks(p: Program, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Split chunks of data into chunks of about 1024 tokens, as gradients need more memory."""
    return [small for f in feeds for small in chunked(p, f, max(1024 // f["ids"].shape[1], 1))]


def loss_gradients(
    p: Program, feeds: Mapping[str, np.ndarray], wrt: Sequence[str], keep: Sequence[Value] = ()
) -> tuple[dict[Value, np.ndarray], dict[str, np.ndarray]]:
    """Return a dict of the values `keep`, and the gradients of Σ -ln p(next token) by path, for all `wrt`."""
    batch, length = feeds["ids"].shape
    with p.run(feeds, keep=[*keep]) as run:
        logits = run["logits"].to_numpy("float64")
        values = {value: as_float(run.value(value)) for value in keep}
    seed = np.exp(log_softmax(logits))
    rows, columns = np.ogrid[:batch, : length - 1]
    seed[rows, columns, feeds["ids"][:, 1:]] -= 1
    seed[:, -1] = 0
    gradient = p.grad("logits", list(wrt), {"B": batch, "T": length}, seeded=True)
    name = next(n for n in gradient.input_names() if n not in feeds)
    kind = p.spec(p.output("logits")).dtype.name
    found = gradient.run({**feeds, name: seed.astype(kind)}, keep="outputs")
    return values, {path: as_float(found[f"grad.{path}"]) for path in wrt}


class Drift(Report):
    """Difference of one value [.., n] between an old and a new program, over all calibration rows.

    Attributes:
        relative: ‖new - old‖ / ‖old‖, Frobenius.
        max_abs: largest absolute difference of an entry.
        kl, kl_max: for values that are logits, mean and largest KL(old ‖ new) of the softmax, nats; else None and 0.
        same_top: for logits, share of rows whose largest entry (the greedy token) has the same index; else None.
        rows: number of rows.
    """

    FIGURES = ("relative", "max_abs", "kl", "same_top", "rows")

    def __init__(self, scores: bool = False) -> None:
        self.scores, self.max_abs, self.rows, self.kl_max = scores, 0.0, 0, 0.0
        self._squared = self._norm = self._kl = 0.0
        self._same = 0

    def add(self, old: np.ndarray, new: np.ndarray) -> None:
        """Accumulate the differences of one chunk: `old` and `new` are the value [.., n] in the two programs."""
        a, b = (np.atleast_1d(x).reshape(-1, *x.shape[-1:]).astype(np.float64) for x in (old, new))
        difference = b - a
        self._squared += float(np.vdot(difference, difference))
        self._norm += float(np.vdot(a, a))
        self.max_abs = max(self.max_abs, float(np.abs(difference).max(initial=0.0)))
        self.rows += len(a)
        if self.scores:
            divergence = kl(a, b)
            self._kl += float(divergence.sum())
            self.kl_max = max(self.kl_max, float(divergence.max()))
            self._same += int((a.argmax(-1) == b.argmax(-1)).sum())

    @property
    def relative(self) -> float:
        """‖new - old‖ / ‖old‖; infinite if only the old value is zero."""
        return (self._squared / self._norm) ** 0.5 if self._norm else inf if self._squared else 0.0

    @property
    def kl(self) -> float | None:
        """Mean KL(old ‖ new) in nats; None if the rows are not logits."""
        return max(self._kl / self.rows, 0.0) if self.scores else None

    @property
    def same_top(self) -> float | None:
        """Share of rows whose largest entry has the same index; None if the rows are not logits."""
        return self._same / self.rows if self.scores else None

    def figures(self) -> dict[str, float]:
        """Return a dict of relative, max_abs and, for logits, kl and same_top."""
        found = {"relative": self.relative, "max_abs": self.max_abs, "kl": self.kl, "same_top": self.same_top}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        return f"{drift_text(self.figures())} over {self.rows} rows"


def drift_text(figures: Mapping[str, float]) -> str:
    """Return the figures of a `Drift` as text."""
    moved = f"differ by {figures['relative']:.3g} relative, {figures['max_abs']:.3g} at most"
    if "kl" not in figures:
        return moved
    return f"{moved}; KL {figures['kl']:.3g} nats; top-1 equal {figures['same_top']:.2%}"


def output_drift(before: Stream, after: Stream) -> Drift:
    """Return the drift of the first output, without padding, between two streams over the same data."""
    drift = Drift(scores=scores_tokens(before.p) or scores_classes(before.p))
    for feeds, *pair in zip(before.feeds, before.outputs(), after.outputs(), strict=True):
        drift.add(*(without_padding(feeds, y) for y in pair))
    return drift


def measure_drift(
    before: Program, after: Program, calibration: Calibration, layers: Sequence[str] = ()
) -> tuple[Drift, dict[str, Drift]]:
    """Measure how far the first output, and the nodes `layers`, of two programs differ on calibration data.

    Args:
        before, after: programs with the inputs of the calibration data.
        calibration: its learning windows are used, not the held-out ones: drift does not measure quality.
        layers: paths of nodes that both programs have.
    Returns: the drift of the output, and a dict from path to drift.
    """
    name, inner = before.output_names()[0], {path: Drift() for path in layers}
    end = Drift(scores=scores_tokens(before) or scores_classes(before))
    for feeds in calibration.feeds(before):
        runs = [p.run(feeds, keep="outputs", capture=list(layers)) for p in (before, after)]
        end.add(*(without_padding(feeds, r[name].to_numpy("float64")) for r in runs))
        for path, drift in inner.items():
            drift.add(*(r.value(path).to_numpy("float64") for r in runs))
    return end, inner
