"""The program behind a KV cache: a model's program with rows carried behind every causal attention, and the digests
that say what those rows depend on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from graphwright.array import Spec, bool_, empty, float32, int32, int64
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.ops import traits
from graphwright.plan import plan_for
from graphwright.program import Value
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.kinds import INPUT, STATE, STORED
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.array import Device, Dim, DType, NDArray
    from graphwright.graph import NodeId
    from graphwright.models.generation.sampling import Draw
    from graphwright.plan import Executable
    from graphwright.program import Program

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
    head = traits(p.op(out.node)).contracts == "out_in"
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


EXECUTOR = "auto"  # of the plans: the VM, which reads weights as they are stored, where it is built


class Fed:
    """A workspace with arrays of its own for the inputs: a step writes to them and allocates none.

    Attributes:
        space: the workspace.
        hosts: input -> its memory.
    """

    def __init__(self, space: Executable) -> None:
        self.space = space
        self._arrays = [empty(spec.sizes, spec.dtype) for spec in space.plan.inputs.values()]
        self.hosts = {name: a.to_numpy() for name, a in zip(space.plan.inputs, self._arrays, strict=True)}

    def ask(self, row: int, draw: Draw, position: int, seen: np.ndarray) -> None:
        """Have the id at a position drawn; `seen` as `Seen.pairs`."""
        hosts = self.hosts
        hosts[RULES][row], hosts[KEYS][row] = draw.rule.numbers(), draw.keys(position)
        most = hosts[SEEN].shape[1]
        hosts[SEEN][row, : len(seen)] = seen[:most]  # as many as there may be need no end

    def ask_nothing(self) -> None:
        """Have no ids drawn."""
        if KEYS in self.hosts:
            self.hosts[KEYS][:, 2] = -1

    def run(self) -> tuple[NDArray, np.ndarray | None]:
        """Logits for what lies in the inputs; and the ids drawn from them [B], where they are of the last rows only."""
        made = self.space.step(self._arrays)
        return made["logits"], made["ids"].to_numpy() if "ids" in made else None


class Steps:
    """Workspaces of a cache by (last row only, sequences, rows); those of an earlier state of the model are dropped.

    Args:
        program: of the model.
        derive: whether only the last row's logits are wanted -> the program behind the cache.
        device: where steps run.

    Attributes:
        spaces: those there are.
    """

    def __init__(self, program: Program, derive: Callable[[bool], Derived], device: Device) -> None:
        self.program, self.device, self._make = program, device, derive
        self.spaces: dict[tuple[bool, int, int], Fed] = {}
        self._derived: dict[bool, Derived] = {}
        self._version = program.version

    def derived(self, last_only: bool = True) -> Derived:
        """The program behind the cache, of the model as it is."""
        if self._version != self.program.version:
            self._version = self.program.version
            self._derived.clear()
            self.spaces.clear()
        if last_only not in self._derived:
            self._derived[last_only] = self._make(last_only)
        return self._derived[last_only]

    def space(self, last_only: bool, batch: int, rows: int, variables: Mapping[str, Variable]) -> Fed:
        """The workspace of a step, made at its first use over the carried states `variables`."""
        p, key = self.derived(last_only).program, (last_only, batch, rows)
        if key not in self.spaces:
            specs = {p.path(n): p.spec(n).bind({"B": batch, "T": rows}) for n in p.inputs()}
            plan = plan_for(p, specs, freeze=True, executor=EXECUTOR, device=self.device)
            self.spaces[key] = Fed(plan.new_executable(variables))
        return self.spaces[key]
