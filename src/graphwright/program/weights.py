"""Weights: the variables of a program by key or node path; arrays are copied on write, each value is hashed once."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from difflib import get_close_matches
from hashlib import blake2b
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from graphwright.array import CPU, NDArray, Storage, empty, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable
from graphwright.errors import UsageError
from graphwright.files import flat_bytes
from graphwright.program.errors import UnknownNode
from graphwright.program.hashing import LARGE, side_by_side
from graphwright.program.kinds import PARAM, PATTERN, STATE, STORED
from graphwright.program.patterns import PatternVariable

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.program.op_graph import OpGraph
    from graphwright.program.program import Program

_INLINE = 4096
"""Largest number of integers that a journal line contains itself, for small lookup tables."""
_SAMPLE = 1024
"""Number of entries of a weight in a file that are hashed in place of all of them."""
SOURCE = "source"
"""The reference of a weight that is unread in an opened file."""


class Promise(NamedTuple):
    """Facts known about an array without reading it. The array is stored in a file or is a slice of a stored array.

    Attributes:
        digest: the `array_digest` that a saved program states; reading the array checks it. None in a checkpoint.
        reference: text to hash instead of the bytes: `SOURCE` or the name of a slice. If None, the digest is hashed.
        version: version of a slice's memory when the promise was recorded; a later write makes the facts invalid.
            None for an array in a file.
    """

    digest: str | None
    reference: str | None
    version: int | None = None


class Promises(WeakKeyDictionary[NDArray, Promise]):
    """Maps arrays to the facts known about them without reading them; holds the arrays by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0  # entries set so far; a value computed from entries is valid until this number changes

    def __setitem__(self, array: NDArray, promise: Promise) -> None:
        super().__setitem__(array, promise)
        self.made += 1


def array_digest(array: NDArray) -> str:
    """Return the BLAKE2b-128 of the spec and the bytes of an array."""
    return digest_of(array.spec, array.to_numpy(bits=True) if array.contiguous and array.size else array.tobytes())


def _first_entries(array: NDArray) -> Any:
    return flat_bytes(np.ascontiguousarray(array.to_numpy(bits=True).reshape(-1)[:_SAMPLE]))


def digest_of(spec: Spec, content: Any) -> str:
    """Return the BLAKE2b-128 of a spec and of the bytes in the buffer `content`."""
    state = blake2b(repr(spec).encode(), digest_size=16)
    state.update(flat_bytes(content))
    return state.hexdigest()


def payload_json(weights: Weights, array: NDArray) -> dict[str, Any]:
    """Return an array as JSON for the journal: spec and `array_digest`; the bytes are stored in `history.safetensors`.

    The values of a small integer array are included. For an array not yet read from an opened file, only the spec is
    included, so that the file is not read.
    """
    source = weights.reference_of(array) == SOURCE
    name: dict[str, Any] = {"source": True} if source else {"blake2b": weights.digest_of(array)}
    if not source and array.dtype.kind == "int" and array.size <= _INLINE:
        name["values"] = array.to_numpy().tolist()
    return {"spec": array.spec.to_json(), **name}


def as_array(value: Any, kind: Any = None) -> NDArray:
    """Copy a value into a contiguous array, of dtype `kind` if given; Python floats become float32."""
    if isinstance(value, Tensor):
        value = value.data
    if isinstance(value, NDArray):
        array = value.copy()
    else:
        host = np.array(value, order="C")
        python = host.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic)
        array = from_numpy(host.astype(np.float32) if python else host)
    return array if kind is None or array.dtype is kind else empty(array.shape, kind).copy_from(array)


