"""Fusion: ops over the same iteration space become one loop over tiles; intermediate values stay in scratch.

A tile is a span of elements, or a whole row if an op depends on whole rows, as a norm does. A LOOP instruction (word 1:
rows of code in its body, word 2: iterations) precedes its body; each iteration computes one tile. bfloat16 operands are
widened into a tile before an op and rounded after it, so every result has the same bits as without fusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from graphwright.array.dtype import bfloat16, float32
from graphwright.array.vm.code import ZEROS, Code
from graphwright.array.vm.encode import operands as vm
from graphwright.array.vm.encode.rows import CAST, COPY
from graphwright.array.vm.encode.share import operand_cells

TILE, TILES = 1024, 16
"""Elements of a tile, and the most tiles in use at a time: 64 KiB, which a core's own cache holds besides operands."""
TILE_BYTES = 4 * TILE
TOGETHER: dict[tuple[Code | None, Code | None], Code] = {(Code.ADD, Code.SILU): Code.ADD_SILU}
"""Pairs of instructions -> one instruction that computes both, used if nothing else reads the first result."""
LONGEST = 4 * TILE
"""The most elements of a row that can be one tile."""
_NARROW, _FEW = 32, 64  # fewer elements than _NARROW make a turn too short, unless there are at most _FEW turns


class Inner(NamedTuple):
    """A value that only ops of the fused group read; it is stored in the scratch, in tile number `tile`."""

    tile: int


class Member(NamedTuple):
    """One op of a fused group; its results and operands are in memory (`View`) or in tiles (`Inner`)."""

    form: vm.VmForm
    outs: Sequence[vm.View | Inner]
    ins: Sequence[vm.View | Inner]
    attrs: Mapping[str, Any]
    dtypes: Sequence[Any]  # of the results, then of the operands


class _Tiles(NamedTuple):
    """The loops over an iteration space: for each entry of `lead`, `turns` rows of `cols` elements.

    An entry of `lead` holds the element offset of each operand. `jumps` and `steps` hold the strides of each operand,
    in elements: from row to row, and from element to element of a row (0 or 1).
    """

    lead: list[list[int]]
    turns: int
    jumps: tuple[int, ...]
    cols: int
    steps: tuple[int, ...]


def f32(code: Code) -> vm.VmForm:
    """Make the `VmForm` of one elementwise float32 instruction."""

    def encode(outs: vm.Views, ins: vm.Views, attrs: vm.Attrs) -> vm.Rows:
        return vm.elementwise(code, outs[0], ins) if vm.all_f32(*outs, *ins) else None

    return vm.VmForm(encode, code=code)


def tiles_for(shape: tuple[int, ...], by_row: bool) -> int:
    """Return how many intermediate values fit the scratch at a time; if `by_row`, each is a whole row of `shape`."""
    return TILES // -(-shape[-1] // TILE) if by_row else TILES


def layout_of_tiles(shape: tuple[int, ...], views: Sequence[vm.View], by_row: bool = False) -> _Tiles | None:
    """Return loops over `shape`, or None if rows are too short, too long or strided, or outer axes too many to unroll.

    `by_row`: a tile must be a whole row of `shape`, along which each operand has stride 1 or 0.
    """
    strides = [vm.spread(view, shape) for view in views]
    if by_row:
        if not 0 < shape[-1] <= LONGEST or any(s[-1] not in (0, 1) for s in strides):
            return None
        axes = [*vm.merged(shape[:-1], [s[:-1] for s in strides]), (shape[-1], tuple(s[-1] for s in strides))]
    else:
        axes = vm.merged(shape, strides)
    if not axes or any(s not in (0, 1) for s in axes[-1][1]):
        axes.append((1, (0,) * len(views)))
    (cols, steps), outer = axes[-1], axes[:-1]
    if not outer:
        return _Tiles([[0] * len(views)], 1, (0,) * len(views), cols, steps)
    lead = vm.offsets(outer[:-1], len(views))
    turns, jumps = outer[-1]
    if len(lead) > vm.MOST_ROWS or (cols < _NARROW and turns > _FEW):
        return None
    return _Tiles(lead, turns, jumps, cols, steps)


