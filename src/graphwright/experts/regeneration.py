"""Experts that die, are born again, and are added: a controller of layers with threshold routers.

It proposes edits between steps, from states that the steps' own plan keeps: the share of tokens above each expert's
threshold, the share of unrouted tokens, the last unrouted tokens, and the latch of an alarm (`experts.integrity`). An
expert is dead if its share stays far below k0/E. A dead expert is replaced by one whose prototype is among unrouted
tokens, with new parameters, so that optimizers begin again with it (ReDo-like resets, Sokar et al. 2023).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.errors import UsageError
from graphwright.experts.integrity import integrity
from graphwright.experts.observed import mlps_of
from graphwright.experts.renewal import Newborn, drift, newborn, renew
from graphwright.experts.routers import RouterNodes, threshold_routers
from graphwright.experts.step_count import StepCount
from graphwright.graph import NodeId
from graphwright.ops import call
from graphwright.optim import StepTerm, StepView
from graphwright.optim.step_terms import check_streak
from graphwright.program import Program
from graphwright.program.editing.proposal import Proposal, apply_proposals
from graphwright.program.op_graph import Ref
from graphwright.report import table
from graphwright.settings import AtLeastOne, Count, NotNegative, Positive, Seed, Settings, Share

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction

KEPT = 256
"""Unrouted tokens of a layer that are kept, and by default other tokens; steps whose figures are kept."""
FIGURES = ("pi", "d", "rho", "gradient", "k")
"""Figures of each step that are kept: states of `integrity`, and the mean number of experts per token."""
TRACE = ("step", "run", "alarm", *FIGURES)
"""Columns of the figures of each step."""


class NoRouter(UsageError):
    """A program has no threshold router, so nothing counts hits there."""


@dataclass(slots=True)
class LayerState:
    """What the steps of one layer keep, and which experts it was kept for.

    Attributes:
        rate: moving average of the share of tokens above each expert's threshold, before the fallback, float32 [E].
        fast, slow: moving averages of the share of unrouted tokens, 0-d.
        unrouted: the last unrouted tokens [KEPT + 1, C]; the last row takes what is not kept.
        ring: [next row of `unrouted`, number of rows in use], float32 [2].
        recent: the last tokens, newest batch first [n, C].
        renewed: step of the last renewal, and step until which `slow` moves as fast as `fast`, float32 [2].
        nodes: prototypes of the experts, by which a new expert of the same name is known from the old one.
    """

    rate: Variable
    fast: Variable
    slow: Variable
    unrouted: Variable
    ring: Variable
    recent: Variable
    renewed: Variable
    nodes: list[NodeId]

    def variables(self) -> Iterator[tuple[str, Variable]]:
        """Iterate over (name, variable)."""
        yield from ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "nodes")


def _state(name: str, value: Any) -> Variable:
    return Variable(from_numpy(np.array(value, np.float32)), name=name)


class _Trained(NamedTuple):
    """What `propose` reads of a segment of a life."""

    program: Program


class LayerCounts(NamedTuple):
    """Host copies of what a decision on a layer reads; see `LayerState`. `alive` is bool [E]."""

    rate: np.ndarray
    alive: np.ndarray
    fast: np.ndarray
    slow: np.ndarray
    renewed: np.ndarray


class Counts(NamedTuple):
    """Host copies of what a decision reads.

    Attributes:
        step: number of steps so far, without those whose update was skipped; run: with them.
        streak: skipped updates in a row; it stays at five.
        rho: the latch of the alarm.
        rows: figures of the steps since the last read, in order; of more than the trace has, the last [n, TRACE].
        layers: counts of each layer, in the order of its routers.
    """

    step: int
    run: int
    streak: int
    rho: float
    rows: np.ndarray
    layers: list[LayerCounts]


class Signals(StepTerm):
    """The states of a controller, as a term of a compiled step; made by `Regeneration.signals`."""

    name = "life"

    def __init__(self, care: Regeneration) -> None:
        self.care, self.layers = care, dict[str, LayerState]()
        self.own = integrity(
            care.alpha, care.gamma, alarm=care.alarm, after=care.grace, window=care.window, logits=care.logits,
            targets=care.targets, mask=care.mask, shifted=care.shifted,
        )  # fmt: skip
        self.trace = _state("life.trace", np.zeros((min(care.every, KEPT), len(TRACE))))  # a ring; 0 once read
        self.steps = StepCount(self.own.states["t"], lambda: int(self.own.states["t"].item()))

    def nodes(self, program: Program) -> Iterator[Ref]:
        """Follow the experts of the program; iterate over what is read of each router."""
        routers = threshold_routers(program)
        if not routers:
            raise NoRouter("no layer has a threshold router, so nothing counts hits", where=program.name,
                           fix="nn.MoE(..., router=nn.ThresholdRouter(...))")  # fmt: skip
        self._follow(program, routers)
        for router in routers:
            yield router.value("hits")
            yield router.value("unrouted")
            yield _tokens(router)

    def variables(self) -> dict[str, Variable]:
        """Return all states by name."""
        found = {**self.own.variables(), "trace": self.trace}
        for number, state in enumerate(self.layers.values()):
            found |= {f"{number}.{name}": variable for name, variable in state.variables()}
        return found

    def __call__(self, view: StepView) -> None:
        """Measure one step, and assign the states."""
        states = self.own.states
        before, alarms = states["t"] + 0.0, states["alarms"] + 0.0
        self.own(view)
        active = [self._measure(view, r, self.layers[r.path]) for r in threshold_routers(view.program)]
        figures = {**states, "k": sum(active[1:], active[0]) / float(len(active))}
        run, alarm = states["t"] + states["skipped"], states["alarms"] - alarms
        row = call("stack", before + 1.0, run, alarm, *(figures[name] for name in FIGURES))
        at = call("remainder", before, float(self.trace.shape[0])).to("int64")
        view.assign(self.trace, call("index_put", self.trace, row.unsqueeze(0), at.unsqueeze(0), axis=0))

    def read(self, routers: list[RouterNodes]) -> Counts:
        """Return what a decision on the layers of these routers reads, by one read of memory, and clear the trace."""
        states = self.own.states
        parts: list[Tensor] = [states[name] for name in ("t", "skipped", "streak", "rho")]
        parts.append(self.trace)
        for router in routers:
            layer, alive = self.layers[router.path], Tensor(router.program.weights.array(router.alive))
            parts += [layer.rate, alive.to("float32"), layer.fast, layer.slow, layer.renewed]
        flat = call("concat", *(part.reshape(-1) for part in parts), axis=0).numpy()
        ends = np.cumsum([int(np.prod(part.shape)) for part in parts])
        found = [x.reshape(part.shape) for x, part in zip(np.split(flat, ends[:-1]), parts, strict=True)]
        step, skipped, streak, rho, rows, *others = found
        layers = [LayerCounts(*others[i : i + 5]) for i in range(0, len(others), 5)]
        rows = rows[np.argsort(rows[:, 0])]
        self.trace.assign(Tensor(from_numpy(np.zeros_like(rows))))
        self.steps.note(int(step))
        rows = rows[(rows[:, 0] > 0) & (rows[:, 0] <= step)]
        layers = [x._replace(alive=x.alive > 0) for x in layers]
        return Counts(int(step), int(step + skipped), int(streak), float(rho), rows, layers)

    def _measure(self, view: StepView, router: RouterNodes, state: LayerState) -> Tensor:
        """Measure a layer, and assign its states; return the mean number of its experts per token."""
        care, path = self.care, router.path
        hits, none = view.value(router.value("hits")).to("float32"), view.value(router.value("unrouted"))
        tokens = view.value(_tokens(router)).to("float32")
        tokens = tokens.reshape(-1, tokens.shape[-1])
        rate = state.rate * care.decay + hits.mean(axis=0) * (1 - care.decay)
        share = none.to("float32").mean()
        fast = state.fast * care.decay + share * (1 - care.decay)
        held = call("le", self.own.states["t"], state.renewed[1])
        keep = call("where", held, care.decay, care.slow).to("float32")
        view.assign(state.slow, state.slow * keep + share * (1.0 - keep))
        view.assign(state.rate, rate)
        view.assign(state.fast, fast)
        before = call("cumsum", none.to("float32"), axis=0)
        row = call("remainder", state.ring[0] + before - 1.0, float(KEPT))
        row = call("where", none, row, float(KEPT)).to("int64")
        view.assign(state.unrouted, call("index_put", state.unrouted, tokens, row, axis=0))
        number = before[-1]
        following = call("remainder", state.ring[0] + number, float(KEPT))
        view.assign(state.ring, call("stack", following, (state.ring[1] + number).clamp(max=float(KEPT))))
        last = call("concat", tokens, state.recent, axis=0)
        view.assign(state.recent, last[: state.recent.shape[0]])
        prefix = f"life.{path}." if path else "life."
        view.report(f"{prefix}unrouted", share)
        active = hits.sum() / float(hits.shape[0])
        view.report(f"{prefix}k", active)
        return active

    def _follow(self, program: Program, routers: list[RouterNodes]) -> None:
        """Give new experts the expected rate, keep that of the others, and drop layers that are gone."""
        found: dict[str, LayerState] = {}
        for router in routers:
            nodes = _prototypes(router)
            old, width = self.layers.get(router.path), program.spec(_tokens(router)).shape[-1]
            expected = self.care.k0 / max(_alive(router).sum(), 1)
            if old is None:
                name, missed = f"life.{router.path}", (1 - min(expected, 1.0)) ** int(_alive(router).sum())
                found[router.path] = LayerState(
                    _state(f"{name}.rate", np.full(len(nodes), expected)), _state(f"{name}.fast", missed),
                    _state(f"{name}.slow", missed), _state(f"{name}.unrouted", np.zeros((KEPT + 1, int(width)))),
                    _state(f"{name}.ring", [0, 0]), _state(f"{name}.recent", np.zeros((self.care.recent, int(width)))),
                    _state(f"{name}.renewed", [0, 0]), nodes,
                )  # fmt: skip
                continue
            if nodes != old.nodes:
                known = dict(zip(old.nodes, old.rate.numpy().tolist(), strict=True))
                rates = np.array([known.get(n, expected) for n in nodes], np.float32)
                if len(nodes) == len(old.nodes):
                    old.rate.assign(Tensor(from_numpy(rates)))
                else:
                    old.rate = _state(f"life.{router.path}.rate", rates)
                old.nodes = nodes
            found[router.path] = old
        self.layers = found


@dataclass(frozen=True)
class Regeneration(Settings):
    """A controller that replaces dead experts after an alarm, and adds experts where many tokens have none.

        care = experts.Regeneration(k0=2)
        train = gw.compile_step(program, loss, optimizer, inputs, also=[experts.sdl(), care.signals()])
        for batch in stream:
            train(batch)
            care.apply(program)                      # or `run.step(batch, care)` in a life

    Attributes:
        k0: mean number of experts per token that the layers were calibrated to.
        pruning: an expert is dead below this share of the expected rate k0/E.
        growth: an expert is added where the share of unrouted tokens is this much above its slow average, and one is
            free: not alive.
        alpha, gamma: of PI; see `experts.integrity`.
        alarm: deviation of PI that is an alarm.
        window: steps in which the latch ρ of an alarm falls to 1/e.
        grace: age in steps below which an expert is never dead, and steps before the first alarm.
        every: steps from one decision to the next.
        most: largest number of experts that one decision replaces in a layer; ρ times as many are replaced.
        upkeep: steps after which one dead expert of a layer is replaced without an alarm; 0 for never.
        decay, slow: of the moving averages of rates, and of the slow average of unrouted tokens.
        near: cosine of the unrouted tokens that a new prototype is the mean of.
        highest: largest threshold of a new expert.
        quiet: last matrices of a new expert are this times what they would be drawn as.
        hold: steps after growth in which the slow average moves as fast as the fast one.
        recent: number of the last tokens that are kept, for thresholds and drifts.
        seed: seed of all random choices.
        logits, targets, mask, shifted: of PI; see `experts.integrity`.
    Raises: UsageError for a value out of range.
    """

    k0: Positive = 2.0
    pruning: Share = 0.05
    growth: Share = 0.02
    alpha: Positive = 1.0
    gamma: Share = 0.5
    alarm: Positive = 3.0
    window: AtLeastOne = 50
    grace: Count = 100
    every: AtLeastOne = 10
    most: AtLeastOne = 4
    upkeep: Count = 1000
    decay: Share = 0.98
    slow: Share = 0.998
    near: Share = 0.5
    highest: Share = 0.6
    quiet: NotNegative = 0.02
    hold: Count = 100
    recent: AtLeastOne = KEPT
    seed: Seed = 0
    logits: str = "logits"
    targets: str = "targets"
    mask: str | None = None
    shifted: bool = False
    made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def signals(self) -> Signals:
        """Return the term that measures what the controller decides by, for `compile_step(..., also=[...])`."""
        if "signals" not in self.made:
            self.made["signals"] = Signals(self)
        return self.made["signals"]

    def table(self) -> str:
        """Return a table of all numbers of the controller, with their defaults."""
        rows = [
            {"number": f.name, "value": getattr(self, f.name), "default": f.default} for f in fields(self) if f.init
        ]
        return table([{k: str(v) for k, v in row.items()} for row in rows], ("number", "value", "default"))

    # -- decisions ---------------------------------------------------------------------------------------------------
    def propose(self, view: Any) -> list[Proposal]:
        """Return the changes after a step of a compiled step with the term of `signals`; `view` has its `program`.

        Raises: Diverged if the updates of five steps in a row were skipped, as their loss or S was not finite.
        It decides every `every` steps, and reads no memory between decisions, which report the alarms since the last,
        and raise. Steps whose update was skipped do not count.
        """
        signals = self.signals()
        now = signals.steps.value()  # counts skipped steps too until the next read, so a multiple may be passed over
        before = min(self.made.get("asked", now), now - 1)
        self.made["asked"] = now
        if not any(now // every > before // every for every in (self.every, KEPT)):
            return []
        routers = threshold_routers(view.program)
        counts = signals.read(routers)
        found, now = self._alarms(counts), counts.step
        self.made["asked"] = now
        check_streak(counts.streak, f"after step {now}")
        most = self.due(now, counts.rho)
        before, self.made["decided"] = self.made.get("decided"), now
        if most is None or (counts.streak and before == now):  # the updates since the last decision were skipped
            return found
        idle = True
        for number, (router, seen) in enumerate(zip(routers, counts.layers, strict=True)):
            changes = self._layer(view.program, router, signals.layers[router.path], seen, now, most, number)
            idle = idle and all(change.event != "expert_reborn" for change in changes)
            found += changes
        self._warn(counts.rho, idle)
        return found

    def finish(self) -> list[Proposal]:
        """Return the alarms since the last decision, at the end of a training."""
        return self._alarms(self.signals().read([]))

    def _alarms(self, counts: Counts) -> list[Proposal]:
        """Note the figures of the steps that were read; return their alarms."""
        found = []
        for row in counts.rows:
            seen = dict(zip(TRACE, row.tolist(), strict=True))
            self.made.setdefault("figures", []).append({name: seen[name] for name in FIGURES})
            if seen["alarm"]:
                facts, ago = {name: seen[name] for name in ("d", "pi")}, counts.run - int(seen["run"])
                text = "predictions fit worse than they did"
                found.append(Proposal("alarm", "integrity", text, facts, steps_ago=ago))
        return found

    def due(self, step: int, rho: float) -> int | None:
        """Return how many dead experts of a layer may be replaced after a step; None if nothing is decided then."""
        return None if step % self.every else round(rho * self.most)

    def figures(self) -> list[dict[str, float]]:
        """Return figures of the steps that were read since the last call, in order.

        They are PI, d, ρ, the norm of gradients, and k, the mean number of experts per token.
        """
        return self.made.pop("figures", [])

    def apply(self, program: Program) -> list[Proposal]:
        """Propose, and make the changes in one edit of author `lifecycle`; return all proposals."""
        found = self.propose(_Trained(program))
        apply_proposals(program, found, type(self).__name__, self.signals().steps.value())
        return found

    def _layer(
        self, p: Program, router: RouterNodes, state: LayerState, seen: LayerCounts, now: int, most: int, number: int
    ) -> list[Proposal]:
        alive, rate, last = seen.alive, seen.rate, seen.renewed.copy()
        expected = self.k0 / max(int(alive.sum()), 1)
        born = np.array([_born(p, n) for n in _prototypes(router)])
        ages = np.where(born > now, now, now - born)  # later than now: in the training before this one
        dead = np.flatnonzero(alive & (ages > self.grace) & (rate < self.pruning * expected))
        rng = np.random.default_rng([self.seed, now, number])
        count = min(len(dead), most)
        if not count and len(dead) and self.upkeep and now - last[0] >= self.upkeep:
            count = 1
        found = [
            self._change(
                p, router, state, int(i), "expert_reborn", rng, {"rate": float(rate[i]), "age": int(ages[i])}, now
            )
            for i in rng.permutation(dead)[:count]
        ]
        excess = float(seen.fast) - float(seen.slow)
        free = np.flatnonzero(~alive)
        if excess > self.growth and len(free) and now > self.grace:
            i = int(free[0])
            found.append(self._change(p, router, state, i, "expert_born", rng, {"unrouted": float(seen.fast)}, now))
            last[1] = now + self.hold
        if count:
            last[0] = now
        if found:
            state.renewed.assign(Tensor(from_numpy(last)))
        return found

    def _change(
        self, p: Program, router: RouterNodes, state: LayerState, i: int, event: str, rng: np.random.Generator,
        facts: dict[str, Any], now: int,
    ) -> Proposal:  # fmt: skip
        used, recent = int(state.ring.numpy()[1]), state.recent.numpy()
        recent = recent[recent.any(axis=1)]
        made = newborn(self, router, i, state.unrouted.numpy()[:used], recent, rng)
        before = drift(router, i, made, recent)
        reason = "too few tokens above its threshold" if event == "expert_reborn" else "many tokens without an expert"
        measured = {name: self.signals().own.states[name].item() for name in ("rho", "d", "epsilon", "tau")}
        full = {**facts, **measured, "tokens": made.tokens, "drift": before}
        return Proposal(event, _expert_path(router, i), reason, full, partial(_make, router.path, i, made, now))

    def _warn(self, rho: float, idle: bool) -> None:
        """Warn if an alarm finds no dead expert three times in a row."""
        idles = self.made.get("idle", 0) + 1 if idle and rho > 0.5 else 0
        if idles == 3:
            text = f"alarms find no dead expert: none is below pruning = {self.pruning:g} of the expected rate"
            warnings.warn(text, UserWarning, stacklevel=4)
        self.made["idle"] = idles


def _make(path: str, i: int, made: Newborn, now: int, e: Transaction) -> None:
    """Replace expert `i` of a router by a newborn, and let it live; the router is looked up in the present program."""
    router = next(r for r in threshold_routers(e.program) if r.path == path)
    renew(e, router, i, made, born=now)


def _tokens(router: RouterNodes) -> Ref:
    node = mlps_of(router)
    if node is None:
        raise NoRouter("the experts of this router are not MLPs", where=router.path)
    return router.program.operands(node)[0]


def _prototypes(router: RouterNodes) -> list[NodeId]:
    p = router.program
    return [p.readers(key)[0] for key in router.prototypes]


def _alive(router: RouterNodes) -> np.ndarray:
    return router.program.weights.array(router.alive).to_numpy()


def _born(p: Program, node: NodeId) -> int:
    return int(p.attrs(node).get("born", 0))


def _expert_path(router: RouterNodes, i: int) -> str:
    return router.program.path(_prototypes(router)[i]).rpartition(".")[0]
