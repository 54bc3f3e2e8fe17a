"""Updates that a term skips: not a bit changes, and the training continues as if the batch had not been there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import amp, nn, optim
from graphwright.autograd import Tensor, Variable
from graphwright.errors import Diverged, UsageError
from graphwright.ops import call
from graphwright.optim import StepTerm, StepView
from graphwright.optim.step_terms import PATIENCE, check_streak
from graphwright.program import Program

INPUTS = {"x": (8, 6), "y": np.zeros(8, np.int64)}
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "lazy": lambda p: optim.Adam(p, lr=1e-2, lazy=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "lion": lambda p: optim.Lion(p, lr=1e-2),
    "muon": lambda p: optim.Muon([v for v in p.parameters() if v.ndim == 2], lr=1e-2),
    "rprop": lambda p: optim.Rprop(p, lr=1e-2),
}


class Guard(StepTerm):
    """Skips updates whose loss is not finite; counts steps before the flag, and keeps a mean after it."""

    def __init__(self) -> None:
        self.mean, self.count = (Variable(np.zeros((), np.float32), name=f"guard.{n}") for n in ("mean", "count"))

    def variables(self) -> Any:
        return {"mean": self.mean, "count": self.count}

    def __call__(self, view: StepView) -> None:
        self.count.assign(self.count + 1.0)
        view.skip(call("logical_not", call("isfinite", view.loss)))
        view.assign(self.mean, 0.9 * self.mean + 0.1 * view.loss)


def network(dtype: str = "float32") -> Program:
    gw.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    return gw.trace(net, gw.tensor(np.zeros((8, 6), np.float32)).to(dtype))


def loss(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, y)


def batch(step: int, bad: float = 0.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(8, 6)).astype("f4"), rng.integers(0, 4, 8)
    x[3, 2] = bad or x[3, 2]
    return {"x": x, "y": y}


def bits(p: Program, opt: Any, *terms: Guard) -> dict[str, bytes]:
    held = {**p.variables(), **opt.variables(), **{t.mean.name: t.mean for t in terms}}
    return {name: v.data.tobytes() for name, v in held.items() if not name.endswith("gradient_sum")}


def trained(p: Program, opt: Any, batches: list[Any], **options: Any) -> tuple[list[Any], Any, Guard]:
    term = Guard()
    step = gw.compile_step(p, loss, opt, INPUTS, also=[term], **options)
    return [(step(b).numpy().tobytes(), step.skipped) for b in batches], step, term


@pytest.mark.parametrize("executor", ["aten", "vm"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_with_a_nan_changes_no_bit_of_weights_moments_and_counts(kind: str, executor: str) -> None:
    good = [batch(i) for i in range(6)]
    bad = [*good[:3], batch(90, np.nan), batch(91, np.inf), *good[3:]]
    runs = []
    for batches in (good, bad):
        p = network()
        opt = OPTIMIZERS[kind](p)
        found, step, term = trained(p, opt, batches[:3], executor=executor)
        before = bits(p, opt, term)
        for b in batches[3:-3]:
            assert np.isnan(step(b).item())
            assert step.skipped
            assert bits(p, opt, term) == before
        found += [(step(b).numpy().tobytes(), step.skipped) for b in batches[-3:]]
        assert bits(p, opt, term) != before
        assert term.count.item() == len(batches)
        runs.append((found, bits(p, opt, term)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("low", "options"), [
    ("master", {"clip": 0.1}), ("master", {"amp": "bfloat16"}), ("stochastic", {}), ("nearest", {}), ("master", {}),
])  # fmt: skip
def test_a_skipped_step_of_low_precision_changes_no_bit(low: str, options: Any) -> None:
    p = network("float32" if options else "bfloat16")
    opt = optim.AdamW(p, lr=1e-2, low=low)
    good, bad = batch(0), batch(1, np.nan)
    if not options:
        good, bad = ({**given, "x": gw.tensor(given["x"]).to("bfloat16")} for given in (good, bad))
    step = gw.compile_step(p, loss, opt, good, also=[Guard()], **options)
    step(good)
    before = bits(p, opt)
    step(bad)
    assert step.skipped
    assert bits(p, opt) == before


def test_one_bad_batch_of_an_accumulated_step_skips_its_update_and_no_other() -> None:
    good = [batch(i) for i in range(9)]
    for where in (3, 4, 5):
        runs = []
        for batches in ([*good[:3], *good[6:]], [b if i != where else batch(i, np.nan) for i, b in enumerate(good)]):
            p = network()
            opt = optim.AdamW(p, lr=1e-2)
            found, step, _ = trained(p, opt, batches, accumulate=3)
            assert [flag for _, flag in found] == [len(batches) == 9 and i == where for i in range(len(batches))]
            runs.append((bits(p, opt), len(step.variables())))
        assert runs[0] == runs[1]


def test_the_scale_of_the_loss_follows_the_scaler_alone() -> None:
    p = network()
    scaler, opt = amp.GradScaler(2.0**10, growth_interval=2), optim.AdamW(p, lr=1e-2)

    class Picky(StepTerm):
        def __call__(self, view: StepView) -> None:
            assert view.scaled
            view.skip(call("gt", view.named("x").max(), 50.0))

    step = gw.compile_step(p, loss, opt, INPUTS, amp="float16", scaler=scaler, also=[Picky()])
    step(batch(0))
    before = bits(p, opt)
    step(batch(1, 60.0))
    assert step.skipped
    assert bits(p, opt) == before
    assert scaler.get_scale() == 2.0**11  # the gradients were finite


def test_a_program_with_checkpoints_skips_too() -> None:
    p = network()
    opt = optim.AdamW(p, lr=1e-2)
    p.checkpoint([n for n in p.nodes() if p.path(n).endswith("tanh")])
    _, step, term = trained(p, opt, [batch(0)])
    before = bits(p, opt, term)
    assert np.isnan(step(batch(1, np.nan)).item())
    assert step.skipped
    assert bits(p, opt, term) == before


def test_steps_without_such_terms_are_never_skipped() -> None:
    p = network()
    step = gw.compile_step(p, loss, optim.SGD(p, lr=0.1), INPUTS)
    step(batch(0))
    assert not step.skipped
    assert not step.reports


def test_a_flag_is_one_bool() -> None:
    class Wrong(StepTerm):
        def __call__(self, view: StepView) -> None:
            view.skip(view.loss)

    p = network()
    with pytest.raises(UsageError, match="0-d bool"):
        gw.compile_step(p, loss, optim.SGD(p, lr=0.1), INPUTS, also=[Wrong()])(batch(0))


def test_a_training_has_diverged_at_the_fifth_skipped_step() -> None:
    check_streak(PATIENCE - 1, "step 4")
    with pytest.raises(Diverged, match="step 5") as caught:
        check_streak(PATIENCE, "step 5")
    error = caught.value
    assert all((error.where, error.expected, error.got, error.fix))
