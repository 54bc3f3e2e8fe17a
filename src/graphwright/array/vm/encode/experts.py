"""Encoding for the VM of mixtures of experts: choices of the largest scores, runs of tokens, experts on runs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from graphwright.array.dtype import bfloat16, bool_, float32, int64
from graphwright.array.formulas.experts import ACTS, FIRST, IN_VM, KINDS, Expert, algorithm_of, chunk_size, experts_of
from graphwright.array.vm.code import EXPERT_COUNTERS, EXPERT_TABLE, Code
from graphwright.array.vm.encode import operands as vm
from graphwright.array.vm.encode.share import SPLIT_FROM

_TILE_ROWS, _HIDDEN_ROWS = 3, 5
"""Work of a worker for each pair of a chunk: rows of width C, then rows of the largest I."""
_MOST_WORKERS = 8
_MOST_CHOSEN = 64
"""The largest k for which inserting into a sorted list is faster than a sort."""


@vm.form()
def TOPK(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode the choice of the k largest entries of each row."""
    grid, last = vm.matrix(ins[0]), attrs["axis"] in (-1, len(ins[0].shape) - 1)
    values, ids = outs
    if grid is None or not last or not attrs["largest"] or not vm.all_f32(values, ins[0]):
        return None
    (rows, columns, jump), k = grid, attrs["k"]
    if not 0 < k <= _MOST_CHOSEN or not (values.packed and ids.packed):
        return None
    return [vm.row_of(Code.TOPK, rows, columns, values.address, 4 * k, 8 * k, ins[0].address, 4 * jump, ids.address, k)]


