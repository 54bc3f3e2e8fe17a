"""Linear and Embedding."""

from __future__ import annotations

from functools import partial

from graphwright.autograd import Parameter, Tensor
from graphwright.nn import init
from graphwright.nn.functional import embedding, linear
from graphwright.nn.module import Module


class Linear(Module):
    """x · wᵀ + b: [..., in_features] to [..., out_features]; weight [out, in], as in torch.

    Args:
        name, seed: source of the initial values; see `nn.init`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, name: str = "", seed: int | None = None
    ) -> None:
        key = f"{name}linear.{in_features}.{out_features}." if name else ""
        drawn = partial(init.kaiming_uniform, fan_in=in_features, seed=seed)
        self.weight = Parameter(drawn((out_features, in_features), key and f"{key}weight"))
        self.bias = Parameter(drawn((out_features,), key and f"{key}bias")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of a table [num, dim] by integer ids of any shape, initially N(0, 1).

    Args:
        padding_idx: id of a row that is initially 0 and gets no gradient.
    """

    def __init__(
        self, num: int, dim: int, padding_idx: int | None = None, *, name: str = "", seed: int | None = None
    ) -> None:
        table = init.normal((num, dim), name and f"{name}embedding.{num}.{dim}", std=1.0, seed=seed)
        self.padding_idx = None if padding_idx is None else padding_idx % num
        if self.padding_idx is not None:
            table.to_numpy()[self.padding_idx] = 0
        self.weight = Parameter(table)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] to [..., dim]."""
        return embedding(ids, self.weight, self.padding_idx)
