"""The rule tables: what an op is stands in one row of each, and nowhere else.

An op is written as a class whose attributes are the cells, its functions static methods; `@op(name)` checks them and
enters a frozen row. A cell may be None only with a reason in `why`. `test_ops_total.py` proves that there is no hole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphwright.array.dtype import dtype
from graphwright.array.layout import Layout
from graphwright.array.spec import Spec
from graphwright.errors import GraphwrightError, UsageError

Attrs = Mapping[str, Any]
Infer = Callable[..., "Spec | tuple[Spec, ...]"]
Row = TypeVar("Row", bound=type)


class UnknownOp(UsageError, KeyError):
    """No op of this name is registered."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of an op takes: floating-point operations, bytes read, bytes written."""

    flops: int
    read: int
    write: int


@dataclass(frozen=True, slots=True)
class Saves:
    """Operands and results that a vjp reads; nothing else is kept alive for it."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Traits:
    """What the planner and the passes may know of an op without asking for its name.

    Attributes:
        inplace: pairs (output, input): the output may take the memory of that input.
        contiguous: places of operands that must be row-major (negative from the end); others are copied first.
        nary: takes any number of operands, summed in port order: a junction.
        amp: casting class: `low`, `f32` under autocast (`f32` promotes else); `promote`, `inner` (follow the first
            operand) always; `keep`.
        fixed: places of operands that no casting class touches: ids, masks, conditions.
        elementwise: one iteration space, every output element from the operands' elements at its place.
        update: carries state forward; never folded, merged or run twice.
        carried: the results are new values of the last operands, one for one, and may take their memory; there may be
            any number of them, and all operands must be row-major.
        opaque: has a gradient that the row cannot give: where one may be wanted the expansion is run instead; without
            one, asking for it raises instead of counting as zero.
        convert: the result is the operand's values, in other memory or in the dtype of the result.
        identity: pairs (operand, value): where that operand of two is this value (the sign of zero counts), the result
            is the other one, bit for bit.
        sums: the result is the sum of the two operands.
        divides: integers of two dtypes are cast to float32 each, as their common dtype may lose a sign.
        barrier: what is computed from the result is never taken for what was computed from the operand.
        addend: place of an optional operand, one number per entry of the last axis, that is added to the result.
        narrow: places of operands that the VM reads as bfloat16 too, where they are stored so.
    """

    inplace: tuple[tuple[int, int], ...] = ()
    contiguous: tuple[int, ...] = ()
    nary: bool = False
    amp: str = "keep"
    fixed: tuple[int, ...] = ()
    elementwise: bool = False
    update: bool = False
    carried: bool = False
    opaque: bool = False
    convert: bool = False
    identity: tuple[tuple[int, float], ...] = ()
    sums: bool = False
    divides: bool = False
    addend: int | None = None
    narrow: tuple[int, ...] = ()
    barrier: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row of every table.

    Attributes:
        name: of the op and of its kernel in a backend.
        doc: what it computes.
        arity: how many operands, or (least, most); most None for any number.
        attrs: names of the attributes with their defaults; `...` marks one that must be given.
        infer: specs of the operands and the attributes -> spec or specs of the results.
        view: layout of the operand and attributes -> layout of the result over the same memory, or None when it must
            copy; the cell is None for ops that compute.
        vjp: gradients of the results -> gradients of the operands, written with tensor operations.
        saves: what the vjp reads.
        cost: specs of operands and results -> Cost.
        traits: see Traits.
        sample: seeded generator -> operands (numpy) and attributes for the tests.
        expand: operands and attributes -> the same results by simpler ops; None for a primitive.
        axes: how dimensions of operands and results hang together; None for the line in `ops.axes`, or for the
            elementwise trait, which says it too.
        why: the reason for each cell that is None.
    """

    name: str
    doc: str
    arity: int | tuple[int, int | None]
    attrs: Attrs
    infer: Infer
    view: Callable[[Layout, Attrs], Layout | None] | None
    vjp: Callable[..., tuple] | None
    saves: Saves
    cost: Callable[[Sequence[Spec], Sequence[Spec], Attrs], Cost]
    traits: Traits
    sample: Callable[..., Any]
    expand: Callable[[Sequence[Any], Attrs], Any] | None = None
    axes: Callable[[Any], Sequence[Any]] | None = None
    why: Mapping[str, str] = field(default_factory=dict)

    def inplace(self, ins: int, outs: int) -> Sequence[tuple[int, int]]:
        """Pairs (result, operand) of one use of the op: the result may take that operand's memory."""
        return [(o, ins - outs + o) for o in range(outs)] if self.traits.carried else self.traits.inplace

    def overwrites(self, out: int, place: int, ins: int, outs: int) -> bool:
        """True if `inplace` has this pair."""
        return place == ins - outs + out if self.traits.carried else (out, place) in self.traits.inplace

    def row_major(self, ins: int) -> Sequence[int]:
        """Places of operands that must be row-major in one use of the op."""
        return range(ins) if self.traits.carried else self.traits.contiguous

    def complete(self, attrs: Attrs, where: str | None = None) -> dict[str, Any]:
        """Attributes with defaults filled in, dtypes as DType. Raises: UsageError for one unknown or missing."""
        if not attrs and not self.attrs:
            return {}
        merged = {**self.attrs, **attrs}
        if len(merged) != len(self.attrs) or any([value is ... for value in merged.values()]):
            raise UsageError(
                f"op {self.name!r} does not take these attributes",
                where=where,
                expected=", ".join(self.attrs) or "none",
                got=", ".join(attrs) or "none",
            )
        if "dtype" in merged and merged["dtype"] is not None:
            merged["dtype"] = dtype(merged["dtype"])
        return merged

    def specs(self, ins: Sequence[Spec], attrs: Attrs, where: str | None = None) -> tuple[Spec, ...]:
        """Specs of the results. Raises: ShapeError or DTypeError naming op and place; UsageError for a wrong arity."""
        low, high = self.arity if isinstance(self.arity, tuple) else (self.arity, self.arity)
        if len(ins) < low or (high is not None and len(ins) > high):
            wanted = f"{low}" if high == low else f"{low} to {'any number' if high is None else high}"
            raise UsageError(
                f"op {self.name!r} takes another number of operands", where=where, expected=wanted, got=len(ins)
            )
        try:
            result = self.infer(*ins, **attrs)
        except GraphwrightError as error:
            place = self.name if where is None else f"{where} ({self.name})"
            error.where = place if error.where is None else f"{place}, {error.where}"
            if error.got is None:
                error.got = ", ".join(map(repr, ins))
            raise
        return (result,) if isinstance(result, Spec) else tuple(result)


