"""Samples of torch's OpInfo database for the rows of the table: a small module that calls the operator is captured."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import GraphwrightError
from graphwright.models.errors import CaptureError, UnsupportedOperator
from graphwright.models.importing.operators import OPERATORS

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))
import opinfo
from opinfo import Report, described, difference, plain, samples

UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
"""Entries whose values are not defined: dtypes and shapes are compared."""
STATISTICS = "torch updates the mean entry by entry, which makes it NaN from an infinity on"
SUMS = "whether an infinity times a 0 of the padding is added depends on torch's kernel"
DIFFERENT: dict[tuple[str, str], str] = {
    ("cdist", "special different"): "torch multiplies matrices, so that the distance of an infinity is NaN",
    (
        "linspace",
        "different",
    ): "for integers torch's decomposition, which is captured, rounds otherwise than its kernel",
    ("native_group_norm", "special different"): STATISTICS,
    ("native_layer_norm", "special different"): STATISTICS,
    ("nn.functional.adaptive_max_pool2d", "special different"): "torch has the index of the last of several NaN",
    ("nn.functional.adaptive_max_pool3d", "special different"): "torch has the index of the last of several NaN",
    ("nn.functional.conv_transpose1d", "special different"): SUMS,
    ("nn.functional.conv_transpose2d", "special different"): SUMS,
    ("nn.functional.conv_transpose3d", "special different"): SUMS,
    (
        "nn.functional.scaled_dot_product_attention",
        "special different",
    ): "a query whose products are all -inf gives 0 in torch, as if it saw no key, and NaN here",
    ("nn.functional.embedding_bag", "special different"): "torch's maximum passes over a NaN that is not the first",
    ("std_mean", "special different"): STATISTICS,
    ("var_mean", "special different"): STATISTICS,
}
"""(Entry, outcome) -> why a row differs from torch."""
OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.int32, torch.uint8)
"""Dtypes of a few more samples than those of `opinfo.SAMPLED`."""
TOGETHER = 40
"""Most samples in one capture."""
MOST = 30
"""Most samples of an entry and dtype; pools and windows have up to a thousand that differ in strides alone."""
REFUSED = 6
"""Refused samples after which those of an entry are not captured one by one any more, if none was captured."""
NAMES = {row.partition(".")[0] for row in OPERATORS}


def cases() -> Iterator[Any]:
    """Yield the entries whose operator has a row, by the name of the function or of its ATen operator."""
    for entry in opinfo.entries():
        if {entry.name, entry.name.rpartition(".")[2], entry.aten_name, *_aliases(entry)} & NAMES:
            yield entry


def _aliases(entry: Any) -> set[str]:
    return {alias.name for alias in entry.aliases}


class Calls(torch.nn.Module):
    """Calls of a function with arguments of several samples; the tensors among them are the module's inputs."""

    def __init__(self, function: Any, given: list[tuple[list[Any], Any]]) -> None:
        super().__init__()
        self.function, self.given = function, given

    def forward(self, *tensors: torch.Tensor) -> Any:
        values, results = iter(tensors), []
        for leaves, spec in self.given:
            filled = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            results += flat(self.function(*args, **kwargs))
        return tuple(results)


@dataclass
class Prepared:
    """A sample with its result in torch."""

    text: str
    leaves: list[Any]
    spec: Any
    want: list[torch.Tensor]
    differentiable: bool
    sample: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def random(self) -> bool:
        return bool(self.sample.kwargs.get("dropout_p"))


