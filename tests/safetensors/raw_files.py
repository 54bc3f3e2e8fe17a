"""Safetensors files assembled from parts, well-formed or not, and one hostile file for each rule of the header."""

import json
import struct
from typing import Any


def raw_file(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file; `header` is JSON bytes, or a value to dump; `length` overrides the true N."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def entry(tag: Any = "U8", shape: Any = (2,), begin: Any = 0, end: Any = 2) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": tag, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def deep(levels: int) -> bytes:
    """A header whose metadata nests `levels` deep in all."""
    inner = levels - 1
    return b'{"__metadata__":' + b'{"a":' * (inner - 1) + b"{}" + b"}" * (inner - 1) + b"}"


HOSTILE: list[tuple[str, str | None, bytes]] = [
    # (rule, key, file)
    ("length", None, b""),
    ("length", None, b"\x02\0\0\0\0\0\0"),
    ("length", None, raw_file({}, length=3)),
    ("length", None, raw_file({}, length=2**63)),
    ("length", None, raw_file({}, length=2**64 - 8)),
    ("length", None, raw_file({"a": entry()}, b"ab")[:-20]),
    ("start", None, raw_file(b"")),
    ("start", None, raw_file(b" {}")),
    ("start", None, raw_file(b"[]")),
    ("start", None, raw_file(b"\xef\xbb\xbf{}")),
    ("utf8", None, raw_file(b'{"\xff":1}')),
    ("utf8", None, raw_file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')),
    ("json", None, raw_file(b'{"a":')),
    ("json", None, raw_file(b"{}x")),
    ("json", None, raw_file(b"{}\0")),
    ("json", None, raw_file(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}')),
    ("json", None, raw_file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}')),
    ("duplicate", "a", raw_file(b'{"a":%b,"a":%b}' % (2 * (json.dumps(entry()).encode(),)), b"ab")),
    ("duplicate", "k", raw_file(b'{"__metadata__":{"k":"1","k":"2"}}')),
    ("duplicate", "dtype", raw_file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}', b"ab")),
    ("nesting", None, raw_file(deep(9))),
    ("nesting", None, raw_file(b'{"a":' + b"[" * 1_000_000)),
    ("name", "n" * 4097, raw_file({"n" * 4097: entry()}, b"ab")),
    ("name", "é" * 2049, raw_file({"é" * 2049: entry()}, b"ab")),
    ("metadata", None, raw_file({"__metadata__": {"a": 1}})),
    ("metadata", None, raw_file({"__metadata__": [["a", "b"]]})),
    ("metadata", None, raw_file({"__metadata__": None})),
    ("fields", "a", raw_file({"a": 1})),
    ("fields", "a", raw_file({"a": {"dtype": "U8", "shape": [2]}}, b"ab")),
    ("fields", "a", raw_file({"a": {**entry(), "stride": [1]}}, b"ab")),
    ("dtype", "a", raw_file({"a": entry(None)}, b"ab")),
    ("dtype", "a", raw_file({"a": entry("")}, b"ab")),
    ("dtype", "a", raw_file({"a": entry("X" * 65)}, b"ab")),
    ("shape", "a", raw_file({"a": entry(shape="ab")}, b"ab")),
    ("shape", "a", raw_file({"a": entry(shape={}, end=1)}, b"a")),
    ("shape", "a", raw_file({"a": entry(shape=[-2])}, b"ab")),
    ("shape", "a", raw_file({"a": entry(shape=[2.0])}, b"ab")),
    ("shape", "a", raw_file({"a": entry(shape=[True, 2])}, b"ab")),
    ("rank", "a", raw_file({"a": entry(shape=[1] * 32 + [2])}, b"ab")),
    ("overflow", "a", raw_file({"a": entry(shape=[2**32, 2**32])}, b"ab")),
    ("overflow", "a", raw_file({"a": entry(shape=[2**63, 2, 0], end=0)})),
    ("overflow", "a", raw_file({"a": entry(shape=[0, 2**64], end=0)})),
    ("overflow", "a", raw_file({"a": entry("F64", shape=[2**58])}, b"ab")),
    ("overflow", "a", raw_file({"a": entry("UNHEARD_OF", shape=[2**64])}, b"ab")),
    ("alignment", "a", raw_file({"a": entry("F4", shape=[3])}, b"ab")),
    ("alignment", "a", raw_file({"a": entry("F6_E2M3", shape=[3])}, b"ab")),
    ("offsets", "a", raw_file({"a": {**entry(), "data_offsets": [0]}}, b"ab")),
    ("offsets", "a", raw_file({"a": {**entry(), "data_offsets": 2}}, b"ab")),
    ("offsets", "a", raw_file({"a": {**entry(), "data_offsets": {"0": 0, "1": 2}}}, b"ab")),
    ("offsets", "a", raw_file({"a": entry(begin=2, end=0)}, b"ab")),
    ("offsets", "a", raw_file({"a": entry(begin=-2, end=0)}, b"ab")),
    ("offsets", "a", raw_file({"a": entry(begin=0.0)}, b"ab")),
    ("offsets", "a", raw_file({"a": entry(begin=False)}, b"ab")),
    ("offsets", "a", raw_file({"a": entry("UNHEARD_OF", end=2**64)}, b"ab")),
    ("size", "a", raw_file({"a": entry(shape=[3])}, b"ab")),
    ("size", "a", raw_file({"a": entry("F32", shape=[1])}, b"ab")),
    ("size", "a", raw_file({"a": entry(shape=[])}, b"ab")),
    ("tiling", "b", raw_file({"a": entry(), "b": entry(begin=3, end=5)}, b"ab-cd")),
    ("tiling", "b", raw_file({"a": entry(), "b": entry(begin=1, end=3)}, b"abc")),
    ("tiling", "b", raw_file({"a": entry(), "b": entry()}, b"ab")),
    ("tiling", "a", raw_file({"a": entry(begin=1, end=3)}, b"-ab")),
    ("tiling", "b", raw_file({"a": entry(), "b": entry(shape=[0], begin=1, end=1)}, b"ab")),
    ("tiling", None, raw_file({"a": entry()}, b"ab-")),
    ("tiling", None, raw_file({"a": entry()}, b"a")),
    ("tiling", None, raw_file({}, b"-")),
]
