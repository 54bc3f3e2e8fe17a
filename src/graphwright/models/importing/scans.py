"""Functions of transformers with a loop over time, and equal functions without it, which a capture runs instead.

A Python loop over the steps of a text would fix their number in a captured graph. `LOOPS` has one entry per function:
an equal function for calls without states of earlier steps, and the arguments of a random call. The equal function is
used only if its results are those of the function on these arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature, unwrap
from math import inf
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

_library = torch.library.Library("graphwright", "FRAGMENT")
operators: Any = torch.ops.graphwright


def _operator(schema: str, like: int) -> Callable[[Callable[..., torch.Tensor]], None]:
    """Return a decorator that makes an operator of torch of a function whose result has the shape of an argument."""

    def enter(function: Callable[..., torch.Tensor]) -> None:
        _library.define(schema)
        name = schema.partition("(")[0]
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graphwright::{name}", lambda *args: torch.empty_like(args[like]), lib=_library)

    return enter


@_operator("linear_scan(Tensor a, Tensor b, int axis) -> Tensor", like=1)
def _linear_scan(a: torch.Tensor, b: torch.Tensor, axis: int) -> torch.Tensor:
    """h = a·h + b along an axis, from 0."""
    h, states = torch.zeros_like(b.select(axis, 0)), []
    for factor, summand in zip(a.unbind(axis), b.unbind(axis), strict=True):
        h = factor * h + summand
        states.append(h)
    return torch.stack(states, axis)


@_operator("chunk_scan(Tensor x, Tensor decay, Tensor b, Tensor c, int chunk) -> Tensor", like=0)
def _chunks(x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int) -> torch.Tensor:
    """y = h·c for h = exp(decay)·h + x·bᵀ along axis 1; x [B, T, H, P], decay [B, T, H], b and c [B, T, H, N]."""
    h, made = torch.zeros_like(x[:, 0, :, :, None] * b[:, 0, :, None]), []
    for step in range(x.shape[1]):
        h = decay[:, step, :, None, None].exp() * h + x[:, step, :, :, None] * b[:, step, :, None]
        made.append((h * c[:, step, :, None]).sum(-1))
    return torch.stack(made, 1)


@dataclass(frozen=True, slots=True)
class Loop:
    """A function with a loop over time.

    Attributes:
        equal: its arguments -> its results, without a loop; not for calls with states.
        example: a generator of random numbers -> the arguments of a call, and those by name.
        states: the parameters that have or ask for states of earlier steps.
    """

    equal: Callable[..., Any]
    example: Callable[[torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]]
    states: tuple[str, ...]


def _selective_scan(
    hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Selective scan of Mamba: h = exp(A·dt)·h + dt·B·x, y = C·h + D·x.

    Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", algorithm 2.
    """
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = functional.softplus(dt) if delta_softplus else dt
    factors = torch.exp(A[None, :, None, :] * dt[..., None])
    summands = dt[..., None] * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    states = operators.linear_scan(factors, summands, 2).transpose(1, 2).to(hidden_states.dtype)
    out = torch.matmul(states, C.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    out = out if D is None else out + hidden_states * D[None, :, None]
    return out if z is None else out * functional.silu(z)


def _chunk_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int,
    D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, *, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Scan of Mamba 2: h = exp(A·dt)·h + dt·x·Bᵀ, y = h·C + D·x, where heads of a group share B and C.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6.
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = functional.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, *dt_limit)
    x, heads = x.float(), x.shape[2]
    b, c = (t.float().repeat_interleave(heads // t.shape[2], 2, output_size=heads) for t in (B, C))
    out = operators.chunk_scan(x * dt[..., None].float(), A.to(x.dtype) * dt.float(), b, c, chunk_size)
    return out if D is None else out + D[..., None] * x


def _gated_scan(
    layer: Any, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor,
    recurrent_states: None = None, acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Recurrence of a gated linear recurrent unit: h = a·h + x, where a is 0 at the first token of a text.

    Source: De et al. 2024, "Griffin: Mixing Gated Linear Recurrences with Local Attention", eq. 4.
    """
    states = operators.linear_scan((recurrent_gate * ~reset).to(acc_dtype), hidden_states.to(acc_dtype), 1)
    return states.to(hidden_states.dtype), states[:, -1]


def _weighted_mean(
    time_decay: torch.Tensor, time_first: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: None = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of RWKV: the mean of all values up to each token, whose weights are exp(key) and decay with time.

    In float64, whose exponents have room for keys as far apart as 700.
    Source: Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", eq. 16.
    """
    wide = key.double()
    weight = torch.exp(wide - wide.amax(1, keepdim=True))
    decay = torch.exp(-torch.exp(time_decay.double())).expand(weight.shape)
    first = torch.exp(time_first.double()) * weight
    parts = (operators.linear_scan(decay, t, 1) for t in (weight * value, weight))
    values, weights = (functional.pad(t, (0, 0, 1, -1)) for t in parts)  # up to the token before
    return ((values + first * value) / (weights + first)).to(key.dtype), None


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _selective_example(g: torch.Generator) -> Any:
    x, dt, z, b, c = (_normal(g, 2, n, 7) for n in (3, 3, 3, 4, 4))
    options = {"D": _normal(g, 3), "z": z, "delta_bias": _normal(g, 3), "delta_softplus": True}
    return (x, dt, -_normal(g, 3, 4).exp(), b, c), options


def _chunk_example(g: torch.Generator) -> Any:
    x, dt, (b, c) = _normal(g, 2, 7, 4, 3), _normal(g, 2, 7, 4), (_normal(g, 2, 7, 2, 5) for _ in range(2))
    options = {"D": _normal(g, 4), "dt_bias": _normal(g, 4), "dt_softplus": True}
    return (x, dt, -_normal(g, 4).exp(), b, c, 3), options


def _gated_example(g: torch.Generator) -> Any:
    reset = torch.zeros(2, 7, 1, dtype=torch.bool)
    reset[:, 0] = reset[1, 4] = True
    return (None, _normal(g, 2, 7, 3), _normal(g, 2, 7, 3).sigmoid(), reset, None), {}


def _weighted_example(g: torch.Generator) -> Any:
    return (_normal(g, 3), _normal(g, 3), 20 * _normal(g, 2, 7, 3), _normal(g, 2, 7, 3)), {}


LOOPS = {
    "mamba_selective_scan": Loop(_selective_scan, _selective_example, ("return_last_state",)),
    "mamba2_chunk_scan": Loop(_chunk_scan, _chunk_example, ("initial_states", "return_final_states")),
    "RecurrentGemmaRglru._rnn_scan": Loop(_gated_scan, _gated_example, ("recurrent_states",)),
    "rwkv_linear_attention": Loop(_weighted_mean, _weighted_example, ("state", "return_state")),
}
"""Functions with a loop over time, by the names that modules of `transformers.models` have them under."""


@contextmanager
def without_loops(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: the code of a module's classes calls functions without loops over time; on exit, its own."""
    homes = {type(part).__module__ for part in module.modules()}
    with ExitStack() as stack:
        for home in (sys.modules[name] for name in homes if name.startswith("transformers.models.")):
            for owner, name, original, loop in _found(home):
                if _is_equal(unwrap(original), loop):
                    stack.callback(setattr, owner, name, original)
                    setattr(owner, name, _replaced(unwrap(original), loop))
        yield


def _found(home: ModuleType) -> Iterator[tuple[Any, str, Callable[..., Any], Loop]]:
    """Yield the functions of a module that have an entry, each with its owner and name there."""
    for path, loop in LOOPS.items():
        *classes, name = path.split(".")
        owner: Any = home
        for part in classes:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if original is not None:
            yield owner, name, original, loop


def _replaced(original: Callable[..., Any], loop: Loop) -> Callable[..., Any]:
    parameters = signature(original)

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        if any(given.get(name) is not None and given.get(name) is not False for name in loop.states):
            return original(*args, **kwargs)
        return loop.equal(*args, **kwargs)

    return run


@cache
def _is_equal(original: Callable[..., Any], loop: Loop) -> bool:
    """Return whether a function and its equal have the same results on random arguments."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            args, options = loop.example(torch.Generator().manual_seed(0))
            results = original(*args, **options), loop.equal(*args, **options)
    except Exception:  # a version of the function with other parameters may fail in any way
        return False
    expected, found = map(pytree.tree_leaves, results)
    return len(expected) == len(found) and all(
        a is b or (a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5))
        for a, b in zip(expected, found, strict=True)
    )
