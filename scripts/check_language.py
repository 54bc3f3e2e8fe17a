"""Find words of the project's old private dialect in docstrings, comments, messages, names and pages.

Usage: python scripts/check_language.py [PATH ...]     (by default all code and pages)
Prints `file:line: word: the line` for each find; exits 1 if there is one. `make lint` runs it.
A name is read as its words: `filled_by_hand` as "filled by hand".
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PATHS = ("src", "tests", "examples", "benchmarks", "scripts", "docs", *PAGES)
CODE, SUFFIXES = (".py", ".pyi"), (".py", ".pyi", ".js", ".md")

PROSE = {
    r"anew": "again, re-",
    r"alike": "identical, equal, the same",
    r"nobody": "no caller, nothing",
    r"somebody": "the user, another process",
    r"strangers?": "unrelated, untrusted",
    r"(?:(?<!^)(?-i:lie)|lies|lay|lain)\b(?! (?:flat|out|exp|log))": "is stored, is located",
    r"behind": "after",
    r"in front of": "before",
    r"let(?:s|ting)? go of": "free, release",
    r"hand(?:s|ed|ing)? on": "pass, forward",
    r"hand(?:s|ed|ing)? out": "return",
    r"le(?:d|ads?) to (?:the )?(?:new|another) ": "rewired to",
    r"t(?:ake|akes|aken|aking|ook) down": "record, trace",
    r"stretch(?:es)?": "span, region",
    r"for what is": "if it is",
    r"of those that": "of the ones that",
    r"by hand": "manually",
    r"goes on": "continues",
    r"mend(?:s|ed|ing)?": "repair, fix",
    r"remarks?": "annotation, note",
    r"(?:mother|father)s?": "fitter parent, other parent",
    r"graveyards?": "tombstones",
    r"hollow": "abstract, meta",
    r"loose edges?": "back edge",
    r"guests?": "name the other sequence",
    r"at home": "name the place",
    r"(?<!in )(?<!in-)(?<!take )(?<!takes )(?<!took )(?<!decimal )(?<!last )(?<!first )places?": "index, offset",
    r"as it comes": "as it arrives",
    r"turned around": "reversed, transposed",
    r"there is none": "there is no ...",
    r"that (?:is|are|was|were) (?-i:no|none)\b(?! longer)": "name the kind: unknown, invalid, not a ...",
    r"and by nothing else": "only",
    r"rungs?": "export level",
    r"ledgers?": "plan builder",
    r"is told|are told|tells of|told of": "is notified, reports",
    r"what (?:is|was) (?:known|kept|said|asked|wanted|left|needed)": "say the noun",
    r"whoever|whichever way": "the caller, the thread",
}
NAMES = {
    "anew", "alike", "lies", "behind", "mother", "father", "graveyard", "hollow", "loose", "rung", "rungs", "ledger",
    "stretch", "stretches", "nobody", "told", "says", "said", "settle", "settled", "arranged", "worth", "turned",
    "price", "priced", "pricing",
}  # fmt: skip
PHRASES = {
    r"^what (?:is|was|no|the|does|cannot)": "say the noun",
    r"there (?:is|are|was|were)": "say the noun",
    r"(?<!loop )\bcarried": "loop-carried, or what it carries",
}
_PROSE = {re.compile(rf"\b(?:{pattern})\b", re.I): word for pattern, word in PROSE.items()}
_PHRASES = _PROSE | {re.compile(rf"{pattern}\b"): word for pattern, word in PHRASES.items()}
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


@cache
def in_name(name: str) -> tuple[str, ...]:
    """Words of the dialect in an identifier, with what to say instead."""
    words = [w.lower() for w in _WORD.findall(name.removeprefix("test_"))]
    text = " ".join(words)
    phrases = (f"{m.group(0)!r}: {say}" for rx, say in _PHRASES.items() if (m := rx.search(text)))
    return tuple(f"name {name!r}: {what}" for what in (*(repr(w) for w in words if w in NAMES), *phrases))


def finds(path: Path) -> list[tuple[int, str, str]]:
    """(line, word and what to say instead, the line) of every find in a file."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    found: set[tuple[int, str]] = set()
    if path.suffix not in CODE:
        for number, line in enumerate(lines, 1):
            found |= {(number, f"{m.group(0)!r}: {say}") for rx, say in _PROSE.items() for m in rx.finditer(line)}
        return [(number, what, lines[number - 1].strip()) for number, what in sorted(found)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.split("\n")):
                for rx, say in _PROSE.items():
                    found |= {(token.start[0] + offset, f"{m.group(0)!r}: {say}") for m in rx.finditer(line)}
        elif token.type == tokenize.NAME:
            found |= {(token.start[0], what) for what in in_name(token.string)}
    return [(number, what, lines[number - 1].strip()) for number, what in sorted(found)]


def main(arguments: list[str]) -> int:
    """Print all finds; 1 if there is one."""
    count = 0
    for base in arguments or PATHS:
        root = Path(base) if arguments else ROOT / base
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.suffix in SUFFIXES)
        for file in files:
            for number, what, line in finds(file) if file != Path(__file__) else ():
                print(f"{file}:{number}: {what}: {line[:110]}")
                count += 1
    if count:
        print(f"{count} finds; docs/index.md has the glossary", file=sys.stderr)
    return count > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
