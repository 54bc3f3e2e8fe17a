"""Pieces of generated source: unique names, keys as attributes, tables of shapes and constants, line wrapping.

No text of a file or journal enters the source unchanged: names are reduced to ASCII letters, digits and `_`, keys are
checked, texts are quoted.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from keyword import iskeyword, kwlist
from textwrap import wrap

import numpy as np

from graphwright.array import NDArray
from graphwright.models.codegen.fixed import HELPERS
from graphwright.models.errors import ExportLevelImpossible
from graphwright.ops.emit import literal

WIDTH = 120
MAX_CONST = 4096
"""Largest number of entries of a const in source; larger ones should be weights."""


_RESERVED = frozenset(
    {*dir(builtins), *kwlist, *HELPERS}
    | {"torch", "F", "nn", "model", "self", "run", "i", "l", "O", "I", "SHAPES", "CONSTS", "Run"}
    | {"DynamicCache", "EditedConfig", "EditedForCausalLM"}
)
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.)")


class Names:
    """Unique identifiers of one function."""

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
    """Check that torch modules can have these keys (key -> param path). Raises: ExportLevelImpossible."""
    for key, path in keys.items():
        parts, what = key.split("."), ""
        if not _KEY.fullmatch(key):
            what = "a torch module cannot hold a weight under this key"
        elif any(".".join(parts[:end]) in keys for end in range(1, len(parts))):
            what = "this key and a prefix of it both name weights"
        if what:
            fix = "e.rename(node, name, key='a.dotted.key') gives it another"
            raise ExportLevelImpossible(what, where=path, got=key, fix=fix)


def attributes(start: str, parts: Sequence[str]) -> str | None:
    """Attribute access `start.a.b`; None if a part is not an identifier."""
    return ".".join((start, *parts)) if all(p.isidentifier() and not iskeyword(p) for p in parts) else None


def shape_table(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Entries of the table of weights; keys that differ only in the layer share an entry."""
    grouped: dict[str, dict[int, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        if found := _NUMBER.search(key):
            grouped.setdefault(_NUMBER.sub("{}", key, count=1), {})[int(found[0])] = shape
    rows: dict[str, str] = {}
    for key, shape in shapes.items():
        template = _NUMBER.sub("{}", key, count=1)
        several = len(grouped.get(template, ())) > 1
        rows[template if several else key] = _by_layer(grouped[template]) if several else repr(shape)
    return "".join(_entry(json.dumps(key), text) for key, text in rows.items())


def _by_layer(layers: Mapping[int, tuple[int, ...]]) -> str:
    numbers = sorted(layers)
    if len(set(layers.values())) == 1:
        return f"dict.fromkeys({sequence(numbers)}, {layers[numbers[0]]})"
    return "{" + ", ".join(f"{n}: {layers[n]}" for n in numbers) + "}"


def sequence(numbers: Sequence[int]) -> str:
    """Expression for increasing numbers: a range if there are no gaps, else a tuple."""
    if list(numbers) != list(range(numbers[0], numbers[-1] + 1)):
        return str(tuple(numbers))
    return f"range({f'{numbers[0]}, ' if numbers[0] else ''}{numbers[-1] + 1})"


def const_table(consts: Mapping[str, NDArray]) -> str:
    """Entries of the table of constants. Raises: ExportLevelImpossible for a large constant."""
    rows = []
    for path, array in consts.items():
        if array.size > MAX_CONST:
            expected, fix = f"<= {MAX_CONST}", "make it a param with trainable=False"
            what = "a const is too large for source code"
            raise ExportLevelImpossible(what, where=path, got=array.size, expected=expected, fix=fix)
        host = array.to_numpy("float32" if array.dtype.name == "bfloat16" else None)
        rows.append(_entry(json.dumps(path), f"({_nested(host)}, torch.{array.dtype.name})"))
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
    """Statement `target = text`; a long one is broken at the arguments of its outermost call or at plus signs."""
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
    inner = f"{indent}    {text[start + 1 : close]}"
    lines = [inner] if len(inner) <= WIDTH else [f"{indent}    {a}," for a in _split(text[start + 1 : close], ", ")]
    return "\n".join([f"{indent}{target} = {text[: start + 1]}", *lines, f"{indent}{text[close:]}"])


def _depths(text: str) -> list[int]:
    """Number of open brackets after each character."""
    return list(accumulate((char in "([{") - (char in ")]}") for char in text))


def _split(text: str, sign: str) -> list[str]:
    """Parts of a text between signs that are outside of brackets."""
    at = [i for i, depth in enumerate(_depths(text)) if depth == 0 and text.startswith(sign, i)]
    return [text[a:b] for a, b in zip([0, *(i + len(sign) for i in at)], [*at, len(text)], strict=True)]


def docstring_lines(texts: Iterable[str]) -> str:
    """Lines for a docstring; the texts can neither end the docstring nor form an escape."""
    rows = []
    for text in texts:
        printable = "".join(c if c.isprintable() else " " for c in text)
        plain = " ".join(printable.split()).replace("\\", "/").replace('"', "'")
        rows += wrap(f"- {plain}", WIDTH, subsequent_indent="  ") or ["-"]
    return "\n".join(rows)


def ranges(numbers: Sequence[int]) -> str:
    """Text of sorted numbers, e.g. `0 to 3, 5`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
