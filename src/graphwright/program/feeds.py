"""Inputs of a run: checked as a whole before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphwright.array import Spec
from graphwright.autograd import Tensor, as_tensor
from graphwright.errors import GraphwrightError
from graphwright.program.errors import FeedError
from graphwright.program.program import Program


def check_feeds(p: Program, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Feeds as tensors of the declared dtypes, and the numbers behind named sizes.

    Raises: FeedError listing every missing, unknown, misshapen or mistyped feed.
    """
    dims: dict[str, int] = {}
    result: dict[str, Any] = {}
    wrong: list[str] = []
    declared = {p.path(n): p.spec(n) for n in p.inputs()}
    wrong += [f"{name}: not an input" for name in feeds if name not in declared]
    for name, spec in declared.items():
        if name not in feeds:
            wrong.append(f"{name}: missing, expected {spec}")
            continue
        try:
            tensor = as_tensor(feeds[name])
        except GraphwrightError as error:
            wrong.append(f"{name}: {error.what}, got {error.got}")
            continue
        if tensor.dtype is not spec.dtype:
            if not _exact(tensor, spec):
                wrong.append(f"{name}: expected {spec}, got {tensor.spec}")
                continue
            tensor = tensor.to(spec.dtype)
        if not spec.match(tensor.shape, dims):
            bound = spec.bind(dims)
            wrong.append(f"{name}: expected {bound}, got {tensor.spec}")
        result[name] = tensor
    if wrong:
        raise FeedError(
            "inputs do not fit:\n  " + "\n  ".join(wrong),
            where=p.name,
            expected=", ".join(f"{n}: {s}" for n, s in declared.items()),
        )
    return result, dims


def _exact(tensor: Tensor, spec: Spec) -> bool:
    """True if a conversion to the declared dtype cannot change a value: within the kind, to at least the width."""
    have, want = tensor.dtype, spec.dtype
    return have.kind == want.kind and (have.itemsize <= want.itemsize or have.name == "float64")
