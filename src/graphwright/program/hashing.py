"""Hashes of a program, updated node by node; the work after an edit does not depend on the graph's size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.array import DType, Spec, dtype
from graphwright.errors import UsageError
from graphwright.ops import OPS

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.op_graph import OpGraph
    from graphwright.program.weights import Weights

_MODULUS = 1 << 256
_COMPACT = json.JSONEncoder(separators=(",", ":"))
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def encode_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as JSON values, tuples as lists. Raises: UsageError for values without a JSON form."""
    return {name: _encode(value, name) for name, value in attrs.items()}


def _encode(value: Any, name: str) -> Any:
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, Spec):
        return {"spec": value.to_json()}
    if isinstance(value, tuple | list):
        return [_encode(v, name) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}
    if isinstance(value, str) and any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise UsageError("an attribute contains an unpaired surrogate", where=f"attribute {name!r}",
                         expected="valid Unicode", got=repr(value))  # fmt: skip
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError("the value of an attribute has an unsupported type", where=f"attribute {name!r}",
                     expected="a number, string, None, dtype, spec or tuple", got=repr(value))  # fmt: skip


def decode_attrs(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return attributes from their JSON form as a read-only mapping; lists become tuples."""
    return MappingProxyType({name: _decode(value) for name, value in data.items()})


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "dtype" in value:
            return dtype(value["dtype"])
        if "spec" in value:
            return Spec.from_json(value["spec"])
        return float(value["float"])
    return tuple(_decode(v) for v in value) if isinstance(value, list) else value


def _hashed(op: str, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes without those that the op got later and that have their default."""
    row = OPS.get(op)
    if row is None or not row.added:
        return attrs
    return {name: value for name, value in attrs.items() if name not in row.added or value != row.attrs[name]}


class StructureHash:
    """Sum modulo 2²⁵⁶ of one digest per node; after a change, a node's old digest is subtracted and its new one added.

    A node's digest covers its name, op, attributes, specs and, in port order, its operands by name and result number.
    Handles, port numbers and creation numbers are left out, so programs of the same structure and names hash equal.
    """

    def __init__(self, program: OpGraph) -> None:
        self._program = program
        self._digests: dict[NodeId, int] = {}
        self._dirty: set[NodeId] = set()
        self._sum = 0
        self._structure: str | None = None

    def copy(self, program: OpGraph) -> StructureHash:
        """Return a copy of the hash state, for a copy of the graph."""
        twin = StructureHash(program)
        twin._digests, twin._dirty = dict(self._digests), set(self._dirty)
        twin._sum, twin._structure = self._sum, self._structure
        return twin

    def touch(self, node: NodeId) -> None:
        """Mark a node as changed."""
        self._dirty.add(node)
        self._structure = None

    def touch_outputs(self) -> None:
        """Mark the outputs of the program as changed, so that the structure hash is computed again."""
        self._structure = None

    def forget(self, node: NodeId) -> None:
        """Subtract the digest of a node that is about to be removed."""
        self._sum = (self._sum - self._digests.pop(node, 0)) % _MODULUS
        self._dirty.discard(node)
        self._structure = None

    def _digest(self, node: NodeId) -> int:
        p = self._program
        specs, reads = [s.to_json() for s in p.specs(node)], [[p.path(v.node), v.port] for v in p.operands(node)]
        record = [p.path(node), p.op(node), encode_attrs(_hashed(p.op(node), p.attrs(node))), specs, reads]
        text = _ENCODER.encode(record)
        return int.from_bytes(blake2b(text.encode(), digest_size=32).digest(), "little")

    def node_digest(self, node: NodeId) -> bytes:
        """Return the digest of one node."""
        self.structure()
        return self._digests[node].to_bytes(32, "little")

    def structure(self) -> str:
        """Return the sha256 of the structure."""
        if self._structure is None:
            for node in self._dirty:
                fresh = self._digest(node)
                self._sum = (self._sum - self._digests.get(node, 0) + fresh) % _MODULUS
                self._digests[node] = fresh
            self._dirty.clear()
            p = self._program
            outputs = [[name, p.path(v.node), v.port] for name, v in zip(p.output_names(), p.outputs(), strict=True)]
            text = _COMPACT.encode([f"{self._sum:064x}", outputs])
            self._structure = sha256(text.encode()).hexdigest()
        return self._structure

    def full(self, weights: Weights, *, mapped_by_reference: bool = False) -> str:
        """Return the sha256 of structure and weights.

        With `mapped_by_reference`, a weight not yet read from an opened file, or a slice of one, contributes its
        `Promise.reference` instead of its bytes, so that nothing is read; the journal contains these hashes.
        """
        state = sha256(self.structure().encode())
        keys = self._program.weight_keys()
        state.update((weights.references(keys) if mapped_by_reference else weights.digests(keys)).encode())
        return state.hexdigest()


Item = TypeVar("Item")
Result = TypeVar("Result")
LARGE = 1 << 20
"""Smallest array, in bytes, for which a thread of its own pays."""


def side_by_side(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `call(item)` for each item, in order, on one thread per core; the first error is raised."""
    given = list(items)
    if len(given) < 2:
        return [call(item) for item in given]
    with ThreadPoolExecutor(min(len(given), os.cpu_count() or 1), "graphwright") as pool:
        return list(pool.map(call, given))
