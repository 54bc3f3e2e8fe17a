"""Vectors of 16 float32 in compiled code: a numba type over LLVM's `<16 x float>`, its operators and intrinsics.

Addresses are int64. Every operation is one LLVM instruction or intrinsic, which LLVM splits where the registers of the
CPU are narrower. Explicit vectors stay vectors where two operands may share memory; an auto-vectoriser gives up there.
Where an operand of an operator or intrinsic is a number instead of a vector, it is broadcast to all lanes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

# -- LLVM --------------------------------------------------------------------------------------------------------------
LANES = 16
_FEATURES = {} if getattr(config, "CPU_NAME", None) else get_host_cpu_features()
WIDE = bool(_FEATURES.get("avx512f"))
"""True on a CPU with registers of 64 bytes, for which the tiles of matrix products are sized."""
PAIRED = bool(_FEATURES.get("avx512bw"))
"""True on a CPU that multiplies 32 int16 and adds pairs of products in one instruction."""
F32, F64, I64, I32 = ir.FloatType(), ir.DoubleType(), ir.IntType(64), ir.IntType(32)
I16, I8, I1 = ir.IntType(16), ir.IntType(8), ir.IntType(1)
FLOATS, INTS, BYTES, FLAGS = (ir.VectorType(t, LANES) for t in (F32, I32, I8, I1))


def intrinsic_call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic by its full name; llvmlite's `declare_intrinsic` cannot spell vector types."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """Convert an integer address to a pointer to the LLVM type `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def aligned(access: Any, alignment: int) -> Any:
    """Set the alignment in bytes of a load or store; LLVM would assume the 64 bytes of the vector."""
    access.align = alignment
    return access


def joined(builder: Any, *ways: tuple[Any, Any]) -> Any:
    """Return a phi node of (value, predecessor block) pairs."""
    phi = builder.phi(ways[0][0].type)
    for value, block in ways:
        phi.add_incoming(value, block)
    return phi


def constant(kind: Any, value: Any) -> Any:
    """Return a constant vector with `value` in all lanes."""
    return ir.Constant(ir.VectorType(kind, LANES), [ir.Constant(kind, value)] * LANES)


def shuffle(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    """Return a vector of the given lanes, which are numbered 0 to 15 in x and 16 to 31 in y."""
    return builder.shuffle_vector(x, y, ir.Constant(INTS, [I32(i) for i in lanes]))


def interleaved(builder: Any, x: Any, y: Any, width: int = 1) -> list[Any]:
    """Interleave x and y, `width` lanes at a time; return the vectors of their lower and upper halves."""
    starts = [range(half, half + LANES // 2, width) for half in (0, LANES // 2)]
    return [
        shuffle(builder, x, y, [lane + i for at in runs for lane in (at, LANES + at) for i in range(width)])
        for runs in starts
    ]


def broadcast(builder: Any, scalar: Any) -> Any:
    """Copy one value to all lanes."""
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, I32(0))
    return shuffle(builder, one, one, [0] * LANES)


def first_lanes(builder: Any, count: Any) -> Any:
    """Return the mask of the first `count` lanes."""
    lanes = ir.Constant(INTS, [I32(i) for i in range(LANES)])
    return builder.icmp_signed("<", lanes, broadcast(builder, builder.trunc(count, I32)))


def masked_load(builder: Any, address: Any, mask: Any, kind: Any, suffix: str, align: int) -> Any:
    """Load the lanes of a mask; the other lanes are 0, and their memory is not read."""
    source, zero = pointer(builder, address, kind), ir.Constant(kind, None)
    return intrinsic_call(builder, f"llvm.masked.load.{suffix}.p0", kind, source, I32(align), mask, zero)


def masked_gather(builder: Any, address: Any, step: Any, mask: Any) -> Any:
    """Load floats `step` bytes apart into the lanes of a mask; the other lanes are 0."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), [I64(i) for i in range(LANES)])
    addresses = builder.add(broadcast(builder, address), builder.mul(broadcast(builder, step), lanes))
    pointers = builder.inttoptr(addresses, ir.VectorType(ir.PointerType(F32), LANES))
    zero = ir.Constant(FLOATS, None)
    return intrinsic_call(builder, "llvm.masked.gather.v16f32.v16p0", FLOATS, pointers, I32(4), mask, zero)


def masked_store(builder: Any, value: Any, address: Any, mask: Any, suffix: str, align: int) -> None:
    """Write the lanes of a mask; the memory of the other lanes is not touched."""
    target = pointer(builder, address, value.type)
    kind = ir.FunctionType(ir.VoidType(), [value.type, target.type, I32, FLAGS])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.{suffix}.p0")
    builder.call(function, [value, target, I32(align), mask])


def fetch(builder: Any, address: Any, mask: Any) -> Any:
    """Load 16 floats under a mask; None stands for all lanes."""
    if mask is None:
        return aligned(builder.load(pointer(builder, address, FLOATS)), 4)
    return masked_load(builder, address, mask, FLOATS, "v16f32", 4)


def write(builder: Any, value: Any, address: Any, mask: Any = None) -> None:
    """Store 16 floats under a mask; None stands for all lanes."""
    if mask is None:
        aligned(builder.store(value, pointer(builder, address, FLOATS)), 4)
    else:
        masked_store(builder, value, address, mask, "v16f32", 4)


_infer_global: Any = infer_global


# -- types and definitions ---------------------------------------------------------------------------------------------
class _Vector(types.Type):
    def __init__(self, name: str) -> None:
        super().__init__(name=name)


V = _Vector("float32x16")
M = _Vector("bool1x16")
i64, f32, f64, void = types.int64, types.float32, types.float64, types.void


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, FLOATS if fe_type.name == V.name else FLAGS)


def _widened(builder: Any, values: Any, wanted: Any, given: Any) -> list[Any]:
    """Broadcast each scalar that is given where a vector is wanted."""
    return [
        broadcast(builder, x) if want == V and have != V else x
        for x, want, have in zip(values, wanted, given, strict=True)
    ]


def _intrinsic(name: str, arity: int, typed: Callable[..., tuple[Any, tuple[Any, ...], Any]]) -> Any:
    """Return a numba intrinsic; `typed(*argument types)` gives (result type, operand types, emit(builder, *values))."""

    def made(*given: Any) -> Any:
        result, wanted, emit = typed(*given)
        taken = [f32 if want == V and have != V else want for want, have in zip(wanted, given, strict=True)]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *_widened(builder, args, wanted, taken))

        return result(*taken), codegen

    names = ", ".join(f"a{i}" for i in range(arity))
    space: dict[str, Any] = {"made": made}
    exec(f"def {name}({', '.join(('typingctx', *names.split(', ')))}):\n    return made({names})", space)
    return intrinsic(space[name])


def define(name: str, result: Any, operands: tuple, emit: Callable[..., Any]) -> Any:
    """Return an intrinsic with fixed operand types; `emit(builder, *values)` writes the LLVM instructions."""
    return _intrinsic(name, len(operands), lambda *given: (result, operands, emit))


def effect(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `emit` so that it returns the constant that numba expects from an intrinsic of type void."""

    def wrapped(builder: Any, *args: Any) -> Any:
        emit(builder, *args)
        return ir.Constant(I8.as_pointer(), None)

    return wrapped


_SUFFIX = {V: ("v16f32", FLOATS), f32: ("f32", F32), f64: ("f64", F64)}


def _kind(given: Any) -> Any:
    """Return the common type of operands: vector if any is a vector, else float64 if any is float64, else float32."""
    return V if V in given else f64 if f64 in given else f32


def _floats(name: str, llvm: str, arity: int) -> Any:
    """Return a numba intrinsic for an LLVM intrinsic; it takes vectors, float32 or float64."""

    def typed(*given: Any) -> Any:
        kind = _kind(given)
        suffix, made = _SUFFIX[kind]
        return kind, (kind,) * arity, lambda b, *args: intrinsic_call(b, f"llvm.{llvm}.{suffix}", made, *args)

    return _intrinsic(name, arity, typed)


def _operator(function: Any, result: Any, emit: Callable[..., Any]) -> None:
    """Define a binary operator of Python for two vectors, or for a vector and a number."""
    cases = [signature(result, x, y) for x, y in ((V, V), (V, f32), (f32, V))]
    _infer_global(function)(type(f"Vector_{function.__name__}", (ConcreteTemplate,), {"cases": cases}))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, *_widened(builder, args, (V, V), sig.args))

    for case in cases:
        lower_builtin(function, *case.args)(lower)


# -- operators ---------------------------------------------------------------------------------------------------------
_operator(operator.add, V, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, V, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, V, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, V, lambda b, x, y: b.fdiv(x, y))
for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}.items():
    _operator(getattr(operator, _name), M, lambda b, x, y, sign=_sign: b.fcmp_ordered(sign, x, y))
_operator(operator.ne, M, lambda b, x, y: b.fcmp_unordered("!=", x, y))
_infer_global(operator.neg)(type("Vector_neg", (ConcreteTemplate,), {"cases": [signature(V, V)]}))
lower_builtin(operator.neg, V)(lambda context, builder, sig, args: builder.fneg(args[0]))
_infer_global(operator.and_)(type("Mask_and", (ConcreteTemplate,), {"cases": [signature(M, M, M)]}))
lower_builtin(operator.and_, M, M)(lambda context, builder, sig, args: builder.and_(*args))


def _stream(b: Any, p: Any, x: Any) -> None:
    access = aligned(b.store(x, pointer(b, p, FLOATS)), 64)
    access.set_metadata("nontemporal", b.module.add_metadata([I32(1)]))


# -- memory ------------------------------------------------------------------------------------------------------------
load_i64 = define("load_i64", i64, (i64,), lambda b, p: aligned(b.load(pointer(b, p, I64)), 8))
load_i32 = define("load_i32", i64, (i64,), lambda b, p: b.sext(aligned(b.load(pointer(b, p, I32)), 4), I64))
load_f32 = define("load_f32", f32, (i64,), lambda b, p: aligned(b.load(pointer(b, p, F32)), 4))
load_f64 = define("load_f64", f64, (i64,), lambda b, p: aligned(b.load(pointer(b, p, F64)), 8))
load_u8 = define("load_u8", types.uint8, (i64,), lambda b, p: b.load(pointer(b, p, I8)))
store_i64 = define("store_i64", void, (i64, i64), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, I64)), 8)))
store_f64 = define("store_f64", void, (i64, f64), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, F64)), 8)))
store_f32 = define("store_f32", void, (i64, f32), effect(lambda b, p, x: aligned(b.store(x, pointer(b, p, F32)), 4)))
load = define("load", V, (i64,), lambda b, p: fetch(b, p, None))
store = define("store", void, (i64, V), effect(lambda b, p, x: write(b, x, p)))
stream = define("stream", void, (i64, V), effect(_stream))
"""A non-temporal store to an address aligned to 64 bytes."""
first = define("first", M, (i64,), first_lanes)
outside = define("outside", M, (i64,), lambda b, n: b.not_(first_lanes(b, n)))
"""All lanes but the first n."""
load_first = define("load_first", V, (i64, M), fetch)
store_first = define("store_first", void, (i64, V, M), effect(lambda b, p, x, m: write(b, x, p, m)))
pick_first = define("pick_first", V, (i64, i64, M), masked_gather)
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
fma = _floats("fma", "fma", 3)
sqrt = _floats("sqrt", "sqrt", 1)
rint = _floats("rint", "rint", 1)
floor = _floats("floor", "floor", 1)
absolute = _floats("absolute", "fabs", 1)
copysign = _floats("copysign", "copysign", 2)
minimum = _floats("minimum", "minimum", 2)
"""NaN if either operand is NaN, as is `maximum`."""
maximum = _floats("maximum", "maximum", 2)
least = define("least", V, (V, V), lambda b, x, y: b.select(b.fcmp_ordered("<", y, x), y, x))
"""The smaller operand; x if either is NaN. It takes one instruction where `minimum` takes several."""
most = define("most", V, (V, V), lambda b, x, y: b.select(b.fcmp_ordered(">", y, x), y, x))
"""The larger operand; x if either is NaN."""


def _selected(mask: Any, x: Any, y: Any) -> Any:
    kind = V if mask == M else _kind((x, y))
    return kind, (mask, kind, kind), lambda b, m, x, y: b.select(m, x, y)


select = _intrinsic("select", 3, _selected)
"""x where the mask is true, else y."""
only = define("only", f32, (V,), lambda b, x: b.extract_element(x, I32(0)))
"""The first lane."""


def _halved(builder: Any, x: Any, combined: Callable[..., Any]) -> Any:
    """Reduce a vector to its first lane by a tree of depth 4: `combined` merges the halves of the lanes four times."""
    width = LANES
    while width > 1:
        width //= 2
        x = combined(x, shuffle(builder, x, x, [i + width if i < width else i for i in range(LANES)]))
    return x


def _total(builder: Any, x: Any) -> Any:
    sums = _halved(builder, x, lambda x, y: builder.fadd(x, y))
    keep = ir.Constant(FLAGS, [I1(i == 0) for i in range(LANES)])
    alone = builder.select(keep, sums, constant(F32, -0.0))
    return intrinsic_call(builder, "llvm.vector.reduce.fadd.v16f32", F32, F32(-0.0), alone)


def _top(builder: Any, x: Any) -> Any:
    best = _halved(builder, x, lambda x, y: builder.select(builder.fcmp_ordered(">", y, x), y, x))
    return builder.extract_element(best, I32(0))


total = define("total", f32, (V,), _total)
"""The sum of the lanes, by a fixed tree."""
top = define("top", f32, (V,), _top)
"""The largest lane by `most`."""
largest = define("largest", f32, (V,), lambda b, x: intrinsic_call(b, "llvm.vector.reduce.fmaximum.v16f32", F32, x))
"""The largest lane; NaN if a lane is NaN."""


# -- bits --------------------------------------------------------------------------------------------------------------
def _power_of_two(b: Any, n: Any) -> Any:
    return b.bitcast(b.shl(b.add(n, constant(I32, 127)), constant(I32, 23)), FLOATS)


def _scaled(b: Any, x: Any, n: Any) -> Any:
    if WIDE:
        full, rounding = I16(0xFFFF), I32(4)  # all lanes; the current rounding mode
        none = ir.Constant(FLOATS, None)
        return intrinsic_call(b, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, x, n, none, full, rounding)
    whole = b.fptosi(n, INTS)
    half = b.ashr(whole, constant(I32, 1))
    return b.fmul(b.fmul(x, _power_of_two(b, half)), _power_of_two(b, b.sub(whole, half)))


scaled = define("scaled", V, (V, V), _scaled)
"""x·2ⁿ for 1/2 <= x <= 2 and whole n in -252..254; by two factors, so that neither overflows before the result does."""
exponent = define(
    "exponent",
    V,
    (V,),
    lambda b, x: b.sitofp(b.sub(b.lshr(b.bitcast(x, INTS), constant(I32, 23)), constant(I32, 127)), FLOATS),
)
"""e of a positive normal m·2ᵉ with 1 <= m < 2."""
mantissa = define(
    "mantissa",
    V,
    (V,),
    lambda b, x: b.bitcast(
        b.or_(b.and_(b.bitcast(x, INTS), constant(I32, 0x7FFFFF)), constant(I32, 127 << 23)), FLOATS
    ),
)
"""m of a positive normal m·2ᵉ with 1 <= m < 2."""
