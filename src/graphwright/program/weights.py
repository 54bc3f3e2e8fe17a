"""Weights: the variables of a program by their checkpoint key, shared until written, hashed once per value."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from difflib import get_close_matches
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from graphwright.array import CPU, NDArray, Storage, empty, from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.files import flat_bytes
from graphwright.program.errors import UnknownNode
from graphwright.program.hashing import LARGE, side_by_side

if TYPE_CHECKING:
    from graphwright.array import DType, Spec

_TOLD = 4096
"""Integers of a table that a journal line tells itself: which key head each query head reads, say."""
_SAMPLE = 1024
"""Entries of a slice that enter its name."""
SOURCE = "source"
"""What stands for the bytes of a weight that lies untouched in an opened file."""


class Promise(NamedTuple):
    """What is known without reading it of an array in a program's own files, or of a slice of one.

    Attributes:
        digest: its `array_digest`, which a saved program tells and its bytes are checked against; None in a checkpoint.
        reference: what it counts by in a state's hash: `SOURCE`, or the name of a slice; None if by its digest.
        version: of the memory of a slice when it was made: it is one until it is written to. None for a file's.
    """

    digest: str | None
    reference: str | None
    version: int | None = None


class Promises(WeakKeyDictionary[NDArray, Promise]):
    """What is promised of each array.

    Attributes:
        made: how many promises there were: while it stands still, what followed from them holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __setitem__(self, array: NDArray, promise: Promise) -> None:
        super().__setitem__(array, promise)
        self.made += 1


def array_digest(array: NDArray) -> str:
    """BLAKE2b-128 over spec and bytes."""
    return digest_of(array.spec, array.to_numpy(bits=True) if array.contiguous and array.size else array.tobytes())


def digest_of(spec: Spec, content: Any) -> str:
    """`array_digest` of an array whose bytes are at hand, as a buffer."""
    state = blake2b(repr(spec).encode(), digest_size=16)
    state.update(flat_bytes(content))
    return state.hexdigest()


def payload_json(weights: Weights, array: NDArray) -> dict[str, Any]:
    """An array in a journal line: its spec and its `array_digest`; the bytes lie in `history.safetensors`.

    A table of few integers stands there itself. A value that still lies untouched in an opened file is named by its
    spec alone, so that no payload is read.
    """
    source = weights.reference_of(array) == SOURCE
    name: dict[str, Any] = {"source": True} if source else {"blake2b": weights.digest_of(array)}
    if not source and array.dtype.kind == "int" and array.size <= _TOLD:
        name["values"] = array.to_numpy().tolist()
    return {"spec": array.spec.to_json(), **name}


def as_array(value: Any, kind: Any = None) -> NDArray:
    """An array with memory of its own, row by row, in dtype `kind` if given; Python floats become float32."""
    if isinstance(value, Tensor):
        value = value.data
    if isinstance(value, NDArray):
        array = value.copy()
    else:
        host = np.array(value, order="C")
        if host.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
            host = host.astype(np.float32)
        array = from_numpy(host)
    if kind is not None and array.dtype is not kind:
        array = empty(array.shape, kind).copy_from(array)
    return array