OPS: dict[str, Op] = {}


def op(name: str) -> Callable[[Row], Row]:
    """Register the class below as the row of an op. Raises: UsageError for a name taken or a cell left out."""

    def enter(row: Row) -> Row:
        if name in OPS:
            raise UsageError("this op is registered already", where=name)
        cells = {cell: getattr(row, cell) for cell in Op.__slots__ if hasattr(row, cell)}
        why = cells.get("why", {})
        cells.setdefault("attrs", {})
        cells.setdefault("view", None)
        cells.setdefault("saves", Saves())
        cells.setdefault("traits", Traits())
        cells.setdefault("cost", elementwise_cost)
        absent = [c for c in ("arity", "infer", "vjp", "sample") if c not in cells]
        unexplained = [c for c in ("vjp", "sample") if c in cells and cells[c] is None and c not in why]
        if absent or unexplained or not (row.__doc__ or "").strip():
            raise UsageError(
                "a row needs every cell, or None with a reason in `why`, and a docstring",
                where=name,
                got=", ".join(absent + unexplained) or "no docstring",
            )
        OPS[name] = Op(name=name, doc=row.__doc__ or "", **cells)
        return row

    return enter


def get(name: str) -> Op:
    """The row of an op. Raises: UnknownOp naming the nearest ones."""
    found = OPS.get(name) if isinstance(name, str) else None
    if found is None:
        from difflib import get_close_matches

        raise UnknownOp(
            "no such op", where=name, expected=", ".join(get_close_matches(str(name), OPS)) or ", ".join(OPS)
        )
    return found


def elementwise_cost(ins: Sequence[Spec], outs: Sequence[Spec], attrs: Attrs) -> Cost:
    """One operation per output element."""
    return Cost(sum(o.size for o in outs), sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))


def free_cost(ins: Sequence[Spec], outs: Sequence[Spec], attrs: Attrs) -> Cost:
    """A view: nothing is computed or moved."""
    return Cost(0, 0, 0)
