"""Weights behind a gate without noise don't take over its scale.

g·(W x) is the same for half a gate over twice the weights, at a lower price: a `sigmoid` gate over a linear of its own
would sink for ever while W grows. So where weights have learned before gates begin, such a W keeps at most the norm it
has then, and a message that is needed needs its gate. Gates with noise need none of this: half of one disturbs more
than a whole one.
"""

from __future__ import annotations

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.ops import call
from graphwright.program import Program
from graphwright.structure.harden import maker

KIND = "sigmoid"


class Scales:
    """The norms that weights behind gates may have at most.

    Args:
        program: what is trained; of gates on edges, nodes and layers, the linear that makes their message is held.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._most: dict[tuple[str, ...], Variable] = {}
        self._seen: int | None = None
        self.sync()

    def sync(self) -> None:
        """Follow the edits since the last time: what is new may be as large as it is."""
        p = self.program
        if self._seen == p.version:
            return
        self._seen = p.version
        mine = [g for g in p.gates().values() if g.kind == KIND and g.over not in ("units", "choice")]
        keys = [tuple(found) for g in mine for site in g.sites if (found := maker(p, p.operands(site)[0], {site}))]
        there = {key: self._most.get(key) for key in keys if all(p.weights[k].requires_grad for k in key)}
        self._most = {key: Variable(np.full((), np.inf), name=f"joint.norm.{key[0]}") if held is None else held
                      for key, held in there.items()}  # fmt: skip

    def begin(self) -> None:
        """Norms are held from here on, but for those of weights that are 0, and of what is added later."""
        for keys, most in self._most.items():
            now = np.sqrt(sum(float((self.program.weights[k].numpy("float64") ** 2).sum()) for k in keys))
            most.assign(Tensor(from_numpy(np.asarray(now or np.inf))))

    def hold(self) -> None:
        """Part of a step: what has grown too large is made smaller, in the same direction."""
        for keys, most in self._most.items():
            weights = [self.program.weights[k] for k in keys]
            parts = [(w * w).sum().to("float64") for w in weights]
            square = call("maximum", sum(parts[1:], start=parts[0]), 1e-30)
            factor = call("minimum", most / square.sqrt(), 1.0)
            for w in weights:
                w.assign(w * factor.to(w.dtype))

    def variables(self) -> dict[str, Variable]:
        """The norms, by name."""
        return {v.name: v for v in self._most.values()}
