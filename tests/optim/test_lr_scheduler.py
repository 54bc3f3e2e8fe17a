"""Golden rates: a rate is a function of the step, so a resumed run has the same ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from graphwright.array import from_numpy
from graphwright.autograd import Parameter
from graphwright.errors import UsageError
from graphwright.optim import SGD, lr_scheduler, warmup_cosine
from graphwright.optim.lr_scheduler import LRScheduler


def test_warmup_cosine_golden_rates():
    rates = [warmup_cosine(s, peak=3e-3, warmup=4, total=10, floor=0.1) for s in range(12)]
    golden = [7.5e-4, 1.5e-3, 2.25e-3, 3e-3, 3e-3, 2.819134e-3, 2.325e-3, 1.65e-3, 9.75e-4, 4.808657e-4, 3e-4, 3e-4]
    assert rates == pytest.approx(golden, rel=1e-6)


def test_warmup_cosine_closed_form():
    for step in range(100, 701):
        t = (step - 100) / 600
        wanted = 3e-3 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * t)))
        assert warmup_cosine(step, peak=3e-3, warmup=100, total=700, floor=0.05) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (5, 5), (7, 5), (0, 10)])
def test_rates_stay_between_floor_and_peak(warmup, total):
    rates = [warmup_cosine(s, peak=1.0, warmup=warmup, total=total, floor=0.2) for s in range(total + 3)]
    assert all(0 < r <= 1 for r in rates)
    assert rates[-1] == pytest.approx(0.2) or warmup >= total


@pytest.mark.parametrize("wrong", [{"total": 0}, {"warmup": -1}, {"floor": 1.5}, {"floor": -0.1}])
def test_invalid_warmup_cosine_arguments_are_refused(wrong):
    with pytest.raises(UsageError):
        warmup_cosine(0, **{"peak": 1.0, "warmup": 2, "total": 10, **wrong})


# -- schedulers --------------------------------------------------------------------------------------------------------
def optimizer(*rates: float) -> SGD:
    groups = [{"params": [Parameter(from_numpy(np.zeros(1, "f4")))], "lr": r} for r in rates]
    return SGD(groups, lr=rates[0])


TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("ConstantLR", {}),
    ("ConstantLR", {"factor": 0.5, "total_iters": 3}),
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("LambdaLR", {"lr_lambda": lambda step: 0.9**step}),
    ("LambdaLR", {"lr_lambda": [lambda step: 0.9**step, lambda step: 1 / (1 + step)]}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 0.1, "end_factor": 0.5, "total_iters": 7}),
    ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.01}),
    ("MultiStepLR", {"milestones": [2, 5, 5], "gamma": 0.5}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("PolynomialLR", {"total_iters": 7, "power": 2.0}),
    ("PolynomialLR", {}),
    ("PolynomialLR", {"total_iters": 1}),
    ("LinearLR", {"total_iters": 1}),
    ("StepLR", {"step_size": 1}),
    ("MultiStepLR", {"milestones": [2]}),
    ("CosineAnnealingLR", {"T_max": 1}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2, "eta_min": 0.01}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": [0.1, 0.2], "step_size_up": 2, "step_size_down": 3}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "mode": "triangular2"}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "mode": "exp_range", "gamma": 0.9}),
    ("OneCycleLR", {"max_lr": [0.1, 0.5], "total_steps": 14}),
    ("OneCycleLR", {"max_lr": 0.1, "epochs": 2, "steps_per_epoch": 9, "anneal_strategy": "linear"}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 15, "three_phase": True, "pct_start": 0.4}),
]


@pytest.mark.parametrize(("name", "options"), TORCHS, ids=lambda v: v if isinstance(v, str) else "")
def test_schedulers_match_torch(name, options):
    opt = optimizer(0.1, 0.4)
    params = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    other = torch.optim.SGD([{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.4}])
    unused = {"cycle_momentum": False} if name in ("CyclicLR", "OneCycleLR") else {}
    mine, theirs = (
        getattr(lr_scheduler, name)(opt, **options),
        getattr(torch.optim.lr_scheduler, name)(other, **options, **unused),
    )
    for _ in range(13):
        assert mine.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-12)
        assert [g.lr for g in opt.param_groups] == mine.get_last_lr()
        other.step()
        mine.step()
        theirs.step()


def test_sequential_schedules_match_torch():
    opt, other = optimizer(0.1, 0.1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def made(module: Any, over: Any) -> Any:
        parts = [module.LinearLR(over, 0.5, total_iters=3), module.ExponentialLR(over, 0.9), module.StepLR(over, 2)]
        return module.SequentialLR(over, parts, milestones=[3, 7])

    mine, theirs = made(lr_scheduler, opt), made(torch.optim.lr_scheduler, other)
    for _ in range(12):
        assert mine.get_last_lr()[0] == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        other.step()
        mine.step()
        theirs.step()
    with pytest.raises(UsageError, match="milestone"):
        lr_scheduler.SequentialLR(opt, [lr_scheduler.StepLR(opt, 2)], milestones=[3])


@pytest.mark.parametrize("options", [
    {"patience": 1}, {"patience": 0, "cooldown": 2, "min_lr": [0.03, 0.001]},
    {"mode": "max", "factor": 0.5, "patience": 2, "threshold": 0.3, "threshold_mode": "abs"},
    {"threshold": 0.2, "patience": 0}, {"mode": "max", "threshold": 0.2, "patience": 0},
])  # fmt: skip
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_reduction_on_a_plateau_matches_torch_also_after_resuming(options: dict[str, Any], sign: float):
    values = sign * np.array([3.0, 2.0, 2.1, 1.9, 1.95, 1.8, 1.9, 1.9, 1.9, 1.2, 1.1, 1.15, 1.3, 1.4, 1.5])
    opt = optimizer(0.1, 0.4)
    other = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": r} for r in (0.1, 0.4)])
    mine = lr_scheduler.ReduceLROnPlateau(opt, **options)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(other, **options)
    for step, value in enumerate(values):
        if step in (0, 6):
            state, opt = mine.state_dict(), optimizer(1.0, 1.0)
            mine = lr_scheduler.ReduceLROnPlateau(opt, **options)
            mine.load_state_dict(state)
        mine.step(value)
        theirs.step(value)
        assert mine.get_last_lr() == pytest.approx([g["lr"] for g in other.param_groups], rel=1e-12)


GOLDEN = {
    "warm-up and cosine": (
        lambda opt: lr_scheduler.WarmupCosineLR(opt, warmup=2, total=6, floor=0.1),
        [0.5, 1.0, 1.0, 0.8681980515, 0.55, 0.2318019485, 0.1, 0.1],
    ),
    "wsd": (
        lambda opt: lr_scheduler.WSDLR(opt, warmup=2, stable=3, decay=4, floor=0.2),
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
    "wsd without ends": (lambda opt: lr_scheduler.WSDLR(opt, warmup=0, stable=2, decay=0, floor=0.5), [1, 1, 0.5, 0.5]),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_golden_rates_also_after_resuming(name, stop):
    make, golden = GOLDEN[name]
    opt = optimizer(1.0, 0.5)
    scheduler: LRScheduler = make(opt)
    rates = [opt.param_groups[1].lr / 0.5]
    for step in range(1, len(golden)):
        if step == stop:
            state = scheduler.state_dict()
            opt = optimizer(1.0, 0.5)
            scheduler = make(opt)
            scheduler.load_state_dict(state)
        scheduler.step()
        rates.append(opt.param_groups[1].lr / 0.5)
    assert rates == pytest.approx(golden, rel=1e-9)


@pytest.mark.parametrize("state", [{}, {"last_step": -1}, {"last_step": 1.0}, {"last_step": 1, "more": 2}])
def test_an_invalid_scheduler_state_changes_nothing(state):
    opt = optimizer(1.0)
    scheduler = lr_scheduler.StepLR(opt, 1)
    with pytest.raises(UsageError, match="state"):
        scheduler.load_state_dict(state)
    assert (scheduler.last_step, opt.lr) == (0, 1.0)


OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("ConstantLR", {"factor": 1.1}), ("ConstantLR", {"total_iters": -1}), ("StepLR", {"step_size": 0}),
    ("StepLR", {"step_size": 1, "gamma": -0.1}), ("LinearLR", {"start_factor": 0.0}), ("LinearLR", {"end_factor": 1.1}),
    ("LinearLR", {"total_iters": 0}), ("CosineAnnealingLR", {"T_max": 0}),
    ("WarmupCosineLR", {"warmup": 1, "total": 0}), ("MultiStepLR", {"milestones": [1], "gamma": -1}),
    ("CosineAnnealingLR", {"T_max": 1, "eta_min": -1.0}), ("ExponentialLR", {"gamma": -0.1}),
    ("PolynomialLR", {"total_iters": 0}), ("PolynomialLR", {"power": -1.0}), ("LambdaLR", {"lr_lambda": [abs] * 3}),
    ("CosineAnnealingWarmRestarts", {"T_0": 0}), ("CosineAnnealingWarmRestarts", {"T_0": 1, "T_mult": 0}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": [0.1]}), ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "step_size_up": 0}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "mode": "x"}), ("OneCycleLR", {"max_lr": 0.1}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 5, "pct_start": 1.1}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 5, "anneal_strategy": "x"}), ("ReduceLROnPlateau", {"factor": 1.0}),
    ("ReduceLROnPlateau", {"mode": "x"}), ("WSDLR", {"warmup": -1, "stable": 1, "decay": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), OUT_OF_RANGE, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_schedules_are_refused(name: str, options: dict[str, Any]) -> None:
    opt = optimizer(0.1, 0.4)
    with pytest.raises(UsageError):
        getattr(lr_scheduler, name)(opt, **options)
    assert [g.lr for g in opt.param_groups] == [0.1, 0.4]


def test_a_single_cycle_ends_at_its_last_step() -> None:
    opt = optimizer(0.1)
    schedule = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=3)
    for _ in range(3):
        schedule.step()
    with pytest.raises(UsageError, match="schedule"):
        schedule.step()


def test_a_compiled_step_reads_new_rates_without_retracing():
    import graphwright as gw

    p = Parameter(from_numpy(np.zeros(1, np.float32)), name="p")
    opt = SGD([p], 1.0)
    scheduler = lr_scheduler.StepLR(opt, 1, 0.5)

    @gw.compile
    def step():
        opt.zero_grad()
        p.sum().backward()
        opt.step()

    seen = []
    for _ in range(4):
        step()
        scheduler.step()
        seen.append(p.item())
    assert seen == [-1.0, -1.5, -1.75, -1.875]
    assert step.traces == 1


def test_one_cycle_without_time_to_rise_starts_at_the_top() -> None:
    scheduler = lr_scheduler.OneCycleLR(optimizer(0.1), 1.0, 10, pct_start=0.1)  # torch divides by 0 here
    rates = scheduler.get_last_lr()
    for _ in range(9):
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(1.0 / 25 / 1e4)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("names", [("StepLR", "ExponentialLR"), ("MultiplicativeLR", "CosineAnnealingLR", "LinearLR")])
def test_chained_schedules_match_torch(names: tuple[str, ...]) -> None:
    options: dict[str, dict[str, Any]] = {
        "StepLR": {"step_size": 3, "gamma": 0.5}, "ExponentialLR": {"gamma": 0.9}, "LinearLR": {"total_iters": 4},
        "MultiplicativeLR": {"lr_lambda": lambda step: 1 - step / 20}, "CosineAnnealingLR": {"T_max": 20},
    }  # fmt: skip
    rates = []
    for home, opt in ((lr_scheduler, optimizer(0.1, 0.02)), (torch.optim.lr_scheduler, torch_optimizer(0.1, 0.02))):
        home: Any
        chain = home.ChainedScheduler([getattr(home, n)(opt, **options[n]) for n in names], optimizer=opt)
        found = []
        for _ in range(9):
            found.append(chain.get_last_lr())
            opt.step()
            chain.step()
        rates.append(found)
    np.testing.assert_allclose(rates[0], rates[1], rtol=1e-6)


def test_schedules_that_do_not_scale_the_base_cannot_be_chained() -> None:
    opt = optimizer(0.1)
    with pytest.raises(UsageError, match="scales"):
        lr_scheduler.ChainedScheduler([lr_scheduler.LambdaLR(opt, lambda _: 1.0)])
    with pytest.raises(UsageError, match="one or more"):
        lr_scheduler.ChainedScheduler([])


def torch_optimizer(*rates: float) -> Any:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": r} for r in rates], lr=rates[0])


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, o in TORCHS if n != "SequentialLR"])
def test_schedules_resume_at_last_epoch_as_in_torch(name: str, options: dict[str, Any]) -> None:
    rates = [0.1, 0.02] if any(isinstance(v, list) and name != "MultiStepLR" for v in options.values()) else [0.1]
    opt = optimizer(*rates)
    running = getattr(lr_scheduler, name)(opt, **options)
    for _ in range(4):
        running.step()
    resumed = getattr(lr_scheduler, name)(optimizer(*rates), **options, last_epoch=3)
    assert resumed.last_epoch == running.last_epoch == 4
    assert resumed.get_last_lr() == running.get_last_lr() == running.get_lr()
    assert resumed.base_lrs == rates
