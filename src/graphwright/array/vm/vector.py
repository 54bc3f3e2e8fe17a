"""Vectors of 16 float32 in compiled code: a numba type over LLVM's `<16 x float>`, and what is done with it.

Addresses are int64. Every operation is one LLVM instruction or intrinsic, which LLVM splits where a machine's registers
are narrower; explicit vectors stay vectors where two operands share memory, which a vectoriser has to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_F32, _I32, _I8, _I1 = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(1)
_VF, _VI, _VB, _VM = (ir.VectorType(t, LANES) for t in (_F32, _I32, _I8, _I1))


class _Vector(types.Type):
    def __init__(self, name: str) -> None:
        super().__init__(name=name)


V = _Vector("float32x16")
M = _Vector("bool1x16")
register_model(_Vector)(
    type("VectorModel", (models.PrimitiveModel,), {"__init__": lambda self, dmm, fe: _model(self, dmm, fe)})
)


def _model(self: Any, dmm: Any, fe: Any) -> None:
    models.PrimitiveModel.__init__(self, dmm, fe, _VF if fe.name == V.name else _VM)


def _define(name: str, result: Any, operands: tuple, emit: Callable[..., Any]) -> Any:
    """An intrinsic of fixed operand types; `emit(builder, *values)` writes the instructions."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    names = ", ".join(f"a{i}" for i in range(len(operands)))
    space: dict[str, Any] = {"signature": result(*operands), "codegen": codegen}
    exec(f"def {name}(typingctx{', ' if names else ''}{names}):\n    return signature, codegen", space)
    return intrinsic(space[name])


def _named(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _aligned(made: Any, bytes_: int) -> Any:
    made.align = bytes_
    return made


def _const(kind: Any, value: Any) -> Any:
    return ir.Constant(ir.VectorType(kind, LANES), [ir.Constant(kind, value)] * LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_VI, [_I32(0)] * LANES))


def _first(builder: Any, count: Any) -> Any:
    """The mask of the first `count` lanes."""
    lanes = ir.Constant(_VI, [_I32(i) for i in range(LANES)])
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32)))


def _masked_load(builder: Any, address: Any, mask: Any, kind: Any, suffix: str, align: int) -> Any:
    pointer = _at(builder, address, kind)
    zero = ir.Constant(kind, None)
    return _named(builder, f"llvm.masked.load.{suffix}.p0", kind, pointer, _I32(align), mask, zero)


def _masked_store(builder: Any, value: Any, address: Any, mask: Any, suffix: str, align: int) -> None:
    pointer = _at(builder, address, value.type)
    kind = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, _I32, _VM])
    target = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.{suffix}.p0")
    builder.call(target, [value, pointer, _I32(align), mask])


i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
_none = lambda builder: builder.module.context  # noqa: E731


