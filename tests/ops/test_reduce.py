"""Reductions: which axes `None` and `()` mean."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.array import from_numpy
from graphwright.ops import call


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "amax", "amin", "logsumexp"])
def test_axes_none_reduces_all_axes_and_an_empty_tuple_no_axis(name):
    x = np.arange(6.0).reshape(2, 3)
    known = {"sum": x.sum(), "mean": x.mean(), "amax": x.max(), "prod": 0.0, "amin": 0.0}
    whole = known.get(name, np.log(np.exp(x).sum()))
    assert call(name, from_numpy(x), axes=None).item() == pytest.approx(whole, rel=1e-14)
    assert np.array_equal(call(name, from_numpy(x), axes=()).to_numpy(), x)
