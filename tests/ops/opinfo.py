"""torch's OpInfo database as an oracle: samples, gradients and error inputs of each entry, run in both libraries."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graphwright as gw
from graphwright.autograd import names
from graphwright.errors import GraphwrightError

F = gw.nn.functional
COUNTS = Path(__file__).parent / "opinfo_counts.txt"
"""The number of samples per outcome, written by `scripts/opinfo_counts.py`."""
INTEGERS = "layers take floats only"
TRIANGLE = "torch has a gradient at the triangle that is not read, too"
KNOWN = {
    ("cholesky_inverse", "gradient different"): TRIANGLE,
    ("cholesky_solve", "gradient different"): TRIANGLE,
    ("cov", "different"): "torch computes in the dtype of the weights, here in that of the observations",
    ("i0", "gradient refused"): "computed by numpy, without a gradient",
    ("index_fill", "gradient different"): "torch adds the gradient of an entry once for each time its index is given",
    (
        "linalg.pinv",
        "gradient different",
    ): "with `hermitian` symmetric here, in torch equal to it in its symmetric part",
    ("multinomial", "error accepted"): "batches of distributions may have more axes, and no sample be asked for",
    ("nextafter", "gradient refused"): "computed by numpy, without a gradient",
    ("nn.functional.avg_pool1d", "refused"): INTEGERS,
    ("nn.functional.avg_pool2d", "refused"): INTEGERS,
    ("nn.functional.avg_pool3d", "refused"): INTEGERS,
    ("nn.functional.batch_norm", "refused"): "an input of one axis has no channels",
    ("nn.functional.conv1d", "refused"): INTEGERS,
    ("nn.functional.conv2d", "refused"): INTEGERS,
    ("nn.functional.conv3d", "refused"): INTEGERS,
    ("nn.functional.conv_transpose1d", "refused"): INTEGERS,
    ("nn.functional.conv_transpose2d", "refused"): INTEGERS,
    ("nn.functional.conv_transpose3d", "refused"): INTEGERS,
    ("nn.functional.ctc_loss", "gradient different"): "torch's is that before the softmax, which it takes for granted",
    ("nn.functional.local_response_norm", "different"): "torch takes integers only if there are none",
    ("norm", "refused"): "the nuclear norm is `linalg.matrix_norm(x, 'nuc')`",
}
"""(Entry, outcome) -> why that differs from torch."""
DTYPES = {
    getattr(torch, n): getattr(gw, n)
    for n in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
SAMPLED = (torch.float32, torch.float64, torch.int64, torch.bool)
OTHER = {"load", "compile", "mode", "trace", "pad", "open", "array", "data", "ops"}
"""Names of the package with another meaning than in torch."""
IN_PLACE = {"cauchy", "exponential", "geometric", "log_normal", "uniform"}
RANDOM = {
    *IN_PLACE, "bernoulli", "empty", "empty_like", "multinomial", "new_empty", "normal", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "nn.functional.alpha_dropout", "nn.functional.dropout",
    "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu",
}  # fmt: skip
"""Entries with random or undefined values: dtypes and shapes are compared."""
TIES = {"argsort", "kthvalue", "mode", "sort", "topk"}
"""Entries whose indices of equal entries torch does not define: the values at the indices are compared."""


SEVERAL = {"linalg.eigh", "linalg.lstsq", "linalg.qr", "linalg.svd", "qr", "svd"}
"""Entries whose results have several right values or forms: `tests/autograd/test_linalg.py` has what is unique."""


class Outside(Exception):
    """A sample has values that this library does not have: complex numbers, sparse layouts, callables of torch."""


@dataclass
class Report:
    """Outcome -> number of samples, and descriptions of deviations from torch."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outcome: str, note: str = "") -> None:
        self.counts[outcome] += 1
        if note:
            self.notes.setdefault(outcome, []).append(note.replace("\n", " ")[:400])


