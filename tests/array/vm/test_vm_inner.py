"""Every op that may be in a group, with its operands in tiles in turn, beside its ATen kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from vm_forms import encode, form_of, low, unset, view

from graphwright.array import DType, NDArray, bfloat16, bool_, float32, from_numpy
from graphwright.array.vm.code import ZEROS
from graphwright.array.vm.encode.fuse import Inner, Member, encode_group, layout_of_tiles
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.running.segment import VmSegment, new_scratch
from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, compute

SHAPES = ((), (1,), (17,), (1030,), (33, 1), (3, 40), (2, 3, 17))
LAYOUTS = ("plain", "one", "apart", "row", "column", "transposed")
"""Of what a group reads from memory: as the space, broadcast to it, every second number, transposed; of one axis 3."""
JOINING = sorted(n for n, o in OPS.items() if o.vm and (o.traits.elementwise or o.traits.nary or o.vm.by_row))
ATTRS: dict[str, list[dict[str, Any]]] = {
    "cast": [{"dtype": bfloat16}, {"dtype": float32}],
    "full_like": [{"value": 2.5}],
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
}
_BORDER = np.array(0.55, "f4")  # numbers below it are true


def laid(x: np.ndarray, layout: str) -> np.ndarray:
    """Numbers, or some of them that broadcast to as many, in a layout of memory."""
    if not x.ndim:
        return x.copy()
    if layout == "apart":
        return np.repeat(x, 2, -1)[..., ::2]
    if layout == "transposed":
        return np.ascontiguousarray(x.T).T
    picked = {"row": x[(0,) * (x.ndim - 1)], "column": x[..., :1], "one": x[(0,) * x.ndim]}
    return np.array(picked.get(layout, x))


def stored(x: np.ndarray, dtype: DType, layout: str) -> NDArray:
    """Numbers as an operand."""
    if dtype is bfloat16:
        return from_numpy(laid(low(x).to_numpy(bits=True), layout), bits=bfloat16)
    return from_numpy(laid(x < _BORDER if dtype is bool_ else x, layout))


def aten(op: str, *ins: NDArray, **attrs: Any) -> NDArray:
    return compute(OPS[op], ins, OPS[op].complete(attrs))[0]


def member(
    op: str, out: Inner | NDArray, ins: Sequence[Inner | NDArray], dtypes: Sequence[DType], **attrs: Any
) -> Member:
    outs, operands = ([x if isinstance(x, Inner) else view(x) for x in side] for side in ([out], ins))
    return Member(form_of(op), outs, operands, OPS[op].complete(attrs), dtypes)


def computed(tile: Inner, dtype: DType, x: np.ndarray, layout: str) -> tuple[Member, list[NDArray]]:
    """A member that makes a tile of numbers, and what it reads."""
    if dtype is bool_:
        op, ins = "lt", [stored(x, float32, layout), from_numpy(_BORDER)]
    else:
        op, ins = "neg", [stored(-x, dtype, layout)]
    return member(op, tile, ins, [dtype, *[a.dtype for a in ins]]), ins


def agrees(
    name: str,
    dtypes: Sequence[DType],
    attrs: Mapping[str, Any],
    shape: tuple[int, ...],
    inner: Sequence[int],
    layout: str,
    scratch: np.ndarray,
) -> bool:
    """Compare an op some of whose operands its group computes; False if it has no form for this by itself."""
    rng, members, reads, sides, arrays = np.random.default_rng(sum(shape)), [], [], [], []
    for k, dtype in enumerate(dtypes):
        x = np.array(rng.uniform(0.2, 0.9, shape[-1:] if name == "rms_norm" and k else shape), "f4")
        if k in inner and x.shape != shape:
            return False
        if k in inner:
            made, ins = computed(Inner(k), dtype, x, layout)
            members.append(made)
            reads += ins
            arrays.append(stored(np.broadcast_to(laid(x, layout), shape), dtype, "plain"))
            sides.append(Inner(k))
        else:
            arrays.append(stored(x, dtype, layout if x.shape == shape else "plain"))
            sides.append(arrays[-1])
    try:
        (spec,) = OPS[name].specs([a.spec for a in arrays], attrs)
    except GraphwrightError:
        return False
    out = unset(shape, spec.dtype)
    if spec.sizes != shape or encode(name, [view(out)], [view(a) for a in arrays], attrs) is None:
        return False
    truth, kinds = aten(name, *arrays, **attrs), [spec.dtype, *dtypes]
    if len(inner) < len(dtypes):
        members.append(member(name, out, sides, kinds, **attrs))
    else:  # its result is one as well
        members.append(member(name, Inner(9), sides, kinds, **attrs))
        if spec.dtype is bool_:
            ends, out = [from_numpy(np.float32(x).reshape(())) for x in (1, 2)], unset(shape, float32)
            members.append(member("where", out, [Inner(9), *ends], [float32, bool_, float32, float32]))
            truth = aten("where", truth, *ends)
        else:
            members.append(member("neg", out, [Inner(9)], [spec.dtype] * 2))
            truth = aten("neg", truth)
    rows = encode_group(shape, members)
    reads += [a for a, side in zip(arrays, sides, strict=True) if side is a]
    apart = any(len(a.shape) == len(shape) > 0 and a.shape[-1] > 1 and a.strides[-1] != 1 for a in reads)
    if apart and (
        rows is None or form_of(name).by_row
    ):  # a turn does a whole row; there may be too many of one element
        assert rows is None
        return False
    assert rows is not None
    scratch[2 * ZEROS :] = 0xFF  # NaNs: no tile is read before it is written
    VmSegment([rows], scratch)()
    rtol = 2**-7 if bfloat16 in kinds else 2e-6
    where = f"{name} {kinds} {shape} {inner} {layout}"
    np.testing.assert_allclose(out.to_numpy("float32"), truth.to_numpy("float32"), rtol=rtol, atol=2e-6, err_msg=where)
    return True


@pytest.mark.parametrize("name", JOINING)
def test_ops_on_tile_operands_match_aten(name: str) -> None:
    arity, scratch, done = OPS[name].arity, new_scratch(), 0
    least, most = (arity, arity) if isinstance(arity, int) else (max(arity[0], 1), arity[1] or 3)
    for n in range(least, most + 1):
        picked = [*([k] for k in range(n)), list(range(n))][: n + 1 if n > 1 else 1]
        kinds = [k for k in product((float32, bfloat16, bool_), repeat=n) if len({*k} - {bool_}) < 2]
        for dtypes, given in product(kinds, ATTRS.get(name, [{}])):
            attrs = OPS[name].complete(given)
            if not agrees(name, dtypes, attrs, (17,), picked[0], "plain", scratch):
                continue
            for shape, inner in product(SHAPES, picked):
                for layout in LAYOUTS[: (1, 3, 6)[min(len(shape), 2)]]:
                    done += agrees(name, dtypes, attrs, shape, inner, layout, scratch)
    assert done >= len(SHAPES)


@pytest.mark.parametrize("shape", [(12, 17), (2, 3, 17), (1, 17), (17,)])
def test_rows_of_tiles_are_adjacent(shape: tuple[int, ...]) -> None:
    """Where a turn does a whole row: its elements, of every operand, are adjacent or are one."""
    plain = View(float32, shape, tuple(int(np.prod(shape[a + 1 :])) for a in range(len(shape))))
    twice = plain._replace(strides=tuple(2 * s for s in plain.strides))
    transposed = plain._replace(strides=tuple(int(np.prod(shape[:a])) for a in range(len(shape))))
    same = plain._replace(shape=(*shape[:-1], 1))
    for views in (
        [twice],
        [plain, twice],
        [twice, plain],
        *([[transposed]] if len(shape) > 1 and shape[0] > 1 else []),
    ):
        assert layout_of_tiles(shape, views, by_row=True) is None
    for views in ([plain], [plain, same], [plain, plain._replace(shape=shape[-1:], strides=(1,))]):
        tiles = layout_of_tiles(shape, views, by_row=True)
        assert tiles is not None
        assert tiles.cols == 17
    one = (*shape[:-1], 1)
    assert layout_of_tiles(one, [twice._replace(shape=one)], by_row=True) is not None, "a row of one has no gaps"
