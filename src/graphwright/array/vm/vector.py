"""Vectors of 16 float32 in compiled code: a numba type over LLVM's `<16 x float>`, and what is done with it.

Addresses are int64. Every operation is one LLVM instruction or intrinsic, which LLVM splits where a machine's registers
are narrower; explicit vectors stay vectors where two operands share memory, which a vectoriser has to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from graphwright.array.vm.llvm import (
    BYTES,
    F32,
    FLAGS,
    FLOATS,
    I1,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    WIDE,
    aligned,
    broadcast,
    constant,
    first_lanes,
    intrinsic_call,
    masked_gather,
    masked_load,
    masked_store,
    past_caches,
    pointer,
)


class _Vector(types.Type):
    def __init__(self, name: str) -> None:
        super().__init__(name=name)


V = _Vector("float32x16")
M = _Vector("bool1x16")
register_model(_Vector)(
    type("VectorModel", (models.PrimitiveModel,), {"__init__": lambda self, dmm, fe: _model(self, dmm, fe)})
)


def _model(self: Any, dmm: Any, fe: Any) -> None:
    models.PrimitiveModel.__init__(self, dmm, fe, FLOATS if fe.name == V.name else FLAGS)


def define(name: str, result: Any, operands: tuple, emit: Callable[..., Any]) -> Any:
    """An intrinsic of fixed operand types; `emit(builder, *values)` writes the instructions."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    names = ", ".join(f"a{i}" for i in range(len(operands)))
    space: dict[str, Any] = {"signature": result(*operands), "codegen": codegen}
    exec(f"def {name}(typingctx{', ' if names else ''}{names}):\n    return signature, codegen", space)
    return intrinsic(space[name])


i64, f32, f64, void = types.int64, types.float32, types.float64, types.void


