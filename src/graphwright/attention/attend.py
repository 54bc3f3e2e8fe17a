"""Attention over the edges of a pattern, as a function of tensors with a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphwright.arguments import checked
from graphwright.autograd import Function, ModifiedSinceForward, Tensor, as_tensor
from graphwright.autograd.recorder import active_recorder
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.patterns import GateNotAllowed, HeadMismatch, Pattern, PatternShape
from graphwright.program.patterns import variable_of
from graphwright.settings import Number, Positive

Where = Literal["exp", "weight"]
Reduce = Literal["mass", "max"]


@checked
def attend(
    q: Any, k: Any, v: Any, pattern: Pattern, scale: Number | None = None, softcap: Positive | None = None,
    gates: Any = None, where: Where = "exp", collect: Reduce | None = None, *,
    algorithm: Literal["auto", "block", "dense", "reference"] = "auto",
) -> Tensor:  # fmt: skip
    """Softmax attention over the pairs that a pattern allows: Σ_j a_ij v_j, a = softmax_j(scale·q_i·k_j).

    It equals dense attention with -∞ for all other pairs; a query that sees no key gives 0. In a trace the pattern
    becomes a node of the program, whose later edits need no new plan.

    Args:
        q: [N, H, Tq, d]. k: [N, Hk, Tk, d]. v: [N, Hk, Tk, dv]. Query head h reads key head h // (H / Hk).
        pattern: its tokens are (Tq, Tk), or more: then the first queries and keys are meant. Its planes are 1, Hk or H.
        scale: by default d^-½.
        softcap: c in c·tanh(score / c).
        gates: [G], one value per gate of the pattern; an edge without a gate has 1. By default all gates are 1.
        where: "exp": gates >= 0 multiply the exponentials, a = g eˢ / Σ g eˢ; "weight": gates of any sign multiply the
            normalised weights.
        collect: "mass" or "max": also write the attention mass of each edge into its `score`, see `collect_mass`.
        algorithm: "block" (edge by edge), "dense" (all pairs, with a mask) or "reference".
    Returns: [N, H, Tq, dv], dtype of q. Backward gives gradients of q, k, v and gates.
    Raises: PatternShape, HeadMismatch, ShapeError, GateNotAllowed for negative gates inside the softmax; backward
        raises ModifiedSinceForward if the pattern was edited after the forward pass.
    Source: the tiled softmax is that of Dao et al. 2022 (FlashAttention), over a list of key blocks per query block.
    """
    q, k, v = (as_tensor(x) for x in (q, k, v))
    held = None if gates is None else as_tensor(gates)
    setup = Setup.of(q, k, v, pattern, scale, softcap, held, where, algorithm)
    if active_recorder.get() is not None:
        if collect is not None:
            raise UsageError("masses cannot be collected in a trace", got=f"collect={collect!r}",
                             fix="attention.collect(program, inputs) after the trace")  # fmt: skip
        return call("block_sdpa", q, k, v, variable_of(pattern), *setup.extra(held), **setup.attrs)[0]
    out, lse = attended(setup, q, k, v, held)
    if collect is not None:
        from graphwright.attention.mass import collect_mass

        collect_mass(setup, q.detach(), k.detach(), lse.detach(), held, collect)
    return out


@dataclass(frozen=True, slots=True)
class Setup:
    """A pattern, and the attributes of the ops that read it, for operands that were checked.

    Attributes:
        pattern: the pattern.
        attrs: attributes of `block_sdpa`.
    """

    pattern: Pattern
    attrs: Mapping[str, Any]

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None = None,
        softcap: float | None = None, gates: Tensor | None = None, where: str = "exp", algorithm: str = "auto",
    ) -> Setup:  # fmt: skip
        """Check operands. Raises: ShapeError, PatternShape, HeadMismatch, GateNotAllowed, UsageError."""
        if any(len(x.shape) != 4 for x in (q, k, v)):
            expected, got = "q [N, H, Tq, d], k [N, Hk, Tk, d], v [N, Hk, Tk, dv]", f"{q.shape}, {k.shape}, {v.shape}"
            raise ShapeError("invalid operands of attention", expected=expected, got=got)
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            expected = f"a multiple of the number of key heads, {k.shape[1]}"
            raise ShapeError("cannot divide the query heads evenly among the key heads", expected=expected,
                             got=q.shape[1])  # fmt: skip
        check_lengths(pattern, q.shape[2], k.shape[2])
        check_planes(pattern, q.shape[1], k.shape[1])
        if gates is not None:
            check_gates(pattern, gates, where)
        optional = () if gates is None else ("gates",)
        width = q.shape[3] ** -0.5 if scale is None else float(scale)
        attrs = {"scale": width, "softcap": softcap, "where": where, "planes": pattern.planes, "optional": optional}
        return cls(pattern, {**attrs, "algorithm": algorithm})

    @staticmethod
    def extra(gates: Tensor | None) -> tuple[Tensor, ...]:
        """Return the optional operands."""
        return () if gates is None else (gates,)

    @property
    def table(self) -> Tensor:
        """The table of the pattern, as the operand of an op that runs at once."""
        return as_tensor(self.pattern.table)


def check_lengths(pattern: Pattern, queries: int, keys: int) -> None:
    """Raise PatternShape unless the pattern covers the operands: its own lengths, or as many tokens fewer in both."""
    tokens = pattern.tokens
    longer = queries > tokens[0] or keys > tokens[1]
    if longer or tokens[1] - tokens[0] != keys - queries:
        fix = f"pattern.extend(({max(queries, tokens[0])}, {max(keys, tokens[1])}))" if longer else None
        raise PatternShape("the pattern does not have the lengths of queries and keys", expected=tokens,
                           got=(queries, keys), fix=fix)  # fmt: skip


def check_planes(pattern: Pattern, heads: int, groups: int) -> None:
    """Raise HeadMismatch unless the pattern has one plane, one per key head or one per query head."""
    if pattern.planes not in (1, groups, heads):
        raise HeadMismatch(heads, groups, pattern.planes)


def check_gates(pattern: Pattern, gates: Tensor, where: str) -> None:
    """Raise an error unless the gates are a finite vector of the pattern's size, and not negative inside a softmax."""
    if len(gates.shape) != 1 or gates.shape[0] < pattern.gates or not gates.dtype.is_float:
        raise ShapeError("the gates are not a vector with one value per gate", got=gates.spec,
                         expected=f"floating [{pattern.gates}]")  # fmt: skip
    if gates.symbolic or active_recorder.get() is not None:
        return
    values = gates.numpy("float64")
    if not np.isfinite(values).all():
        raise UsageError("a gate is not finite", expected="finite numbers", got=values[~np.isfinite(values)][0])
    if where == "exp" and (values < 0).any():
        raise GateNotAllowed(value=float(values.min()))