class Weights(Mapping[str, Variable]):
    """Maps each key, the name of the tensor in the checkpoint, to its Variable.

    `weights[name]`, `name in weights` and `weights.get(name)` accept the path of a node as well; a key comes first.
    Iteration gives keys. There are also states, and consts that are in no checkpoint; `Program.named_parameters` has
    only params.

    Args:
        graph: the nodes whose paths are accepted.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._variables: dict[str, Variable] = {}
        self._digests: dict[str, tuple[NDArray, int, str]] = {}
        self._references: dict[str, tuple[NDArray, int, str]] = {}
        self._promised = 0  # promises when the references were noted
        self._listed: tuple[tuple[str, ...], str] = ((), "")
        self.promises = Promises()

    def __getitem__(self, key: str) -> Variable:
        found = self._variables.get(key)
        return self.at_key(self._key_at(key) or key) if found is None else found

    def at_key(self, key: str) -> Variable:
        """Return the variable of exactly this key. Raises: UnknownNode."""
        try:
            return self._variables[key]
        except KeyError:
            paths = (self._graph.path(n) for kind in STORED for n in self._graph.of_kind(kind))
            near = get_close_matches(str(key), dict.fromkeys((*self._variables, *paths)), 3, 0.5)
            fix = f"did you mean {', '.join(near)}?" if near else "list(program.weights) lists all keys"
            raise UnknownNode("no weight has this key or path", where=key, fix=fix) from None

    def __contains__(self, key: object) -> bool:
        return key in self._variables or self._key_at(key) is not None

    def has_key(self, key: str) -> bool:
        """Return True if a weight has exactly this key; `in` accepts the paths of nodes too."""
        return key in self._variables

    def free_key(self, wanted: str) -> str:
        """Return `wanted`, or if a weight has this key, the first free key among `wanted_2`, `wanted_3`, ...

        A renamed node keeps its key, so a free name may be a taken key.
        """
        return next(key for key in chain([wanted], (f"{wanted}_{i}" for i in count(2))) if not self.has_key(key))

    def _key_at(self, path: object) -> str | None:
        """Return the key of the param, const or state with this path; None for other paths, and without a value."""
        node = self._graph.find(path)
        key = None if node is None or self._graph.op(node) not in STORED else self._graph.key(node)
        return key if key in self._variables else None

    def __repr__(self) -> str:
        return f"Weights({len(self)}: {', '.join(list(self)[:2])}{', ...' if len(self) > 2 else ''})"

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise UsageError("weights are set by edits, so that they can be undone", where=f"program.weights[{key!r}]",
                         fix=f"with program.edit('why') as e: e.set_weight({key!r}, value)")  # fmt: skip

    def __delitem__(self, key: str) -> NoReturn:
        raise UsageError("a weight goes with the node that reads it", where=f"program.weights[{key!r}]",
                         fix="with program.edit('why') as e: e.remove(node)")  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def values(self) -> ValuesView[Variable]:
        """Return a view of the variables, which iterates faster than the view of `Mapping`."""
        return self._variables.values()

    def items(self) -> ItemsView[str, Variable]:
        """Return a view of the (key, variable) pairs, which iterates faster than the view of `Mapping`."""
        return self._variables.items()

    def array(self, key: str) -> NDArray:
        """Return the array of a key."""
        return self[key].data

    def reference(self, key: str) -> str:
        """Return text that identifies a weight's value: its `Promise.reference` if it has one, else its digest."""
        return self.known_reference(key) or self.digest(key)

    def references(self, keys: tuple[str, ...]) -> str:
        """Return text with a line per key: the key and its `reference`; references of unchanged values are cached."""
        noted, variables = self._references, self._variables
        if self._promised != self.promises.made:
            self._promised = self.promises.made
            noted.clear()
        changed = [key for key in keys if (known := noted.get(key)) is None
                   or variables[key].data is not known[0] or known[0].version != known[1]]  # fmt: skip
        self.note_digests(key for key in changed if self.known_reference(key) is None)
        for key in changed:
            array = self.array(key)
            noted[key] = (array, array.version, self.reference(key))
        if changed or self._listed[0] is not keys:
            self._listed = keys, "".join([f"\n{key} {noted[key][2]}" for key in keys])
        return self._listed[1]

    def known_reference(self, key: str) -> str | None:
        """Return the weight's `reference` if it is known without reading the value, else None.

        For an unread weight under another key than in its file, it contains the key in the file.
        """
        variable = self[key]
        found = self.reference_of(variable.data) or self._known(key)
        return f"{SOURCE} {variable.name}" if found == SOURCE and variable.name not in ("", key) else found

    def refer(self, array: NDArray) -> None:
        """Mark an array as stored in the file from which the program was opened, so that hashing does not read it."""
        self.promises[array] = Promise(None, SOURCE)

    def refer_slice(self, array: NDArray, whole: NDArray, dims: Mapping[int, np.ndarray]) -> None:
        """If `whole` has a `Promise.reference`, give one to its slice `array`, to hash instead of the slice's bytes.

        It is a hash of that reference, of `dims` (dimension -> old index of each new index, -1 for zeros), and of the
        first entries, which differ between checkpoints.
        """
        if (promise := self.promise_of(whole)) is None or promise.reference is None:
            return
        name = blake2b(promise.reference.encode(), digest_size=16)
        for dim, old in sorted(dims.items()):
            name.update(f"\n{dim} {len(old)} ".encode() + np.ascontiguousarray(old, "<i8").tobytes())
        name.update(_first_entries(array))
        self.promises[array] = Promise(None, f"slice {name.hexdigest()}", array.storage.version)

    def unread(self, key: str) -> bool:
        """Return whether a weight is in a file, unread, which does not state its digest."""
        promise = self.promise_of(self.array(key))
        return promise is not None and promise.digest is None

    def sample(self, key: str) -> str:
        """Return a digest of spec and first entries of a weight, which differ between checkpoints."""
        array = self.array(key)
        return digest_of(array.spec, _first_entries(array))

    def promise_of(self, array: NDArray) -> Promise | None:
        """Return the facts known about an unread array; None if there are none, or its memory was written since."""
        promise = self.promises.get(array)
        return promise if promise is None or promise.version in (None, array.storage.version) else None

    def reference_of(self, array: NDArray) -> str | None:
        """Return text that identifies the values of an array without reading them; None if it has no `Promise`."""
        promise = self.promise_of(array)
        return None if promise is None else promise.reference or promise.digest

    def digest_of(self, array: NDArray) -> str:
        """Return the `array_digest` of an array, from its promise if it has one."""
        promise = self.promise_of(array)
        return array_digest(array) if promise is None or promise.digest is None else promise.digest

    def digest(self, key: str) -> str:
        """Return the `array_digest` of a weight, computed once per value, or the hash of a pattern."""
        variable = self[key]
        if isinstance(variable, PatternVariable):
            return variable.digest
        array = variable.data
        if (promise := self.promises.get(array)) is not None and promise.digest is not None:
            assert array.storage.memory is not None  # reading it checks the promise
        if (known := self._known(key)) is not None:
            return known
        self._digests[key] = (array, array.storage.version, array_digest(array))
        return self._digests[key][2]

    def digests(self, keys: tuple[str, ...]) -> str:
        """Return text with a line per key: the key and its `digest`."""
        self.note_digests(keys)
        return "".join([f"\n{key} {self.digest(key)}" for key in keys])

    def note_digests(self, keys: Iterable[str]) -> None:
        """Compute the missing digests on threads, each of some weights of `LARGE` bytes: hashing releases the GIL."""
        batches, room = list[list[str]](), 0
        for key in keys:
            if self._known(key) is None:
                array = self.array(key)
                assert array.storage.memory is not None  # a file is mapped before threads read it
                if room <= 0:
                    batches.append([])
                    room = LARGE
                batches[-1].append(key)
                room -= array.nbytes
        side_by_side(lambda batch: [self.digest(key) for key in batch], batches)

    def _known(self, key: str) -> str | None:
        """Return the digest of a weight if a promise or the cache has it, else None."""
        array = self.array(key)
        if (promise := self.promises.get(array)) is not None and promise.digest is not None:
            return promise.digest
        known = self._digests.get(key)
        return known[2] if known is not None and known[0] is array and known[1] == array.storage.version else None

    def fork(self, graph: OpGraph, twins: VariableTwins) -> Weights:
        """Return weights of `graph`: new variables over the same arrays; the first write to one copies its array."""
        twin = Weights(graph)
        for key, variable in self._variables.items():
            add_weight(twin, key, twins(variable))
        twin._digests, twin._references = dict(self._digests), dict(self._references)
        twin.promises, twin._promised = self.promises, self._promised
        return twin


