"""Losses on raw scores."""

from __future__ import annotations

from graphwright.array.dtype import float32
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import floating


@op("cross_entropy")
class CrossEntropy:
    """-log softmax(scores)[target] per row, and log Σ exp per row; scores [..., K], targets int64 [...].

    Rows whose target is `ignore_index` give 0 and no gradient. Results are float32 or wider. The gradient is
    g·(softmax(scores) - one_hot(target)); probabilities are not kept, only log Σ exp.
    """

    arity, attrs = 2, {"ignore_index": -100}
    saves = Saves(inputs=(0, 1), outputs=(1,))
    traits = Traits(contiguous=(0, 1), amp="f32", fixed=(1,))

    @staticmethod
    def infer(scores, targets, ignore_index):
        floating(scores)
        if targets.dtype.name != "int64":
            raise DTypeError("targets must be class ids", expected="int64", got=targets)
        if not scores.shape or scores.shape[-1] == 0:
            raise ShapeError("scores need at least one class on their last axis", got=scores)
        if targets.shape != scores.shape[:-1]:
            raise ShapeError("one target per row of scores", expected=scores.shape[:-1], got=targets)
        row = Spec(targets.shape, float32 if scores.dtype.is_low else scores.dtype)
        return row, row

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        loss_grad, lse_grad = g
        grad = None
        if loss_grad is not None:
            grad = call("cross_entropy_backward", ins[0], ins[1], outs[1], loss_grad, **attrs)
        if lse_grad is not None:
            soft = call("softmax", ins[0]) * call("reshape", lse_grad, shape=(*lse_grad.shape, 1))
            soft = call("cast", soft, dtype=ins[0].dtype) if ins[0].dtype.is_low else soft
            grad = soft if grad is None else grad + soft
        return grad, None

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(6 * ins[0].size, ins[0].nbytes + ins[1].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        targets = rng.integers(0, 5, (2, 3))
        targets[1, 0] = -100
        return [rng.normal(size=(2, 3, 5)) * 3, targets], {}


@op("cross_entropy_backward")
class CrossEntropyBackward:
    """g·(softmax(scores) - one_hot(target)) from scores, targets, log Σ exp and the gradient per row."""

    arity, attrs = 4, {"ignore_index": -100}
    saves = Saves(inputs=(0, 1, 2, 3))
    traits = Traits(contiguous=(0, 1, 2, 3))

    @staticmethod
    def infer(scores, targets, lse, g, ignore_index):
        return scores

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        # out = grad·kept·(p - onehot) with p = exp(scores - lse): lse is an operand of its own here
        scores, targets, lse, grad = ins
        low, wide = scores.dtype, lse.dtype
        if low.is_low:
            scores, g = call("cast", scores, dtype=wide), call("cast", g, dtype=wide)
        kept = 1.0 - call("cast", call("eq", targets, attrs["ignore_index"]), dtype=wide)
        column = call("reshape", grad * kept, shape=(*grad.shape, 1))
        moved = column * call("exp", scores - call("reshape", lse, shape=(*lse.shape, 1))) * g
        d_scores = (call("cast", moved, dtype=low) if low.is_low else moved) if needs[0] else None
        d_lse = -call("sum", moved, axes=(-1,), keepdims=False) if needs[2] else None
        d_grad = None
        if needs[3]:
            unit = call("cross_entropy_backward", scores, targets, lse, call("full_like", grad, value=1.0), **attrs)
            d_grad = call("sum", unit * g, axes=(-1,), keepdims=False)
        return d_scores, None, d_lse, d_grad

    @staticmethod
    def sample(rng):
        import numpy as np

        scores, targets = rng.normal(size=(2, 3, 5)), rng.integers(0, 5, (2, 3))
        targets[0, 1] = -100
        return [scores, targets, np.log(np.exp(scores).sum(-1)), rng.normal(size=(2, 3))], {}
