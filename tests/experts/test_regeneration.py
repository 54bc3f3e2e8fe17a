"""The controller: what it counts, which experts it replaces, what a new expert is, undo and replay."""

from __future__ import annotations

import inspect
import warnings
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import Diverged, UsageError
from graphwright.experts.routers import threshold_routers
from graphwright.graph import StaleHandle
from graphwright.optim import Adam
from graphwright.program.derived.step import TrainingStepGraph
from graphwright.program.editing.proposal import Proposal
from graphwright.program.editing.replay import replay
from graphwright.program.program import Program
from graphwright.testing.shift import Run, Stream, objective
from seeds import deep
from values import parameter_of

SMALL: dict[str, Any] = {"experts": 6, "hidden": 4, "batch": 32, "dim": 8}
QUIET: dict[str, Any] = {"k0": 2.0, "upkeep": 0, "grace": 3, "every": 2}
EXPERT = "mlp.experts.{}"


def run(care: ex.Regeneration | None = None, **options) -> Run:
    return Run(0, care, **{**SMALL, **options})


def state(r: Run):
    return next(iter(r.watch.signals().layers.values()))


def force(r: Run, *, rho: float | None = None, rate: list[float] | None = None) -> None:
    """Set the latch, and the rates of experts."""
    if rho is not None:
        r.watch.signals().own.states["rho"].assign(Tensor(from_numpy(np.asarray(rho, np.float32))))
    if rate is not None:
        state(r).rate.assign(Tensor(from_numpy(np.asarray(rate, np.float32))))


def parameters(p: Program, i: int) -> dict[str, np.ndarray]:
    prefix = EXPERT.format(i) + "."
    return {key: p.weights[key].numpy().copy() for key in p.weights if key.startswith(prefix)}


# -- what is counted ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("decay", "long"), [(0.98, 0.998), (0.9, 0.95)])
def test_rates_and_unrouted_tokens_equal_a_count_in_numpy(decay, long):
    """Tokens of the fallback are no hits; the buffer has the last unrouted tokens in order."""
    r = run(ex.Regeneration(**QUIET, decay=decay, slow=long))
    rate, fast, slow = np.full(6, 2 / 6), (1 - 2 / 6) ** 6, (1 - 2 / 6) ** 6
    kept: list[np.ndarray] = []
    batches = [r.stream.draw() for _ in range(60)]
    for batch in batches:
        seen = r.program.run({"x": batch["x"]})
        (router,) = threshold_routers(r.program)
        hits, none = (seen.value(router.value(n)).to_numpy() for n in ("hits", "unrouted"))
        np.testing.assert_array_equal(none, ~hits.any(axis=1))
        r.train(batch)
        rate = decay * rate + (1 - decay) * hits.mean(axis=0)
        fast, slow = (d * old + (1 - d) * none.mean() for d, old in ((decay, fast), (long, slow)))
        kept += [x for x, u in zip(batch["x"], none, strict=True) if u]
    np.testing.assert_allclose(state(r).rate.numpy(), rate, rtol=1e-5)
    assert state(r).fast.item() == pytest.approx(fast, rel=1e-4)
    assert state(r).slow.item() == pytest.approx(slow, rel=1e-4)
    row, used = state(r).ring.numpy().astype(int)
    assert used == min(len(kept), 256)
    assert len(kept) > 256 or row == len(kept)
    rows = state(r).unrouted.numpy()[:256]
    for age, x in enumerate(reversed(kept[-256:])):
        np.testing.assert_array_equal(rows[(row - 1 - age) % 256], x)
    np.testing.assert_array_equal(state(r).recent.numpy()[:32], batches[-1]["x"])


def test_shares_begin_as_those_of_independent_tokens_and_living_experts():
    r = run(alive=3)
    assert state(r).fast.item() == state(r).slow.item() == pytest.approx((1 - 2 / 3) ** 3)
    np.testing.assert_allclose(state(r).rate.numpy(), 2 / 3, rtol=1e-6)


# -- which, and how many -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rho", "count"), [(1.0, 4), (0.5, 2), (0.3, 1), (0.1, 0)])
def test_the_latch_gives_the_number_of_replaced_experts(rho, count):
    r = run(ex.Regeneration(**QUIET))
    for _ in range(4):
        r.train(r.stream.draw())
    force(r, rho=rho, rate=[0.0, 0.0, 0.0, 0.0, 0.0, 0.5])
    found = r.watch.propose(r)
    assert [c.event for c in found] == ["expert_reborn"] * count
    assert EXPERT.format(5) not in {c.name for c in found}


