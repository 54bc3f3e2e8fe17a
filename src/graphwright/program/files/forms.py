"""JSON forms of handles, values, specs and attributes in saved programs, checked strictly because files are untrusted.

Every function that reads a JSON value raises `ProgramFileError` if the value has the wrong type, length or range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.array import DTYPES, Spec
from graphwright.graph import EdgeId, NodeId
from graphwright.program.axes.units import parsed
from graphwright.program.errors import ProgramFileError
from graphwright.program.hashing import decode_attrs
from graphwright.program.op_graph import Value

MAX_RANK = 32
_BIG = 1 << 62


def integer(data: Any, low: int = 0, high: int = _BIG) -> int:
    """Return `data` if it is an integer from `low` to `high`. Raises: ProgramFileError."""
    if type(data) is not int or not low <= data <= high:
        raise wrong(expected=f"an integer from {low} to {high}", got=data)
    return data


def text(data: Any) -> str:
    """Return `data` if it is a string. Raises: ProgramFileError."""
    if not isinstance(data, str):
        raise wrong(expected="a string", got=data)
    return data


def optional_text(data: Any) -> str | None:
    """Return `data` if it is a string or None. Raises: ProgramFileError."""
    return None if data is None else text(data)


def flag(data: Any) -> bool:
    """Return `data` if it is a boolean. Raises: ProgramFileError."""
    if not isinstance(data, bool):
        raise wrong(expected="true or false", got=data)
    return data


def array(data: Any, length: int | None = None) -> list[Any]:
    """Return `data` if it is a list, of this length if one is given. Raises: ProgramFileError."""
    if not isinstance(data, list) or (length is not None and len(data) != length):
        raise wrong(expected="a list" if length is None else f"a list of {length} entries", got=data)
    return data


def table(data: Any, fields: Iterable[str] | None = None) -> dict[str, Any]:
    """Return `data` if it is a dict, with exactly these fields if any are given. Raises: ProgramFileError."""
    if not isinstance(data, dict) or (fields is not None and data.keys() != set(fields)):
        named = "" if fields is None else f" with fields {', '.join(sorted(fields))}"
        raise wrong(expected=f"an object{named}", got=data)
    return data


def handle(data: Any, kind: type[NodeId] | type[EdgeId]) -> Any:
    """Return the handle of the JSON list [index, generation]."""
    index, generation = array(data, 2)
    return kind(integer(index, 0, 2**31 - 2), integer(generation, 1, 2**31 - 1))


def value(data: Any) -> Value:
    """Return the value of the JSON list [index, generation, port]."""
    index, generation, port = array(data, 3)
    return Value(handle([index, generation], NodeId), integer(port, 0, 2**31 - 2))


def spec(data: Any) -> Spec:
    """Return the spec of the JSON list [dtype name, list of dimensions]."""
    name, dims = array(data, 2)
    if text(name) not in DTYPES or len(array(dims)) > MAX_RANK:
        raise wrong(expected="[dtype name, list of at most 32 dimensions]", got=data)
    return Spec(tuple(d if isinstance(d, str) else integer(d) for d in dims), DTYPES[name])


def specs(data: Any) -> tuple[Spec, ...]:
    """Return the specs of all results of a node from a JSON list of specs."""
    return tuple(spec(s) for s in array(data))


def attrs(data: Any) -> Mapping[str, Any]:
    """Return the attributes of a node from the JSON form that `encode_attrs` writes."""
    try:
        return decode_attrs(table(data))
    except ProgramFileError:
        raise
    except Exception as error:
        raise wrong(expected="the JSON form of a node's attributes", got=data) from error


def indices(data: Any) -> tuple[int, ...]:
    """Return indices along an axis from text that `units.runs` writes, such as `0-4 6`."""
    try:
        return parsed(text(data))
    except ValueError as error:
        raise wrong(expected="indices along an axis, such as '0-4 6'", got=data) from error


def handle_form(node: NodeId | EdgeId) -> list[int]:
    """Return the JSON form of a handle: [index, generation]."""
    return [node.index, node.generation]


def value_form(v: Value) -> list[int]:
    """Return the JSON form of a value: [index of its node, generation of its node, port]."""
    return [v.node.index, v.node.generation, v.port]


def wrong(expected: str, got: Any) -> ProgramFileError:
    """Return the error for an unexpected value in a saved program."""
    return ProgramFileError("unexpected value in a saved program", expected=expected, got=repr(got)[:120])
