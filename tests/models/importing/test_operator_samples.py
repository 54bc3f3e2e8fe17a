"""Rows of the table of operators beside torch, on samples of OpInfo: values, gradients in float64, integers, bools."""

from __future__ import annotations

import os

import pytest
from operator_samples import cases, compare, small

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
FEW = set(
    [
        "add",
        "cat",
        "gather",
        "cumsum",
        "softmax",
        "tril",
        "index_put",
        "nn.functional.conv2d",
        "nn.functional.layer_norm",
        "slice_scatter",
    ]
)


@pytest.mark.parametrize("entry", [e for e in cases() if DEEP or e.name in FEW], ids=lambda e: e.formatted_name)
def test_row_matches_torch(entry):
    report = compare(entry, None if DEEP else 1)
    assert report.counts["same"] or report.counts["outside"], dict(report.counts)
    assert not small(iter([report]))
