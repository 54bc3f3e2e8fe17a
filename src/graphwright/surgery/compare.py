"""Two programs compared by what they compute and by their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.program import Program
from graphwright.surgery.calibration import Calibration, Stream
from graphwright.surgery.measure import next_token_nats, speaks

if TYPE_CHECKING:
    from graphwright.models.model import Model

GREEDY, PROMPT = 16, 8
"""Tokens continued, behind so many of a window."""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """What two programs differ in.

    Attributes:
        outputs: of the first output over all inputs: `max_abs`, `relative` (‖b - a‖ / ‖a‖); of scores of tokens also
            `kl_mean`, `kl_max` (nats, of a against b), `top1` (share of equal first tokens), `greedy` (share of equal
            tokens in greedy continuations), `prompts`, `perplexity` [a, b].
        weights: key -> {equal, max_abs, relative, cosine} for each that both have in one shape.
        missing, extra, reshaped: keys that b lacks, that a lacks, and those of two shapes.
    """

    outputs: dict[str, Any]
    weights: dict[str, dict[str, Any]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if there are weights, all of them the same, and the outputs do not differ."""
        same = bool(self.weights) and all(w["equal"] for w in self.weights.values())
        return same and not (self.missing or self.extra or self.reshaped) and self.outputs["max_abs"] == 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "equal": self.equal, "outputs": self.outputs, "weights": self.weights, "missing": list(self.missing),
            "extra": list(self.extra), "reshaped": list(self.reshaped),
        }  # fmt: skip

    def __repr__(self) -> str:
        o = self.outputs
        lines = [f"{'equal' if self.equal else 'different'}: outputs differ by up to {o['max_abs']:.4g}, "
                 f"relative {o['relative']:.4g}"]  # fmt: skip
        if "top1" in o:
            same = f"top-1 equal {100 * o['top1']:.1f} %, greedy tokens {100 * o['greedy']:.1f} %"
            was, now = o["perplexity"]
            lines.append(f"KL {o['kl_mean']:.4g} nats in the mean, {o['kl_max']:.4g} at most; {same}")
            lines.append(f"perplexity {was:.4f} => {now:.4f}")
        changed = {k: w for k, w in self.weights.items() if not w["equal"]}
        others = f"{len(self.reshaped)} of another shape, {len(self.missing)} missing, {len(self.extra)} extra"
        lines.append(f"{len(self.weights) - len(changed)} weights equal, {len(changed)} changed, {others}")
        worst = sorted(changed, key=lambda k: -changed[k]["relative"])[:10]
        lines += [f"  {k}: relative {changed[k]['relative']:.4g}, cosine {changed[k]['cosine']:.6f}" for k in worst]
        for name, keys in (("missing", self.missing), ("extra", self.extra), ("reshaped", self.reshaped)):
            lines += [f"  {name}: {', '.join(keys[:6])}{', ...' if len(keys) > 6 else ''}"] if keys else []
        return "\n".join(lines)


def compare(a: Program | Model, b: Program | Model, inputs: Any, *, prompts: int = 4) -> Comparison:
    """Run two programs on the same inputs and look at their weights by name.

    Args:
        a, b: programs, or models; with the same inputs and outputs.
        inputs: windows of token ids [n, T], feeds by input name, or a `Calibration`: its held-out side.
        prompts: windows of which the beginning is continued greedily by both.
    Raises: ShapeError if the outputs have other shapes; UsageError for no inputs.
    """
    p, q = (x if isinstance(x, Program) else x.program for x in (a, b))
    feeds = _feeds(p, inputs)
    keys = dict(p.constants()), dict(q.constants())
    common = [k for k in keys[0] if k in keys[1]]
    reshaped = tuple(k for k in common if keys[0][k].shape != keys[1][k].shape)
    return Comparison(
        _outputs(p, q, feeds, prompts),
        {k: _weight(p, q, k) for k in common if k not in reshaped},
        tuple(k for k in keys[0] if k not in keys[1]),
        tuple(k for k in keys[1] if k not in keys[0]),
        reshaped,
    )


