"""The next token from logits: penalties, temperature, filters, and a reproducible draw.

All settings are operands: a changed temperature needs no new plan, and each row of a batch has its own settings.
"""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import float32, int32, int64
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import rows as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.axes import AxesUse
from graphwright.ops.registry import Cost, Row, Traits, op
from graphwright.ops.rules import equal_dim

RULES = ("repetition_penalty", "presence", "frequency", "temperature", "top_p", "min_p")
"""Columns of the sampling rules."""
KEYS = ("seed", "stream", "position", "top_k")
"""Columns of the keys."""


@op("sample_token")
class SampleToken(Row):
    """argmax(z - ln(-ln u)), the next token id int64 [B], and z [B, V], the adjusted logits: -inf where filtered out.

    Operands: logits float32 [B, V]; rules float32 [B, 6] with repetition penalty, presence, frequency, temperature,
    top_p and min_p; keys int64 [B, 4] with seed, stream, position and top_k; and the tokens seen so far, int32
    [B, S, 2]: pairs of an id and its count in the output, each id once, ended by a negative id. The steps, in order:

    1. Logits of seen ids are divided by the repetition penalty where positive and multiplied by it elsewhere; those of
       ids in the output are then reduced by presence + frequency · count.
    2. Temperature 0 takes the largest logit and stops here; otherwise logits are divided by the temperature.
    3. top_k keeps that many of the largest logits (0: all); top_p the shortest prefix of the descending order, at
       least one, whose probability reaches it; min_p the ids with at least this share of the largest probability.
    4. Gumbel-max: u is the midpoint of one of 2²⁴ intervals of [0, 1], chosen by the random word of (seed, stream,
       position, id). The result is a draw from the softmax of the kept logits.

    Ties go to the lowest id. The id is -1 if the position is negative, which requests no token, or if the logits after
    penalties and temperature hold NaN or have no finite maximum.
    """

    arity, vjp, results = 4, None, ("token", "logits")
    why = {
        "vjp": "a sampled token has no gradient",
        "onnx": "the caller samples from the logits that the graph returns",
        "emit": "transformers brings its own generation",
    }
    traits = Traits(contiguous=(0, 1, 2, 3), fixed=(0, 1, 2, 3))
    vm = forms.SAMPLE_TOKEN
    cost = lambda ins, outs, attrs: Cost(2 * ins[0].size, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def infer(logits, rules, keys, seen):
        if [t.dtype for t in (logits, rules, keys, seen)] != [float32, float32, int64, int32]:
            expected = "float32 logits and rules, int64 keys, int32 seen tokens"
            raise DTypeError("an operand of sample_token has the wrong dtype", expected=expected)
        shapes = [t.shape for t in (logits, rules, keys, seen)]
        if [len(s) for s in shapes] != [2, 2, 2, 3] or (rules.shape[1], keys.shape[1], seen.shape[2]) != (6, 4, 2):
            expected = "logits [B, V], rules [B, 6], keys [B, 4], seen [B, S, 2]"
            raise ShapeError("an operand of sample_token has the wrong shape", expected=expected)
        if logits.shape[1] == 0:
            raise ShapeError("the vocabulary is empty", where="axis 1", expected=">= 1", got=0)
        for name, shape in zip(("rules", "keys", "seen"), shapes[1:], strict=True):
            equal_dim(logits.shape[0], shape[0], f"rows of {name}")
        return Spec(logits.shape[:1], int64), logits

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

    def axes(u: AxesUse):
        logits, *rest = u.ins
        for dims in rest:
            u.same(logits[0], dims[0])
            for term in dims[1:]:
                u.frozen(term, "is read by column")
        u.mixed(logits[1], "draws one entry of it")
        u.result_ranges[0] = logits[1]
        return [logits[:1], logits]
