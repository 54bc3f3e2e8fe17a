"""The VM's loops for attention over selected blocks: values of ATen's kernels in float64, bits, layouts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from graphwright.array import NDArray, from_numpy
from graphwright.array.cpu import get_num_threads, set_num_threads
from graphwright.array.cpu import selected_attention as kernels
from graphwright.array.cpu.by_vm import by_vm
from graphwright.array.vm.machine import part
from graphwright.ops import OPS, compute
from seeds import seeds


@pytest.fixture(autouse=True)
def _called(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs code of the VM."""
    part.require()
    found: list[object] = []

    def counted(*args: Any) -> Any:
        call = by_vm(*args)
        found.append(call)
        return call

    monkeypatch.setattr(kernels, "by_vm", counted)
    yield
    assert any(call is not None for call in found)


def run(name: str, arrays: list[Any], **attrs: Any) -> list[np.ndarray]:
    op = OPS[name]
    made = [a if isinstance(a, NDArray) else from_numpy(np.ascontiguousarray(a)) for a in arrays]
    return [out.to_numpy() for out in compute(op, made, op.complete(attrs))]


def low(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [a.astype("f4") if a.dtype == np.float64 else a for a in arrays]


def drawn(
    rng: np.random.Generator, *, batch: int, heads: int, groups: int, queries: int, keys: int, deep: int, wide: int,
    block: int, tile: int, length: int,
) -> list[np.ndarray]:  # fmt: skip
    """Operands with absent blocks, gates at 0, and lists in any order."""
    count, rows = -(-keys // block), -(-queries // tile)
    shapes = (batch, heads, queries, deep), (batch, groups, keys, deep), (batch, groups, keys, wide)
    lists = np.argsort(rng.random((batch, groups, rows, count)), axis=3)[..., :length].astype(np.int32)
    lists[rng.random(lists.shape) < 0.2] = -1
    gates = rng.uniform(0.2, 1, lists.shape)
    gates[rng.random(lists.shape) < 0.2] = 0
    return [*(rng.normal(size=s) for s in shapes), lists, gates]


def choose(rng: np.random.Generator) -> tuple[dict[str, int], int]:
    heads, groups = [(4, 2), (2, 2), (8, 1), (6, 3), (70, 1)][rng.integers(5)]
    queries = int(rng.integers(1, 150))
    sizes = {"batch": int(rng.integers(1, 3)), "heads": heads, "groups": groups, "queries": queries}
    sizes |= {"keys": queries + int(rng.integers(0, 40)), "deep": int(rng.integers(1, 40))}
    sizes |= {"wide": int(rng.integers(1, 40)), "block": int(rng.choice([1, 3, 8, 16, 70]))}
    return sizes | {"length": int(rng.integers(1, 9))}, int(rng.choice([1, 1, 8, 70]))


@seeds(45)
def test_values_and_gradients_equal_aten_in_float64(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, tile = choose(rng)
    ins = drawn(rng, **sizes, tile=tile)
    attrs = {"scale": sizes["deep"] ** -0.5, "block": sizes["block"], "tile": tile}
    (out,) = run("sdpa_selected", ins, **attrs)
    g = rng.normal(size=out.shape)
    wanted = [out, *run("sdpa_selected_backward", [*ins, out, g], **attrs)]
    found = [
        *run("sdpa_selected", low(ins), **attrs),
        *run("sdpa_selected_backward", low([*ins, out, g]), **attrs),
    ]
    for a, b in zip(wanted, found, strict=True):
        assert np.abs(a - b).max() <= 3e-5 * max(1.0, np.abs(a).max())


def test_a_query_without_keys_gives_0() -> None:
    ins = low(drawn(np.random.default_rng(0), batch=1, heads=2, groups=1, queries=5, keys=5, deep=4, wide=4, block=2,
                    tile=1, length=3))  # fmt: skip
    ins[3][:, :, :3] = -1
    ins[4][:, :, 3] = 0
    (out,) = run("sdpa_selected", ins, scale=1.0, block=2)
    found = run("sdpa_selected_backward", [*ins, out, np.ones_like(out)], scale=1.0, block=2)
    assert not out[:, :, :4].any()
    assert not found[0][:, :, :4].any()
    assert not found[3][:, :, :4].any()
    assert all(np.isfinite(t).all() for t in found)


def test_large_scores_are_finite() -> None:
    ins = low(drawn(np.random.default_rng(0), batch=1, heads=4, groups=2, queries=9, keys=9, deep=4, wide=4, block=2,
                    tile=1, length=4))  # fmt: skip
    ins[0] *= 1000
    (out,) = run("sdpa_selected", ins, scale=1.0, block=2)
    assert all(
        np.isfinite(t).all() for t in (out, *run("sdpa_selected_backward", [*ins, out, out], scale=1.0, block=2))
    )


def test_two_threads_give_the_bits_of_one() -> None:
    ins = low(drawn(np.random.default_rng(1), batch=2, heads=4, groups=2, queries=512, keys=512, deep=32, wide=32,
                    block=16, tile=1, length=8))  # fmt: skip
    before, found = get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            set_num_threads(threads)
            (out,) = run("sdpa_selected", ins, scale=0.2, block=16)
            found.append([out, *run("sdpa_selected_backward", [*ins, out, out], scale=0.2, block=16)])
    finally:
        set_num_threads(before)
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_strided_operands_equal_packed_ones() -> None:
    rng = np.random.default_rng(2)
    ins = low(drawn(rng, batch=2, heads=4, groups=2, queries=20, keys=20, deep=8, wide=8, block=4, tile=1, length=4))
    arrays = [from_numpy(np.ascontiguousarray(t.transpose(0, 2, 1, 3))).permute(0, 2, 1, 3) for t in ins[:3]]
    (a,), (b,) = (run("sdpa_selected", [*some, *ins[3:]], scale=0.3, block=4) for some in (ins[:3], arrays))
    assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_a_block_out_of_range_is_refused(kind: str) -> None:
    ins = drawn(np.random.default_rng(3), batch=1, heads=2, groups=1, queries=8, keys=8, deep=4, wide=4, block=4,
                tile=1, length=2)  # fmt: skip
    ins = [t.astype(kind) if t.dtype == np.float64 else t for t in ins]
    ins[3][0, 0, 7, 1], ins[4][0, 0, 7, 1] = 2, 1.0
    with pytest.raises(IndexError, match="expected below 2, got 2"):
        run("sdpa_selected", ins, scale=1.0, block=4)
    if kind == "f8":
        run("sdpa_selected", low(drawn(np.random.default_rng(3), batch=1, heads=2, groups=1, queries=8, keys=8, deep=4,
                                       wide=4, block=4, tile=1, length=2)), scale=1.0, block=4)  # fmt: skip


def test_other_lists_leave_the_bits_of_a_list_unchanged() -> None:
    """Which native code and ATen both promise: the lists of later queries have no effect on earlier ones."""
    rng = np.random.default_rng(4)
    for kind in ("f4", "f8"):
        ins = drawn(rng, batch=1, heads=4, groups=2, queries=90, keys=90, deep=8, wide=8, block=8, tile=1, length=6)
        ins = [t.astype(kind) if t.dtype == np.float64 else t for t in ins]
        other = [t.copy() for t in ins]
        other[3][:, :, 40:] = -1
        a, b = (run("sdpa_selected", some, scale=0.3, block=8)[0] for some in (ins, other))
        assert np.array_equal(a[:, :, :40], b[:, :, :40])