def encode_group(shape: tuple[int, ...], members: Sequence[Member]) -> list[vm.Row] | None:
    """Return instructions that run the members tile by tile over `shape`, or None if the layouts allow no tiles."""
    if 0 in shape:
        return []
    by_row = any(m.form.by_row for m in members)
    most = tiles_for(shape, by_row)
    members = _in_f32(_written_once(_together(members), most), most)
    tiles = layout_of_tiles(shape, [v for m in members for v in (*m.outs, *m.ins) if isinstance(v, vm.View)], by_row)
    if tiles is None:
        return None
    lead, turns, jumps, cols, steps = tiles
    width = cols if by_row else TILE
    rows: list[vm.Row] = []
    for start in lead:
        if turns == 1:  # one axis: whole tiles, then the rest
            whole = cols // width
            body = _body(members, start, [width * s for s in steps], steps, width, TILES // most)
            rows += _looped(body, whole)
            begins = [whole * width] if cols % width else []
        else:
            begins = range(0, cols, width)
        body = []
        for begin in begins:  # a row is finished before the next is begun: memory is walked in order
            at = [p + begin * s for p, s in zip(start, steps, strict=True)]
            body += _body(members, at, jumps, steps, min(width, cols - begin), TILES // most)
        rows += _looped(body, turns)
    return rows


def _together(members: Sequence[Member]) -> list[Member]:
    """Merge pairs of consecutive members that one instruction can compute, such as an addition and SiLU."""
    made: list[Member] = []
    for n, m in enumerate(members):
        code = TOGETHER.get((made[-1].form.code, m.form.code)) if made else None
        passed = made[-1].outs[0] if made else None
        alone = isinstance(passed, Inner) and list(m.ins) == [passed] and not _read(passed, members[n + 1 :])
        if code is not None and alone and m.dtypes[0] is float32:
            first = made.pop()
            m = Member(f32(code), m.outs, first.ins, first.attrs, (m.dtypes[0], *first.dtypes[1:]))
        made.append(m)
    return made


def _read(tile: Inner, members: Sequence[Member]) -> bool:
    """Return whether any of the members reads `tile` before one of them writes it again."""
    for m in members:
        if tile in m.ins:
            return True
        if tile in m.outs:
            return False
    return False


def _written_once(members: Sequence[Member], most: int) -> list[Member]:
    """Write a result that a later member overwrites to one of `most` tiles instead, so memory is written only once."""
    last = {v.address: n for n, m in enumerate(members) for v in m.outs if isinstance(v, vm.View)}
    free = set(range(most)).difference(v.tile for m in members for v in m.outs if isinstance(v, Inner))
    held: dict[int, Inner] = {}
    made: list[Member] = []
    for n, m in enumerate(members):
        ins = [held.get(v.address, v) if isinstance(v, vm.View) else v for v in m.ins]
        outs: list[vm.View | Inner] = []
        for v in m.outs:
            if isinstance(v, Inner):
                outs.append(v)
            elif last[v.address] > n:
                if v.address not in held and free:
                    held[v.address] = Inner(free.pop())
                outs.append(held.get(v.address, v))
            else:
                outs.append(v)
                if v.address in held:
                    free.add(held.pop(v.address).tile)
        made.append(m._replace(outs=outs, ins=ins))
    return made


def _in_f32(members: Sequence[Member], most: int) -> list[Member]:
    """Make all members float32, with conversions from and to bfloat16 between them.

    The tile of a bfloat16 value holds float32 numbers rounded to bfloat16. Operands in memory are widened into tiles
    numbered from `most` on, where later members can read them again.
    """
    made: list[Member] = []
    spare, wide = cycle(range(most, 2 * most)), dict[vm.View, Inner]()
    for m in members:
        if bfloat16 not in m.dtypes:
            made.append(m)
            continue
        (out,), narrow, ins, busy = m.outs, m.dtypes[0] is bfloat16, list[vm.View | Inner](), set[int]()
        plain = isinstance(out, vm.View) or not narrow
        if m.form is CAST and plain and (narrow or isinstance(m.ins[0], vm.View)):  # one instruction does it
            made.append(m)
            continue
        for v, dtype in zip(m.ins, m.dtypes[1:], strict=True):
            if dtype is bfloat16 and isinstance(v, vm.View):
                if v not in wide:
                    wide[v] = _free(spare, wide, busy)
                    made.append(Member(CAST, [wide[v]], [v], {}, (float32, bfloat16)))
                v = wide[v]
                busy.add(v.tile)
            ins.append(v)
        target = _free(spare, wide, busy) if narrow and isinstance(out, vm.View) else out
        form = COPY if m.form is CAST else m.form
        made.append(Member(form, [target], ins, m.attrs, [float32 if d is bfloat16 else d for d in m.dtypes]))
        if target is not out:
            made.append(Member(CAST, [out], [target], {}, (bfloat16, float32)))
        elif narrow:
            made.append(Member(f32(Code.ROUND), [out], [out], {}, (float32, float32)))
        for v in [v for v in wide if isinstance(out, vm.View) and v.address == out.address]:
            del wide[v]
    return made


def _free(tiles: Iterator[int], wide: dict[vm.View, Inner], busy: set[int]) -> Inner:
    """Return the next tile that is not in `busy`; remove from `wide` the operand whose widened copy it held."""
    tile = next(t for t in tiles if t not in busy)
    for v in [v for v, held in wide.items() if held.tile == tile]:
        del wide[v]
    return Inner(tile)


def _looped(body: list[vm.Row], turns: int) -> list[vm.Row]:
    if turns < 2:
        return body * turns
    return [vm.row_of(Code.LOOP, len(body), turns), *body]


def _body(
    members: Sequence[Member], at: Sequence[int], jumps: Sequence[int], steps: Sequence[int], cols: int, pieces: int
) -> list[vm.Row]:
    """Encode the members for one tile of `cols` elements.

    Operand k in memory begins at element offset `at[k]`, has stride `steps[k]` (0 or 1) in the tile, and advances by
    `jumps[k]` elements per iteration. An intermediate value has a tile of `pieces` · TILE elements.
    """
    body: list[vm.Row] = []
    k = 0
    for number, m in enumerate(members):
        fake, moves = [], []  # operands by number in place of addresses, replaced below
        for n, (v, dtype) in enumerate(zip((*m.outs, *m.ins), m.dtypes, strict=True)):
            if isinstance(v, Inner):
                moves.append((ZEROS + v.tile * pieces * TILE_BYTES, 0))
                fake.append(vm.View(dtype, (cols,), (1,), n))
            else:
                moves.append((v.address + at[k] * dtype.itemsize, jumps[k] * dtype.itemsize))
                fake.append(vm.View(dtype, (cols,), (steps[k],), n))
                k += 1
        made = m.form.encode(fake[: len(m.outs)], fake[len(m.outs) :], m.attrs)
        assert made is not None, "an op of a group has a form for one axis"
        for row in made:
            for cell in operand_cells(row):
                row[cell], row[cell + 1] = moves[row[cell]]
        out = m.outs[0]
        if isinstance(out, vm.View) and all(out not in later.ins for later in members[number + 1 :]):
            made[-1][5] = vm.along(out, made[-1][5])
        body += made
    return body
