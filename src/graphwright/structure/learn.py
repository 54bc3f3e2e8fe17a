"""Learned pruning of a model: train gates on its units by distillation from the model itself, then harden them.

The journal gets two entries of author `gate`, for adding and for hardening the gates, and one in between if weights are
trained too. The penalty is a budget that falls to the target over the first 30 % of the steps (`losses.budget`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError, check_type
from graphwright.models.model import Model
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.settings import AtLeastOne, AtLeastTwo, NotNegative, Positive, Seed, Settings, Size
from graphwright.signatures import keywords
from graphwright.structure.elements import Element
from graphwright.structure.graph import DifferentiableGraph
from graphwright.structure.losses import budget, distill
from graphwright.structure.optimizer import JointOptimizer
from graphwright.structure.policy import TopPolicy
from graphwright.structure.report import Discretized

if TYPE_CHECKING:
    from graphwright.models import Model

KINDS = ("heads", "kv_groups", "neurons", "experts", "layers")
_EVERY = 5  # steps between two rows of the history
_ROWS = 24  # of the live table in a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions(Settings):
    """Options of `learn`.

    Attributes:
        steps: number of training steps.
        batch: windows per step.
        window: tokens per window.
        gates: learning rate of the gates.
        params: learning rate of the weights; 0 freezes them.
        round_to: an axis with more units than this number keeps a multiple of it, for efficient vector code.
        seed: seed of the text windows and of the gates' noise.
        held_out: text for the measurements; by default the bundled text's held-out part, or the last tenth of the text.
    """

    steps: AtLeastOne = 300
    batch: Size = 8
    window: AtLeastTwo = 128
    gates: Positive = 0.05
    params: NotNegative = 0.0
    round_to: AtLeastOne = 16
    seed: Seed = 0
    held_out: str | None = None


class LearnKeywords(TypedDict, total=False):
    """The fields of `LearnOptions` as keyword arguments."""

    steps: AtLeastOne
    batch: Size
    window: AtLeastTwo
    gates: Positive
    params: NotNegative
    round_to: AtLeastOne
    seed: Seed
    held_out: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Learned(Report):
    """Report on learned pruning.

    Attributes:
        units, target: kinds of units, and the share of their parameters to keep.
        options: the `LearnOptions`, as JSON.
        history: a dict of `step`, `loss`, `distill`, `open` and `cost` for every fifth step, and for the last one.
        probabilities, names: decision probabilities of all elements at those steps, float32 [steps, elements], and the
            names of the elements.
        hardened: report on the cuts, with the hardening gap.
        before, after: dicts of `parameters`, and `bits_per_byte` on held-out text.
    """

    units: tuple[str, ...]
    target: float
    options: dict[str, Any]
    history: list[dict[str, float]]
    probabilities: np.ndarray
    names: list[str]
    hardened: Discretized
    before: dict[str, float]
    after: dict[str, float]
    HIDDEN: ClassVar = ("probabilities", "names")

    def _text(self) -> str:
        a, b = self.before, self.after
        lines = [f"kept {self.target:.0%} of {', '.join(self.units)}, by {len(self.names)} gates"]
        lines += [f"  {line}" for line in str(self.hardened).splitlines()]
        lines.append("  the loss is the KL divergence from the model as it was, in nats per token of the training text")
        lines.append(f"  bits per byte {a['bits_per_byte']:.4f} -> {b['bits_per_byte']:.4f} on held-out text")
        return "\n".join(lines)


@checked
@keywords(LearnOptions)
def learn(
    model: Model, units: Sequence[str] = ("heads", "neurons"), target: float = 0.7, text: str | None = None, *,
    progress: ProgressCallback | None = None, **options: Unpack[LearnKeywords],
) -> Learned:  # fmt: skip
    """Learn which units a model needs, and cut the others.

    Args:
        model: the model, which needs a tokenizer; it is edited in place.
        units: kinds of units that get gates: heads, kv_groups, neurons, experts, layers.
        target: share of the gated parameters to keep, 0 < target < 1.
        text: training text; by default the bundled text.
        progress: called with `Progress`; its table has the gate probabilities of each axis.
        options: see `LearnOptions`.
    Raises: UsageError for invalid kinds, targets or texts; BudgetUnreachable; Diverged. After any error the model is
        unchanged.
    """
    o = LearnOptions(**options)
    if not 0 < target < 1:
        raise UsageError("the target is out of range", where="target", expected="0 < target < 1", got=target)
    unknown = [kind for kind in units if kind not in KINDS]
    if unknown:
        raise UsageError("unknown kinds of units", expected=", ".join(KINDS), got=", ".join(unknown))
    if not units:
        raise UsageError("no kinds of units are given", where="units", expected=", ".join(KINDS))
    check_type("model", model, Model, "a Model", "structure.DifferentiableGraph gates a Program")
    p = model.program
    ids, held = _texts(model, text, o.held_out)
    if len(ids) < o.window + 1:
        raise UsageError("the text is too short", where="text", expected=f"more than {o.window} tokens", got=len(ids))
    before = _measured(model, held)
    task, entries = distill(p.fork("teacher")), len(p.journal)
    try:
        _gate(model, units)
        view, final = DifferentiableGraph(p, seed=o.seed), TopPolicy(target, of="params", round_to=o.round_to)
        final.propose(view)  # raise for an unreachable target before training
        limit, mode = budget(target, of="params", steps=o.steps), "joint" if o.params else "gates"
        opt = JointOptimizer(view, task, [limit], params=o.params or 1e-4, gates=o.gates, mode=mode, warmup=0,
                             steps=o.steps)  # fmt: skip
        with p.edit("train weights beside gates", author="gate") if o.params else nullcontext():
            history, seen = _train(view, opt, ids, o, progress)
        names = [e.name for e in view.elements()]
        probe = _feeds(ids, np.random.default_rng(o.seed), o)
        hardened = view.discretize(final, probe=probe, task=task)
    except BaseException:
        p.undo(len(p.journal) - entries)
        raise
    shown, after = np.array(seen, np.float32), _measured(model, held)
    return Learned(tuple(units), target, asdict(o), history, shown, names, hardened, before, after)


def _train(
    view: DifferentiableGraph, opt: JointOptimizer, ids: np.ndarray, o: LearnOptions, progress: ProgressCallback | None
) -> tuple[list[dict[str, float]], list[list[float]]]:
    rng = np.random.Generator(np.random.Philox(key=[o.seed, 1]))
    history: list[dict[str, float]] = []
    seen: list[list[float]] = []
    table: dict[str, dict[str, float]] = {}
    for step in range(o.steps):
        made = opt.step(_feeds(ids, rng, o))
        facts = {"loss": made.loss, "distill": made.task, "open": float(made.open), "cost": made.expected_cost}
        if step % _EVERY == 0 or step == o.steps - 1:
            history.append({"step": float(step), **facts})
            among = view.elements()
            seen.append([e.p for e in among])
            table = _table(among)
        if progress is not None:
            progress(Progress("learn", step + 1, o.steps, facts, table))
    return history, seen


def _table(among: Sequence[Element]) -> dict[str, dict[str, float]]:
    """Summarise gate probabilities per axis, or per kind of units if there are more than 24 axes."""
    many = len({e.gate.owner for e in among}) > _ROWS
    rows: dict[str, list[float]] = {}
    for e in among:
        rows.setdefault(e.gate.owner.rpartition(".")[2] if many else e.gate.owner, []).append(e.p)
    return {owner: {"open": float(sum(p >= 0.5 for p in ps)), "of": float(len(ps)), "least": min(ps),
                    "mean": sum(ps) / len(ps)} for owner, ps in rows.items()}  # fmt: skip


def _gate(model: Model, units: Sequence[str]) -> None:
    """Add gates to all units of the kinds `units`, in one edit."""
    p = model.program
    with p.edit(f"gates on {', '.join(units)}", author="gate") as e:
        found = 0
        for kind in units:
            if kind == "layers":
                e.gate(model.select("**").layers, "hard_concrete")
                found += 1
                continue
            wanted = [g.name for g in p.axes().values()
                      if kind in g.kinds and not g.frozen and (kind == "experts" or not g.mixed)]  # fmt: skip
            for name in wanted:
                e.gate(p.axes()[name].units(), "hard_concrete")
            found += len(wanted)
        if not found:
            raise UsageError("the model has no units of these kinds to gate", where=p.name, got=", ".join(units))


def _feeds(ids: np.ndarray, rng: np.random.Generator, o: LearnOptions) -> dict[str, np.ndarray]:
    starts = rng.integers(0, len(ids) - o.window, o.batch)
    rows = np.stack([ids[s : s + o.window] for s in starts])
    return {"ids": rows, "positions": np.ascontiguousarray(np.broadcast_to(np.arange(o.window), rows.shape))}


def _texts(model: Model, text: str | None, held_out: str | None) -> tuple[np.ndarray, str]:
    """Return the token ids to train on, and the text to measure on."""
    from graphwright.models.bundled import pydoc_split
    from graphwright.models.tokenizer import need_tokenizer

    if text is None:
        text, held = pydoc_split()
        held_out = held_out or held[:8000]
    elif not held_out:
        cut = len(text) * 9 // 10
        text, held_out = text[:cut], text[cut:]
    return np.asarray(need_tokenizer(model).encode(text, add_special_tokens=False), np.int64), held_out


def _measured(model: Model, text: str) -> dict[str, float]:
    size = float(model.inspect().parameters)
    return {"parameters": size, "bits_per_byte": model.perplexity(text).bits_per_byte}