def test_young_experts_and_those_that_are_used_are_never_dead():
    r = run(ex.Regeneration(k0=2.0, upkeep=0, grace=10, every=2))
    for _ in range(4):
        r.train(r.stream.draw())
    force(r, rho=1.0, rate=[0.0] * 6)
    assert not r.watch.propose(r)
    for _ in range(8):
        r.train(r.stream.draw())
    force(r, rho=1.0, rate=[0.05 * 2 / 6 * f for f in (0.99, 1.01, 2, 3, 4, 5)])
    assert [c.name for c in r.watch.propose(r)] == [EXPERT.format(0)]


def test_a_larger_pruning_never_replaces_fewer_and_the_seed_draws_among_the_dead():
    rates = [0.0, 0.005, 0.01, 0.02, 0.05, 0.1]
    found: dict[tuple[float, int], set[str]] = {}
    for pruning in (0.02, 0.08, 0.32):
        for seed in range(4):
            r = run(ex.Regeneration(pruning=pruning, seed=seed, most=2, **QUIET))
            for _ in range(4):
                r.train(r.stream.draw())
            force(r, rho=1.0, rate=rates)
            found[pruning, seed] = {c.name for c in r.watch.propose(r)}
            dead = {EXPERT.format(i) for i, rate in enumerate(rates) if rate < pruning / 3}
            assert found[pruning, seed] <= dead
            assert len(found[pruning, seed]) == min(len(dead), 2)
    assert len({frozenset(found[0.32, seed]) for seed in range(4)}) > 1


def test_the_choice_reads_the_step_before_it():
    """An expert that the last batch revived stays, and the one that it killed goes; a step earlier it was otherwise."""
    r = run(ex.Regeneration(**QUIET))
    for _ in range(3):
        r.train(r.stream.draw())
    batch, limit, idle = r.stream.draw(), 0.05 * 2 / 6, 5
    with r.program.edit("no tokens") as e:
        e.set_weight(f"{EXPERT.format(idle)}.threshold", np.float32(3))
    (router,) = threshold_routers(r.program)
    hits = r.program.run({"x": batch["x"]}).value(router.value("hits")).to_numpy().mean(axis=0)
    revived = int(hits.argmax())
    assert hits[revived] > limit > hits[idle]
    rates = np.full(6, 0.5)
    rates[revived], rates[idle] = 0.999 * limit, 1.001 * limit
    force(r, rho=1.0, rate=rates.tolist())
    before = [EXPERT.format(i) for i in np.flatnonzero(state(r).rate.numpy() < limit)]
    r.train(batch)
    assert before == [EXPERT.format(revived)]
    assert [c.name for c in r.watch.apply(r.program)] == [EXPERT.format(idle)]
    (router,) = threshold_routers(r.program)
    weights = parameters(r.program, idle)
    r.train(r.stream.draw())  # the edit acts from the next step on
    assert any(not np.array_equal(v, weights[k]) for k, v in parameters(r.program, idle).items())


def test_an_expert_born_in_an_earlier_training_is_as_old_as_this_one():
    r = run(ex.Regeneration(**QUIET))
    with r.program.edit("a birth at step 900 of another training") as e:
        e.set_attr(r.program.node(f"{EXPERT.format(1)}.prototype"), born=900)
    for steps in (2, 2):
        for _ in range(steps):
            r.train(r.stream.draw())
        force(r, rho=1.0, rate=[0.5, 0.0, 0.5, 0.5, 0.5, 0.5])
        found = [(c.name, c.facts["age"]) for c in r.watch.propose(r)]
    assert found == [(EXPERT.format(1), 4)]


def test_between_decisions_nothing_is_proposed_and_upkeep_replaces_one():
    r = run(ex.Regeneration(k0=2.0, upkeep=6, grace=1, every=2))
    for _ in range(3):
        r.train(r.stream.draw())
    force(r, rate=[0.0] * 6)
    assert not r.watch.propose(r)
    seen = []
    for _ in range(9):
        r.train(r.stream.draw())
        force(r, rate=[0.0] * 6)
        seen.append(len(r.watch.apply(r.program)))
    assert seen == [0, 0, 1, 0, 0, 0, 0, 0, 1]