def _void(emit: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(builder: Any, *args: Any) -> Any:
        emit(builder, *args)
        return ir.Constant(_I8.as_pointer(), None)

    return wrapped


# -- memory ------------------------------------------------------------------------------------------------------------
load_i64 = _define("load_i64", i64, (i64,), lambda b, p: _aligned(b.load(_at(b, p, ir.IntType(64))), 8))
load_i32 = _define("load_i32", types.int32, (i64,), lambda b, p: _aligned(b.load(_at(b, p, _I32)), 4))
load_f32 = _define("load_f32", f32, (i64,), lambda b, p: _aligned(b.load(_at(b, p, _F32)), 4))
load_f64 = _define("load_f64", f64, (i64,), lambda b, p: _aligned(b.load(_at(b, p, ir.DoubleType())), 8))
load_u8 = _define("load_u8", types.uint8, (i64,), lambda b, p: b.load(_at(b, p, _I8)))
store_f32 = _define("store_f32", void, (i64, f32), _void(lambda b, p, x: _aligned(b.store(x, _at(b, p, _F32)), 4)))
store_u8 = _define("store_u8", void, (i64, types.uint8), _void(lambda b, p, x: b.store(x, _at(b, p, _I8))))
load = _define("load", V, (i64,), lambda b, p: _aligned(b.load(_at(b, p, _VF)), 4))
store = _define("store", void, (i64, V), _void(lambda b, p, x: _aligned(b.store(x, _at(b, p, _VF)), 4)))
first = _define("first", M, (i64,), _first)
load_first = _define("load_first", V, (i64, M), lambda b, p, m: _masked_load(b, p, m, _VF, "v16f32", 4))
store_first = _define(
    "store_first", void, (i64, V, M), _void(lambda b, p, x, m: _masked_store(b, x, p, m, "v16f32", 4))
)
load_mask = _define(
    "load_mask",
    M,
    (i64, M),
    lambda b, p, m: b.icmp_unsigned("!=", _masked_load(b, p, m, _VB, "v16i8", 1), ir.Constant(_VB, None)),
)
store_mask = _define(
    "store_mask", void, (i64, M, M), _void(lambda b, p, x, m: _masked_store(b, b.zext(x, _VB), p, m, "v16i8", 1))
)

# -- numbers -----------------------------------------------------------------------------------------------------------
splat = _define("splat", V, (f32,), _splat)
add = _define("add", V, (V, V), lambda b, x, y: b.fadd(x, y))
sub = _define("sub", V, (V, V), lambda b, x, y: b.fsub(x, y))
mul = _define("mul", V, (V, V), lambda b, x, y: b.fmul(x, y))
div = _define("div", V, (V, V), lambda b, x, y: b.fdiv(x, y))
neg = _define("neg", V, (V,), lambda b, x: b.fneg(x))
fma = _define("fma", V, (V, V, V), lambda b, x, y, z: _named(b, "llvm.fma.v16f32", _VF, x, y, z))
sqrt = _define("sqrt", V, (V,), lambda b, x: _named(b, "llvm.sqrt.v16f32", _VF, x))
rint = _define("rint", V, (V,), lambda b, x: _named(b, "llvm.rint.v16f32", _VF, x))
floor = _define("floor", V, (V,), lambda b, x: _named(b, "llvm.floor.v16f32", _VF, x))
absolute = _define("absolute", V, (V,), lambda b, x: _named(b, "llvm.fabs.v16f32", _VF, x))
copysign = _define("copysign", V, (V, V), lambda b, x, y: _named(b, "llvm.copysign.v16f32", _VF, x, y))
minimum = _define("minimum", V, (V, V), lambda b, x, y: _named(b, "llvm.minimum.v16f32", _VF, x, y))
"""NaN if either is."""
maximum = _define("maximum", V, (V, V), lambda b, x, y: _named(b, "llvm.maximum.v16f32", _VF, x, y))
total = _define(
    "total", f32, (V,), lambda b, x: _named(b, "llvm.vector.reduce.fadd.v16f32", _F32, _F32(-0.0), _pairs(b, x))
)
largest = _define("largest", f32, (V,), lambda b, x: _named(b, "llvm.vector.reduce.fmaximum.v16f32", _F32, x))


def _pairs(builder: Any, x: Any) -> Any:
    """Sum halves until 2 lanes are left, then put zeros (-0) beside: a fixed tree instead of a chain of 16."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.Constant(_VI, [_I32(i + width if i < width else i) for i in range(LANES)])
        x = builder.fadd(x, builder.shuffle_vector(x, x, index))
    keep = ir.Constant(_VM, [_I1(i == 0) for i in range(LANES)])
    return builder.select(keep, x, _const(_F32, -0.0))


# -- comparison --------------------------------------------------------------------------------------------------------
lt = _define("lt", M, (V, V), lambda b, x, y: b.fcmp_ordered("<", x, y))
le = _define("le", M, (V, V), lambda b, x, y: b.fcmp_ordered("<=", x, y))
eq = _define("eq", M, (V, V), lambda b, x, y: b.fcmp_ordered("==", x, y))
ne = _define("ne", M, (V, V), lambda b, x, y: b.fcmp_unordered("!=", x, y))
select = _define("select", V, (M, V, V), lambda b, m, x, y: b.select(m, x, y))

# -- bits --------------------------------------------------------------------------------------------------------------
power_of_two = _define(
    "power_of_two",
    V,
    (V,),
    lambda b, n: b.bitcast(b.shl(b.add(b.fptosi(n, _VI), _const(_I32, 127)), _const(_I32, 23)), _VF),
)
"""2ⁿ of whole numbers -126..127."""
exponent = _define(
    "exponent",
    V,
    (V,),
    lambda b, x: b.sitofp(b.sub(b.lshr(b.bitcast(x, _VI), _const(_I32, 23)), _const(_I32, 127)), _VF),
)
"""e of a positive normal m · 2ᵉ, 1 <= m < 2."""
mantissa = _define(
    "mantissa",
    V,
    (V,),
    lambda b, x: b.bitcast(b.or_(b.and_(b.bitcast(x, _VI), _const(_I32, 0x7FFFFF)), _const(_I32, 127 << 23)), _VF),
)
"""m of a positive normal m · 2ᵉ."""
