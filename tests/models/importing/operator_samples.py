"""Samples of torch's OpInfo database for the rows of the table: a small module that calls the operator is captured."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import GraphwrightError
from graphwright.models.errors import CaptureError, UnsupportedOperator
from graphwright.models.importing.operators import OPERATORS

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))
import opinfo
from opinfo import Outside, Report, described, difference, plain, samples

EXPLAINED = {
    "empty": "undefined values", "empty_like": "undefined values", "new_empty": "undefined values",
    "new_empty_strided": "undefined values", "empty_permuted": "undefined values", "empty_strided": "undefined values",
}  # fmt: skip
NAMES = {row.partition(".")[0] for row in OPERATORS}


def cases() -> Iterator[Any]:
    """Yield the entries whose operator has a row, by the name of the function or of its ATen operator."""
    for entry in opinfo.entries():
        if {entry.name, entry.name.rpartition(".")[2], entry.aten_name, *_aliases(entry)} & NAMES:
            yield entry


def _aliases(entry: Any) -> set[str]:
    return {alias.name for alias in entry.aliases}


class Call(torch.nn.Module):
    """A call of an operator; tensors among its arguments are the module's inputs."""

    def __init__(self, function: Any, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.function, self.leaves, self.spec = function, leaves, spec

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        return self.function(*args, **kwargs)


def compare(entry: Any, most: int | None) -> Report:
    """Capture each sample of an entry; the outcomes are those of `opinfo.compare`."""
    report = Report(opinfo.entry_name(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample, differentiable in samples(entry, most):
            _compare(entry, sample, differentiable, report)
    return report


def _compare(entry: Any, sample: Any, differentiable: bool, report: Report) -> None:
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    text = described(sample)
    try:
        if any(t.dtype not in opinfo.DTYPES or t.layout is not torch.strided for t in tensors) or not tensors:
            return report.add("outside")
        want = entry.op(*[t for t in (sample.input, *sample.args)], **sample.kwargs)
        theirs = plain(want)
    except (Outside, RuntimeError, NotImplementedError, TypeError):
        return report.add("outside")
    values = [t.detach() for t in tensors]
    try:
        program = gw.from_torch(Call(entry.op, leaves, spec), tuple(values))
    except CaptureError:
        return report.add("outside")
    except UnsupportedOperator as error:
        return report.add("refused", f"{text}: {', '.join(error.operators)}")
    except GraphwrightError as error:
        return report.add("refused", f"{text}: {type(error).__name__} {error}")
    except Exception as error:
        return report.add("crash", f"{text}: {type(error).__name__} {error} {getattr(error, '__notes__', '')}")
    feeds = [gw.tensor(v.numpy(force=True).copy()) for v in values]
    pairs = [(t, f.requires_grad_()) for t, f in zip(tensors, feeds, strict=True) if t.requires_grad]
    try:
        found = program(**dict(zip(program.input_names(), feeds, strict=True)))
        got = list(found.values()) if len(found) > 1 or isinstance(want, list | tuple) else found["out"]
        mine = plain(got)
    except GraphwrightError as error:
        return report.add("refused", f"{text}: {type(error).__name__} {error}")
    if isinstance(theirs, list):
        theirs = [v for v in theirs if v is not None]
    if entry.name in opinfo.TIES:
        theirs, mine = (opinfo._at_indices(entry.name, sample, r) for r in (theirs, mine))
    random = entry.name in opinfo.RANDOM or sample.kwargs.get("dropout_p", 0) > 0 or entry.name in EXPLAINED
    if wrong := difference(theirs, mine, random):
        return report.add("different" if (entry.name, "different") in opinfo.KNOWN else "wrong", f"{text}: {wrong}")
    report.add("same")
    if differentiable and pairs and not sample.kwargs.get("dropout_p"):
        opinfo._compare_gradients(entry.name, text, want, got, pairs, report)
    return None


def small(reports: Iterator[Report]) -> list[str]:
    """Return the descriptions of wrong results."""
    return [f"{r.name}: {note}" for r in reports for kind in ("wrong", "gradient wrong", "crash")
            for note in islice(r.notes.get(kind, ()), 3)]  # fmt: skip
