"""Padding: the model's program with an input `mask` [B, T], false where a key is padding."""

from __future__ import annotations

from graphwright.array import Spec, bool_
from graphwright.graph import NodeId
from graphwright.program import Program, Value
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.kinds import INPUT


def with_padding(p: Program) -> Program:
    """A program that takes `mask` too; every attention hides the keys where it is false."""

    def start(new: Program) -> None:
        new.add_source(INPUT, "mask", Spec(("B", "T"), bool_), {})

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value | None:
        attrs = p.attrs(node)
        if "key_mask" in attrs["optional"]:
            return None  # it has a mask of its own
        extra = {**attrs, "optional": ("key_mask", *attrs["optional"])}
        return Value(new.add_op("sdpa", [*operands[:3], new.value("mask"), *operands[3:]], extra, p.path(node)))

    return rewrite(p, f"{p.name} (padded)", {"sdpa": attention}, start)[0]