# -- a new expert ------------------------------------------------------------------------------------------------------
def reborn(covered: bool = False, **options) -> tuple[Run, dict[int, dict[str, np.ndarray]], Proposal]:
    """A run of which expert 2 was replaced; `covered`: expert 0 has all tokens, so that others share theirs with it."""
    r = run(ex.Regeneration(**QUIET, **options))
    if covered:
        with r.program.edit("all tokens") as e:
            e.set_weight(f"{EXPERT.format(0)}.threshold", np.float32(-3))
    for _ in range(4):
        r.step()
    force(r, rho=0.25, rate=[0.5, 0.5, 0.0, 0.5, 0.5, 0.5])
    before = {i: parameters(r.program, i) for i in range(6)}
    (change,) = r.watch.apply(r.program)
    return r, before, change


def test_a_new_expert_is_a_mean_of_unrouted_tokens_and_new_in_all_its_parameters():
    r, before, change = reborn()
    assert (change.event, change.name) == ("expert_reborn", EXPERT.format(2))
    (router,) = threshold_routers(r.program)
    prototype = r.program.weights[f"{change.name}.prototype"].numpy()
    used = int(state(r).ring.numpy()[1])
    tokens = state(r).unrouted.numpy()[:used]
    rows = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    assert np.linalg.norm(prototype) == pytest.approx(1, rel=1e-6)
    candidates = [tokens[rows @ row > 0.5].mean(axis=0) for row in rows]
    assert any(np.allclose(prototype, c / np.linalg.norm(c), atol=1e-5) for c in candidates)
    recent = state(r).recent.numpy()
    recent = recent[recent.any(axis=1)]
    cosines = (recent / np.linalg.norm(recent, axis=1, keepdims=True)) @ prototype
    theta = np.tanh(r.program.weights[f"{change.name}.threshold"].numpy())
    assert theta == pytest.approx(min(np.quantile(cosines, 1 - 2 / 6), 0.6), abs=1e-5)
    down = r.program.weights[f"{change.name}.down.weight"].numpy()
    assert np.abs(down).max() <= 0.02 / 4**0.5
    for i in range(6):
        same = all(np.array_equal(v, before[i][k]) for k, v in parameters(r.program, i).items())
        assert same == (i != 2)
    assert r.program.attrs(r.program.node(f"{change.name}.prototype"))["born"] == 4
    assert 0 <= change.facts["drift"] <= 1
    assert router.prototypes[2] == f"{change.name}.prototype"


def test_a_new_expert_follows_the_numbers_of_the_controller():
    def theta(r):
        return np.tanh(r.program.weights[f"{EXPERT.format(2)}.threshold"].numpy())

    def largest(r):
        return np.abs(r.program.weights[f"{EXPERT.format(2)}.down.weight"].numpy()).max()

    r, _, change = reborn()
    assert change.facts["tokens"] > reborn(near=0.999)[2].facts["tokens"] == 1
    assert theta(r) > 0.1
    assert theta(reborn(highest=0.1)[0]) == pytest.approx(0.1, abs=1e-6)
    assert largest(reborn(quiet=0.2)[0]) == pytest.approx(10 * largest(r), rel=1e-5)


@pytest.mark.parametrize("recent", [8, 32, 40])
def test_the_threshold_of_a_new_expert_is_a_quantile_of_as_many_tokens_as_are_kept(recent):
    r, _, change = reborn(recent=recent, highest=0.99)
    kept, batches = state(r).recent.numpy(), Run(0, None, **SMALL)
    drawn = [batches.stream.draw()["x"] for _ in range(4)]
    np.testing.assert_array_equal(kept, np.concatenate([drawn[3], drawn[2]])[:recent])
    cosines = kept / np.linalg.norm(kept, axis=1, keepdims=True) @ r.program.weights[f"{change.name}.prototype"].numpy()
    theta = np.tanh(r.program.weights[f"{change.name}.threshold"].numpy())
    assert theta == pytest.approx(np.quantile(cosines, 1 - 2 / 6), abs=1e-5)


