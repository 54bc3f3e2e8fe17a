"""Training and scoring of candidates. Candidates of equal structure share a compiled training step."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Tensor
from graphwright.evolve.layers.candidate import Moments, TrainingGenes
from graphwright.evolve.settings import Layers
from graphwright.evolve.tasks.losses import LOSSES
from graphwright.evolve.tasks.task import DataSplit, Task
from graphwright.optim import SGD, Adam, Optimizer, clip_grad_norm_
from graphwright.plan import compile
from graphwright.program import Program


def optimizer(program: Program, training: TrainingGenes, state: Moments | None = None) -> Optimizer:
    """Create an optimizer of all parameters of a program, including those that later edits add; load its state."""
    adam = training.optimizer == "adam"
    opt = Adam(program, lr=training.lr) if adam else SGD(program, lr=training.lr, momentum=0.9)
    restore(opt, state or {})
    return opt


def moments(opt: Optimizer) -> Moments:
    """Return a dict with copies of the state of an optimizer, except learning rates."""
    rates = {group.rate.name for group in opt.param_groups}
    return {name: v.data.to_numpy().copy() for name, v in opt.variables().items() if name not in rates}


def restore(opt: Optimizer, state: Moments) -> None:
    """Assign saved values to the optimizer's variables of equal name and shape; other variables keep their values."""
    for name, variable in opt.variables().items():
        if name in state and state[name].shape == variable.shape:
            value = np.ascontiguousarray(state[name]).reshape(variable.shape)
            variable.assign(Tensor(from_numpy(value).to(variable.device)))


class CandidateStep(NamedTuple):
    """A program, its optimizer, and the compiled training step that updates both."""

    program: Program
    opt: Optimizer
    step: Any


class StepCache:
    """A cache of compiled training steps by structure, optimizer and loss, which drops the least recently used step.

    Attributes:
        planned: number of steps that were compiled.
    """

    def __init__(self, most: int = 16) -> None:
        self._most, self.planned = most, 0
        self._steps: dict[tuple[str, str, str], CandidateStep] = {}

    def take(self, program: Program, opt: Optimizer, training: TrainingGenes, task: Task, clip: float) -> CandidateStep:
        """Return the compiled step for a candidate, loaded with the candidate's weights and optimizer state."""
        key = (program.structure_hash(), training.optimizer, training.loss)
        slot = self._steps.pop(key, None)
        if slot is None:
            self.planned += 1
            slot = _compiled(program, training, task, clip)
        self._steps[key] = slot  # the most recently used entry is the last
        if len(self._steps) > self._most:
            del self._steps[next(iter(self._steps))]
        for name, variable in slot.program.variables().items():
            variable.assign(program.variables()[name])
        restore(slot.opt, {name: v.data.to_numpy() for name, v in opt.variables().items()})
        return slot


