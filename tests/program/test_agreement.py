"""The largest difference of two arrays, with infinities and NaN on either side."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.program.agreement import largest_difference

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, -4.0], [1.5, -4.0], (0.5, 4.0)),
        ([INF, 2.0, NAN, -INF], [INF, 1.0, NAN, -INF], (1.0, 2.0)),
        ([NAN, 1.0], [3.0, 1.0], (INF, 1.0)),
        ([INF], [-INF], (INF, 0.0)),
        ([2.0], [INF], (INF, 2.0)),
        ([], [], (0.0, 0.0)),
        (np.array([0.1], np.float32), np.array([0.1]), (abs(float(np.float32(0.1)) - 0.1), float(np.float32(0.1)))),
    ],
)
def test_largest_difference(a, b, expected):
    assert largest_difference(np.asarray(a), np.asarray(b)) == expected