def flat(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def compare(entry: Any, most: int | None, progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Capture the samples of an entry; the outcomes are those of `opinfo.compare`.

    Samples are captured together, up to `TOGETHER` of them; where that fails, in halves, down to a sample alone.
    Calls `progress` after each capture.
    """
    report, ready = Report(opinfo.entry_name(entry)), list[Prepared]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample, differentiable in variants(entry, most):
            made = prepared(entry, sample, differentiable)
            if made is None:
                report.add("outside")
                continue
            ready.append(made)
            if len(ready) == TOGETHER:
                _compare(entry, ready, report, progress)
                ready = []
        if ready:
            _compare(entry, ready, report, progress)
        for error in islice(entry.error_inputs("cpu"), most) if entry.error_inputs_func is not None else ():
            _compare_error(entry, error, report)
            progress(report)
    return report


def variants(entry: Any, most: int | None) -> Iterator[tuple[Any, bool]]:
    """Yield the samples of `opinfo.samples`, then samples in other dtypes, not contiguous, without axes, and empty."""
    yield from samples(entry, MOST if most is None else most)
    known = entry.supported_dtypes("cpu")
    few = 2 if most is None else 1
    for dtype in OTHER_DTYPES:
        if dtype in known:
            for sample in islice(entry.sample_inputs("cpu", dtype), few):
                yield sample, False
    first = torch.float32 if torch.float32 in known else torch.int64
    if first not in known:
        return
    for sample in islice(entry.sample_inputs("cpu", first), few):
        with suppress(Exception):  # of what is no tensor
            yield sample.noncontiguous(), False
    if isinstance(entry, UnaryUfuncInfo | BinaryUfuncInfo):
        for shape in ((), (0, 3)):
            sample = next(iter(entry.sample_inputs("cpu", first)))
            yield sample.transform(lambda v, shape=shape: _reshaped(v, shape)), False


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of one entry or none as one of the shape."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.new_empty(shape) if shape else value.reshape(-1)[0]


def prepared(entry: Any, sample: Any, differentiable: bool) -> Prepared | None:
    """Run a sample in torch; None if torch or this library does not have its values."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    leaves = [_own(leaf) for leaf in leaves]
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(t.dtype not in opinfo.DTYPES or t.layout is not torch.strided for t in given):
        return None
    if any(isinstance(leaf, torch.dtype) and leaf not in opinfo.DTYPES for leaf in leaves):
        return None
    try:
        kept = [t.clone() if isinstance(t, torch.Tensor) and not t.requires_grad else t for t in leaves]
        args, kwargs = pytree.tree_unflatten(kept, spec)  # as an operator may write, e.g. running statistics
        want = flat(entry.op(*args, **kwargs))
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        return None
    if not want or any(t.dtype not in opinfo.DTYPES for t in want):
        return None
    return Prepared(described(sample), leaves, spec, want, differentiable, sample)


def _own(leaf: Any) -> Any:
    """Return a tensor without gradient in memory of its own: some generators write into what they yielded before."""
    alone = isinstance(leaf, torch.Tensor) and not leaf.requires_grad and leaf.is_contiguous()
    return leaf.clone() if alone else leaf


def _compare(entry: Any, given: list[Prepared], report: Report, progress: Callable[[Report], None]) -> None:
    try:
        program, feeds = _captured(entry, given)
        found = flat_tensors(program(**dict(zip(program.input_names(), feeds, strict=True))))
    except Exception as error:
        if len(given) == 1 or (report.counts["refused"] >= REFUSED and not report.counts["same"]):
            for one in given:
                _add_error(one.text, error, report)
        else:
            _compare(entry, given[: len(given) // 2], report, progress)
            _compare(entry, given[len(given) // 2 :], report, progress)
        return progress(report)
    if len(found) != sum(len(one.want) for one in given):
        report.add("wrong", f"{given[0].text}: a program of {len(given)} samples lacks results")
        return progress(report)
    results, inputs = iter(found), iter(feeds)
    for one in given:
        got, own = [next(results) for _ in one.want], [next(inputs) for _ in one.tensors]
        _compare_result(entry, one, got, own, report)
    _compare_special(entry, given, program, report)
    return progress(report)


def _captured(entry: Any, given: list[Prepared]) -> tuple[gw.Program, list[gw.Tensor]]:
    values = [t.detach() for one in given for t in one.tensors]
    alone = not values  # a module needs an input
    args = (torch.zeros(1),) if alone else tuple(values)
    program = gw.from_torch(Calls(entry.op, [(one.leaves, one.spec) for one in given]), args)
    feeds = converted_feeds(args)
    wanted = [t.requires_grad for one in given for t in one.tensors] or [False]
    return program, [f.requires_grad_() if w else f for f, w in zip(feeds, wanted, strict=True)]


def converted_feeds(values: Sequence[torch.Tensor]) -> list[gw.Tensor]:
    """Return tensors of this library with the same entries."""
    return [opinfo.converted(v.detach(), None) for v in values]


def flat_tensors(found: Any) -> list[gw.Tensor]:
    """Return the outputs of a program in order."""
    return [v for value in found.values() for v in (value if isinstance(value, list | tuple) else [value])]


def _add_error(text: str, error: Exception, report: Report) -> None:
    if isinstance(error, CaptureError):
        report.add("outside", f"{text}: {error.got}")
    elif isinstance(error, UnsupportedOperator):
        report.add("refused", f"{text}: {', '.join(error.operators)}")
    elif isinstance(error, GraphwrightError):
        report.add("refused", f"{text}: {type(error).__name__} {error}")
    else:
        report.add("crash", f"{text}: {type(error).__name__} {error} {getattr(error, '__notes__', '')}")


def _compare_result(entry: Any, one: Prepared, got: list[Any], own: list[gw.Tensor], report: Report) -> None:
    theirs, mine = plain(one.want), plain(got)
    if entry.name in opinfo.TIES:
        single = len(theirs) == 1
        theirs, mine = (opinfo._at_indices(entry.name, one.sample, r[0] if single else r) for r in (theirs, mine))
    random = entry.name in opinfo.RANDOM or one.random or entry.name in UNDEFINED
    if wrong := difference(theirs, mine, random):
        return report.add("different" if (entry.name, "different") in DIFFERENT else "wrong", f"{one.text}: {wrong}")
    report.add("same")
    pairs = [(t, f) for t, f in zip(one.tensors, own, strict=True) if t.requires_grad]
    if one.differentiable and pairs and not one.random:
        opinfo._compare_gradients(entry.name, one.text, one.want, got, pairs, report)
    return None


# -- infinities and NaN ------------------------------------------------------------------------------------------------
def _compare_special(entry: Any, given: list[Prepared], program: gw.Program, report: Report) -> None:
    """Run the program again on infinities, zeros of both signs and NaN, and compare with torch."""
    if entry.name in opinfo.RANDOM or entry.name in UNDEFINED or entry.name in opinfo.TIES | opinfo.SEVERAL:
        return
    many = not isinstance(entry, UnaryUfuncInfo | BinaryUfuncInfo)  # kernels of 16-bit sums differ between processors
    for name, put in SPECIAL.items():
        changed = [
            [put(t.detach().clone(memory_format=torch.contiguous_format), k) for k, t in enumerate(one.tensors)]
            for one in given
        ]
        feeds = converted_feeds([t for own in changed for t in own] or [torch.zeros(1)])
        found = iter(flat_tensors(program(**dict(zip(program.input_names(), feeds, strict=True)))))
        for one, own in zip(given, changed, strict=True):
            got = [next(found) for _ in one.want]
            if one.random or not any(t.dtype.is_floating_point for t in own) or (many and any(map(_low, own))):
                continue
            values = iter(own)
            leaves = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in one.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, one.spec)
            try:
                theirs = plain(flat(entry.op(*args, **kwargs)))
            except RuntimeError:
                continue
            if wrong := difference(theirs, plain(got)):
                known = (entry.name, "special different") in DIFFERENT
                report.add("special different" if known else "special wrong", f"{one.text} with {name}: {wrong}")
            else:
                report.add("special same")


def _low(x: torch.Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def _infinities(x: torch.Tensor, k: int) -> torch.Tensor:
    if x.is_floating_point() and x.numel() and not k:
        x.view(-1)[0], x.view(-1)[-1] = float("inf"), float("-inf")
    return x


def _nan(x: torch.Tensor, k: int) -> torch.Tensor:
    if x.is_floating_point() and x.numel() and not k:
        x.view(-1)[x.numel() // 2] = float("nan")
    return x


def _all(x: torch.Tensor, k: int) -> torch.Tensor:
    if x.is_floating_point() and x.numel():
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.5], dtype=x.dtype)
        x.view(-1)[:] = values[(torch.arange(x.numel()) // 7**k) % 7]
    return x


SPECIAL = {"infinities": _infinities, "a NaN": _nan, "all special values": _all}


# -- error inputs ------------------------------------------------------------------------------------------------------
def _compare_error(entry: Any, error: Any, report: Report) -> None:
    """Capture and run what torch refuses: an error of this library is expected, with a line where torch's capture ends.

    Inputs that torch takes, because only a test of other devices or dtypes refuses them, are outside. So are results
    in the memory of operands (`out`), of which a graph knows nothing.
    """
    sample = error.sample_input
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = all(t.dtype in opinfo.DTYPES and t.layout is torch.strided for t in given)
    if not given or not known or "out" in sample.kwargs:
        return report.add("outside")
    try:
        entry.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:
        text = f"{described(sample)} [{error.error_regex}]"
    else:
        return report.add("outside")
    one = Prepared(text, leaves, spec, [], False, sample)
    try:
        program, feeds = _captured(entry, [one])
        program(**dict(zip(program.input_names(), feeds, strict=True)))
    except CaptureError as found:
        return report.add("error typed") if re.search(r"[.]py:[0-9]+$", str(found.where)) else report.add(
            "error without line", f"{text}: {found.where}")  # fmt: skip
    except GraphwrightError:
        return report.add("error typed")
    except Exception as found:
        return report.add("error untyped", f"{text}: {type(found).__name__} {found}")
    return report.add("error accepted", text)


WRONG = (
    "wrong", "gradient wrong", "special wrong", "crash", "error untyped", "error without line", "error accepted",
)  # fmt: skip
"""Outcomes that must not occur."""


def small(reports: Iterator[Report]) -> list[str]:
    """Return the descriptions of wrong results."""
    return [f"{r.name}: {note}" for r in reports for kind in WRONG
            for note in islice(r.notes.get(kind, ()), 3)]  # fmt: skip
