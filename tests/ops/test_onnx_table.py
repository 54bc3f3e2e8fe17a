"""Each row of the ONNX table against the op itself, run by onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnxruntime import InferenceSession

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import as_tensor
from graphwright.models.onnx import to_model
from graphwright.ops import OPS, call
from seeds import deep

ONNX = [name for name, row in OPS.items() if row.onnx is not None]
SIMPLER = sorted(n for n, row in OPS.items() if row.onnx is None and "onnx" not in row.why)
RARELY = {"roll", "rope", "adaptive_avg_pool", "max_pool"}
"""Ops of which ONNX does not have every use."""


def test_every_op_has_an_onnx_rule_a_reason_or_an_expansion():
    assert all(not (row.onnx and row.why.get("onnx")) for row in OPS.values())
    assert all(OPS[name].expand is not None for name in SIMPLER)


def single(name: str, seed: int, named: bool):
    """A program of one op over its sample, what the op gives, and the feeds; the first size named if wanted."""
    row = OPS[name]
    operands, attrs = row.sample(np.random.default_rng(seed))
    arrays = [np.asarray(o) for o in operands]
    arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in arrays]
    attrs = row.complete(attrs)
    ours = call(name, *(as_tensor(from_numpy(a)) for a in arrays), **attrs)
    b = gw.Builder("one")
    kinds = [str(a.dtype) for a in arrays]
    dims = [("N", *a.shape[1:]) if named and a.ndim else a.shape for a in arrays]
    ins = [b.input(f"x{i}", d, k) for i, (d, k) in enumerate(zip(dims, kinds, strict=True))]
    made = b.op(name, *ins, **attrs)
    values: Any = made if isinstance(made, tuple) and not hasattr(made, "port") else (made,)
    wanted = ours if isinstance(ours, tuple) else (ours,)
    if name == "max_pool":
        values, wanted = values[:1], wanted[:1]
    for i, value in enumerate(values):
        b.output(value, f"y{i}")
    return b.build(), [t.data.to_numpy() for t in wanted], {f"x{i}": a for i, a in enumerate(arrays)}


@pytest.mark.parametrize("seed", range(deep(4, 2)))
@pytest.mark.parametrize("name", [*ONNX, *SIMPLER])
def test_exported_ops_match_our_ops_in_onnxruntime(name, seed):
    program, wanted, feeds = single(name, seed, False)
    try:
        model = to_model(program)
    except gw.models.ExportError:
        assert name in RARELY
        return
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    used = {i.name for i in session.get_inputs()}
    found: Any = session.run(None, {k: v for k, v in feeds.items() if k in used})
    assert len(found) == len(wanted)
    for a, b in zip(wanted, found, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
