"""Training and scoring of one candidate."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.autograd import Tensor
from graphwright.nn import functional
from graphwright.optim import SGD, Adam, clip_grad_norm_
from graphwright.plan import compile

if TYPE_CHECKING:
    from graphwright.evolve.layers.member import Moments, Recipe
    from graphwright.evolve.layers.settings import Layers
    from graphwright.evolve.tasks.task import Part, Task
    from graphwright.graph import NodeId
    from graphwright.optim import Optimizer
    from graphwright.program import Program


def inference(program: Program) -> Program:
    """A fork that answers; its weights and statistics are shared, and runs of it change none of the program's."""
    p = program.fork(f"{program.name}, answering")
    drops, norms = p.of_kind("dropout"), p.of_kind("batch_norm_train")
    if drops or norms:
        with p.edit("answer", author="evolution", keep_undo=False) as e:
            for node in drops:
                _instead(e, node, p.operands(node)[0])
                e.remove(node)
            for node in norms:
                eps = p.attrs(node)["eps"]
                _instead(e, node, e.add("batch_norm", *p.operands(node), name=f"{p.path(node)}.still", eps=eps))
                e.remove([*(w for w in p.consumers(node) if p.op(w) == "assign"), node])
    return p


def _instead(e: Any, node: NodeId, other: Any) -> None:
    """Whoever reads a node's first result reads another value."""
    p = e.program
    for edge in p.out_edges(node):
        if p.graph.edge(edge, "src_port") == 0:
            e.rewire(edge, other)
    ends = dict(zip(p.output_names(), p.outputs(), strict=True))
    if any(value.node == node for value in ends.values()):
        e.set_outputs(**{name: other if value.node == node else value for name, value in ends.items()})


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


@dataclass(frozen=True, slots=True)
class Seat:
    """A place to train: a program, its optimizer, and the planned step that moves both."""

    program: Program
    opt: Optimizer
    step: Any


class Seats:
    """Places for candidates, one per structure, optimizer and loss: candidates of one structure share a plan.

    Attributes:
        planned: how many plans were made.
    """

    def __init__(self, most: int = 16) -> None:
        self._most, self.planned = most, 0
        self._seats: dict[tuple[str, str, str], Seat] = {}

    def take(self, program: Program, opt: Optimizer, recipe: Recipe, task: Task, clip: float) -> Seat:
        """The seat of a candidate, with its weights and moments in it."""
        key = (program.structure_hash(), recipe.optimizer, recipe.loss)
        seat = self._seats.pop(key, None)
        if seat is None:
            self.planned += 1
            seat = _seat(program, recipe, task, clip)
        self._seats[key] = seat  # the last one used is the last to go
        if len(self._seats) > self._most:
            del self._seats[next(iter(self._seats))]
        for name, variable in seat.program.variables().items():
            variable.assign(program.variables()[name])
        restore(seat.opt, {name: v.data.to_numpy() for name, v in opt.variables().items()})
        return seat


