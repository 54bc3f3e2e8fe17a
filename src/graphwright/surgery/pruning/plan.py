"""Options, plans and reports of pruning. Each step of a plan removes units or a module with all coupled weights.

A step holds names and values but no handles, so that it can be applied later, alone or with other steps. A step fails
if its weights changed after planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from graphwright.array import NDArray
from graphwright.program.axes.units import Units, runs
from graphwright.program.editing.transaction import Transaction
from graphwright.report import Report, listed, plain
from graphwright.settings import AtLeastOne, Count, NotNegative, Settings, Share
from graphwright.surgery.errors import StaleStep, check_choices
from graphwright.surgery.measure import drift_text
from graphwright.surgery.pruning.prunable import NEURONS, Where, remove_branch, residual_branches
from graphwright.surgery.pruning.scores import CRITERIA
from graphwright.timing import TimeComparison

if TYPE_CHECKING:
    from graphwright.program.program import Program


TOOL = "graphwright.surgery.prune"
SCHEMA = 1
LABELS = {
    "parameters": "parameters", "bytes": "bytes", "flops": "FLOP/{each}", "perplexity": "perplexity",
    "bits_per_byte": "bits per byte", "nats": "nats/token",
}  # fmt: skip


Recipe = Literal["default", "units", "modules"]
Scope = Literal["loss", "global", "kind", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions(Settings):
    """Options of `prune`.

    Attributes:
        recipe: what to remove: `units` of axes; `modules`, which are whole residual branches; or `default`, attention
            modules for 0, 25 or 50 % of the reduction (by least calibration loss; none if `uniform`), then units.
        method: score that ranks units: `greedy`, `obs`, `wanda`, `magnitude`, `taylor` or `random`.
        scope: how to compare units across axes: `loss` (predicted loss per parameter; the default for programs that
            score tokens), `global` (error relative to a layer's output, per parameter; the default otherwise), `kind`
            (among axes of equal kind and size), `layer` (the same share of every axis).
        kinds: kinds of units: `neurons`, `channels` (between convolutions), `head_dim` (value channels), `kv_groups`
            (a key head and its query heads), `queries` (the same query head of each key head), `heads` (a query head),
            `units` (of axes of no other kind).
        where: pattern or nodes that may be pruned; by default the numbered layers, or everything if no layers exist.
        protect: pattern or nodes that may not be pruned.
        round_to: new sizes are multiples of this number, for which kernels are fast; on axes with fewer than four times
            as many units, multiples of the largest power of two up to a quarter of the size. Heads are cut one by one.
        min_keep: smallest share of an axis that must remain, unless its whole module is removed.
        uniform: axes of equal kind and size keep equally many units, so that all layers have the same size.
        restore: refit the weights that read a pruned axis by least squares, to compensate for the removed units.
        sequential: score and restore each layer with the outputs of the already pruned layers before it.
        ridge: λ of the fit, relative to the mean square of the inputs; by default 1e-4, or more if the fit needs it.
        seed: seed of `method="random"`.
        timed: measure the time per token before and after.
    """

    recipe: Recipe = "default"
    method: str = "greedy"
    scope: Scope | None = None
    kinds: Sequence[str] = NEURONS
    where: Where | None = None
    protect: Where | None = None
    round_to: AtLeastOne = 16
    min_keep: Share = 0.1
    uniform: bool = False
    restore: bool = True
    sequential: bool = True
    ridge: NotNegative | None = None
    seed: Count = 0
    timed: bool = True

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        check_choices({"method": self.method}, {"method": tuple(CRITERIA)})

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, with nodes as text."""
        return {**plain(self), "kinds": list(self.kinds), "where": self.where and str(self.where),
                "protect": self.protect and str(self.protect)}  # fmt: skip


class PruneKeywords(TypedDict, total=False):
    """The fields of `PruneOptions` as keyword arguments."""

    recipe: Recipe
    method: str
    scope: Scope | None
    kinds: Sequence[str]
    where: Where | None
    protect: Where | None
    round_to: AtLeastOne
    min_keep: Share
    uniform: bool
    restore: bool
    sequential: bool
    ridge: NotNegative | None
    seed: Count
    timed: bool


@dataclass(frozen=True, slots=True, repr=False)
class PruneStep(Report):
    """The removal of units of an axis, or of a module, with all coupled weights.

    Attributes:
        what: `units` for units of an axis, or `module` for a residual branch.
        name: name of the axis, or of the edge by which the branch enters the residual path.
        units: indices of the removed units; empty for a module.
        size: number of units before the step.
        weights: dict from the key of each refitted weight to its new value.
        digests: dict from the key of each affected weight to its digest at planning.
        shapes: dict from the key of each resized weight to (shape before, shape after).
        params: number of removed parameters.
        error, plain: relative mean squared error of the outputs of the linear maps that read the axis, with and without
            restoring, on the calibration data; for a module the loss after and before its removal.
        held_out: `error` on the held-out windows.
        ridge: λ of the least-squares fit, relative to the mean square of the inputs; None if nothing was refitted.
        quantiles: 0, 25, 50, 75 and 100 % quantiles of the scores.
        ragged: whether the step may leave key heads with unequal numbers of query heads.
    """

    what: str
    name: str
    units: tuple[int, ...] = ()
    size: int = 0
    weights: Mapping[str, NDArray] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    params: int = 0
    error: float | None = None
    plain: float | None = None
    held_out: float | None = None
    ridge: float | None = None
    quantiles: tuple[float, ...] = ()
    ragged: bool = False

    def make(self, e: Transaction) -> None:
        """Apply the step inside an open edit. Raises: StaleStep if its weights changed or its module is gone."""
        p = e.program
        if changed := [k for k, d in self.digests.items() if not p.weights.has_key(k) or p.weights.digest(k) != d]:
            raise StaleStep("weights of this step changed after planning", where=self.name, got=", ".join(changed[:4]),
                            fix="plan again: prune(..., dry_run=True)")  # fmt: skip
        if self.what == "units":
            e.cut_units(Units(p, {self.name: self.units}, {self.name: self.size}), ragged=self.ragged)
            self.restore(e)
            return
        branch = next((b for b in residual_branches(p) if b.name == self.name), None)
        if branch is None:
            raise StaleStep("the module that this step removes no longer exists", where=self.name,
                            fix="plan again: prune(..., dry_run=True)")  # fmt: skip
        remove_branch(e, branch)

    def restore(self, e: Transaction) -> Mapping[str, NDArray]:
        """Set the refitted weights inside an open edit; return them by key."""
        for key, array in self.weights.items():
            e.set_weight(key, array)
        return self.weights

    def figures(self) -> dict[str, Any]:
        """Return a dict of the figures that `optimise_report` can recompute from the journal."""
        return {k: v for k, v in self.to_json().items() if k not in ("ridge", "quantiles")}

    def apply(self, p: Program) -> None:
        """Apply the step as a separate edit. Raises: StaleStep if the step no longer fits the program."""
        with p.edit(f"prune {self}", author="pass", tool=TOOL) as e:
            self.make(e)

    def details(self) -> str:
        """Describe the step, every weight whose shape changes, and the removed units, as text."""
        lines = [str(self)]
        lines += [f"  {key}: {list(a)} => {list(b) if b else 'removed'}" for key, (a, b) in self.shapes.items()]
        return "\n".join([*lines, *([f"  units {runs(self.units)}"] if self.units else [])])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, with the keys of refitted weights instead of their values."""
        names = ("what", "name", "params", "error", "plain", "held_out", "ridge", "quantiles", "shapes")
        facts = {"units": runs(self.units), "of": self.size, "restored": sorted(self.weights)}
        return {name: plain(getattr(self, name)) for name in names} | facts

    def __str__(self) -> str:
        if self.what == "module":
            loss = "" if self.plain is None or self.error is None else f", loss {self.plain:.4g} => {self.error:.4g}"
            return f"{self.name} cut, {self.params:,} parameters{loss}"
        error = "" if self.error is None else f", relative error {self.error:.3e}"
        return f"{self.name} {self.size} => {self.size - len(self.units)}, {self.params:,} parameters{error}"


@dataclass(slots=True, repr=False)
class PruneReport(Report):
    """Report on a pruning that was applied or planned.

    Attributes:
        target: the budget as text.
        reached: dict {of, before, after, asked}: the counted quantity, its values, and its limit.
        steps: the applied or planned steps, in order.
        before, after: dicts of parameters, bytes, flops of the program, and nats, perplexity, bits_per_byte on held-out
            windows; if the program scores no tokens, relative and max_abs (difference of the first output from that
            before), and for scores of classes kl and same_top.
        speed: ms per token (per run if the program scores no tokens) before and after; None if it was not measured.
        files: what exports write, {level, bytes} of their weights: `before`, and of the pruned model by preference
            (`class`, `size`); None without a model.
        calibration: sizes, seed and hashes of the learning and the held-out windows.
        settings: the `PruneOptions`, as JSON.
        attempts: a dict per tried share of attention modules: its loss on the calibration data, or why it was given up.
        warnings: warnings for the user, as text.
        journal: hash of the journal after pruning; None for a plan.
        seconds: duration of the whole call.
    """

    target: str
    reached: dict[str, Any]
    steps: tuple[PruneStep, ...]
    before: dict[str, Any]
    after: dict[str, Any]
    speed: TimeComparison | None
    files: dict[str, Any] | None
    calibration: dict[str, Any]
    settings: dict[str, Any]
    attempts: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    journal: str | None = None
    seconds: float = 0.0

    @property
    def empty(self) -> bool:
        """True if the program met the budget already, so that there are no steps."""
        return not self.steps

    def figures(self) -> dict[str, Any]:
        """Return a dict of the figures that `optimise_report` can recompute: all but times, settings and attempts."""
        layers = [step.figures() for step in self.steps]
        return {"before": self.before, "after": self.after, "layers": layers, "calibration": self.calibration,
                "journal": self.journal}  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, in which the steps are called `layers`."""
        facts = Report.to_json(self)
        return {"schema": SCHEMA, "layers": facts.pop("steps"), **facts}

    def _text(self) -> str:
        lines = [f"prune {self.target}: {self.reached['of']} {_number(self.reached['before'])} => "
                 f"{_number(self.reached['after'])}{'' if self.steps else ', nothing to do'}"]  # fmt: skip
        steps = []
        for step in self.steps:
            held = "" if step.held_out is None else f" (held out {step.held_out:.3e}, unrestored {step.plain:.3e})"
            steps.append(f"  {step}{held}")
        lines += listed(steps, "more steps")
        each = "token" if "nats" in self.after else "sample"
        for name, label in LABELS.items():
            if name in self.after:
                a, b = self.before.get(name), self.after[name]
                share = f"  ({100 * (b / a - 1):+.1f} %)" if a else ""
                lines.append(f"  {label.format(each=each):<14}{_number(a)} => {_number(b)}{share}")
        if "relative" in self.after:
            lines.append(f"  {'outputs':<14}{drift_text(self.after)}")
        if self.speed is not None:
            lines.append(f"  {'ms per token' if 'nats' in self.after else 'ms per run':<14}{self.speed}")
        if self.files is not None:
            before = self.files["before"]
            lines.append(f"  {'files':<14}{before['bytes']:,} bytes, export level {before['level']}")
            for prefer, found in self.files.items():
                if prefer != "before" and found["level"] is not None:
                    share = f"  ({100 * (found['bytes'] / max(before['bytes'], 1) - 1):+.1f} %)"
                    level = f"export level {found['level']}, prefer {prefer}"
                    lines.append(f"  {'':<14}=> {found['bytes']:,}{share}, {level}")
        tried = self.attempts if len(self.attempts) > 1 else []
        for row, a in enumerate(tried):
            what = f"{100 * a['share']:.0f} % as attention modules" if a["share"] else "units alone"
            found = a["given_up"] or f"a loss of {a['calibration_loss']:.4g} on the calibration data"
            lines.append(f"  {'' if row else 'tried':<14}{what}: {found}")
        lines += [f"  {'warning':<14}{w}" for w in self.warnings]
        data, journal = self.calibration, f"; journal {self.journal[:12]}" if self.journal else ""
        learned = f"{data['tokens']:,} {each}s learned from, {data['held_out_tokens']:,} held out"
        return "\n".join([*lines, f"  {learned}; {self.seconds:.1f} s{journal}"])


def _number(value: Any) -> str:
    whole = value is not None and (abs(value) >= 10000 or float(value).is_integer())
    return "-" if value is None else f"{value:,.0f}" if whole else f"{value:.5g}"


@dataclass(frozen=True, slots=True, repr=False)
class PrunePlan(Report):
    """A planned pruning of a program: its steps in order, and the report, which was measured on a pruned copy."""

    program: Program
    steps: tuple[PruneStep, ...]
    report: PruneReport

    def apply(self, why: str | None = None) -> None:
        """Apply all steps as one edit. Raises: StaleStep if a step no longer fits; the program is then unchanged."""
        if self.steps:
            count = sum(s.params for s in self.steps)
            with self.program.edit(why or f"prune {count:,} parameters", author="pass", tool=TOOL) as e:
                for step in self.steps:
                    step.make(e)

    def details(self) -> str:
        """Describe all steps with their weights and units, as text."""
        return "\n".join(f"{i}. {step.details()}" for i, step in enumerate(self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serialisable dict."""
        return self.report.to_json()

    def _text(self) -> str:
        steps = [f"{i}. {step}" for i, step in enumerate(self.steps)]
        return "\n".join(listed(steps, "more steps") or ["(nothing to prune)"])
