"""Attention and encoder-decoder transformers with torch's arguments and parameters (Vaswani et al. 2017).

For rotary positions, grouped heads and windows see `transformer`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import inf
from typing import Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor, as_tensor, cat, zeros
from graphwright.autograd.recorder import optional
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.nn import functional, initial
from graphwright.nn.containers import ModuleList
from graphwright.nn.function_modules import Dropout
from graphwright.nn.layers import LayerNorm, Linear
from graphwright.nn.module import Module

_ACTIVATIONS = {f.__name__: f for f in (functional.relu, functional.gelu)}


class MultiheadAttention(Module):
    """softmax(q kᵀ / √D) v per head, between linear projections, with torch's arguments and parameters.

    Args:
        dropout: dropout of the attention weights.
        add_bias_kv: append a trained key and value to each sequence.
        add_zero_attn: append a key and value of zeros.
        kdim, vdim: sizes of keys and values; `embed_dim` by default.
        batch_first: operands are [B, T, E] instead of [T, B, E].
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
    ) -> None:  # fmt: skip
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            expected = f"a positive multiple of {num_heads}"
            raise UsageError("invalid embed_dim", where="MultiheadAttention", expected=expected, got=embed_dim)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        self.in_proj_weight = self.q_proj_weight = self.k_proj_weight = self.v_proj_weight = None
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = Parameter(initial.xavier_uniform((3 * embed_dim, embed_dim)))
        else:
            sizes = embed_dim, self.kdim, self.vdim
            weights = (Parameter(initial.xavier_uniform((embed_dim, n))) for n in sizes)
            self.q_proj_weight, self.k_proj_weight, self.v_proj_weight = weights
        self.in_proj_bias = Parameter(initial.zeros(3 * embed_dim)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if self.out_proj.bias is not None:
            self.out_proj.bias.assign(zeros(embed_dim))
        drawn = lambda: Parameter(initial.xavier_normal((1, 1, embed_dim))) if add_bias_kv else None  # noqa: E731
        self.bias_k, self.bias_v = drawn(), drawn()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend from queries to keys.

        Args:
            query, key, value: [T, B, E], [S, B, kdim], [S, B, vdim], batch first if so made; or all without B.
            key_padding_mask: [B, S] or [S]; bool, true where a key is hidden, or floating, added to the scores.
            need_weights: also return the attention weights.
            attn_mask: [T, S] or [B · num_heads, T, S]; bool, true where a key is hidden, or floating.
            average_attn_weights: average the weights over the heads.
            is_causal: tells that `attn_mask`, which must be given, hides from query i the keys after i.
        Returns: [T, B, E], or in the form of the query, and the weights [B, T, S] or [B, num_heads, T, S], or None. A
            query without visible keys gets zeros from attention, where torch has NaN.
        Raises: ShapeError, DTypeError; UsageError for `is_causal` without a mask.
        """
        if is_causal and attn_mask is None:
            raise UsageError("is_causal was given without attn_mask", where="MultiheadAttention",
                             fix="pass Transformer.generate_square_subsequent_mask(T) as attn_mask")  # fmt: skip
        if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3):
            got = f"{query.spec}, {key.spec}, {value.spec}"
            raise ShapeError("invalid operands", where="MultiheadAttention", expected="3 axes each, or 2", got=got)
        single, axis = query.ndim == 2, 0 if self.batch_first else 1
        if single:
            query, key, value = (t.unsqueeze(axis) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        operands = (query, key, value) if self.batch_first else tuple(t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(*operands)
        causal = is_causal and key_padding_mask is None and not need_weights and k.shape[2] == q.shape[2]
        masks = [self._mask(key_padding_mask, k, "key_padding_mask", [(k.shape[0], key.shape[axis ^ 1])])]
        if not causal:
            plain = (query.shape[axis ^ 1], key.shape[axis ^ 1])
            shapes = [plain, (q.shape[0] * self.num_heads, *plain)]
            masks.append(self._mask(attn_mask, k, "attn_mask", shapes))
        out, weights = self._attended(q, k, v, masks, causal, need_weights)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if single:
            out, weights = out.squeeze(axis), None if weights is None else weights.squeeze(0)
        if weights is not None:
            optional([weights])
        return out, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the heads of q, k and v, [B, num_heads, T or S, head_dim], with appended keys."""
        e, bias = self.embed_dim, self.in_proj_bias
        if self.in_proj_weight is None:
            weights: Any = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self.in_proj_weight.split(e)
        biases = (None,) * 3 if bias is None else bias.split(e)
        if query is key is value and self.in_proj_weight is not None:
            q, k, v = functional.linear(query, self.in_proj_weight, bias).split(e, -1)
        else:
            q, k, v = map(functional.linear, (query, key, value), weights, biases)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (cat([t, b.expand(t.shape[0], 1, e)], 1) for t, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (cat([t, zeros(t.shape[0], 1, e, dtype=t.dtype)], 1) for t in (k, v))
        q, k, v = (t.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return q, k, v

    def _mask(self, mask: Any, k: Tensor, name: str, shapes: list[tuple[int, ...]]) -> Tensor | None:
        """Return a mask [B or 1, heads or 1, T or 1, S'] over appended keys too: bool, true if visible, or floating."""
        if mask is None:
            return None
        mask = as_tensor(mask)
        if mask.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ShapeError(f"{name} has a wrong shape", where="MultiheadAttention", expected=expected, got=mask.spec)
        if not (mask.dtype.is_float or mask.dtype.kind == "bool"):
            raise DTypeError(f"{name} has a wrong dtype", where="MultiheadAttention", expected="bool or floating",
                             got=mask.dtype)  # fmt: skip
        if name == "key_padding_mask":
            mask = mask.reshape(mask.shape[0], 1, 1, mask.shape[1])
        elif mask.ndim == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        mask = ~mask if mask.dtype.kind == "bool" else mask
        added = k.shape[2] - mask.shape[-1]
        return functional.pad(mask, (0, added), value=float(mask.dtype.kind == "bool")) if added else mask

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor | None], causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        seen = [m for m in masks if m is not None and m.dtype.kind == "bool"]
        added = [m for m in masks if m is not None and m.dtype.is_float]
        options: dict[str, Any] = {"mask": seen[0] if len(seen) == 1 else seen[0] & seen[1]} if seen else {}
        options |= {"bias": added[0] if len(added) == 1 else added[0] + added[1]} if added else {}
        dropout = self.dropout if self.dropout and self.trains else 0.0
        if not need_weights:
            start = 0 if causal else None
            return functional.attention(q, k, v, causal=causal, q_start=start, dropout_p=dropout, **options), None
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        mask, bias = options.get("mask"), options.get("bias")
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
            mask = bias > -inf if mask is None else mask & (bias > -inf)
        weights = scores.softmax(-1, mask=None if mask is None else mask.expand(*scores.shape))
        weights = functional.dropout(weights, dropout)
        return weights @ v, weights


# -- layers of transformers --------------------------------------------------------------------------------------------
class _TransformerLayer(Module):
    """Base of layers: sums of x and of blocks, each with a norm, after the sum or with `norm_first` before the block.

    Args:
        activation: `relu`, `gelu` or a function of a tensor, between the linear maps.
        bias: whether linear maps and norms have biases.
    """

    attentions = ("self_attn",)

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu", layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True,
    ) -> None:  # fmt: skip
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            expected = f"{', '.join(_ACTIVATIONS)} or a function"
            raise UsageError("unknown activation", where=type(self).__name__, expected=expected, got=activation)
        for name in self.attentions:
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first))
        self.linear1, self.dropout = Linear(d_model, dim_feedforward, bias), Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias)
        for k in range(1, len(self.attentions) + 2):
            setattr(self, f"norm{k}", LayerNorm(d_model, layer_norm_eps, bias=bias))
        for k in range(1, len(self.attentions) + 2):
            setattr(self, f"dropout{k}", Dropout(dropout))
        self.norm_first = norm_first
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _block(self, x: Tensor, number: int, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus a block of x, with the norm and dropout of a number."""
        norm, dropout = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
        return x + dropout(block(norm(x))) if self.norm_first else norm(x + dropout(block(x)))

    def _attend(
        self, name: str, source: Tensor | None, mask: Any, padding: Any, causal: bool
    ) -> Callable[[Tensor], Tensor]:
        """Return the block that attends from x to a source, or to x."""
        attention = getattr(self, name)

        def block(x: Tensor) -> Tensor:
            keys = x if source is None else source
            return attention(x, keys, keys, padding, False, mask, is_causal=causal)[0]

        return block

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention, then a feed-forward network."""

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Apply the layer to src [T, B, d_model]; for forms and masks see `MultiheadAttention`."""
        x = self._block(src, 1, self._attend("self_attn", None, src_mask, src_key_padding_mask, is_causal))
        return self._block(x, 2, self._feed_forward)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to a memory, then a feed-forward network."""

    attentions = ("self_attn", "multihead_attn")

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Apply the layer to tgt [T, B, d_model] and memory [S, B, d_model]; for masks see `MultiheadAttention`."""
        x = self._block(tgt, 1, self._attend("self_attn", None, tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        seen = self._attend("multihead_attn", memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        return self._block(self._block(x, 2, seen), 3, self._feed_forward)


# -- stacks ------------------------------------------------------------------------------------------------------------
class TransformerEncoder(Module):
    """Copies of a layer one after another, then a norm; `enable_nested_tensor` and `mask_check` have no effect."""

    def __init__(
        self, encoder_layer: Module, num_layers: int, norm: Module | None = None, enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:  # fmt: skip
        self.layers, self.norm = _copies(encoder_layer, num_layers), norm

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply all layers to src; for the masks see `TransformerEncoderLayer`."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal=bool(is_causal))
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """Copies of a layer one after another, then a norm."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        self.layers, self.norm = _copies(decoder_layer, num_layers), norm

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Apply all layers to tgt and memory; for the masks see `TransformerDecoderLayer`."""
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)
        return tgt if self.norm is None else self.norm(tgt)


def _copies(layer: Module, count: int) -> ModuleList:
    copies = ModuleList(deepcopy(layer) for _ in range(count))
    for variable in copies.variables().values():
        variable.name = ""  # a layer that ran before has names, which are those of the copies' paths from now on
    return copies


class Transformer(Module):
    """An encoder and a decoder of equal layers, each with a norm at its end (Vaswani et al. 2017).

    Args:
        custom_encoder, custom_decoder: replace the encoder or decoder that the other arguments describe.
    """

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
        dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu", custom_encoder: Module | None = None,
        custom_decoder: Module | None = None, layer_norm_eps: float = 1e-5, batch_first: bool = False,
        norm_first: bool = False, bias: bool = True,
    ) -> None:  # fmt: skip
        options = d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias
        norms = [LayerNorm(d_model, layer_norm_eps, bias=bias) for _ in range(2)]
        if custom_encoder is None:
            custom_encoder = TransformerEncoder(TransformerEncoderLayer(*options), num_encoder_layers, norms[0])
        if custom_decoder is None:
            custom_decoder = TransformerDecoder(TransformerDecoderLayer(*options), num_decoder_layers, norms[1])
        self.encoder, self.decoder = custom_encoder, custom_decoder
        for p in self.parameters():
            if p.ndim > 1:
                p.assign(Tensor(initial.xavier_uniform(p.shape)))
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Encode src [S, B, d_model], decode tgt [T, B, d_model]; for forms and masks see `MultiheadAttention`.

        Raises: ShapeError for batches or sizes that do not fit.
        """
        batch = 0 if self.batch_first else 1
        if src.ndim != tgt.ndim or (src.ndim == 3 and src.shape[batch] != tgt.shape[batch]):
            raise ShapeError("the batches differ", where="Transformer", expected=src.spec, got=tgt.spec)
        if {src.shape[-1], tgt.shape[-1]} != {self.d_model}:
            expected, got = f"last axes of size {self.d_model}", f"{src.spec}, {tgt.spec}"
            raise ShapeError("operands have a wrong size", where="Transformer", expected=expected, got=got)
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
                            tgt_is_causal, memory_is_causal)  # fmt: skip

    @staticmethod
    def generate_square_subsequent_mask(sz: int) -> Tensor:
        """Return float32 [sz, sz]: 0 where query i sees key j, which is j ≤ i, else -inf."""
        return Tensor(from_numpy(np.triu(np.full((sz, sz), -inf, np.float32), 1)))
