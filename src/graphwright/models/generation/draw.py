"""What the next id of a text is drawn by, as the op `choose` reads it within a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from graphwright.errors import UsageError
from graphwright.models.generation.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """How the ids of one text are drawn.

    Attributes:
        rule: the rules.
        stream: number of the random stream.
        prompt: ids of the text that are no output, from its beginning.
    """

    rule: Sampling = field(default_factory=Sampling)
    stream: int = 0
    prompt: int = 0

    def keys(self, position: int) -> tuple[int, int, int, int]:
        """Operand of the op for the id at a position; processors are functions of the host, where it is drawn then."""
        return self.rule.keys(self.stream, -1 if self.rule.processors else position)

    def choose(self, logits: np.ndarray, ids: np.ndarray) -> int:
        """The id behind `ids` [T] for logits [V], on the host. Raises: NonFinite."""
        return self.rule.choose(logits, len(ids), self.stream, ids[: self.prompt], ids[self.prompt :])


def need_one_each(draws: Sequence[Draw], sequences: int) -> None:
    """Raises: UsageError unless there is a draw for every sequence, or none at all."""
    if len(draws) not in (0, sequences):
        raise UsageError("a draw for every sequence", where="draws", expected=sequences, got=len(draws))
