"""An op without a kernel gives the same values by its expansion, on a backend and on the VM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from op_cases import draws

from graphwright.array import CPU, backend, from_numpy
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, call, compute, expansion

KERNELS = backend(CPU)


class Without:
    """The CPU backend without one kernel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(KERNELS, attribute)

    def has_kernel(self, name: str) -> bool:
        return name != self.name and KERNELS.has_kernel(name)

    def bind(self, name: str, *given: Any) -> Any:
        assert name != self.name
        return KERNELS.bind(name, *given)


@pytest.mark.parametrize("name", [n for n, row in OPS.items() if row.expand is not None])
def test_an_expansion_replaces_a_missing_kernel(name: str) -> None:
    row, kernels = OPS[name], cast(Any, Without(name))
    for inputs, attrs in draws(name):
        arrays = [from_numpy(x) for x in inputs]
        given = [a.spec for a in arrays]
        specs = row.specs(given, attrs)
        work = [KERNELS.empty(s.sizes, s.dtype) for s in expansion.workspace(row, kernels, specs, given, attrs)]
        outs = [KERNELS.empty(s.sizes, s.dtype) for s in specs]
        calls = expansion.bind(row, kernels, outs, arrays, attrs, work)
        for _ in range(2):  # bound calls run any number of times
            for run in calls:
                run()
        for mine, other in zip(outs, compute(row, arrays, attrs), strict=True):
            np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=1e-9, atol=1e-9)


LOOPED = ["leaky_relu", "elu", "sech", "swiglu", "silu", "softplus", "clamp", "bce", "bce_with_logits"]


@pytest.mark.parametrize("name", LOOPED)
def test_an_elementwise_expansion_is_one_loop_on_the_vm(name: str) -> None:
    row = OPS[name]
    rng = np.random.default_rng(0)
    low, high = (0.05, 0.95) if name == "bce" else (-3, 3)
    arrays = [from_numpy(rng.uniform(low, high, (40, 70)).astype("f4")) for _ in row.operands]
    out = from_numpy(np.zeros((40, 70), "f4"))
    views = [View(a.dtype, a.shape, a.strides, KERNELS.address(a)) for a in (out, *arrays)]
    attrs = row.complete({"low": -0.5, "high": 0.75} if name == "clamp" else {})
    rows = expansion._fused(row, views[:1], views[1:], attrs)
    assert rows is not None
    VmSegment([rows])()
    (other,) = compute(row, arrays, attrs)
    np.testing.assert_allclose(out.to_numpy(), other.to_numpy(), rtol=3e-6, atol=3e-6)


def test_a_step_does_not_write_over_an_operand_whose_view_it_reads() -> None:
    """e + eᵀ for e = exp x: both operands of the sum share memory, although e is not used again."""

    def expand(ins: list[Any], attrs: dict[str, Any]) -> Any:
        e = call("exp", ins[0])
        return call("neg", e + call("permute", e, axes=(1, 0)))

    row = replace(OPS["silu"], expand=expand)
    x = np.arange(9.0).reshape(3, 3)
    (spec,) = row.specs([from_numpy(x).spec], {})
    kernels, out = cast(Any, Without("silu")), KERNELS.empty(spec.sizes, spec.dtype)
    work = [KERNELS.empty(s.sizes, s.dtype) for s in expansion.workspace(row, kernels, [spec], [spec], {})]
    for run in expansion.bind(row, kernels, [out], [from_numpy(x)], {}, work):
        run()
    np.testing.assert_allclose(out.to_numpy(), -(np.exp(x) + np.exp(x).T), rtol=1e-12)