class Weights(Mapping[str, Variable]):
    """key -> Variable. A key is the tensor's name in the checkpoint, the only name a weight is stored under."""

    def __init__(self) -> None:
        self._variables: dict[str, Variable] = {}
        self._digests: dict[str, tuple[NDArray, int, str]] = {}
        self._references: dict[str, tuple[NDArray, int, str]] = {}
        self._promised = 0  # promises when the references were noted
        self._listed: tuple[tuple[str, ...], str] = ((), "")
        self.promises = Promises()

    def __getitem__(self, key: str) -> Variable:
        try:
            return self._variables[key]
        except KeyError:
            near = get_close_matches(str(key), self._variables, 3, 0.5)
            raise UnknownNode(
                "no weight of this key",
                where=key,
                fix=f"did you mean {', '.join(near)}?" if near else "list(program.weights) has them all",
            ) from None

    def __repr__(self) -> str:
        return f"Weights({len(self)}: {', '.join(list(self)[:2])}{', ...' if len(self) > 2 else ''})"

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def values(self) -> ValuesView[Variable]:
        """The variables, without a look-up for each."""
        return self._variables.values()

    def items(self) -> ItemsView[str, Variable]:
        """Keys and variables, without a look-up for each."""
        return self._variables.items()

    def add(self, key: str, variable: Variable) -> None:
        """Enter a variable; its array may map a file and is not read."""
        self._variables[key] = variable

    def drop(self, key: str) -> None:
        """Forget a variable that no node reads any more."""
        for known in (self._variables, self._digests, self._references):
            known.pop(key, None)

    def array(self, key: str) -> NDArray:
        """The value under a key."""
        return self[key].data

    def rekey(self, old: str, new: str) -> None:
        """Let a variable be stored under another key."""
        self._variables = {new if key == old else key: variable for key, variable in self._variables.items()}
        for known in (self._digests, self._references):
            known.pop(old, None)

    def sort(self, ranks: Mapping[str, int]) -> None:
        """List the keys in this order."""
        self._variables = dict(sorted(self._variables.items(), key=lambda item: ranks.get(item[0], -1)))

    def reference(self, key: str) -> str:
        """The digest, or what stands for a weight that lies untouched in an opened file or is a slice of one.

        Reads no file.
        """
        return self.known_reference(key) or self.digest(key)

    def references(self, keys: tuple[str, ...]) -> str:
        """A line per key with its `reference`; for a value that is as it was the last time this costs a comparison."""
        noted, variables = self._references, self._variables
        if self._promised != self.promises.made:
            self._promised = self.promises.made
            noted.clear()
        changed = [
            key
            for key in keys
            if (known := noted.get(key)) is None or variables[key].data is not known[0] or known[0].version != known[1]
        ]
        self.note_digests(key for key in changed if self.known_reference(key) is None)
        for key in changed:
            array = self.array(key)
            noted[key] = (array, array.version, self.reference(key))
        if changed or self._listed[0] is not keys:
            self._listed = keys, "".join([f"\n{key} {noted[key][2]}" for key in keys])
        return self._listed[1]

    def known_reference(self, key: str) -> str | None:
        """`reference` where it takes no reading of the value's bytes."""
        return self.reference_of(self.array(key)) or self._known(key)

    def refer(self, array: NDArray) -> None:
        """Let `SOURCE` stand for an array that lies in the file this program was opened from."""
        self.promises[array] = Promise(None, SOURCE)

    def refer_slice(self, array: NDArray, whole: NDArray, places: Mapping[int, np.ndarray]) -> None:
        """Let the places stand for an array that has the entries of `whole` at them, where a reference stands for that.

        The first entries stand there too: they tell a slice of one checkpoint from that of another.

        Args:
            places: dimension -> for each new place the old one, or -1 for zeros.
        """
        promise = self.promise_of(whole)
        if promise is None or promise.reference is None:
            return
        name = blake2b(promise.reference.encode(), digest_size=16)
        for dim, old in sorted(places.items()):
            name.update(f"\n{dim} {len(old)} ".encode() + np.ascontiguousarray(old, "<i8").tobytes())
        name.update(flat_bytes(np.ascontiguousarray(array.to_numpy(bits=True).reshape(-1)[:_SAMPLE])))
        self.promises[array] = Promise(None, f"slice {name.hexdigest()}", array.storage.version)

    def promise_of(self, array: NDArray) -> Promise | None:
        """What is promised of an array as it is now."""
        promise = self.promises.get(array)
        return promise if promise is None or promise.version in (None, array.storage.version) else None

    def reference_of(self, array: NDArray) -> str | None:
        """What stands for an array in this program's files, or for a slice of one; None for any other.

        An array that another program brought along from its own file is another: its bytes count.
        """
        promise = self.promise_of(array)
        return None if promise is None else promise.reference or promise.digest

    def digest_of(self, array: NDArray) -> str:
        """`array_digest` of an array, as it was promised if it was."""
        promise = self.promise_of(array)
        return array_digest(array) if promise is None or promise.digest is None else promise.digest

    def digest(self, key: str) -> str:
        """BLAKE2b-128 over dtype, shape and bytes; computed once per value."""
        array = self.array(key)
        if (promise := self.promises.get(array)) is not None and promise.digest is not None:
            assert array.storage.memory is not None  # touching it checks the promise
        if (known := self._known(key)) is not None:
            return known
        self._digests[key] = (array, array.storage.version, array_digest(array))
        return self._digests[key][2]

    def digests(self, keys: tuple[str, ...]) -> str:
        """A line per key with its `digest`."""
        self.note_digests(keys)
        return "".join([f"\n{key} {self.digest(key)}" for key in keys])

    def note_digests(self, keys: Iterable[str]) -> None:
        """Compute the digests that are not known yet, large ones side by side: hashing lets other threads run."""
        wanted = [k for k in keys if self._known(k) is None and self.array(k).nbytes >= LARGE]
        for key in wanted:
            assert self.array(key).storage.memory is not None  # a file is mapped before threads read it
        side_by_side(self.digest, wanted)

    def _known(self, key: str) -> str | None:
        """A digest that needs no reading of its value's bytes."""
        array = self.array(key)
        if (promise := self.promises.get(array)) is not None and promise.digest is not None:
            return promise.digest
        known = self._digests.get(key)
        return known[2] if known is not None and known[0] is array and known[1] == array.storage.version else None

    def fork(self, twins: VariableTwins | None = None) -> Weights:
        """Variables of their own over the same arrays; whoever writes first, copies."""
        twin, twins = Weights(), twins or VariableTwins()
        for key, variable in self._variables.items():
            twin.add(key, twins(variable))
        twin._digests, twin._references = dict(self._digests), dict(self._references)
        twin.promises, twin._promised = self.promises, self._promised
        return twin


class VariableTwins:
    """Second variables over the same arrays, one per variable, so that tied ones stay tied. Both copy on writing."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Variable, Variable]] = {}

    def __call__(self, variable: Variable) -> Variable:
        """The twin of a variable."""
        if id(variable) not in self._made:
            variable.shared = True
            twin = type(variable)(variable.data, variable.requires_grad, variable.name)
            twin.shared = True
            self._made[id(variable)] = (variable, twin)
        return self._made[id(variable)][1]


_HOLLOW: WeakSet[Storage] = WeakSet()


def hollow_array(shape: tuple[int, ...], dtype: DType) -> NDArray:
    """An array that has a spec and must not be read."""
    storage = Storage.mapped(_no_bytes, 0, CPU)
    _HOLLOW.add(storage)
    return NDArray(storage, dtype, shape)


def is_hollow(array: NDArray) -> bool:
    """True for an array without bytes."""
    return array.storage in _HOLLOW


def _no_bytes() -> memoryview:
    raise AssertionError("a hollow array has no bytes")