def test_a_new_expert_moves_results_by_its_weight_and_the_largest_one_is_reported():
    """y' - y = w'·(f(x) - y), where y is the result without the expert that was replaced."""
    r, _, change = reborn(covered=True)
    (router,) = threshold_routers(r.program)
    recent = state(r).recent.numpy()
    recent = recent[recent.any(axis=1)]
    weights, moved = [], []
    alive = r.program.weights[router.alive].numpy().copy()
    names = [f"{change.name}.{part}.weight" for part in ("up", "down")]
    up, down = (r.program.weights[name].numpy().astype("f8") for name in names)
    for x in np.split(recent, len(recent) // 32):
        after = r.program.run({"x": x}, keep="all")
        with r.program.edit("without it") as e:
            e.set_weight(router.alive, alive & (np.arange(6) != 2))
        before = r.program.run({"x": x}, keep="all")
        r.program.undo()
        y, new = (seen.value(r.program.value("mlp.expert_mlp")).to_numpy("f8") for seen in (before, after))
        w = after.value(router.value("weights")).to_numpy("f8")[:, 2:3]
        h = x.astype("f8") @ up.T
        f = (h * (1 + np.vectorize(erf)(h / 2**0.5)) / 2) @ down.T
        np.testing.assert_allclose(new - y, w * (f - y), atol=1e-6)
        weights.append(w)
        moved.append(np.abs(new - y).max())
    assert max(moved) > 1e-3
    assert 0.01 < change.facts["drift"] < 0.9
    assert change.facts["drift"] == pytest.approx(np.concatenate(weights).max(), abs=1e-6)


def test_optimizers_begin_again_with_a_new_expert_alone():
    r, _, change = reborn()
    optimizer = r.train.optimizer
    old = {k: parameter_of(r.program, k) for k in r.program.weights if k.startswith("mlp.experts.0.")}
    moments = {k: optimizer.state_of(v).moments["m"].numpy().copy() for k, v in old.items()}
    key = f"{change.name}.prototype"
    assert optimizer.state_of(parameter_of(r.program, key)).steps.item() == 0
    before = r.program.weights[key].numpy().copy()
    for k, v in old.items():
        np.testing.assert_array_equal(optimizer.state_of(v).moments["m"].numpy(), moments[k])
    r.train(r.stream.draw())
    moved = np.abs(r.program.weights[key].numpy() - before)
    assert moved.max() == pytest.approx(3e-3, rel=0.01)


def test_the_old_handle_is_stale_and_the_entry_has_author_and_reason():
    r = run(ex.Regeneration(**QUIET))
    for _ in range(4):
        r.step()
    handle = r.program.node(EXPERT.format(2) + ".prototype")
    force(r, rho=0.25, rate=[0.5, 0.5, 0.0, 0.5, 0.5, 0.5])
    (change,) = r.watch.apply(r.program)
    with pytest.raises(StaleHandle):
        r.program.node(handle)
    entry = r.program.journal[-1]
    assert (entry.author, entry.tool) == ("lifecycle", "Regeneration")
    (noted,) = entry.annotations(EXPERT.format(2))
    assert (noted["event"], noted["step"], noted["age"], noted["rate"]) == ("expert_reborn", 4, 4, 0.0)
    assert noted["rho"] == 0.25
    assert noted["tokens"] == change.facts["tokens"] > 0
    for name in ("d", "epsilon", "tau"):
        assert noted[name] == r.train.reports[f"integrity.{name}"].item()
    assert entry in r.program.blame(EXPERT.format(2))


def test_undo_brings_the_named_expert_back_and_nothing_else():
    r, before, _ = reborn()
    for _ in range(20):
        r.train(r.stream.draw())
    trained = {i: parameters(r.program, i) for i in range(6)}
    r.program.undo()
    for i in range(6):
        for key, value in parameters(r.program, i).items():
            np.testing.assert_array_equal(value, before[i][key] if i == 2 else trained[i][key])
    r.train(r.stream.draw())
    r.program.redo()
    assert "born" in r.program.attrs(r.program.node(EXPERT.format(2) + ".prototype"))


def test_edits_replayed_at_their_steps_give_equal_weights():
    """Without a controller, on the same stream."""
    r, plain = run(ex.Regeneration(**QUIET)), run()
    for t in range(12):
        batch = r.stream.draw()
        r.train(batch)
        plain.train(plain.stream.draw())
        if t == 5:
            force(r, rho=0.5, rate=[0.0, 0.5, 0.0, 0.5, 0.5, 0.5])
        count = len(r.program.journal)
        r.watch.apply(r.program)
        for entry in r.program.journal[count:]:
            replay([entry], onto=plain.program)
    assert len(r.program.journal) > 1
    for key in r.program.weights:
        assert r.program.weights[key].data.tobytes() == plain.program.weights[key].data.tobytes(), key


# -- growth ------------------------------------------------------------------------------------------------------------
def test_an_expert_is_added_where_more_tokens_than_usual_have_none():
    r = run(ex.Regeneration(**QUIET), alive=3)
    for _ in range(4):
        r.train(r.stream.draw())
    state(r).fast.assign(Tensor(from_numpy(np.asarray(0.5, np.float32))))
    state(r).slow.assign(Tensor(from_numpy(np.asarray(0.4, np.float32))))
    (router,) = threshold_routers(r.program)
    (change,) = r.watch.apply(r.program)
    assert (change.event, change.name) == ("expert_born", EXPERT.format(3))
    assert r.program.weights[router.alive].numpy().tolist() == [True] * 4 + [False] * 2
    for _ in range(4):  # the slow average moves as fast as the fast one, which it nears
        before = [state(r).fast.item(), state(r).slow.item()]
        r.train(r.stream.draw())
        share = r.train.reports["life.mlp.router.unrouted"].item()
        after = [state(r).fast.item(), state(r).slow.item()]
        np.testing.assert_allclose(after, [0.98 * old + 0.02 * share for old in before], rtol=1e-5)
    for excess, events in ((0.019, []), (0.021, ["expert_born"])):
        state(r).fast.assign(Tensor(from_numpy(np.asarray(state(r).slow.item() + excess, np.float32))))
        assert [c.event for c in r.watch.apply(r.program)] == events


# -- steps that are not finite -----------------------------------------------------------------------------------------
def spoilt(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = batch["x"].copy()
    x[5, 1] = np.nan
    return {**batch, "x": x}


def everything(r: Run) -> dict[str, bytes]:
    held = {**r.program.weights, **r.train.optimizer.variables(), **r.train.variables()}
    return {n: v.data.tobytes() for n, v in held.items() if not n.endswith((".skipped", ".streak"))}


def test_a_training_continues_as_if_a_batch_that_is_not_finite_had_not_been_there():
    """With renewals: also no state of the controller has seen it, and no decision is made twice."""
    runs = []
    for bad in ((), (0, 5, 6, 9, 10, 11, 12)):
        r = run(ex.Regeneration(k0=2.0, pruning=1.0, upkeep=0, grace=3, every=2, most=1))
        for t in range(16):
            batch = r.stream.draw()
            if t in bad:
                assert r.train.plan  # new experts get their rates
                before = everything(r)
                r.train(spoilt(batch))
                assert r.train.skipped
                assert everything(r) == before
                force(r, rho=1.0)
                assert not r.watch.apply(r.program)
            r.train(batch)
            force(r, rho=1.0)
            r.watch.apply(r.program)
        states = r.watch.signals().own.states
        assert (states["skipped"].item(), states["streak"].item()) == (len(bad), 0)
        runs.append((everything(r), len(r.program.journal)))
    assert runs[0] == runs[1]
    assert runs[0][1] > 4


def test_five_steps_in_a_row_that_are_not_finite_are_an_error_and_four_are_not():
    r = run(ex.Regeneration(**QUIET))
    for bad in (1, 0, 4, 0, 4, 0, 5):
        for i in range(bad):
            r.train(spoilt(r.stream.draw()))
            if i == 4:
                before = everything(r)
                with pytest.raises(Diverged, match="in a row"):
                    r.watch.apply(r.program)
                assert everything(r) == before
            else:
                assert not r.watch.apply(r.program)
        if not bad:
            r.step()


def test_alarms_that_find_no_dead_expert_three_times_are_warned_of():
    """Once, also where experts are added; not if ρ rests, or one of the three finds one."""

    def after(rhos: list[float], dead: tuple[int, ...] = (), **options: int) -> list[bool]:
        r, seen = run(ex.Regeneration(**QUIET), **options), []
        for t, rho in enumerate(rhos):
            for _ in range(4):
                r.train(r.stream.draw())
            force(r, rho=rho, rate=[0.0 if t in dead else 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
            if options:
                state(r).fast.assign(state(r).slow + 0.5)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = r.watch.propose(r)
            assert bool(found) == (t in dead or bool(options))
            seen.append(any("no dead expert" in str(w.message) for w in caught))
        return seen

    assert after([1.0, 0.8, 0.6, 0.6, 0.6]) == [False, False, True, False, False]
    assert after([1.0, 0.8, 0.4, 0.6, 0.6]) == [False] * 5
    assert after([1.0, 0.8, 0.6, 0.6], dead=(1,)) == [False] * 4
    assert after([1.0, 0.8, 0.6], alive=3) == [False, False, True]


@pytest.mark.parametrize("hold", [0, 2, 5])
def test_after_growth_the_slow_average_moves_fast_for_hold_steps(hold):
    r = run(ex.Regeneration(**QUIET, hold=hold, growth=0.05), alive=3)
    for _ in range(4):
        r.train(r.stream.draw())
    for excess, events in ((0.045, []), (0.055, ["expert_born"])):
        state(r).fast.assign(Tensor(from_numpy(np.asarray(state(r).slow.item() + excess, np.float32))))
        assert [c.event for c in r.watch.apply(r.program)] == events
    fast = []
    for _ in range(8):
        before = state(r).slow.item()
        r.train(r.stream.draw())
        share = r.train.reports["life.mlp.router.unrouted"].item()
        after = {d: pytest.approx(d * before + (1 - d) * share, rel=1e-5) for d in (0.98, 0.998)}
        assert share != before
        fast.append(state(r).slow.item() == after[0.98])
        assert fast[-1] or state(r).slow.item() == after[0.998]
    assert fast == [True] * hold + [False] * (8 - hold)


# -- what it costs -----------------------------------------------------------------------------------------------------
class Deep(nn.Module):
    def __init__(self, experts: int, layers: int) -> None:
        self.layers = [
            nn.MoE(8, 4, experts, kind="mlp", act="gelu", router=nn.ThresholdRouter(8, experts, 2.0))
            for _ in range(layers)
        ]
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": self.head(x)}


def work_of_renewals(experts: int, layers: int) -> set[tuple[str, int, int]]:
    """(kind of the plan, its rows that were planned, nodes that were visited) for each of three renewals."""
    gw.manual_seed(0)
    batch, care = Stream(0, 32, 8).draw(), ex.Regeneration(**QUIET)
    p = gw.trace(Deep(experts, layers), batch["x"])
    ex.calibrate(p, {"x": batch["x"]}, k0=2)
    also = [ex.sdl(2.0), care.signals()]
    step = gw.compile_step(p, objective, Adam(p, lr=3e-3, lazy=True), batch, also=also)
    found = set()
    for number in (2, 5, 3):
        for _ in range(4):
            step(batch)
        signals = care.signals()
        signals.own.states["rho"].assign(Tensor(from_numpy(np.asarray(0.25, np.float32))))
        for path, layer in signals.layers.items():
            dead = (np.arange(experts) == number) & (path == "layers.0.router")
            layer.rate.assign(Tensor(from_numpy(np.where(dead, 0.0, 0.5).astype(np.float32))))
        assert isinstance(step._made, TrainingStepGraph)
        before = step._made.mirror.visited
        assert [c.name for c in care.apply(p) if c.event != "alarm"] == [f"layers.0.experts.{number}"]
        patched = step.plan.patched
        found.add((patched.kind, patched.nodes, step._made.mirror.visited - before))
    return found


def test_a_renewal_plans_equally_many_rows_whatever_the_number_of_experts_and_layers():
    (small,) = work_of_renewals(8, 2)
    assert small[0] == "patched"
    assert work_of_renewals(deep(256, 32), 2) == work_of_renewals(8, deep(24, 6)) == {small}


def test_calm_steps_read_nothing_and_every_tenth_all_counters_by_one_read(monkeypatch):
    """A compiled step reads nothing on the host, and the controller reads only when it may decide."""
    r, sizes = run(ex.Regeneration(k0=2.0, grace=1)), list[int]()
    for _ in range(20):
        r.train(r.stream.draw())
        r.watch.propose(r)
    host = NDArray._host
    monkeypatch.setattr(NDArray, "_host", lambda array: (sizes.append(array.size), host(array))[1])
    per_step = []
    for batch in [r.stream.draw() for _ in range(30)]:
        sizes.clear()
        r.train(batch)
        assert not sizes
        r.watch.apply(r.program)
        per_step.append(sorted(sizes))
    # four counts, ten rows of figures; rates, which are alive, two shares of unrouted tokens, two steps
    assert per_step == [[4 + 10 * 8 + 6 + 6 + 2 + 2] if i % 10 == 9 else [] for i in range(30)]


@pytest.mark.filterwarnings("ignore:alarms find no dead expert")
def test_alarms_between_decisions_are_reported_with_their_steps_and_lost_by_no_pause():
    """Also if decisions are rare, and if the number of steps changed under the controller, as in a resumed training."""
    r = run(ex.Regeneration(k0=2.0, upkeep=0, grace=5, alarm=0.3, every=10))
    alarms, seen, rows = [0.0], [], []
    for t in range(1, 61):
        if t == 34:
            r.stream.shift()
        if t == 36:
            for variable in r.train.variables().values():
                variable.assign(Tensor(from_numpy(variable.numpy().copy())))
        r.train(r.stream.draw())
        alarms.append(r.train.reports["integrity.alarms"].item())
        found = [c for c in r.watch.apply(r.program) if c.event == "alarm"]
        assert not found or t % 10 == 0
        seen += [t - c.steps_ago for c in found]
        assert all(c.facts["d"] < -0.3 for c in found)
        rows.append(len(r.watch.figures()))
    expected = [t for t in range(1, 61) if alarms[t] > alarms[t - 1]]
    assert seen == expected
    assert {t % 10 for t in seen} - {0}
    assert rows == [10 if t % 10 == 0 else 0 for t in range(1, 61)]


def test_a_controller_that_decides_rarely_reads_what_it_keeps_before_it_is_overwritten():
    r, steps = run(ex.Regeneration(k0=2.0, every=300)), []
    for t in range(1, 601):
        r.train(r.stream.draw())
        r.watch.propose(r)
        if n := len(r.watch.figures()):
            steps.append((t, n))
    assert steps == [(256, 256), (300, 44), (512, 212), (600, 88)]


# -- by other hands ----------------------------------------------------------------------------------------------------
def test_a_run_continues_after_a_user_cut_an_expert():
    r = run(ex.Regeneration(**QUIET))
    for _ in range(4):
        r.step()
    with r.program.edit("by a user") as e:
        e.cut_units(r.program.axes()["mlp.experts"].units([2]))
    r.step()
    assert state(r).rate.shape == (5,)
    force(r, rho=1.0, rate=[0.0] * 5)
    r.step()
    assert {c.event for _, c in r.changes} == {"expert_reborn"}
    r.step()


def test_programs_without_a_threshold_router_and_wrong_numbers_are_refused():
    p = gw.trace(nn.Linear(3, 4), np.zeros((2, 3), np.float32))
    with p.edit("names") as e:
        e.set_outputs(logits=p.outputs()[0])
    with pytest.raises(ex.NoRouter):
        list(ex.Regeneration().signals().nodes(p))
    settings: list[dict[str, Any]] = [{"pruning": 2.0}, {"growth": -0.1}, {"alpha": 0.0}, {"gamma": 2.0}, {"window": 0}]
    for wrong in settings:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            ex.Regeneration(**wrong)


def test_the_table_has_every_number_and_no_decision_reads_the_level_of_integrity():
    care = ex.Regeneration(pruning=0.1)
    rows = [line.split() for line in care.table().splitlines()[1:]]
    signature = inspect.signature(ex.Regeneration).parameters
    assert [(name, default) for name, _, default in rows] == [(n, str(p.default)) for n, p in signature.items()]
    assert ["pruning", "0.1", "0.05"] in rows
    source = Path(inspect.getfile(ex.Regeneration)).read_text(encoding="utf-8")
    reads = [line for line in source.splitlines() if 'states["pi"]' in line or '"pi"' in line]
    assert all("facts" in line or line.startswith("FIGURES = ") for line in reads)
