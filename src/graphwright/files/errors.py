"""What can go wrong with a file: it cannot be read or written, or stands in the way, or its JSON breaks the rules."""

from __future__ import annotations

from typing import Unpack

from graphwright.errors import Facts, GraphwrightError


class FileError(GraphwrightError, OSError):
    """A file or directory could not be used; `errno` is the system's number where the system said no."""

    def __init__(self, what: str = "", *, cause: OSError | None = None, **facts: Unpack[Facts]) -> None:
        if cause is not None:
            facts.setdefault("got", cause.strerror or str(cause))
        super().__init__(what, **facts)
        self.errno = None if cause is None else cause.errno


class UnreadableFile(FileError):
    """A file that should be read is absent, forbidden or on a broken disk."""


class UnwritableTarget(FileError):
    """Writing failed; what stood at the target before still stands there whole."""


class DestinationExists(FileError, FileExistsError):
    """Something stands where a new file or directory should go, and nobody said to replace it."""


class JsonError(GraphwrightError, ValueError):
    """A JSON text breaks one of the `JSON_RULES`; `rule` names it, `key` the object key it concerns, if any."""

    def __init__(self, rule: str, key: str | None = None, **facts: Unpack[Facts]) -> None:
        at = "" if key is None else f" at key {shorten(key)}"
        super().__init__(f"JSON rule '{rule}' is broken{at}: {JSON_RULES[rule]}", **facts)
        self.rule, self.key = rule, key


JSON_RULES = {
    "bytes": "the text is longer than its limit",
    "utf8": "the text is not UTF-8, or an escape stands for half a character",
    "json": "the text is not one JSON value",
    "duplicate": "an object has one key twice",
    "nesting": "objects and lists are nested too deeply",
    "containers": "there are too many objects and lists",
}


def shorten(key: str, limit: int = 120) -> str:
    """`key` quoted for a message; a hostile name of megabytes is cut to `limit` characters."""
    return repr(key) if len(key) <= limit else f"{key[:limit]!r}... ({len(key)} characters)"
