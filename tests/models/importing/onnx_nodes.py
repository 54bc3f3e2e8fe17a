"""The node tests that the `onnx` package ships, run on imported programs."""

from __future__ import annotations

import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, defs, numpy_helper

import graphwright as gw
from graphwright.array import finfo, from_numpy
from graphwright.array.dtype import DTYPES
from graphwright.models.errors import UnsupportedOperator
from graphwright.models.importing.onnx_files import OPSETS
from graphwright.models.importing.onnx_operators import OPERATORS

_BITS = {d.onnx: d for d in DTYPES.values()}


HEAVY = {"averagepool", "lppool", "maxpool"}
"""Modules of the package whose tests take longer to make than all others together."""
NOISY = {"test_dft_inverse", "test_dft_inverse_opset19"}
"""Tests whose expected zeros were rounded in float32 to 2e-7 (entries are up to 50): compared within 1e-6."""


@cache
def cases(without: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """Return the node tests of the domain `ai.onnx`, in the order of their names, without those of some modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import onnx.backend.test.case.node as package

        for module in pkgutil.iter_modules(package.__path__):
            if module.name not in without:
                import_module(f"{package.__name__}.{module.name}")
        found = [c for c in package._NodeTestCases if _is_of_onnx(c)]
    return tuple(sorted(found, key=lambda c: c.name))


def _is_of_onnx(case: Any) -> bool:
    """Return whether a test is of the domain `ai.onnx`, and of an operator that opset 13 has."""
    domains = {o.domain for o in case.model.opset_import}
    return domains <= {"", "ai.onnx"} and not defs.get_schema(case.model.graph.node[0].op_type).deprecated


@cache
def _by_name() -> dict[str, Any]:
    from onnx.backend.test.case.node import _NodeTestCases

    return {c.name: c for c in _NodeTestCases}


def opset(case: Any) -> int:
    """Return the version that a test asks for; a test of an operator's last definition before 13 holds for 13."""
    return max(next((o.version for o in case.model.opset_import if o.domain in ("", "ai.onnx")), 1), OPSETS[0])


def operator(case: Any) -> str:
    """Return the operator that a test is about, also of a test of its expansion."""
    return case.model.graph.node[0].op_type if not expanded(case) else _home(case).model.graph.node[0].op_type


def expanded(case: Any) -> bool:
    """Return whether a test runs the definition of an operator by others."""
    return "_expanded" in case.name


def _home(case: Any) -> Any:
    return _by_name().get(re.sub(r"_expanded(_ver\d+)?$", "", case.name), case)


def frozen(case: Any) -> tuple[ModelProto, list[int]]:
    """Return the model of a test with the inputs constant that say shapes, and the positions of the others."""
    model = ModelProto()
    model.CopyFrom(case.model)
    for entry in model.opset_import:
        entry.version = max(entry.version, OPSETS[0])
    node = _home(case).model.graph.node[0]
    row = OPERATORS.get(node.op_type)
    fixed = {node.input[i] for i in row.known if i < len(node.input) and i} if row is not None else set()
    if node.op_type in ("Range", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix", "ConstantOfShape"):
        fixed = set(node.input)
    rest = []
    for i, (entry, value) in enumerate(zip(case.model.graph.input, case.data_sets[0][0], strict=True)):
        if entry.name in fixed and not isinstance(value, list):
            tensor = value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value))
            tensor.name = entry.name
            model.graph.initializer.append(tensor)
        else:
            rest.append(i)
    return model, rest


def _array(value: Any) -> Any:
    """Return a test's value as an array of ours."""
    if isinstance(value, TensorProto):
        kind, host = _BITS[value.data_type], numpy_helper.to_array(value)
        return from_numpy(host.view(kind.numpy), bits=kind) if kind.as_bits else from_numpy(host.astype(kind.numpy))
    host = np.asarray(value)
    if host.dtype.kind == "V" or (host.dtype.name in DTYPES and DTYPES[host.dtype.name].as_bits):
        kind = DTYPES[host.dtype.name]
        return from_numpy(host.view(kind.numpy), bits=kind)
    return from_numpy(host)


