"""Padding buckets: pad inputs to one of a few sizes, so that many lengths share few plans, and slice the results.

A program in which padding could change valid results (attention to later positions, means) needs a mask input. The
first padded run of each size is compared with an unpadded run, and a difference raises BucketMismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Dim, NDArray, Spec, bool_, from_numpy
from graphwright.array.sizes import names_of
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.running.memory import as_array, differences
from graphwright.program.run import check_feeds

if TYPE_CHECKING:
    from graphwright.program.program import Program


_TOLERANCE = 1e-4  # relative to the largest value: the order of sums may depend on the size


def _mixes(dim: Dim, padded: Collection[str]) -> bool:
    """Return True if the padding of an axis of this size may be between its entries: it depends on several sizes."""
    return len(names_of(dim)) > 1 and any(name in padded for name in names_of(dim))


class BucketMismatch(ComputeError):
    """Padding changed valid results: the program needs a mask input, or cannot use buckets."""


class PaddingBuckets:
    """Pads named sizes of the inputs to one of a few sizes.

    Args:
        program: the program, which must not write state.
        sizes: named size -> the sizes to pad to; larger inputs are not padded.
        mask: name of a bool input that is True at valid positions; all True if it is not fed. Its padding is False.
    Raises: UsageError if no input has a size of a given name, a list of sizes is empty or contains a size < 1, the mask
        is not a bool input, an output has a size such as B*T, or the program writes state, which padding would change.
    """

    def __init__(self, program: Program, sizes: Mapping[str, Sequence[int]], mask: str | None = None) -> None:
        specs = {program.path(n): program.spec(n) for n in program.inputs()}
        known = {d for spec in specs.values() for d in spec.shape if isinstance(d, str)}
        wrong = [f"{name}: no input has a size of this name" for name in sizes if name not in known]
        bad = {name: list(s) for name, s in sizes.items() if not s or min(s) < 1}
        wrong += [f"{name}: expected one or more sizes >= 1, got {given}" for name, given in bad.items()]
        if mask is not None and (mask not in specs or specs[mask].dtype is not bool_):
            wrong.append(f"{mask}: not a bool input")
        if program.assigns():
            wrong.append("the program writes state, which padding would change")
        for name, value in zip(program.output_names(), program.outputs(), strict=True):
            shape = program.specs(value.node)[value.port].shape
            wrong += [f"output {name}: its size {d} interleaves entries and padding" for d in shape if _mixes(d, sizes)]
        if wrong:
            names = ", ".join(sorted(known)) or "named sizes of inputs, of which the program has none"
            fix = 'gw.compile(program, buckets={"T": [16, 128]}) with the named size "T" of an input, or no buckets'
            raise UsageError("invalid buckets:\n  " + "\n  ".join(wrong), where=program.name,
                             expected=f"sizes >= 1 for {names}; as mask a bool input; a program that writes no state",
                             got=f"{dict(sizes)}, mask {mask!r}", fix=fix)  # fmt: skip
        self.program, self.mask, self.inputs, self._version = program, mask, specs, program.plan_version
        self.sizes = {name: sorted(s) for name, s in sizes.items()}
        self._checked: set[tuple[int, ...]] = set()

    def current(self) -> PaddingBuckets:
        """Return self, or new buckets if the program was edited since. Raises: the errors of the constructor."""
        return (
            self if self._version == self.program.plan_version else PaddingBuckets(self.program, self.sizes, self.mask)
        )

    def checked(self, feeds: Mapping[str, Any]) -> tuple[dict[str, NDArray], dict[str, int]]:
        """Return the feeds as arrays, including the mask, and the value of each named size. Raises: FeedError."""
        given = dict(feeds)
        if self.mask is not None and self.mask not in given:
            known: dict[str, int] = {}
            for name in self.inputs.keys() & given.keys():
                self.inputs[name].match(as_array(given[name]).shape, known)
            spec = self.inputs[self.mask].bind(known)
            if not spec.symbolic:
                given[self.mask] = np.ones(spec.sizes, np.bool_)
        tensors, dims = check_feeds(self.program, given)
        return {name: tensor.data for name, tensor in tensors.items()}, dims

    def run(
        self, feeds: Mapping[str, NDArray], dims: Mapping[str, int],
        call: Callable[[Mapping[str, NDArray]], dict[str, NDArray]],
    ) -> dict[str, NDArray]:  # fmt: skip
        """Pad the feeds, run, and return the results without padding.

        Args:
            feeds, dims: the arrays of the inputs, and the value of each named size, as `checked` returns them.
            call: runs the program on the feeds that it gets, without padding them, and returns the outputs by name.
        Raises: BucketMismatch if, in the first run of a size, padding changes valid results; the errors of `call`.
        """
        padded = {name: self._padded_size(name, dims[name]) for name in self.sizes}
        if all(padded[name] == dims[name] for name in padded):
            return call(feeds)
        found = call(self._padded(feeds, {**dims, **padded}))
        valid = {name: self._sliced(name, value, dims) for name, value in found.items()}
        key = tuple(padded.values())
        if key not in self._checked:
            self._check(valid, call(feeds), padded)
            self._checked.add(key)
        return valid

    def _padded_size(self, name: str, size: int) -> int:
        return next((n for n in self.sizes[name] if n >= size), size)

    def _padded(self, feeds: Mapping[str, NDArray], dims: Mapping[str, int]) -> dict[str, NDArray]:
        """Return the feeds padded with zeros at the end to the sizes `dims`."""
        made: dict[str, NDArray] = {}
        for name, array in feeds.items():
            host, wanted = array.to_numpy(bits=True), self.inputs[name].bind(dims).sizes
            rows = [(0, n - have) for n, have in zip(wanted, host.shape, strict=True)]
            made[name] = from_numpy(np.pad(host, rows), bits=array.dtype)
        return made

    def _spec(self, name: str) -> Spec:
        value = self.program.output(name)
        return self.program.specs(value.node)[value.port]

    def _sliced(self, name: str, value: NDArray, dims: Mapping[str, int]) -> NDArray:
        sizes = self._spec(name).bind(dims).sizes
        return value[tuple(slice(0, n) for n in sizes)].copy() if sizes != value.shape else value

    def _check(self, valid: Mapping[str, NDArray], exact: Mapping[str, NDArray], padded: Mapping[str, int]) -> None:
        if wrong := differences(valid, exact, _TOLERANCE, _TOLERANCE, scaled=True):
            sizes = ", ".join(f"{name} = {n}" for name, n in padded.items())
            raise BucketMismatch("padding changes valid results:\n  " + "\n  ".join(wrong), where=self.program.name,
                                 expected="the results without padding", got=f"other ones with {sizes}",
                                 fix="add a bool input that masks the padding, and pass its name as mask=")  # fmt: skip