@cache
def entries() -> list[Any]:
    """The database, or nothing without the package that it needs."""
    try:
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    except ImportError:
        return []
    # For each sample, both modules search the stack for a test of torch, which reads the sources of all frames.
    common_utils.extract_test_fn = lambda: None
    core.extract_test_fn = lambda: None  # pyright: ignore[reportPrivateImportUsage]
    common_utils.set_rng_seed = seed_host
    return op_db


def seed_host(seed: int) -> None:
    """Seed the host's generators, without a traceback per seed for devices that torch has not initialised."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def entry_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def counterpart(op: Any) -> Callable[..., Any] | None:
    """The function here that has the arguments of the entry, or None."""
    name = op.name
    if name in ADAPTED:
        return ADAPTED[name]
    if name.startswith("nn.functional."):
        return getattr(F, name.removeprefix("nn.functional."), None)
    if name in SEVERAL:
        return None
    if op.variant_test_name == "singular":
        return lambda a, b: gw.linalg.pinv(a @ b.mT)
    if name.startswith("linalg."):
        return getattr(getattr(gw, "linalg", None), name.removeprefix("linalg."), None)
    if "." in name:
        return None
    if name in IN_PLACE:
        return getattr(gw.Tensor, f"{name}_")
    if name == "normal" and op.variant_test_name == "in_place":
        return gw.Tensor.normal_
    if name in names.NAMES:
        return names.NAMES[name].function
    if name in dir(gw) and name not in OTHER:
        return getattr(gw, name)
    return getattr(gw.Tensor, name, None)


def _written(name: str) -> Callable[..., Any]:
    return lambda x, *args, **options: getattr(x.clone(), name)(*args, **options)


ADAPTED: dict[str, Callable[..., Any]] = {
    "H": lambda x: x.H,
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "einsum": lambda tensors, equation: gw.einsum(equation, *tensors),
    "nn.functional.embedding": lambda weight, ids, **options: F.embedding(ids, weight, **options),
    "nn.functional.embedding_bag": lambda weight, ids, **options: F.embedding_bag(ids, weight, **options),
    "where": lambda x, condition, other: gw.where(condition, x, other),
    "zero_": _written("zero_"),
}
"""Entries whose function changes the order of arguments."""


def converted(value: Any, pairs: list[tuple[Any, Any]] | None) -> Any:
    """An argument of torch as one of this library; `pairs` collects tensors that require gradients."""
    if isinstance(value, torch.Tensor):
        strange = value.layout is not torch.strided or value.device.type != "cpu" or value.dim() > 60
        if value.dtype not in DTYPES or strange:
            raise Outside("dtype or layout")
        low = value.dtype in (torch.bfloat16, torch.float16)
        made = gw.tensor((value.float() if low else value).numpy(force=True).copy()).to(DTYPES[value.dtype])
        if pairs is not None and value.requires_grad:
            pairs.append((value, made.requires_grad_()))
        return made
    if isinstance(value, torch.dtype):
        if value not in DTYPES:
            raise Outside("dtype")
        return DTYPES[value]
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.layout | torch.memory_format | complex | torch.nn.Module | torch.Generator):
        raise Outside(type(value).__name__)
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, list | tuple):
        return type(value)(converted(v, pairs) for v in value)
    if isinstance(value, dict):
        return {k: converted(v, pairs) for k, v in value.items()}
    return value


def plain(value: Any) -> Any:
    """Tensors as (dtype, array), in tuples as they are nested."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES:
            raise Outside("dtype of the result")
        value = value.detach()
        low = value.dtype is torch.bfloat16
        return Values(str(value.dtype).removeprefix("torch."), (value.float() if low else value).numpy(force=True))
    if isinstance(value, gw.Tensor):
        return Values(value.dtype.name, value.detach().numpy("float32" if value.dtype.as_bits else None))
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value


@dataclass
class Values:
    dtype: str
    array: np.ndarray