def attended(setup: Setup, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run attention eagerly; return its result and the log-sum-exp of each query [N, H, Tq], which has no gradient."""
    return _Attend.apply(setup, q, k, v, *setup.extra(gates))


def check_version(pattern: Pattern, version: int, op: str) -> None:
    """Raise ModifiedSinceForward if a pattern was edited after the forward pass of `op`, at its version then."""
    if pattern.version != version:
        raise ModifiedSinceForward("the pattern was edited after the forward pass, so its gradient is not known", op=op,
                                   value="pattern", where=pattern.name or None, expected=f"version {version}",
                                   got=f"version {pattern.version}", fix="call backward() before the edit")  # fmt: skip


class _Attend(Function):
    """`block_sdpa` that holds its pattern during each run."""

    @staticmethod
    def forward(ctx: Any, setup: Setup, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        """Compute out and lse."""
        with setup.pattern.reading():
            ctx.setup, ctx.version = setup, setup.pattern.version
            out, lse = call("block_sdpa", q, k, v, setup.table, *extra, **setup.attrs)
        ctx.save(q, k, v, *extra, out, lse)
        return out, lse

    @staticmethod
    def vjp(ctx: Any, g: Any, needs: tuple[bool, ...]) -> Any:
        """Compute the gradients of q, k, v and the gates. Raises: ModifiedSinceForward."""
        setup, (q, k, v, *rest) = ctx.setup, ctx.saved
        slope = g[0]
        with setup.pattern.reading():
            check_version(setup.pattern, ctx.version, "attend")
            found = call("block_sdpa_backward", q, k, v, setup.table, *rest, slope, **setup.attrs)
        return None, *found
