"""Programs with a KV cache: derived from a model's program, with cache states at every causal attention.

Fingerprints identify the structure and weights that cached keys and values depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Device, Dim, DType, NDArray, Spec, bool_, empty, float32, int32, int64
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.models.generation.entries import (
    RUNS,
    attentions,
    check_cacheable,
    check_positions,
    entry_operands,
    query_operands,
    sources,
)
from graphwright.models.generation.padding import hide_keys
from graphwright.models.generation.sampling import SamplingRequest
from graphwright.ops import traits
from graphwright.plan.compile import plan_for
from graphwright.plan.options import CompileOptions
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.kinds import INPUT, PATTERN, STATE, STORED
from graphwright.program.op_graph import Value
from graphwright.program.patterns import pattern_at
from graphwright.program.primitives import add_assign, add_op, add_source, set_outputs
from graphwright.program.validate import refuse_broken
from graphwright.program.weights import add_weight

if TYPE_CHECKING:
    from graphwright.plan.running.executable import Executable
    from graphwright.program.program import Program

LENGTH = "cache.length"
CHOICE = RULES, KEYS, SEEN = "choice.rules", "choice.keys", "choice.seen"
"""Inputs for sampling the next ids: operands of the op `sample_token`."""
_POSITION = 2  # column of KEYS


@dataclass(frozen=True, slots=True)
class Derived:
    """A program with a KV cache, derived from one version of a model's program; `states` has the specs of its states.

    These are `cache.<attention path>.k` and `.v` and, unless the cache is paged, `cache.length`. A program that returns
    only the last logits also has the inputs `choice.*`, sampling requests, and an output `ids` [B], the samples.
    """

    program: Program
    states: dict[str, Spec]


_MEMO = 8  # derived programs per model: a few capacities, each with and without all logits


def derived_for(p: Program, capacity: int, last_only: bool) -> Derived:
    """Return the program with a cache of `capacity` entries; all caches of this size share it, and so its plans."""
    known: dict[tuple[int, int, bool], Derived] = p.derived.setdefault("cached", {})
    key = (p.plan_version, capacity, last_only)
    for old in [k for k in known if k[0] != p.plan_version]:
        del known[old]
    known[key] = known.pop(key, None) or derive(p, capacity, last_only)  # the last used one at the end
    if len(known) > _MEMO:
        del known[next(iter(known))]
    return known[key]


def derive(p: Program, capacity: Dim, last_only: bool) -> Derived:
    """Derive the model's program with a cache of `capacity` entries at every causal attention.

    `capacity` may be a named size, which then counts cached and new tokens. With `last_only` the program returns only
    the logits of the last position, so that the head runs on one row, and token ids sampled from them. Raises:
    UsageError for an attention that is not causal or has a mask, because its keys cannot be cached.
    """
    check_positions(p)
    states = {LENGTH: Spec((), int64)}

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value:
        check_cacheable(p, node)
        attrs, path, length = p.attrs(node), p.path(node), new.value(LENGTH)
        added = _entries(new, p, node, operands)
        entries = [Spec(("B", s.shape[1], capacity, s.shape[3]), s.dtype) for s in map(new.spec, added)]
        cached = _append(new, path, states, entries, "kv_append", added, length)
        if traits(p.op(node)).routed_heads:
            return _routed(new, path, attrs, operands, cached, _one_block_each(new, path, operands[0], length))
        extra = {**attrs, "optional": (*attrs["optional"], "q_start")}
        return Value(add_op(new, p.op(node), [operands[0], *cached, *operands[3:], length], extra, path))

    def start(new: Program) -> None:
        _add_state(new, LENGTH, states[LENGTH])

    derived, _ = rewrite(p, f"{p.name} (cached)", attention, start)
    rows = Value(add_op(derived, "size", [derived.value("ids")], {"axis": 1}, "cache.rows"))
    grown = Value(add_op(derived, "add", [derived.value(LENGTH), rows], {}, "cache.longer"))
    add_assign(derived, derived.value(LENGTH), grown, f"{LENGTH}.next")
    if last_only:
        _keep_last(derived, capacity)
    return Derived(derived, states)


TABLE, LENGTHS = "cache.table", "cache.lengths"


def derive_paged(p: Program, blocks: int, block: int, last_only: bool, kind: DType | None = None) -> Derived:
    """Derive the model's program with a paged cache: a pool of `blocks` blocks of `block` entries per attention.

    The inputs `cache.table` int32 [B, blocks] and `cache.lengths` int32 [B] give the blocks and length of each
    sequence. They are not states, because each step may batch other sequences. The plan owns their memory, so that a
    captured step reads them at fixed addresses. With `last_only` the program returns only the logits of the last
    position, and ids sampled from them. `kind` is the dtype of the entries, by default that of the activations.
    """
    check_positions(p)
    states: dict[str, Spec] = {}

    def start(new: Program) -> None:
        add_source(new, INPUT, TABLE, Spec(("B", blocks), int32), {})
        add_source(new, INPUT, LENGTHS, Spec(("B",), int32), {})

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value:
        check_cacheable(p, node)
        attrs, path, table = p.attrs(node), p.path(node), (new.value(TABLE), new.value(LENGTHS))
        added = _entries(new, p, node, operands)
        entries = [Spec((blocks, s.shape[1], block, s.shape[3]), kind or s.dtype) for s in map(new.spec, added)]
        cached = _append(new, path, states, entries, "kv_append_paged", added, *table)
        if traits(p.op(node)).routed_heads:
            return _routed(new, path, attrs, operands, cached, table)
        if traits(p.op(node)).table is not None:
            raise UsageError("attention over a pattern cannot run over a paged cache", where=path,
                             fix='model.new_cache(tokens, kind="static")')  # fmt: skip
        extra = {name: attrs[name] for name in ("scale", "window", "softcap")}
        return Value(add_op(new, "sdpa_paged", [operands[0], *cached, *table, *operands[3:]], extra, path))

    derived, _ = rewrite(p, f"{p.name} (paged)", attention, start)
    if last_only:
        _keep_last(derived, blocks * block)
    return Derived(derived, states)


def _add_state(new: Program, key: str, spec: Spec) -> Value:
    add_weight(
        new.weights, key, Variable(empty((0,) if spec.shape else (), spec.dtype), name=key)
    )  # caches bind their own
    return Value(add_source(new, STATE, key, spec, {"key": key}))


def _append(
    new: Program, path: str, states: dict[str, Spec], specs: list[Spec], op: str, added: list[Value], *at: Value
) -> list[Value]:
    """Add states for the keys and values of the attention `path`, and ops that append `added`; return their results.

    `specs` are the specs of the two states, and `at` are the other operands of the op: lengths and table of blocks.
    """
    found = []
    for name, spec, value in zip("kv", specs, added, strict=True):
        key = f"cache.{path}.{name}"
        states[key] = spec
        state = _add_state(new, key, spec)
        found.append(Value(add_op(new, op, [state, value, *at], {}, f"{key}.grown")))
        add_assign(new, state, found[-1], f"{key}.next")
    return found


def _entries(new: Program, p: Program, node: NodeId, operands: list[Value]) -> list[Value]:
    """Return the two arrays that an attention of `p` adds to a cache; `operands` are those of its copy in `new`."""
    if traits(p.op(node)).attention:
        return operands[1:3]
    name = f"cache.{p.path(node)}.entries"
    made = add_op(new, "routed_entries", entry_operands(operands), {"theta": p.attrs(node)["theta"]}, name)
    return [Value(made, 0), Value(made, 1)]


def _routed(
    new: Program, path: str, attrs: Mapping[str, Any], operands: list[Value], cached: list[Value],
    table: tuple[Value, Value],
) -> Value:  # fmt: skip
    """Add the attention of routed heads over the cache; `table` are the blocks and lengths of the sequences."""
    before, heads = query_operands(operands)
    return Value(
        add_op(new, "routed_attention_cached", [*before, *cached, *table, *heads], {"theta": attrs["theta"]}, path)
    )


def _one_block_each(new: Program, path: str, x: Value, length: Value) -> tuple[Value, Value]:
    """Return table and lengths of a cache [B, 1, capacity, D] for x [B, ...]; sequence b is block b."""
    name = f"cache.{path}"

    def cast(value: Value, label: str) -> Value:
        return Value(add_op(new, "cast", [value], {"dtype": int32}, f"{name}.{label}"))

    rows = Value(add_op(new, "iota", [x], {"axis": 0}, f"{name}.rows"))
    lengths = Value(add_op(new, "full_like", [cast(rows, "row")], {"value": 0}, f"{name}.start"))
    lengths = Value(add_op(new, "add", [lengths, cast(length, "length")], {}, f"{name}.lengths"))
    table = Value(add_op(new, "unsqueeze", [cast(rows, "blocks")], {"axes": (1,)}, f"{name}.table"))
    return table, lengths


def _keep_last(p: Program, most: Dim) -> None:
    """Make the program return only the logits of the last position, and ids sampled from them.

    The slice comes before the LM head if the head is linear, else after it. A text has at most `most` distinct ids.
    """
    head = _head(p)
    source = p.operands(head[0].node)[0] if head else p.output("logits")
    logits = Value(add_op(p, "last", [source], {"axis": 1}, p.free_name("cache.last")))
    for before, op in zip([source, *head], head, strict=False):
        operands = [logits if v == before else v for v in p.operands(op.node)]
        logits = Value(add_op(p, p.op(op.node), operands, p.attrs(op.node), p.free_name("cache.logits")))
    batch, _, vocab = p.spec(logits).shape
    pairs = min(most, vocab) if isinstance(vocab, int) and isinstance(most, int) else most
    specs = Spec((batch, 6), float32), Spec((batch, 4), int64), Spec((batch, pairs, 2), int32)
    how = [Value(add_source(p, INPUT, name, spec, {})) for name, spec in zip(CHOICE, specs, strict=True)]
    rows = Value(add_op(p, "squeeze", [logits], {"axes": (1,)}, p.free_name("choice.logits")))
    if p.spec(rows).dtype is not float32:
        rows = Value(add_op(p, "cast", [rows], {"dtype": float32}, p.free_name("choice.widened")))
    chosen = Value(add_op(p, "sample_token", [rows, *how], {}, p.free_name("choice")))
    set_outputs(p, {"logits": logits, "ids": chosen})


def _head(p: Program) -> list[Value]:
    """Return the results of the LM head, if it is linear, and of what follows it for each number, such as a softcap."""
    found = [p.output("logits")]
    while traits(p.op(found[0].node)).elementwise:
        varying = [v for v in p.operands(found[0].node) if p.spec(v).shape]
        if len(varying) != 1:
            return []
        found.insert(0, varying[0])
    return found if traits(p.op(found[0].node)).contracts == "out_in" else []


def fingerprints(p: Program) -> dict[str, str]:
    """Map the path of each attention to a BLAKE2b-128 of the structure and weights that its keys and values depend on.

    An unchanged weight of an opened file is identified by reference, so its payload is not read. The scale and window
    of an attention are left out, because they do not affect its own keys and values.
    """
    refuse_broken(p)
    known: dict[NodeId, bytes] = {}
    found = attentions(p)
    upstream = p.reachable([v for n in found for v in sources(p, n)])
    for node in p.order():
        if node not in upstream:
            continue
        state = blake2b(p.node_digest(node), digest_size=16)
        if p.op(node) in STORED and p.op(node) != PATTERN:  # see `PatternRows`
            key = p.key(node)
            state.update(p.weights.reference(key).encode())
        for before in p.operands(node):
            state.update(known[before.node])
        known[node] = state.digest()

    def digest(node: NodeId) -> str:
        made = b"".join(known[v.node] + bytes([v.port]) for v in sources(p, node))
        if traits(p.op(node)).attention:
            return made.hex()
        return blake2b(made + repr(dict(p.attrs(node))).encode(), digest_size=32).hexdigest()

    return {p.path(n): digest(n) for n in found}


def with_padding(p: Program) -> Program:
    """Return a copy of the program with an input `mask` [B, T]; attention ops ignore keys where it is false.

    Attention over patterns needs the padding after the tokens, see `tokens_first`. Routed heads get the tokens alone
    where it is true. Raises: UsageError if their runs do not come from an op that routes.
    """

    def start(new: Program) -> None:
        add_source(new, INPUT, "mask", Spec(("B", "T"), bool_), {})

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value | None:
        attrs = p.attrs(node)
        if traits(p.op(node)).routed_heads:
            runs = _runs_of_valid(new, p.path(node), operands)
            return Value(add_op(new, p.op(node), [operands[0], *runs, *operands[RUNS.stop :]], attrs, p.path(node)))
        if "key_mask" in attrs["optional"]:
            return None  # it already has a mask
        if (table := traits(p.op(node)).table) is not None:
            pattern = pattern_at(p, p.operands(node)[table].node)
            if pattern is not None and pattern.causal:
                return None  # no token sees the padding after it

            def add(op: str, operands: list[Value], label: str, **attrs: Any) -> Value:
                return Value(add_op(new, op, operands, attrs, f"{p.path(node)}.{label}"))

            mask = new.value("mask")
            q, k = hide_keys(new, add, operands[0], operands[1], mask, attrs["scale"], attrs["softcap"])
            return Value(add_op(new, p.op(node), [q, k, *operands[2:]], attrs, p.path(node)))
        extra = {**attrs, "optional": ("key_mask", *attrs["optional"])}
        return Value(add_op(new, "sdpa", [*operands[:3], new.value("mask"), *operands[3:]], extra, p.path(node)))

    return rewrite(p, f"{p.name} (padded)", attention, start)[0]


def _runs_of_valid(new: Program, path: str, operands: list[Value]) -> list[Value]:
    """Return the runs of a routed attention without the tokens where the input `mask` is false."""
    dispatch = operands[RUNS.start].node
    if not traits(new.op(dispatch)).routes:
        fix = "run without a mask, on sequences of one length"
        raise UsageError("padding of routed heads needs the choice of their tokens", where=path, fix=fix)
    (choice,) = new.operands(dispatch)

    def add(op: str, ins: list[Value], label: str, **attrs: Any) -> Value:
        return Value(add_op(new, op, ins, attrs, f"{path}.valid.{label}"))

    rows = add("unsqueeze", [add("flatten", [new.value("mask")], "flat", start=0, end=1)], "rows", axes=(1,))
    if new.spec(choice).dtype is bool_:
        kept = add("logical_and", [choice, rows], "choice")
    else:
        kept = add("where", [rows, choice, add("full_like", [choice], "none", value=-1)], "choice")
    runs = add_op(new, new.op(dispatch), [kept], new.attrs(dispatch), f"{path}.valid.dispatch")
    return [Value(runs, i) for i in range(RUNS.stop - RUNS.start)]


EXECUTOR = "auto"  # of the plans: the VM if it is available, which reads weights in their stored dtype

StepResult = tuple[NDArray, np.ndarray | None]
"""Logits, and sampled ids [B] if only the last logits are returned."""


class BoundStep:
    """An executable with preallocated input arrays, so that a step allocates nothing.

    `hosts` maps the name of an input to a numpy view of its array; callers write the inputs there before `run`.
    `waiting` is True if the step runs on ATen only because the VM is not built yet; `samples` if it can sample ids.
    """

    def __init__(self, space: Executable) -> None:
        self.space, self.waiting = space, space.plan.buffer_layout.tables.lowerings.waiting
        self.samples = "ids" in space.plan.outputs
        space.kernels.refresh()  # now, so that the first token takes as long as the others
        self._arrays = [empty(spec.sizes, spec.dtype) for spec in space.plan.inputs.values()]
        self.hosts = {name: a.to_numpy() for name, a in zip(space.plan.inputs, self._arrays, strict=True)}
        for host in self.hosts.values():
            host.fill(0)  # as ranks of a divided model compare them, also rows that ask for nothing
        self._asked: dict[int, SamplingRequest] = {}  # batch row -> request whose rules its row of the input has

    def request(self, row: int, request: SamplingRequest, position: int, counts: np.ndarray) -> None:
        """Request in batch row `row` a sample of the id at `position`; `counts` has rows (id, count in the output)."""
        if not self.samples:
            return
        hosts = self.hosts
        if self._asked.get(row) is not request:
            hosts[RULES][row], hosts[KEYS][row] = request.rule.numbers(), request.keys(position)
            self._asked[row] = request
        hosts[KEYS][row, _POSITION] = request.position(position)
        most = hosts[SEEN].shape[1]
        hosts[SEEN][row, : len(counts)] = counts[:most]  # a full row needs no end mark

    def clear_requests(self) -> None:
        """Clear the requests of all rows, so that the step samples no ids."""
        if self.samples:
            self.hosts[KEYS][:, _POSITION] = -1

    def run(self) -> StepResult:
        """Run the step on the current inputs; return the logits, and the sampled ids if the program samples."""
        made = self.space.step(self._arrays)
        return made["logits"], made["ids"].to_numpy() if "ids" in made else None

    def repeat(self, count: int) -> tuple[StepResult, np.ndarray]:
        """Run `count` times on one id per sequence: first on those in the inputs, then on those the last run sampled.

        Returns: the result of the last run, and the ids that ran, int64 [batch, n]; n < `count` if a run sampled no id.
        """
        hosts = self.hosts
        given, counters = hosts["ids"][:, 0], [hosts[KEYS][:, _POSITION]]
        if "positions" in hosts:
            counters.append(hosts["positions"])
        ran = [given.tolist()]

        def again(sampled: np.ndarray) -> bool:
            found = sampled.tolist()
            if len(ran) == count or min(found) < 0:
                return False
            given[:] = found
            for counter in counters:
                counter += 1
            ran.append(found)
            return True

        self.space.run_while(self._arrays, "ids", again)
        takes = self.space.kernels.takes
        return (takes["logits"](), takes["ids"]().to_numpy()), np.array(ran, np.int64).T


class StepPlans:
    """Compiled steps of a cache, keyed by (last logits only, sequences, tokens); dropped when the model changes.

    `derive` maps the flag "last logits only" to the program with a cache. `deterministic` is that of `CompileOptions`.
    `setup_s` counts the seconds of deriving and compiling.
    """

    def __init__(
        self, program: Program, derive: Callable[[bool], Derived], device: Device, deterministic: bool = False
    ) -> None:
        self.program, self.device, self.deterministic, self._make = program, device, deterministic, derive
        self.spaces: dict[tuple[bool, int, int], BoundStep] = {}
        self._derived: dict[bool, Derived] = {}
        self._version = program.plan_version
        self.setup_s = 0.0

    def derived(self, last_only: bool = True) -> Derived:
        """Return the program with a cache for the model's current version."""
        if self._version != self.program.plan_version:
            self._version = self.program.plan_version
            self._derived.clear()
            self.spaces.clear()
        if last_only not in self._derived:
            started = perf_counter()
            self._derived[last_only] = self._make(last_only)
            self.setup_s += perf_counter() - started
        return self._derived[last_only]

    def bound(self, last_only: bool, batch: int, tokens: int, variables: Mapping[str, Variable]) -> BoundStep:
        """Return the step for these sizes, bound to the cache states `variables`; compile it at first use."""
        p, key = self.derived(last_only).program, (last_only, batch, tokens)
        known = self.spaces.get(key)
        if known is None or (known.waiting and not known.space.plan.fresh):
            started = perf_counter()
            specs = {p.path(n): p.spec(n).bind({"B": batch, "T": tokens}) for n in p.inputs()}
            options = CompileOptions(
                freeze=True, executor=EXECUTOR, deterministic=self.deterministic, device=self.device
            )
            plan = plan_for(p, specs, None, options)
            self.spaces[key] = BoundStep(plan.new_executable(variables))
            self.setup_s += perf_counter() - started
        return self.spaces[key]
