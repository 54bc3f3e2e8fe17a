"""The hash chain: every byte is covered, hostile lines are bounded, the good prefix can be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.errors import UsageError
from graphwright.graph import Chain, JournalCorrupt, canonical_json, chain
from seeds import DEEP

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def sample():
    journal = Chain()
    for i, why in enumerate(["first", "zweiter Schnitt ü\u2028", 'quote " and \\ slash']):
        journal.append({"seq": i, "why": why, "edits": [{"kind": "AddNode", "at": [i, 1.5, None]}]})
    return journal


@given(st.lists(values, max_size=5))
def test_entries_round_trip_through_a_file(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("chain") / "journal.jsonl"
    journal = Chain()
    for entry in entries:
        journal.append(entry)
    chain.write(path, journal)
    again = chain.read(path, head=journal.head)
    assert list(again) == entries
    assert again.lines() == journal.lines()
    assert [link.entry for link in chain.verify(journal.lines())] == entries


@given(values)
def test_canonical_json_does_not_depend_on_insertion_order(value):
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert text.isascii()
    assert "\n" not in text
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": object()}, b"bytes", {"a": {2}}])
def test_values_that_json_cannot_represent_are_refused(value):
    journal = sample()
    before = journal.lines()
    with pytest.raises(UsageError):
        journal.append(value)
    assert journal.lines() == before


def test_a_flipped_bit_is_reported_with_its_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = sample()
    chain.write(path, journal)
    good = path.read_bytes()
    ends = [i for i, byte in enumerate(good) if byte == 10]
    for at in range(len(good)):
        for bit in (0, 3, 5) if DEEP else ((0, 3, 5)[at % 3],):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            line = 1 + sum(end < at for end in ends)
            with pytest.raises(JournalCorrupt) as caught:
                chain.read(path)
            assert caught.value.line == line
            assert caught.value.reason
            prefix = chain.read(path, recover=True)
            assert prefix.lines() == journal.lines()[: line - 1]


def test_dropped_swapped_duplicated_and_truncated_entries_are_found(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = sample()
    a, b, c = journal.lines()
    for lines, bad in [([a, c], 2), ([b, c], 1), ([a, a], 2), ([a, c, b], 2)]:
        with pytest.raises(JournalCorrupt) as caught:
            chain.verify(lines)
        assert caught.value.line == bad
    assert len(chain.verify([a, b])) == 2  # a chain alone cannot know its end
    with pytest.raises(JournalCorrupt, match="missing or were added"):
        chain.verify([a, b], head=journal.head)
    path.write_bytes("\n".join([a, b, c]).encode())  # torn: the last newline is not there
    with pytest.raises(JournalCorrupt, match="incomplete"):
        chain.read(path)
    assert chain.read(path, recover=True).lines() == [a, b]
    path.write_bytes(b"")
    assert chain.read(path).head == chain.GENESIS


def test_appending_to_a_file_continues_the_chain(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Chain()
    for i in range(4):
        journal.append({"seq": i})
    chain.write(path, journal)
    loaded = chain.read(path, head=journal.head)
    loaded.append({"seq": 4})
    chain.write(path, loaded)
    assert [entry["seq"] for entry in chain.read(path)] == [0, 1, 2, 3, 4]
    journal.links[1].entry["seq"] = 9  # an entry changed in place
    with pytest.raises(JournalCorrupt) as caught:
        journal.verify()
    assert caught.value.line == 2


def test_hostile_lines_are_refused_in_bounded_time_and_memory(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    deep = b'{"entry":' + b"[" * 100_000 + b"]" * 100_000 + b',"hash":"","prev":""}'
    hidden = b'{"entry":"' + b"[" * 100_000 + b'","hash":"","prev":""}'
    number = b'{"entry":' + b"9" * 100_000 + b',"hash":"","prev":""}'
    twice = sample().lines()[0].encode().replace(b'{"entry"', b'{"prev":"","entry"')
    for line, reason in [
        (deep, "nested deeper"),
        (hidden, "stored hash does not match"),
        (number, "invalid journal line"),
        (twice, "canonical"),
        (b"[1]", "invalid journal line"),
        (b"\xff\xfe", "invalid journal line"),
        (b"", "invalid journal line"),
    ]:
        path.write_bytes(line + b"\n")
        with pytest.raises(JournalCorrupt, match=reason):
            chain.read(path)
    value = 1
    for _ in range(chain.MAX_DEPTH):
        value = [value]
    journal = Chain()
    journal.append(value)
    assert len(chain.verify(journal.lines())) == 1
    with pytest.raises(UsageError, match="nested too deep"):
        journal.append([value])
    monkeypatch.setattr(chain, "MAX_LINE", 1000)
    with pytest.raises(UsageError, match="too large for a journal line"):
        journal.append("x" * 1000)
    path.write_bytes(b"x" * 10_000)
    with pytest.raises(JournalCorrupt, match="longer than 1000 bytes"):
        chain.read(path)
    assert len(chain.read(path, recover=True)) == 0
