import json
import random
import re
import struct
import tracemalloc
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import HOSTILE, deep, entry, raw_file

import safetensors
from graphwright.safetensors import BITS, HEADER_RULES, Header, HeaderError, TensorInfo, build_header, parse_header
from graphwright.safetensors.header import header_length


def parse(data: bytes) -> Header:
    length = header_length(data[:8], len(data))
    return parse_header(data[8 : 8 + length], len(data) - 8 - length)


@pytest.mark.parametrize(("rule", "key", "data"), HOSTILE, ids=[f"{i}-{row[0]}" for i, row in enumerate(HOSTILE)])
def test_each_hostile_file_is_refused_with_its_rule_and_key(rule, key, data):
    with pytest.raises(HeaderError, match=f"'{rule}'") as caught:
        parse(data)
    assert (caught.value.rule, caught.value.key) == (rule, key)
    assert len(str(caught.value)) < 3000


def test_every_rule_has_a_hostile_file():
    made_elsewhere = {"count", "bytes", "containers"}  # `count` below; the others are rules of JSON, not of a header
    assert {rule for rule, _, _ in HOSTILE} | made_elsewhere == set(HEADER_RULES)


@pytest.mark.deep
def test_more_than_200_000_tensors_are_refused_before_they_are_built():
    empty = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    rows = [b'"%d":%b' % (i, empty) for i in range(200_001)]
    assert len(parse_header(b"{" + b",".join(rows[:-1]) + b"}", 0).infos) == 200_000
    with pytest.raises(HeaderError) as caught:
        parse_header(b"{" + b",".join(rows) + b"}", 0)
    assert caught.value.rule == "count"
    with pytest.raises(HeaderError) as caught:  # one container in all: the entries themselves are counted too
        parse_header(b"{" + b",".join(b'"%d":1' % i for i in range(200_001)) + b"}", 0)
    assert caught.value.rule == "count"
    tracemalloc.start()
    with pytest.raises(HeaderError) as caught:
        parse_header(b'{"a":[' + b"[]," * 2_000_000 + b"0]}", 0)
    assert (caught.value.rule, tracemalloc.get_traced_memory()[1] < 5 * 6_000_000) == ("count", True)
    tracemalloc.stop()


def test_headers_longer_than_100_megabytes_are_refused_unread():
    assert header_length(struct.pack("<Q", 100_000_000), 10**12) == 100_000_000
    with pytest.raises(HeaderError) as caught:
        header_length(struct.pack("<Q", 100_000_001), 10**12)
    assert caught.value.rule == "length"


