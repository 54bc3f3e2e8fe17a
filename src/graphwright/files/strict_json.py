"""Parse untrusted JSON: size, depth and number of containers are checked before parsing; duplicate keys are refused.

The depth is counted on the bytes with strings blanked out, so that parser recursion is bounded.
"""

from __future__ import annotations

import json
import re
from io import BytesIO
from itertools import accumulate
from typing import Any

from graphwright.files.checksums import StrPath
from graphwright.files.errors import JsonError, UnreadableFile
from graphwright.files.regular import open_regular

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # matches unterminated strings too, to stay linear
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as signed bytes


def read_json(path: StrPath, limit: int = 8 << 20, *, nesting: int = 8) -> Any:
    """Return the value of a JSON file of at most `limit` bytes and `nesting` levels of objects and lists.

    Raises: JsonError whose `rule` is the broken rule, a key of `JSON_RULES`; UnreadableFile.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)  # not stat: the file may grow
    except OSError as error:
        raise UnreadableFile("cannot read this JSON file", where=path, cause=error) from error
    if len(data) > limit:
        raise JsonError("bytes", where=path, expected=f"at most {limit} bytes", got="more")
    return parse_json(data, nesting=nesting, where=path)


def parse_json(data: bytes, *, nesting: int = 8, containers: int | None = None, where: object = None) -> Any:
    """Return the value of one JSON text, in linear time and memory below 40 times its size.

    Args:
        data: the text, UTF-8 without byte order mark.
        nesting: levels of objects and lists allowed.
        containers: number of objects and lists allowed, empty ones included; None allows any number.
        where: file named in errors.
    Raises: JsonError whose `rule` is the broken rule, a key of `JSON_RULES`, and whose `key` is the duplicate key.
    """
    outside = BytesIO()
    outside.writelines(_STRING.split(data))  # b"".join would take 80 bytes per piece
    steps = outside.getvalue().translate(_STEP, _OTHERS)
    if any(map(nesting.__lt__, accumulate(memoryview(steps).cast("b")))):
        raise JsonError("nesting", where=where, expected=f"at most {nesting} levels")
    if containers is not None and (count := steps.count(1)) > containers:
        raise JsonError("containers", where=where, expected=f"at most {containers}", got=count)
    del outside, steps
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if b"\\ud" in data or b"\\uD" in data:  # an escape may be a lone surrogate, which UTF-8 cannot encode
            json.dumps(value, ensure_ascii=False).encode()
    except JsonError as error:
        error.where = where
        raise
    except UnicodeError as error:
        raise JsonError("utf8", where=where, got=str(error)) from error
    except ValueError as error:  # syntax, or an integer of more than 4300 digits
        raise JsonError("json", where=where, got=str(error)) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError("duplicate", key)
            seen.add(key)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