def _feeds(p: Program, inputs: Any) -> list[dict[str, np.ndarray]]:
    if isinstance(inputs, Calibration):
        return inputs.feeds(p, held=True)
    arrays = {str(k): np.asarray(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else np.asarray(inputs)
    if not (arrays if isinstance(arrays, dict) else arrays.size):
        raise UsageError("nothing to compare on", expected="windows of ids [n, T], or feeds")
    rows = arrays if isinstance(arrays, dict) else {"ids": np.atleast_2d(arrays)}
    if "ids" in rows and "positions" in p.input_names() and "positions" not in rows:
        rows["positions"] = np.broadcast_to(np.arange(rows["ids"].shape[1]), rows["ids"].shape)
    count = len(next(iter(rows.values())))
    return [{k: np.ascontiguousarray(v[i : i + 4]) for k, v in rows.items()} for i in range(0, count, 4)]


def _outputs(p: Program, q: Program, feeds: Sequence[Mapping[str, np.ndarray]], prompts: int) -> dict[str, Any]:
    most = apart = size = kl = kl_most = same = rows = nats_a = nats_b = tokens = 0.0
    tells = speaks(p) and speaks(q)
    for f, x, y in zip(feeds, Stream(p, feeds).outputs(), Stream(q, feeds).outputs(), strict=True):
        if x.shape != y.shape:
            raise ShapeError("the outputs have two shapes", expected=x.shape, got=y.shape)
        x, y = x.astype(np.float64), y.astype(np.float64)
        difference = y - x
        most = max(most, float(np.abs(difference).max(initial=0.0)))
        apart, size = apart + float((difference**2).sum()), size + float((x**2).sum())
        if tells:
            la, lb = _log_softmax(x), _log_softmax(y)
            divergence = (np.exp(la) * (la - lb)).sum(axis=-1)
            kl, kl_most = kl + float(divergence.sum()), max(kl_most, float(divergence.max()))
            same, rows = same + float((x.argmax(-1) == y.argmax(-1)).sum()), rows + divergence.size
            nats_a += float(next_token_nats(x, f["ids"]).sum())
            nats_b += float(next_token_nats(y, f["ids"]).sum())
            tokens += f["ids"][:, 1:].size
    found: dict[str, Any] = {"max_abs": most, "relative": (apart / size) ** 0.5 if size else (inf if apart else 0.0)}
    if tells:
        starts = np.concatenate([f["ids"] for f in feeds])[:prompts, :PROMPT]
        shares = np.mean([np.equal(_greedy(p, row), _greedy(q, row)) for row in starts])
        found |= {
            "kl_mean": max(kl / rows, 0.0), "kl_max": max(kl_most, 0.0), "top1": same / rows, "greedy": float(shares),
            "prompts": len(starts), "perplexity": [exp(min(n / max(tokens, 1), 700.0)) for n in (nats_a, nats_b)],
        }  # fmt: skip
    return found


def _greedy(p: Program, ids: np.ndarray) -> list[int]:
    """Tokens that follow, each the likeliest."""
    for _ in range(GREEDY):
        feeds = _feeds(p, ids[None])
        ids = np.append(ids, int(next(Stream(p, feeds).outputs("logits"))[0, -1].argmax()))
    return ids[-GREEDY:].tolist()


def _weight(p: Program, q: Program, key: str) -> dict[str, Any]:
    if p.weights.digest(key) == q.weights.digest(key):
        return {"equal": True, "max_abs": 0.0, "relative": 0.0, "cosine": 1.0}
    x, y = (r.weights.array(key).to_numpy("float64").reshape(-1) for r in (p, q))
    norms = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    apart = float(np.linalg.norm(y - x))
    return {
        "equal": False,
        "max_abs": float(np.abs(y - x).max(initial=0.0)),
        "relative": apart / norms[0] if norms[0] else (inf if apart else 0.0),
        "cosine": float(x @ y) / (norms[0] * norms[1]) if norms[0] and norms[1] else 0.0,
    }


def _log_softmax(x: np.ndarray) -> np.ndarray:
    z = x - x.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
