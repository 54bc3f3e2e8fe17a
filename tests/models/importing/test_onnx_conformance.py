"""The node tests that the `onnx` package ships: none fails, and nearly all operators pass."""

from __future__ import annotations

from zlib import crc32

import onnx_nodes
import pytest
from onnx_nodes import HEAVY, cases, check


def failures(chosen):
    """Return the number of tests that passed, and the errors of the others."""
    passed, failed = 0, []
    for case in chosen:
        try:
            passed += check(case) == "passed"
        except Exception as error:
            failed.append(f"{case.name}: {type(error).__name__}: {str(error).strip()[:200]}")
    return passed, failed


def test_a_third_of_the_node_tests():
    chosen = [c for c in cases(frozenset(HEAVY)) if crc32(c.name.encode()) % 3 == 0]
    passed, failed = failures(chosen)
    assert not failed, "\n".join(failed)
    assert passed >= 0.75 * len(chosen)


@pytest.mark.deep
def test_all_node_tests():
    chosen = cases()
    passed, failed = failures(chosen)
    assert not failed, "\n".join(failed)
    assert passed >= 0.8 * len(chosen)


@pytest.mark.deep
def test_the_table_of_the_docs_is_the_count(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "importing_onnx.md").read_text()
    assert onnx_nodes.table() in text


def test_a_wrong_row_of_the_table_turns_a_node_test_red(monkeypatch):
    from dataclasses import replace

    from graphwright.models.importing.onnx_operators import OPERATORS

    case = next(c for c in cases(frozenset(HEAVY)) if c.name == "test_hardsigmoid")
    assert check(case) == "passed"
    wrong = replace(OPERATORS["HardSigmoid"], function=lambda x, *, alpha=0.2, beta=0.5: x * alpha + beta)
    monkeypatch.setitem(OPERATORS, "HardSigmoid", wrong)
    with pytest.raises(AssertionError, match="Not equal"):
        check(case)
