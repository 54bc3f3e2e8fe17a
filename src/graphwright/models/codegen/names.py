"""Names in generated source: unique identifiers, attribute access, and keys under which torch modules hold weights."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword, kwlist

from graphwright.models.codegen.templates import CLASSES, HELPERS
from graphwright.models.errors import ExportLevelImpossible

_RESERVED = frozenset(
    {*dir(builtins), *kwlist, *HELPERS, *CLASSES}
    | {"torch", "F", "nn", "model", "self", "run", "i", "l", "O", "I", "CONSTS", "Run", "MODULES", "PARAMETERS"}
)
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Names:
    """Assigns unique identifiers within a scope, e.g. a function."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *taken}

    def take(self, wanted: str) -> str:
        """Return `wanted` as an identifier, with a number appended if it is taken."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", wanted)[:40].strip("_") or "value"
        base = f"n{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def check_keys(keys: Mapping[str, str]) -> None:
    """Check that torch modules can hold weights under these keys (key -> param path). Raises: ExportLevelImpossible."""
    for key, path in keys.items():
        parts, what = key.split("."), ""
        if not _KEY.fullmatch(key):
            what = "a torch module cannot hold a weight under this key"
        elif any(".".join(parts[:end]) in keys for end in range(1, len(parts))):
            what = "this key and a prefix of it both name weights"
        if what:
            fix = "e.rename(node, name, key='a.dotted.key') gives the weight a different key"
            raise ExportLevelImpossible(what, where=path, got=key, fix=fix)


def attributes(start: str, parts: Sequence[str]) -> str | None:
    """Return the attribute access `start.a.b`; None if a part is not an identifier."""
    return ".".join((start, *parts)) if all(p.isidentifier() and not iskeyword(p) for p in parts) else None
