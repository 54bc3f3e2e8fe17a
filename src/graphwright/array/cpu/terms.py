"""Formulas on ATen: their operands are terms, which are computed by as few calls as possible, without new tensors.

ATen adds a multiple, product or quotient in the call that computes it (`add`, `addcmul`, `addcdiv`). So a term is
computed when it is assigned, or when a function needs its tensor. Intermediate tensors of a formula share one scratch
tensor: a formula may use each of them once, and needs only one at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from graphwright.array.cpu.kernel import number

_SCALE = {torch.add: "alpha", torch.addcmul: "value", torch.addcdiv: "value", torch.lerp: "weight"}
"""The keyword of `scale` in the functions that add a term to its base."""


class Term:
    """base + scale·x, with x·y or x/y for x if there is a y; `add` is the function of ATen that computes it."""

    __slots__ = ("add", "base", "scale", "scratch", "x", "y")

    def __init__(
        self, scratch: torch.Tensor, x: torch.Tensor, scale: float = 1.0, y: torch.Tensor | None = None,
        add: Any = torch.add, base: Term | None = None,
    ) -> None:  # fmt: skip
        self.scratch, self.x, self.scale, self.y, self.add, self.base = scratch, x, scale, y, add, base

    def __mul__(self, other: Term | float) -> Term:
        if not isinstance(other, Term):
            x = self if self.base is None else self.multiple()
            return Term(x.scratch, x.x, x.scale * other, x.y, x.add)
        x, y = self.multiple(), other.multiple()
        return Term(x.scratch, x.x, x.scale * y.scale, y.x, torch.addcmul)

    __rmul__ = __mul__

    def __neg__(self) -> Term:
        return self * -1.0

    def __truediv__(self, other: Term) -> Term:
        x = self.multiple()
        return Term(x.scratch, x.x, x.scale, other.tensor(), torch.addcdiv)

    def __add__(self, other: Term | float) -> Term:
        if not isinstance(other, Term):
            return Term(self.scratch, torch.add(self.tensor(), number(other, self.x), out=self.scratch))
        base, last = (other, self) if self.base is None and self.y is not None else (self, other)
        assert last.base is None, "a formula adds a sum to a sum"
        return Term(self.scratch, last.x, last.scale, last.y, last.add, base)

    def __sub__(self, other: Term) -> Term:
        return self + other * -1.0

    def multiple(self) -> Term:
        """Return this term if it is a multiple of x, else compute it in the scratch."""
        return self if self.y is None and self.base is None else Term(self.scratch, self.write(self.scratch))

    def tensor(self) -> torch.Tensor:
        """Return x if the term is only x, else compute the term in the scratch."""
        return self.x if self.scale == 1.0 and self.y is None and self.base is None else self.write(self.scratch)

    def write(self, out: torch.Tensor) -> torch.Tensor:
        """Compute the term in `out`, which is returned."""
        base = self.base
        if base is None and self.y is None:
            return torch.mul(self.x, number(self.scale, self.x), out=out)
        plain = base is not None and base.scale == 1.0 and base.y is None and base.base is None
        start = number(0.0, self.x) if base is None else base.x if plain else base.write(out)
        others = (self.x,) if self.y is None else (self.x, self.y)
        return self.add(start, *others, **{_SCALE[self.add]: self.scale}, out=out)

    def assign(self, value: Term) -> Term:
        """Write a value to x, and return this term."""
        value.write(self.x)
        return self


def _function(name: str) -> Any:
    return lambda x: Term(x.scratch, getattr(torch, name)(x.tensor(), out=x.scratch))


PRIMITIVES = {
    "fma": lambda x, y, z: z + x * y,
    "lerp": lambda start, end, weight: Term(start.scratch, end.tensor(), weight, None, torch.lerp, start),
    **{name: _function(name) for name in ("log", "sign", "sqrt")},
}
"""Primitives of formulas, and functions of ATen that replace formulas, for `formulas.specialise`."""
