"""Layers whose heads and experts each token chooses, any number of them: `DynSMHA`, `DynMoE`, and both as `DynONN`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from graphwright.autograd import Parameter, Tensor, arange
from graphwright.errors import UsageError
from graphwright.experts.routers import NotAMixture, threshold_routers
from graphwright.nn.functional import attention
from graphwright.nn.layers import Linear, RMSNorm
from graphwright.nn.module import Module
from graphwright.nn.moe import MoE
from graphwright.nn.router import Routing, ThresholdRouter
from graphwright.nn.transformer import MultiHeadAttention, RotaryEmbedding
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction

LARGE_EXPERT = 128
"""Hidden width above which the experts of `DynMoE` are not the many small ones that it is for."""
Mode = Literal["sparse", "composed"]
"""How a token uses the heads that it chooses: each attends over its own tokens, or their matrices are added."""
OPEN = -20.0
"""Parameter of a threshold that every cosine is above: tanh gives -1."""


class Head(Module):
    """The matrices of one head: q, k and v [head_dim, dim], o [dim, head_dim]; and what its router has in it."""

    prototype: Parameter
    threshold: Parameter

    def __init__(
        self, dim: int, head_dim: int, *, router: ThresholdRouter, name: str = "", seed: int | None = None
    ) -> None:
        for label, own in router.expert_parameters(name, seed).items():
            self.register_parameter(label, own)

        def linear(label: str, inner: int, outer: int) -> Linear:
            return Linear(inner, outer, bias=False, name=name and f"{name}{label}.", seed=seed)

        self.q, self.k, self.v = (linear(label, dim, head_dim) for label in "qkv")
        self.o = linear("o", head_dim, dim)

    def operands(self) -> list[Parameter]:
        """Return the matrices in the order of the op `routed_attention`."""
        return [m.weight for m in (self.q, self.k, self.v, self.o)]


class DynSMHA(Module):
    """Dynamic sparse multi-head attention: each head attends over the tokens that it is used by, and no others.

    A `ThresholdRouter` chooses the heads of each token from the token alone, so nothing depends on later tokens. A head
    is causal by position in the sequence, and rotates q and k by it. Its results are weighted as those of experts.
    `shared` dense causal heads are always on, so that all tokens stay connected.

    In mode `composed`, a variant, the heads that a token chooses do not attend: their matrices are added to those of
    one causal head that all tokens have. With weights w, q_n = Σ_e w_ne Q_e x_n, likewise k and v, and the result is
    Σ_e w_ne O_e a_n for the attention a. All projections of all tokens are computed.

    Args:
        dim, heads, head_dim: size of a token, number of routed heads, even size of a head.
        k0: mean number of heads per token that calibration aims at.
        shared: number of dense heads, of the same size; may be 0.
        theta: base of the rotary frequencies; None for no positions.
        mode: `sparse`, or `composed`.
        null, kappa: of the router.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, k0: float, shared: int = 1, *, theta: float | None = 10000.0,
        mode: Mode = "sparse", null: bool = False, kappa: float = 10.0, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        if shared < 0 or head_dim < 2 or head_dim % 2:
            expected, got = "shared >= 0, head_dim even and >= 2", f"shared {shared}, head_dim {head_dim}"
            raise UsageError("invalid heads", expected=expected, got=got)
        if mode not in get_args(Mode):
            raise UsageError("invalid mode of routed heads", expected=" or ".join(get_args(Mode)), got=mode)
        self.theta, self.k0, self.router = theta, k0, ThresholdRouter(dim, heads, k0, kappa, null=null)
        made = (name and f"{name}heads.{e}." for e in range(heads))
        self.heads = [Head(dim, head_dim, router=self.router, name=label, seed=seed) for label in made]
        rope = None if theta is None else RotaryEmbedding(head_dim, theta)
        self.mode, self.rope = mode, rope if mode == "composed" else None
        label = name and f"{name}shared."
        self.shared = (
            MultiHeadAttention(dim, shared, head_dim=head_dim, rope=rope, name=label, seed=seed) if shared else None
        )

    def route(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Assign tokens [N, dim] to heads; where `valid` [N] is False, to none."""
        return self.router(x, valid, experts=self.heads)

    def forward(self, x: Tensor, valid: Tensor | None = None, *, positions: Tensor | None = None) -> Tensor:
        """Attend within each sequence of x [B, T, dim]; the shape is kept.

        `valid` bool [B, T] is False for padding, which gets zeros from routed heads and is seen by no head; `positions`
        int64 [B or 1, T] are 0 to T - 1 by default.
        """
        positions = arange(x.shape[1])[None] if positions is None else positions
        r = self.route(call("flatten", x, start=0, end=1), None if valid is None else valid.reshape(-1))
        if self.mode == "composed":
            y = self._composed(x, r.weights.to(x.dtype), valid, positions)
        else:
            operands = [t for head in self.heads for t in head.operands()]
            how = {"theta": self.theta, "expected": float(self.k0)}
            y = call("routed_attention", x, *r.runs, r.weights, positions, *operands, **how)
        return y if self.shared is None else call("junction", self.shared(x, positions=positions, key_mask=valid), y)

    def _composed(self, x: Tensor, weights: Tensor, valid: Tensor | None, positions: Tensor) -> Tensor:
        """Attend by one head, whose matrices are sums of those of the heads, by the weights [B·T, E] of each token."""
        shares = weights.unsqueeze(-1)

        def mixed(t: Tensor, matrices: Sequence[Parameter]) -> Tensor:
            """Map t [B·T, in] by each matrix, and sum the results by the weights: [B·T, out]."""
            stacked = call("stack", *matrices)
            made = call("linear", t, call("flatten", stacked, start=0, end=1))
            return (call("unflatten", made, axis=1, sizes=stacked.shape[:2]) * shares).sum(axis=1)

        def parted(t: Tensor) -> Tensor:
            return call("unflatten", t, axis=0, sizes=x.shape[:2])

        flat = call("flatten", x, start=0, end=1)
        *inner, outer = zip(*(head.operands() for head in self.heads), strict=True)
        q, k, v = (parted(mixed(flat, m)).unsqueeze(1) for m in inner)
        if self.rope is not None:
            cos, sin = self.rope(positions)
            q, k = (self.rope.rotate(t, cos, sin) for t in (q, k))
        a = attention(q, k, v, key_mask=valid, causal=True).squeeze(1)
        return parted(mixed(call("flatten", a, start=0, end=1), outer))


class DynMoE(MoE):
    """A mixture of many small experts, of which each token uses any number: `nn.MoE` with a `ThresholdRouter`.

    Args:
        dim, hidden, experts: sizes of each expert, number of experts; hidden above 128 warns.
        max_experts: number of experts together with the free slots, not alive at first, in which growth gives birth to
            more; by default `experts`.
        k0: mean number of experts per token that calibration aims at.
        null, kappa: of the router.
        kind, act, bias: of the experts, see `nn.MoE`.
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, k0: float, max_experts: int | None = None, *, null: bool = False,
        kappa: float = 10.0, kind: str = "gated", act: str = "silu", bias: bool = False, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        most = experts if max_experts is None else max_experts
        if hidden > LARGE_EXPERT:
            text = f"many small experts, at most {LARGE_EXPERT} wide, leave a router more choice"
            warnings.warn(f"experts of width {hidden}: {text}", UserWarning, stacklevel=2)
        router = ThresholdRouter(dim, most, k0, kappa, null=null, live=experts)
        super().__init__(dim, hidden, most, kind=kind, act=act, bias=bias, router=router, name=name, seed=seed)


class DynONN(Module):
    """A block both of whose halves are routed by token: h = x + DynSMHA(norm1 x), out = h + DynMoE(norm2 h).

    Args:
        dim, heads, head_dim, shared, theta, mode: of the attention, see `DynSMHA`.
        experts, hidden, kind, act: of the experts, see `DynMoE`.
        k0: mean number of heads, and of experts, per token.
        null, kappa: of both routers.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, experts: int, hidden: int, k0: float, shared: int = 1, *,
        theta: float | None = 10000.0, mode: Mode = "sparse", null: bool = False, kappa: float = 10.0,
        kind: str = "gated", act: str = "silu", name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        routing: dict[str, Any] = {"null": null, "kappa": kappa, "seed": seed}
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        label = name and f"{name}attn."
        self.attn = DynSMHA(dim, heads, head_dim, k0, shared, theta=theta, mode=mode, name=label, **routing)
        self.moe = DynMoE(dim, hidden, experts, k0, kind=kind, act=act, name=name and f"{name}moe.", **routing)

    def forward(self, x: Tensor, valid: Tensor | None = None, *, positions: Tensor | None = None) -> Tensor:
        """Map x [B, T, dim] to the same shape; `valid` and `positions` as in `DynSMHA`."""
        h = call("junction", x, self.attn(self.norm1(x), valid, positions=positions))
        return call("junction", h, self.moe(self.norm2(h), valid))


def to_dense(e: Transaction, block: str, half: Literal["attn", "moe"]) -> None:
    """Open all thresholds of one half of a `DynONN` in an edit: every token then uses every head or expert.

    Undoing the edit, or `calibrate`, makes it sparse again.

    Args:
        e: an open edit.
        block: path of the block, "" for a program that is one.
        half: the attention or the experts.
    Raises: NotAMixture if the block has no such half.
    """
    path = ".".join(part for part in (block, half, "router") if part)
    found = next((r for r in threshold_routers(e.program) if r.path == path), None)
    if found is None:
        paths = ", ".join(r.path for r in threshold_routers(e.program)) or "no threshold router"
        raise NotAMixture("the block has no such half", where=path, expected=paths)
    for key in found.thresholds:
        e.set_weight(key, np.full((), OPEN))
