"""Optimizers, schedules, clipping, averages, compiled training steps and saved trainings."""

from __future__ import annotations

from graphwright.autograd.clipping import NonFiniteGradient, clip_grad_norm_, clip_grad_value_
from graphwright.optim import lr_scheduler
from graphwright.optim.checkpoint import SavedState, StateError, load_state, save_state
from graphwright.optim.gradients import accumulate, ema_update
from graphwright.optim.lbfgs import LBFGS
from graphwright.optim.lr_scheduler import warmup_cosine
from graphwright.optim.optimizer import LOW, Optimizer, ParamGroup, ParamState
from graphwright.optim.optimizers import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from graphwright.optim.step_terms import StepTerm, StepView
from graphwright.optim.training_step import CompiledStep, StepOptions, compile_step

__all__ = [
    "ASGD", "LBFGS", "LOW", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "CompiledStep", "Lion", "Muon",
    "NAdam", "NonFiniteGradient", "Optimizer", "ParamGroup", "ParamState", "RAdam", "RMSprop", "Rprop", "SavedState",
    "StateError", "StepOptions", "StepTerm", "StepView", "accumulate", "clip_grad_norm_", "clip_grad_value_",
    "compile_step", "ema_update", "load_state", "lr_scheduler", "save_state", "warmup_cosine",
]  # fmt: skip
