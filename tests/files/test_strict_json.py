import errno
import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.files import JsonError, UnreadableFile, parse_json, read_json

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=values, ascii_only=st.booleans(), limit=st.integers(0, 6))
def test_values_within_the_nesting_limit_are_parsed_as_by_json(value, ascii_only, limit):
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return
    value = json.loads(text)  # two halves of a pair that met are one character now
    rule = "nesting" if depth(value) > limit else "utf8" if not _encodes(value) else None
    if rule is None:
        assert parse_json(data, nesting=limit) == value
    else:
        with pytest.raises(JsonError, match=f"'{rule}'"):
            parse_json(data, nesting=limit)


def _encodes(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "rule", "key"),
    [
        (b'{"a":1,"b":2,"a":1}', "duplicate", "a"),
        (b'{"x":[{"k":0,"k":0}]}', "duplicate", "k"),
        (b'{"a":1,"\\u0061":2}', "duplicate", "a"),
        (b"[" * 9 + b"]" * 9, "nesting", None),
        (b"[" * 100_000, "nesting", None),
        (b'{"a":' * 100_000, "nesting", None),
        (b"[" * 8, "json", None),
        (b"", "json", None),
        (b"{} {}", "json", None),
        (b"\xef\xbb\xbf{}", "json", None),
        (b"[NaN]", "json", None),
        (b"[-Infinity]", "json", None),
        (b"[" + b"9" * 5000 + b"]", "json", None),
        (b'["\x01"]', "json", None),
        (b'["\xff"]', "utf8", None),
        (b'["\xed\xa0\x80"]', "utf8", None),
        (b'["\\ud800"]', "utf8", None),
        (b'["\\uDC00\\uD800"]', "utf8", None),
    ],
)
def test_each_rule_refuses_a_text(data, rule, key):
    with pytest.raises(JsonError, match=f"'{rule}'") as caught:
        parse_json(data)
    assert (caught.value.rule, caught.value.key) == (rule, key)


@pytest.mark.parametrize(
    "data", [b"[" * 8 + b"]" * 8, b'["[[[[[[[[[[", "\\"[[[[[[[[[["]', b'["\\ud83d\\ude00"]', b'["\\\\ud800"]']
)
def test_brackets_in_strings_and_paired_surrogates_are_accepted(data):
    assert parse_json(data) == json.loads(data)


def test_the_number_of_containers_can_be_bounded():
    assert parse_json(b'[{}, "[", []]', containers=3) == [{}, "[", []]
    with pytest.raises(JsonError) as caught:
        parse_json(b"[{}, []]", containers=2)
    assert (caught.value.rule, caught.value.got) == ("containers", 3)


@pytest.mark.parametrize("piece", [b'"\\"', b'"a', b'"', b"\\", b'\\"', b'"",', b"[],", b"9,", b'"":'])
def test_parsing_hostile_repetitive_texts_takes_linear_time(piece):
    # A quadratic scan of this text would take hours, so finishing is the proof; time itself is not measured.
    with pytest.raises(JsonError):
        parse_json(piece * (3_000_000 // len(piece)))


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"[]," * 200_000 + b"0]",
        b"[" + b"{}," * 200_000 + b"0]",
        b"{" + b",".join(b'"%x":0' % i for i in range(150_000)) + b"}",
        b"{" + b",".join(b'"%x":300' % i for i in range(150_000)) + b"}",
        ("[" + ",".join(f'"\U0001f600{i:x}"' for i in range(60_000)) + "]").encode(),
        b"[" + b'"ab",' * 150_000 + b"0]",
    ],
    ids=["lists", "objects", "keys", "numbers", "wide characters", "strings"],
)
def test_memory_stays_below_forty_times_the_text(data):
    tracemalloc.start()
    try:
        parse_json(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 40 * len(data)


def test_files_are_read_up_to_a_limit_and_named_in_errors(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": 1}')
    assert read_json(path, 8) == {"a": 1}
    with pytest.raises(JsonError, match=r"config\.json") as caught:
        read_json(str(path), 7)
    assert caught.value.rule == "bytes"
    path.write_bytes(b'{"a": 1, "a": 2}')
    with pytest.raises(JsonError, match=r"config\.json"):
        read_json(path)


def test_a_missing_file_is_a_typed_error_with_its_errno(tmp_path):
    with pytest.raises(UnreadableFile) as caught:
        read_json(tmp_path / "none.json")
    assert (caught.value.errno, caught.value.got) == (errno.ENOENT, os.strerror(errno.ENOENT))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_named_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "train.json")
    with pytest.raises(UnreadableFile) as caught:
        read_json(tmp_path / "train.json")
    assert "regular file" in str(caught.value)
    assert caught.value.errno == errno.EINVAL
