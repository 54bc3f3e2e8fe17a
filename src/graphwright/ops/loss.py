"""Losses per row or per entry; `nn.functional` reduces them to one number with other ops."""

from __future__ import annotations

from math import prod

import numpy as np

from graphwright.array.dtype import float32
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import rows as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.activation import FORMULAS
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import AxesUse
from graphwright.ops.call import as_dtype, call, widened
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import Backward, Loss, broadcast, floating, wanted
from graphwright.settings import Number


@op("cross_entropy")
class CrossEntropy(Loss):
    """-Σ_k q_k ln softmax(scores)_k and ln Σ exp(scores), both per row; scores [..., K], targets int64 [...].

    q_k = (1 - s)·w_k·[k = target] + (s/K)·w_k, where s is `smoothing` and w [K] the class weights, an optional third
    operand (1 without it). Rows whose target is `ignore_index` give 0 and no gradient. Results are float32 or wider.
    The gradient is g·(softmax(scores)·Σq - q); only ln Σ exp is saved, not the probabilities.
    """

    arity, vm, results = (2, 3), forms.CROSS_ENTROPY, ("loss", "log_sum_exp")
    attrs = {"ignore_index": Attr(int, -100), "smoothing": Attr(Number, 0.0)}
    saves = Saves(inputs=(0, 1, 2), outputs=(1,))
    traits = Traits(applies="softmax", contiguous=(0, 1), amp="f32", fixed=(1, 2))
    cost = lambda ins, outs, attrs: Cost(6 * ins[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)

    def infer(scores, targets, *weight, ignore_index, smoothing):
        floating(scores)
        if targets.dtype.name != "int64":
            raise DTypeError("the targets are not int64 class ids", expected="int64", got=targets)
        if not scores.shape or scores.shape[-1] == 0:
            raise ShapeError("the scores have no class on the last axis", expected="[..., K], K >= 1", got=scores)
        if targets.shape != scores.shape[:-1]:
            expected = scores.shape[:-1]
            raise ShapeError("the targets do not have one entry per row of scores", expected=expected, got=targets)
        if weight and (weight[0].shape != scores.shape[-1:] or not weight[0].dtype.is_float):
            expected = f"floating {scores.shape[-1:]}"
            raise ShapeError("the class weights have the wrong shape or dtype", expected=expected, got=weight[0])
        row = Spec(targets.shape, float32 if scores.dtype.is_low else scores.dtype)
        return row, row

    def vjp(g, ins, outs, attrs, needs):
        loss_grad, lse_grad = g
        scores, targets, *weight = ins
        kind = outs[1].dtype
        grads: list = [None] * len(ins)
        if loss_grad is not None and needs[0]:
            grads[0] = call("cross_entropy_backward", scores, targets, outs[1], loss_grad, *weight, **attrs)
        if lse_grad is not None and needs[0]:
            soft = as_dtype(call("softmax", scores) * _column(lse_grad), scores.dtype)
            grads[0] = soft if grads[0] is None else grads[0] + soft
        if weight and needs[2] and loss_grad is None:
            grads[2] = call("full_like", weight[0], value=0.0)
        elif weight and needs[2]:
            t = _ClassIds(targets, attrs)
            share = _column(t.masked(loss_grad)) * (_column(outs[1]) - as_dtype(scores, kind))
            whole = call("sum", _rows(share), axes=(0,))
            grads[2] = as_dtype(t.spread(t.pick(share), weight[0]) + t.smooth(whole, scores.shape[-1]), weight[0].dtype)
        return tuple(grads)

    def expand(ins, attrs):
        scores, targets, *weight = ins
        scores = as_dtype(scores, float32) if scores.dtype.is_low else scores
        t, lse = _ClassIds(targets, attrs), call("logsumexp", scores, axes=(-1,))
        distance = _column(lse) - scores
        if weight:
            distance = distance * as_dtype(weight[0], scores.dtype)
        hit = t.pick(distance)
        loss = hit * (1.0 - t.smoothing) + t.smooth(call("sum", distance, axes=(-1,)), scores.shape[-1])
        return call("where", t.ignored, call("full_like", loss, value=0.0), loss), lse

    def sample(rng):
        targets = rng.integers(0, 5, (2, 3))
        targets[1, 0] = -100
        weight = rng.uniform(0.5, 2, 5)
        smoothing = 0.3 if rng.random() < 0.5 else 0.0
        return [rng.normal(size=(2, 3, 5)) * 3, targets, weight][: rng.integers(2, 4)], {"smoothing": smoothing}

    def axes(u: AxesUse):
        scores, targets, *weight = u.ins
        u.frozen(scores[-1], "reads it by index")
        for a, b in zip(scores, targets, strict=False):
            u.same(a, b)
        for dims in weight:
            u.same(dims[0], scores[-1])
        return [targets, targets]


@op("cross_entropy_backward")
class CrossEntropyBackward(Backward):
    """Gradient g·(softmax(scores)·Σq - q) of `cross_entropy`; operands: scores, targets, ln Σ exp, g (, weights)."""

    arity, attrs, saves = (4, 5), CrossEntropy.attrs, Saves(inputs=(0, 1, 2, 3, 4))
    traits, vm = Traits(backward_of="cross_entropy", contiguous=(0, 1, 2, 3)), forms.CROSS_ENTROPY
    infer = lambda scores, targets, lse, g, *weight, ignore_index, smoothing: scores

    def vjp(g, ins, outs, attrs, needs):
        # out = grad·kept·(p·Σq - q) with p = exp(scores - lse): lse is an operand of its own here
        scores, targets, lse, grad, *weight = ins
        t, kind, g = _ClassIds(targets, attrs), lse.dtype, as_dtype(g, lse.dtype)
        p, row = call("exp", as_dtype(scores, kind) - _column(lse)), t.masked(grad)
        total = row
        if weight:
            w = as_dtype(weight[0], kind)
            own = call("reshape", call("embedding", call("reshape", w, shape=(*w.shape, 1)), t.ids), shape=row.shape)
            total = row * (own * (1.0 - t.smoothing) + call("mean", w, axes=(0,)) * t.smoothing)
        moved = _column(total) * p * g

        def of_grad():
            ones = call("full_like", grad, value=1.0)
            unit = call("cross_entropy_backward", as_dtype(scores, kind), targets, lse, ones, *weight, **attrs)
            return call("sum", unit * g, axes=(-1,))

        def of_weight():
            pull = call("sum", p * g, axes=(-1,))
            share = row * (pull - t.pick(g))
            whole = call("sum", row * pull, axes=None) - call("sum", _rows(_column(row) * g), axes=(0,))
            return as_dtype(t.spread(share, weight[0]) + t.smooth(whole, weight[0].shape[0]), weight[0].dtype)

        dx, dlse = lambda: as_dtype(moved, scores.dtype), lambda: -call("sum", moved, axes=(-1,))
        return wanted(needs, dx, lambda: None, dlse, of_grad, of_weight)

    def sample(rng):
        (scores, targets, *weight), attrs = CrossEntropy.sample(rng)
        return [scores, targets, np.log(np.exp(scores).sum(-1)), rng.normal(size=(2, 3)), *weight], attrs


class _ClassIds:
    """The target class of each row, with methods that mask ignored rows, gather by class and sum by class."""

    def __init__(self, targets, attrs):
        self.ignored, self.smoothing = call("eq", targets, attrs["ignore_index"]), attrs["smoothing"]
        self.ids = call("where", self.ignored, call("full_like", targets, value=0), targets)

    def masked(self, row):
        """Return `row`, one value per row of scores, with 0 for ignored rows."""
        return call("where", self.ignored, call("full_like", row, value=0.0), row)

    def pick(self, x):
        """Return x[..., target]: the entry of each row of x at its target class."""
        return call("reshape", call("gather", x, _column(self.ids), axis=-1), shape=self.ids.shape)

    def spread(self, row, weight):
        """Return (1 - s)·Σ of `row` over the rows of each target class, shape [K] as `weight`; s is `smoothing`."""
        flat, ids = (call("reshape", t, shape=(prod(t.shape),)) for t in (row, self.ids))
        return call("scatter_sum", flat, ids, axis=0, shape=weight.shape) * (1.0 - self.smoothing)

    def smooth(self, x, classes):
        """Return s/K·x, where s is `smoothing` and K the number of classes."""
        return x * (self.smoothing / classes)


def _column(row):
    return call("reshape", row, shape=(*row.shape, 1))


def _rows(x):
    """Flatten [..., K] to [N, K]."""
    return call("reshape", x, shape=(prod(x.shape[:-1]), x.shape[-1]))


class _Binary(Loss):
    """A loss per entry of predictions and targets y in [0, 1], which broadcast."""

    arity, saves, operands = 2, Saves(inputs=(0, 1)), ("x", "y")
    traits = Traits(elementwise=True, amp="f32")
    infer = lambda x, y: floating(broadcast(x, y))
    cost = lambda ins, outs, attrs: Cost(6 * outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)


@op("bce")
class BinaryCrossEntropy(_Binary):
    """-(y·ln p + (1 - y)·ln(1 - p)) for probabilities p; logarithms are at least -100, as in torch.

    The gradients of p and y are g·(p - y)/max(p(1 - p), 10⁻¹²) and g·(ln(1 - p) - ln p).
    """

    sample = lambda rng: ([rng.uniform(0.05, 0.95, (3, 1, 4)), rng.uniform(0, 1, (5, 4))], {})

    def vjp(g, ins, outs, attrs, needs):
        p, y = ins
        dp = g * (p - y) / call("clamp", p * (1.0 - p), low=1e-12) if needs[0] else None
        return dp, g * (_log(1.0 - p) - _log(p)) if needs[1] else None

    def expand(ins, attrs):
        p, y = ins
        return -(y * _log(p) + (1.0 - y) * _log(1.0 - p))


def _log(p):
    """Return max(ln p, -100), with gradient 0 where p ≤ 0 instead of 0·∞."""
    tiny = call("le", p, 0.0)
    far = call("full_like", p, value=-100.0)
    return call("where", tiny, far, call("clamp", call("log", call("where", tiny, 1.0, p)), low=-100.0))


@op("bce_with_logits")
class BinaryCrossEntropyWithLogits(_Binary):
    """max(x, 0) - x·y + log1p(e^-|x|): `bce` of p = σ(x), for logits x; gradients g·(σ(x) - y) and -g·x."""

    traits = Traits(applies="sigmoid")
    sample = lambda rng: ([rng.uniform(-4, 4, (3, 1, 4)), rng.uniform(0, 1, (5, 4))], {})

    def vjp(g, ins, outs, attrs, needs):
        x, y = ins
        return g * FORMULAS.bce_with_logits_slope(x, y) if needs[0] else None, -(g * x) if needs[1] else None

    expand = lambda ins, attrs: widened(FORMULAS.bce_with_logits, *ins)
