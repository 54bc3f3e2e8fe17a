"""Triton source of a fusion group: its ops run element by element in one kernel, intermediate values in registers.

The text depends on the ops, their attributes, and the dtypes and kinds of layout of the operands; sizes and strides are
arguments. A kernel without ops on rows handles BLOCK elements of the group's shape per program, others one row. This
module imports no Triton, so that a plan of any device can show the text.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

from graphwright.array.dtype import DType
from graphwright.array.layout import row_major
from graphwright.array.triton.expressions import EXPRESSIONS, HELD, ROWS, Lines, Row, Value, rounded
from graphwright.array.vm.encode.operands import View, merged, spread

Attrs = Mapping[str, Any]
BLOCK = 1024
"""Elements of a program."""
LONGEST = 8192
"""The most elements of a row: a program holds several of them in registers."""
LIVE = 32
"""The most intermediate values that a kernel may hold at a time; of whole rows a quarter."""
_AXES = 6

PREAMBLE = """import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
"""


class Operand(NamedTuple):
    """An operand or result of a member of a group.

    Attributes:
        key: equal for two operands if and only if they are the same elements; of an intermediate value, its number.
        view: dtype, shape and strides; the address is not used.
        inner: True for a value that only the group reads, which is never stored.
    """

    key: Hashable
    view: View
    inner: bool = False


class Member(NamedTuple):
    """One op of a group."""

    op: str
    attrs: Attrs
    out: Operand
    ins: Sequence[Operand]


class Kernel(NamedTuple):
    """The source of a group's kernel, and its arguments.

    Attributes:
        name: of the function, made from its content.
        text: source of a module that defines it.
        memory: the operands whose addresses are the first arguments.
        numbers: the further arguments: sizes, then strides.
        programs: number of programs.
        block: the constant BLOCK.
    """

    name: str
    text: str
    memory: Sequence[Operand]
    numbers: Sequence[int]
    programs: int
    block: int


class _Layout(NamedTuple):
    """The iteration space of a kernel: sizes of its outer axes, the elements of the innermost, strides per operand."""

    sizes: tuple[int, ...]
    count: int
    strides: dict[int, tuple[int, ...]]


def by_row(ops: Sequence[str]) -> bool:
    """Return True if one of the ops depends on whole rows."""
    return any(op in ROWS for op in ops)


def tiled(shape: tuple[int, ...], views: Sequence[View], rows: bool) -> bool:
    """Return True if one kernel can walk operands of these layouts; `rows`: a program holds a whole row."""
    layout = _layout(shape, views, rows)
    return layout is not None and (not rows or layout.count <= LONGEST)


def _layout(shape: tuple[int, ...], views: Sequence[View], rows: bool) -> _Layout | None:
    strides = [spread(view, shape) for view in views]
    if rows:
        if not shape:
            return None
        axes, last = merged(shape[:-1], [s[:-1] for s in strides]), (shape[-1], tuple(s[-1] for s in strides))
        axes = [*axes, last]
    else:
        axes = merged(shape, strides) or [(1, (0,) * len(views))]
    if len(axes) > _AXES:
        return None
    sizes = tuple(n for n, _ in axes)
    return _Layout(sizes[:-1], sizes[-1], {k: tuple(s[k] for _, s in axes) for k in range(len(views))})


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class _Writer:
    """Writes the body of a kernel: index arithmetic, loads at first use, one store of each result's last value."""

    def __init__(self, shape: tuple[int, ...], members: Sequence[Member]) -> None:
        self.shape, self.rows = shape, by_row([m.op for m in members])
        self.memory = list({o.key: o for m in members for o in (*m.ins, m.out) if not o.inner}.values())
        views = [o.view for o in self.memory]
        layout = _layout(shape, views, self.rows)
        assert layout is not None, "the plan made a group whose layouts one kernel cannot walk"
        self.layout, self.views = layout, views
        self.at = {o.key: k for k, o in enumerate(self.memory)}
        self.lines, self.values = Lines(), dict[Hashable, Value]()
        self.strides: list[tuple[str, int]] = []
        self.wide = any(_reach(view, layout.strides[k], layout) >= 1 << 31 for k, view in enumerate(views))
        self.row = Row("inside", "count")
        self._index = self._flat = False

    def index(self) -> list[str]:
        """Return the lines that compute the element numbers of a program."""
        block = "tl.arange(0, BLOCK)"
        cast = ".to(tl.int64)" if self.wide else ""
        outer = len(self.layout.sizes)
        if self.rows:
            lines = [f"row = tl.program_id(0){cast}", f"i{outer} = {block}{cast}", f"inside = i{outer} < count"]
            rest = "row"
        elif not outer:
            return [f"i0 = tl.program_id(0){cast} * BLOCK + {block}", "inside = i0 < count"]
        else:
            lines = [f"at = tl.program_id(0){cast} * BLOCK + {block}", "inside = at < total"]
            lines += [f"i{outer} = at % count", f"left{outer} = at // count"]
            rest = f"left{outer}"
        for k in range(outer - 1, 0, -1):
            lines += [f"i{k} = {rest} % n{k}", f"left{k} = {rest} // n{k}"]
            rest = f"left{k}"
        return [*lines, f"i0 = {rest}"] if outer else lines

    def offset(self, k: int) -> str:
        """Return the source of the offset of operand `k`, whose strides become arguments unless they are 0 or 1."""
        strides, parts = self.layout.strides[k], list[str]()
        if not self.rows and self.layout.sizes and strides == row_major((*self.layout.sizes, self.layout.count)):
            return "at"
        for axis, stride in enumerate(strides):
            if stride == 0:
                continue
            last = axis == len(strides) - 1
            if stride == 1 and last:
                parts.append(f"i{axis}")
            else:
                name = f"s{k}_{axis}"
                if (name, stride) not in self.strides:
                    self.strides.append((name, stride))
                parts.append(f"i{axis} * {name}")
        return " + ".join(parts)

    def single(self, k: int) -> bool:
        """Return True if a program has one element of operand `k`, the same for its whole block."""
        strides = self.layout.strides[k]
        return not any(strides[-1:] if self.rows else strides)

    def load(self, operand: Operand) -> Value:
        """Return the value of an operand: the group's own if it has computed it, else loaded."""
        if operand.key in self.values:
            return self.values[operand.key]
        k, kind = self.at[operand.key], HELD[operand.view.dtype]
        offset, single = self.offset(k), self.single(k)
        where = f"p{k} + ({offset})" if offset else f"p{k}"
        value = self.lines.assign(f"tl.load({where}{'' if single else ', mask=inside, other=0'})", kind)
        if operand.view.dtype.is_low:
            value = self.lines.assign(f"{value.name}.to(tl.float32)", kind)
        if single:
            value = self.lines.assign(f"tl.broadcast_to({value.name}, [BLOCK])", kind)
        self.values[operand.key] = value
        return value

    def add(self, member: Member) -> None:
        """Write one op."""
        ins = [self.load(o) for o in member.ins]
        dtypes = [member.out.view.dtype, *(o.view.dtype for o in member.ins)]
        if member.op in ROWS:
            value = ROWS[member.op](ins, member.attrs, dtypes, self.row)
        else:
            value = EXPRESSIONS[member.op](ins, member.attrs, dtypes)
        value = value.to(HELD[dtypes[0]])  # a number that a condition selects is a float32
        self.values[member.out.key] = rounded(value, dtypes[0])

    def stores(self, members: Sequence[Member]) -> list[str]:
        """Return the lines that store the last value of each result in memory."""
        lines = []
        for key in dict.fromkeys(m.out.key for m in members if not m.out.inner):
            k = self.at[key]
            offset = self.offset(k) or "0"
            element = self.memory[k].view.dtype
            where = f"p{k} + ({offset}{' + tl.zeros([BLOCK], tl.int32)' if self.single(k) else ''})"
            lines.append(f"tl.store({where}, {_stored(self.values[key], element)}, mask=inside)")
        return lines


