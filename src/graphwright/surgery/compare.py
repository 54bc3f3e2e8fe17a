"""Comparison of two programs by their outputs and by their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, nan, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import ShapeError
from graphwright.metrics import nll
from graphwright.report import Report, table
from graphwright.settings import Range
from graphwright.surgery.calibration import Calibration, Stream, chunked, fixed_batch, named, windows_of
from graphwright.surgery.matrices import program_of
from graphwright.surgery.measure import Drift, scores_classes, scores_tokens, without_padding

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program


GREEDY, PROMPT = 16, 8
"""Number of tokens that are generated greedily, and of prompt tokens before them."""


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonReport(Report):
    """Differences between two programs a and b.

    Attributes:
        outputs: differences of the first output over all inputs: `max_abs`, `relative` (‖b - a‖ / ‖a‖). Programs that
            score tokens or classes also have `kl_mean`, `kl_max` (KL(a ‖ b), nats), `top1` (share of equal most likely
            ones); those that score tokens `greedy` (share of equal tokens in greedy continuations of `prompts`
            prompts), `perplexity` [a, b] (NaN if windows have one token).
        weights: dict from key to {equal, max_abs, relative, cosine}, for keys that have equal shapes in a and b.
        missing, extra, reshaped: keys of weights that b lacks, that a lacks, and whose shapes differ.
    """

    outputs: dict[str, Any]
    weights: dict[str, dict[str, Any]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: tuple[str, ...]
    FIGURES: ClassVar = ("equal",)

    @property
    def equal(self) -> bool:
        """True if both have the same weights (at least one), with equal values, and the outputs do not differ."""
        same = bool(self.weights) and all(w["equal"] for w in self.weights.values())
        return same and not (self.missing or self.extra or self.reshaped) and self.outputs["max_abs"] == 0

    def _text(self) -> str:
        o = self.outputs
        state = "equal" if self.equal else "different"
        lines = [f"{state}: outputs differ by up to {o['max_abs']:.4g}, relative {o['relative']:.4g}"]
        if "top1" in o:
            same = f"top-1 equal {100 * o['top1']:.1f} %"
            same += f", greedy tokens {100 * o['greedy']:.1f} %" if "greedy" in o else ""
            lines.append(f"KL {o['kl_mean']:.4g} nats on average, {o['kl_max']:.4g} at most; {same}")
        if "perplexity" in o:
            before, after = o["perplexity"]
            lines.append(f"perplexity {before:.4f} => {after:.4f}")
        changed = {k: w for k, w in self.weights.items() if not w["equal"]}
        others = f"{len(self.reshaped)} of a different shape, {len(self.missing)} missing, {len(self.extra)} extra"
        lines.append(f"{len(self.weights) - len(changed)} weights equal, {len(changed)} changed, {others}")
        worst = sorted(changed, key=lambda k: -changed[k]["relative"])[:10]
        lines += [f"  {k}: relative {changed[k]['relative']:.4g}, cosine {changed[k]['cosine']:.6f}" for k in worst]
        for name, keys in (("missing", self.missing), ("extra", self.extra), ("reshaped", self.reshaped)):
            lines += [f"  {name}: {', '.join(keys[:6])}{', ...' if len(keys) > 6 else ''}"] if keys else []
        return "\n".join(lines)


@checked
def compare(a: Program | Model, b: Program | Model, inputs: Any, *, prompts: int = 4) -> ComparisonReport:
    """Run two programs on the same inputs, and compare their weights by name.

    Args:
        a, b: programs or models with the same inputs and outputs.
        inputs: windows of token ids [n, T]; ids [N], a text or texts, which are cut into windows of up to 512 tokens,
            without the rest; arrays by input name, or of the only input unless it is a text; or a `Calibration`, whose
            held-out windows are used.
        prompts: number of windows whose first 8 tokens both programs continue greedily, >= 1.
    Raises: ShapeError if the outputs have different shapes; UsageError if there are no inputs, or for `prompts`.
    """
    Range(1, whole=True).check("prompts", prompts)
    p, q = program_of(a), program_of(b)
    feeds = _feeds(p, inputs, getattr(a, "tokenizer", None) or getattr(b, "tokenizer", None))
    ours, theirs = dict(p.constants()), dict(q.constants())
    common = [k for k in ours if k in theirs]
    reshaped = tuple(k for k in common if ours[k].shape != theirs[k].shape)
    return ComparisonReport(_outputs(p, q, feeds, prompts), {k: _weight(p, q, k) for k in common if k not in reshaped},
                            tuple(k for k in ours if k not in theirs), tuple(k for k in theirs if k not in ours),
                            reshaped)  # fmt: skip


def _feeds(p: Program, inputs: Any, tokenizer: Any) -> list[dict[str, np.ndarray]]:
    if isinstance(inputs, Calibration):
        return inputs.feeds(p, held=True)
    return chunked(p, windows_of(named(p, inputs), 512, tokenizer)[0], fixed_batch(p) or 4)


def _outputs(p: Program, q: Program, feeds: Sequence[Mapping[str, np.ndarray]], prompts: int) -> dict[str, Any]:
    tokens_scored = scores_tokens(p) and scores_tokens(q)
    drift = Drift(scores=tokens_scored or (scores_classes(p) and scores_classes(q)))
    losses, tokens = np.zeros(2), 0
    for f, x, y in zip(feeds, Stream(p, feeds).outputs(), Stream(q, feeds).outputs(), strict=True):
        if x.shape != y.shape:
            raise ShapeError("the first outputs of the programs have different shapes", expected=x.shape, got=y.shape)
        drift.add(*(without_padding(f, z) for z in (x, y)))
        if tokens_scored:
            losses += [float(nll(z[:, :-1], f["ids"][:, 1:]).sum()) for z in (x, y)]
            tokens += f["ids"][:, 1:].size
    found: dict[str, Any] = {"max_abs": drift.max_abs, "relative": drift.relative}
    if drift.scores:
        found |= {"kl_mean": drift.kl, "kl_max": drift.kl_max, "top1": drift.same_top}
    if tokens_scored:
        starts = np.concatenate([f["ids"] for f in feeds])[:prompts, :PROMPT]
        shares = np.mean([np.equal(_greedy(p, row), _greedy(q, row)) for row in starts])
        found |= {"greedy": float(shares), "prompts": len(starts),
                  "perplexity": [exp(min(s / tokens, 700.0)) if tokens else nan for s in losses]}  # fmt: skip
    return found


def _greedy(p: Program, ids: np.ndarray) -> list[int]:
    """Return the 16 tokens that greedy decoding appends to a prompt."""
    for _ in range(GREEDY):
        feeds = chunked(p, {"ids": ids[None]}, 1)
        ids = np.append(ids, int(next(Stream(p, feeds).outputs("logits"))[0, -1].argmax()))
    return ids[-GREEDY:].tolist()


def _weight(p: Program, q: Program, key: str) -> dict[str, Any]:
    if p.weights.digest(key) == q.weights.digest(key):
        return {"equal": True, "max_abs": 0.0, "relative": 0.0, "cosine": 1.0}
    x, y = (r.weights.array(key).to_numpy("float64").reshape(-1) for r in (p, q))
    a, b, moved = float(np.linalg.norm(x)), float(np.linalg.norm(y)), float(np.linalg.norm(y - x))
    return {"equal": False, "max_abs": float(np.abs(y - x).max(initial=0.0)),
            "relative": moved / a if a else inf if moved else 0.0,
            "cosine": float(x @ y) / (a * b) if a and b else 0.0}  # fmt: skip


TOP = 10
"""Layers that the text shows."""


@dataclass(frozen=True, slots=True)
class Moments(Report):
    """Count, mean, population standard deviation, minimum and maximum of some numbers.

    Attributes:
        squares: sum of squared differences from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = inf
    most: float = -inf

    @staticmethod
    def of(values: Any) -> Moments:
        """Return the moments of the entries of an array."""
        a = np.asarray(values, np.float64).reshape(-1)
        if not a.size:
            return Moments()
        mean = float(a.mean())
        return Moments(a.size, mean, float(((a - mean) ** 2).sum()), float(a.min()), float(a.max()))

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return sqrt(self.squares / self.count) if self.count else 0.0

    def __or__(self, other: Moments) -> Moments:
        """Merge the moments of two sets of numbers into those of their union (Chan, Golub and LeVeque 1979)."""
        if not self.count or not other.count:
            return self if self.count else other
        count, step = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + step**2 * self.count * other.count / count
        mean = self.mean + step * other.count / count
        return Moments(count, mean, squares, min(self.least, other.least), max(self.most, other.most))

    def to_json(self) -> dict[str, float | None]:
        """Return a JSON-serialisable dict; `min` and `max` are None if there are no numbers."""
        ends = (self.least, self.most) if self.count else (None, None)
        return {"count": self.count, "mean": self.mean, "std": self.std, "min": ends[0], "max": ends[1]}


