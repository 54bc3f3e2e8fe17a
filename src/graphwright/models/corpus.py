"""The text that every machine has: the language topics of pydoc, split by content into training and held-out halves."""

from __future__ import annotations

from hashlib import sha256


def pydoc_split() -> tuple[str, str]:
    """(training text, held-out text) of `pydoc_data.topics` of the running Python.

    Topics in sorted order are split at blank lines; paragraphs that are empty or repeat an earlier one (white space
    apart) are dropped. A paragraph is held out iff the first byte of the sha256 of its collapsed text is below 26. So
    membership depends on content alone: what one Python version holds out, none trains on.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    sides: tuple[list[str], list[str]] = ([], [])
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if not key or key in seen:
                continue
            seen.add(key)
            sides[sha256(key.encode()).digest()[0] < 26].append(paragraph.strip("\n"))
    return "\n\n".join(sides[0]), "\n\n".join(sides[1])


def text_sha256(text: str) -> str:
    """sha256 of a text in UTF-8."""
    return sha256(text.encode()).hexdigest()
