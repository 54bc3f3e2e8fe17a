"""The header of a safetensors file: key, dtype, shape and byte range of each tensor, fully validated.

A file is the length N as u64 little-endian, N bytes of JSON, then the payload; offsets of tensors are relative to the
payload. Reading takes time linear in N and memory below 40 N; each broken rule is a `HeaderError(rule, key)`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from graphwright.files import JsonError, parse_json
from graphwright.files.errors import shorten
from graphwright.safetensors.errors import MAX_HEADER, MAX_NAME, MAX_RANK, MAX_TAG, MAX_TENSORS, HeaderError

LENGTH = struct.Struct("<Q")
METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_U64 = 2**64

BITS: dict[str, int] = {
    **dict.fromkeys(["F64", "I64", "U64", "C64"], 64),
    **dict.fromkeys(["F32", "I32", "U32"], 32),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 16),
    **dict.fromkeys(["BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    "F4": 4,
}
"""Bits per element of each dtype tag of the format. Tensors with other tags are treated as opaque bytes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a header: dtype tag (such as "BF16"), shape, and its range `begin:end` of payload bytes."""

    key: str
    tag: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bits(self) -> int | None:
        """Bits per element; None for an unknown tag."""
        return BITS.get(self.tag)


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: tensors in the order of their bytes, `__metadata__`, and the payload's offset in the file."""

    infos: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    payload_offset: int


def header_length(prefix: bytes, file_bytes: int, where: object = None) -> int:
    """Return the header length N, given the first 8 bytes of a file and its size. Raises: HeaderError("length")."""
    fix = "the file is truncated or not a safetensors file: copy it again"
    if (got := len(prefix)) < LENGTH.size:
        raise HeaderError("length", where=where, expected="a file of 8 bytes or more", got=f"{got} bytes", fix=fix)
    (length,) = LENGTH.unpack_from(prefix)
    limit = min(MAX_HEADER, file_bytes - LENGTH.size)
    if length > limit:
        raise HeaderError("length", where=where, expected=f"at most {limit} bytes", got=f"{length} bytes", fix=fix)
    return length


def parse_header(text: bytes, payload_bytes: int, where: object = None) -> Header:
    """Parse and validate the JSON header of a file.

    Args:
        text: the JSON, padded with spaces at its end.
        payload_bytes: size of the payload that follows the header.
        where: file named in errors.
    Raises: HeaderError whose `rule` is the broken rule, a key of `HEADER_RULES`, and whose `key` is a tensor, if any.
    """
    if text[:1] != b"{":
        raise HeaderError("start", where=where, expected="{ as the first byte", got=repr(text[:1]))
    try:
        entries = parse_json(text, containers=3 * MAX_TENSORS + 2, where=where)
    except JsonError as error:
        rule = "count" if error.rule == "containers" else error.rule
        raise HeaderError(rule, error.key, where=where, expected=error.expected, got=error.got) from error
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        got = repr(metadata)[:80]
        raise HeaderError("metadata", where=where, expected="a JSON object with string values", got=got)
    if len(entries) > MAX_TENSORS:
        raise HeaderError("count", where=where, expected=f"at most {MAX_TENSORS} tensors", got=len(entries))
    infos = sorted((_entry(key, fields, where) for key, fields in entries.items()), key=lambda i: (i.begin, i.end))
    _check_tiling(infos, payload_bytes, where)
    return Header(tuple(infos), metadata, LENGTH.size + len(text))


def build_header(infos: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file: length and JSON, padded so that the payload starts at a multiple of 8.

    The result is parsed again before it is returned, so that every written header passes the reader's checks.
    Raises: HeaderError.
    """
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    payload_bytes = 0
    for info in infos:
        if info.key in entries or info.key == METADATA:
            raise HeaderError("name" if info.key == METADATA else "duplicate", info.key, expected="a unique name")
        offsets = [info.begin, info.end]
        entries[info.key] = {"dtype": info.tag, "shape": list(info.shape), "data_offsets": offsets}
        payload_bytes = max(payload_bytes, info.end)
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeError as error:
        raise HeaderError("utf8", expected="names and metadata that UTF-8 can encode", got=str(error)) from error
    text += b" " * (-len(text) % 8)
    start = LENGTH.pack(len(text)) + text
    parse_header(text[: header_length(start, len(start) + payload_bytes)], payload_bytes)
    return start


def _entry(key: str, fields: Any, where: object) -> TensorInfo:
    if len(key) > MAX_NAME or (not key.isascii() and len(key.encode()) > MAX_NAME):
        got = f"{len(key.encode())} bytes"
        raise HeaderError("name", key, where=where, expected=f"a name of at most {MAX_NAME} bytes", got=got)
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        got = [shorten(name) for name in list(fields)[:10]] if isinstance(fields, dict) else type(fields).__name__
        raise HeaderError("fields", key, where=where, expected="dtype, shape and data_offsets", got=got)
    tag, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG:
        got = shorten(str(tag))
        raise HeaderError("dtype", key, where=where, expected=f"a string of 1 to {MAX_TAG} characters", got=got)
    if not isinstance(shape, list):
        raise HeaderError("shape", key, where=where, expected="a list", got=type(shape).__name__)
    if len(shape) > MAX_RANK:
        raise HeaderError("rank", key, where=where, expected=f"at most {MAX_RANK} dimensions", got=len(shape))
    if not all(type(dim) is int and dim >= 0 for dim in shape):  # type(), because a bool is an instance of int
        raise HeaderError("shape", key, where=where, expected="integers >= 0", got=shape)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(at) is int for at in offsets)):
        raise HeaderError("offsets", key, where=where, expected="a list of two integers", got=repr(offsets)[:80])
    begin, end = offsets
    if not 0 <= begin <= end < _U64:
        raise HeaderError("offsets", key, where=where, expected="0 <= begin <= end < 2^64", got=offsets)
    _check_size(key, tag, shape, end - begin, where)
    return TensorInfo(key, tag, tuple(shape), begin, end)


def _check_size(key: str, tag: str, shape: list[int], nbytes: int, where: object) -> None:
    numel = 1
    for dim in shape:  # in order: [2**63, 2, 0] is refused as by the safetensors library, and numbers stay small
        numel *= dim
        if numel >= _U64 or dim >= _U64:  # the second test matters beside a 0
            raise HeaderError("overflow", key, where=where, expected="fewer than 2^64 elements", got=shape)
    bits = BITS.get(tag)
    if bits is None:
        return
    if numel * bits >= _U64:
        raise HeaderError("overflow", key, where=where, expected="fewer than 2^64 bits", got=shape)
    if numel * bits % 8:
        raise HeaderError("alignment", key, where=where, expected="whole bytes", got=f"{numel} x {bits} bits")
    if numel * bits // 8 != nbytes:
        raise HeaderError("size", key, where=where, expected=f"{numel * bits // 8} bytes", got=f"{nbytes} bytes")


def _check_tiling(infos: list[TensorInfo], payload_bytes: int, where: object) -> None:
    reached = 0
    for info in infos:
        if info.begin != reached:
            raise HeaderError("tiling", info.key, where=where, expected=f"begin = {reached}", got=info.begin)
        reached = info.end
    if reached != payload_bytes:
        fix = "the file is truncated or has trailing bytes: copy it again"
        raise HeaderError("tiling", where=where, expected=f"{reached} bytes of payload", got=payload_bytes, fix=fix)
