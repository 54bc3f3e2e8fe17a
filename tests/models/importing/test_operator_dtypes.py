"""Rows of the table on operands of different dtypes, tensors without axes and numbers: dtypes and values of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from operator_samples import Calls, converted_feeds, flat, flat_tensors, plain
from opinfo import difference
from torch.nn import functional
from torch.utils import _pytree as pytree

import graphwright as gw

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool)  # fmt: skip
NUMBERS = (2, 2.5, True)
WORDS = str.split
CHOICE = torch.tensor([True, False, True])

PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(torch, name)
    for name in WORDS("""
        add sub mul div floor_divide remainder fmod pow atan2 maximum minimum eq ne lt le gt ge logical_and logical_or
        logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift logaddexp logaddexp2
        hypot copysign xlogy fmax fmin rsub ldexp float_power
    """)
} | {
    "div.floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div.trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "add.alpha": lambda a, b: torch.add(a, b, alpha=3),
    "sub.alpha": lambda a, b: torch.sub(a, b, alpha=3),
    "where": lambda a, b: torch.where(CHOICE, a, b),
    "where.zero": lambda a, b: torch.where(CHOICE, 0.0, b),
    "where.numbers": lambda a, b: torch.where(CHOICE, 0.0, 1.0) + b,
    "masked_fill": lambda a, b: torch.masked_fill(a, CHOICE, b),
    "clamp.min": lambda a, b: torch.clamp(a, min=b),
    "clamp.max": lambda a, b: torch.clamp(a, max=b),
    "clamp": lambda a, b: torch.clamp(a, b, b + 1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, b, a, value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=2),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "full_like": lambda a, b: [] if isinstance(b, torch.Tensor) else torch.full_like(a, b),
    "new_full": lambda a, b: [] if isinstance(b, torch.Tensor) else a.new_full((2,), b),
    "type_as": lambda a, b: a.type_as(b) + a,
    "isin": lambda a, b: torch.isin(a, b),
    "mse_loss": lambda a, b: functional.mse_loss(a, b) if a.shape == b.shape else [],
    "mm": lambda a, b: torch.mm(a[None], b[:, None]),
    "linear": lambda a, b: functional.linear(a[None], b[None]),
    "index_fill": lambda a, b: torch.index_fill(a, 0, torch.tensor([1]), b),
    "prelu": functional.prelu,
    "threshold": lambda a, b: [] if isinstance(b, torch.Tensor) else functional.threshold(a, 1, b),
}  # fmt: skip
ALONG = ("logsumexp", "softmax", "cumsum", "cumprod", "cummax", "median")
SINGLE: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, name)
    for name in WORDS("""
        abs neg square sqrt exp exp2 expm1 log log1p log2 log10 sin cos tan asin atan sinh cosh tanh asinh rsqrt sigmoid
        reciprocal ceil floor round trunc sign erf erfc isnan isinf isfinite logical_not bitwise_not relu sum prod mean
        amax amin argmax all any var std max min sort nan_to_num frac signbit count_nonzero diff nansum
    """)
} | {name: lambda x, name=name: getattr(torch, name)(x, 0) for name in ALONG} | {
    name: getattr(functional, name)
    for name in WORDS("""
        gelu silu mish elu selu celu leaky_relu softplus hardtanh hardsigmoid hardswish relu6 softsign tanhshrink
        logsigmoid
    """)
} | {
    **{f"to.{kind}".replace("torch.", ""): lambda x, kind=kind: x.to(kind) for kind in DTYPES},
    "sum.int32": lambda x: x.sum(dtype=torch.int32),
    "prod.uint8": lambda x: x.prod(dtype=torch.uint8),
    "cumsum.int32": lambda x: x.cumsum(0, dtype=torch.int32),
    "cumprod.int16": lambda x: x.cumprod(0, dtype=torch.int16),
    "nansum.int32": lambda x: x.nansum(dtype=torch.int32),
    "sum.float64": lambda x: x.sum(dtype=torch.float64),
    "softmax.float32": lambda x: torch.softmax(x, 0, dtype=torch.float32),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "one_minus": lambda x: 1.0 - x,
    "arange": lambda x: torch.arange(3) * x,
    "arange.float": lambda x: torch.arange(0, 3, 1.0) * x,
    "full": lambda x: torch.full((3,), 2) * x,
    "full.float": lambda x: torch.full((3,), 2.0) * x,
    "ones": lambda x: torch.ones(3) * x,
    "eye": lambda x: torch.eye(3) * x,
    "linspace": lambda x: torch.linspace(0, 1, 3) * x,
    "scalar": lambda x: torch.tensor(2.5) * x,
    "scalar.int": lambda x: torch.tensor(2) * x,
}  # fmt: skip


def array(kind: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0])[: shape[0] if shape else 1].reshape(shape).to(kind)


def pairs() -> Iterator[tuple[Any, Any]]:
    """Yield arrays, tensors without axes and numbers, in both orders."""
    for a in DTYPES:
        for b in DTYPES:
            yield array(a, 3), array(b, 3)
            yield array(a, 3), array(b)
            yield array(a), array(b, 3)
            if b in (torch.float32, torch.int64, torch.float16):
                yield array(a), array(b)
        for number in NUMBERS:
            yield array(a, 3), number
            yield number, array(a, 3)
            yield array(a), number


def singles() -> Iterator[tuple[Any, ...]]:
    return ((array(kind, *shape),) for kind in DTYPES for shape in ((3,), ()))


def check(functions: Iterable[Callable[..., Any]], samples: Sequence[tuple[Any, ...]]) -> list[str]:
    """Capture one module that calls functions on the samples that torch takes; return what differs."""
    given, want = [], []
    for function in functions:
        for sample in samples:
            try:
                want.append(flat(function(*sample)))
            except (RuntimeError, TypeError, AttributeError, IndexError, NotImplementedError):
                continue
            given.append(pytree.tree_flatten(((function, *sample), {})))
    assert len(given) > 5
    tensors = tuple(leaf for leaves, _ in given for leaf in leaves if isinstance(leaf, torch.Tensor))
    program = gw.from_torch(Calls(lambda f, *args: f(*args), given), tensors, recover=False)
    found = iter(flat_tensors(program(**dict(zip(program.input_names(), converted_feeds(tensors), strict=True)))))
    wrong = []
    for (leaves, _), theirs in zip(given, want, strict=True):
        if text := difference(plain(theirs), plain([next(found) for _ in theirs])):
            names = [f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else v for v in leaves]
            wrong.append(f"{names}: {text}")
    return wrong


@pytest.mark.deep
@pytest.mark.parametrize("name", PAIRS)
def test_two_operands_have_the_result_of_torch(name):
    assert not check([PAIRS[name]], list(pairs()))


@pytest.mark.deep
@pytest.mark.parametrize("name", SINGLE)
def test_one_operand_has_the_result_of_torch(name):
    assert not check([SINGLE[name]], list(singles()))


def test_a_few_dtypes_of_two_operands_have_the_results_of_torch():
    few = [(array(torch.bfloat16, 3), array(torch.float32)), (array(torch.int64, 3), 2.5),
           (2, array(torch.float16, 3)), (array(torch.uint8, 3), array(torch.int8, 3))]  # fmt: skip
    assert not check(PAIRS.values(), few)


def test_a_few_dtypes_of_one_operand_have_the_results_of_torch():
    assert not check(SINGLE.values(), [(array(torch.bfloat16, 3),), (array(torch.int32, 3),), (array(torch.bool),)])
