"""Trainings of every kind continue bit for bit: low precision, loss scaling, sums of gradients, schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bonsai import X, Y, everything, loader, loss, train

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import nn, optim
from graphwright.amp import GradScaler
from graphwright.autograd import Parameter
from graphwright.lifecycle.contents import Contents, payload

pytestmark = pytest.mark.usefixtures("warm")
STEPS = 11
Made = tuple[Any, Any]
"""A compiled step, and the schedule of its learning rate or None."""


class Net(nn.Module):
    """Dropout and batch statistics, which a step changes besides its parameters."""

    def __init__(self) -> None:
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        x = self.norm(self.first(x.to(self.first.weight.dtype))).relu()
        return self.last(nn.functional.dropout(x, 0.2, training=True)).float()


def born(kind: str) -> gw.Program:
    gw.manual_seed(0)
    net = Net()
    return gw.trace(net.to("bfloat16") if kind.startswith("bfloat16") else net, gw.tensor(X[:8]))


def compiled(p: gw.Program, optimizer: Any, **options: Any) -> Made:
    return gw.compile_step(p, loss, optimizer, {"x": X[:8], "y": Y[:8]}, **options), None


def scheduled(p: gw.Program, schedule: Callable[..., Any], *args: Any) -> Made:
    optimizer = optim.AdamW(p, 1e-2)
    return compiled(p, optimizer)[0], schedule(optimizer, *args)


KINDS: dict[str, Callable[[gw.Program], Made]] = {
    "bfloat16, master weights": lambda p: compiled(p, optim.AdamW(p, 1e-2)),
    "bfloat16, stochastic": lambda p: compiled(p, optim.AdamW(p, 1e-2, low="stochastic")),
    "float16, scaled loss": lambda p: compiled(
        p, optim.AdamW(p, 1e-2), amp="float16", scaler=GradScaler(2.0**60, growth_interval=3)
    ),
    "three batches an update": lambda p: compiled(p, optim.AdamW(p, 1e-2), accumulate=3, clip=0.5),
    "momentum": lambda p: compiled(p, optim.SGD(p, 1e-2, 0.9)),
    "cosine": lambda p: scheduled(p, optim.lr_scheduler.CosineAnnealingLR, 20),
    "plateau": lambda p: scheduled(p, optim.lr_scheduler.ReduceLROnPlateau, "min", 0.5, 1),
}


def begin(kind: str, folder: Path) -> tuple[lf.Life, lf.Segment, Any]:
    life, data = lf.birth(born(kind), folder, name="x"), loader()
    step, schedule = KINDS[kind](life.program)
    return life, life.segment(step, data, scheduler=schedule), data


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_of_this_kind_is_resumed_bit_for_bit(tmp_path, kind):
    life, run, data = begin(kind, tmp_path / "whole")
    wanted = train(run, data, STEPS), life.program.hash()
    tensors = everything(life)
    assert tensors == {n: payload(h.variable.data).digest() for n, h in Contents(life.program, run.train).items()} | {
        n: digest for n, digest in tensors.items() if n.startswith("states.")
    }
    life, run, data = begin(kind, tmp_path / "life")
    losses: list[float] = []
    for stop in (1, 4, 8, STEPS):
        losses += train(run, data, stop)
        if stop < STEPS:
            life.close()
            gw.manual_seed(99)
            life, data = lf.open(tmp_path / "life"), loader()
            step, schedule = KINDS[kind](life.program)
            run = life.resume(step, data, scheduler=schedule)
    assert (losses, life.program.hash()) == wanted
    assert everything(life) == tensors


def test_a_step_advances_the_schedule_before_its_commit(tmp_path):
    life, run, data = begin("cosine", tmp_path / "life")
    optimizer = optim.AdamW(born("cosine"), 1e-2)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for age in range(1, 5):
        train(run, data, age)
        schedule.step()
        assert run.train.optimizer.lr == optimizer.lr
    life.close()
    life = lf.open(tmp_path / "life")
    step, schedule = KINDS["cosine"](life.program)
    life.resume(step, loader(), scheduler=schedule)
    assert step.optimizer.lr == optimizer.lr < 1e-2


class Averaged(nn.Module):
    """A parameter that the program assigns, and that no gradient reaches."""

    def __init__(self) -> None:
        self.last, self.mean = nn.Linear(8, 3), Parameter(np.zeros(8, np.float32))

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        self.mean.assign(self.mean * 0.9 + x.mean(0) * 0.1)
        return self.last(x)


def test_a_parameter_that_the_program_assigns_is_written_without_an_update(tmp_path):
    life = lf.birth(gw.trace(Averaged(), gw.tensor(X[:8])), tmp_path / "life", name="x")
    train_, _ = compiled(life.program, optim.AdamW(life.program, 1e-2))
    run = life.segment(train_)
    for _ in range(3):
        run.step([X[:8], Y[:8]])
        assert {"model.mean", "model.last.weight"} <= life.store.last.infos.keys()
    assert "optimizer.adamw.mean.m" not in life.store.last.infos
    life.commit(verify=True)