@pytest.mark.parametrize("shape", ["[0]", "[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]"])
def test_memory_stays_below_forty_times_the_header(shape):
    row = f'{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}'
    text = ("{" + ",".join(f'"{i:x}":{row}' for i in range(20_000)) + "}").encode()
    tracemalloc.start()
    try:
        header = parse_header(text, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(header.infos) == 20_000
    assert peak <= 40 * len(text)


def test_values_at_the_limits_are_accepted():
    info = parse(raw_file({"n" * 4096: entry("X" * 64, [1] * 32)}, b"ab")).infos[0]
    assert (len(info.key), len(info.tag), len(info.shape), info.bits) == (4096, 64, 32, None)
    assert parse(raw_file({"é" * 2048: entry()}, b"ab")).infos[0].key == "é" * 2048  # counted in bytes
    assert parse(raw_file({"a": entry(shape=[0, 2**64 - 1], end=0)})).infos[0].numel == 0
    with pytest.raises(HeaderError, match="metadata"):  # eight levels pass the nesting rule and fail the next one
        parse(raw_file(deep(8)))


def test_tensors_are_listed_in_the_order_of_their_bytes():
    rows = {"c": entry(begin=2, end=4), "z": entry(shape=[0], end=0), "a": entry(), "e": entry(shape=[0], end=0)}
    header = parse(raw_file({"__metadata__": {"k": "v"}, **rows}, b"abcd"))
    assert [info.key for info in header.infos] == ["z", "e", "a", "c"]
    assert header.metadata == {"k": "v"}
    assert header.payload_offset == len(raw_file({"__metadata__": {"k": "v"}, **rows}))


def test_bits_per_element_of_each_tag_match_the_safetensors_library():
    for tag, bits in BITS.items():
        nbytes = bits  # of 8 elements
        found = safetensors.deserialize(raw_file({"a": entry(tag, (8,), 0, nbytes)}, bytes(nbytes)))
        assert (found[0][1]["dtype"], len(found[0][1]["data"])) == (tag, nbytes)
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(raw_file({"a": entry(tag, (8,), 0, nbytes + 1)}, bytes(nbytes + 1)))


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Arguments of `TensorInfo` that tile a payload."""
    infos, at = [], 0
    for key in draw(st.lists(st.text(max_size=9).filter(lambda k: k != "__metadata__"), max_size=6, unique=True)):
        tag = draw(st.sampled_from([*BITS, "UNHEARD_OF"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=5)) + ([8] if BITS.get(tag, 8) < 8 else [])
        nbytes = prod(shape) * BITS.get(tag, 24) // 8
        infos.append((key, tag, tuple(shape), at, at + nbytes))
        at += nbytes
    return infos


metadatas = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


def payload_order(infos: list[TensorInfo]) -> list[TensorInfo]:
    return sorted(infos, key=lambda info: (info.begin, info.end))


@given(layout=layouts(), metadata=metadatas)
def test_built_headers_parse_again_and_align_the_payload_to_8_bytes(layout, metadata):
    infos = [TensorInfo(*arguments) for arguments in layout]
    start = build_header(infos, metadata)
    size = infos[-1].end if infos else 0
    header = parse(start + bytes(size))
    assert list(header.infos) == payload_order(infos)
    assert header.metadata == metadata
    assert header.payload_offset == len(start)
    assert len(start) % 8 == 0


@pytest.mark.parametrize(
    ("infos", "rule"),
    [
        ([TensorInfo("a", "U8", (2,), 0, 2), TensorInfo("a", "U8", (2,), 2, 4)], "duplicate"),
        ([TensorInfo("__metadata__", "U8", (2,), 0, 2)], "name"),
        ([TensorInfo("\ud800", "U8", (2,), 0, 2)], "utf8"),
        ([TensorInfo("a", "U8", (2,), 1, 3)], "tiling"),
        ([TensorInfo("a", "F4", (3,), 0, 2)], "alignment"),
        ([TensorInfo("a" * 4097, "U8", (2,), 0, 2)], "name"),
    ],
)
def test_invalid_headers_are_not_built(infos, rule):
    with pytest.raises(HeaderError) as caught:
        build_header(infos, {})
    assert caught.value.rule == rule


FIXED = raw_file(
    {
        "__metadata__": {"format": "pt"},
        "model.embed": entry("BF16", (3, 5), 0, 30),
        "model.norm": entry("F32", (), 30, 34),
        "empty": entry("I64", (0, 4), 34, 34),
        "packed": entry("F4", (2, 3), 34, 37),
    },
    bytes(range(37)),
)
_TOKEN = re.compile(rb'"[^"]*"|-?\d+|[\[\]{}:,]|null')
_SWAPS = [b"0", b"-1", b"1", b"2", b"37", b"18446744073709551616", b"1e3", b"null", b"true", b'"F32"', b'"U8"', b'"a"']
_SWAPS += [b"[]", b"{}", b'"__metadata__"', b'"\\ud800"', b"", b"[", b"]", b"{", b"}", b",", b":", b'"']


def mutate(seed: int) -> bytes:
    """The fixed file with one to three tokens of its header swapped, doubled or dropped, or a byte of it changed."""
    chance = random.Random(seed)
    length = struct.unpack("<Q", FIXED[:8])[0]
    text, payload = FIXED[8 : 8 + length], FIXED[8 + length :]
    for _ in range(chance.randint(1, 3)):
        tokens = list(_TOKEN.finditer(text))
        if not tokens or chance.random() < 0.1:
            at = chance.randrange(len(text) + 1)
            text = text[:at] + bytes([chance.randrange(256)]) + text[at + chance.randint(0, 1) :]
            continue
        token, other = chance.choice(tokens), chance.choice(tokens)
        swap = chance.choice([chance.choice(_SWAPS), other[0], token[0] * 2])
        text = text[: token.start()] + swap + text[token.end() :]
    if chance.random() < 0.1:
        payload = payload[: chance.randrange(len(payload) + 1)]
    return raw_file(text, payload, len(text) + chance.choice([0] * 20 + [-1, 1, 8]))


def contents(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    header = parse(data)
    at = header.payload_offset
    return {i.key: (i.tag, list(i.shape), data[at + i.begin : at + i.end]) for i in header.infos}


@given(block=st.integers(0, 10**9))
def test_mutated_files_raise_typed_errors_or_read_as_by_the_safetensors_library(block):
    for seed in range(200 * block, 200 * block + 200):
        data = mutate(seed)
        try:
            ours = contents(data)
        except HeaderError:
            continue
        if any(tag not in BITS for tag, _, _ in ours.values()) or b"-0" in data:  # the library knows neither
            continue
        theirs = safetensors.deserialize(data)
        assert ours == {key: (row["dtype"], row["shape"], bytes(row["data"])) for key, row in theirs}


def test_mutated_files_reach_both_outcomes_and_most_rules():
    outcomes = set()
    for seed in range(3000):
        try:
            contents(mutate(seed))
            outcomes.add("read")
        except HeaderError as error:
            outcomes.add(error.rule)
    assert outcomes >= {"read", "length", "json", "duplicate", "fields", "dtype", "shape", "offsets", "size", "tiling"}


def test_headers_written_by_transformers_are_read(tmp_path):
    text = json.dumps({"__metadata__": {"format": "pt"}, "w": entry("F32", (1, 2), 0, 8)}, separators=(",", ":"))
    header = parse(raw_file(text.encode() + b"   ", bytes(8)))
    assert header == Header((TensorInfo("w", "F32", (1, 2), 0, 8),), {"format": "pt"}, 8 + len(text) + 3)