@dataclass(frozen=True, slots=True, repr=False)
class ErrorReport(Report):
    """Statistics of the errors of each layer, with further figures of the layer.

    Attributes:
        layers: dict from layer name to the moments of the layer's errors.
        facts: dict from layer name to further figures: `drift` (relative, of the layer's output), `ratio` (parameters
            before / after), `seconds`.
    """

    layers: dict[str, Moments] = field(default_factory=dict)
    facts: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, errors: Any, **facts: float) -> None:
        """Add errors (numbers or `Moments`) to the statistics of layer `name`; merge `facts` into its other figures."""
        found = errors if isinstance(errors, Moments) else Moments.of(errors)
        self.layers[name] = self.layers.get(name, Moments()) | found
        if facts:
            self.facts[name] = {**self.facts.get(name, {}), **facts}

    @property
    def whole(self) -> Moments:
        """Moments of the errors of all layers together."""
        total = Moments()
        for found in self.layers.values():
            total |= found
        return total

    def __or__(self, other: ErrorReport) -> ErrorReport:
        """Merge two reports: the errors of layers that both have are pooled."""
        made = ErrorReport()
        for report in (self, other):
            for name, found in report.layers.items():
                made.add(name, found, **report.facts.get(name, {}))
        return made

    def worst(self) -> list[str]:
        """Return the layer names, sorted by the largest error of each layer, in descending order."""
        return sorted(self.layers, key=lambda name: (-self.layers[name].most, name))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; its `layers` are in the order of `worst`."""
        rows = [{"layer": n, **self.layers[n].to_json(), **self.facts.get(n, {})} for n in self.worst()]
        return {"global": self.whole.to_json(), "layers": rows}

    def _text(self) -> str:
        rows = [{"layer": "all layers", **self.whole.to_json()}, *self.to_json()["layers"]]
        more = [f"... {len(rows) - 1 - TOP} more layers, in to_json()"] if len(rows) > TOP + 1 else []
        columns = dict.fromkeys(name for row in rows[: TOP + 1] for name in row)
        return "\n".join([table(rows[: TOP + 1], list(columns)), *more])
