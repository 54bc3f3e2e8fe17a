"""The ids that a text has, as penalties ask for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_END = np.array([[-1, 0]], np.int32)


class Seen:
    """The ids of a text and how often each is in its output, kept up to date in place.

    Args:
        prompt: ids that are no output, from the beginning of the text.

    Attributes:
        length: ids that were counted.
    """

    def __init__(self, prompt: int) -> None:
        self.prompt, self.length = prompt, 0
        self._places: dict[int, int] = {}
        self._pairs = np.repeat(_END, 64, axis=0)

    def add(self, ids: Iterable[int]) -> None:
        """Count the ids that follow; those below 0 are not known."""
        for token in ids:
            place = self._places.setdefault(token, len(self._places)) if token >= 0 else -1
            if place == len(self._pairs) - 1:  # behind them stays an end
                self._pairs = np.concatenate([self._pairs, np.repeat(_END, len(self._pairs), axis=0)])
            if place >= 0:
                self._pairs[place, 0] = token
                self._pairs[place, 1] += self.length >= self.prompt
            self.length += 1

    @property
    def pairs(self) -> np.ndarray:
        """(id, count) int32 [n + 1, 2], ended by -1."""
        return self._pairs[: len(self._places) + 1]