def kind_of(variable: Variable) -> str:
    """Return the kind of node that reads a variable found in a trace: `param`, `pattern` or `state`."""
    if isinstance(variable, PatternVariable):
        return PATTERN
    return PARAM if isinstance(variable, Parameter) else STATE


def shared_variable(variable: Variable, kind: type[Variable], name: str) -> Variable:
    """Return a new variable over the same array; the first write to either variable copies the array.

    A pattern is copied at once, because its edits do not replace the array.
    """
    if isinstance(variable, PatternVariable):
        return PatternVariable(variable.pattern.copy(), name)
    variable.shared = True
    twin = kind(variable.data, variable.requires_grad, name)
    twin.shared = True
    return twin


def constant_variable(array: NDArray, name: str) -> Variable:
    """Return a variable over an array that a trace found; if it is shared, such as that of a number, writes copy it."""
    variable = Variable(array, name=name)
    variable.shared = array.storage.shared
    return variable


class VariableTwins:
    """Maps each variable to one new variable over the same array, so that tied weights stay tied."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Variable, Variable]] = {}

    def __call__(self, variable: Variable) -> Variable:
        """Return the one new variable over the same array as `variable`."""
        if id(variable) not in self._made:
            self._made[id(variable)] = (variable, shared_variable(variable, type(variable), variable.name))
        return self._made[id(variable)][1]


_ABSTRACT: WeakSet[Storage] = WeakSet()


def abstract_array(shape: tuple[int, ...], dtype: DType) -> NDArray:
    """Return an array without bytes: it has a spec and must not be read."""
    storage = Storage.mapped(_no_bytes, 0, CPU)
    _ABSTRACT.add(storage)
    return NDArray(storage, dtype, shape)


def is_abstract(array: NDArray) -> bool:
    """Return True for an array without bytes."""
    return array.storage in _ABSTRACT


def _no_bytes() -> memoryview:
    raise AssertionError("cannot read an abstract array: it has a spec, but no bytes")


# Changes of the table, for edits, builders and derived programs; user code calls the verbs of `program.edit`.
def add_weight(weights: Weights, key: str, variable: Variable) -> None:
    """Add a variable without reading its array from a memory-mapped file."""
    weights._variables[key] = variable


def drop_weight(weights: Weights, key: str) -> None:
    """Remove a variable that no node reads."""
    for known in (weights._variables, weights._digests, weights._references):
        known.pop(key, None)


def rekey_weight(weights: Weights, old: str, new: str) -> None:
    """Rename a key."""
    weights._variables = {new if key == old else key: variable for key, variable in weights._variables.items()}
    for known in (weights._digests, weights._references):
        known.pop(old, None)


def sort_by_creation(p: Program) -> None:
    """Sort the keys by the creation number of the first node that reads each key."""
    ranks: dict[str, int] = {}
    for node in (n for kind in STORED for n in p.of_kind(kind)):
        ranks[p.key(node)] = min(ranks.get(p.key(node), p.seq(node)), p.seq(node))
    p.weights._variables = dict(sorted(p.weights._variables.items(), key=lambda item: ranks.get(item[0], -1)))
