"""The table of ops. A class is the definition of an op; its attributes are the definition's fields.

`@op(name)` checks the fields of a class, inherited ones included, and registers them as a frozen `Op`. `traits` and
`why` of a class add to those of its bases. `tests/ops/test_ops_total.py` proves that no field is None without a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from graphwright.array.backend import torch_functions
from graphwright.array.layout import Layout
from graphwright.array.sizes import bound
from graphwright.array.spec import Spec, UnboundDim
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops import emit
from graphwright.ops.attributes import Attr, all_fit, names_sizes
from graphwright.ops.axes import broadcast
from graphwright.ops.onnx import same_operands

if TYPE_CHECKING:
    from graphwright.array.formulas.experts import Choice
    from graphwright.array.vm.encode.operands import VmForm
    from graphwright.ops.axes import AxesRule
    from graphwright.ops.emit import Emit, TorchModule
    from graphwright.ops.onnx import OnnxRow, WholeNode

Attrs = Mapping[str, Any]
Infer = Callable[..., "Spec | tuple[Spec, ...]"]
Definition = TypeVar("Definition", bound=type)
Row: Any = object
"""Base of definitions. Their functions are fields, read from the class, without `self`; hence `Any` for pyright."""


class UnknownOp(UsageError, KeyError):
    """No op of this name is registered."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations, bytes read and bytes written by one run of an op; and of a collective bytes sent.

    Bytes sent are those of one rank, the mean over the ranks if they differ.
    """

    flops: int
    read: int
    write: int
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Saves:
    """Indices of the operands and results that a vjp reads; only these are kept alive for it."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    every: bool = False  # all operands are read, of an op that takes any number

    def reads(self, count: int) -> Sequence[int]:
        """Return the indices of those of `count` operands that the vjp reads."""
        return range(count) if self.every else [i for i in self.inputs if i < count]


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an op, which the planner, the passes and the tools query instead of its name."""

    inplace: tuple[tuple[int, int], ...] = ()  # pairs (result, operand): the result may overwrite that operand's memory
    passes: tuple[tuple[int, int], ...] = ()  # pairs (result, operand): the result is that operand, unchanged
    # indices of operands that must be row-major (negative from the end); operands that are not are copied first
    contiguous: tuple[int, ...] = ()
    nary: bool = False  # takes any number of operands, summed in port order: a junction
    # casting class. Under autocast, `low` casts operands to the 16-bit dtype and `f32` to float32; `promote`, and `f32`
    # otherwise, casts them to their common dtype, `inner` to the first operand's dtype; `keep` casts nothing
    amp: str = "keep"
    fixed: tuple[int, ...] = ()  # indices of operands that are never cast: ids, masks, conditions
    elementwise: bool = False  # each element of the result depends on the operands' elements at the same index alone
    update: bool = False  # advances loop-carried state, or talks to other ranks; never folded, merged or run twice
    # talks to the other ranks: a plan runs all such ops of its program, in the order of the program on every rank
    collective: bool = False
    point_to_point: bool = False  # a collective of two ranks, which run different ops
    # starts: begins something that continues while other instructions run; a plan runs it as soon as its operands are
    # there. waits: waits for it; a plan runs it right before the first reader of its results
    starts: bool = False
    waits: bool = False
    # the results are new values of the last operands, one for one, and may overwrite them; there may be any number of
    # them, and all operands must be row-major
    updates_states: bool = False
    # has a gradient but no vjp: where a gradient may be needed, the expansion runs instead; without an expansion,
    # asking for the gradient raises instead of counting as zero
    opaque: bool = False
    convert: bool = False  # the result is the operand's values, in other memory or in another dtype
    # pairs (operand, value): where that operand of two is this value (the sign of zero counts), the result is the
    # other one, bit for bit
    identity: tuple[tuple[int, float], ...] = ()
    sums: bool = False  # the result is the sum of the two operands
    multiplies: bool = False  # the result is the product of the two operands, element by element
    promotes: bool = False  # integers and bools of tensors are cast to float32, as torch does for functions of floats
    divides: bool = False  # integers of two dtypes are cast to float32 each, as their common dtype may lose a sign
    # common-subexpression elimination keeps values computed from the result and from the operand apart
    barrier: bool = False
    # index of an optional operand that is added to the result, one entry per entry of the last axis (of axis 1 for a
    # convolution)
    addend: int | None = None
    backward_of: str = ""  # the op whose gradient this op computes; "" for every other op
    training_only: bool = False  # acts in training alone: for inference, its readers read operand 0
    # the op that replaces it for inference, with the same operands and those attributes that the op has
    inference: str = ""
    activation: bool = False  # a nonlinearity that networks apply to the result of a layer
    rectifies: bool = False  # 0 with gradient 0 wherever the operand is below 0
    loss: bool = False  # compares predictions with targets
    normalises: bool = False  # divides by a statistic of its own operand
    excludes_minus_infinity: bool = False  # an entry of -∞ gives 0 and has no effect on the other entries
    scales_rows: bool = False  # scales or rotates each row of operand 0 along the last axis; does not mix rows
    attention: bool = False  # reads queries, keys and values (operands 0, 1, 2)
    table: int | None = None  # index of the operand that is the table of an attention pattern; None for other ops
    routes: bool = False  # groups tokens by the experts that operand 0 chooses
    # sums the results of experts, which are groups of operands, by weights (operand 4); operands 1 to 3 are from an op
    # that routes
    mixture: bool = False
    # attention of heads, which are groups of operands (q, k, v, o), each on its own tokens: those of its run, operands
    # 1 to 3 from an op that routes; operand 5 has the positions
    routed_heads: bool = False
    # layout of operand 1, a weight that operand 0 is contracted with: `out_in` for x·Wᵀ, `in_out` for x·W, `window`
    # for [out, in, kernel...]; "" for ops that contract nothing
    contracts: str = ""
    matrix: int | None = None  # index of the operand that is a trained matrix [out, in]; None for ops without one
    lookup: bool = False  # takes rows of operand 0 by the ids of operand 1
    channels_first: bool = False  # the result has its channels on axis 1
    casts: bool = False  # the result is the operand's values in another dtype
    slices: bool = False  # takes entries of one axis from `start` on, `step` apart
    pads: bool = False  # writes the operand's entries into zeros along one axis: the transpose of a slice
    # splits_axis, joins_axis: the same entries, with one axis split into several or several joined into one
    splits_axis: bool = False
    joins_axis: bool = False
    rearranges: bool = False  # the operand's entries, each once, in another shape or order
    gates: bool = False  # computes the values of gates
    keeps_zero: bool = False  # zeros in all operands give zeros
    annihilated: bool = False  # the result is zero wherever one of the operands is zero
    # indices of operands in which the op is linear while the others, trained weights, are constant
    linear_in: tuple[int, ...] = ()
    # the op is linear in all its operands taken together: a sum, a difference, a concatenation
    jointly_linear: bool = False
    mixes: str = ""  # name of the attribute with the axes along which a linear op mixes entries; "" for none
    valueless: bool = False  # the result depends on shapes, attributes and keys alone, never on the values of operand 0
    # the result depends on the largest position in the batch, so a later token changes earlier ones
    looks_ahead: bool = False
    float32_constants: bool = False  # reads its constants in float32 whatever dtype the model computes in
    batch_statistics: bool = False  # subtracts a mean over the batch, so that a shift of operand 0 has no effect
    # the op that it applies to operand 0 itself: a loss to its predictions, a gated unit to its gate; "" for none
    applies: str = ""
    flat: bool = False  # the gradient is zero wherever it exists, so that nothing upstream learns
    # the factor of the gradient: a number, or the name of the attribute; None for a true gradient
    gradient_scale: str | float | None = None


class Algorithms(NamedTuple):
    """The ways to compute an op.

    Attributes:
        option: the option of `program.compile` that forces one.
        names: the values of the attribute `algorithm` besides "auto".
        choose: specs of the operands and attributes -> the algorithm and the reason; it depends on nothing else.
        expands: those that are the op's expansion.
    """

    option: str
    names: Sequence[str]
    choose: Callable[[Sequence[Spec], Attrs], Choice]
    expands: Sequence[str]

    def forced(self, attrs: Attrs, name: str) -> Attrs:
        """Return attributes with the algorithm `name`, where they leave it open and the op has it."""
        return {**attrs, "algorithm": name} if attrs["algorithm"] == "auto" and name in self.names else attrs


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """The definition of an op: one entry of the table."""

    name: str  # of the op and of its kernel in a backend
    doc: str  # formula and meaning
    arity: int | tuple[int, int | None]  # number of operands, or (least, most); most None for any number
    attrs: Attrs  # attribute names with their defaults; `...` marks a required one
    schema: Mapping[str, Attr]  # attribute names with types and defaults: the field `attrs` of the definition
    all_fit: Callable[..., bool]  # attributes as keywords -> whether each value has its type; made from the schema
    sized: Sequence[str]  # names of the attributes that may be computed from named sizes; made from the schema
    added: Sequence[str]  # names of the attributes that older files lack; made from the schema
    infer: Infer  # specs of the operands and the attributes -> spec or specs of the results
    # layout of the operand and attributes -> layout of the result over the same memory, or None when it must copy;
    # the field is None for ops that compute
    view: Callable[[Layout, Attrs], Layout | None] | None
    # gradients of the results -> gradients of the operands, by tensor operations; the last may be left out for None
    vjp: Callable[..., tuple] | None
    saves: Saves  # operands and results that the vjp reads
    cost: Callable[[Sequence[Spec], Sequence[Spec], Attrs], Cost]  # specs of operands and results -> Cost
    traits: Traits  # see Traits
    sample: Callable[..., Any]  # seeded generator -> operands (numpy) and attributes for the tests
    # operands and attributes -> the same results by simpler ops; None for a primitive
    expand: Callable[[Sequence[Any], Attrs], Any] | None = None
    axes: AxesRule | None = None  # how dimensions of operands and results are tied together; see `ops.axes`
    # operands' source texts and attributes -> torch source text, or None for a use without one. Without the field,
    # generated code has the expansion
    emit: Emit | None = None
    torch_module: TorchModule | None = None  # the op as a call of a module in generated code
    results: tuple[str, ...] = ()  # names of the results, for ops with several: `program.value("sort.indices")`
    # one use of the op -> ONNX nodes of opset 20; see `ops.onnx`. Without the field, exports have the expansion
    onnx: OnnxRow | None = None
    onnx_23: WholeNode | None = None  # a single ONNX node from opset 23 on, and when it computes the same
    # attributes -> (first operand, width) of operand groups, such as the matrices of one expert, for an op that takes
    # any number of groups; a removed group leaves its ports empty
    groups: Callable[[Attrs], tuple[int, int]] | None = None
    # name of the torch function that is the CPU kernel: all operands, then `out=`. None where `array/cpu` has a kernel
    # of its own, or none
    aten: str | None = None
    # how the VM runs the op; see `array.vm.encode`. None where only another kernel, or the expansion, can
    vm: VmForm | None = None
    # specs of the operands and attributes -> indices of the matrices that the VM can also read as bfloat16
    narrow: Callable[[Sequence[Spec], Attrs], Sequence[int]] | None = None
    algorithms: Algorithms | None = None  # of an op whose attribute `algorithm` names one, or is "auto"
    operands: tuple[str, ...] = ()  # names of the operands in generated functions
    # method, functional: names of the generated Tensor method and `nn.functional` function
    method: str | None = None
    functional: str | None = None
    why: Mapping[str, str] = field(default_factory=dict)  # the reason for each field that is None

    def inplace(self, ins: int, outs: int) -> Sequence[tuple[int, int]]:
        """Return index pairs (result, operand): the result may overwrite the operand. `ins`, `outs`: how many exist."""
        return [(o, ins - outs + o) for o in range(outs)] if self.traits.updates_states else self.traits.inplace

    def overwrites(self, out: int, operand: int, ins: int, outs: int) -> bool:
        """Return True if result `out` of `outs` results may overwrite operand `operand` of `ins` operands."""
        return operand == ins - outs + out if self.traits.updates_states else (out, operand) in self.traits.inplace

    def row_major(self, ins: int) -> Sequence[int]:
        """Return the indices (negative: from the end) of those of `ins` operands that must be row-major."""
        return range(ins) if self.traits.updates_states else self.traits.contiguous

    def stops_gradient(self, attrs: Attrs) -> bool:
        """Return True if no gradient passes through the op with these attributes."""
        factor = self.traits.gradient_scale
        return factor is not None and (attrs[factor] if isinstance(factor, str) else factor) == 0

    def passes_gradient(self, attrs: Attrs) -> bool:
        """Return True if a gradient other than 0 can pass through the op with these attributes."""
        differentiable = self.vjp is not None or self.traits.opaque
        return differentiable and not self.traits.flat and not self.stops_gradient(attrs)

    def onnx_row(self, ins: Sequence[Spec], attrs: Attrs, opset: int) -> OnnxRow | None:
        """Return the function that adds this use of the op to an ONNX graph, or None to add its expansion instead."""
        whole = self.onnx_23 if opset >= 23 else None
        return whole.row if whole is not None and whole.same(ins, attrs) else self.onnx

    def complete(self, attrs: Attrs, where: str | None = None) -> dict[str, Any]:
        """Fill in default attributes, and convert values to their types.

        Raises: UsageError if an attribute is unknown or missing, or its value is invalid; DTypeError.
        """
        if not attrs and not self.attrs:
            return {}
        merged = {**self.attrs, **attrs}
        if len(merged) != len(self.attrs):
            self._check_names(attrs, where)
        if not self.all_fit(**merged):
            for name, kind in self.schema.items():
                if merged[name] is ...:
                    self._check_names(merged, where)
                merged[name] = kind.normal(merged[name], f"attribute {name!r} of op {self.name!r}", where)
        return merged

    def names_sizes(self, attrs: Attrs) -> bool:
        """Return True if an attribute depends on named sizes."""
        values = (attrs[name] for name in self.sized)
        return any(type(v) is str or (type(v) is tuple and str in map(type, v)) for v in values)

    def bind_sizes(self, attrs: Attrs, dims: Mapping[str, int]) -> Attrs:
        """Replace named sizes in attributes, such as the shape of a reshape; return `attrs` itself if there are none.

        Raises: ShapeError for a size below 0.
        """
        if not self.sized or not self.names_sizes(attrs):
            return attrs
        values = {name: attrs[name] for name in self.sized}
        return {**attrs, **{name: tuple([bound(d, dims) for d in value]) if type(value) is tuple else bound(value, dims)
                            for name, value in values.items()}}  # fmt: skip

    def bind_all_sizes(self, attrs: Attrs, dims: Mapping[str, int], where: str | None = None) -> Attrs:
        """Replace named sizes in attributes as `bind_sizes`. Raises: UnboundDim if one has no value; ShapeError."""
        bound = self.bind_sizes(attrs, dims)
        if bound is not attrs and self.names_sizes(bound):
            got = ", ".join(f"{name} {bound[name]}" for name in self.sized)
            what, expected = "no input of the program has this named size", ", ".join(dims) or "static sizes"
            raise UnboundDim(what, where=where, expected=expected, got=got)
        return bound

    def check_attrs(self, attrs: Attrs, where: str | None = None) -> None:
        """Raise UsageError unless there is a value of its exact type for each attribute, as `complete` returns them."""
        if attrs.keys() != self.attrs.keys():
            self._check_names({**dict.fromkeys(self.attrs, ...), **attrs}, where)
        for name, kind in self.schema.items():
            if not kind.fits(attrs[name]):
                raise kind.error(attrs[name], f"attribute {name!r} of op {self.name!r}", where)

    def _check_names(self, attrs: Attrs, where: str | None) -> None:
        """Raise UsageError if an attribute is unknown, or is missing: it has the value `...`."""
        if unknown := ", ".join(repr(a)[:80] for a in attrs if a not in self.attrs):
            known = ", ".join(self.attrs) or "none"
            raise UsageError(f"op {self.name!r} got an unknown attribute", where=where, expected=known, got=unknown)
        if missing := ", ".join(name for name, value in attrs.items() if value is ...):
            got = ", ".join(name for name, value in attrs.items() if value is not ...) or "none"
            raise UsageError(f"op {self.name!r} lacks a required attribute", where=where, expected=missing, got=got)

    def specs(self, ins: Sequence[Spec], attrs: Attrs, where: str | None = None) -> tuple[Spec, ...]:
        """Infer the specs of the results.

        Raises: ShapeError or DTypeError naming op and operand; UsageError for a wrong number of operands.
        """
        low, high = self.arity if isinstance(self.arity, tuple) else (self.arity, self.arity)
        if len(ins) < low or (high is not None and len(ins) > high):
            wanted = f"{low}" if high == low else f"{low} to {'any number' if high is None else high}"
            what = f"op {self.name!r} got a wrong number of operands"
            raise UsageError(what, where=where, expected=wanted, got=len(ins))
        try:
            result = self.infer(*ins, **attrs)
        except GraphwrightError as error:
            at = self.name if where is None else f"{where} ({self.name})"
            error.where = at if error.where is None else f"{at}, {error.where}"
            if error.got is None:
                error.got = ", ".join(map(repr, ins))
            raise
        return (result,) if isinstance(result, Spec) else tuple(result)


OPS: dict[str, Op] = {}

_FALLBACKS = {"emit": "expand", "onnx": "expand"}
"""Field -> the field that replaces it if it is None."""
_REASONED = ("vjp", "sample", "axes", "emit", "onnx")
"""Fields that may be None only with a reason, or with their fallback."""


def op(name: str) -> Callable[[Definition], Definition]:
    """Register a class as the definition of an op. Raises: UsageError if the name is taken or a field is missing."""

    def enter(row: Definition) -> Definition:
        if name in OPS:
            raise UsageError("an op of this name is already registered", where=name)
        if not (row.__doc__ or "").strip():
            raise UsageError("the definition of this op has no docstring", where=name, fix="state its formula")
        given = {key: getattr(row, key) for key in Op.__slots__ if hasattr(row, key)}
        given["why"] = why = _merged(row, "why")
        given["traits"] = traits = Traits(**_merged(row, "traits"))
        given["schema"] = schema = given.get("attrs", {})
        if untyped := [key for key, value in schema.items() if not isinstance(value, Attr)]:
            raise UsageError("an attribute of this op has no type", where=name, got=", ".join(untyped),
                             fix='attrs = {"slope": Attr(float, 0.01)}')  # fmt: skip
        given["all_fit"] = all_fit(schema)
        given["sized"] = tuple(key for key, value in schema.items() if names_sizes(value.kind))
        given["added"] = tuple(key for key, value in schema.items() if value.added)
        given["attrs"] = {key: value.default for key, value in schema.items()}
        given.setdefault("view", None)
        given.setdefault("saves", Saves())
        given.setdefault("cost", elementwise_cost)
        if traits.elementwise:
            given.setdefault("axes", broadcast)
        for key, compiled in (("emit", emit.template), ("onnx", same_operands)):
            if isinstance(given.get(key), str):
                given[key] = compiled(given[key])
        module = given.get("torch_module") is not None  # which is source text too
        reasoned = [c for c in _REASONED if not (c == "emit" and module)]
        absent = [c for c in ("arity", "infer", "vjp", "sample") if c not in given]
        absent += [
            c
            for c in reasoned
            if c not in absent and given.get(c) is None and c not in why and given.get(_FALLBACKS.get(c, "")) is None
        ]
        if absent:
            raise UsageError("the definition of this op lacks fields", where=name, got=f"without {', '.join(absent)}",
                             fix="set each, or set None and give a reason in `why`")  # fmt: skip
        if given.get("aten"):
            torch_functions[name] = given["aten"]
        OPS[name] = Op(name=name, doc=row.__doc__ or "", **given)
        return row

    return enter


def _merged(row: type, name: str) -> dict[str, Any]:
    """Return the merged field (`traits` or `why`) of a class and its bases; a derived class overrides its bases."""
    found: dict[str, Any] = {}
    for base in reversed(row.__mro__):
        given = vars(base).get(name, {})
        if isinstance(given, Traits):
            given = {f.name: value for f in fields(Traits) if (value := getattr(given, f.name)) != f.default}
        found.update(given)
    return found


def get(name: str) -> Op:
    """Return the definition of an op. Raises: UnknownOp, which lists similar names."""
    found = OPS.get(name) if isinstance(name, str) else None
    if found is None:
        near = get_close_matches(str(name), OPS)
        raise UnknownOp("no op of this name is registered", where=name, expected=", ".join(near) or ", ".join(OPS))
    return found


def traits(name: str) -> Traits:
    """Return the traits of an op; default traits for nodes that are not ops (inputs, params, states, ...)."""
    row = OPS.get(name)
    return NO_TRAITS if row is None else row.traits


def result_names(name: str, count: int) -> tuple[str, ...]:
    """Return the names of the `count` results of an op or other node: those of its definition, else their numbers."""
    row = OPS.get(name)
    return row.results if row is not None and len(row.results) == count else tuple(map(str, range(count)))


NO_TRAITS = Traits()


def elementwise_cost(ins: Sequence[Spec], outs: Sequence[Spec], attrs: Attrs) -> Cost:
    """Return the cost of one operation per output element."""
    return Cost(sum(o.size for o in outs), sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))


def moving_cost(ins: Sequence[Spec], outs: Sequence[Spec], attrs: Attrs) -> Cost:
    """Return the cost of moving data without arithmetic: all operands are read, all results written."""
    return Cost(0, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))


def free_cost(ins: Sequence[Spec], outs: Sequence[Spec], attrs: Attrs) -> Cost:
    """Return a cost of 0: a view neither computes nor moves data."""
    return Cost(0, 0, 0)