TOLERANCE = {"float64": (1e-7, 1e-9), "float32": (1e-4, 1e-5)}


def difference(theirs: Any, mine: Any, random: bool = False) -> str:
    """How two results differ, or an empty text."""
    if isinstance(theirs, Values):
        if not isinstance(mine, Values):
            return f"{mine!r:.80} is no tensor"
        if mine.dtype != theirs.dtype:
            return f"dtype {mine.dtype} instead of {theirs.dtype}"
        if mine.array.shape != theirs.array.shape:
            return f"shape {mine.array.shape} instead of {theirs.array.shape}"
        if random:
            return ""
        a, b = mine.array.astype("f8"), theirs.array.astype("f8")
        relative, absolute = TOLERANCE.get(theirs.dtype, (1e-2, 1e-2))
        finite = np.abs(b[np.isfinite(b)])
        scale = max(1.0, float(finite.max(initial=0.0)) if theirs.dtype != "float64" else 1.0)
        wrong = ~np.isclose(a, b, rtol=relative, atol=absolute * scale, equal_nan=True)
        if not wrong.any():
            return ""
        return f"{wrong.sum()} of {wrong.size} values, {a[wrong][0]:.9g} instead of {b[wrong][0]:.9g}"
    if isinstance(theirs, list):
        if not isinstance(mine, list) or len(mine) != len(theirs):
            return f"{len(theirs)} parts are {mine!r:.60}"
        return next((d for d in map(difference, theirs, mine, [random] * len(theirs)) if d), "")
    if isinstance(theirs, float):
        return "" if np.isclose(theirs, mine, equal_nan=True) else f"{mine} instead of {theirs}"
    return "" if theirs == mine else f"{mine!r:.60} instead of {theirs!r:.60}"


def described(sample: Any) -> str:
    def short(value: Any) -> Any:
        return f"{value.dtype}{list(value.shape)}".removeprefix("torch.") if isinstance(value, torch.Tensor) else value

    given = [short(v) for v in (sample.input, *sample.args)]
    return f"{given} { {k: short(v) for k, v in sample.kwargs.items()} }"[:240]


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor | gw.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def samples(op: Any, most: int | None) -> Iterator[tuple[Any, bool]]:
    """Samples of each dtype, at most `most` each, and whether gradients are compared."""
    for dtype in SAMPLED:
        if dtype in op.supported_dtypes("cpu"):
            torch.default_generator.manual_seed(0)
            differentiable = dtype is torch.float64 and op.supports_autograd and op.name not in RANDOM
            for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), most):
                yield sample, differentiable


def compare(op: Any, function: Callable[..., Any], most: int | None = None) -> Report:
    """Run samples and error inputs of an entry; outcomes: same, different (known), wrong, refused, crash, outside."""
    report = Report(entry_name(op))
    for sample, differentiable in samples(op, most):
        _compare_sample(op, function, sample, differentiable, report)
    if op.error_inputs_func is not None:
        for error in islice(op.error_inputs("cpu"), most):
            _compare_error(function, error, report)
    return report


def _compare_sample(op: Any, function: Callable[..., Any], sample: Any, differentiable: bool, report: Report) -> None:
    text, pairs = described(sample), []
    try:
        args = [converted(v, pairs) for v in (sample.input, *sample.args)]
        options = converted(sample.kwargs, pairs)
        want = op(sample.input, *sample.args, **sample.kwargs)
        theirs = plain(want)
    except (Outside, RuntimeError, NotImplementedError):
        return report.add("outside")
    try:
        got = function(*args, **options)
        mine = plain(got)
    except GraphwrightError as error:
        return report.add("refused", f"{text}: {type(error).__name__} {error}")
    except Exception as error:
        return report.add("crash", f"{text}: {type(error).__name__} {error}")
    if op.name in TIES:
        theirs, mine = (_at_indices(op.name, s, r) for s, r in ((sample, theirs), (sample, mine)))
    if found := difference(theirs, mine, op.name in RANDOM or options.get("dropout_p", 0) > 0):
        known = (op.name, "different") in KNOWN
        return report.add("different" if known else "wrong", f"{text}: {found}")
    report.add("same")
    if differentiable and pairs and not options.get("dropout_p"):
        _compare_gradients(op.name, text, want, got, pairs, report)
    return None


