"""Tables, sequences, docstrings and line breaking of generated source; texts are quoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from textwrap import wrap
from typing import Any

import numpy as np

from graphwright.array import NDArray
from graphwright.models.errors import ExportLevelImpossible
from graphwright.ops.emit import literal

WIDTH = 120
MAX_CONST = 4096
"""Largest number of entries of a const in source; larger ones should be params."""

_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.)")


def shape_table(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the source of the table of weight shapes; keys that differ only in the layer number share an entry."""
    return _table({key: repr(shape) for key, shape in shapes.items()})


def module_table(modules: Mapping[str, tuple[str, tuple[Any, ...]]]) -> str:
    """Return the source of the table of modules: path -> (class, arguments); those of all layers share an entry."""
    return _table({path: f"({', '.join([name, *map(repr, args)])})" if args else name
                   for path, (name, args) in modules.items()})  # fmt: skip


def _table(texts: Mapping[str, str]) -> str:
    """Return rows `key: text`; keys that differ only in the layer number share a row with {} for the number."""
    grouped: dict[str, dict[int, str]] = {}
    for key, text in texts.items():
        if found := _NUMBER.search(f"{key}."):
            grouped.setdefault(_NUMBER.sub("{}", f"{key}.", count=1)[:-1], {})[int(found[0])] = text
    rows: dict[str, str] = {}
    for key, text in texts.items():
        template = _NUMBER.sub("{}", f"{key}.", count=1)[:-1]
        several = len(grouped.get(template, ())) > 1
        rows[template if several else key] = _by_layer(grouped[template]) if several else text
    return "".join(_entry(json.dumps(key), text) for key, text in rows.items())


def _by_layer(layers: Mapping[int, str]) -> str:
    numbers = sorted(layers)
    if len(set(layers.values())) == 1:
        return f"dict.fromkeys({sequence(numbers)}, {layers[numbers[0]]})"
    return "{" + ", ".join(f"{n}: {layers[n]}" for n in numbers) + "}"


def sequence(numbers: Sequence[int]) -> str:
    """Return a Python expression for increasing numbers: a `range` if there are no gaps, else a tuple."""
    if list(numbers) != list(range(numbers[0], numbers[-1] + 1)):
        return str(tuple(numbers))
    return f"range({f'{numbers[0]}, ' if numbers[0] else ''}{numbers[-1] + 1})"


def const_table(consts: Mapping[str, NDArray]) -> str:
    """Return the source of the table of constants. Raises: ExportLevelImpossible for one above 4096 entries."""
    rows = []
    for path, array in consts.items():
        if array.size > MAX_CONST:
            expected, fix = f"<= {MAX_CONST} entries", "make it a param with trainable=False"
            what = "a const is too large for source code"
            raise ExportLevelImpossible(what, where=path, got=f"{array.size} entries", expected=expected, fix=fix)
        host = array.to_numpy()
        rows.append(_entry(json.dumps(path), f"torch.tensor({_nested(host)}, dtype=torch.{array.dtype.name})"))
    return "".join(rows)


def _nested(host: np.ndarray) -> str:
    if host.ndim:
        return f"[{', '.join(_nested(row) for row in host)}]"
    value = host.item()
    if host.dtype.kind == "f" and np.isfinite(value):
        return str(host[()])  # the shortest text that reads back as this value
    return literal(value)


def _entry(key: str, text: str) -> str:
    line = f"    {key}: {text},"
    if len(line) <= WIDTH:
        return f"{line}\n"
    opening = re.split(r"(?<=[^a-z.])", text, maxsplit=1)[0]  # texts are brackets or calls
    inner = wrap(text[len(opening) : -1] + ("," if opening == "{" else ""), WIDTH - 8, break_long_words=False)
    return "\n".join([f"    {key}: {opening}", *(f"        {part}" for part in inner), f"    {text[-1]},\n"])


def line(indent: str, target: str, text: str) -> str:
    """Return the statement `target = text`; break a long line at plus signs, or else inside the outermost call."""
    whole = f"{indent}{target} = {text}"
    if len(whole) <= WIDTH:
        return whole
    first, *rest = _split(text, " + ")
    if rest:
        terms = [f"{indent}    {first}", *(f"{indent}    + {t}" for t in rest)]
        return "\n".join([f"{indent}{target} = (", *terms, f"{indent})"])
    start = text.find("(")
    if start < 0:
        return whole
    close = start + _depths(text[start:]).index(0)
    return "\n".join([f"{indent}{target} = {text[: start + 1]}", *_arguments(f"{indent}    ", text[start + 1 : close]),
                      f"{indent}{text[close:]}"])  # fmt: skip


def _arguments(indent: str, text: str) -> list[str]:
    """Return the lines of arguments: one if they fit, else one for each, and more for a long tuple or list."""
    if len(f"{indent}{text}") <= WIDTH:
        return [f"{indent}{text}"]
    lines = []
    for each in _split(text, ", "):
        bracketed = each[0] in "([" and 0 not in _depths(each)[:-1]
        if len(f"{indent}{each},") > WIDTH and bracketed:
            lines += [f"{indent}{each[0]}", *_arguments(f"{indent}    ", each[1:-1]), f"{indent}{each[-1]},"]
        else:
            lines.append(f"{indent}{each},")
    return lines


def _depths(text: str) -> list[int]:
    """Return the number of open brackets after each character."""
    return list(accumulate((char in "([{") - (char in ")]}") for char in text))


def _split(text: str, sign: str) -> list[str]:
    """Split a text at each `sign` that is outside of brackets."""
    at = [i for i, depth in enumerate(_depths(text)) if depth == 0 and text.startswith(sign, i)]
    return [text[a:b] for a, b in zip([0, *(i + len(sign) for i in at)], [*at, len(text)], strict=True)]


def docstring_lines(texts: Iterable[str]) -> str:
    """Format texts as lines of a docstring; replace quotes and backslashes, so that no text can end it."""
    rows = []
    for text in texts:
        printable = "".join(c if c.isprintable() else " " for c in text)
        plain = " ".join(printable.split()).replace("\\", "/").replace('"', "'")
        rows += wrap(f"- {plain}", WIDTH, subsequent_indent="  ") or ["-"]
    return "\n".join(rows)


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as text, e.g. `0 to 3, 5`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
