"""The tests of the header's rules find each bug that is planted in them: a check left out, a limit off by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_header as tests
from raw_files import HOSTILE, entry, raw_file

from graphwright.safetensors import header
from mutations import module_mutants

SAME = {
    "_entry: `not key.isascii() and len(key.encode()) > MAX_NAME` without part 0": "it saves encoding ASCII names",
}
"""Mutants that accept and refuse the same files, with the reason."""


def _cases() -> list[Callable[[], Any]]:
    (not_built,) = (m for m in vars(tests.test_invalid_headers_are_not_built)["pytestmark"] if m.name == "parametrize")
    refused = [partial(tests.test_each_hostile_file_is_refused_with_its_rule_and_key, *row) for row in HOSTILE]
    unbuilt = [partial(tests.test_invalid_headers_are_not_built, *row) for row in not_built.args[1]]
    return [
        *refused,
        *unbuilt,
        tests.test_values_at_the_limits_are_accepted,
        tests.test_tensors_are_listed_in_the_order_of_their_bytes,
        tests.test_headers_longer_than_100_megabytes_are_refused_unread,
        partial(
            vars(tests.test_built_headers_parse_again_and_align_the_payload_to_8_bytes)["hypothesis"].inner_test,
            layout=[("a", "F4", (2, 8), 0, 8), ("b", "U8", (0,), 8, 8)],
            metadata={"k": "v"},
        ),
        tests.test_bits_per_element_of_each_tag_match_the_safetensors_library,
        _five_tensors_and_no_more,
    ]


def _five_tensors_and_no_more() -> None:
    """As test_more_than_200_000_tensors_are_refused, under a limit that takes no time to reach."""
    rows = {str(i): entry(shape=[0], end=0) for i in range(6)}
    assert len(tests.parse(raw_file({k: rows[k] for k in "01234"})).infos) == 5
    for header_of in (rows, dict.fromkeys(rows, 1)):
        with pytest.raises(tests.HeaderError, match="'count'"):
            tests.parse(raw_file(header_of))


def _found(space: dict[str, Any], patch: pytest.MonkeyPatch) -> str | None:
    space["MAX_TENSORS"] = 5
    for name in ("header_length", "parse_header", "build_header"):
        patch.setattr(tests, name, space[name])
    for case in _cases():
        try:
            case()
        except (Exception, pytest.fail.Exception) as error:  # a rule not kept, or a mutant that does not even run
            return repr(error)
    return None


def test_each_bug_in_a_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = module_mutants(header, keep=("Header", "HeaderError", "TensorInfo"))
    what, unchanged = next(mutants)
    assert (what, _found(unchanged, monkeypatch)) == ("none", None)
    missed = [what for what, space in mutants if _found(space, monkeypatch) is None]
    assert sorted(missed) == sorted(SAME)
