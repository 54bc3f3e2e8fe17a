"""Path patterns: dotted segments, matched whole. `layers.1` never matches `layers.10`, `attn` never `attn_norm`."""

from __future__ import annotations

import re
from functools import lru_cache

from graphwright.errors import UsageError

_MAX_RANGE = 100_000


class BadPattern(UsageError):
    """A pattern that cannot be read."""


@lru_cache(512)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern; it matches a path, or the path of something below it.

    Per segment: `*` any characters (alone: one segment), `**` any number of segments, `[2-5]` an integer in the range,
    `{q,k}` alternatives; everything else stands for itself.
    Raises: BadPattern.
    """
    if not pattern:
        raise BadPattern("an empty pattern", fix="'**' selects every node")
    parts = []
    for segment in _segments(pattern):
        parts.append(r"(?:[^.]+(?:\.|$))*" if segment == "**" else _segment(segment, pattern) + r"(?:\.|$)")
    return re.compile("^" + "".join(parts))


def _segments(pattern: str) -> list[str]:
    """Split at dots that stand outside braces."""
    segments, depth, start = [], 0, 0
    for i, char in enumerate(pattern):
        depth += (char == "{") - (char == "}")
        if not 0 <= depth <= 1:
            break
        if char == "." and depth == 0:
            segments.append(pattern[start:i])
            start = i + 1
    segments.append(pattern[start:])
    if depth or not all(segments):
        raise BadPattern("unbalanced braces or an empty segment", got=pattern)
    return segments


def _segment(segment: str, pattern: str) -> str:
    out, i = [], 0
    while i < len(segment):
        char = segment[i]
        if char == "*":
            out.append("[^.]*" if len(segment) > 1 else "[^.]+")
            i += 1
        elif char == "[":
            found = re.match(r"\[(\d+)-(\d+)\]", segment[i:])
            if not found or int(found[2]) - int(found[1]) > _MAX_RANGE or int(found[1]) > int(found[2]):
                raise BadPattern("a range is [low-high]", got=pattern)
            out.append("(?:" + "|".join(str(n) for n in range(int(found[1]), int(found[2]) + 1)) + ")")
            i += found.end()
        elif char == "{":
            end = segment.index("}", i)
            out.append("(?:" + "|".join(re.escape(a) for a in segment[i + 1 : end].split(",")) + ")")
            i = end + 1
        else:
            out.append(re.escape(char))
            i += 1
    return "".join(out)


def stem(pattern: str) -> str:
    """A text that every path begins with that a pattern selects."""
    return re.split(r"[*\[{]", pattern, maxsplit=1)[0].rstrip(".")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern selects a path."""
    found = compile_pattern(pattern).match(path)
    return found is not None and (found.end() == len(path) or path[found.end() - 1] == "." or found.end() == 0)
