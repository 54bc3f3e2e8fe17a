"""Arguments and results of traced functions: tensors and constants in nested tuples, lists and dicts.

The specs of an argument are the same structure with a `Spec` in place of each tensor, and with its constants.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from graphwright.array import NDArray, Spec
from graphwright.autograd import Tensor, as_tensor
from graphwright.autograd.nested import parts, rebuilt

_ARRAYS = Tensor, NDArray, np.ndarray, np.generic


def specs_of(argument: Any) -> Any:
    """Return the specs of an argument. Raises: UsageError for an object that is neither hashable nor numbers.

    Tensors are tensors, arrays, numbers and nested lists of numbers. Constants are all other hashable objects: None,
    bools, strings, modules.
    """
    if _is_nested(argument):
        return rebuilt(argument, {key: specs_of(inner) for key, inner in parts(argument).items()})
    return argument if _is_constant(argument) else as_tensor(argument).spec


def _is_constant(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, (*_ARRAYS, int, float, complex, tuple)) or hasattr(value, "__array__"):
        return False
    return isinstance(value, Hashable) and not hasattr(value, "__dlpack__")


def _is_nested(value: Any) -> bool:
    """Return True for tuples, lists and dicts with tensors or constants, False for nested lists of numbers or bools."""
    if isinstance(value, Mapping):
        return True
    inner = parts(value).values()
    return any(
        isinstance(e, _ARRAYS) or hasattr(e, "dtype") or _is_nested(e) or (_is_constant(e) and not isinstance(e, bool))
        for e in inner
    )


def flat_specs(specs: Any) -> Iterator[Spec]:
    """Yield the specs of the tensors, in order."""
    if isinstance(specs, Spec):
        yield specs
    elif isinstance(specs, tuple | list | Mapping):
        for inner in parts(specs).values():
            yield from flat_specs(inner)


def hashed(specs: Any) -> Hashable:
    """Return specs of arguments as a key of a dict."""
    if isinstance(specs, Spec):
        return specs
    if not isinstance(specs, tuple | list | Mapping):
        return type(specs), specs  # 1 == True
    return type(specs), *((key, hashed(inner)) for key, inner in parts(specs).items())


def add_tensors(specs: Any, argument: Any, found: list[Any]) -> bool:
    """Append to `found` what an argument has in place of each spec; return False if its structure is another one."""
    if isinstance(specs, Spec):
        found.append(argument)
        return True
    if type(argument) is not type(specs):
        return False
    if not isinstance(specs, tuple | list | Mapping):
        return argument is specs or argument == specs
    wanted, given = parts(specs), parts(argument)
    return wanted.keys() == given.keys() and all(add_tensors(wanted[k], given[k], found) for k in wanted)
