"""JSON forms of handles, values, specs and attributes in saved programs, checked strictly because files are untrusted.

Every function that reads a JSON value raises `ProgramFileError` if the value has the wrong type, length or range; the
error names the `field` that holds the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from graphwright.array import DTYPES, Spec
from graphwright.array.sizes import is_dim_text
from graphwright.graph import EdgeId, NodeId
from graphwright.program.axes.units import parsed
from graphwright.program.errors import ProgramFileError
from graphwright.program.hashing import decode_attrs
from graphwright.program.op_graph import Value

MAX_RANK = 32
RESTORE = "restore the files from a copy, or save the program again"
_BIG = 1 << 62


def integer(data: Any, low: int = 0, high: int = _BIG, field: str | None = None) -> int:
    """Return `data` if it is an integer from `low` to `high`. Raises: ProgramFileError."""
    if type(data) is not int or not low <= data <= high:
        raise wrong(f"an integer from {low} to {high}", data, field)
    return data


def number(data: Any, field: str | None = None) -> float:
    """Return `data` if it is a finite float. Raises: ProgramFileError."""
    if type(data) is not float or not isfinite(data):
        raise wrong("a finite number", data, field)
    return data


def text(data: Any, field: str | None = None) -> str:
    """Return `data` if it is a string. Raises: ProgramFileError."""
    if not isinstance(data, str):
        raise wrong("a string", data, field)
    return data


def optional_text(data: Any, field: str | None = None) -> str | None:
    """Return `data` if it is a string or None. Raises: ProgramFileError."""
    return None if data is None else text(data, field)


def flag(data: Any, field: str | None = None) -> bool:
    """Return `data` if it is a boolean. Raises: ProgramFileError."""
    if not isinstance(data, bool):
        raise wrong("true or false", data, field)
    return data


def array(data: Any, length: int | None = None, field: str | None = None) -> list[Any]:
    """Return `data` if it is a list, of this length if one is given. Raises: ProgramFileError."""
    if not isinstance(data, list) or (length is not None and len(data) != length):
        raise wrong("a list" if length is None else f"a list of {length} entries", data, field)
    return data


def table(data: Any, keys: Iterable[str] | None = None, field: str | None = None) -> dict[str, Any]:
    """Return `data` if it is a dict, with exactly these keys if any are given. Raises: ProgramFileError."""
    if not isinstance(data, dict) or (keys is not None and data.keys() != set(keys)):
        named = "" if keys is None else f" with the keys {', '.join(sorted(keys))}"
        raise wrong(f"an object{named}", data, field)
    return data


def handle(data: Any, kind: type[NodeId] | type[EdgeId], field: str | None = None) -> Any:
    """Return the handle of the JSON list [index, generation]."""
    index, generation = array(data, 2, field)
    return kind(integer(index, 0, 2**31 - 2, field), integer(generation, 1, 2**31 - 1, field))


def value(data: Any, field: str | None = None) -> Value:
    """Return the value of the JSON list [index, generation, port]."""
    index, generation, port = array(data, 3, field)
    return Value(handle([index, generation], NodeId, field), integer(port, 0, 2**31 - 2, field))


def spec(data: Any, field: str | None = None) -> Spec:
    """Return the spec of the JSON list [dtype name, list of dimensions]."""
    name, dims = array(data, 2, field)
    if text(name, field) not in DTYPES or len(array(dims, None, field)) > MAX_RANK:
        raise wrong(f"[dtype name, list of at most {MAX_RANK} dimensions]", data, field)
    if wrong_names := [d for d in dims if isinstance(d, str) and not is_dim_text(d)]:
        raise wrong(
            "names of dimensions that are Python identifiers, or sizes computed from names, such as B*T",
            wrong_names[0],
            field,
        )
    return Spec(tuple(d if isinstance(d, str) else integer(d, field=field) for d in dims), DTYPES[name])


def specs(data: Any, field: str | None = "specs") -> tuple[Spec, ...]:
    """Return the specs of all results of a node from a JSON list of specs."""
    return tuple(spec(s, field) for s in array(data, None, field))


def attrs(data: Any, field: str | None = "attrs") -> Mapping[str, Any]:
    """Return the attributes of a node from the JSON form that `encode_attrs` writes."""
    try:
        return decode_attrs(table(data, None, field))
    except ProgramFileError:
        raise
    except Exception as error:
        raise wrong("the JSON form of a node's attributes", data, field) from error


def indices(data: Any, field: str | None = "indices") -> tuple[int, ...]:
    """Return indices along an axis from their text form, such as `0-4 6`."""
    try:
        return parsed(text(data, field))
    except ValueError as error:
        raise wrong("indices along an axis, such as '0-4 6'", data, field) from error


def handle_form(node: NodeId | EdgeId) -> list[int]:
    """Return the JSON form of a handle: [index, generation]."""
    return [node.index, node.generation]


def value_form(v: Value) -> list[int]:
    """Return the JSON form of a value: [index of its node, generation of its node, port]."""
    return [v.node.index, v.node.generation, v.port]


def wrong(expected: str, got: Any, field: str | None = None) -> ProgramFileError:
    """Return the error for an unexpected value of a field of a saved program or a journal."""
    where = None if field is None else f"field {field}"
    what, found = "unexpected value in a saved program or journal", repr(got)[:120]
    return ProgramFileError(what, where=where, expected=expected, got=found, fix=RESTORE)
