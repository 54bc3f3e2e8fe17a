"""Weights: the variables of a program by their checkpoint key, shared until written, hashed once per value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b

from graphwright.array import NDArray
from graphwright.autograd import Parameter, Variable
from graphwright.program.errors import UnknownNode


class Weights(Mapping[str, Variable]):
    """key -> Variable. A key is the tensor's name in the checkpoint, the only name a weight is stored under."""

    def __init__(self) -> None:
        self._variables: dict[str, Variable] = {}
        self._digests: dict[str, tuple[NDArray, int, str]] = {}

    def __getitem__(self, key: str) -> Variable:
        try:
            return self._variables[key]
        except KeyError:
            raise UnknownNode("no weight of this key", where=key, fix="program.weights lists them") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def add(self, key: str, variable: Variable) -> None:
        """Enter a variable; its array may map a file and is not read."""
        self._variables[key] = variable

    def drop(self, key: str) -> None:
        """Forget a variable that no node reads any more."""
        self._variables.pop(key, None)
        self._digests.pop(key, None)

    def array(self, key: str) -> NDArray:
        """The value under a key."""
        data = self[key].data
        assert isinstance(data, NDArray)
        return data

    def set(self, key: str, array: NDArray) -> NDArray:
        """Put another array under a key; returns the one that was there."""
        variable = self[key]
        before = self.array(key)
        variable.data = array
        return before

    def digest(self, key: str) -> str:
        """BLAKE2b-128 over dtype, shape and bytes; computed once per value."""
        array = self.array(key)
        known = self._digests.get(key)
        if known is not None and known[0] is array and known[1] == array.storage.version:
            return known[2]
        state = blake2b(repr(array.spec).encode(), digest_size=16)
        state.update(array.to_numpy(bits=True).data if array.contiguous and array.size else array.tobytes())
        self._digests[key] = (array, array.storage.version, state.hexdigest())
        return self._digests[key][2]

    def fork(self) -> Weights:
        """Variables of their own over the same arrays; whoever writes first, copies."""
        twin = Weights()
        for key, variable in self._variables.items():
            variable.shared = True
            kind = Parameter if isinstance(variable, Parameter) else Variable
            copy = kind(self.array(key), variable.requires_grad, variable.name)
            copy.shared = True
            twin.add(key, copy)
        twin._digests = dict(self._digests)
        return twin
