"""JSON forms of handles, values, specs and attributes in saved programs, read strictly because files are untrusted.

Every reader raises `ProgramFileError` for a value of a wrong type or range, before anything is built from it.
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
    """Read an integer in a range."""
    if type(data) is not int or not low <= data <= high:
        raise wrong(expected=f"an integer from {low} to {high}", got=data)
    return data


def text(data: Any) -> str:
    """Read a string."""
    if not isinstance(data, str):
        raise wrong(expected="a string", got=data)
    return data


def optional_text(data: Any) -> str | None:
    """Read a string or null."""
    return None if data is None else text(data)


def flag(data: Any) -> bool:
    """Read a boolean."""
    if not isinstance(data, bool):
        raise wrong(expected="true or false", got=data)
    return data


def array(data: Any, length: int | None = None) -> list[Any]:
    """Read a list, of a given length if one is given."""
    if not isinstance(data, list) or (length is not None and len(data) != length):
        raise wrong(expected="a list" if length is None else f"a list of {length} entries", got=data)
    return data


def table(data: Any, fields: Iterable[str] | None = None) -> dict[str, Any]:
    """Read an object, with exactly the given fields if they are given."""
    if not isinstance(data, dict) or (fields is not None and data.keys() != set(fields)):
        raise wrong(
            expected="an object" if fields is None else f"an object with fields {', '.join(sorted(fields))}", got=data
        )
    return data


def handle(data: Any, kind: type[NodeId] | type[EdgeId]) -> Any:
    """Read a handle from [index, generation]."""
    index, generation = array(data, 2)
    return kind(integer(index, 0, 2**31 - 2), integer(generation, 1, 2**31 - 1))


def value(data: Any) -> Value:
    """Read a value from [index, generation, port]."""
    index, generation, port = array(data, 3)
    return Value(handle([index, generation], NodeId), integer(port, 0, 2**31 - 2))


def spec(data: Any) -> Spec:
    """Read a spec from [dtype name, [dims]]."""
    name, dims = array(data, 2)
    if text(name) not in DTYPES or len(array(dims)) > MAX_RANK:
        raise wrong(expected="a dtype and at most 32 dimensions", got=data)
    return Spec(tuple(d if isinstance(d, str) else integer(d) for d in dims), DTYPES[name])


def specs(data: Any) -> tuple[Spec, ...]:
    """Read the specs of all results of a node."""
    return tuple(spec(s) for s in array(data))


def attrs(data: Any) -> Mapping[str, Any]:
    """Read the attributes of a node, as `encode_attrs` writes them."""
    try:
        return decode_attrs(table(data))
    except ProgramFileError:
        raise
    except Exception as error:
        raise wrong(expected="attributes of a node", got=data) from error


def indices(data: Any) -> tuple[int, ...]:
    """Read indices along an axis, as `units.runs` writes them."""
    try:
        return parsed(text(data))
    except ValueError as error:
        raise wrong(expected="indices along an axis", got=data) from error


def handle_form(node: NodeId | EdgeId) -> list[int]:
    """Return [index, generation] of a handle."""
    return [node.index, node.generation]


def value_form(v: Value) -> list[int]:
    """Return [index, generation, port] of a value."""
    return [v.node.index, v.node.generation, v.port]


def wrong(expected: str, got: Any) -> ProgramFileError:
    """Return the error for an unexpected value in a saved program."""
    return ProgramFileError("unexpected value in a saved program", expected=expected, got=repr(got)[:120])
