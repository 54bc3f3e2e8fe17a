"""Few plans for many lengths: feeds are padded up to the next of a few sizes, and results cut back.

A program whose padding could reach what is valid (attention that sees later rows, means) needs a mask among its inputs.
The first run in each size is compared with one that is not padded, so that padding that does reach it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import bool_, from_numpy
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.running.transfer import as_array
from graphwright.program import check_feeds

if TYPE_CHECKING:
    from graphwright.array import NDArray, Spec
    from graphwright.program import Program

_TOLERANCE = 1e-4  # of the largest value: another size may sum in another order


class BucketMismatch(ComputeError):
    """Padding changed results on the valid part: the program needs a mask, or no buckets."""


class PaddingBuckets:
    """Sizes to pad to, by named size of the inputs.

    Args:
        program: its inputs and outputs have the named sizes; it writes no state.
        sizes: named size -> the numbers it is padded to; above the largest nothing is padded.
        mask: a bool input that is True where a row is valid: made if it is not fed, padded with False if it is.
    Raises: UsageError for a name that no input has, sizes that are none, a mask that is no bool input, or a program
        that writes state, into which padding would go.
    """

    def __init__(self, program: Program, sizes: Mapping[str, Sequence[int]], mask: str | None = None) -> None:
        specs = {program.path(n): program.spec(n) for n in program.inputs()}
        known = {d for spec in specs.values() for d in spec.shape if isinstance(d, str)}
        wrong = [f"{name}: no input has it" for name in sizes if name not in known]
        wrong += [f"{name}: sizes {list(s)}" for name, s in sizes.items() if not s or min(s) < 1]
        if mask is not None and (mask not in specs or specs[mask].dtype is not bool_):
            wrong.append(f"{mask}: no bool input")
        if program.assigns():
            wrong.append("the program writes state")
        if wrong:
            raise UsageError(
                "these sizes cannot be padded to:\n  " + "\n  ".join(wrong),
                where=program.name,
                expected=f"sizes from 1 on for some of {', '.join(sorted(known)) or 'its named sizes: it has none'}",
                got=dict(sizes),
                fix='gw.compile(program, buckets={"T": [16, 128]}) where "T" is a size of an input, or no buckets',
            )
        self.program, self.mask, self.inputs, self._version = program, mask, specs, program.version
        self.sizes = {name: sorted(s) for name, s in sizes.items()}
        self._checked: set[tuple[int, ...]] = set()

    def now(self) -> PaddingBuckets:
        """These, or after an edit of the program new ones that have checked nothing. Raises: as when they were made."""
        return self if self._version == self.program.version else PaddingBuckets(self.program, self.sizes, self.mask)

    def checked(self, feeds: Mapping[str, Any]) -> tuple[dict[str, NDArray], dict[str, int]]:
        """Feeds as arrays with the mask among them, and the named sizes. Raises: FeedError."""
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
        self,
        feeds: Mapping[str, NDArray],
        dims: Mapping[str, int],
        call: Callable[[Mapping[str, NDArray]], dict[str, NDArray]],
    ) -> dict[str, NDArray]:
        """Run padded feeds, as `checked` gives them.

        Args:
            feeds: arrays by input.
            dims: numbers of the named sizes in them.
            call: what runs feeds that fit.
        Raises: BucketMismatch at the first run in a size; as `call`.
        """
        padded = {name: self._up(name, dims[name]) for name in self.sizes}
        if all(padded[name] == dims[name] for name in padded):
            return call(feeds)
        found = call(self._fed(feeds, {**dims, **padded}))
        cut = {name: self._cut(name, value, dims) for name, value in found.items()}
        key = tuple(padded.values())
        if key not in self._checked:
            self._check(cut, call(feeds), padded)
            self._checked.add(key)
        return cut

    def _up(self, name: str, size: int) -> int:
        return next((n for n in self.sizes[name] if n >= size), size)

    def _fed(self, feeds: Mapping[str, NDArray], dims: Mapping[str, int]) -> dict[str, NDArray]:
        """Feeds of these sizes, with zeros behind what is there."""
        made: dict[str, NDArray] = {}
        for name, array in feeds.items():
            host, wanted = array.to_numpy(bits=True), self.inputs[name].bind(dims).sizes
            rows = [(0, n - have) for n, have in zip(wanted, host.shape, strict=True)]
            made[name] = from_numpy(np.pad(host, rows), bits=array.dtype)
        return made

    def _spec(self, name: str) -> Spec:
        value = self.program.output(name)
        return self.program.specs(value.node)[value.port]

    def _cut(self, name: str, value: NDArray, dims: Mapping[str, int]) -> NDArray:
        sizes = self._spec(name).bind(dims).sizes
        return value[tuple(slice(0, n) for n in sizes)].copy() if sizes != value.shape else value

    def _check(self, cut: Mapping[str, NDArray], exact: Mapping[str, NDArray], padded: Mapping[str, int]) -> None:
        wrong = []
        for name, expected in exact.items():
            ours, theirs = (np.asarray(a.to_numpy("float64")) for a in (cut[name], expected))
            room = _TOLERANCE * max(1.0, float(np.nanmax(np.abs(theirs), initial=0.0)))
            if not np.allclose(ours, theirs, _TOLERANCE, room, equal_nan=True):
                wrong.append(f"{name}: off by up to {np.nanmax(np.abs(ours - theirs)):.3g}")
        if wrong:
            raise BucketMismatch(
                "padding changes the valid part:\n  " + "\n  ".join(wrong),
                where=self.program.name,
                got=", ".join(f"{name} = {n}" for name, n in padded.items()),
                fix="a bool input that masks what is padded, named as mask=",
            )
