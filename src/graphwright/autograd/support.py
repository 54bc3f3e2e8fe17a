"""A table of the ops and dtypes that a device supports, found by running each op on its sample operands."""

from __future__ import annotations

import numpy as np

from graphwright.array import CPU, DTYPES, Device, DType, MissingKernel, NDArray, backend, from_numpy
from graphwright.errors import GraphwrightError, UsageError
from graphwright.ops import OPS, Op, compute, expansion


def support(device: Device | str = CPU) -> dict[str, dict[str, str]]:
    """Return op -> dtype -> `native`, `expanded` (runs as simpler ops), `view`, `refused` or `missing`.

    `refused` means that the op accepts no operands of this dtype, on any device. Raises: DeviceUnavailable.
    """
    there = Device.parse(device)
    kinds = [kind for kind in DTYPES.values() if kind.kind != "float8"]
    return {name: {kind.name: _how(row, kind, there) for kind in kinds} for name, row in OPS.items()}


def _how(row: Op, kind: DType, device: Device) -> str:
    inputs, attrs = row.sample(np.random.default_rng(0))
    attrs = row.complete(attrs)
    try:
        arrays = [_as(np.asarray(x), kind, device) for x in inputs]
        row.specs([a.spec for a in arrays], attrs)
    except UsageError:
        return "refused"
    except MissingKernel:
        return "missing"
    if row.view is not None:
        return "view"
    try:
        for result in compute(row, arrays, attrs):
            if device.kind != "meta":
                result.to_numpy(bits=True)  # run queued work
    except (GraphwrightError, RuntimeError, TypeError):  # including errors of the backend's library
        return "missing"
    return "expanded" if expansion.expanded(row, backend(device)) else "native"


def _as(host: np.ndarray, kind: DType, device: Device) -> NDArray:
    """Return a sample operand on the device; float64 is cast to `kind`, other dtypes (ids, masks, counts) are kept."""
    array = from_numpy(host)
    if host.dtype == np.float64:
        wide = array if kind.kind != "uint" else from_numpy(np.abs(host))
        array = compute(OPS["cast"], [wide], {"dtype": kind})[0]
    return array.to(device)
