"""The program behind a KV cache: a model's program with rows carried behind every causal attention, and the digests
that say what those rows depend on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from graphwright.array import Dim, DType, Spec, empty, float32, int32, int64
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Program, Value
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.kinds import INPUT, STATE, STORED
from graphwright.program.validate import refuse_broken

LENGTH = "cache.length"
CHOICE = RULES, KEYS, SEEN = "choice.rules", "choice.keys", "choice.seen"
"""Inputs by which the next ids are drawn: operands of the op `choose`."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A program with cache, made of one version of a model's program.

    Attributes:
        program: has states `cache.<attention path>.k` and `.v` and `cache.length`; feeds as the model's, and
            where it gives the last logits only also those of `CHOICE`, for the output `ids` [B].
        states: key -> shape and dtype of its cache states.
    """

    program: Program
    states: dict[str, Spec]


_derived: WeakKeyDictionary[Program, OrderedDict[tuple[int, int, bool], Derived]] = WeakKeyDictionary()
_KEPT = 8  # derived programs per model: a few capacities, each with and without all logits


def derived_for(p: Program, capacity: int, last_only: bool) -> Derived:
    """`derive`, once per version and capacity, so that caches of one size share their plans."""
    known, key = _derived.setdefault(p, OrderedDict()), (p.version, capacity, last_only)
    for old in [k for k in known if k[0] != p.version]:
        del known[old]
    if key not in known:
        known[key] = derive(p, capacity, last_only)
        if len(known) > _KEPT:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def derive(p: Program, capacity: Dim, last_only: bool) -> Derived:
    """The model's program with a cache behind every causal attention.

    Args:
        p: a model's program.
        capacity: rows of the cache; a name where they are as many as there are tokens.
        last_only: give logits of the last position only, so that the head runs on one row, and the ids drawn from them.
    Raises: UsageError for an attention that sees later keys or brings its own mask: it has no rows to carry.
    """
    states: dict[str, Spec] = {}

    def start(new: Program) -> None:
        states[LENGTH] = Spec((), int64)
        _state(new, LENGTH, states[LENGTH])

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value:
        attrs, path = _cacheable(p, node), p.path(node)
        length = new.value(LENGTH)
        held = []
        for name, rows in zip("kv", operands[1:3], strict=True):
            spec = new.spec(rows)
            key = f"cache.{path}.{name}"
            states[key] = Spec(("B", spec.shape[1], capacity, spec.shape[3]), spec.dtype)
            state = _state(new, key, states[key])
            grown = Value(new.add_op("kv_append", [state, rows, length], {}, f"{key}.grown"))
            new.add_write(state, grown, f"{key}.next")
            held.append(grown)
        extra = {**attrs, "optional": ("q_start",)}
        return Value(new.add_op("sdpa", [operands[0], *held, length], extra, path))

    derived, _ = rewrite(p, f"{p.name} (cached)", {"sdpa": attention}, start)
    ids = derived.value("ids")
    rows = Value(derived.add_op("size", [ids], {"axis": 1}, "cache.rows"))
    grown = Value(derived.add_op("add", [derived.value(LENGTH), rows], {}, "cache.longer"))
    derived.add_write(derived.value(LENGTH), grown, f"{LENGTH}.next")
    if last_only:
        _keep_last(derived)
        _choose(derived, capacity)
    return Derived(derived, states)


TABLE, LENGTHS = "cache.table", "cache.lengths"


def derive_paged(p: Program, blocks: int, block: int, last_only: bool, kind: DType | None = None) -> Derived:
    """As `derive`, with rows in blocks of a pool; takes `cache.table` int32 [B, blocks] and `cache.lengths` [B] too.

    These are inputs and no states: sequences own them, and may be in another batch in the next step. Their memory is
    the plan's, so a captured step reads them where they lie.

    Args:
        p: a model's program.
        blocks, block: blocks in the pool, and rows in one.
        last_only: as there.
        kind: dtype that rows are held in; that of the activations by default.
    """
    states: dict[str, Spec] = {}

    def start(new: Program) -> None:
        new.add_source(INPUT, TABLE, Spec(("B", blocks), int32), {})
        new.add_source(INPUT, LENGTHS, Spec(("B",), int32), {})

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value:
        attrs, path = _cacheable(p, node), p.path(node)
        places = (new.value(TABLE), new.value(LENGTHS))
        held = []
        for name, rows in zip("kv", operands[1:3], strict=True):
            spec = new.spec(rows)
            key = f"cache.{path}.{name}"
            states[key] = Spec((blocks, spec.shape[1], block, spec.shape[3]), kind or spec.dtype)
            state = _state(new, key, states[key])
            grown = Value(new.add_op("kv_append_paged", [state, rows, *places], {}, f"{key}.grown"))
            new.add_write(state, grown, f"{key}.next")
            held.append(grown)
        extra = {"scale": attrs["scale"], "window": attrs["window"]}
        return Value(new.add_op("sdpa_paged", [operands[0], *held, *places], extra, path))

    derived, _ = rewrite(p, f"{p.name} (paged)", {"sdpa": attention}, start)
    if last_only:
        _keep_last(derived)
        _choose(derived, blocks * block)
    return Derived(derived, states)


def _cacheable(p: Program, node: NodeId) -> Mapping[str, Any]:
    """Attributes of an attention whose rows can be carried. Raises: UsageError."""
    attrs = p.attrs(node)
    if not attrs["causal"] or attrs["optional"]:
        raise UsageError(
            "only plain causal attention can be cached",
            where=p.path(node),
            expected="causal=True, optional=()",
            got=f"causal={attrs['causal']}, optional={attrs['optional']}",
            fix="use model.logits",
        )
    return attrs


def _state(new: Program, key: str, spec: Spec) -> Value:
    new.weights.add(key, Variable(empty((0,) if spec.shape else (), spec.dtype), name=key))  # each cache brings its own
    return Value(new.add_source(STATE, key, spec, {"key": key}))


def _keep_last(p: Program) -> None:
    """Cut all but the last position off where `logits` is made: before a linear head, else behind it."""
    out = p.output("logits")
    head = p.op(out.node) == "linear"
    source = p.operands(out.node)[0] if head else out
    last = Value(p.add_op("last", [source], {"axis": 1}, p.free_name("cache.last")))
    if head:
        operands = [last, *p.operands(out.node)[1:]]
        last = Value(p.add_op("linear", operands, p.attrs(out.node), p.free_name("cache.logits")))
    p.set_outputs({"logits": last})


def _choose(p: Program, most: Dim) -> None:
    """Draw the next ids from the last logits; a text has at most so many different ones."""
    logits = p.output("logits")
    batch, _, vocab = p.spec(logits).shape
    pairs = min(most, vocab) if isinstance(vocab, int) and isinstance(most, int) else most
    specs = Spec((batch, 6), float32), Spec((batch, 4), int64), Spec((batch, pairs, 2), int32)
    how = [Value(p.add_source(INPUT, name, spec, {})) for name, spec in zip(CHOICE, specs, strict=True)]
    rows = Value(p.add_op("squeeze", [logits], {"axes": (1,)}, p.free_name("choice.logits")))
    if p.spec(rows).dtype is not float32:
        rows = Value(p.add_op("cast", [rows], {"dtype": float32}, p.free_name("choice.widened")))
    chosen = Value(p.add_op("choose", [rows, *how], {}, p.free_name("choice")))
    p.set_outputs({"logits": logits, "ids": chosen})


def fingerprints(p: Program) -> dict[str, str]:
    """Attention path -> BLAKE2b-128 over the structure and weights that its keys and values depend on.

    A weight that lies untouched in an opened file counts by reference, so that no payload is read. What a query does
    with the rows (scale, window) does not enter: it changes no row of its own layer.
    """
    refuse_broken(p)
    known: dict[NodeId, bytes] = {}
    needed = p.reachable([*p.outputs(), *p.writes()])
    attentions = [n for n in p.of_kind("sdpa") if n in needed]
    upstream = p.reachable([v for n in attentions for v in p.operands(n)[1:3]])
    for node in p.order():
        if node not in upstream:
            continue
        state = blake2b(p.node_digest(node), digest_size=16)
        if p.op(node) in STORED:
            key = p.key(node)
            state.update(p.weights.reference(key).encode())
        for before in p.operands(node):
            state.update(known[before.node])
        known[node] = state.digest()
    return {p.path(n): b"".join(known[v.node] + bytes([v.port]) for v in p.operands(n)[1:3]).hex() for n in attentions}