def _compiled(program: Program, training: TrainingGenes, task: Task, clip: float) -> CandidateStep:
    slot, name, answer = program.fork("compiled step"), program.input_names()[0], program.output_names()[0]
    opt = optimizer(slot, training)

    def lost(found: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
        if counts is not None:
            return _over_time(found, target, counts, training.loss)
        if training.loss != "heads":
            return LOSSES[task.loss].trained[training.loss](found, target)
        parts = [LOSSES[h.loss].trained[h.loss](found[:, h.outputs], target[:, h.outputs]) * h.weight
                 for h in task.heads.values()]  # fmt: skip
        return sum(parts[1:], start=parts[0])

    def step(x: Tensor, y: Tensor, counts: Tensor | None = None) -> Tensor:
        opt.zero_grad()
        loss = lost(slot(**{name: x})[answer], y, counts)
        loss.backward()
        clip_grad_norm_([p for p in slot.parameters() if p.grad is not None], clip)
        opt.step()
        return loss

    return CandidateStep(slot, opt, compile(step))


def fit(
    task: Task, program: Program, opt: Optimizer, training: TrainingGenes, s: Layers, rng: np.random.Generator,
    cache: StepCache,
) -> int:  # fmt: skip
    """Train a program on batches drawn by `rng`; return the number of cases trained on."""
    if not s.steps:
        return 0
    part = task.train
    x = part.x.reshape(len(part.x), *cases(program))
    data: tuple[np.ndarray, ...] = (x, part.y, part.counts)
    if not task.sequence:
        y = part.y[:, 0]
        data = (x, LOSSES[training.loss].labels(y) if training.loss in LOSSES else y)
    slot, batch = cache.take(program, opt, training, task, s.clip), batch_of(program, s, task)
    for _ in range(s.steps):
        rows = rng.choice(len(x), batch, replace=False)
        slot.step(*(array[rows] for array in data))
    adopt(program, {key: slot.program.weights.array(key).to_numpy().copy() for key in program.weights}, s.steps)
    restore(opt, moments(slot.opt))
    return s.steps * batch


def adopt(program: Program, weights: Mapping[str, np.ndarray | NDArray], steps: int) -> None:
    """Assign the weights that `steps` training steps gave, as one edit."""
    why = f"train {steps} steps"
    with program.edit(why, author="evolution", tool="graphwright.evolve", keep_undo=False) as e:
        for key, value in weights.items():
            e.set_weight(key, value)


def _over_time(answer: Tensor, target: Tensor, counts: Tensor, loss: str) -> Tensor:
    """Compute the mean loss of outputs [B, T, outputs] over the steps with `counts` [B, T] = 1."""
    return (LOSSES[loss].steps(answer, target) * counts).sum() / counts.sum()


def measure(task: Task, program: Program, part: DataSplit) -> tuple[float, float]:
    """Compute metric and loss of a program on a split of the data, in inference mode."""
    whole = np.ascontiguousarray(answers(program, part.x)).reshape(1, *part.y.shape)
    loss, metric = task._loss(whole, part, True), task._metric(part.final(whole), part, True)
    return float(metric[0]), float(loss[0])


def answers(program: Program, x: np.ndarray) -> np.ndarray:
    """Return the outputs of a program in inference mode for cases [N, ...]; the program is not changed."""
    program = program.eval()
    x = x.reshape(len(x), *cases(program))
    name, out, size = program.input_names()[0], program.output_names()[0], _fixed(program)
    if size is None:
        return program.run({name: x}, keep="outputs")[out].to_numpy()
    padded = np.concatenate([x, np.repeat(x[:1], -len(x) % size, 0)])  # a traced program takes one batch size
    runs = [program.run({name: padded[i : i + size]}, keep="outputs")[out] for i in range(0, len(padded), size)]
    return np.concatenate([r.to_numpy() for r in runs])[: len(x)]


def cases(program: Program) -> tuple[int, ...]:
    """Return the shape of the program's input without the batch axis."""
    return tuple(int(d) for d in program.spec(program.input_names()[0]).shape[1:])


def fits(task: Task, program: Program) -> tuple[int, int] | None:
    """Return the numbers of inputs and of outputs per step; None if the program does not fit the task.

    A program fits if it has one input and one output, both with a batch axis. For sequences both are
    [batch, steps, ...] with as many steps as the task.
    """
    inputs, outputs = program.input_names(), program.outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        return None
    shape, steps = program.spec(outputs[0]).shape, task.steps
    if not task.sequence:
        return (prod(cases(program)), int(shape[1])) if len(shape) == 2 else None
    if len(shape) != 3 or len(cases(program)) != 2 or {shape[1], cases(program)[0]} != {steps}:
        return None
    return cases(program)[1], int(shape[2])


def batch_of(program: Program, s: Layers, task: Task) -> int:
    """Return the batch size of a training step: that of the program if it is fixed, else that of the settings."""
    return _fixed(program) or min(s.batch, len(task.train.x))


def _fixed(program: Program) -> int | None:
    size = program.spec(program.input_names()[0]).shape[0]
    return size if isinstance(size, int) else None
