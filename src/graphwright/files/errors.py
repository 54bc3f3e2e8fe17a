"""Errors of files: unreadable, unwritable or existing files, and JSON that violates a rule."""

from __future__ import annotations

from typing import ClassVar, Unpack

from graphwright.errors import Facts, GraphwrightError


class FileError(GraphwrightError, OSError):
    """A file or directory could not be used; `errno` is the system's error number, if any."""

    def __init__(self, what: str = "", *, cause: OSError | None = None, **facts: Unpack[Facts]) -> None:
        if cause is not None:
            facts.setdefault("got", cause.strerror or str(cause))
        super().__init__(what, **facts)
        self.errno = None if cause is None else cause.errno


class UnreadableFile(FileError):
    """A file could not be read: missing, without permission, or an I/O error."""


class UnwritableTarget(FileError):
    """Writing failed; the target has its complete old content, or its complete new content, never a part of it."""


class DestinationExists(FileError, FileExistsError):
    """The destination exists, and replacing it was not requested."""


class RuleError(GraphwrightError, ValueError):
    """A file violates `rule`, a key of `RULES` (rule -> message); `key` is the JSON key or tensor at fault, if any."""

    FORMAT: ClassVar[str]
    RULES: ClassVar[dict[str, str]]

    def __init__(self, rule: str, key: str | None = None, **facts: Unpack[Facts]) -> None:
        at = "" if key is None else f" at {shorten(key)}"
        super().__init__(f"invalid {self.FORMAT}{at}: {self.RULES[rule]} (rule '{rule}')", **facts)
        self.rule, self.key = rule, key


JSON_RULES = {
    "bytes": "the text is longer than its limit",
    "utf8": "the text is not UTF-8, or an escape is half of a surrogate pair",
    "json": "the text is not one JSON value",
    "duplicate": "an object has a duplicate key",
    "nesting": "objects and lists are nested too deeply",
    "containers": "there are too many objects and lists",
}


class JsonError(RuleError):
    """A JSON text violates one of `JSON_RULES`, such as a limit on nesting."""

    FORMAT, RULES = "JSON", JSON_RULES


def shorten(key: str, limit: int = 120) -> str:
    """Return `key` quoted for a message, truncated to `limit` characters."""
    return repr(key) if len(key) <= limit else f"{key[:limit]!r}... ({len(key)} characters)"
