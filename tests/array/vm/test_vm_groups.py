"""Groups of ops fused into one row, against the same ops row by row."""

from __future__ import annotations

import numpy as np
import pytest
from vm_forms import encode, form_of, low, unset, view

from graphwright.array import NDArray, bfloat16, float32, from_numpy
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group
from graphwright.array.vm.running.segment import VmSegment

F3 = (float32,) * 3


def member(op: str, out: NDArray | Inner, *ins: NDArray | Inner) -> Member:
    operands = [x if isinstance(x, Inner) else view(x) for x in (out, *ins)]
    return Member(form_of(op), operands[:1], operands[1:], {}, F3[: len(operands)])


def arrays(shape: tuple[int, ...], count: int) -> list[NDArray]:
    rng = np.random.default_rng(0)
    return [from_numpy(rng.normal(size=shape).astype("f4")) for _ in range(count)]


@pytest.mark.parametrize("shape", [(7,), (1024,), (3000,), (40, 33), (5, 1500)])
def test_fused_sum_and_activation_keep_the_bits(shape: tuple[int, ...]) -> None:
    x, out, apart, between = arrays(shape, 4)
    bias = arrays(shape[-1:], 1)[0]
    rows = encode_group(shape, [member("add", Inner(0), x, bias), member("silu", out, Inner(0))])
    assert rows is not None
    assert {r[0] for r in rows} <= {Code.ADD_SILU, Code.LOOP}
    VmSegment([rows])()
    for op, target, *ins in (("add", between, x, bias), ("silu", apart, between)):
        code = encode(op, [view(target)], [view(a) for a in ins], {})
        assert code is not None
        VmSegment([code])()
    assert out.to_numpy().tobytes() == apart.to_numpy().tobytes()


def test_sum_with_another_reader_is_not_fused() -> None:
    x, y, out = arrays((3000,), 3)
    add, silu = member("add", Inner(0), x, y), member("silu", Inner(1), Inner(0))
    rows = encode_group((3000,), [add, silu, member("mul", out, Inner(1), Inner(0))])
    assert rows is not None
    assert Code.ADD_SILU not in {r[0] for r in rows}
    VmSegment([rows])()
    total = x.to_numpy().astype("f8") + y.to_numpy()
    np.testing.assert_allclose(out.to_numpy(), total * total / (1 + np.exp(-total)), rtol=1e-5, atol=1e-6)
    again = encode_group((3000,), [add, silu, member("exp", Inner(0), x), member("mul", out, Inner(1), Inner(0))])
    assert again is not None
    assert Code.ADD_SILU in {r[0] for r in again}, "the tile is overwritten before it is read"


@pytest.mark.parametrize("shape", [(40,), (3000,), (5, 1500)])
def test_overwritten_bfloat16_is_widened_again(shape: tuple[int, ...]) -> None:
    """-x, then x := x · x in place, then both added, of bfloat16."""
    x = low(np.random.default_rng(0).normal(size=shape))
    first, out = x.to_numpy("float32").copy(), unset(shape, bfloat16)
    steps = [("neg", Inner(0), x), ("mul", x, x, x), ("add", out, x, Inner(0))]
    rows = encode_group(shape, [member(*step)._replace(dtypes=(bfloat16,) * (len(step) - 1)) for step in steps])
    assert rows is not None
    VmSegment([rows])()
    square = low(first * first).to_numpy("float32")
    np.testing.assert_array_equal(x.to_numpy("float32"), square)
    np.testing.assert_array_equal(out.to_numpy("float32"), low(square - first).to_numpy("float32"))
