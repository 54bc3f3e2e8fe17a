"""The next id of a text, from logits: penalties, temperature, filters, and a draw that can be repeated.

What it goes by are operands, so that another temperature is no other plan, and a batch may have several.
"""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import float32, int32, int64
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import sampling as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.axes import AxesUse
from graphwright.ops.registry import Cost, Traits, op
from graphwright.ops.rules import equal_dim

RULES = ("repetition_penalty", "presence", "frequency", "temperature", "top_p", "min_p")
"""Columns of the rules."""
KEYS = ("seed", "stream", "position", "top_k")
"""Columns of the keys."""


@op("choose")
class Choose:
    """The next id int64 [B] for logits float32 [B, V], and the logits [B, V] it was drawn from, -inf where dropped.

    Takes rules float32 [B, 6] and keys int64 [B, 4], see `RULES` and `KEYS`, and what a text has: seen int32 [B, S, 2],
    pairs of an id and its count in the output, each id once, up to the first below 0. In this order:

    1. logits of seen ids are divided by the repetition penalty where positive, multiplied by it elsewhere; then ids of
       the output lose presence + frequency · count.
    2. Temperature 0 takes the largest, and nothing more is done; else logits are divided by it.
    3. top_k keeps so many of the largest, 0 all; top_p the shortest prefix of the falling order, at least one, whose
       share of the probability reaches it; min_p what has at least this share of the largest probability.
    4. The largest z - ln(-ln u), u from the word of (seed, stream, position, id) in the middle of its 24-bit cell: a
       draw from the softmax of what is kept (Gumbel-max).

    Of ties the lowest id is taken, and the first kept. A position below 0 asks for nothing; then, and where logits
    after all penalties and the temperature hold NaN or no finite largest, the id is -1.
    """

    arity, vjp = 4, None
    why = {
        "vjp": "a sampled token has no gradient",
        "onnx": "the caller samples from the logits that the graph returns",
        "emit": "transformers brings its own generation",
    }
    traits = Traits(contiguous=(0, 1, 2, 3), fixed=(0, 1, 2, 3))
    vm = forms.CHOOSE

    @staticmethod
    def infer(logits, rules, keys, seen):
        if [t.dtype for t in (logits, rules, keys, seen)] != [float32, float32, int64, int32]:
            raise DTypeError("takes logits and rules float32, keys int64 and seen int32")
        shapes = [t.shape for t in (logits, rules, keys, seen)]
        if [len(s) for s in shapes] != [2, 2, 2, 3] or (rules.shape[1], keys.shape[1], seen.shape[2]) != (6, 4, 2):
            raise ShapeError("takes logits [B, V], rules [B, 6], keys [B, 4] and seen [B, S, 2]")
        if logits.shape[1] == 0:
            raise ShapeError("there is nothing to choose from", where="axis 1", expected=">= 1", got=0)
        for name, shape in zip(("rules", "keys", "seen"), shapes[1:], strict=True):
            equal_dim(logits.shape[0], shape[0], f"rows of {name}")
        return Spec(logits.shape[:1], int64), logits

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(2 * ins[0].size, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    @staticmethod
    def sample(rng):
        rules = np.array(
            [[1.3, 0.5, 0.25, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.8, 0.7, 0.05], [0.8, 0.1, 0.0, 1.5, 1.0, 0.0]]
        )
        keys = np.array([[0, 0, 5, 0], [rng.integers(-(2**63), 2**63), 3, 7, 20], [1, 2**32 - 1, 9, 5]])
        seen = np.full((3, 4, 2), -1)
        for row in seen:
            row[:3, 0] = rng.permutation(40)[:3]
            row[:3, 1] = rng.integers(0, 3, 3)
        return [
            (2 * rng.normal(size=(3, 40))).astype(np.float32),
            rules.astype(np.float32),
            keys.astype(np.int64),
            seen.astype(np.int32),
        ], {}

    @staticmethod
    def axes(u: AxesUse):
        logits, *rest = u.ins
        for dims in rest:
            u.same(logits[0], dims[0])
            for term in dims[1:]:
                u.frozen(term, "is read by place")
        u.mixed(logits[1], "draws one of it")
        u.result_ranges[0] = logits[1]
        return [logits[:1], logits]
