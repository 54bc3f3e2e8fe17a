"""The plain KV cache: contiguous rows per attention node, carried as states of a program derived from the model's.

A cache knows which structure and weights its rows were computed with; an edit upstream of them makes it stale, another
edit does not, and an undo makes it good again.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from graphwright.array import NDArray, Spec, empty, from_numpy, int64
from graphwright.autograd import Tensor, Variable
from graphwright.graph import NodeId
from graphwright.models.errors import CacheFull, StaleCache
from graphwright.plan import Workspace, plan_for
from graphwright.program import Program, Value
from graphwright.program.kinds import STATE, STORED
from graphwright.program.rewrite import rewrite

LENGTH = "cache.length"


@dataclass(frozen=True, slots=True)
class Derived:
    """A program with cache, made of one version of a model's program.

    Attributes:
        program: has states `cache.<attention path>.k` and `.v` and `cache.length`; feeds as the model's.
        states: key -> shape and dtype of its cache states.
        fingerprints: attention path -> digest of all that its keys and values depend on.
    """

    program: Program
    states: dict[str, Spec]
    fingerprints: dict[str, str]


def derive(p: Program, capacity: int, last_only: bool) -> Derived:
    """The model's program with a cache behind every causal attention.

    Args:
        capacity: rows of the cache.
        last_only: give logits of the last position only, so that the head runs on one row.
    """
    states: dict[str, Spec] = {}
    fingerprints: dict[str, str] = {}

    def start(new: Program) -> None:
        states[LENGTH] = Spec((), int64)
        _state(new, LENGTH, states[LENGTH])

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value | None:
        attrs = p.attrs(node)
        if not attrs["causal"] or attrs["optional"]:
            return None
        path, length = p.path(node), new.value(LENGTH)
        held = []
        for name, rows in zip("kv", operands[1:3], strict=True):
            spec = new.spec(rows)
            key = f"cache.{path}.{name}"
            states[key] = Spec(("B", spec.shape[1], capacity, spec.shape[3]), spec.dtype)
            state = _state(new, key, states[key])
            grown = Value(new.add_op("kv_append", [state, rows, length], {}, f"{key}.grown"))
            new.add_write(state, grown, f"{key}.next")
            held.append(grown)
        fingerprints[path] = fingerprint(p, p.operands(node)[1:3])
        extra = {**attrs, "optional": ("q_start",)}
        return Value(new.add_op("sdpa", [operands[0], *held, length], extra, path))

    derived, values = rewrite(p, f"{p.name} (cached)", {"sdpa": attention}, start)
    ids = derived.value("ids")
    rows = Value(derived.add_op("size", [ids], {"axis": 1}, "cache.rows"))
    grown = Value(derived.add_op("add", [derived.value(LENGTH), rows], {}, "cache.longer"))
    derived.add_write(derived.value(LENGTH), grown, f"{LENGTH}.next")
    if last_only:
        _keep_last(derived)
    return Derived(derived, states, fingerprints)


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


def fingerprint(p: Program, values: list[Value]) -> str:
    """BLAKE2b-128 over the structure and the weights that some values depend on; mapped weights by reference."""
    state = blake2b(digest_size=16)
    for node in sorted(p.reachable(values), key=p.path):
        state.update(p.node_digest(node))
        if p.op(node) in STORED:
            key = p.key(node)
            state.update(b"source" if p.weights.array(key).storage.readonly else p.weights.digest(key).encode())
    return state.hexdigest()


class Cache:
    """Keys and values of `batch` sequences of equal length.

    Attributes:
        capacity: rows it holds.
        tokens: int64 [batch, length], the ids it was filled with.
        variables: the carried states by key.
    """

    def __init__(self, program: Program, batch: int, capacity: int) -> None:
        self.program, self.batch, self.capacity = program, batch, capacity
        self.tokens = np.zeros((batch, 0), np.int64)
        self._derived: dict[bool, tuple[int, Derived]] = {}
        self._spaces: dict[tuple[int, bool, int], Workspace] = {}
        derived = self._derive(True)
        self.variables = {k: Variable(_zeros(s.bind({"B": batch})), name=k) for k, s in derived.states.items()}
        self.fingerprints = dict(derived.fingerprints)

    @property
    def length(self) -> int:
        """Rows filled."""
        return int(self.variables[LENGTH].item())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(v.data.nbytes for v in self.variables.values())  # type: ignore[union-attr]  # variables hold arrays

    def _derive(self, last_only: bool) -> Derived:
        known = self._derived.get(last_only)
        if known is None or known[0] != self.program.version:
            known = (self.program.version, derive(self.program, self.capacity, last_only))
            self._derived[last_only] = known
            self._spaces = {k: w for k, w in self._spaces.items() if k[0] == self.program.version}
        return known[1]

    def step(self, ids: np.ndarray, *, all_logits: bool = False) -> NDArray:
        """Append ids int64 [batch, T] and give the logits [batch, 1 or T, vocab].

        Raises: StaleCache if an edit changed what the rows depend on; CacheFull; both with the cache as before.
        """
        rows = ids.shape[1]
        length = self.length
        if length + rows > self.capacity:
            raise CacheFull("the cache has no room for these tokens", expected=f"<= {self.capacity - length}", got=rows)
        derived = self._derive(not all_logits)
        if length:
            self.check(derived)
        else:
            self.fingerprints = dict(derived.fingerprints)
        key = (self.program.version, not all_logits, rows)
        space = self._spaces.get(key)
        if space is None:
            specs = {derived.program.path(n): derived.program.spec(n).bind({"B": self.batch, "T": rows})
                     for n in derived.program.inputs()}  # fmt: skip
            space = self._spaces[key] = Workspace(plan_for(derived.program, specs, freeze=True), self.variables)
        feeds: dict[str, Any] = {"ids": np.ascontiguousarray(ids)}
        if "positions" in space.plan.inputs:
            feeds["positions"] = np.ascontiguousarray(np.broadcast_to(np.arange(length, length + rows), (self.batch, rows)))
        logits = space.run(feeds)["logits"]
        self.tokens = np.concatenate([self.tokens, ids], axis=1)
        return logits

    def check(self, derived: Derived | None = None) -> None:
        """Raises: StaleCache naming the attention nodes whose keys or values an edit changed."""
        derived = self._derive(True) if derived is None else derived
        now, then = derived.fingerprints, self.fingerprints
        changed = sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))
        if changed:
            entry = self.program.journal[-1] if len(self.program.journal) else None
            raise StaleCache("the model was edited upstream of cached keys and values", where=", ".join(changed[:4]),
                             got=f"last edit: {entry.why}" if entry else None,
                             fix="cache.reset() and run the tokens again: model.reprefill(cache)")  # fmt: skip

    def reset(self) -> None:
        """Forget all rows."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. Raises: CacheFull if there are fewer."""
        if not 0 <= length <= self.length:
            raise CacheFull("the cache has fewer rows", expected=f"0..{self.length}", got=length)
        self.variables[LENGTH].assign(_scalar(length))
        self.tokens = self.tokens[:, :length]

    def snapshot(self) -> int:
        """A mark to come back to: rows are only appended, so the length says it all."""
        return self.length

    def restore(self, mark: int) -> None:
        """Go back to a snapshot."""
        self.truncate(mark)


def _zeros(spec: Spec) -> NDArray:
    return from_numpy(np.zeros(spec.shape, spec.dtype.numpy), bits=spec.dtype)  # type: ignore[arg-type]  # sizes are known


def _scalar(value: int) -> Tensor:
    return Tensor(from_numpy(np.asarray(value, np.int64)))
