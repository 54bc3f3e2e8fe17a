"""Training and scoring of one candidate."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.autograd import Tensor
from graphwright.evolve.layers.member import Moments
from graphwright.evolve.layers.recipe import Recipe
from graphwright.evolve.layers.settings import Layers
from graphwright.evolve.tasks.task import Part, Task
from graphwright.nn import functional
from graphwright.optim import SGD, Adam, Optimizer, clip_grad_norm_
from graphwright.plan import compile

if TYPE_CHECKING:
    from graphwright.program import Program


def optimizer(program: Program, recipe: Recipe) -> Optimizer:
    """An optimizer of all its parameters, those that edits add included."""
    kind = {"adam": lambda: Adam(program, lr=recipe.lr), "sgd": lambda: SGD(program, lr=recipe.lr, momentum=0.9)}
    return kind[recipe.optimizer]()


def moments(opt: Optimizer) -> Moments:
    """Its state, but for the rate."""
    rates = {group.rate.name for group in opt.param_groups}
    return {name: v.data.to_numpy().copy() for name, v in opt.variables().items() if name not in rates}


def restore(opt: Optimizer, state: Moments) -> None:
    """Give it what is there of a state in its shape; the rest stays as it is."""
    for name, variable in opt.variables().items():
        if name in state and state[name].shape == variable.shape:
            variable.assign(Tensor(_as(state[name], variable)))


def fit(task: Task, program: Program, opt: Optimizer, recipe: Recipe, s: Layers, rng: np.random.Generator) -> int:
    """Steps on batches that `rng` draws, as one plan; returns the number of cases."""
    if not s.steps:
        return 0
    part, name, shape = task.train, program.input_names()[0], cases(program)
    x, y = part.x[:, 0].reshape(len(part.x), *shape), part.y[:, 0]
    wanted: Any = y.argmax(1) if recipe.loss == "cross_entropy" else y

    def lost(answer: Tensor, target: Tensor) -> Tensor:
        if recipe.loss == "cross_entropy":
            return functional.cross_entropy(answer, target)
        if recipe.loss == "bce":
            return functional.binary_cross_entropy_with_logits(answer, target)
        if recipe.loss == "huber":
            return functional.huber_loss(answer, target)
        if task.loss == "bce":
            answer = answer.sigmoid()
        elif task.loss == "cross_entropy":
            answer = answer.softmax(-1)
        return functional.mse_loss(answer, target)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = lost(program(**{name: x}), y)
        loss.backward()
        clip_grad_norm_([p for p in program.parameters() if p.grad is not None], s.clip)
        opt.step()
        return loss

    planned, batch = compile(step), batch_of(program, s, task)
    with program.edit(f"train {s.steps} steps", author="evolution", tool="graphwright.evolve", keep_undo=False):
        for _ in range(s.steps):
            rows = rng.choice(len(x), batch, replace=False)
            planned(x[rows], wanted[rows])
    return s.steps * batch


def measure(task: Task, program: Program, part: Part) -> tuple[float, float]:
    """Metric and loss of a program on a part of a task's data."""
    x = part.x[:, 0].reshape(len(part.x), *cases(program))
    name, out, size = program.input_names()[0], program.output_names()[0], _fixed(program)
    if size is None:
        answers = program.run({name: x}, keep="outputs")[out].to_numpy()
    else:  # a program traced for one batch takes no other
        padded = np.concatenate([x, np.repeat(x[:1], -len(x) % size, 0)])
        runs = [program.run({name: padded[i : i + size]}, keep="outputs")[out] for i in range(0, len(padded), size)]
        answers = np.concatenate([r.to_numpy() for r in runs])[: len(x)]
    loss, metric = task._measures(np.ascontiguousarray(answers)[None, :, None], part, True)
    return float(metric[0]), float(loss[0])


def cases(program: Program) -> tuple[int, ...]:
    """Shape of one case, as the input has it."""
    return tuple(int(d) for d in program.spec(program.input_names()[0]).shape[1:])


def fits(task: Task, program: Program) -> tuple[int, int] | None:
    """Inputs and outputs of a case; None if the program has others than one input and one output with a batch."""
    inputs, outputs = program.input_names(), program.outputs()
    if len(inputs) != 1 or len(outputs) != 1 or len(program.spec(outputs[0]).shape) != 2:
        return None
    return prod(cases(program)), int(program.spec(outputs[0]).shape[1])


def batch_of(program: Program, s: Layers, task: Task) -> int:
    """Cases of a step: what the program was traced for, or the setting."""
    return _fixed(program) or min(s.batch, len(task.train.x))


def _fixed(program: Program) -> int | None:
    size = program.spec(program.input_names()[0]).shape[0]
    return size if isinstance(size, int) else None


def _as(value: np.ndarray, like: Any) -> Any:
    from graphwright.array import from_numpy

    return from_numpy(np.ascontiguousarray(value).reshape(value.shape)).to(like.device)