def _stored(value: Value, dtype: DType) -> str:
    return f"{value.name}.to(tl.{dtype.name})" if dtype.is_low else value.name


def _reach(view: View, strides: Sequence[int], layout: _Layout) -> int:
    sizes = (*layout.sizes, layout.count)
    far = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True) if n)
    return max(far, prod(sizes) + BLOCK)


def kernel(shape: tuple[int, ...], members: Sequence[Member]) -> Kernel:
    """Return the kernel of a group whose ops all have results of `shape`, for which `tiled` is true."""
    w = _Writer(shape, members)
    for member in members:
        w.add(member)
    stores = w.stores(members)
    sizes = w.layout.sizes
    total = w.layout.count * prod(sizes)
    named: list[tuple[str, int]] = []
    if not w.rows and sizes:
        named.append(("total", total))
    named += [("count", w.layout.count), *((f"n{k}", n) for k, n in enumerate(sizes) if k)]
    arguments = [*(f"p{k}" for k in range(len(w.memory))), *(n for n, _ in (*named, *w.strides)), "BLOCK: tl.constexpr"]
    body = [*w.index(), *w.lines.lines, *stores]
    doc = f'"""{", ".join(m.op for m in members)}."""'
    inner = "\n".join(f"    {line}" for line in (doc, *body))
    digest = blake2b("\n".join([*arguments, *body]).encode(), digest_size=8).hexdigest()
    name = f"fused_{digest}"
    text = f"{PREAMBLE}\n\n@triton.jit\ndef {name}({', '.join(arguments)}):\n{inner}\n"
    block = _power(w.layout.count) if w.rows else BLOCK
    rows = total // max(w.layout.count, 1)
    programs = rows if w.rows else -(-total // BLOCK)
    return Kernel(name, text, w.memory, [n for _, n in (*named, *w.strides)], programs, max(block, 16))
