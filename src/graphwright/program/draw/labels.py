"""Texts of boxes and their widths, from a fixed table: a picture has the same size on every machine."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from graphwright.array import Spec
from graphwright.program.draw.scene import SceneNode
from graphwright.program.kinds import WRITE

LINE = 15
"""Pixels from one line of text to the next."""

_LONGEST = 34
_WIDTHS = {
    **dict.fromkeys("ijl|'`.,:;!I ", 4),
    **dict.fromkeys('ft()[]{}/\\"-r*', 5),
    **dict.fromkeys("cksvxyzJ_°", 7),
    **dict.fromkeys("mwMW@%", 12),
    **dict.fromkeys("ABCDEFGHKLNOPQRSTUVXYZ&+=<>~", 9),
}
"""Advance in pixels at 12 px, a little over that of Arial and Liberation Sans; others are 7, wide ones 13."""


def text_width(text: str) -> int:
    """Pixels that a text takes at 12 px."""
    return sum(_WIDTHS.get(c, 7) if c < "\u0300" else _far(c) for c in text)


def _far(char: str) -> int:
    return 13 if unicodedata.east_asian_width(char) in "WF" or ord(char) > 0xFFFF else 9


def clean(text: str) -> str:
    r"""The text with everything visible: controls, direction marks and what XML cannot hold as `\u{...}`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c == " " or unicodedata.category(c) not in _HIDDEN else f"\\u{{{ord(c):x}}}" for c in text)


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})


def short(text: str, most: int = _LONGEST) -> str:
    """The cleaned text, its middle left out if it is long."""
    text = clean(text)
    if len(text) <= most:
        return text
    return f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def name_of(path: str) -> str:
    """The last segment of a path, with the one before if it is a number or a range and says nothing alone."""
    head, _, last = path.rpartition(".")
    if head and not any(c.isalpha() for c in last):
        return f"{head.rpartition('.')[2]}.{last}"
    return last


def node_lines(node: SceneNode) -> tuple[str, ...]:
    """Name; op and the shapes of its weights; spec; results of the program that leave here."""
    name = short(name_of(node.path))
    if node.junction:
        return (f"+ {name}", *_results(node))
    shapes = " ".join(_dims(spec) for _, spec, _ in node.weights if spec.shape)
    what = node.op if node.op != WRITE else "write, next step"
    specs = short(", ".join(map(repr, node.specs[:2])) + (", …" if len(node.specs) > 2 else ""))
    lines = (name, short(f"{what} {shapes}".rstrip(), 40), *((specs,) if specs else ()), *_results(node))
    return lines


def _results(node: SceneNode) -> tuple[str, ...]:
    return (f"⇒ {short(', '.join(node.outputs))}",) if node.outputs else ()


def _dims(spec: Spec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def group_lines(path: str, repeat: int, ops: int, numbers: int, specs: Sequence[str]) -> tuple[str, ...]:
    """Name and how often it repeats; ops and parameters inside; what comes out."""
    times = f" × {repeat}" if repeat > 1 else ""
    inside = f"{ops} op{'s' * (ops != 1)}" + (f" · {count(numbers)} params" if numbers else "")
    return (short(name_of(path)) + times, inside, *((short(", ".join(specs[:2])),) if specs else ()))


def count(number: int) -> str:
    """A number in three digits with its unit letter: 950, 1.20k, 7.24B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def box_size(lines: Sequence[str], junction: bool) -> tuple[int, int]:
    """Width and height of a box around lines of text; both even, so that its middle is a whole pixel."""
    wide = max(text_width(lines[0]) * 13 // 12, *(text_width(line) for line in lines[1:]), 0)
    if junction:
        return max(44, (wide + 20) // 2 * 2), 8 + LINE * len(lines) // 2 * 2
    return max(72, (wide + 24) // 2 * 2), 12 + LINE * len(lines) // 2 * 2
