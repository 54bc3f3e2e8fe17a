"""Adam on the logits: moments and counts per element, which follow the element wherever an edit puts it.

An element that is new begins at zero with a count of its own, so that its first step is as large as any first step;
one that an undo brings back has what it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program import Program
from graphwright.program.gates.gates import LOGITS
from graphwright.structure.elements import Key, elements
from graphwright.structure.ranges import within

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
OVER = ("edges", "units", "nodes", "layers", "choice")


class LogitMoments:
    """The state of Adam (Kingma and Ba 2015) for the vector of logits of a program.

    Args:
        rates: one for all, or by what is gated; an element that is not soft has rate 0.

    Attributes:
        count: steps of the run, 0-d float64.
    """

    def __init__(self, program: Program, rates: float | Mapping[str, float]) -> None:
        self.program = program
        self.rates: dict[str, float] = (
            dict.fromkeys(map(str, OVER), float(rates)) if isinstance(rates, int | float) else dict(rates)
        )
        if unknown := self.rates.keys() - set(OVER):
            raise UsageError(f"rates for {', '.join(unknown)}: expected some of {', '.join(OVER)}")
        for name, rate in self.rates.items():
            within(f"rate of {name}", rate, 0)
        self.count = Variable(np.zeros((), np.float64), name="joint.count")
        self._held: dict[str, Variable] = {}
        self._keys: dict[Key, int] = {}
        self._gone: dict[Key, tuple[float, float, float]] = {}
        self._seen: int | None = None
        self.sync()

    @property
    def there(self) -> bool:
        """Whether the program has gates."""
        return LOGITS in self.program.weights

    def sync(self) -> None:
        """Follow the edits since the last time."""
        p = self.program
        now = p.version if self.there else -1
        if self._seen == now:
            return
        for key, place in self._keys.items():
            self._gone[key] = tuple(float(self._held[n].data.to_numpy()[place]) for n in ("m", "v", "t"))  # pyright: ignore[reportArgumentType]
        self._seen = now
        among = elements(p)
        size = len(p.weights[LOGITS].data.to_numpy()) if self.there else 0
        kind = p.weights[LOGITS].dtype.numpy if self.there else np.float32
        fresh = np.zeros((3, size), kind)
        rate = np.zeros(size, kind)
        for e in among:
            fresh[:, e.place] = self._gone.pop(e.key, (0.0, 0.0, 0.0))
            rate[e.place] = self.rates.get(e.over, 0.0) if e.state == "soft" else 0.0
        self._keys = {e.key: e.place for e in among}
        rows = {"m": fresh[0], "v": fresh[1], "t": fresh[2], "rate": rate}
        self._held = {name: Variable(from_numpy(x.copy()), name=f"joint.gates.{name}") for name, x in rows.items()}

    def step(self, g: Tensor, bad: Tensor, limit: float) -> None:
        """One step where `bad` is 0; logits stay within ±limit. A logit of rate 0 keeps its bits."""
        z = self.program.weights[LOGITS]
        m, v, t, rate = (self._held[n] for n in ("m", "v", "t", "rate"))
        moves = call("logical_and", rate > 0.0, (bad * 1.0 < 0.5).reshape(1))
        m1, v1, t1 = m * BETA1 + g * (1 - BETA1), v * BETA2 + g * g * (1 - BETA2), t + 1.0
        first, second = 1.0 - (t1 * log(BETA1)).exp(), 1.0 - (t1 * log(BETA2)).exp()
        moved = z - rate * (m1 / first) / ((v1 / second).sqrt() + EPS)
        moved = call("maximum", call("minimum", moved, limit), -limit)
        for variable, value in ((z, moved), (m, m1), (v, v1), (t, t1)):
            variable.assign(call("where", moves, value, variable))

    def variables(self) -> dict[str, Variable]:
        """By name; the rates are not state."""
        held = {v.name: v for n, v in self._held.items() if n != "rate"}
        return {self.count.name: self.count, **held}

    def slope(self, key: Key) -> float:
        """The mean gradient by a logit of late: its first moment without the bias towards 0; 0 before a step."""
        m, _, t = self.of(key)
        return m / (1 - BETA1**t) if t else 0.0

    def of(self, key: Key) -> tuple[float, float, float]:
        """(m, v, steps) of an element."""
        place = self._keys[key]
        m, v, t = (float(self._held[n].data.to_numpy()[place]) for n in ("m", "v", "t"))
        return m, v, t