@vm.form()
def DISPATCH(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode a counting sort of tokens by expert."""
    (choice,) = ins
    if choice.dtype not in (int64, bool_) or not all(view.packed for view in (*outs, choice)):
        return None
    addresses = (view.address for view in outs)
    return [
        vm.row_of(
            Code.DISPATCH, *choice.shape, attrs["experts"], choice.address, int(choice.dtype is bool_), *addresses
        )
    ]


def _size(x: vm.View, rows: vm.View, matrices: vm.Views, attrs: vm.Attrs) -> tuple[int, int]:
    """Return (the pairs of a chunk, the largest I)."""
    chosen = algorithm_of(x, rows, matrices, attrs).algorithm
    return chunk_size(rows.size, x.dtype.is_low, chosen), max(e.up.shape[0] for e in experts_of(matrices, attrs))


def _nanoseconds(pairs: int, matrices: vm.Views, attrs: vm.Attrs, products: int) -> int:
    """Return about how long an op takes that multiplies each of so many pairs `products` times by their matrices."""
    mean = sum(m.size for m in matrices) / len(experts_of(matrices, attrs))
    return int(products * pairs * mean / 60)


def _work(x: vm.View, rows: vm.View, matrices: vm.Views, attrs: vm.Attrs, products: int) -> list[vm.View]:
    """Return the work of each worker [workers, numbers], and the counters."""
    chunk, inner = _size(x, rows, matrices, attrs)
    count, numbers = len(experts_of(matrices, attrs)), chunk * (_TILE_ROWS * x.shape[1] + _HIDDEN_ROWS * inner)
    lengthy = _nanoseconds(rows.size, matrices, attrs, products) > SPLIT_FROM
    workers = _team()[0] if lengthy else 1
    shapes = ((workers, -(-numbers // 16) * 16), float32), ((EXPERT_COUNTERS + count,), int64)
    return [vm.View(dtype, shape, (prod(shape[1:]), 1)[-len(shape) :]) for shape, dtype in shapes]


def _team() -> tuple[int, int]:
    """Return (threads that can share an instruction, the address of the helper threads' memory or 0)."""
    from graphwright.array.vm.running.call import get_num_threads, team  # loads torch

    threads = min(get_num_threads(), _MOST_WORKERS)
    helpers = team(threads)
    return threads if helpers else 1, helpers


def _encoded(
    code: Code, runs: vm.Views, matrices: vm.Views, attrs: vm.Attrs, work: vm.Views, *, weights: vm.View | None = None,
    out: vm.View | None = None, g: vm.View | None = None, marks: vm.View | None = None,
    gradients: Mapping[int, vm.View] | None = None, products: int,
) -> vm.Rows:  # fmt: skip
    """Encode an op on `runs` (x, offsets, rows, pairs); `gradients`: index in `matrices` -> its gradient.

    `out`: the result, the gradient of x, or the gain; `marks`: the gradient of the weights, or the surprise.
    """
    x, offsets, rows, pairs = runs
    found = gradients or {}
    kinds = (float32, bfloat16) if code == Code.EXPERTS else (float32,)
    given = [t for t in (out, g, marks, weights) if t is not None]
    biases = [m for m in matrices if len(m.shape) == 1]
    packed = [*runs, *given, *biases, *found.values(), *(m for m in matrices if m.dtype is bfloat16)]
    if not vm.all_f32(x, *given, *biases, *found.values()) or not all(t.packed for t in packed):
        return None
    if any(m.dtype not in kinds for m in matrices):
        return None
    if algorithm_of(x, rows, matrices, attrs).algorithm not in IN_VM:
        return None
    (buffer, counters), (chunk, inner) = work, _size(x, rows, matrices, attrs)
    experts, slots = experts_of(matrices, attrs), experts_of(range(len(matrices)), attrs)
    entries = next(t.size for t in (weights, marks, pairs) if t is not None)
    how = (KINDS.index(attrs["kind"]), ACTS.index(attrs["act"]))
    cells = [*x.shape, chunk, len(experts), *how, rows.size, entries]
    cells += [_address(t) for t in (x, offsets, rows, pairs, weights, out, g, marks, counters, buffer)]
    cells += [4 * buffer.shape[1], _team()[1], inner, _nanoseconds(chunk, matrices, attrs, products)]
    cells += [0] * (EXPERT_TABLE - len(cells))
    for e, s in zip(experts, slots, strict=True):
        cells += _cells(e, s, found)
    table, estimate = vm.table_of(cells), _nanoseconds(rows.size, matrices, attrs, products)
    head = vm.row_of(Code.EXPERT_RUNS, len(table), int(code))
    return [head, *table, vm.row_of(code, 1 + len(table), 0, estimate, buffer.shape[0])]


def _cells(e: Expert, slots: Expert, gradients: Mapping[int, vm.View]) -> list[int]:
    """Return the words of one expert; `slots` has the indices of its operands."""
    cells: list[int] = [e.up.shape[0]]
    for at in range(0, len(e), 2):
        matrix, bias = e[at : at + 2]
        strides = (0, 0) if matrix is None else (matrix.dtype.itemsize * s for s in matrix.strides)
        cells += [_address(matrix), *strides, _address(bias), *(_address(gradients.get(s)) for s in slots[at : at + 2])]
    return cells


def _address(view: vm.View | None) -> int:
    return 0 if view is None else view.address


@vm.form(work=lambda outs, ins, attrs: _work(ins[0], ins[2], ins[FIRST:], attrs, 1))
def EXPERTS(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `expert_mlp`; the matrices may be stored in bfloat16."""
    out, *work = outs
    runs, weights = ins[: FIRST - 1], ins[FIRST - 1]
    return _encoded(Code.EXPERTS, runs, ins[FIRST:], attrs, work, weights=weights, out=out, products=1)


@vm.form(work=lambda outs, ins, attrs: _work(ins[1], ins[3], ins[FIRST + 1 :], attrs, 4))
def EXPERTS_BACKWARD(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `expert_mlp_backward`."""
    wanted, (g, *runs, weights) = attrs["wanted"], ins[: FIRST + 1]
    found, work = dict(zip(wanted, outs, strict=False)), outs[len(wanted) :]
    slopes = {i - FIRST: t for i, t in found.items() if i >= FIRST}
    return _encoded(
        Code.EXPERTS_BACKWARD, runs, ins[FIRST + 1 :], attrs, work, weights=weights, out=found.get(0), g=g,
        marks=found.get(FIRST - 1), gradients=slopes, products=4,
    )  # fmt: skip


@vm.form(work=lambda outs, ins, attrs: _work(ins[0], ins[3], ins[FIRST:], attrs, 2))
def EXPERT_PROBE(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
    """Encode `expert_probe`."""
    (surprise, gain, *work), (x, g, *runs) = outs, ins[:FIRST]
    return _encoded(Code.EXPERT_PROBE, [x, *runs], ins[FIRST:], attrs, work, out=gain, g=g, marks=surprise, products=2)
