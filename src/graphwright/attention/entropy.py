"""The entropy of attention weights over a pattern, as a loss: H = -Σ a ln a per query."""

from __future__ import annotations

from typing import Any

from graphwright.arguments import checked
from graphwright.attention.attend import Setup, check_version
from graphwright.autograd import Function, Tensor, as_tensor
from graphwright.autograd.recorder import active_recorder
from graphwright.ops import call
from graphwright.patterns import Pattern
from graphwright.program.patterns import variable_of
from graphwright.settings import Number, Positive


@checked
def entropy(
    q: Any, k: Any, pattern: Pattern, scale: Number | None = None, softcap: Positive | None = None, gates: Any = None
) -> Tensor:
    """Return the entropy -Σ_j a_ij ln a_ij of each query's attention weights, in nats: 0 for one key or none.

    Args: as in `attend`; gates multiply the exponentials.
    Returns: [N, H, Tq], float32, or float64 for float64 operands; differentiable with respect to q, k and gates > 0.
    Raises: the errors of `attend`.
    """
    q, k = as_tensor(q), as_tensor(k)
    held = None if gates is None else as_tensor(gates)
    setup = Setup.of(q, k, k, pattern, scale, softcap, held)
    if active_recorder.get() is not None:
        table, extra = variable_of(pattern), setup.extra(held)
        _, lse = call("block_sdpa", q, k, k.detach(), table, *extra, **setup.attrs)
        return call("block_entropy", q, k, table, lse, *extra, **setup.attrs)
    return _Entropy.apply(setup, q, k, *setup.extra(held))


class _Entropy(Function):
    """`block_entropy` that holds its pattern during each run."""

    @staticmethod
    def forward(ctx: Any, setup: Setup, q: Tensor, k: Tensor, *extra: Tensor) -> Tensor:
        """Compute the entropies; the log-sum-exp that they need is that of an attention with values of width 1."""
        with setup.pattern.reading():
            ctx.setup, ctx.version = setup, setup.pattern.version
            out, lse = call("block_sdpa", q, k, k[..., :1], setup.table, *extra, **setup.attrs)
            found = call("block_entropy", q, k, setup.table, lse, *extra, **setup.attrs)
        ctx.save(q, k, out, lse, found, *extra)
        return found

    @staticmethod
    def vjp(ctx: Any, g: Any, needs: tuple[bool, ...]) -> Any:
        """Compute the gradients of q, k and the gates. Raises: ModifiedSinceForward."""
        setup, (q, k, out, lse, found, *extra) = ctx.setup, ctx.saved
        with setup.pattern.reading():
            check_version(setup.pattern, ctx.version, "entropy")
            dq, dk, dlse, *dgates = call(
                "block_entropy_backward", q, k, setup.table, lse, *extra, found, g, **setup.attrs
            )
            attrs = {**setup.attrs, "optional": (*setup.attrs["optional"], "lse_grad")}
            given = (q, k, k[..., :1], setup.table, *extra, dlse, out, lse, call("full_like", out, value=0.0))
            more = call("block_sdpa_backward", *given, **attrs)
        through = (more[0], more[1], *more[3:])  # what the entropy depends on by the log-sum-exp
        return None, *(a + b for a, b in zip((dq, dk, *dgates), through, strict=True))