def _numbers(value: Any) -> np.ndarray:
    host = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    return host.astype(np.float64) if host.dtype.kind not in "iub?" else host


def check(case: Any) -> str:
    """Run a test; returns "passed", or "unsupported: " with the reason. Raises: any error for a failed test."""
    if opset(case) not in OPSETS:
        return f"unsupported: opset {opset(case)}"
    try:
        model, rest = frozen(case)
        program = gw.from_onnx(model)
    except UnsupportedOperator as error:
        return f"unsupported: {', '.join(error.operators)}"
    inputs, outputs = case.data_sets[0]
    feeds = dict(zip(program.input_names(), (_array(inputs[i]) for i in rest), strict=True))
    with program.run(feeds, keep="outputs") as run:
        for wanted, name in zip(outputs, program.output_names(), strict=True):
            found = run[name].to_numpy()
            if run[name].dtype.as_bits:
                found = run[name].to_numpy("float64")
            expected = _numbers(wanted)
            assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
            if expected.dtype.kind in "iub?":
                assert found.dtype == expected.dtype, f"{name}: dtype {found.dtype}, expected {expected.dtype}"
            low = 2 * finfo(run[name].dtype).eps if run[name].dtype.is_low else 0.0  # kernels round 16 bits elsewhere
            np.testing.assert_allclose(found, expected, rtol=max(case.rtol, low),
                                       atol=1e-6 if case.name in NOISY else case.atol)  # fmt: skip
    return "passed"


def results() -> Iterator[tuple[Any, str]]:
    """Yield each test with its result: `check`'s, or "failed: " with the error."""
    for case in cases():
        try:
            yield case, check(case)
        except Exception as error:
            yield case, f"failed: {type(error).__name__}: {str(error).strip()[:300]}"


def count(last: int = OPSETS[-1]) -> dict[str, dict[str, int]]:
    """Return for each operator how many of its tests passed, are unsupported and failed.

    Args:
        last: the last opset whose tests count.
    """
    found: dict[str, Counter[str]] = {}
    for case, result in results():
        if opset(case) <= last:
            found.setdefault(operator(case), Counter())[result.partition(":")[0]] += 1
    return {name: dict(counts) for name, counts in sorted(found.items())}


def table() -> str:
    """Return the counts as a table in Markdown: opsets 13 to 23, and all; then the unsupported ones by reason."""
    totals, left = {23: Counter[str](), OPSETS[-1]: Counter[str]()}, Counter[str]()
    for case, result in results():
        kind, _, reason = result.partition(": ")
        for last, total in totals.items():
            total[kind] += opset(case) <= last
        if kind == "unsupported":
            left[_REASONS.get(re.split(r"[ ,]", reason)[0], reason.split(",")[0])] += 1
    lines = ["| opsets | passed | unsupported | failed | passed, % |", "| --- | --- | --- | --- | --- |"]
    for last, total in totals.items():
        share = 100 * total["passed"] / sum(total.values())
        lines.append(f"| 13 to {last} | {total['passed']} | {total['unsupported']} | {total['failed']} | {share:.0f} |")
    lines += ["", "| unsupported because of | node tests |", "| --- | --- |"]
    lines += [f"| {reason} | {n} |" for reason, n in sorted(left.items(), key=lambda item: (-item[1], item[0]))]
    return "\n".join(lines)


_REASONS = {
    **dict.fromkeys(("tensor", "tensors"), "other data types: strings, UINT16 to UINT64, 2 to 6 bits, 8-bit floats"),
    "output": "inputs or outputs that are sequences or optional",
    "input": "inputs or outputs that are sequences or optional",
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), "control flow: If, Loop, Scan, SequenceMap"),
    **dict.fromkeys(("StringSplit", "StringNormalizer", "StringConcat", "RegexFullMatch", "TfIdfVectorizer"), "text"),
    **dict.fromkeys(("OptionalHasElement", "OptionalGetElement"), "inputs or outputs that are sequences or optional"),
    **dict.fromkeys(("Dropout", "Bernoulli", "RandomUniformLike"), "random numbers"),
    **dict.fromkeys(("Unique", "NonZero", "NonMaxSuppression"), "results whose shape depends on values"),
}
"""First word of a reason -> the reason in the table."""