def _at_indices(name: str, sample: Any, result: Any) -> Any:
    """Replace indices along an axis by the entries there."""
    index = result if name == "argsort" else result[1]
    axes = [v for v in sample.args if isinstance(v, int) and not isinstance(v, bool)]
    axes = axes[1:] if name in ("topk", "kthvalue") else axes
    given = sample.input.float() if sample.input.dtype is torch.bfloat16 else sample.input
    axis, host = sample.kwargs.get("dim", axes[0] if axes else -1), given.numpy(force=True)
    keeps = index.array.ndim == host.ndim
    ids = index.array if keeps else np.expand_dims(index.array, axis)
    entries = np.take_along_axis(host, ids, axis) if host.ndim else host
    taken = Values(index.dtype, entries.astype("f8") if keeps else np.squeeze(entries, axis).astype("f8"))
    return [taken] if name == "argsort" else [result[0], taken]


def _compare_gradients(name: str, text: str, want: Any, got: Any, pairs: list[tuple[Any, Any]], report: Report) -> None:
    taped = [(a, b) for a, b in zip(tensors(want), tensors(got), strict=True) if a.requires_grad]
    if not taped:
        return
    rng = np.random.default_rng(0)
    factors = [rng.normal(size=tuple(a.shape)) for a, _ in taped]
    try:
        sums = [(a * torch.tensor(f)).sum() for (a, _), f in zip(taped, factors, strict=True)]
        theirs = torch.autograd.grad(sums, [a for a, _ in pairs], allow_unused=True)
    except RuntimeError:
        return
    theirs = [torch.zeros_like(a) if g is None else g for g, (a, _) in zip(theirs, pairs, strict=True)]
    try:
        flows = [(b, f) for (_, b), f in zip(taped, factors, strict=True) if b.requires_grad]
        outputs = [(b * gw.tensor(f)).sum() for b, f in flows]
        mine = gw.grad(outputs, [b for _, b in pairs], allow_unused=True) if flows else [None] * len(pairs)
    except GraphwrightError as error:
        return report.add("gradient refused", f"{text}: {type(error).__name__} {error}")
    for (_, b), a, g in zip(pairs, theirs, mine, strict=True):
        found = difference(plain(a), plain(gw.zeros_like(b) if g is None else g))
        if found and g is None and not flows:
            return report.add("gradient refused", f"{text}: no gradient")
        if found:
            known = (name, "gradient different") in KNOWN
            return report.add("gradient different" if known else "gradient wrong", f"{text}: {found}")
    return report.add("gradient same")


def _compare_error(function: Callable[..., Any], error: Any, report: Report) -> None:
    sample = error.sample_input
    try:
        args = [converted(v, None) for v in (sample.input, *sample.args)]
        options = converted(sample.kwargs, None)
    except Outside:
        return report.add("outside")
    text = f"{described(sample)} [{error.error_regex}]"
    if "out" in options or "same device" in error.error_regex:  # a parameter that most functions lack; one device
        return report.add("outside")
    try:
        function(*args, **options)
    except GraphwrightError:
        return report.add("error typed")
    except Exception as raised:
        if isinstance(raised, TypeError) and isinstance(raised, error.error_type):  # of a value of a wrong Python type
            return report.add("error typed")
        return report.add("error untyped", f"{text}: {type(raised).__name__} {raised}")
    if not error.error_regex and any(isinstance(a, int) for a in args):  # a Python number may stand for a tensor
        return report.add("number accepted")
    return report.add("error accepted", text)