def _seat(program: Program, recipe: Recipe, task: Task, clip: float) -> Seat:
    seat, name, answer = program.fork("seat"), program.input_names()[0], program.output_names()[0]
    opt = optimizer(seat, recipe)

    def lost(answer: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
        if counts is not None:
            return _over_time(answer, target, counts, recipe.loss)
        if recipe.loss != "heads":
            return _loss(answer, target, recipe.loss, task.loss)
        parts = [
            _loss(answer[:, h.outputs], target[:, h.outputs], h.loss, h.loss, dense=True) * h.weight
            for h in task.heads.values()
        ]
        return sum(parts[1:], start=parts[0])

    def step(x: Tensor, y: Tensor, counts: Tensor | None = None) -> Tensor:
        opt.zero_grad()
        loss = lost(seat(**{name: x})[answer], y, counts)
        loss.backward()
        clip_grad_norm_([p for p in seat.parameters() if p.grad is not None], clip)
        opt.step()
        return loss

    return Seat(seat, opt, compile(step))


def fit(
    task: Task, program: Program, opt: Optimizer, recipe: Recipe, s: Layers, rng: np.random.Generator, seats: Seats
) -> int:
    """Steps on batches that `rng` draws, as one plan; returns the number of cases."""
    if not s.steps:
        return 0
    part, shape = task.train, cases(program)
    x = part.x.reshape(len(part.x), *shape)
    data: tuple[np.ndarray, ...] = (x, part.y, part.counts)
    if not task.sequence:
        y = part.y[:, 0]
        data = (x, y.argmax(1) if recipe.loss == "cross_entropy" else y)
    seat, batch = seats.take(program, opt, recipe, task, s.clip), batch_of(program, s, task)
    for _ in range(s.steps):
        rows = rng.choice(len(x), batch, replace=False)
        seat.step(*(array[rows] for array in data))
    why = f"train {s.steps} steps"
    with program.edit(why, author="evolution", tool="graphwright.evolve", keep_undo=False) as e:
        for key in program.weights:
            e.set_weight(key, seat.program.weights.array(key).to_numpy().copy())
    restore(opt, moments(seat.opt))
    return s.steps * batch


def _loss(answer: Tensor, target: Tensor, loss: str, given: str, dense: bool = False) -> Tensor:
    """The loss of one head; `given` is what its logits stand for, `dense` targets of classes are one-hot."""
    if loss == "cross_entropy":
        return -(answer.log_softmax(-1) * target).sum(-1).mean() if dense else functional.cross_entropy(answer, target)
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(answer, target)
    if loss == "huber":
        return functional.huber_loss(answer, target)
    if given == "bce":
        answer = answer.sigmoid()
    elif given == "cross_entropy":
        answer = answer.softmax(-1)
    return functional.mse_loss(answer, target)


def _over_time(answer: Tensor, target: Tensor, counts: Tensor, loss: str) -> Tensor:
    """The mean loss of the steps that count: answers and targets [B, T, outputs], counts [B, T]."""
    if loss == "cross_entropy":
        each = -(answer.log_softmax(-1) * target).sum(-1)
    elif loss == "bce":
        each = (functional.softplus(answer) - answer * target).mean(-1)
    else:
        each = ((answer - target) ** 2).mean(-1)
    return (each * counts).sum() / counts.sum()


def measure(task: Task, program: Program, part: Part) -> tuple[float, float]:
    """Metric and loss of a program on a part of a task's data, as it answers; the program stays as it is."""
    whole = np.ascontiguousarray(answers(program, part.x)).reshape(1, *part.y.shape)
    loss, metric = task._loss(whole, part, True), task._metric(part.final(whole), part, True)
    return float(metric[0]), float(loss[0])


def answers(program: Program, x: np.ndarray) -> np.ndarray:
    """What a program answers to cases [N, ...] that are none of training; the program stays as it is."""
    program = inference(program)
    x = x.reshape(len(x), *cases(program))
    name, out, size = program.input_names()[0], program.output_names()[0], _fixed(program)
    if size is None:
        return program.run({name: x}, keep="outputs")[out].to_numpy()
    padded = np.concatenate([x, np.repeat(x[:1], -len(x) % size, 0)])  # a program traced for one batch takes no other
    runs = [program.run({name: padded[i : i + size]}, keep="outputs")[out] for i in range(0, len(padded), size)]
    return np.concatenate([r.to_numpy() for r in runs])[: len(x)]


def cases(program: Program) -> tuple[int, ...]:
    """Shape of one case, as the input has it."""
    return tuple(int(d) for d in program.spec(program.input_names()[0]).shape[1:])


def fits(task: Task, program: Program) -> tuple[int, int] | None:
    """Inputs and outputs of a step; None if the program has others than one input and one output with a batch, or for
    sequences other than [batch, steps, ...] with the steps of the task.
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
    """Cases of a step: what the program was traced for, or the setting."""
    return _fixed(program) or min(s.batch, len(task.train.x))


def _fixed(program: Program) -> int | None:
    size = program.spec(program.input_names()[0]).shape[0]
    return size if isinstance(size, int) else None


def _as(value: np.ndarray, like: Any) -> Any:
    from graphwright.array import from_numpy

    return from_numpy(np.ascontiguousarray(value).reshape(value.shape)).to(like.device)
