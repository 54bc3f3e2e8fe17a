"""Hashes of a program: kept up to date node by node, so that hashing after an edit costs the edit and not the graph."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.array import DType, Spec
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program

_MODULUS = 1 << 256


def encode_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as JSON values: dtypes by name, specs and tuples as lists. Raises: UsageError for what has no form."""
    return {name: _encode(value) for name, value in attrs.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, Spec):
        return {"spec": value.to_json()}
    if isinstance(value, tuple | list):
        return [_encode(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value != value:
        return {"float": "nan"}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": "inf" if value > 0 else "-inf"}
    if isinstance(value, str) and any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise UsageError("a text of an attribute is half a character", got=repr(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError("an attribute is a number, a text, None, a dtype, a spec, or a tuple of these", got=repr(value))


def decode_attrs(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inverse of `encode_attrs`, read-only; lists become tuples."""
    return MappingProxyType({name: _decode(value) for name, value in data.items()})


def _decode(value: Any) -> Any:
    from graphwright.array import dtype

    if isinstance(value, dict):
        if "dtype" in value:
            return dtype(value["dtype"])
        if "spec" in value:
            return Spec.from_json(value["spec"])
        return float(value["float"])
    return tuple(_decode(v) for v in value) if isinstance(value, list) else value


class StructureHash:
    """Sum modulo 2²⁵⁶ of one digest per node, so that a changed node is subtracted and added again.

    A node's digest covers its name, op, attributes, specs and, in port order, the names and ports of what it reads.
    Handles, port numbers and creation numbers do not enter: two programs that compute the same by the same names agree.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._digests: dict[NodeId, int] = {}
        self._dirty: set[NodeId] = set()
        self._sum = 0
        self._structure: str | None = None

    def copy(self, program: Program) -> StructureHash:
        """The same for a copy of the program."""
        twin = StructureHash(program)
        twin._digests, twin._dirty = dict(self._digests), set(self._dirty)
        twin._sum, twin._structure = self._sum, self._structure
        return twin

    def touch(self, node: NodeId) -> None:
        """Note that a node changed."""
        self._dirty.add(node)
        self._structure = None

    def touch_outputs(self) -> None:
        """Note that the outputs changed."""
        self._structure = None

    def forget(self, node: NodeId) -> None:
        """Note that a node is about to go."""
        self._sum = (self._sum - self._digests.pop(node, 0)) % _MODULUS
        self._dirty.discard(node)
        self._structure = None

    def _digest(self, node: NodeId) -> int:
        p = self._program
        record = [
            p.path(node),
            p.op(node),
            encode_attrs(p.attrs(node)),
            [s.to_json() for s in p.specs(node)],
            [[p.path(v.node), v.port] for v in p.operands(node)],
        ]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return int.from_bytes(blake2b(text.encode(), digest_size=32).digest(), "little")

    def node_digest(self, node: NodeId) -> bytes:
        """Digest of one node, up to date."""
        self.structure()
        return self._digests[node].to_bytes(32, "little")

    def structure(self) -> str:
        """sha256 of the structure."""
        if self._structure is None:
            for node in self._dirty:
                fresh = self._digest(node)
                self._sum = (self._sum - self._digests.get(node, 0) + fresh) % _MODULUS
                self._digests[node] = fresh
            self._dirty.clear()
            p = self._program
            outputs = [[name, p.path(v.node), v.port] for name, v in zip(p.output_names(), p.outputs(), strict=True)]
            text = json.dumps([f"{self._sum:064x}", outputs], separators=(",", ":"))
            self._structure = sha256(text.encode()).hexdigest()
        return self._structure

    def full(self, *, mapped_by_reference: bool = False) -> str:
        """sha256 of structure and weights.

        Args:
            mapped_by_reference: leave out the bytes of weights that still lie untouched in an opened file, and of
                slices of these, which their places name, so that no payload is read; the journal uses it to name
                states relative to the source.
        """
        state = sha256(self.structure().encode())
        p = self._program
        keys = p.weight_keys()
        state.update((p.weights.references(keys) if mapped_by_reference else p.weights.digests(keys)).encode())
        return state.hexdigest()


Item = TypeVar("Item")
Result = TypeVar("Result")
LARGE = 1 << 20
"""Bytes from which on an array is worth handing to a thread."""


def side_by_side(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`call` of each item, in order, on as many threads as there are cores; the first error is raised."""
    given = list(items)
    if len(given) < 2:
        return [call(item) for item in given]
    with ThreadPoolExecutor(min(len(given), os.cpu_count() or 1), "graphwright") as pool:
        return list(pool.map(call, given))
