"""Autocast: ops of casting class `low` run in 16 bits, those of class `f32` in float32; casts are ordinary ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphwright.array import DType, Spec, bfloat16
from graphwright.autograd import autocast_to
from graphwright.ops import get
from graphwright.ops.casting import is_cast, low_dtype, target_dtype
from graphwright.program import Entry, Program, Value
from graphwright.program.kinds import KINDS


@contextmanager
def autocast(dtype: object = bfloat16, enabled: bool = True) -> Iterator[None]:
    """Run matrix products and attention in `dtype`, losses and sums in float32; norms keep their input's dtype.

    A context manager for eager code and traces. A nested `autocast(enabled=False)` switches it off.
    Raises: DTypeError unless `dtype` is a 16-bit float.
    """
    kind = low_dtype(dtype)
    with autocast_to(kind if enabled else None):
        yield


def apply(program: Program, dtype: object = bfloat16, *, why: str = "") -> Entry | None:
    """Insert casts into a program so that it computes in 16 bits where `autocast` would; one edit, which undo reverts.

    A value is cast to a dtype once for all its readers.

    Args:
        program: a forward pass; gradients derived from it later include the casts.
        dtype: bfloat16 or float16.
        why: reason in the journal.
    Returns: the journal entry; None inside an open edit, which the casts join, or if nothing needs a cast.
    Raises: DTypeError for another dtype; SpecMismatch if an op takes no 16-bit operands, with nothing changed.
    """
    kind, entries = low_dtype(dtype), len(program.journal)
    with program.edit(why or f"mixed precision in {kind.name}", tool="amp") as e:
        made: dict[tuple[Value, DType], Value] = {}
        for node in list(program.order()):
            op = program.op(node)
            if op in KINDS:
                continue
            row, edges = get(op), program.in_edges(node)
            values = [program.edge_value(edge) for edge in edges]
            specs = [e.spec(v) for v in values]
            target = target_dtype(row, [(s.dtype, _kind(s)) for s in specs], kind)
            for i, (edge, value, spec) in enumerate(zip(edges, values, specs, strict=True)):
                if target is None or not is_cast(row, i, spec.dtype, target):
                    continue
                if (value, target) not in made:
                    name = program.free_name(f"{program.path(value)}.{target.name}")
                    made[value, target] = Value(e.add("cast", value, name=name, dtype=target))
                e.rewire(edge, made[value, target])
    return program.journal[-1] if len(program.journal) > entries else None


def _kind(spec: Spec) -> str:
    return "array" if spec.shape else "scalar0d"