def effect(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Code for an intrinsic that returns nothing."""

    def wrapped(builder: Any, *args: Any) -> Any:
        emit(builder, *args)
        return ir.Constant(I8.as_pointer(), None)

    return wrapped


# -- memory ------------------------------------------------------------------------------------------------------------
load_i64 = define("load_i64", i64, (i64,), lambda b, p: aligned(b.load(pointer(b, p, I64)), 8))
load_f32 = define("load_f32", f32, (i64,), lambda b, p: aligned(b.load(pointer(b, p, F32)), 4))
load_f64 = define("load_f64", f64, (i64,), lambda b, p: aligned(b.load(pointer(b, p, ir.DoubleType())), 8))
load_u8 = define("load_u8", types.uint8, (i64,), lambda b, p: b.load(pointer(b, p, I8)))
store_i64 = define("store_i64", void, (i64, i64), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, I64)), 8)))
store_f64 = define(
    "store_f64", void, (i64, f64), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, ir.DoubleType())), 8))
)
store_f32 = define("store_f32", void, (i64, f32), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, F32)), 4)))
load = define("load", V, (i64,), lambda b, p: aligned(b.load(pointer(b, p, FLOATS)), 4))
store = define("store", void, (i64, V), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, FLOATS)), 4)))
stream = define(
    "stream", void, (i64, V), effect(lambda b, p, x: past_caches(b, aligned(b.store(x, pointer(b, p, FLOATS)), 64)))
)
"""A store past the caches, to a place aligned to 64 bytes."""
first = define("first", M, (i64,), first_lanes)
outside = define("outside", M, (i64,), lambda b, n: b.not_(first_lanes(b, n)))
"""All lanes but the first n."""
both = define("both", M, (M, M), lambda b, x, y: b.and_(x, y))
load_first = define("load_first", V, (i64, M), lambda b, p, m: masked_load(b, p, m, FLOATS, "v16f32", 4))
store_first = define("store_first", void, (i64, V, M), effect(lambda b, p, x, m: masked_store(b, x, p, m, "v16f32", 4)))
pick_first = define("pick_first", V, (i64, i64, M), lambda b, p, step, m: masked_gather(b, p, step, m))
"""The lanes of a mask, `step` bytes apart; 0 in the others."""
load_mask = define(
    "load_mask",
    M,
    (i64, M),
    lambda b, p, m: b.icmp_unsigned("!=", masked_load(b, p, m, BYTES, "v16i8", 1), ir.Constant(BYTES, None)),
)
store_mask = define(
    "store_mask", void, (i64, M, M), effect(lambda b, p, x, m: masked_store(b, b.zext(x, BYTES), p, m, "v16i8", 1))
)

# -- numbers -----------------------------------------------------------------------------------------------------------
splat = define("splat", V, (f32,), broadcast)
add = define("add", V, (V, V), lambda b, x, y: b.fadd(x, y))
sub = define("sub", V, (V, V), lambda b, x, y: b.fsub(x, y))
mul = define("mul", V, (V, V), lambda b, x, y: b.fmul(x, y))
div = define("div", V, (V, V), lambda b, x, y: b.fdiv(x, y))
neg = define("neg", V, (V,), lambda b, x: b.fneg(x))
fma = define("fma", V, (V, V, V), lambda b, x, y, z: intrinsic_call(b, "llvm.fma.v16f32", FLOATS, x, y, z))
least = define("least", V, (V, V), lambda b, x, y: b.select(b.fcmp_ordered("<", y, x), y, x))
"""The smaller one; x if either is NaN: one instruction where `minimum` takes several."""
most = define("most", V, (V, V), lambda b, x, y: b.select(b.fcmp_ordered(">", y, x), y, x))
sqrt = define("sqrt", V, (V,), lambda b, x: intrinsic_call(b, "llvm.sqrt.v16f32", FLOATS, x))
rint = define("rint", V, (V,), lambda b, x: intrinsic_call(b, "llvm.rint.v16f32", FLOATS, x))
floor = define("floor", V, (V,), lambda b, x: intrinsic_call(b, "llvm.floor.v16f32", FLOATS, x))
absolute = define("absolute", V, (V,), lambda b, x: intrinsic_call(b, "llvm.fabs.v16f32", FLOATS, x))
copysign = define("copysign", V, (V, V), lambda b, x, y: intrinsic_call(b, "llvm.copysign.v16f32", FLOATS, x, y))
minimum = define("minimum", V, (V, V), lambda b, x, y: intrinsic_call(b, "llvm.minimum.v16f32", FLOATS, x, y))
"""NaN if either is."""
maximum = define("maximum", V, (V, V), lambda b, x, y: intrinsic_call(b, "llvm.maximum.v16f32", FLOATS, x, y))
total = define(
    "total", f32, (V,), lambda b, x: intrinsic_call(b, "llvm.vector.reduce.fadd.v16f32", F32, F32(-0.0), _pairs(b, x))
)
top = define("top", f32, (V,), lambda b, x: b.extract_element(_folded(b, x), I32(0)))
"""The largest lane by `most`."""
largest = define("largest", f32, (V,), lambda b, x: intrinsic_call(b, "llvm.vector.reduce.fmaximum.v16f32", F32, x))


def _pairs(builder: Any, x: Any) -> Any:
    """Sum halves until 2 lanes are left, then put zeros (-0) beside: a fixed tree instead of a chain of 16."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.Constant(INTS, [I32(i + width if i < width else i) for i in range(LANES)])
        x = builder.fadd(x, builder.shuffle_vector(x, x, index))
    keep = ir.Constant(FLAGS, [I1(i == 0) for i in range(LANES)])
    return builder.select(keep, x, constant(F32, -0.0))


def _folded(builder: Any, x: Any) -> Any:
    """Halves against each other until the largest stands in the first lane."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.Constant(INTS, [I32(i + width if i < width else i) for i in range(LANES)])
        other = builder.shuffle_vector(x, x, index)
        x = builder.select(builder.fcmp_ordered(">", other, x), other, x)
    return x


# -- comparison --------------------------------------------------------------------------------------------------------
lt = define("lt", M, (V, V), lambda b, x, y: b.fcmp_ordered("<", x, y))
le = define("le", M, (V, V), lambda b, x, y: b.fcmp_ordered("<=", x, y))
eq = define("eq", M, (V, V), lambda b, x, y: b.fcmp_ordered("==", x, y))
ne = define("ne", M, (V, V), lambda b, x, y: b.fcmp_unordered("!=", x, y))
select = define("select", V, (M, V, V), lambda b, m, x, y: b.select(m, x, y))


# -- bits --------------------------------------------------------------------------------------------------------------
def _power_of_two(b: Any, n: Any) -> Any:
    return b.bitcast(b.shl(b.add(n, constant(I32, 127)), constant(I32, 23)), FLOATS)


def _scaled(b: Any, x: Any, n: Any) -> Any:
    if WIDE:
        full, rounding = I16(0xFFFF), I32(4)  # all lanes, as the mode says
        none = ir.Constant(FLOATS, None)
        return intrinsic_call(b, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, x, n, none, full, rounding)
    whole = b.fptosi(n, INTS)
    half = b.ashr(whole, constant(I32, 1))
    return b.fmul(b.fmul(x, _power_of_two(b, half)), _power_of_two(b, b.sub(whole, half)))


scaled = define("scaled", V, (V, V), _scaled)
"""x · 2ⁿ, 1/2 <= x <= 2, of whole numbers -252..254; in two factors, neither of which overflows before the result."""
exponent = define(
    "exponent",
    V,
    (V,),
    lambda b, x: b.sitofp(b.sub(b.lshr(b.bitcast(x, INTS), constant(I32, 23)), constant(I32, 127)), FLOATS),
)
"""e of a positive normal m · 2ᵉ, 1 <= m < 2."""
mantissa = define(
    "mantissa",
    V,
    (V,),
    lambda b, x: b.bitcast(
        b.or_(b.and_(b.bitcast(x, INTS), constant(I32, 0x7FFFFF)), constant(I32, 127 << 23)), FLOATS
    ),
)
"""m of a positive normal m · 2ᵉ."""

# -- one number --------------------------------------------------------------------------------------------------------
only = define("only", f32, (V,), lambda b, x: b.extract_element(x, I32(0)))
"""The first lane."""
fma1 = define("fma1", f32, (f32, f32, f32), lambda b, x, y, z: intrinsic_call(b, "llvm.fma.f32", F32, x, y, z))
