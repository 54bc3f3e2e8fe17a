"""LLVM's vectors of 16 entries, as instructions that other code is made of; addresses are 64-bit integers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config
from numba.core import cgutils

LANES = 16
_FEATURES = {} if getattr(config, "CPU_NAME", None) else get_host_cpu_features()
WIDE = bool(_FEATURES.get("avx512f"))
"""True on a CPU with vectors of 64 bytes, which the tiles of products are made for."""
PAIRED = bool(_FEATURES.get("avx512bw"))
"""True on one that multiplies 32 numbers of 16 bits and adds pairs of products in one instruction."""
F32, I64, I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
I16, I8, I1 = ir.IntType(16), ir.IntType(8), ir.IntType(1)
FLOATS, INTS, BYTES, FLAGS = (ir.VectorType(t, LANES) for t in (F32, I32, I8, I1))


def intrinsic_call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """A call of an LLVM intrinsic by its full name: `declare_intrinsic` cannot spell vector types."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to a kind of value."""
    return builder.inttoptr(address, kind.as_pointer())


def aligned(made: Any, bytes_: int) -> Any:
    """A load or store that expects no more than this alignment; LLVM's own guess would be the vector's 64 bytes."""
    made.align = bytes_
    return made


def past_caches(builder: Any, made: Any) -> Any:
    """A store that leaves no copy in the caches, and reads none into them; its place must be aligned."""
    made.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
    return made


def joined(builder: Any, *ways: tuple[Any, Any]) -> Any:
    """What a value is by the block that control comes from: (value, block) of each."""
    phi = builder.phi(ways[0][0].type)
    for value, block in ways:
        phi.add_incoming(value, block)
    return phi


def constant(kind: Any, value: Any) -> Any:
    """One value in all lanes."""
    return ir.Constant(ir.VectorType(kind, LANES), [ir.Constant(kind, value)] * LANES)


def broadcast(builder: Any, scalar: Any) -> Any:
    """One value of a register in all lanes."""
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [I32(0)] * LANES))


def first_lanes(builder: Any, count: Any) -> Any:
    """The mask of the first `count` lanes."""
    lanes = ir.Constant(INTS, [I32(i) for i in range(LANES)])
    return builder.icmp_signed("<", lanes, broadcast(builder, builder.trunc(count, I32)))


def masked_load(builder: Any, address: Any, mask: Any, kind: Any, suffix: str, align: int) -> Any:
    """The lanes of a mask, 0 in the others; what they would have read is not touched."""
    place = pointer(builder, address, kind)
    zero = ir.Constant(kind, None)
    return intrinsic_call(builder, f"llvm.masked.load.{suffix}.p0", kind, place, I32(align), mask, zero)


def masked_gather(builder: Any, address: Any, step: Any, mask: Any) -> Any:
    """Floats `step` bytes apart in the lanes of a mask, 0 in the others."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), [I64(i) for i in range(LANES)])
    places = builder.add(broadcast(builder, address), builder.mul(broadcast(builder, step), lanes))
    kind = ir.VectorType(ir.PointerType(F32), LANES)
    zero = ir.Constant(FLOATS, None)
    pointers = builder.inttoptr(places, kind)
    return intrinsic_call(builder, "llvm.masked.gather.v16f32.v16p0", FLOATS, pointers, I32(4), mask, zero)


def masked_store(builder: Any, value: Any, address: Any, mask: Any, suffix: str, align: int) -> None:
    """Write the lanes of a mask; the memory of the others is not touched."""
    place = pointer(builder, address, value.type)
    kind = ir.FunctionType(ir.VoidType(), [value.type, place.type, I32, FLAGS])
    target = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.{suffix}.p0")
    builder.call(target, [value, place, I32(align), mask])
