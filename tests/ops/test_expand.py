"""A fused op is its expansion into simpler ops: values and gradients, in float64 and float32, dtypes in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
from op_cases import draws

from graphwright.array import DType, bfloat16, float16, float32, float64
from graphwright.autograd import Tensor, grad, tensor
from graphwright.autograd.apply import apply
from graphwright.ops import OPS, Op

FUSED = [name for name, row in OPS.items() if row.expand is not None]
WHY_NOT = {
    "a primitive: arithmetic and functions": (
        "neg abs sign step floor ceil round add sub mul div floor_divide remainder pow minimum maximum junction "
        "exp expm1 log log1p sqrt rsqrt reciprocal sin cos tanh sigmoid erf "
        "tan asin acos atan sinh cosh asinh acosh atanh atan2 log2 log10 exp2 erfc erfinv lgamma digamma trunc fmod"
    ),
    "a primitive: bits of integers": ("bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"),
    "a primitive: comparison, logic and choice": (
        "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan where"
    ),
    "a primitive: identity": "cast copy full_like recall stop_gradient scale_gradient assert_finite assert_sizes",
    "a primitive: reduction and order": "sum mean prod amax amin any all argmax argmin cumsum linear_scan sort",
    "a primitive: views and arrangement": (
        "reshape unflatten flatten permute expand slice last size squeeze unsqueeze diagonal pad_slice concat "
        "flip roll tile repeat_interleave pad tril triu iota"
    ),
    "a primitive: entries by index": (
        "gather scatter scatter_add scatter_sum index index_sum index_put index_add index_fill one_hot bincount nonzero"
    ),
    "a primitive: products and windows": (
        "matmul conv conv_transpose conv_weight unfold fold max_pool avg_pool adaptive_avg_pool interpolate "
        "grouped_matmul grouped_outer solve"
    ),
    "a gradient: written by the vjp of its op, whose expansion has another": (
        "cross_entropy_backward embedding_backward pad_backward avg_pool_backward "
        "adaptive_avg_pool_backward interpolate_backward"
    ),
    "a primitive: gates": "gate gate_grad",
    "decides by a position on the host": "rope_dynamic rope_longer",
    "a primitive: rows found through a table": "sdpa_paged routed_attention_cached",
    "a primitive: edges found through a table": (
        "block_sdpa block_sdpa_backward block_mass block_gate_gradient block_entropy block_entropy_backward"
    ),
    "carries state": (
        "kv_append kv_append_paged sgd_step adam_step adamw_step rmsprop_step lion_step muon_step unscale_check "
        "ema_step adagrad_step adadelta_step adamax_step nadam_step radam_step asgd_step rprop_step"
    ),
    "entries of a cache": "routed_entries",
    "a primitive: flags of gradients": "zero_check",
    "a primitive: other ranks": (
        "all_reduce all_gather reduce_scatter all_to_all broadcast reduce send recv all_reduce_start all_reduce_wait "
        "reduce_scatter_start reduce_scatter_wait all_gather_start all_gather_wait"
    ),
    "a primitive: the next id of a text, with its draw": "sample_token",
    "a primitive: random numbers": "uniform normal gumbel randint bernoulli multinomial dropout stochastic_round",
}


def test_every_op_expands_or_states_a_reason() -> None:
    named = {name: why for why, names in WHY_NOT.items() for name in names.split()}
    assert sorted([*FUSED, *named]) == sorted(OPS)


def blind(name: str) -> tuple[int, ...]:
    return (1, 2) if name == "rope" else ()


def run(row: Op, inputs: list[np.ndarray], attrs: dict, kind: DType, expanded: bool) -> tuple[list[Tensor], list]:
    """Results, and gradients of all floating operands under a random upstream gradient."""
    given = [tensor(x, kind if x.dtype == np.float64 else None) for x in inputs]
    for index, t in enumerate(given):
        t.requires_grad = t.dtype.is_float and index not in blind(row.name) and row.vjp is not None
    if expanded:
        assert row.expand is not None
        outs = row.expand(given, attrs)
    else:
        outs = apply(row, given, attrs)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    rng = np.random.default_rng(0)
    kept = [(o, tensor(rng.normal(size=o.shape)).to(o.dtype)) for o in outs if o.requires_grad]
    wanted = [t for t in given if t.requires_grad]
    grads = grad([o for o, _ in kept], wanted, [s for _, s in kept], allow_unused=True) if kept else ()
    return outs, [None if g is None else g.numpy("float64") for g in grads]


@pytest.mark.parametrize(("kind", "tolerance"), [(float64, 1e-12), (float32, 1e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_match_their_expansions(name: str, kind: DType, tolerance: float) -> None:
    for inputs, attrs in draws(name, 12):
        outs, grads = run(OPS[name], inputs, attrs, kind, False)
        theirs, others = run(OPS[name], inputs, attrs, kind, True)
        assert [o.spec for o in outs] == [o.spec for o in theirs]
        assert len(grads) == len(others)
        pairs = [(o.numpy("float64"), t.numpy("float64")) for o, t in zip(outs, theirs, strict=True)]
        for mine, other in (*pairs, *zip(grads, others, strict=True)):
            assert mine is not None
            assert other is not None
            np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * np.abs(other).max(initial=1.0))


@pytest.mark.parametrize("kind", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_expansions_keep_the_dtypes_of_16_bits(name: str, kind: DType) -> None:
    if name == "rope_table":
        return  # its frequencies are float32 or float64
    for inputs, attrs in draws(name, 4):
        outs, _ = run(OPS[name], inputs, attrs, kind, False)
        theirs, _ = run(OPS[name], inputs, attrs, kind, True)
        assert [o.spec for o in outs] == [o.spec for o in theirs]
        for mine, other in zip(outs, theirs, strict=True):
            wide = other.numpy("float64")
            np.testing.assert_allclose(mine.numpy("float64"), wide, atol=2.0**-6 * np.abs(wide).max(initial=1.0))
