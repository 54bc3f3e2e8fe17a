"""Verbs of an object whose code lies in a layer above it: `model.prune(...)` runs what surgery registered.

The package's `__init__` registers them by name, so that no layer names one above it and nothing is imported early.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_TARGETS: dict[str, str] = {}


def register(verb: str, target: str) -> None:
    """Have `verb` mean `target`, a `module:function`; the module is imported at the first call.

    Raises:
        ValueError: if the verb means something else already.
    """
    if _TARGETS.setdefault(verb, target) != target:
        raise ValueError(f"the verb {verb!r} is registered twice: {_TARGETS[verb]} and {target}")


def verb(name: str) -> Callable[..., Any]:
    """The function registered under a name.

    Raises:
        KeyError: for a verb that nobody registered.
    """
    module, _, function = _TARGETS[name].partition(":")
    return getattr(import_module(module), function)
